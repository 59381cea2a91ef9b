"""What every backend promises: spaces, candidates, kernels and their code. A new backend joins `BACKENDS`."""

import itertools

import numpy as np
import pytest
from kernel_check import check, packed_operands, problem
from lowbit.kernels.backend import Backend, Kernel, Rejected, backend_named
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.cpu.backend import CpuBackend
from lowbit.kernels.errors import CompileError, DeviceError, LayoutError
from lowbit.kernels.problem import Problem
from lowbit.kernels.reference import make_operands

BACKENDS = [CpuBackend]
KEYS = ("attend h4/2 d64 q1 w8a8", "qk h4/2 d80 q3 w8a8", "sv h4/2 d80 q3 w8a8", "attend h4/2 d64 q1 fp16")


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda backend: backend.name)
def backend(request):
    return request.param()


@pytest.fixture(scope="module")
def spaces(backend):
    return {key: list(backend.space(problem(key), 2)) for key in KEYS}


def legal(entries):
    return [entry for entry in entries if not isinstance(entry, Rejected)]


def rejected(entries):
    return [entry for entry in entries if isinstance(entry, Rejected)]


def test_is_found_by_name(backend):
    assert isinstance(backend, Backend)
    assert type(backend_named(backend.name)) is type(backend)
    with pytest.raises(DeviceError, match="unknown device 'abacus'"):
        backend_named("abacus")


@pytest.mark.parametrize("key", KEYS)
def test_space_is_the_same_every_time(backend, spaces, key):
    again = itertools.islice(backend.space(problem(key), 2), 100)
    assert list(again) == spaces[key][:100]


@pytest.mark.parametrize("key", KEYS)
def test_names_tell_candidates_apart_and_parse_back(spaces, key):
    names = [(e.candidate if isinstance(e, Rejected) else e).name for e in spaces[key]]
    assert len(set(names)) == len(names)
    for candidate, name in zip(legal(spaces[key]), [e.name for e in legal(spaces[key])], strict=True):
        assert Candidate.parse(name) == candidate


def test_space_of_an_attention_problem_is_worth_searching(spaces):
    """Several hundred candidates: both π for keys and values, several packings and schedules, both pipelines."""
    found = legal(spaces[KEYS[0]])
    assert len(found) >= 300
    assert {c.k.pi for c in found} == {c.v.pi for c in found} == {"T", "D"}
    assert {c.pipeline for c in found} == {"integer", "float"}
    assert len({c.k.packing for c in found}) >= 2
    assert len({c.schedule for c in found}) >= 3
    assert len({c.k.order for c in found}) >= 5


@pytest.mark.parametrize("key", KEYS)
def test_candidates_have_the_operands_and_format_of_the_problem(spaces, key):
    p = problem(key)
    for candidate in legal(spaces[key]):
        assert (candidate.k is not None) == (p.operator in ("attend", "qk"))
        assert (candidate.v is not None) == (p.operator in ("attend", "sv"))
        formats = {layout.packing.format for layout in (candidate.k, candidate.v) if layout}
        assert formats == {p.stored("k").format}


def test_each_rejection_has_a_reason_of_one_line(spaces):
    reasons = [entry.reason for entries in spaces.values() for entry in rejected(entries)]
    assert reasons
    for reason in reasons:
        assert reason.strip()
        assert "\n" not in reason


def test_what_is_rejected_does_not_compile_for_the_same_reason(backend, spaces):
    p = problem(KEYS[1])
    for entry in rejected(spaces[KEYS[1]])[::40]:
        if entry.compiles:
            continue
        for attempt in (backend.compile, backend.code):
            with pytest.raises(CompileError) as caught:
                attempt(p, entry.candidate)
            assert entry.reason in str(caught.value)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("precision", ["fp16", "w8a8", "w4a8"])
@pytest.mark.parametrize("shape", ["attend h7/1 d80 q5", "qk h1/1 d8 q1", "sv h64/8 d128 q16", "attend h2/2 d256 q1"])
def test_baseline_is_legal_row_major_and_right(backend, precision, shape):
    p = problem(f"{shape} {precision}")
    for threads in (1, 2):
        baseline = backend.baseline(p, threads)
        assert baseline.pipeline == "float"
        assert baseline.schedule.threads == threads
        assert {layout.order for layout in (baseline.k, baseline.v) if layout} == {"T D"}
        assert backend.baseline(p, threads) == baseline
    check(p, baseline, 33, backend)


@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 72, 88, 136, 320, 1024])
def test_baseline_exists_for_every_head_dimension(backend, head_dim):
    for operator, precision in itertools.product(("attend", "qk", "sv"), ("fp16", "w8a8", "w4a8")):
        p = Problem(operator, 4, 2, head_dim, precision, 2)
        assert len(backend.code(p, backend.baseline(p, 2))) == (2 if operator == "attend" else 1)


@pytest.mark.parametrize("key", KEYS)
def test_what_is_in_the_space_compiles_and_is_right(backend, spaces, key):
    found = legal(spaces[key])
    for candidate in found[7 :: len(found) // 3]:
        check(problem(key), candidate, 49, backend)


def test_kernels_pack_and_run(backend, spaces):
    p = problem(KEYS[0])
    candidate = legal(spaces[KEYS[0]])[0]
    kernel = backend.compile(p, candidate)
    assert isinstance(kernel, Kernel)
    assert (kernel.problem, kernel.candidate) == (p, candidate)
    operands = make_operands(p, 20)
    packed = [kernel.pack(role, getattr(operands, role).dequantize(), capacity=40) for role in ("k", "v")]
    out = np.empty((4, 1, 64), np.float32)
    assert kernel(operands.x, *packed, out=out) is out
    np.testing.assert_array_equal(kernel(operands.x, *packed, tokens=20), out)
    np.testing.assert_array_equal(kernel(*packed_operands(p, candidate, operands)), out)
    with pytest.raises(LayoutError, match="'q'"):
        kernel.pack("q", operands.x)


@pytest.mark.parametrize("key", KEYS)
def test_code_names_its_role_and_what_an_iteration_does(backend, spaces, key):
    p = problem(key)
    found = legal(spaces[key])
    for candidate in found[:: len(found) // 4]:
        codes = backend.code(p, candidate)
        assert [code.role for code in codes] == [r for r in ("k", "v") if getattr(candidate, r) is not None]
        for code in codes:
            assert code.symbol in code.ir
            assert code.symbol in code.assembly
            assert code.values_per_iteration > 0
            assert code.rows == candidate.schedule.rows
            assert code.packing == getattr(candidate, code.role).packing.name


def test_identity_of_measurements_is_stable(backend):
    assert backend.target() == backend.target()
    assert backend.target()
    first, second = backend.toolchain(), type(backend)().toolchain()
    assert first == second
    assert "\n" not in first

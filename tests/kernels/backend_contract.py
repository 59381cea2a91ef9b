"""What every backend promises: spaces, candidates and their code, and kernels that compute the operators.

A backend's tests derive from these classes and say which backend they are for. Where a backend's kernels run in another
process than its compiler, as in a simulator, one test class derives from each.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from kernel_check import check, packed_operands, problem
from lowbit.kernels.backend import Backend, Kernel, Rejected, backend_named
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.errors import CompileError, DeviceError, LayoutError
from lowbit.kernels.problem import Problem
from lowbit.kernels.reference import make_operands

KEYS = ("attend h4/2 d64 q1 w8a8", "qk h4/2 d80 q3 w8a8", "sv h4/2 d80 q3 w8a8", "attend h4/2 d64 q1 fp16")


def legal(entries):
    return [entry for entry in entries if not isinstance(entry, Rejected)]


def rejected(entries):
    return [entry for entry in entries if isinstance(entry, Rejected)]


class Contract:
    """Fixtures of both contracts."""

    name = ""
    """What `backend_named` calls the backend."""

    least_candidates = 300
    """Of the first of `KEYS`."""

    code_every = 1
    """Code is made of every one or every few of the candidates that a test goes through, where it takes long."""

    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls):
        return backend_named(cls.name)

    @pytest.fixture(scope="class")
    @classmethod
    def spaces(cls, backend):
        return {key: list(backend.space(problem(key), 2)) for key in KEYS}


class CompilerContract(Contract):
    """What is promised without running a kernel."""

    def test_is_found_by_name(self, backend):
        assert isinstance(backend, Backend)
        assert type(backend_named(self.name)) is type(backend)
        assert backend_named(self.name).target() == backend.target()
        with pytest.raises(DeviceError, match="unknown device 'abacus'"):
            backend_named("abacus")

    @pytest.mark.parametrize("key", KEYS)
    def test_space_is_the_same_every_time(self, backend, spaces, key):
        again = itertools.islice(backend.space(problem(key), 2), 100)
        assert list(again) == spaces[key][:100]

    @pytest.mark.parametrize("key", KEYS)
    def test_names_tell_candidates_apart_and_parse_back(self, spaces, key):
        names = [(e.candidate if isinstance(e, Rejected) else e).name for e in spaces[key]]
        assert len(set(names)) == len(names)
        for candidate, name in zip(legal(spaces[key]), [e.name for e in legal(spaces[key])], strict=True):
            assert Candidate.parse(name) == candidate

    def test_space_of_an_attention_problem_is_worth_searching(self, spaces):
        """Hundreds of candidates: both π for keys and values, several packings and plans, both pipelines."""
        found = legal(spaces[KEYS[0]])
        assert len(found) >= self.least_candidates
        assert {c.k.pi for c in found} == {c.v.pi for c in found} == {"T", "D"}
        assert {c.pipeline for c in found} == {"integer", "float"}
        assert len({c.k.packing for c in found}) >= 2
        assert len({c.plan for c in found}) >= 3
        assert len({c.k.order for c in found}) >= 5

    @pytest.mark.parametrize("key", KEYS)
    def test_candidates_have_the_operands_and_format_of_the_problem(self, spaces, key):
        p = problem(key)
        for candidate in legal(spaces[key]):
            assert (candidate.k is not None) == (p.operator in ("attend", "qk"))
            assert (candidate.v is not None) == (p.operator in ("attend", "sv"))
            formats = {layout.packing.format for layout in (candidate.k, candidate.v) if layout}
            assert formats == {p.stored("k").format}

    def test_each_rejection_has_a_reason_of_one_line(self, spaces):
        reasons = [entry.reason for entries in spaces.values() for entry in rejected(entries)]
        assert reasons
        for reason in reasons:
            assert reason.strip()
            assert "\n" not in reason

    @pytest.mark.parametrize("key", KEYS)
    def test_what_is_rejected_does_not_compile_for_the_same_reason(self, backend, spaces, key):
        entries = [entry for entry in rejected(spaces[key]) if not entry.compiles]
        for entry in entries[:: -(-len(entries) // 8) or 1]:
            for attempt in (backend.compile, backend.code):
                with pytest.raises(CompileError) as caught:
                    attempt(problem(key), entry.candidate)
                assert entry.reason in str(caught.value)
                assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 72, 88, 136, 320, 1024])
    def test_baseline_exists_for_every_head_dimension(self, backend, head_dim):
        formats = itertools.product(("attend", "qk", "sv"), ("fp16", "w8a8", "w4a8"))
        for number, (operator, precision) in enumerate(formats):
            p = Problem(operator, 4, 2, head_dim, precision, 2)
            baseline = backend.baseline(p, 2)
            assert baseline.pipeline == "float"
            assert {layout.order for layout in (baseline.k, baseline.v) if layout} == {"T D"}
            if (number + head_dim // 8) % self.code_every == 0:
                assert "".join(code.role for code in backend.code(p, baseline)) == "".join(p.roles)

    @pytest.mark.parametrize("key", KEYS)
    def test_untuned_candidates_are_of_the_problem_and_the_baseline_is_the_last_of_them(self, backend, key):
        p = problem(key)
        found = list(backend.untuned(p, 2))
        assert found[-1] == backend.baseline(p, 2)
        assert len({each.name for each in found}) == len(found)
        for each in (found[0], found[len(found) // 2]):
            assert "".join(role for role in ("k", "v") if getattr(each, role)) == "".join(p.roles)
            assert backend.tiles(p, each)

    @pytest.mark.parametrize("key", KEYS)
    def test_code_names_its_role_and_what_an_iteration_does(self, backend, spaces, key):
        p = problem(key)
        found = legal(spaces[key])
        for candidate in found[:: len(found) // 4][:: min(self.code_every, 2)]:
            codes = backend.code(p, candidate)
            assert "".join(code.role for code in codes) == "".join(p.roles)
            symbols = backend.tiles(p, candidate)
            assert [backend.tile(p, candidate, symbol).symbol for symbol in symbols] == list(symbols)
            assert len(symbols) == len(codes)
            for code in codes:
                symbol = getattr(code, "entry", code.symbol)
                assert symbol in code.ir
                assert symbol in code.assembly
                assert code.values_per_iteration > 0
                assert code.rows == candidate.plan.rows
                assert code.packing == getattr(candidate, code.role[0]).packing.name

    def test_identity_of_measurements_is_stable(self, backend):
        assert backend.target() == backend.target()
        assert backend.target()
        first, second = backend.toolchain(), backend_named(self.name).toolchain()
        assert first == second
        assert "\n" not in first


class KernelContract(Contract):
    """What kernels that run compute."""

    shapes = ("attend h7/1 d80 q5", "qk h1/1 d8 q1", "sv h64/8 d128 q16", "attend h2/2 d256 q1")
    """Of problems whose baseline is checked, in each precision."""

    @staticmethod
    def small(candidate):
        """The candidate with as few tasks as a slow machine can run."""
        return candidate

    def pytest_generate_tests(self, metafunc):
        if "shape" in metafunc.fixturenames:
            metafunc.parametrize("shape", metafunc.cls.shapes)

    @pytest.mark.parametrize("precision", ["fp16", "w8a8", "w4a8"])
    def test_baseline_is_legal_row_major_and_right(self, backend, shape, precision):
        p = problem(f"{shape} {precision}")
        for threads in (1, 2):
            baseline = backend.baseline(p, threads)
            assert baseline.pipeline == "float"
            assert getattr(baseline.plan, "threads", threads) == threads
            assert {layout.order for layout in (baseline.k, baseline.v) if layout} == {"T D"}
            assert backend.baseline(p, threads) == baseline
        check(p, self.small(baseline), 33, backend)

    @pytest.mark.parametrize("key", KEYS)
    def test_what_is_in_the_space_compiles_and_is_right(self, backend, spaces, key):
        found = legal(spaces[key])
        for candidate in found[7 :: len(found) // 3]:
            check(problem(key), self.small(candidate), 49, backend)

    def test_kernels_pack_and_run(self, backend, spaces):
        p = problem(KEYS[0])
        candidate = self.small(legal(spaces[KEYS[0]])[0])
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

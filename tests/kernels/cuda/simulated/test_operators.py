"""Every operator in the simulator against float64: shapes, precisions, layouts, launches, masks, bounds."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from agreement import agree
from kernel_check import problem
from lowbit.kernels.backend import Rejected
from lowbit.kernels.candidate import Candidate, Launch
from lowbit.kernels.cuda.backend import CudaBackend
from lowbit.kernels.cuda.kernel import CudaKernel
from lowbit.kernels.cuda.memory import IllegalAccessError
from lowbit.kernels.cuda.space import KEY_ORDERS, VALUE_ORDERS, space
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import pack
from lowbit.kernels.problem import Problem
from lowbit.kernels.reference import make_operands
from pairwise import pairwise

TOKENS = (1, 31, 33, 97)


@functools.cache
def legal(p, arch="sm_86"):
    return [candidate for candidate in space(p, arch) if not isinstance(candidate, Rejected)]


def check(p, candidate, tokens, capacity=None, arch="sm_86", seed=0):
    """Run, compare with the reference, and return the result."""
    operands = make_operands(p, tokens, seed)
    packed = [pack(getattr(operands, role), getattr(candidate, role), capacity) for role in p.roles]
    result = CudaBackend(arch).compile(p, candidate)(operands.x, *packed)
    agree(p, operands, candidate.pipeline, result, f"{p.key}, {tokens} tokens: {candidate.name}")
    return result


def launched(candidate, **changes):
    return replace(candidate, plan=replace(candidate.plan, **changes))


SHAPES = pairwise(
    {
        "operator": ("attend", "qk", "sv"),
        "precision": ("fp16", "w8a8", "w4a8"),
        "head_dim": (64, 80, 96, 128, 256),
        "group": range(1, 9),
        "tokens": TOKENS,
    }
)


@pytest.mark.parametrize("row", SHAPES, ids=lambda row: "-".join(map(str, row.values())))
def test_shapes_and_precisions(row):
    """Every two of operator, precision, head dimension, group and tokens, each with another candidate of its space."""
    p = Problem(row["operator"], row["group"], 1, row["head_dim"], row["precision"])
    found = legal(p)
    place = SHAPES.index(row)
    candidate = found[place * len(found) // len(SHAPES)]
    splits = 2 if row["tokens"] == 97 else 1
    check(p, launched(candidate, splits=splits, warps=2), row["tokens"])


def of_layouts(p, k=None, v=None, pipeline="integer", **changes):
    """A candidate of ``p`` from layout names, with one key/value head's rows in one pass."""
    plan = replace(Launch(p.rows, 1, 4, 0, 1, 2), **changes)
    return Candidate(k and Layout.parse(k), v and Layout.parse(v), pipeline, plan)


def covering(found, traits):
    """Few of the candidates that have every trait that any has."""
    missing = {trait for candidate in found for trait in traits(candidate)}
    chosen = []
    while missing:
        best = max(found, key=lambda candidate: len(missing & traits(candidate)))
        missing -= traits(best)
        chosen.append(best)
    return chosen


def traits(candidate):
    """Order and packing of each role in each pipeline, and each count of the launch that is compiled in."""
    found = set()
    for role in ("k", "v"):
        layout = getattr(candidate, role)
        if layout is not None:
            found |= {(role, layout.order, candidate.pipeline), (role, layout.packing.name, candidate.pipeline)}
            found.add((role, layout.pad_bytes))
    found |= {(name, getattr(candidate.plan, name)) for name in ("lanes", "loads", "stages")}
    return found


COVERED = [
    (key, candidate)
    for key in ("attend h2/1 d64 q1 w4a8", "attend h2/1 d64 q1 w8a8", "attend h2/1 d64 q1 fp16", "gemv k128 c2 w4a8")
    for candidate in covering(legal(problem(key)), traits)
]


def test_the_covered_candidates_have_every_order():
    found = {candidate.k.order for key, candidate in COVERED if key.startswith("attend")}
    assert found == set(KEY_ORDERS)
    assert {candidate.v.order for _, candidate in COVERED if candidate.v} == set(VALUE_ORDERS)
    assert {candidate.pipeline for _, candidate in COVERED} == {"integer", "raw", "float"}


@pytest.mark.parametrize(("key", "candidate"), COVERED, ids=lambda value: getattr(value, "name", value))
def test_every_order_packing_and_launch_that_is_offered(key, candidate):
    p = problem(key)
    splits = 1 if p.operator == "gemv" else 2
    check(p, launched(candidate, splits=splits, warps=2), 65)


@pytest.mark.parametrize("tokens", [1, 5, 31, 32, 33, 64, 65, 200])
@pytest.mark.parametrize(("splits", "warps"), [(1, 1), (1, 4), (3, 1), (3, 2), (8, 2)])
def test_splits_and_warps_with_less_than_a_tile_each(tokens, splits, warps):
    p = problem("attend h2/1 d32 q1 w8a8")
    candidate = of_layouts(
        p, "T/32 D/16 t32 d16 | int8/bytes/signed", "T/4 D t4 | int8/bytes/signed", splits=splits, warps=warps
    )
    check(p, candidate, tokens)


@pytest.mark.parametrize("stages", [0, 2, 3])
def test_stages(stages):
    p = problem("attend h2/1 d64 q1 w4a8")
    found = [c for c in legal(p) if c.plan.stages == stages and c.pipeline == "integer"]
    for candidate in (found[0], found[-1]):
        for tokens, warps in ((33, 2), (161, 1), (161, 2)):
            check(p, launched(candidate, splits=1, warps=warps), tokens)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_other_architectures_compute_the_same(arch):
    p = problem("attend h2/1 d64 q1 w8a8")
    candidate = launched(legal(p, arch)[0], splits=2, warps=2)
    np.testing.assert_array_equal(check(p, candidate, 97, arch=arch), check(p, candidate, 97))


def test_stages_need_asynchronous_copies():
    p = problem("attend h2/1 d64 q1 w8a8")
    assert not any(candidate.plan.stages for candidate in legal(p, "sm_75"))
    assert any(candidate.plan.stages for candidate in legal(p, "sm_80"))


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_passes_of_rows(rows):
    """Rows of one pass divide the rows or leave a rest; grouped heads and query positions are both rows."""
    p = problem("attend h10/2 d64 q1 w8a8")
    check(p, launched(legal(p)[0], rows=rows, splits=1, warps=1), 33)


MASKS = ("q3", "q5", "q2 {} window 1", "q2 {} window 7", "q1 {} window 40", "q4 {} window 33", "q2 {} softcap 2")
MASKS += ("q3 {} window 20 softcap 30", "q2 {} softcap 1e5", "q1 {} softcap 1e30")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("precision", ["w8a8", "fp16"])
def test_causal_rows_windows_and_soft_caps(mask, precision):
    """Contexts shorter than the block of query rows, a few tokens longer, and longer than a window and a tile."""
    rows, _, rest = mask.partition(" {}")
    p = problem(f"attend h2/1 d64 {rows} {precision}{rest}")
    candidate = legal(p)[0]
    for tokens, splits in ((1, 1), (4, 1), (34, 1), (97, 3)):
        check(p, launched(candidate, splits=splits, warps=2), tokens)


@pytest.mark.parametrize("precision", ["fp16", "w8a8", "w4a8"])
@pytest.mark.parametrize(("columns", "vectors"), [(64, 1), (96, 3), (320, 2), (576, 1), (128, 16)])
def test_matrices(columns, vectors, precision):
    p = Problem("gemv", 1, 1, columns, precision, vectors)
    found = covering(legal(p), lambda c: {(c.pipeline, c.plan.splits > 1)})
    for candidate in found[:3]:
        check(p, launched(candidate, warps=2), 35)


@pytest.mark.parametrize("precision", ["w8a8+w4a8", "w4a8+fp16", "fp16+w8a8"])
def test_keys_and_values_of_two_precisions(precision):
    p = problem(f"attend h3/1 d64 q1 {precision}")
    found = legal(p)
    for candidate in found[:: len(found) // 3]:
        check(p, launched(candidate, splits=2, warps=1), 65)


@pytest.mark.parametrize("operator", ["attend", "qk", "sv", "gemv"])
def test_more_room_than_tokens(operator):
    """Storage beyond the tokens is not looked at, nor written to; fewer tokens may be asked than there are."""
    p = Problem("gemv", 1, 1, 64, "w8a8") if operator == "gemv" else Problem(operator, 2, 1, 64, "w8a8")
    candidate = launched(legal(p)[0], splits=1, warps=2)
    np.testing.assert_array_equal(check(p, candidate, 33, capacity=200), check(p, candidate, 33))
    operands = make_operands(p, 97)
    packed = [pack(getattr(operands, role), getattr(candidate, role)) for role in p.roles]
    for operand in packed:  # what lies past the tokens that are asked for must not matter
        operand.scales[:, 64 * operand.groups :] = np.float16(np.nan)
    kernel = CudaBackend().compile(p, candidate)
    first = operands.first(40)
    agree(p, first, candidate.pipeline, kernel(first.x, *packed, tokens=40), operator)


def test_an_access_outside_the_operands_is_found():
    """A kernel that is told of more tokens than there is room for leaves its operands, and the simulator says so."""
    p = problem("qk h1/1 d64 q1 w8a8")
    candidate = launched(legal(p)[0], splits=1, warps=1)
    operands = make_operands(p, 32)
    kernel = CudaBackend().compile(p, candidate)
    constants = kernel.program.constants

    class Program:
        def __getattr__(self, name):
            return getattr(kernel.program, name)

        def constants(self, tokens):
            return {**constants(tokens), "tokens": 320}

    wrong = CudaKernel(Program(), ())
    with pytest.raises(IllegalAccessError, match="illegal memory access"):
        wrong(operands.x, pack(operands.k, candidate.k))


@pytest.mark.parametrize("operator", ["attend", "sv"])
def test_tiny_queries_and_weights_are_not_taken_for_zeros(operator):
    p = problem(f"{operator} h4/2 d64 q1 w8a8")
    candidate = launched(next(each for each in legal(p) if each.pipeline == "integer"), splits=1, warps=1)
    operands = make_operands(p, 33)
    operands = replace(operands, x=operands.x * np.float32(1e-30))
    packed = [pack(getattr(operands, role), getattr(candidate, role)) for role in p.roles]
    result = CudaBackend("sm_86").compile(p, candidate)(operands.x, *packed)
    agree(p, operands, candidate.pipeline, result, p.key)

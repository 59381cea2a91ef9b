from __future__ import annotations

import math

import numpy as np
import pytest
from fake_backend import LAYOUTS, PROBLEM, FakeKernel, candidate
from lowbit.kernels.problem import Problem
from lowbit.kernels.reference import make_operands, reference, tolerance
from lowbit.search import check
from lowbit.search.check import AWKWARD_TOKENS, awkward, expect
from lowbit.search.operands import PackedOperands

PROBLEMS = [
    *(Problem(operator, 6, 3, 40, precision) for operator in ("attend", "qk", "sv") for precision in ("fp16", "w4a8")),
    Problem("attend", 6, 3, 40, "w8a8+w4a8", 2, window=16, softcap=20.0),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.key)
@pytest.mark.parametrize("pipeline", ["float", "integer"])
def test_head_by_head_the_reference_is_the_whole_one(problem: Problem, pipeline: str) -> None:
    if pipeline == "integer" and problem.precision == "fp16":
        pytest.skip("fp16 has no integer codes")
    operands = make_operands(problem, 50, 3)
    expectation = expect(problem, operands, pipeline)
    whole = reference(problem, operands, pipeline)
    assert expectation.error(whole) == 0
    assert expectation.tolerance == pytest.approx(min(tolerance(problem, operands, pipeline), check.LARGEST_TOLERANCE))
    for head in range(problem.heads):
        wrong = whole.copy()
        wrong[head] *= 1.25
        assert expectation.error(wrong) == pytest.approx(0.25)


def test_long_contexts_compare_the_first_and_last_head_and_look_for_nan_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "FULL_CHECK_VALUES", 10)
    problem = PROBLEMS[0]
    operands = make_operands(problem, 50)
    expectation = expect(problem, operands, "float")
    whole = reference(problem, operands, "float")
    errors = []
    for head in range(problem.heads):
        wrong = whole.copy()
        wrong[head] *= 1.25
        errors.append(expectation.error(wrong))
    assert errors == pytest.approx([0.25, 0.25, 0, 0, 0.25, 0.25])
    whole[3, 0, 7] = np.nan
    assert expectation.error(whole) == math.inf
    assert expectation.error(whole[:, :, :-1]) == math.inf


def test_large_matrices_compare_the_first_and_last_rows_and_some_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "FULL_CHECK_VALUES", 40 * 16)
    problem = Problem("gemv", 1, 1, 40, "w8a8", 2)
    operands = make_operands(problem, 101)
    expectation = expect(problem, operands, "integer")
    whole = reference(problem, operands, "integer")
    assert expectation.error(whole) < 1e-12
    seen = []
    for row in range(101):
        wrong = whole.copy()
        wrong[:, :, row] += 1e6
        seen.append(expectation.error(wrong) > expectation.tolerance)
    assert seen[:4] == seen[-4:] == [True] * 4
    assert 12 <= sum(seen) <= 16
    assert max(np.diff(np.flatnonzero(seen))) < 16
    assert expectation.error(whole[:, :, :-1]) == expectation.error(whole[:, :1]) == math.inf
    whole[0, 0, 50] = np.inf
    assert expectation.error(whole) == math.inf


def test_rows_of_large_matrices_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.kernels.reference.DISTINCT_VALUES", 100 * 8)
    operands = make_operands(Problem("gemv", 1, 1, 8, "w8a8"), 250)
    assert operands.k is not None
    assert operands.k.codes.shape == (1, 250, 8)
    np.testing.assert_array_equal(operands.k.codes[0, :149], operands.k.codes[0, 101:])
    np.testing.assert_array_equal(operands.k.scales[0, :149], operands.k.scales[0, 101:])
    assert len(np.unique(operands.k.codes[0, :101], axis=0)) > 90
    whole = make_operands(Problem("gemv", 1, 1, 8, "w8a8"), 90).k
    assert whole is not None
    assert len(np.unique(whole.codes[0], axis=0)) > 80


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.key)
def test_a_result_of_zeros_never_passes(problem: Problem) -> None:
    for tokens, expectation in awkward(problem, "float"):
        zeros = np.zeros_like(reference(problem, expectation.operands, "float"))
        nothing_to_compute = tokens == 1 and problem.operator != "qk" and problem.head_dim <= 32
        assert expectation.error(zeros) > expectation.tolerance or nothing_to_compute


def test_awkward_lengths_are_prefixes_of_one_set_of_operands() -> None:
    lengths = dict(awkward(PROBLEMS[0], "float"))
    assert tuple(lengths) == AWKWARD_TOKENS
    longest = lengths[AWKWARD_TOKENS[-1]].operands
    assert longest.k is not None
    for tokens, expectation in lengths.items():
        assert expectation.operands.k is not None
        np.testing.assert_array_equal(expectation.operands.k.codes, longest.k.codes[:, :tokens])


def test_copies_share_no_packed_memory_and_keep_the_values() -> None:
    operands = make_operands(PROBLEM, 60)
    packed = PackedOperands(operands, 1 << 30)
    kernel = FakeKernel(PROBLEM, candidate(1))
    arguments = packed.arguments(kernel, 3)
    assert len(arguments) == 3 and all(each[0] is operands.x for each in arguments)
    words = [operand.words for each in arguments for operand in each[1:]]
    assert len({each.ctypes.data for each in words}) == 6
    assert all(each.ctypes.data % 64 == 0 for each in words)
    assert operands.k is not None and operands.v is not None
    for _, k, v in arguments:
        np.testing.assert_array_equal(k.quantized().codes, operands.k.codes)
        np.testing.assert_array_equal(v.quantized().codes, operands.v.codes)
    assert packed.nbytes(kernel) == arguments[0][1].nbytes + arguments[0][2].nbytes


@pytest.mark.parametrize("precision", ["fp16", "w8a8", "w4a8"])
def test_quantising_what_codes_stand_for_gives_back_the_very_codes(precision: str) -> None:
    from lowbit.kernels.quantize import quantize

    problem = Problem("attend", 2, 1, 72, precision)
    operands = make_operands(problem, 300)
    assert operands.k is not None
    again = quantize(operands.k.dequantize(), problem.stored("k"))
    np.testing.assert_array_equal(again.codes, operands.k.codes)
    np.testing.assert_array_equal(again.scales, operands.k.scales)


def test_layouts_beyond_the_limit_are_dropped_oldest_first() -> None:
    operands = make_operands(PROBLEM, 64)
    kernels = [FakeKernel(PROBLEM, candidate(1, layout=layout)) for layout in LAYOUTS]
    sizes = [PackedOperands(operands, 0).nbytes(kernel) for kernel in kernels]
    assert sizes[1] <= sizes[2]
    packed = PackedOperands(operands, sizes[0] + sizes[2])
    first, second = (packed.arguments(kernel)[0] for kernel in kernels[:2])
    assert packed.arguments(kernels[0])[0][1] is first[1]  # used again: the second is now the oldest
    packed.arguments(kernels[2])
    assert packed.arguments(kernels[0])[0][1] is first[1]
    assert packed.arguments(kernels[1])[0][1] is not second[1]

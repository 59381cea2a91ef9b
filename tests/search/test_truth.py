"""What kernels are held to: the operators' reference, or what their author says."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_backend import FakeBackend
from lowbit.kernels.cpu.user import UserBackend
from lowbit.kernels.problem import Problem
from lowbit.kernels.user import Trial
from lowbit.search.check import AWKWARD_TOKENS
from lowbit.search.truth import Truth, UserTruth, truth_of

KERNELS = str(Path(__file__).parents[1] / "kernels")
if KERNELS not in sys.path:
    sys.path.insert(0, KERNELS)

import own_kernels  # noqa: E402

SCORED = own_kernels.scored


def test_a_backend_of_somebodys_kernel_is_held_to_what_its_author_says() -> None:
    assert type(truth_of(FakeBackend(), 0)) is Truth
    assert type(truth_of(UserBackend(SCORED), 0)) is UserTruth


def test_operators_are_checked_on_prefixes_of_one_set_of_operands() -> None:
    truth, problem = Truth(0), Problem("qk", 2, 1, 64, "w8a8")
    assert (truth.lengths(100), truth.lengths(1), truth.lengths(4096)) == ([100, 99], [1], [4096])
    operands = truth.operands(problem, 100)
    shorter = truth.expect(problem, operands, 99, "float")
    assert shorter.expected[0].values.shape == (2, 1, 99)
    found = truth.awkward(problem, "float")
    assert [tokens for tokens, _, _ in found] == list(AWKWARD_TOKENS)
    assert len({id(packed) for _, _, packed in found}) == 1


def test_inputs_are_made_for_each_length_and_judged_on_what_the_codes_stand_for() -> None:
    truth, problem = UserTruth(SCORED, 3), SCORED.problem("w4a8")
    assert truth.lengths(100) == [100]
    for tokens, expectation, packed in truth.awkward(problem, "integer"):
        trial, k = packed.operands.x, packed.operands.k
        assert isinstance(trial, Trial) and k is not None and k.codes.shape == (2, tokens, 40)
        q = trial.inputs.arrays["q"].astype(np.float64)
        exact = 0.5 * np.einsum("hrd,htd->hrt", q, k.dequantize())
        np.testing.assert_allclose(expectation.expected[0].values, exact, rtol=1e-12)
        assert expectation.tolerance == SCORED.tolerance
    again = truth.operands(problem, 97).k
    assert again is not None and k is not None
    np.testing.assert_array_equal(again.codes, k.codes)
    other = UserTruth(SCORED, 4).operands(problem, 97).k
    assert other is not None and not np.array_equal(other.codes, k.codes)


def test_one_wrong_value_of_many_is_an_error() -> None:
    truth, problem = UserTruth(SCORED, 0), SCORED.problem("w8a8")
    expectation = truth.expect(problem, truth.operands(problem, 1000), 1000, "integer")
    right = expectation.expected[0].values.astype(np.float32)
    assert expectation.error(right) < 1e-6
    wrong = right.copy()
    wrong[1, 2, 999] += 0.5 * np.abs(right).max()
    assert expectation.error(wrong) == pytest.approx(0.5, rel=1e-5)
    wrong[0, 0, 0] = np.nan
    assert expectation.error(wrong) == math.inf
    assert expectation.error(right[:, :, :-1]) == math.inf

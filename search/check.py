"""Whether a compiled kernel computes what it should, before anyone times it.

A kernel meets context lengths that fit no tile, then the length that it is to be tuned for. Long contexts are compared
on the first and the last key/value head only, and large matrices on some of their rows: the float64 reference of all of
them would take longer than the tuning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.problem import Problem
from ..kernels.quantize import Quantized
from ..kernels.reference import Operands, error, make_operands, reference, tolerance

AWKWARD_TOKENS = (1, 31, 33, 97)
"""Below, around and past one block of 32; none is a multiple of a tile."""
LARGEST_TOLERANCE = 0.5
"""A result of zeros has an error of 1: whatever a bound on rounding allows, nothing near that is a result."""
FULL_CHECK_VALUES = 4 << 20
"""Packed values of one operand up to which all heads, or all rows of a matrix, are compared."""


@dataclass(frozen=True)
class Expected:
    """What one key/value head's query heads should give.

    Attributes
    ----------
    heads : slice
        The query heads.
    values : ndarray of float64
    rows : ndarray of int64, optional
        Of a matrix the rows that are compared, its last one being the highest; None for all.
    """

    heads: slice
    values: NDArray[np.float64]
    rows: NDArray[np.int64] | None = None

    def error(self, result: NDArray[np.floating[Any]]) -> float:
        """Largest relative error; infinite if the shape is wrong."""
        part = result[self.heads]
        if self.rows is not None:
            if part.shape[2] != self.rows[-1] + 1:
                return math.inf
            part = part[:, :, self.rows]
        return error(part, self.values)


@dataclass(frozen=True)
class Expectation:
    """Operands of one context length and what the operator makes of them in one pipeline."""

    operands: Operands
    expected: tuple[Expected, ...]
    tolerance: float

    def error(self, result: NDArray[np.floating[Any]]) -> float:
        """Largest relative error of ``result``; infinite if a value anywhere is not finite or the shape is wrong."""
        if result.ndim != 3 or not np.isfinite(result).all():
            return math.inf
        return max(each.error(result) for each in self.expected)


def expect(problem: Problem, operands: Operands, pipeline: str) -> Expectation:
    """Compute the reference for ``operands``, one key/value head at a time to bound the memory it takes."""
    if problem.operator == "gemv" and operands.k is not None and operands.k.codes.size > FULL_CHECK_VALUES:
        return _expect_rows(problem, operands, operands.k, pipeline)
    parts, limit = [], 0.0
    for head in _heads_to_check(problem, operands):
        heads = slice(head * problem.group, (head + 1) * problem.group)
        part = Operands(operands.x[heads], _head(operands.k, head), _head(operands.v, head))
        alone = replace(problem, heads=problem.group, kv_heads=1)
        parts.append(Expected(heads, reference(alone, part, pipeline)))
        limit = max(limit, tolerance(alone, part, pipeline))
    return Expectation(operands, tuple(parts), min(limit, LARGEST_TOLERANCE))


def _expect_rows(problem: Problem, operands: Operands, matrix: Quantized, pipeline: str) -> Expectation:
    """Of a matrix's rows the first, the last, and others spread evenly over it."""
    rows = matrix.codes.shape[1]
    count = max(FULL_CHECK_VALUES // problem.head_dim // 4, 1)
    spread = np.linspace(0, rows - 1, 2 * count).astype(np.int64)
    chosen = np.unique(np.concatenate([np.arange(count), rows - 1 - np.arange(count), spread]).clip(0, rows - 1))
    some = Quantized(matrix.format, matrix.codes[:, chosen], matrix.scales[:, chosen])
    part = Operands(operands.x, some, None)
    expected = Expected(slice(None), reference(problem, part, pipeline), chosen)
    return Expectation(operands, (expected,), min(tolerance(problem, part, pipeline), LARGEST_TOLERANCE))


def awkward(problem: Problem, pipeline: str, seed: int = 0) -> Iterator[tuple[int, Expectation]]:
    """Expectations at `AWKWARD_TOKENS`, all on prefixes of one set of operands, which comes last."""
    operands = make_operands(problem, AWKWARD_TOKENS[-1], seed)
    for tokens in AWKWARD_TOKENS:
        yield tokens, expect(problem, operands.first(tokens), pipeline)


def _heads_to_check(problem: Problem, operands: Operands) -> list[int]:
    some = operands.k if operands.k is not None else operands.v
    assert some is not None  # each operator packs at least one operand
    if some.codes.size <= FULL_CHECK_VALUES:
        return list(range(problem.kv_heads))
    return sorted({0, problem.kv_heads - 1})


def _head(quantized: Quantized | None, head: int) -> Quantized | None:
    if quantized is None:
        return None
    part = slice(head, head + 1)
    return Quantized(quantized.format, quantized.codes[part], quantized.scales[part])

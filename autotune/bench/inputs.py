"""The float inputs that every contestant gets, and what float64 makes of what a contestant stored of them.

Each process makes its own copy from the same seed, a part at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...kernels.reference import error, probabilities, softmax_scale
from .case import Case, Part

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Stored = Callable[[str, Part], Float64]
"""What a contestant stored: values (rows, head_dim) of a role's part, exactly as its codes and scales say."""

OUTLIER = {"k": 4.0, "v": 2.0}
SPREAD = {"k": 0.15, "v": 0.4}
"""How uneven rows are: the standard deviation of the logarithm of their size."""
BIAS = {"k": 0.5, "v": 0.0}
"""Standard deviation of the channels' means. Values have none: llama.cpp sums fp16 ones in 16 bits, where many terms of
one sign drown each other at a few thousand tokens already, and it should be timed."""


def small_operand(case: Case, seed: int = 0) -> Float32:
    """Queries, or vectors: (heads, query_rows, head_dim)."""
    problem = case.problem
    rng = np.random.default_rng([seed, 0, case.tokens, problem.head_dim])
    return rng.standard_normal((problem.heads, problem.query_rows, problem.head_dim), np.float32)


def values(case: Case, role: str, part: Part, seed: int = 0) -> Float32:
    """Rows of one operand: (rows, head_dim). Uneven rows, a bias of each channel and an outlier channel."""
    head_dim = case.problem.head_dim
    kind = 1 + ("k", "v").index(role)
    common = np.random.default_rng([seed, kind, part.head, head_dim])
    bias = common.normal(0, BIAS[role], head_dim).astype(np.float32)
    rng = np.random.default_rng([seed, kind, part.head, part.start, case.tokens, head_dim])
    rows = rng.standard_normal((part.stop - part.start, head_dim), np.float32)
    rows *= np.exp(rng.normal(0, SPREAD[role], (len(rows), 1))).astype(np.float32)
    rows += bias
    rows[:, common.integers(head_dim)] *= OUTLIER[role]
    return rows


def truth(case: Case, x: Float32, stored: Stored) -> Float64:
    """The operator in float64: (heads, query_rows, head_dim) or, for ``gemv``, (1, vectors, rows)."""
    if case.problem.operator == "gemv":
        rows = [x[0].astype(np.float64) @ stored("k", part).T for part in case.parts()]
        return np.concatenate(rows, axis=1)[None]
    group, problem = case.problem.group, case.problem
    alone = replace(problem, heads=group, kv_heads=1)
    out = np.empty((problem.heads, problem.query_rows, problem.head_dim))
    for head in range(problem.kv_heads):
        heads, parts = slice(head * group, (head + 1) * group), [p for p in case.parts() if p.head == head]
        keys = np.concatenate([stored("k", part) for part in parts])
        scores = x[heads].astype(np.float64) @ keys.T * softmax_scale(problem.head_dim)
        weights = probabilities(alone, scores)
        out[heads] = sum(weights[:, :, part.start : part.stop] @ stored("v", part) for part in parts)
    return out


def relative_error(result: NDArray[np.floating], expected: Float64) -> float:
    """Largest ‖result − expected‖ / ‖expected‖ over rows; infinite for NaN, infinity or another shape."""
    return error(result, expected)

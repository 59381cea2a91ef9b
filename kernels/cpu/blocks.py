"""Schedules for blocks of positions over layouts that were chosen for one.

What a cache or a matrix lies in is chosen for decoding, a position at a time. A prompt is read many positions at a
time, over the same layouts, with as many rows in a pass as the registers or the matrix unit serve.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from ..candidate import Candidate, Schedule
from ..problem import MAX_QUERY_ROWS, Problem
from . import space
from .isa import Isa
from .matrix import MOST_ROWS

ROWS = (8, 4, 2, 1)
"""Rows of a pass that vectors contract, the most first."""

TOKENS = 256
"""Tokens of a cache between two updates of the softmax."""

MATRIX_BYTES = 128 << 10
"""Of a matrix that all positions pass over before the next rows are read: a part of a core's own cache."""


@functools.lru_cache(256)
def for_block(problem: Problem, candidate: Candidate, positions: int, isa: Isa) -> Candidate:
    """``candidate`` with a schedule for blocks of so many positions.

    Parameters
    ----------
    problem : Problem
        The one that the candidate was chosen for.
    candidate : Candidate
    positions : int
    isa : Isa
    """
    rows = positions if problem.operator == "gemv" else problem.group * positions
    wide = replace(problem, query_rows=min(positions, MAX_QUERY_ROWS))
    given = candidate.schedule
    if problem.operator == "gemv":
        row_bytes = max(problem.head_dim * problem.stored("k").bits // 8, 1)
        block = max(32, min(256, MATRIX_BYTES // row_bytes // 32 * 32))
    else:
        block = TOKENS
    steps = ([MOST_ROWS] if isa.matrix and rows >= MOST_ROWS else []) + [step for step in ROWS if step <= rows]
    found = candidate
    for step in steps:
        for registers in (2, 1):
            schedule = Schedule(step, registers, block, given.splits, given.prefetch, given.threads)
            found = replace(candidate, plan=schedule)
            if space.rejection(wide, found, isa) is None and space.unpromising(wide, found, isa) is None:
                return found
    return found

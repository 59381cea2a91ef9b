"""Schedules of a matrix times vectors.

A matrix has one head, so that threads share its rows: there are at least as many splits as threads, and more of them
even out what the system takes from one thread. It is read once a call, from memory as a rule, and more lines are on
their way if they are asked for: most schedules prefetch, a few kilobytes ahead. Which number of vectors a pass serves,
and how many rows pass under all vectors before the next ones are read, only matters for more vectors than a pass can
serve.
"""

from __future__ import annotations

from dataclasses import replace

from ..candidate import Candidate, Schedule
from ..problem import Problem
from .isa import Isa
from .matrix import MOST_ROWS
from .spec import MOST_VECTOR_ROWS

MOST_VECTORS = 4
"""Vectors in one pass of the middle schedule."""

PREFETCH = 48
"""Lines ahead of the middle schedule."""

BLOCK_BYTES = 256 << 10
"""Of a matrix that all vectors pass over before the next rows are read: what stays in a core's own cache."""


def schedules(problem: Problem, isa: Isa, threads: int) -> list[Schedule]:
    """A middle schedule, and one change at a time from it."""
    vectors = problem.query_rows
    whole = min(vectors, MOST_VECTORS)
    row_bytes = max(problem.head_dim * problem.stored("k").bits // 8, 1)
    block = max(32, min(256, BLOCK_BYTES // row_bytes // 32 * 32))
    registers = 1 if isa.registers <= 16 else 2
    middle = Schedule(rows=whole, registers=registers, block=block, splits=threads, prefetch=PREFETCH, threads=threads)
    changes = [
        middle,
        *(replace(middle, registers=count) for count in (1, 2, 4)),
        *(replace(middle, splits=each * threads) for each in (4, 16) if threads > 1),
        *(replace(middle, prefetch=lines) for lines in (0, 16, 96)),
        replace(middle, splits=1, threads=1),
    ]
    if vectors > 2:
        changes += [replace(middle, rows=rows, registers=1) for rows in (2, 4, 8) if rows <= vectors]
    if isa.matrix and vectors > MOST_VECTOR_ROWS:
        changes += [replace(middle, rows=MOST_ROWS, registers=count) for count in (1, 2)]
    if vectors > whole:
        changes += [replace(middle, block=32), replace(middle, registers=1, block=32)]
    return list(dict.fromkeys(changes))


def unpromising(problem: Problem, candidate: Candidate, isa: Isa) -> str | None:
    """Why a candidate is not worth trying although others of its layout are, or None."""
    if candidate.pipeline == "integer" or not problem.integer("k", "integer"):
        return None
    middle = schedules(problem, isa, candidate.schedule.threads)[0]
    if candidate.schedule in (middle, replace(middle, registers=1)):
        return None
    return "K: codes that are widened in the hot loop bound its speed, whatever else the schedule changes"

"""What the cost model reads about one call of one candidate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

from ..kernels.candidate import Candidate
from ..kernels.problem import Problem, check_tokens
from .assembly import CLASSES
from .tile import TileCounts
from .traffic import call_bytes, layout_of, stored_channels, visible_tokens, walked_tokens

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Features:
    """One call of one candidate at one context length; totals are over all heads.

    Attributes
    ----------
    bytes : int
        Distinct cache lines of packed operands and scales, times the line size.
    working_set_bytes : int
        ``bytes`` and the float32 operands and results that the caller passes.
    instructions : dict of str to float
        Instructions executed in tile functions, for each class of `lowbit.costmodel.assembly.CLASSES`. One that
        computes on a memory operand is in two classes.
    unpack_ops : float
        Unpacking instructions executed.
    unpack_ops_per_32 : float
        Unpacking instructions for each 32 values, the mean over the packed operands.
    exponentials : int
        Softmax values computed, two for each score that is capped; 0 for operators without a softmax.
    tasks : int
        Pieces of work that can run in parallel: key/value heads × splits, or a matrix's splits.
    threads : int
        Threads that share the tasks.
    prefetched : bool
        Whether the code prefetches; if not, that is left to the hardware.
    """

    bytes: int
    working_set_bytes: int
    instructions: dict[str, float]
    unpack_ops: float
    unpack_ops_per_32: float
    exponentials: int
    tasks: int
    threads: int
    prefetched: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` is the inverse."""
        return {**vars(self), "instructions": dict(self.instructions)}

    def from_memory(self, cache_bytes: int) -> Self:
        """The same call with operands that no cache holds, however small they are.

        Parameters
        ----------
        cache_bytes : int
            The device's largest cache.
        """
        return replace(self, working_set_bytes=max(self.working_set_bytes, 2 * cache_bytes))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**{**values, "instructions": dict(values["instructions"])})


def features(
    problem: Problem, candidate: Candidate, tokens: int, tiles: Iterable[TileCounts], line_bytes: int
) -> Features:
    """Features of one call.

    Each packed operand is walked once for every ``tile.rows`` rows of the small operand, whole 32-token blocks and
    whole channel blocks at a time; each loop of a tile function states how many values one iteration stands for.

    Parameters
    ----------
    problem : Problem
    candidate : Candidate
    tokens : int
        Context length.
    tiles : iterable of TileCounts
        The candidate's tile functions, one for each packed operand; `lowbit.costmodel.tile.count` counts one.
    line_bytes : int
        Cache line size of the device.

    Raises
    ------
    LayoutError
        If the candidate lacks a layout that the operator or a tile needs.
    ProblemError
        If ``tokens`` is no context length.
    """
    walked = walked_tokens(problem, check_tokens(tokens))
    instructions = dict.fromkeys(CLASSES, 0.0)
    unpack_ops, per_32 = 0.0, []
    for tile in tiles:
        channels = stored_channels(layout_of(candidate, tile.role), problem.head_dim)
        passes = -(-problem.rows // tile.rows)
        values = problem.kv_heads * walked * channels * passes
        block = min(candidate.schedule.block, walked)
        for kind, count in tile.executed(values, channels, block).items():
            instructions[kind] += count
        per_32.append(tile.unpack_ops_per_32)
        unpack_ops += per_32[-1] * values / 32
    traffic = call_bytes(problem, candidate, tokens, line_bytes)
    return Features(
        bytes=traffic,
        working_set_bytes=traffic + _small_operand_bytes(problem, tokens),
        instructions=instructions,
        unpack_ops=unpack_ops,
        unpack_ops_per_32=sum(per_32) / len(per_32) if per_32 else 0.0,
        exponentials=_exponentials(problem, tokens),
        tasks=problem.kv_heads * candidate.schedule.splits,
        threads=candidate.schedule.threads,
        prefetched=candidate.schedule.prefetch > 0,
    )


def _exponentials(problem: Problem, tokens: int) -> int:
    if problem.operator != "attend":
        return 0
    # tanh is an exponential and a division.
    each = 2 if problem.softcap else 1
    return each * problem.heads * problem.query_rows * visible_tokens(problem, tokens)


def _small_operand_bytes(problem: Problem, tokens: int) -> int:
    """Float32 operand and result: channels or scores, for every query head and position."""
    rows = problem.heads * problem.query_rows
    width = 2 * problem.head_dim if problem.operator == "attend" else problem.head_dim + tokens
    return rows * width * FLOAT_BYTES

"""Which stored winner answers a question best: the order, apart from loading and compiling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2

from ..db.records import Winner
from ..kernels.candidate import Candidate
from ..kernels.problem import Problem

HOW = ("exact", "nearest", "family", "other_device", "default")
"""In order of preference. ``exact``: a winner's token range holds the context length. ``nearest``: another length of
the same problem. ``family``: the same operator, precision and head dimension with other heads, query rows, window or
soft-cap, or a matrix with other columns. ``other_device``: any of these from a device of the same instruction set.
``default``: the untuned baseline."""


@dataclass(frozen=True)
class Choice:
    """What to use, and how it was found.

    Attributes
    ----------
    winner : Winner or None
        The stored choice; None for the default.
    candidate : Candidate
        What to compile. Differs from the winner's only in threads, if another device had more cores.
    how : str
        One of `HOW`.
    stale : bool
        Whether the winner comes from another toolchain, so that its timings may no longer hold.
    """

    winner: Winner | None
    candidate: Candidate
    how: str
    stale: bool = False


@dataclass(frozen=True)
class Entry:
    """A winner seen from one problem on one device.

    Attributes
    ----------
    stale : bool
        See `Choice`.
    distance : float
        See `distance`; 0 for the same problem.
    octave : float
        log2 of the winner's context length.
    """

    winner: Winner
    candidate: Candidate
    stale: bool
    distance: float
    octave: float


@dataclass(frozen=True)
class Pools:
    """Entries of the same problem, of its family, and from other devices."""

    same: tuple[Entry, ...]
    family: tuple[Entry, ...]
    others: tuple[Entry, ...]


def related(one: Problem, other: Problem) -> bool:
    """Whether two problems are of one family; matrices are, whatever their columns."""
    if (one.operator, one.precision) != (other.operator, other.precision):
        return False
    return one.operator == "gemv" or one.head_dim == other.head_dim


def distance(one: Problem, other: Problem) -> float:
    """Octaves between two problems of one family.

    Another window or soft-cap counts as one octave: what is read lies as it would otherwise.
    """
    octaves = (log2(a / b) for a, b in ((one.rows, other.rows), (one.kv_heads, other.kv_heads)))
    shape = sum(map(abs, octaves)) + abs(log2(one.head_dim / other.head_dim))
    return shape + (one.window != other.window) + (one.softcap != other.softcap)


def ranked(pools: Pools, tokens: int) -> Iterator[Choice]:
    """Stored choices for a context length, best first.

    Within the same problem a range that holds the length outweighs a current toolchain, because the length decides
    most which layout wins; what was measured outweighs a prediction, and then the nearest length wins.
    """
    octave = log2(tokens)

    def near(entry: Entry) -> tuple[bool, float, str]:
        return entry.winner.provenance == "predicted", abs(entry.octave - octave), entry.winner.candidate

    def within(entry: Entry) -> tuple[bool, bool, bool, float, str]:
        return not entry.winner.covers(tokens), entry.stale, *near(entry)

    def across(entry: Entry) -> tuple[bool, float, bool, bool, float, str]:
        return entry.stale, entry.distance, not entry.winner.covers(tokens), *near(entry)

    for entry in sorted(pools.same, key=within):
        how = "exact" if entry.winner.covers(tokens) else "nearest"
        yield Choice(entry.winner, entry.candidate, how, entry.stale)
    for entry in sorted(pools.family, key=across):
        yield Choice(entry.winner, entry.candidate, "family", entry.stale)
    for entry in sorted(pools.others, key=across):
        yield Choice(entry.winner, entry.candidate, "other_device", entry.stale)

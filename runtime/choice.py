"""Which stored winner answers a question best: the order, apart from loading and compiling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import isqrt, log2

from ..db.records import Winner
from ..kernels.candidate import Candidate
from ..kernels.problem import MOST_TOKENS, Problem

HOW = ("exact", "nearest", "family", "other_device", "predicted", "default")
"""In order of preference. ``exact``: a winner's token range holds the context length. ``nearest``: another length of
the same problem. ``family``: the same operator, precision and head dimension with other heads, query rows, window or
soft-cap, or a matrix with other columns. ``other_device``: any of these from a device of the same instruction set.
``predicted``: nothing like it was tuned, but the database has a cost model of this device and counts of code that price
untuned candidates. ``default``: what usually wins on devices of this kind, and the baseline if that does not
compile."""

UNTUNED_LENGTHS = (128, 512, 2048, 8192, 32768, 131_072, 524_288)
"""Context lengths for which untuned candidates are priced: others take the nearest one's."""


@dataclass(frozen=True)
class Choice:
    """What to use, and how it was found.

    Attributes
    ----------
    winner : Winner or None
        The stored choice; None for what is ``predicted`` and for the default.
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

    @property
    def starts(self) -> tuple[int, ...]:
        """Context lengths at which the order of choices may change, the first one 1.

        It does where a range begins or ends, and halfway in log space between two tuned lengths. Halfway marks are
        rows of their own, for there names decide.
        """
        found = {1}
        lengths = set()
        for entry in (*self.same, *self.family, *self.others):
            found.add(entry.winner.tokens_from)
            if entry.winner.tokens_to is not None:
                found.add(entry.winner.tokens_to + 1)
            lengths.add(entry.winner.tokens)
        for low, high in (*combinations(sorted(lengths), 2), *pairwise(UNTUNED_LENGTHS)):
            middle = isqrt(low * high)
            found.update((middle, middle + 1, middle + 2))
        return tuple(sorted(start for start in found if start <= MOST_TOKENS))


def untuned_length(tokens: int) -> int:
    """The one of `UNTUNED_LENGTHS` that is nearest in log space."""
    distances = {length: abs(log2(length / tokens)) for length in UNTUNED_LENGTHS}
    return min(distances, key=distances.__getitem__)


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

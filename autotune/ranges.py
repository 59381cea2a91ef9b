"""From winners at measured context lengths to winners for every length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from math import isqrt

from ..db.records import Winner, may_replace
from ..db.store import Store


def with_ranges(winners: Iterable[Winner]) -> list[Winner]:
    """The same winners, one for each context length, with ranges that cover every length once.

    Neighbours meet halfway in log space, at the geometric mean of their lengths; the first range begins at 1 and the
    last has no end.
    """
    ordered = sorted(winners, key=lambda w: w.tokens)
    cuts = [isqrt(low.tokens * high.tokens) for low, high in pairwise(ordered)]
    starts = [1, *(cut + 1 for cut in cuts)]
    ends = [*cuts, None]
    return [replace(w, tokens_from=start, tokens_to=end) for w, start, end in zip(ordered, starts, ends, strict=True)]


def store_winner(store: Store, winner: Winner) -> None:
    """Keep ``winner``, and let the stored winners of the same problem, device and toolchain make room for it."""
    stored = {w.tokens: w for w in store.winners(winner.device, winner.problem) if w.toolchain == winner.toolchain}
    kept = stored.get(winner.tokens)
    if kept is None or may_replace(winner.provenance, kept.provenance):
        stored[winner.tokens] = winner
    for each in with_ranges(stored.values()):
        store.put_winner(each)

"""Whether a problem's best layout changes with its length, and why or why not: read from what a database holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from ..db.records import Winner
from ..kernels.candidate import Candidate
from ..kernels.errors import LayoutError
from ..search.strategy import PREDICTED_TIE
from .output import length_name
from .target import stored_prices

if TYPE_CHECKING:
    from ..db.store import Store

PROTOCOLS = ("cold", "warm")
_SAME = 1e-6
"""How near a prediction must be to the stored one to be called the same."""


@dataclass(frozen=True)
class Phase:
    """A range of lengths in which one layout is best.

    Attributes
    ----------
    layout : str
    tokens_from, tokens_to : int, int or None
        Inclusive; None leaves the end open.
    tokens : tuple of int
        Lengths in the range that were tuned.
    """

    layout: str
    tokens_from: int
    tokens_to: int | None
    tokens: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "tokens": list(self.tokens)}


@dataclass(frozen=True)
class Length:
    """What is known at one length.

    Attributes
    ----------
    tokens : int
    layout : str
        The winner's.
    times_us : mapping of str to float
        Best time of each layout: measured where the winner is, else predicted. Empty if nothing else is known.
    limit : str
        What the winner's time is mostly spent on; empty if unknown.
    """

    tokens: int
    layout: str
    times_us: Mapping[str, float]
    limit: str = ""

    def slower(self, layout: str) -> float:
        """By how much ``layout`` is slower than the winner's; NaN if unknown."""
        best = self.times_us.get(self.layout, math.nan)
        return self.times_us.get(layout, math.nan) / best - 1

    @property
    def runner_up(self) -> str | None:
        """The fastest other layout."""
        others = [(time_us, layout) for layout, time_us in self.times_us.items() if layout != self.layout]
        return min(others)[1] if others else None


@dataclass(frozen=True)
class Phases:
    """One problem's layouts on one device.

    Attributes
    ----------
    device, problem : str
    phases : tuple of Phase
        In the order of their lengths; neighbours differ.
    reason : str
        Why the layout changes, or why it does not.
    """

    device: str
    problem: str
    phases: tuple[Phase, ...]
    reason: str

    @property
    def changes(self) -> bool:
        return len(self.phases) > 1

    def as_dict(self) -> dict[str, Any]:
        layouts = [each.as_dict() for each in self.phases]
        return {"problem": self.problem, "changes": self.changes, "layouts": layouts, "reason": self.reason}


def phases_in(store: Store, winners: Iterable[Winner]) -> list[Phases]:
    """Of each problem on each device, those of its newest toolchain, in the order of ``winners``."""
    families: dict[tuple[str, str], list[Winner]] = {}
    for winner in winners:
        families.setdefault((winner.device, winner.problem), []).append(winner)
    found = []
    for family in families.values():
        newest = max(family, key=lambda w: w.created).toolchain
        found.append(_phases_of(store, sorted((w for w in family if w.toolchain == newest), key=lambda w: w.tokens)))
    return found


def _phases_of(store: Store, winners: Sequence[Winner]) -> Phases:
    first = winners[0]
    phases = []
    for layout, group in groupby(winners, key=lambda w: _layout(w.candidate)):
        own = list(group)
        phases.append(Phase(layout, own[0].tokens_from, own[-1].tokens_to, tuple(w.tokens for w in own)))
    lengths = [_length(store, winner) for winner in winners]
    return Phases(first.device, first.problem, tuple(phases), reason(lengths, length_name(first.problem)))


def _length(store: Store, winner: Winner) -> Length:
    layout = _layout(winner.candidate)
    if winner.provenance == "predicted":
        return _predicted(store, winner, layout)
    place = winner.device, winner.problem, winner.tokens, winner.toolchain
    measured = store.measurements(*place, protocol=winner.protocol)
    times = ((m.candidate, m.median_us) for m in measured if m.status == "ok" and m.median_us is not None)
    return Length(winner.tokens, layout, _best(times))


def _predicted(store: Store, winner: Winner, layout: str) -> Length:
    """With the times of all layouts, if the model that predicted the winner is still the one at hand."""
    rows = store.features(winner.device, winner.problem, winner.tokens, winner.toolchain)
    try:
        threads = Candidate.parse(winner.candidate).plan.size[0]
    except LayoutError:
        threads = 1
    prices = stored_prices(store, winner.device, threads)
    if prices is None or winner.predicted_us is None or winner.candidate not in rows:
        return Length(winner.tokens, layout, {})
    try:
        known = {name: prices.restored(row) for name, row in rows.items()}
    except (KeyError, TypeError):  # another release's form
        return Length(winner.tokens, layout, {})
    for protocol in PROTOCOLS:
        features = [prices.as_timed(each, protocol) for each in known.values()]
        times = dict(zip(rows, map(float, prices.predict_us(features)), strict=True))
        if abs(times[winner.candidate] / winner.predicted_us - 1) < _SAME:
            own = prices.as_timed(known[winner.candidate], protocol)
            return Length(winner.tokens, layout, _best(times.items()), prices.limit(own))
    return Length(winner.tokens, layout, {})


def _best(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    best: dict[str, float] = {}
    for name, time_us in times:
        layout = _layout(name)
        best[layout] = min(best.get(layout, math.inf), time_us)
    return best


def _layout(candidate: str) -> str:
    """As `Candidate.layout`, also of a packing that this process does not know."""
    return candidate.rsplit("; ", 2)[0]


def reason(lengths: Sequence[Length], unit: str = "tokens") -> str:
    """Why the layout changes from length to length, or why it does not.

    Parameters
    ----------
    lengths : sequence of Length
        In ascending order.
    unit : str
        What a length counts.
    """
    if len(lengths) == 1:
        return f"tuned at one length, {lengths[0].tokens} {unit}"
    steps = [(low, high) for low, high in pairwise(lengths) if low.layout != high.layout]
    if not steps:
        return "; ".join([f"one layout at all lengths{_limits(lengths, unit)}", *_rivals(lengths, unit)])
    said = []
    for low, high in steps:
        costs = [
            f"{which} layout is {_percent(cost)} slower at {tokens}"
            for which, cost, tokens in (
                ("the first", high.slower(low.layout), high.tokens),
                ("the second", low.slower(high.layout), low.tokens),
            )
            if not math.isnan(cost)
        ]
        between = f"changes between {low.tokens} and {high.tokens} {unit}"
        said.append(f"{between}: {', '.join(costs)}" if costs else between)
    return "; ".join([*said, *_one_for_all(lengths)])


def _rivals(lengths: Sequence[Length], unit: str) -> list[str]:
    """How near other layouts come where the layout stays: those that tie somewhere, and the first that does not."""
    nearest: dict[str, tuple[float, int]] = {}
    for each in lengths:
        for layout in each.times_us:
            slower = each.slower(layout)
            if layout != each.layout and not math.isnan(slower):
                nearest[layout] = min(nearest.get(layout, (math.inf, 0)), (slower, each.tokens))
    tied = sorted((place, layout) for layout, place in nearest.items() if place[0] <= PREDICTED_TIE)
    others = sorted((place, layout) for layout, place in nearest.items() if place[0] > PREDICTED_TIE)
    said = []
    if tied:
        (slower, tokens), layout = tied[0]
        ties = f" and {len(tied) - 1} more tie" if len(tied) > 1 else " ties"
        said.append(f"{layout}{ties} with it, at {tokens} {unit} for instance")
    if others:
        (slower, tokens), layout = others[0]
        next_one = "the nearest that does not" if tied else "the nearest other one"
        said.append(f"{next_one}, {layout}, is {_percent(slower)} slower where it comes closest, at {tokens} {unit}")
    return said


def _one_for_all(lengths: Sequence[Length]) -> list[str]:
    """What the best single layout would cost, where that is known of any."""
    common = set.intersection(*(set(each.times_us) for each in lengths))
    if not common:
        return []
    worst = {layout: max(each.slower(layout) for each in lengths) for layout in sorted(common)}
    layout = min(worst, key=worst.__getitem__)
    return [f"one layout for all lengths, {layout}, would cost at most {_percent(worst[layout])}"]


def _limits(lengths: Sequence[Length], unit: str) -> str:
    """What limits the winner: ``, limited by memory``, with lengths if that changes."""
    if not all(each.limit for each in lengths):
        return ""
    runs = [(limit, [each.tokens for each in group]) for limit, group in groupby(lengths, key=lambda each: each.limit)]
    if len(runs) == 1:
        return f", limited by {runs[0][0]}"
    parts = [f"by {limit} up to {tokens[-1]} {unit}" for limit, tokens in runs[:-1]]
    return f", limited {', '.join(parts)}, by {runs[-1][0]} beyond"


def _percent(share: float) -> str:
    """A slow-down in words: what the model cannot tell apart is called a tie."""
    share = max(share, 0.0)
    text = f"{share:.1%}" if share < 0.1 else f"{share:.0%}"
    return f"{text} (a tie)" if share <= PREDICTED_TIE else text

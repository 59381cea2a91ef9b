"""When a growing cache changes its layout: greedily, without knowing how long it will grow.

Tokens never move, so a change opens a segment for those to come and the others stay as they are. Every so often the
cost of going on in the tail's layout is compared with that of the best new segment, over as many further tokens as
there have been: a decode that has lasted n tokens is taken to last n more. A new segment has to save a share of that
cost, and may only be opened when the context has grown by a factor since the tail was, so that a cache of n tokens has
O(log n) segments whatever the prices are and however they tremble.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from ..kernels.candidate import Candidate
from ..search.plan import Plan
from .prices import HasLayouts

OUTLOOK = 4096
"""Tokens that a decode is taken to last at least, where no limit is known. Layouts differ by microseconds in short
contexts and by a share of the time in long ones, so that expecting too much costs less than expecting too little."""


class Prices(Protocol):
    """As much of `lowbit.runtime.prices.LayoutPrices` as is needed."""

    @property
    def candidates(self) -> Sequence[Candidate]: ...

    def candidate(self, layouts: HasLayouts) -> Candidate | None: ...

    def segment_s(self, candidate: Candidate, tokens: int) -> float: ...

    def growth_s(self, candidate: Candidate, tokens: int) -> float: ...


class PhaseSwitcher:
    """Which layouts new tokens of one cache lie in. Keeps nothing of the cache; not for several threads at once.

    Parameters
    ----------
    prices : Prices
    period : int
        Tokens between two comparisons.
    hysteresis : float
        Share of the cost of going on that a new segment has to save.
    growth : float
        Factor by which the context must have grown since the tail was opened, more than 1.
    horizon : int, optional
        Context length that cannot be exceeded.
    outlook : int, optional
        Tokens that a decode is taken to last at least: half the horizon unless given, or `OUTLOOK` without one.
    """

    def __init__(
        self,
        prices: Prices,
        period: int = 256,
        hysteresis: float = 0.01,
        growth: float = 3.0,
        horizon: int | None = None,
        outlook: int | None = None,
    ) -> None:
        if outlook is None:
            outlook = OUTLOOK if horizon is None else max(horizon // 2, 1)
        if period < 1 or growth <= 1 or outlook < 1 or hysteresis < 0:
            raise ValueError(
                f"period {period} and outlook {outlook} must be at least 1, growth {growth} above 1 and "
                f"hysteresis {hysteresis} not negative"
            )
        self._prices = prices
        self.period, self.hysteresis, self.growth = period, hysteresis, growth
        self.outlook, self.horizon = outlook, horizon
        self._compared: tuple[HasLayouts, int, int] | None = None
        self._decided: Candidate | None = None

    def most_segments(self, tokens: int) -> int:
        """How many segments a cache of ``tokens`` tokens has at most, if it was never truncated."""
        return 1 + sum(1 for start in self._earliest_starts(tokens) if start < tokens)

    def layout_at(self, segments: Sequence[tuple[HasLayouts, int]], tokens: int, ahead: int = 0) -> Candidate:
        """In which layouts the next token should lie.

        Cheap between two comparisons; a comparison takes tens of microseconds.

        Parameters
        ----------
        segments : sequence of (layouts, int)
            The cache's segments and their tokens, oldest first.
        tokens : int
            The cache's length: their sum, and what a window dropped.
        ahead : int
            Tokens that are known to come at least, such as a prompt's.
        """
        if not segments:
            return self._first(ahead)
        start = tokens - segments[-1][1]
        turn = (segments[-1][0], start, tokens // self.period)
        if self._decided is None or self._compared != turn or ahead:
            self._compared = turn
            self._decided = self._compare(segments[-1][0], start, tokens, ahead)
        return self._decided

    def _first(self, ahead: int) -> Candidate:
        outlook = self._outlook(0, ahead)
        return min(self._prices.candidates, key=lambda each: self._prices.growth_s(each, outlook))

    def _compare(self, tail: HasLayouts, start: int, tokens: int, ahead: int) -> Candidate:
        prices = self._prices
        outlook = self._outlook(tokens, ahead)
        opened, other = min(
            ((prices.growth_s(each, outlook), each) for each in prices.candidates), key=lambda priced: priced[0]
        )
        current = prices.candidate(tail)
        if current is None:
            return other  # Nobody knows what the tail's layout costs.
        if tokens < self._earliest(start) or other == current:
            return current
        length = tokens - start
        going_on = prices.growth_s(current, length + outlook) - prices.growth_s(current, length)
        opening = opened + outlook * prices.segment_s(current, length)
        return other if opening < (1 - self.hysteresis) * going_on else current

    def _outlook(self, tokens: int, ahead: int) -> int:
        outlook = max(tokens, self.outlook, ahead)
        return outlook if self.horizon is None else max(min(outlook, self.horizon - tokens), 1)

    def _earliest(self, start: int) -> int:
        """Context length from which on a tail that was opened at ``start`` may be followed by another segment."""
        return max(2 * self.period, math.ceil(self.growth * start))

    def _earliest_starts(self, tokens: int) -> Sequence[int]:
        starts = [self._earliest(0)]
        while starts[-1] < tokens:
            starts.append(self._earliest(starts[-1]))
        return starts


def plan_of(switcher: PhaseSwitcher, horizon: int, prompt: int = 0) -> Plan[Candidate]:
    """What a switcher does while a context grows to ``horizon`` tokens one by one, after a prompt at once."""
    segments: list[tuple[Candidate, int]] = []
    plan: list[tuple[int, Candidate]] = []
    tokens = 0
    while tokens < horizon:
        chosen = switcher.layout_at(segments, tokens, ahead=prompt - tokens if tokens < prompt else 0)
        if not segments or segments[-1][0] != chosen:
            plan.append((tokens, chosen))
            segments.append((chosen, 0))
        count = max(prompt - tokens, 1)
        segments[-1] = chosen, segments[-1][1] + count
        tokens += count
    return Plan(tuple(plan))

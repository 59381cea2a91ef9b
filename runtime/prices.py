"""What a decode step's attention costs in each layout: the curves that a change of layout is decided by.

A call over several segments costs what a call costs that reads nothing, and for each segment what reading it adds and
an overhead. Prices come from measured medians where there are any, else from a shipped cost model. What was measured
at few lengths follows the model's curve, or that of the fastest layouts, at the others.

What segments add is made concave, for segments share caches and threads: tokens of one layout are not read faster for
being cut in two, though noise, or a cache that one call fills and two do not, may make it look so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..kernels.candidate import Candidate
from ..kernels.layout import Layout
from .curve import Curve

SEGMENT_OVERHEAD_S = 1e-6
"""What another segment costs a call besides reading it, unless it was measured."""

LENGTHS = tuple(32 << i for i in range(16))
"""Where a model is asked: piecewise linear between."""

UNMEASURED = 1.1
"""Ratio to the fastest that is assumed of a candidate at lengths where it was not measured."""

Points = Mapping[Candidate, Mapping[int, float]]
"""Seconds of a call by candidate and tokens."""


class HasLayouts(Protocol):
    """A candidate, or a segment's pair of layouts."""

    @property
    def k(self) -> Layout | None: ...
    @property
    def v(self) -> Layout | None: ...


class LayoutPrices:
    """Prices of one layer's attention for every pair of layouts. Immutable; safe to use from several threads.

    Parameters
    ----------
    curves : mapping of Candidate to Curve
        Seconds of a call over one segment. One candidate for each pair of layouts.
    overhead_s : float
        See `SEGMENT_OVERHEAD_S`.
    provenance : str
        ``measured``, ``stale`` (measured with another toolchain), ``predicted`` or ``default`` (one layout alone, whose
        price is made up).

    Attributes
    ----------
    candidates : tuple of Candidate
    call_s : float
        What a call costs that reads nothing.
    """

    def __init__(
        self,
        curves: Mapping[Candidate, Curve],
        overhead_s: float = SEGMENT_OVERHEAD_S,
        provenance: str = "measured",
    ) -> None:
        self.candidates = tuple(curves)
        self.overhead_s, self.provenance = overhead_s, provenance
        self.call_s = min(curve.at(0) for curve in curves.values())
        self._calls = dict(curves)
        self._segments = {each: curve.shifted(overhead_s - self.call_s).concave() for each, curve in curves.items()}
        self._by_layouts = {(each.k, each.v): each for each in curves}

    def candidate(self, layouts: HasLayouts) -> Candidate | None:
        """What reads a pair of layouts; None if it has no price."""
        return self._by_layouts.get((layouts.k, layouts.v))

    def price_s(self, candidate: Candidate, tokens: int) -> float:
        """Seconds of one layer's attention in a decode step over ``tokens`` tokens, all in one segment."""
        return self._calls[candidate].at(tokens)

    def segment_s(self, candidate: Candidate, tokens: int) -> float:
        """What a segment of ``tokens`` tokens adds to a call, its overhead included."""
        return self._segments[candidate].at(tokens)

    def segments_s(self, candidate: Candidate, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """`segment_s` of each."""
        return self._segments[candidate].many(tokens)

    def growth_s(self, candidate: Candidate, tokens: int) -> float:
        """Sum of `segment_s` while a segment grows from 1 to ``tokens`` tokens."""
        return self._segments[candidate].total(tokens)

    def step_s(self, segments: Iterable[tuple[Candidate, int]]) -> float:
        """Seconds of one layer's attention over segments of so many tokens each."""
        return self.call_s + sum(self.segment_s(candidate, tokens) for candidate, tokens in segments)


def prices_from(
    measured: Points, model: Callable[[Iterable[Candidate], int], Mapping[Candidate, float]] | None = None
) -> dict[Candidate, Curve]:
    """A curve for each pair of layouts that was measured, of its fastest candidates.

    Parameters
    ----------
    measured : mapping of Candidate to mapping of int to float
        Seconds by tokens.
    model : callable, optional
        Predicts seconds of those candidates that it can, at a context length. Only the shape of its curve counts.
    """
    layouts: dict[tuple[Layout | None, Layout | None], list[Candidate]] = {}
    for candidate in measured:
        layouts.setdefault((candidate.k, candidate.v), []).append(candidate)
    fastest: dict[Candidate, dict[int, float]] = {}
    for own in layouts.values():
        times: dict[int, float] = {}
        for candidate in own:
            for tokens, seconds in measured[candidate].items():
                times[tokens] = min(times.get(tokens, math.inf), seconds)
        chosen = min(own, key=lambda each: (_slowness(measured[each], times), each.name))
        fastest[chosen] = dict(sorted(times.items()))
    lengths = sorted({*LENGTHS, *(tokens for times in fastest.values() for tokens in times)})
    shapes = _predicted(fastest, lengths, model) if model is not None else {}
    common = _envelope(fastest)
    curves = {}
    for candidate, times in fastest.items():
        shape = shapes.get(candidate, common)
        ratios = [seconds / shape.at(tokens) for tokens, seconds in times.items()]
        scale = np.interp(np.log(lengths), np.log(list(times)), ratios)
        knots = {tokens: shape.at(tokens) * float(ratio) for tokens, ratio in zip(lengths, scale, strict=True)}
        curves[candidate] = Curve(knots | times)
    return curves


def _slowness(own: Mapping[int, float], best: Mapping[int, float]) -> float:
    """Mean ratio to the fastest of the same layouts; where it was not measured, somewhat slower is assumed."""
    return sum(own[tokens] / seconds if tokens in own else UNMEASURED for tokens, seconds in best.items()) / len(best)


def _predicted(
    candidates: Iterable[Candidate],
    lengths: Iterable[int],
    model: Callable[[Iterable[Candidate], int], Mapping[Candidate, float]],
) -> dict[Candidate, Curve]:
    """Curves of those candidates that the model knows."""
    knots: dict[Candidate, dict[int, float]] = {}
    for tokens in lengths:
        for candidate, seconds in model(candidates, tokens).items():
            knots.setdefault(candidate, {})[tokens] = seconds
    return {candidate: Curve(own) for candidate, own in knots.items()}


def predicted_curves(
    candidates: Iterable[Candidate],
    model: Callable[[Iterable[Candidate], int], Mapping[Candidate, float]],
) -> dict[Candidate, Curve]:
    """Curves by prediction alone, the first candidate of each pair of layouts."""
    first: dict[tuple[Layout | None, Layout | None], Candidate] = {}
    for candidate in candidates:
        first.setdefault((candidate.k, candidate.v), candidate)
    return _predicted(list(first.values()), LENGTHS, model)


def _envelope(times: Points) -> Curve:
    """The fastest time at each length where something was measured."""
    knots: dict[int, float] = {}
    for own in times.values():
        for tokens, seconds in own.items():
            knots[tokens] = min(knots.get(tokens, math.inf), seconds)
    return Curve(knots)

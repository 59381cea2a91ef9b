"""Times over context lengths: piecewise linear, never falling, and summed over many lengths at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray


class Curve:
    """Seconds at every context length, linear between knots and beyond the last one. Immutable.

    Parameters
    ----------
    knots : mapping of int to float
        Seconds by tokens, at least one of more than 0 tokens. Times that fall with the length are noise and are raised
        to the one before. Without a knot at 0 the line through the first two goes on to it, but not below 0 s.
    """

    def __init__(self, knots: Mapping[int, float]) -> None:
        points = sorted(knots.items())
        if points[-1][0] < 1:
            raise ValueError("a curve needs a time of at least one token")
        if points[0][0] > 0:
            (low, first), (high, second) = (points[0], points[1]) if len(points) > 1 else ((0, 0.0), points[0])
            slope = (second - first) / (high - low)
            points.insert(0, (0, max(0.0, points[0][1] - points[0][0] * max(slope, 0.0))))
        self.tokens = tuple(tokens for tokens, _ in points)
        self.seconds = tuple(accumulate((seconds for _, seconds in points), max))
        areas = (
            (high - low) * (first + second) / 2
            for (low, high), (first, second) in zip(pairwise(self.tokens), pairwise(self.seconds), strict=True)
        )
        self._areas = (0.0, *accumulate(areas))

    def at(self, tokens: int) -> float:
        """Seconds at one length."""
        piece, slope = self._piece(tokens)
        return self.seconds[piece] + slope * (tokens - self.tokens[piece])

    def total(self, tokens: int) -> float:
        """Sum of `at` over the lengths 1 to ``tokens``, exact since knots are whole lengths."""
        piece, slope = self._piece(tokens)
        rest = tokens - self.tokens[piece]
        area = self._areas[piece] + rest * (self.seconds[piece] + slope * rest / 2)
        return area + (self.at(tokens) - self.seconds[0]) / 2

    def many(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """`at` of each."""
        inner = np.interp(tokens, self.tokens, self.seconds)
        beyond = np.maximum(np.asarray(tokens) - self.tokens[-1], 0)
        return np.asarray(inner + beyond * self._piece(self.tokens[-1])[1])

    def shifted(self, seconds: float) -> Curve:
        """The same with ``seconds`` more at each length."""
        return Curve({t: s + seconds for t, s in zip(self.tokens, self.seconds, strict=True)})

    def concave(self) -> Curve:
        """The lowest curve above this one whose slope never rises."""
        kept: list[tuple[int, float]] = []
        for tokens, seconds in zip(self.tokens, self.seconds, strict=True):
            while len(kept) > 1 and _slope(kept[-2], kept[-1]) <= _slope(kept[-1], (tokens, seconds)):
                kept.pop()
            kept.append((tokens, seconds))
        return Curve(dict(kept))

    def _piece(self, tokens: int) -> tuple[int, float]:
        """Index of the knot before, and the slope behind it."""
        piece = min(bisect_right(self.tokens, tokens), len(self.tokens) - 1) - 1
        run = self.tokens[piece + 1] - self.tokens[piece]
        return piece, (self.seconds[piece + 1] - self.seconds[piece]) / run


def _slope(low: tuple[int, float], high: tuple[int, float]) -> float:
    return (high[1] - low[1]) / (high[0] - low[0])

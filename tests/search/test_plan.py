"""The best plan against every plan, and its price against decoding step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.search.plan import Plan, optimal_plan, plan_cost
from numpy.typing import NDArray


@dataclass
class Prices:
    """Any prices at all: of layout i, ``table[i][n]`` for a segment of n tokens."""

    table: Sequence[Sequence[float]]
    call_s: float = 0.0

    @property
    def candidates(self) -> Sequence[int]:
        return range(len(self.table))

    def segments_s(self, candidate: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray(self.table[candidate], np.float64)[tokens]


def decoded(prices: Prices, plan: Plan[int], horizon: int, prompt: int) -> float:
    """Step by step: the token is appended, then every segment is read."""
    lengths: list[tuple[int, int]] = []
    starts = dict(plan.segments)
    total = 0.0
    for position in range(horizon):
        if position in starts:
            lengths.append((starts[position], 0))
        lengths[-1] = lengths[-1][0], lengths[-1][1] + 1
        if position >= prompt:
            total += prices.call_s + sum(prices.table[layout][tokens] for layout, tokens in lengths)
    return total


def plans(horizon: int, step: int, layouts: int) -> Iterator[Plan[int]]:
    def grow(segments: tuple[tuple[int, int], ...], position: int) -> Iterator[Plan[int]]:
        if position >= horizon:
            yield Plan(segments)
            return
        yield from grow(segments, position + step)
        for layout in range(layouts):
            if layout != segments[-1][1]:
                yield from grow((*segments, (position, layout)), position + step)

    for layout in range(layouts):
        yield from grow(((0, layout),), step)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Prices, int, int, int]:
    horizon = draw(st.integers(1, 12))
    step = draw(st.integers(max(1, horizon // 5), 6))
    layouts = draw(st.integers(1, 3))
    seconds = st.lists(st.floats(0, 100), min_size=horizon + 1, max_size=horizon + 1)
    table = draw(st.lists(seconds, min_size=layouts, max_size=layouts))
    return Prices(table, draw(st.floats(0, 3))), horizon, step, draw(st.integers(0, horizon))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_no_plan_costs_less_and_costs_are_those_of_decoding(case: tuple[Prices, int, int, int]) -> None:
    prices, horizon, step, prompt = case
    best = optimal_plan(prices, horizon, step, prompt)
    cost = plan_cost(prices, best, horizon, prompt)
    every = list(plans(horizon, step, len(prices.table)))
    assert best in every
    for plan in every:
        expected = decoded(prices, plan, horizon, prompt)
        assert plan_cost(prices, plan, horizon, prompt) == pytest.approx(expected, abs=1e-9)
        assert cost <= expected + 1e-9


def test_a_layout_for_the_beginning_and_one_for_the_rest() -> None:
    # Before the 8th token the first costs nothing, and from then on a lot; the second costs a constant.
    prices = Prices([[0] * 8 + [1000] * 60, [10] * 68])
    assert optimal_plan(prices, 60, step=1).segments == ((0, 0), (7, 1))


@pytest.mark.parametrize(
    "segments", [(), ((1, 0),), ((0, 0), (5, 1), (5, 0)), ((0, 0), (10, 1)), ((0, 0), (4, 1), (2, 0))]
)
def test_what_is_no_plan_has_no_price(segments: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="ascend from 0 to less than 10"):
        plan_cost(Prices([[1] * 11, [1] * 11]), Plan(segments), 10)


def test_a_horizon_or_step_of_nothing_is_refused() -> None:
    for horizon, step in ((0, 1), (5, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            optimal_plan(Prices([[1] * 6]), horizon, step)

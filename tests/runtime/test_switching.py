"""Greedy switching: near the best plan, and never flapping."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.cpu.backend import CpuBackend
from lowbit.kernels.layout import Layout
from lowbit.kernels.problem import Problem
from lowbit.runtime.curve import Curve
from lowbit.runtime.prices import HasLayouts, LayoutPrices
from lowbit.runtime.segment import KVLayout
from lowbit.runtime.switching import PhaseSwitcher, plan_of
from lowbit.search.plan import optimal_plan, plan_cost

LAYOUTS = list(CpuBackend("avx2").untuned(Problem("attend", 9, 3, 64, "w8a8"), 2))[:4]
SHORT, LONG = LAYOUTS[:2]


def lines(*terms: tuple[float, float], overhead_s: float = 1e-6) -> LayoutPrices:
    """Of each layout microseconds of a call, and nanoseconds of a token."""
    curves = {
        layout: Curve({0: call * 1e-6, 1000: call * 1e-6 + token * 1e-6})
        for layout, (call, token) in zip(LAYOUTS, terms, strict=False)
    }
    return LayoutPrices(curves, overhead_s)


class Trembling:
    """Prices that are others each time they are asked for."""

    def __init__(self, seed: int) -> None:
        self.candidates: Sequence[Candidate] = LAYOUTS
        self._random = random.Random(seed)

    def candidate(self, layouts: HasLayouts) -> Candidate | None:
        return next((each for each in LAYOUTS if (each.k, each.v) == (layouts.k, layouts.v)), None)

    def segment_s(self, candidate: Candidate, tokens: int) -> float:
        return self._random.random() * tokens

    def growth_s(self, candidate: Candidate, tokens: int) -> float:
        return self._random.random() * tokens**2


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(64, 512), st.floats(2.5, 5))
def test_even_trembling_prices_open_few_segments(seed: int, period: int, growth: float) -> None:
    switcher = PhaseSwitcher(Trembling(seed), period=period, growth=growth, hysteresis=0)
    plan = plan_of(switcher, 10_000)
    starts = [start for start, _ in plan.segments]
    for before, start in pairwise(starts):
        assert start >= max(2 * period, growth * before)
    assert len(starts) <= switcher.most_segments(10_000)


def test_at_most_five_segments_in_ten_thousand_tokens_whatever_the_prices() -> None:
    assert PhaseSwitcher(lines((0, 1))).most_segments(10_000) <= 5
    assert max(len(plan_of(PhaseSwitcher(Trembling(seed)), 10_000).segments) for seed in range(3)) >= 3


def test_roll_back_and_regrowth_across_a_boundary_open_no_more_than_growth_alone() -> None:
    switcher = PhaseSwitcher(Trembling(1), hysteresis=0)
    segments: list[tuple[Candidate, int]] = []
    most, dice = 0, random.Random(2)
    tokens = 0
    for _ in range(6000):
        chosen = switcher.layout_at(segments, tokens)
        if not segments or segments[-1][0] != chosen:
            segments.append((chosen, 0))
        segments[-1] = chosen, segments[-1][1] + 8
        tokens += 8
        back = dice.choice((0, 0, 3, 7, 20))
        while back and segments:
            layout, length = segments.pop()
            cut = min(back, length)
            back, tokens = back - cut, tokens - cut
            if length > cut:
                segments.append((layout, length - cut))
        most = max(most, len(segments))
        starts = [sum(n for _, n in segments[:i]) for i in range(len(segments))]
        # A segment that was opened can only have lost its beginning with the ones before it.
        assert all(later >= 2 * 256 - 20 for later in starts[1:])
    assert most <= switcher.most_segments(tokens) + 1


def test_a_long_decode_leaves_the_layout_of_short_contexts() -> None:
    # Lines cross at 50,000 tokens: beyond the outlook at first, and far below the length in the end.
    prices = lines((0, 100), (1000, 80))
    plan = plan_of(PhaseSwitcher(prices), 400_000)
    assert [layout for _, layout in plan.segments] == [SHORT, LONG]
    assert plan_cost(prices, plan, 400_000) < 0.97 * plan_cost(prices, type(plan)(plan.segments[:1]), 400_000)


def test_a_known_limit_and_a_known_prompt_change_what_is_expected() -> None:
    prices = lines((0, 100), (100, 80))  # totals are equal at 10,000 tokens
    assert PhaseSwitcher(prices).layout_at([], 0) == SHORT
    assert PhaseSwitcher(prices).layout_at([], 0, ahead=12_000) == LONG
    assert PhaseSwitcher(prices, horizon=30_000).layout_at([], 0) == LONG
    assert PhaseSwitcher(prices, horizon=1000).layout_at([], 0, ahead=1000) == SHORT
    # 9,000 tokens of the short contexts' layout, and only 1,000 more can come.
    assert PhaseSwitcher(prices, horizon=10_000).layout_at([(SHORT, 9000)], 9000) == SHORT
    assert PhaseSwitcher(prices).layout_at([(SHORT, 90_000)], 90_000) == LONG


def test_a_gain_below_the_hysteresis_changes_nothing() -> None:
    prices = lines((0, 100), (0, 97), overhead_s=0)
    # Over as many tokens again as there are, 1.5 n tokens are read on average, and 3 % of a third of them is saved.
    tail = [(SHORT, 9000)]
    assert PhaseSwitcher(prices, hysteresis=0.009).layout_at(tail, 9000) == LONG
    assert PhaseSwitcher(prices, hysteresis=0.011).layout_at(tail, 9000) == SHORT


def test_it_compares_once_a_period() -> None:
    calls = []

    class Counting(LayoutPrices):
        def growth_s(self, candidate: Candidate, tokens: int) -> float:
            calls.append(tokens)
            return super().growth_s(candidate, tokens)

    known = lines((0, 100), (0, 80))
    counting = Counting({each: Curve({0: 0.0, 1: known.price_s(each, 1)}) for each in known.candidates})
    switcher = PhaseSwitcher(counting, period=100)
    for tokens in range(1000, 1100):
        switcher.layout_at([(SHORT, tokens)], tokens)
    once = len(calls)
    assert 0 < once <= 4
    switcher.layout_at([(SHORT, 1100)], 1100)
    assert len(calls) == 2 * once


def test_a_tail_in_a_layout_without_a_price_is_left() -> None:
    stranger = KVLayout(Layout.parse("T D | int8/bytes/signed | pad 64"), Layout.parse("T D | int8/bytes/signed"))
    assert PhaseSwitcher(lines((0, 100), (0, 80))).layout_at([(stranger, 10)], 10) == LONG


@pytest.mark.parametrize("bad", [{"period": 0}, {"growth": 1.0}, {"outlook": 0}, {"hysteresis": -0.1}])
def test_parameters_that_make_no_sense(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be at least 1, growth"):
        PhaseSwitcher(lines((0, 1)), **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("cross", [100, 350, 700])
@pytest.mark.parametrize("token_ns", [5, 80])
@pytest.mark.parametrize("steeper", [1.05, 1.3])
def test_within_two_percent_of_the_best_plan(cross: int, token_ns: float, steeper: float) -> None:
    """Short contexts like one layout and long ones the other: their lines cross at ``cross`` tokens."""
    extra_us = (steeper - 1) * token_ns * cross * 1e-3
    prices = lines((2, steeper * token_ns), (2 + extra_us, token_ns))
    best = plan_cost(prices, optimal_plan(prices, 10_000, step=200), 10_000)
    for limit in (None, 10_000, 16_384):
        plan = plan_of(PhaseSwitcher(prices, horizon=limit), 10_000)
        assert plan_cost(prices, plan, 10_000) <= 1.02 * best
        assert len(plan.segments) <= 2

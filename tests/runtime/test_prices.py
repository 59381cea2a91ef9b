"""Prices of layouts, interpolated from measurements or predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowbit.db import Measurement, Store, Winner
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.errors import LowbitError
from lowbit.kernels.problem import Problem
from lowbit.runtime import open_db
from lowbit.runtime.curve import Curve
from lowbit.runtime.prices import LayoutPrices, prices_from
from lowbit.runtime.segment import KVLayout
from shipped_model import DESCRIPTION, MACHINE, Shown, ship

PROBLEM = Problem("attend", 4, 2, 64, "w8a8")
FIRST, SECOND, THIRD, *_ = Shown().untuned(PROBLEM, MACHINE.cores)

knots = st.dictionaries(st.integers(0, 90), st.floats(0, 10), max_size=6).flatmap(
    lambda some: st.tuples(st.integers(1, 99), st.floats(0, 10)).map(lambda last: some | {last[0]: last[1]})
)


@given(knots, st.integers(0, 150))
def test_a_curve_sums_its_lengths_and_never_falls(knots: dict[int, float], tokens: int) -> None:
    curve = Curve(knots)
    lengths = np.arange(tokens + 1)
    each = [curve.at(n) for n in range(tokens + 1)]
    assert curve.many(lengths) == pytest.approx(each)
    assert curve.total(tokens) == pytest.approx(sum(each[1:]), abs=1e-9)
    assert all(low <= high + 1e-12 for low, high in pairwise(each))
    for n, seconds in knots.items():
        assert curve.at(n) >= seconds - 1e-9


@given(knots)
def test_a_concave_curve_lies_above_and_never_rewards_cutting(knots: dict[int, float]) -> None:
    curve = Curve(knots)
    hull = curve.concave()
    last = curve.tokens[-1]
    assert hull.at(0) == curve.at(0)
    assert hull.at(last) == pytest.approx(curve.at(last))
    assert all(hull.at(n) >= curve.at(n) - 1e-9 for n in range(last + 1))
    for whole in (last, last // 2, last // 3 + 1):
        for part in range(1, whole, max(whole // 7, 1)):
            assert hull.at(whole) <= hull.at(part) + hull.at(whole - part) - hull.at(0) + 1e-9


def test_the_line_through_two_knots_goes_on_to_both_sides() -> None:
    curve = Curve({100: 3.0, 200: 4.0})
    assert [curve.at(n) for n in (0, 50, 150, 1200)] == pytest.approx([2, 2.5, 3.5, 14])
    assert Curve({10: 5.0}).at(4) == pytest.approx(2)  # one time alone is taken for a share of each token
    with pytest.raises(ValueError, match="at least one token"):
        Curve({0: 1.0})


def test_segments_add_up_to_a_call_and_overheads() -> None:
    prices = LayoutPrices(
        {FIRST: Curve({0: 5e-6, 1000: 15e-6}), SECOND: Curve({0: 8e-6, 1000: 10e-6})}, overhead_s=1e-6
    )
    assert prices.call_s == 5e-6
    assert prices.price_s(SECOND, 500) == pytest.approx(9e-6)
    assert prices.segment_s(SECOND, 500) == pytest.approx(5e-6)  # 3 more than the cheapest call, 1 to read, 1 overhead
    assert prices.step_s([(FIRST, 1000)]) == pytest.approx(prices.price_s(FIRST, 1000) + 1e-6)
    assert prices.step_s([(FIRST, 100), (SECOND, 500)]) == pytest.approx(5e-6 + 2e-6 + 5e-6)
    assert prices.growth_s(FIRST, 3) == pytest.approx(sum(prices.segment_s(FIRST, n) for n in (1, 2, 3)))
    assert FIRST.k and FIRST.v and THIRD.k and THIRD.v
    assert prices.candidate(KVLayout(FIRST.k, FIRST.v)) == FIRST
    assert prices.candidate(KVLayout(THIRD.k, THIRD.v)) is None


def test_measured_times_stand_and_a_models_shape_joins_them() -> None:
    def model(candidates: Iterable[Candidate], tokens: int) -> Mapping[Candidate, float]:
        return dict.fromkeys(candidates, 1e-06 * (7 + tokens))

    curves = prices_from({FIRST: {512: 2 * 519e-6, 8192: 4 * 8199e-6}}, model)
    curve = curves[FIRST]
    assert (curve.at(512), curve.at(8192)) == pytest.approx((2 * 519e-6, 4 * 8199e-6))
    assert curve.at(2048) == pytest.approx(3 * 2055e-6)  # halfway in log tokens
    assert curve.at(64) == pytest.approx(2 * 71e-6)
    assert curve.at(32768) == pytest.approx(4 * 32775e-6)


def test_what_was_measured_once_follows_the_fastest_at_other_lengths() -> None:
    curves = prices_from({FIRST: {100: 2e-6, 1100: 12e-6}, SECOND: {100: 4e-6}})
    assert curves[SECOND].at(1100) == pytest.approx(24e-6)


def test_one_candidate_stands_for_a_pair_of_layouts_at_its_fastest_times() -> None:
    from dataclasses import replace

    slow = replace(FIRST, plan=replace(FIRST.schedule, block=64))
    once = replace(FIRST, plan=replace(FIRST.schedule, block=512))
    curves = prices_from({slow: {100: 4e-6, 900: 30e-6}, FIRST: {100: 3e-6, 900: 20e-6}, once: {900: 19e-6}})
    assert list(curves) == [FIRST]
    assert (curves[FIRST].at(100), curves[FIRST].at(900)) == pytest.approx((3e-6, 19e-6))


# -- from a database --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Shown:
    backend = Shown()
    monkeypatch.setattr("lowbit.runtime.select.backend_named", lambda name: backend)
    monkeypatch.setattr("lowbit.costmodel.device.detect", lambda: MACHINE)
    return backend


def tuned(path: Path, toolchain: str = "t", **times: tuple[Candidate, float]) -> None:
    """``n512=(FIRST, 3.0)``: the winner at 512 tokens, with a measurement of `SECOND` at twice its time."""
    with Store.open(path) as store:
        store.put_device("here", DESCRIPTION)
        for name, (candidate, median_us) in times.items():
            common = {"device": "here", "problem": PROBLEM.key, "tokens": int(name[1:]), "toolchain": toolchain}
            for each, us, protocol, status in (
                (candidate, median_us, "evicted", "ok"),
                (SECOND, 2 * median_us, "evicted", "ok"),
                (SECOND, median_us / 9, "warm", "ok"),
                (THIRD, median_us / 9, "evicted", "slow"),
            ):
                store.put_measurement(
                    Measurement(**common, candidate=each.name, protocol=protocol, status=status, median_us=us)  # type: ignore[arg-type]
                )
            store.put_winner(
                Winner(
                    **common, tokens_from=1, tokens_to=None, candidate=candidate.name, provenance="verified",
                    median_us=median_us, protocol="evicted",
                )  # type: ignore[arg-type]
            )  # fmt: skip


def test_medians_come_from_the_winners_protocol(tmp_path: Path) -> None:
    tuned(tmp_path / "t.db", n512=(FIRST, 10.0), n8192=(FIRST, 130.0))
    prices = open_db(tmp_path / "t.db").prices(PROBLEM)
    assert prices.provenance == "measured"
    assert set(prices.candidates) == {FIRST, SECOND}
    assert prices.price_s(FIRST, 512) == pytest.approx(10e-6)
    assert prices.price_s(SECOND, 8192) == pytest.approx(260e-6)


def test_another_toolchains_times_count_only_where_there_are_no_current_ones(tmp_path: Path) -> None:
    tuned(tmp_path / "t.db", toolchain="older", n512=(THIRD, 10.0), n8192=(THIRD, 99.0))
    tuned(tmp_path / "t.db", toolchain="old", n512=(FIRST, 10.0))
    prices = open_db(tmp_path / "t.db").prices(PROBLEM)
    assert (set(prices.candidates), prices.provenance) == ({FIRST, SECOND}, "stale")
    tuned(tmp_path / "t.db", n512=(THIRD, 20.0))
    prices = open_db(tmp_path / "t.db").prices(PROBLEM)
    assert (set(prices.candidates), prices.provenance) == ({SECOND, THIRD}, "measured")
    assert prices.price_s(SECOND, 512) == pytest.approx(40e-6)


def test_without_measurements_the_model_prices_what_was_counted(tmp_path: Path) -> None:
    ship(tmp_path / "t.db", PROBLEM, {FIRST: 40, THIRD: 10})
    prices = open_db(tmp_path / "t.db").prices(PROBLEM)
    assert prices.provenance == "predicted"
    assert set(prices.candidates) == {FIRST, THIRD}
    assert prices.price_s(FIRST, 4096) > 2 * prices.price_s(THIRD, 4096)
    # A fork of 3 µs is what a call costs that reads nothing.
    assert prices.call_s == pytest.approx(3e-6, rel=0.05)


def test_with_nothing_at_all_there_is_one_layout(tmp_path: Path) -> None:
    ship(tmp_path / "t.db", PROBLEM, {})
    prices = open_db(tmp_path / "t.db").prices(PROBLEM)
    assert (prices.candidates, prices.provenance) == ((FIRST,), "default")


def test_only_what_is_usable_is_priced(tmp_path: Path) -> None:
    tuned(tmp_path / "t.db", n512=(FIRST, 10.0))
    db = open_db(tmp_path / "t.db")
    assert db.prices(PROBLEM, lambda each: each != FIRST).candidates == (SECOND,)
    other = db.prices(PROBLEM, lambda each: each.k is not None and each.k.order == "T D")
    assert other.provenance == "default" and other.candidates[0].k is not None
    with pytest.raises(LowbitError, match="no layout of attend h4/2 d64 q1 w8a8"):
        db.prices(PROBLEM, lambda each: False)

from __future__ import annotations

import itertools
import math

import pytest
from fake_backend import LAYOUTS, candidate
from lowbit.db.records import Measurement
from lowbit.search.statistics import settle, spread, tied

CANDIDATES = {
    "few": candidate(1, threads=1),
    "many": candidate(1, threads=2),
    "split": candidate(1, threads=1, splits=4),
    "other": candidate(1, layout=LAYOUTS[1]),
}


def measured(name: str, us: float | None, noise: float = 0.02, status: str = "ok") -> Measurement:
    return Measurement(
        device="d", problem="attend h1/1 d8 q1 fp16", tokens=1, candidate=name, protocol="warm", status=status,
        median_us=us, spread=noise, samples=9, toolchain="t",
    )  # fmt: skip


def test_spread_is_the_interquartile_range_over_the_median() -> None:
    assert spread([1, 2, 3, 4, 5]) == pytest.approx(2 / 3)
    assert spread([7.0] * 5) == 0
    assert spread([3.0]) == math.inf


def test_ties_need_both_noise_and_nearness() -> None:
    quiet = [measured("a", 100.0, 0.001), measured("b", 101.0, 0.001)]
    assert [m.candidate for m in tied(quiet)] == ["a"]
    noisy = [measured("a", 100.0, 0.01), measured("b", 101.0, 0.01), measured("c", 102.5, 0.5)]
    assert [m.candidate for m in tied(noisy)] == ["a", "b"]


def test_faulty_and_slow_candidates_never_tie() -> None:
    rows = [measured("a", 100.0), measured("b", 99.0, status="slow"), measured("c", None, status="wrong")]
    assert [m.candidate for m in tied(rows)] == ["a"]
    assert tied(rows[1:]) == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_choice_among_ties_does_not_depend_on_noise_or_order(order: tuple[int, ...]) -> None:
    """Lower prediction, then fewer threads, then fewer splits, then the name."""
    names = list(CANDIDATES)
    rows = [measured(names[i], 100 + rank / 10) for rank, i in enumerate(order)]
    equal = dict.fromkeys(names, 50.0)
    assert [m.candidate for m in settle(rows, CANDIDATES, equal)] == ["few", "other", "split", "many"]
    assert settle(rows, CANDIDATES, {**equal, "many": 49.0})[0].candidate == "many"

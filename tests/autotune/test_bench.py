"""The bench's rounds over contestants with known answers, each in its own process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lowbit.autotune.bench.case import Case
from lowbit.autotune.bench.messages import Entered
from lowbit.autotune.bench.outcome import LimitPoint, Outcome, Row
from lowbit.autotune.bench.run import Run, _row
from lowbit.autotune.bench.team import Team, thread_settings
from lowbit.autotune.bench.winners import _stored
from lowbit.costmodel.device import detect
from lowbit.kernels.problem import Problem
from lowbit.search.control import ControlTime
from lowbit.search.rounds import Effort, Timed

CASE = Case(Problem("attend", 4, 2, 32, "w8a8"), 33)
MATRIX = Case(Problem("gemv", 1, 1, 64, "w4a8", 3), 50, "down")
BRIEF = Effort(min_rounds=3, max_rounds=20, target_spread=math.inf)


class Still:
    """A control on a machine on which nothing else runs."""

    def time(self) -> ControlTime:
        return ControlTime(1.0, 1.0)

    recent = time


@pytest.fixture
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setattr("lowbit.autotune.bench.run.MOST_SPREAD", math.inf)  # few samples, perhaps on a busy machine


def benched(*names: str, cases: Sequence[Case] = (CASE,), protocol: str = "cold") -> list[Row]:
    outcome = Outcome({}, 2, protocol)
    with Team([f"fake_contestant:{name}" for name in names], 2) as team:
        run = Run(team, protocol, BRIEF, outcome, Still())  # type: ignore[arg-type]
        for case in cases:
            run.case(case, "")
    return outcome.rows


@pytest.mark.usefixtures("_importable")
@pytest.mark.parametrize("protocol", ["cold", "warm"])
def test_one_that_is_right_is_timed(protocol: str) -> None:
    for row in benched("Right", cases=(CASE, MATRIX), protocol=protocol):
        assert (row.status, row.storage, row.message) == ("ok", "float64", "")
        assert row.max_rel_error == 0
        assert row.nbytes == 4 * row.case.values * len(row.case.problem.roles)
        assert row.median_us is not None and row.spread is not None
        assert row.median_us >= 3000
        assert row.limit_share is None  # no limit took part


@pytest.mark.usefixtures("_importable")
def test_one_that_is_wrong_says_by_how_much_and_gets_no_time() -> None:
    wrong, invalid = benched("Wrong", "NotANumber")
    assert (wrong.status, wrong.median_us) == ("wrong", None)
    assert wrong.max_rel_error == pytest.approx(0.1)
    assert "float64: error 0.1 exceeds" in wrong.message
    assert (invalid.status, invalid.max_rel_error, invalid.median_us) == ("wrong", math.inf, None)


@pytest.mark.usefixtures("_importable")
def test_the_fastest_right_way_to_store_a_case_is_timed() -> None:
    (row,) = benched("Choosy")
    assert (row.status, row.storage) == ("ok", "fast")


@pytest.mark.usefixtures("_importable")
def test_whoever_cannot_take_part_costs_only_its_own_row() -> None:
    odd = Case(CASE.problem, 32)
    rows = benched("Missing", "Picky", "Dying", "Right", cases=(odd, CASE))
    assert [row.status for row in rows] == [
        "absent",
        "unsupported",
        "crashed",
        "ok",
        "absent",
        "unsupported",
        "ok",
        "ok",
    ]
    missing, picky, dying = rows[:3]
    assert missing.message == "not installed: pip install it"
    assert picky.message == "no such operator"
    assert dying.message == "SIGABRT: error: bad block"


def test_threads_get_cores_of_their_own() -> None:
    settings = thread_settings(1)
    assert settings["OMP_NUM_THREADS"] == settings["OPENBLAS_NUM_THREADS"] == "1"
    assert settings["OMP_PLACES"].startswith("{") and "," not in settings["OMP_PLACES"]
    assert "OMP_PLACES" not in thread_settings(100_000)  # more threads than cores: nobody is pinned


def rows_of(case: Case, **times: float | None) -> list[Row]:
    return [
        Row(case, impl, "unsupported" if us is None else "ok", storage=impl, nbytes=1000, median_us=us, spread=0.1)
        for impl, us in times.items()
    ]


def report(cases: dict[Case, dict[str, float | None]]) -> dict[str, Any]:
    outcome = Outcome({"description": "a machine"}, 2, "cold", {"torch": "absent: no module"})
    for case, times in cases.items():
        outcome.rows += rows_of(case, **times)
        outcome.limits.append(LimitPoint(case, 1000, 10.0, 0.01))
    return outcome.as_dict()


def test_ratios_compare_a_case_and_borrow_other_formats_only_where_a_peer_has_none() -> None:
    half, byte = Case(Problem("attend", 4, 2, 32, "fp16"), 64), Case(Problem("attend", 4, 2, 32, "w8a8"), 64)
    other_length = Case(half.problem, 128)
    printed = report(
        {
            half: {"lowbit": 10.0, "llama_cpp": 30.0, "torch": 20.0},
            byte: {"lowbit": 5.0, "llama_cpp": 50.0, "torch": None},
            other_length: {"torch": 999.0},
        }
    )
    ratios = {(each["kv"], each["peer"]): each["ratio"] for each in printed["ratios"]}
    assert ratios == {
        ("fp16", "llama_cpp"): 3.0,
        ("fp16", "torch"): 2.0,
        ("int8", "llama_cpp"): 10.0,
        ("int8", "torch"): 4.0,
    }


def test_a_peer_that_has_the_format_but_no_time_has_no_ratio() -> None:
    half, byte = Case(Problem("attend", 4, 2, 32, "fp16"), 64), Case(Problem("attend", 4, 2, 32, "w8a8"), 64)
    outcome = Outcome({}, 2, "cold")
    outcome.rows = rows_of(half, llama_cpp=7.0) + rows_of(byte, lowbit=5.0)
    outcome.rows.append(Row(byte, "llama_cpp", "wrong", "by far", max_rel_error=0.5))
    assert list(outcome.ratios()) == []


def test_the_report_says_where_each_number_belongs() -> None:
    printed = report({CASE: {"lowbit": 40.0}, MATRIX: {"lowbit": 20.0}})
    attend, gemv = printed["rows"]
    assert {
        "impl": "lowbit",
        "kv": "int8",
        "tokens": 33,
        "query_rows": 1,
        "median_us": 40.0,
        "spread": 0.1,
    }.items() <= (attend.items())
    assert {"name": "down", "rows": 50, "columns": 64, "vectors": 3, "precision": "w4a8"}.items() <= gemv.items()
    assert gemv["gbps"] == pytest.approx(1000 / 20e-6 / 1e9)
    assert printed["limit"]["gbps"] == pytest.approx(0.1)
    assert [each.get("tokens") for each in printed["limit"]["cases"]] == [33, None]
    assert printed["peers"] == {"torch": "absent: no module"}


@pytest.mark.parametrize(
    ("case", "nbytes"),
    [
        (Case(Problem("attend", 32, 8, 128, "fp16"), 512), 2 * 8 * 512 * 128 * 2),
        (Case(Problem("attend", 32, 8, 128, "w8a8"), 512), 2 * 8 * 512 * 128 * 34 // 32),
        (Case(Problem("attend", 32, 8, 128, "w8a8+w4a8"), 512), 8 * 512 * 128 * (34 + 18) // 32),
        (Case(Problem("gemv", 1, 1, 2048, "w4a8"), 512), 512 * 2048 * 18 // 32),
        (Case(Problem("attend", 2, 1, 80, "w4a8"), 10), 2 * 10 * (40 + 3 * 2)),
    ],
)
def test_bytes_that_have_to_be_read(case: Case, nbytes: int) -> None:
    assert case.nbytes == nbytes


@pytest.mark.parametrize("case", [CASE, MATRIX, Case(Problem("gemv", 1, 1, 2048, "fp16"), 10_000)])
def test_parts_cover_every_row_once(case: Case) -> None:
    seen = [(part.head, row) for part in case.parts() for row in range(part.start, part.stop)]
    assert seen == [(head, row) for head in range(case.problem.kv_heads) for row in range(case.tokens)]


def test_a_median_of_too_few_undisturbed_rounds_or_too_wide_a_spread_is_not_reported() -> None:
    player = SimpleNamespace(name="peer", opened=None)
    entered = Entered("int8", 1000, 0.01)

    def row(samples: tuple[float, ...], tainted: int) -> Row:
        timed = Timed("ok", samples, tainted, rounds=10)
        return _row(CASE, player, entered, timed, LimitPoint(CASE, 1000, 2.0, 0.0))  # type: ignore[arg-type]

    good = row((4.0, 4.1, 3.9), tainted=7)
    assert (good.status, good.median_us, good.limit_share) == ("ok", 4.0, pytest.approx(0.5))
    few = row((4.0, 4.1, 3.9), tainted=8)
    assert (few.status, few.median_us, few.message) == ("noisy", None, "only 2 timing rounds of it were undisturbed")
    wide = row((1.0, 4.0, 9.0), tainted=0)
    assert (wide.status, wide.median_us, wide.max_rel_error) == ("noisy", None, 0.01)


def test_a_database_that_was_only_just_made_has_no_winners(tmp_path):
    """Another process may have made it, and be about to tune."""
    path = tmp_path / "new.db"
    path.touch()
    assert _stored([], path, detect(), 2, "cold") == {}

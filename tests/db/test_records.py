from __future__ import annotations

import math
from typing import Any

import pytest
from lowbit.db import Measurement, Winner
from lowbit.db.records import may_replace
from lowbit.kernels.errors import DatabaseError

MEASUREMENT: dict[str, Any] = {
    "device": "d",
    "problem": "attend h8/2 d128 q1 w8a8",
    "tokens": 512,
    "candidate": "c",
    "protocol": "warm",
    "status": "ok",
    "median_us": 3.5,
    "toolchain": "t",
}
WINNER: dict[str, Any] = {
    "device": "d",
    "problem": "attend h8/2 d128 q1 w8a8",
    "tokens": 512,
    "tokens_from": 257,
    "tokens_to": 1024,
    "candidate": "c",
    "provenance": "measured",
    "median_us": 3.5,
    "protocol": "warm",
    "toolchain": "t",
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"median_us": math.nan}, "median_us must be a finite number, not nan"),
        ({"median_us": math.inf}, "median_us must be a finite number, not inf"),
        ({"median_us": 0.0}, "median_us must be positive"),
        ({"median_us": None}, "'ok' needs a median_us"),
        ({"median_us": None, "status": "slow"}, "'slow' needs a median_us"),
        ({"spread": math.nan}, "spread must be a finite number"),
        ({"status": "fine"}, "unknown status 'fine'"),
        ({"protocol": "hot"}, "unknown protocol 'hot'"),
        ({"tokens": 0}, "tokens must be positive"),
    ],
)
def test_measurement_refuses(change: dict[str, Any], said: str) -> None:
    with pytest.raises(DatabaseError, match=said):
        Measurement(**{**MEASUREMENT, **change})


def test_faulty_candidate_needs_no_median_and_a_nan_error_counts_as_infinite() -> None:
    wrong = Measurement(**{**MEASUREMENT, "status": "wrong", "median_us": None, "max_error": math.nan})
    assert wrong.max_error == math.inf


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"median_us": math.nan}, "finite"),
        ({"baseline_us": math.inf}, "finite"),
        ({"predicted_us": -1.0}, "positive"),
        ({"bandwidth_share": math.nan}, "finite"),
        ({"median_us": None}, "needs a median_us"),
        ({"protocol": None}, "needs a median_us and a protocol"),
        ({"tokens_from": 513}, "range must hold its tokens"),
        ({"tokens_from": 0}, "range must hold its tokens"),
        ({"tokens_to": 511}, "range must hold its tokens"),
        ({"provenance": "guessed"}, "unknown provenance"),
    ],
)
def test_winner_refuses(change: dict[str, Any], said: str) -> None:
    with pytest.raises(DatabaseError, match=said):
        Winner(**{**WINNER, **change})


def test_winner_covers_its_range_inclusively() -> None:
    winner = Winner(**WINNER)
    assert [winner.covers(t) for t in (256, 257, 1024, 1025)] == [False, True, True, False]
    assert Winner(**{**WINNER, "tokens_to": None}).covers(1 << 24)


def test_only_a_prediction_gives_way_to_what_was_timed() -> None:
    refused = {
        (new, stored)
        for new in ("predicted", "verified", "measured")
        for stored in ("predicted", "verified", "measured")
        if not may_replace(new, stored)
    }
    assert refused == {("predicted", "verified"), ("predicted", "measured")}

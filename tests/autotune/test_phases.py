"""Whether a layout changes with the length: read from databases that are written by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from lowbit.autotune.phases import Length, phases_in, reason
from lowbit.costmodel.assembly import CLASSES
from lowbit.costmodel.bandwidth import Bandwidth, BandwidthPoint
from lowbit.costmodel.device import CacheLevel, Device, Identity
from lowbit.costmodel.features import Features
from lowbit.costmodel.lep import Coefficients
from lowbit.db.records import Measurement, Winner
from lowbit.db.store import Store

DEVICE = Device("x86_64", Identity("v", "1", "2", "3"), "avx2", (), 1, 1, 64, (CacheLevel(1, 1 << 15, 1),), 1 << 30)
PROBLEM = "attend h8/2 d64 q1 fp16"
A, B = "K: T D | fp16; V: T D | fp16", "K: T/16 D/4 t16 d4 | fp16; V: T D | fp16"


def named(layout: str, rows: int = 4) -> str:
    return f"{layout}; float; rows {rows}, registers 2, block 64, splits 1, prefetch 0, threads 1"


def winner(tokens: int, layout: str, **changes: object) -> Winner:
    fixed: dict[str, object] = {
        "device": DEVICE.fingerprint, "problem": PROBLEM, "tokens_from": 1, "tokens_to": None, "toolchain": "t",
        "provenance": "predicted", "predicted_us": 10.0,
    }  # fmt: skip
    return Winner(tokens=tokens, candidate=named(layout), **{**fixed, **changes})  # type: ignore[arg-type]


def features(size: int, shifts: float = 0.0) -> Features:
    return Features(size, size, {"shift": shifts}, shifts, 1.0, 0, 1, 1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A device that reads 10 GB/s and shifts in 1 ns; transfers and instructions overlap completely."""
    values = dict.fromkeys((f"{kind}_ns" for kind in CLASSES), 0.0) | {"shift_ns": 1.0}
    values |= {"exponential_ns": 0.0, "task_us": 0.0, "fork_us": 0.0, "gamma": 0.0}
    points = (BandwidthPoint(1, 1 << 14, 1e9, "L1"), BandwidthPoint(1, 1 << 16, 10.0, "DRAM"))
    store = Store.open(tmp_path / "t.db")
    store.put_device(DEVICE.fingerprint, DEVICE.as_dict())
    fitted = Coefficients("extended", values, Bandwidth(points), 1)
    store.put_calibration(DEVICE.fingerprint, 1, {"extended": fitted.as_dict()}, "t")
    return store


def put_features(store: Store, tokens: int, **rows: Features) -> None:
    """Of layouts ``A`` and ``B``; a name that ends in 2 is a second schedule."""
    layouts = {"A": A, "B": B}
    named_rows = {named(layouts[name[0]], 4 if len(name) == 1 else 2): row.as_dict() for name, row in rows.items()}
    store.put_features(DEVICE.fingerprint, PROBLEM, tokens, named_rows, "t")


def test_a_layout_that_wins_everywhere_is_told_with_what_limits_it_and_its_nearest_rival(store: Store) -> None:
    # 1,000,000 bytes at 10 GB/s are 100 µs, and the other layout's second schedule is the one that counts: 4 % more.
    for tokens, rival in ((256, 1_040_000), (4096, 1_200_000)):
        put_features(store, tokens, A=features(1_000_000), B=features(2_000_000), B2=features(rival))
        store.put_winner(winner(tokens, A, predicted_us=100.0, tokens_from=1 if tokens == 256 else 1025))
    (found,) = phases_in(store, store.winners())
    assert not found.changes
    assert [(each.layout, each.tokens) for each in found.phases] == [(A, (256, 4096))]
    assert found.reason == (
        f"one layout at all lengths, limited by memory; the nearest other one, {B}, is 4.0% slower where it comes "
        "closest, at 256 tokens"
    )
    assert found.as_dict()["layouts"] == [{"layout": A, "tokens_from": 1, "tokens_to": None, "tokens": [256, 4096]}]


def test_a_change_is_told_with_what_staying_would_cost(store: Store) -> None:
    put_features(store, 256, A=features(1_000_000), B=features(1_000_000, shifts=150_000))
    put_features(store, 4096, A=features(1_250_000), B=features(1_000_000))
    store.put_winner(winner(256, A, predicted_us=100.0, tokens_to=1024))
    store.put_winner(winner(4096, B, predicted_us=100.0, tokens_from=1025))
    (found,) = phases_in(store, store.winners())
    assert found.changes
    assert [(each.layout, each.tokens_from, each.tokens_to) for each in found.phases] == [
        (A, 1, 1024), (B, 1025, None),
    ]  # fmt: skip
    assert found.reason == (
        "changes between 256 and 4096 tokens: the first layout is 25% slower at 4096, the second layout is 50% slower "
        f"at 256; one layout for all lengths, {A}, would cost at most 25%"
    )


def test_what_limits_may_change_where_the_layout_does_not(store: Store) -> None:
    put_features(store, 256, A=features(1_000_000, shifts=200_000))
    put_features(store, 4096, A=features(1_000_000))
    store.put_winner(winner(256, A, predicted_us=200.0))
    store.put_winner(winner(4096, A, predicted_us=100.0))
    (found,) = phases_in(store, store.winners())
    assert found.reason == "one layout at all lengths, limited by instructions up to 256 tokens, by memory beyond"


def test_predictions_of_another_model_are_not_compared(store: Store) -> None:
    for tokens in (256, 4096):
        put_features(store, tokens, A=features(1_000_000), B=features(1_010_000))
        store.put_winner(winner(tokens, A, predicted_us=77.0))
    (found,) = phases_in(store, store.winners())
    assert found.reason == "one layout at all lengths"


def test_measured_winners_are_compared_with_what_was_measured(store: Store) -> None:
    for tokens, rival in ((256, 10.2), (4096, 15.0)):
        for layout, time_us in ((A, 10.0), (B, rival)):
            store.put_measurement(
                Measurement(
                    device=DEVICE.fingerprint, problem=PROBLEM, tokens=tokens, candidate=named(layout),
                    protocol="warm", status="ok", median_us=time_us, toolchain="t",
                )
            )  # fmt: skip
        store.put_winner(winner(tokens, A, provenance="measured", median_us=10.0, protocol="warm"))
    (found,) = phases_in(store, store.winners())
    assert found.reason == f"one layout at all lengths; {B} ties with it, at 256 tokens for instance"


def test_only_the_newest_toolchains_winners_count(store: Store) -> None:
    store.put_winner(winner(256, A, toolchain="old", created="2020-01-01T00:00:00.000+00:00"))
    store.put_winner(winner(4096, B, toolchain="old", created="2020-01-01T00:00:00.000+00:00"))
    store.put_winner(winner(256, B))
    (found,) = phases_in(store, store.winners())
    assert (found.changes, found.reason) == (False, "tuned at one length, 256 tokens")


def test_devices_and_problems_are_told_apart(store: Store) -> None:
    store.put_winner(winner(256, A))
    store.put_winner(winner(4096, B, problem="qk h8/2 d64 q1 fp16"))
    store.put_winner(winner(4096, B, device="elsewhere"))
    assert {(each.device, each.problem, each.changes) for each in phases_in(store, store.winners())} == {
        (DEVICE.fingerprint, PROBLEM, False),
        (DEVICE.fingerprint, "qk h8/2 d64 q1 fp16", False),
        ("elsewhere", PROBLEM, False),
    }


def test_a_layout_that_is_unknown_at_some_length_is_no_single_choice() -> None:
    first = Length(10, "A", {"A": 1.0, "B": 1.5})
    lengths = [first, Length(20, "B", {"B": 1.0, "C": 2.0})]
    assert reason(lengths).endswith("one layout for all lengths, B, would cost at most 50%")
    assert math.isnan(lengths[1].slower("A"))
    unknown = [replace(each, times_us={}) for each in lengths]
    assert reason(unknown) == "changes between 10 and 20 tokens"


def test_what_ties_is_told_apart_from_what_is_slower() -> None:
    first, second = {"A": 1.0, "B": 1.02, "C": 0.99, "D": 1.5}, {"A": 1.0, "B": 1.4, "C": 1.6, "D": 1.2}
    lengths = [Length(10, "A", first, "latency"), Length(20, "A", second, "memory")]
    assert reason(lengths, "rows") == (
        "one layout at all lengths, limited by latency up to 10 rows, by memory beyond; C and 1 more tie with it, at "
        "10 rows for instance; the nearest that does not, D, is 20% slower where it comes closest, at 20 rows"
    )

from __future__ import annotations

import os

import pytest
from lowbit.search.control import TRIES, WINDOW_BYTES, Contention, Control, ControlTime


def seen(*compute_us: float) -> Contention:
    contention = Contention(compute_limit=1.25, stream_limit=1.6)
    for us in compute_us:
        contention.see(ControlTime(us, 100.0))
    return contention


def test_an_even_machine_taints_nothing() -> None:
    assert not any(seen(*[20.0] * 30).tainted(ControlTime(us, 100.0)) for us in (19.0, 20.0, 24.9))


def test_a_control_that_takes_half_as_long_again_is_tainted_in_either_part() -> None:
    contention = seen(*[20.0] * 15, *[30.0] * 15)
    assert contention.best == ControlTime(20.0, 100.0)
    assert contention.tainted(ControlTime(30.0, 100.0))
    assert contention.tainted(ControlTime(20.0, 170.0))
    assert not contention.tainted(ControlTime(20.0, 150.0))


def test_a_thread_that_arrives_late_is_tainted_even_if_it_always_does() -> None:
    contention = Contention(arrival_floor_us=150.0, arrival_limit=3.0)
    for us in [60.0] * 10 + [900.0] * 60:
        contention.see(ControlTime(20.0, 100.0, us))
    assert contention.typical.arrival_us == 900.0
    assert contention.tainted(ControlTime(20.0, 100.0, 900.0))
    assert not contention.tainted(ControlTime(20.0, 100.0, 140.0))


def test_an_arrival_after_a_time_slice_is_late_even_if_all_are() -> None:
    contention = Contention(arrival_ceiling_us=1000.0)
    for us in (700.0, 3500.0, 3600.0, 3700.0):
        contention.see(ControlTime(20.0, 100.0, us))
    assert contention.tainted(ControlTime(20.0, 100.0, 3500.0))
    assert not contention.tainted(ControlTime(20.0, 100.0, 900.0))


def test_an_uneven_machine_does_not_taint_its_own_usual_state() -> None:
    """A fifth of the readings is 40 % faster than the rest, as with a boosted clock."""
    contention = seen(*[12.0] * 10, *[20.0] * 40)
    assert contention.best.compute_us == 12.0
    assert not contention.tainted(ControlTime(20.0, 100.0))
    assert not contention.tainted(ControlTime(22.0, 100.0))
    assert contention.tainted(ControlTime(24.0, 100.0))


def test_one_lucky_reading_taints_nothing() -> None:
    contention = seen(10.0, *[20.0] * 30)
    assert contention.best.compute_us == 20.0


def test_early_readings_are_judged_again_by_later_ones() -> None:
    contention = seen(*[30.0] * 3)
    assert not contention.tainted(ControlTime(30.0, 100.0))
    for _ in range(10):
        contention.see(ControlTime(20.0, 100.0))
    assert contention.tainted(ControlTime(30.0, 100.0))


def test_before_the_first_reading_there_is_no_best() -> None:
    with pytest.raises(ValueError, match="no control"):
        Contention().tainted(ControlTime(1.0, 1.0))


def test_the_control_visits_its_cores_and_returns_to_the_first() -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("no thread affinity")
    before = os.sched_getaffinity(0)
    cores = sorted(before)[:2]
    try:
        os.sched_setaffinity(0, {cores[0]})
        control = Control(cores, 1 << 20)
        first = control.time()
        assert first.compute_us > 0 and first.stream_us > 0
        assert (first.arrival_us > 0) == (len(cores) > 1)
        assert os.sched_getaffinity(0) == {cores[0]}
        assert control.recent() is first
    finally:
        os.sched_setaffinity(0, before)


def test_without_eviction_the_read_walks_through_a_bounded_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.search.control.can_evict", lambda: False)
    monkeypatch.setattr("lowbit.search.control.MAX_BUFFER_BYTES", 8 * WINDOW_BYTES)
    places = []
    control = Control((), 1 << 30)
    monkeypatch.setattr(control, "_stream", lambda address, nbytes: places.append(address))
    for _ in range(3):
        control.time()
    assert len(places) == 3 * TRIES and len(set(places)) == 8
    assert max(places) - min(places) == 7 * WINDOW_BYTES

from __future__ import annotations

import os

import pytest
from lowbit.search.control import Contention, Control, ControlTime


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
        assert os.sched_getaffinity(0) == {cores[0]}
        assert control.recent() is first
    finally:
        os.sched_setaffinity(0, before)

from __future__ import annotations

import os

import pytest
from lowbit.db import records
from lowbit.search.control import ControlTime
from lowbit.search.timing import (
    BATCH_US,
    MAX_BATCHES,
    MAX_COPIES,
    MAX_COPIES_BYTES,
    MAX_EVICTED_COPIES,
    MIN_EVICTED,
    SLOT_US,
    Slot,
    Stopwatch,
    copies_needed,
    protocol_here,
)


class Clock:
    """Time that passes only when a call says so."""

    def __init__(self) -> None:
        self.ns = 0
        self.switches = 0
        self.log: list[int] = []

    def __call__(self) -> int:
        return self.ns

    def call(self, index: int, us: float, switches: int = 0):  # type: ignore[no-untyped-def]
        def run() -> None:
            self.log.append(index)
            self.ns += int(us * 1000)
            self.switches += switches

        return run

    def stopwatch(self, *us: float, switches: int = 0) -> Stopwatch:
        calls = [self.call(i, each, switches) for i, each in enumerate(us)]
        return Stopwatch(calls, self, lambda: self.switches, self)


@pytest.mark.parametrize("us", [0.5, 3.0, 40.0, 99.0, 101.0, 5000.0, 80_000.0])
def test_every_sample_is_the_time_of_one_call(us: float) -> None:
    clock = Clock()
    samples, preempted = clock.stopwatch(us).samples()
    assert not preempted
    assert samples == pytest.approx([us] * len(samples))
    assert 1 <= len(samples) <= MAX_BATCHES
    inner = (len(clock.log) - 2) / len(samples)
    assert inner * us >= BATCH_US
    assert len(samples) == 1 or inner * us * len(samples) <= SLOT_US


def test_short_kernels_fill_a_slot_with_several_batches_and_long_ones_run_once() -> None:
    assert len(Clock().stopwatch(100.0).samples()[0]) == MAX_BATCHES
    clock = Clock()
    clock.stopwatch(50_000.0).samples()
    assert len(clock.log) == 3  # waking up, calibration, one sample


def test_cold_calls_rotate_over_all_copies_across_batches_and_slots() -> None:
    clock = Clock()
    stopwatch = clock.stopwatch(*[60.0] * 5)
    stopwatch.samples()
    stopwatch.samples()
    assert clock.log == [i % 5 for i in range(len(clock.log))]


@pytest.mark.parametrize(("lost_us", "spoilt"), [(40, False), (230, False), (270, True), (3000, True)])
def test_a_slot_leaves_preempted_batches_out_and_is_spoilt_by_losing_a_time_slice(lost_us: int, spoilt: bool) -> None:
    clock = Clock()
    disturbed = iter([0, 0, 1, 0, 1, 0, 0, 0, 0, 0])

    def call() -> None:
        lost = next(disturbed)
        clock.switches += lost
        clock.ns += (500 + lost_us * lost) * 1000

    samples, preempted = Stopwatch([call], clock, lambda: clock.switches).samples()
    assert preempted == spoilt and set(samples) == {500.0} and len(samples) == 2


def test_a_slot_without_an_undisturbed_batch_says_so() -> None:
    samples, preempted = Clock().stopwatch(200.0, switches=1).samples()
    assert preempted and samples


def test_rare_switches_do_not_spoil_a_long_batch() -> None:
    assert not Clock().stopwatch(25_000.0, switches=2).samples()[1]
    assert Clock().stopwatch(25_000.0, switches=3).samples()[1]


@pytest.mark.parametrize(
    ("operand_bytes", "cache_bytes", "copies"),
    [
        (1 << 20, 32 << 20, 64),
        (3 << 20, 32 << 20, 22),
        (65 << 20, 32 << 20, 1),
        (64 << 20, 32 << 20, 1),
        (10, 1 << 30, MAX_COPIES),
    ],
)
def test_cold_copies_exceed_twice_the_cache(operand_bytes: int, cache_bytes: int, copies: int) -> None:
    assert copies_needed(operand_bytes, cache_bytes, "cold") == copies
    assert copies == MAX_COPIES or copies * operand_bytes >= 2 * cache_bytes > (copies - 1) * operand_bytes
    assert copies_needed(operand_bytes, cache_bytes, "warm") == 1


@pytest.mark.parametrize("operand_bytes", [5 << 20, 70 << 20, 600 << 20])
def test_copies_are_bounded_whatever_the_cache(operand_bytes: int) -> None:
    copies = copies_needed(operand_bytes, 480 << 20, "cold")
    assert copies == 1 or MAX_COPIES_BYTES - operand_bytes < copies * operand_bytes <= MAX_COPIES_BYTES


@pytest.mark.parametrize(
    ("operand_bytes", "copies"), [(70 << 20, 1), (1 << 20, 1), (1 << 19, 2), (300_000, 4), (100, MAX_EVICTED_COPIES)]
)
def test_eviction_needs_copies_of_small_operands_only(operand_bytes: int, copies: int) -> None:
    assert copies_needed(operand_bytes, 480 << 20, "evicted") == copies


def test_cold_is_stored_as_what_the_machine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for can, stored in ((True, "evicted"), (False, "cold")):
        monkeypatch.setattr("lowbit.search.timing.can_evict", lambda can=can: can)
        assert (protocol_here("cold"), protocol_here("warm")) == (stored, "warm")
        assert stored in records.PROTOCOLS


@pytest.mark.parametrize(("us", "batches"), [(30.0, MAX_BATCHES), (200.0, 3), (90_000.0, MIN_EVICTED)])
def test_every_batch_is_chilled_outside_its_time_and_calls_each_copy_once(us: float, batches: int) -> None:
    clock = Clock()
    stopwatch = clock.stopwatch(us, us, us)

    def chill() -> bool:
        clock.log.append(-1)
        clock.ns += 10_000_000
        return True

    stopwatch.chill = chill
    samples, preempted = stopwatch.samples()
    assert not preempted and samples == pytest.approx([us] * batches)
    assert clock.log == [-1, 0, 1, 2] * (batches + 1)  # the first warms up


def test_a_slot_whose_threads_could_not_be_had_is_spoilt() -> None:
    stopwatch = Clock().stopwatch(700.0)
    answers = iter([True, True, False, True])
    stopwatch.chill = lambda: next(answers)
    assert stopwatch.samples() == ((700.0, 700.0), True)


def test_a_slot_lies_between_two_controls_and_is_judged_by_what_both_show() -> None:
    readings = iter([ControlTime(1.0, 9.0, 80.0), ControlTime(2.0, 5.0, 30.0)])

    class Control:
        def time(self) -> ControlTime:
            return next(readings)

        recent = time

    clock = Clock()
    slot = clock.stopwatch(100.0).slot(Control())
    assert slot.control == ControlTime(1.0, 5.0, 80.0)
    assert slot.samples_us == (100.0,) * MAX_BATCHES


@pytest.mark.parametrize(("absent_us", "spoilt"), [(0, False), (400, False), (600, True)])
def test_a_caller_that_was_away_between_batches_spoils_the_slot(absent_us: int, spoilt: bool) -> None:
    clock, away = Clock(), [0]

    class Control:
        def time(self) -> ControlTime:
            away[0] += absent_us * 1000
            clock.ns += absent_us * 1000
            return ControlTime(1.0, 1.0)

        def recent(self) -> ControlTime:
            return ControlTime(1.0, 1.0)

    stopwatch = Stopwatch([clock.call(0, 100.0)], clock, lambda: 0, lambda: clock.ns - away[0])
    assert stopwatch.slot(Control()).preempted == spoilt


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no thread affinity")
def test_the_caller_is_pinned_while_timed_and_free_afterwards() -> None:
    before = os.sched_getaffinity(0)
    seen = []

    class Control:
        def time(self) -> ControlTime:
            return ControlTime(1.0, 1.0)

        recent = time

    slot = Stopwatch([lambda: seen.append(os.sched_getaffinity(0))]).slot(Control())
    assert isinstance(slot, Slot)
    assert {len(each) for each in seen} == {1} and os.sched_getaffinity(0) == before

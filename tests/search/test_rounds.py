from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from lowbit.kernels.errors import NoiseError
from lowbit.search.control import Contention, ControlTime
from lowbit.search.rounds import RETRIES, Effort, Fault, Timed, interleave, together
from lowbit.search.timing import Slot

CALM = ControlTime(20.0, 100.0)
BUSY = ControlTime(60.0, 100.0)
EFFORT = Effort(min_rounds=4, max_rounds=10, target_spread=0.05)


class Lab:
    """Contestants with scripted samples and controls."""

    def __init__(self, **samples: Callable[[int], float] | float) -> None:
        self.samples = samples
        self.order: list[str] = []
        self.outcomes: dict[str, Timed | Fault] = {}
        self.controls: Iterator[ControlTime] = itertools.repeat(CALM)
        self.faults: dict[tuple[str, int], Fault] = {}

    def slot(self, name: str) -> Slot | Fault:
        turn = self.order.count(name)
        self.order.append(name)
        if (name, turn) in self.faults:
            return self.faults[name, turn]
        us = self.samples[name]
        value = us(turn) if callable(us) else us
        control = next(self.controls)
        # A disturbed slot takes long, as it would.
        return Slot((value * control.compute_us / CALM.compute_us,), control, control)

    def finished(self, name: str, outcome: Timed | Fault) -> None:
        assert name not in self.outcomes
        self.outcomes[name] = outcome

    def run(self, effort: Effort = EFFORT, **more: float) -> None:
        interleave(self.samples, self.slot, effort, Contention(), self.finished, **more)


def test_contestants_take_turns_until_each_is_steady() -> None:
    lab = Lab(a=10.0, b=11.0, c=12.0)
    lab.run()
    assert lab.order == ["a", "b", "c"] * EFFORT.min_rounds
    assert lab.outcomes["b"] == Timed("ok", (11.0,) * 4, 0, 4)


def test_an_unsteady_contestant_goes_on_alone_up_to_the_bound() -> None:
    lab = Lab(steady=10.0, wild=lambda turn: 10.0 * (1 + turn % 2))
    lab.run()
    assert lab.order.count("steady") == EFFORT.min_rounds
    assert lab.order.count("wild") == EFFORT.max_rounds
    assert lab.outcomes["wild"] == Timed("ok", (10.0, 20.0) * 5, 0, 10)


def test_tainted_rounds_are_repeated_and_counted_and_leave_no_sample() -> None:
    lab = Lab(a=10.0)
    lab.controls = iter([CALM, BUSY, CALM, BUSY, BUSY, CALM, CALM])
    lab.run()
    assert lab.outcomes["a"] == Timed("ok", (10.0,) * 4, 3, 7)


def test_a_preempted_slot_is_tainted_although_its_control_is_calm() -> None:
    outcomes: dict[str, Timed | Fault] = {}
    slots = iter([Slot((99.0,), CALM, CALM, preempted=True), *[Slot((10.0,), CALM, CALM)] * 4])
    interleave(["a"], lambda name: next(slots), EFFORT, Contention(), outcomes.__setitem__)
    assert outcomes["a"] == Timed("ok", (10.0,) * 4, 1, 5)


def test_nearly_all_rounds_tainted_is_an_error_within_a_bounded_number_of_rounds() -> None:
    lab = Lab(a=10.0, b=10.0)
    contention = Contention()
    for _ in range(200):
        contention.see(CALM)
    lab.controls = itertools.repeat(BUSY)
    with pytest.raises(NoiseError, match="0 of 60 timing rounds"):
        interleave(lab.samples, lab.slot, EFFORT, contention, lab.finished)
    assert len(lab.order) == 2 * RETRIES * EFFORT.max_rounds
    assert not lab.outcomes


def test_clearly_slow_contestants_get_the_screening_rounds_only() -> None:
    lab = Lab(slow=100.0, fast=10.0, near=19.0)
    lab.run(Effort(min_rounds=4, max_rounds=10, slow_factor=2.0, screen_rounds=2))
    assert lab.outcomes["slow"] == Timed("slow", (100.0, 100.0), 0, 2)
    assert [lab.outcomes[name].status for name in ("fast", "near")] == ["ok", "ok"]


def test_the_fastest_may_be_known_from_before() -> None:
    lab = Lab(a=10.0)
    lab.run(Effort(slow_factor=2.0), best_us=4.0)
    assert lab.outcomes["a"].status == "slow"


def test_a_faulty_contestant_leaves_at_once_and_the_others_go_on() -> None:
    lab = Lab(a=10.0, bad=10.0, c=10.0)
    lab.faults["bad", 1] = Fault("crashed", "SIGSEGV")
    lab.run()
    assert lab.outcomes["bad"] == Fault("crashed", "SIGSEGV")
    assert lab.order.count("bad") == 2 and lab.order.count("c") == EFFORT.min_rounds


def test_out_of_time_reports_what_there_is() -> None:
    lab = Lab(a=lambda turn: 10.0 + turn, b=10.0)
    lab.run(deadline=0.0)
    assert lab.order == ["a", "b"]
    assert lab.outcomes == {"a": Timed("ok", (10.0,), 0, 1), "b": Timed("ok", (10.0,), 0, 1)}


def test_drift_hits_all_contestants_alike() -> None:
    """A machine that slows down steadily must not change who is faster."""
    time = itertools.count()

    def drifting(base: float) -> Callable[[int], float]:
        return lambda turn: base * (1 + 0.01 * next(time))

    lab = Lab(slower=drifting(10.3), faster=drifting(10.0))
    lab.run(Effort(min_rounds=10, max_rounds=10))
    medians = {name: np.median(o.samples_us) for name, o in lab.outcomes.items() if isinstance(o, Timed)}
    assert medians["faster"] < medians["slower"]


def test_conditions_of_slots_are_taken_together_by_name() -> None:
    assert together([]) == {} == together([{}, {}])
    slots = [
        {"sm_mhz": 1700, "reasons": ("power cap",)},
        {"sm_mhz": 1500, "reasons": ()},
        {"sm_mhz": 1600, "reasons": ["idle", "power cap"], "power_w": 300.0},
    ]
    assert together(slots) == {"sm_mhz": 1600, "reasons": ["idle", "power cap"], "power_w": 300.0}

"""Interleaved rounds: every contestant gets one slot a round, until each one's spread is small.

Drift of the machine (clock, temperature, neighbours) then hits all contestants alike instead of the ones that happened
to be timed late. Rounds whose control shows contention are repeated, within bounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..kernels.errors import NoiseError
from .control import Contention
from .statistics import median, spread
from .timing import Slot

RETRIES = 3
"""A contestant gets at most this many times `Effort.max_rounds` slots, tainted ones included."""
MIN_CLEAN_SHARE = 0.05
"""Below this share of clean slots the machine is too noisy."""


@dataclass(frozen=True)
class Effort:
    """How hard to measure.

    Parameters
    ----------
    min_rounds, max_rounds : int
        Clean rounds of a contestant; it stops in between once its spread is below ``target_spread``.
    target_spread : float
        Interquartile range over median.
    slow_factor : float or None
        After ``screen_rounds`` a contestant slower than this many times the fastest known is given up as ``slow``.
    screen_rounds : int
    """

    min_rounds: int = 5
    max_rounds: int = 12
    target_spread: float = 0.05
    slow_factor: float | None = None
    screen_rounds: int = 2


@dataclass(frozen=True)
class Fault:
    """Why a candidate has no time: a status of `Measurement`, and in what words."""

    status: str
    message: str
    max_error: float | None = None


@dataclass(frozen=True)
class Timed:
    """A contestant's clean samples; ``status`` is ``ok`` or ``slow``.

    ``conditions`` are what the device said of itself, `Slot.conditions` of the clean slots taken together.
    """

    status: str
    samples_us: tuple[float, ...]
    tainted: int
    rounds: int
    conditions: Mapping[str, Any] = field(default_factory=dict)


def together(conditions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of numbers, and everything that was in any list, by name."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for each in conditions for name in each):
        values = [each[name] for each in conditions if name in each]
        if isinstance(values[0], list | tuple):
            found[name] = sorted({item for value in values for item in value})
        else:
            found[name] = median(values)
    return found


def tainted(slot: Slot, contention: Contention) -> bool:
    """Whether something else used the machine during ``slot``."""
    return slot.preempted or contention.tainted(slot.control)


class _Contestant:
    def __init__(self, name: str) -> None:
        self.name = name
        self.slots: list[Slot] = []

    def clean(self, contention: Contention) -> list[Slot]:
        return [slot for slot in self.slots if not tainted(slot, contention)]


def interleave(
    names: Iterable[str],
    slot: Callable[[str], Slot | Fault],
    effort: Effort,
    contention: Contention,
    finished: Callable[[str, Timed | Fault], None],
    best_us: float | None = None,
    deadline: float | None = None,
) -> None:
    """Time ``names`` against each other.

    Parameters
    ----------
    names : iterable of str
        The contestants, in the order of their slots.
    slot : callable
        Times one slot of one contestant.
    finished : callable
        Called with each contestant's outcome as soon as it is known. Contestants without a clean round when the
        time is up are not reported.
    best_us : float, optional
        Fastest time known from elsewhere, for ``effort.slow_factor``.
    deadline : float, optional
        `time.monotonic` value at which to stop with what there is.

    Raises
    ------
    NoiseError
        If nearly every slot was tainted. What had finished before was reported.
    """
    active = [_Contestant(name) for name in dict.fromkeys(names)]
    everyone = list(active)
    limit = RETRIES * effort.max_rounds
    for round_number in range(1, limit + 1):
        for contestant in tuple(active):
            result = slot(contestant.name)
            if isinstance(result, Fault):
                active.remove(contestant)
                everyone.remove(contestant)
                finished(contestant.name, result)
                continue
            contestant.slots.append(result)
            contention.see(result.before)
            contention.see(result.after)
        out_of_time = deadline is not None and time.monotonic() >= deadline
        if round_number >= effort.screen_rounds or out_of_time:
            best_us = _fastest(everyone, contention, best_us)
        for contestant in tuple(active):
            outcome = _outcome(contestant, effort, contention, best_us, last=out_of_time or round_number == limit)
            if outcome is not None:
                active.remove(contestant)
                finished(contestant.name, outcome)
        if out_of_time or not active:
            break
    _refuse_noise(everyone, contention)


def _fastest(contestants: list[_Contestant], contention: Contention, best_us: float | None) -> float | None:
    medians = [
        median([us for s in clean for us in s.samples_us]) for c in contestants if (clean := c.clean(contention))
    ]
    return min([*medians, *([] if best_us is None else [best_us])], default=None)


def _outcome(
    contestant: _Contestant, effort: Effort, contention: Contention, best_us: float | None, last: bool
) -> Timed | None:
    clean = contestant.clean(contention)
    samples = tuple(us for slot in clean for us in slot.samples_us)
    if not samples:
        return None
    rounds = len(contestant.slots)
    if (
        effort.slow_factor is not None
        and best_us is not None
        and len(clean) >= effort.screen_rounds
        and median(samples) > effort.slow_factor * best_us
    ):
        return Timed("slow", samples, rounds - len(clean), rounds, together([slot.conditions for slot in clean]))
    steady = len(clean) >= effort.min_rounds and spread(samples) <= effort.target_spread
    if steady or last or len(clean) >= effort.max_rounds:
        return Timed("ok", samples, rounds - len(clean), rounds, together([slot.conditions for slot in clean]))
    return None


def _refuse_noise(contestants: list[_Contestant], contention: Contention) -> None:
    slots = [slot for c in contestants for slot in c.slots]
    if len(slots) < RETRIES * 2:
        return
    clean = sum(not tainted(slot, contention) for slot in slots)
    if clean < MIN_CLEAN_SHARE * len(slots):
        raise NoiseError(
            f"only {clean} of {len(slots)} timing rounds were undisturbed: something else is using the processor; "
            "stop it, or use --strategy lep"
        )

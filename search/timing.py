"""How one kernel is timed: one slot, a few batches of calls on a pinned thread, between two controls.

Protocols
---------
warm
    The same operands again and again: what fits a cache stays there.
cold
    Calls rotate over copies of the packed operands that together exceed twice the last cache level, as the consecutive
    layers of a model do. Operands that exceed it alone need one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol

from ..kernels.cpu.pool import pinned
from .control import ControlTime

PROTOCOLS = ("warm", "cold")
BATCH_US = 100.0
"""A batch lasts at least this long, a thousand times what the clock resolves."""
SLOT_US = 2000.0
MAX_BATCHES = 8
PREEMPTION_US = 10_000.0
"""A batch may be preempted once in this long."""
MAX_COPIES = 512

Call = Callable[[], object]


@dataclass(frozen=True)
class Slot:
    """One candidate's share of one round.

    Attributes
    ----------
    samples_us : tuple of float
        Time per call, one value a batch.
    before, after : ControlTime
        The control around it.
    preempted : bool
        Whether the system took a thread off its core in every batch. Otherwise the samples are of the batches that
        were left alone.
    """

    samples_us: tuple[float, ...]
    before: ControlTime
    after: ControlTime
    preempted: bool = False

    @property
    def control(self) -> ControlTime:
        return self.before.worse(self.after)


class Reading(Protocol):
    """What a slot needs of `lowbit.search.control.Control`."""

    def time(self) -> ControlTime: ...

    def recent(self) -> ControlTime: ...


def copies_needed(operand_bytes: int, cache_bytes: int, protocol: str) -> int:
    """Copies of the packed operands that ``protocol`` rotates over."""
    if protocol == "warm" or operand_bytes <= 0:
        return 1
    return min(MAX_COPIES, max(1, -(-2 * cache_bytes // operand_bytes)))


def preemptions() -> int:
    """How often the system has taken a thread of this process off its core; 0 where it does not count."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


class Stopwatch:
    """Times one candidate's calls, slot by slot.

    Parameters
    ----------
    calls : sequence of callable
        One for each copy of the operands, rotated over. The owner may replace them between slots.
    clock : callable
        Nanoseconds; monotonic.
    preempted : callable
        Counts preemptions.
    """

    def __init__(
        self,
        calls: Sequence[Call] = (),
        clock: Callable[[], int] = perf_counter_ns,
        preempted: Callable[[], int] = preemptions,
    ) -> None:
        self.calls = calls
        self._clock = clock
        self._preempted = preempted
        self._next = 0
        self._inner = 0

    def batch(self, inner: int) -> float:
        """Microseconds per call over ``inner`` calls."""
        calls, count = self.calls, len(self.calls)
        order = [calls[(self._next + i) % count] for i in range(inner)]
        self._next = (self._next + inner) % count
        start = self._clock()
        for call in order:
            call()
        return (self._clock() - start) / 1e3 / inner

    def samples(self) -> tuple[tuple[float, ...], bool]:
        """Warm up with one call, then time batches for about `SLOT_US`.

        Returns
        -------
        samples_us : tuple of float
        preempted : bool
            See `Slot`.
        """
        warm_us = self.batch(1)
        if not self._inner:
            # The first call also wakes threads and faults pages in; the second says how many calls fill a batch.
            warm_us = self.batch(1)
            self._inner = max(1, round(BATCH_US / max(warm_us, 0.1) + 0.5))
        batches = max(1, min(MAX_BATCHES, int(SLOT_US / max(warm_us * self._inner, 0.1))))
        taken = []
        for _ in range(batches):
            switches = self._preempted()
            us = self.batch(self._inner)
            # A kernel thread now and then is the machine's own noise; another process takes milliseconds each time.
            taken.append((us, self._preempted() - switches > us * self._inner // PREEMPTION_US))
        alone = tuple(us for us, disturbed in taken if not disturbed)
        return (alone, False) if alone else (tuple(us for us, _ in taken), True)

    def slot(self, control: Reading) -> Slot:
        """One slot on pinned threads, with the control timed before and after."""
        with pinned():
            before = control.recent()
            samples, preempted = self.samples()
            return Slot(samples, before, control.time(), preempted)

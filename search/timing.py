"""How one kernel is timed: one slot, a few batches of calls on a pinned thread, between two controls.

Protocols
---------
warm
    The same operands again and again: what fits a cache stays there.
cold
    Operands come from memory, as those of the consecutive layers of a model do. What this means depends on the machine,
    and is stored under the name of how it was done (`protocol_here`):

evicted
    Before each sample the packed operands' lines are evicted from every cache, whatever its size. A sample is one call,
    or one call on each of a few copies if the operands are small. Small operands, workspace and code stay warm, and the
    threads that will run are awake.
cold, where a process cannot evict
    Calls rotate over copies of the packed operands that together exceed twice the last cache level, within bounds.
    Operands that exceed it alone need one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import get_clock_info, perf_counter_ns, thread_time_ns
from typing import Any, Protocol

from ..kernels.cpu.memory import can_evict
from ..kernels.cpu.pool import pinned
from .control import ControlTime
from .statistics import median

PROTOCOLS = ("warm", "cold")
"""What can be asked for."""
BATCH_US = 100.0
"""A batch lasts at least this long, a thousand times what the clock resolves."""
SLOT_US = 2000.0
MIN_EVICTED, MAX_BATCHES = 3, 8
"""Fewest batches of a slot when operands are evicted before each, and most of any slot."""
PREEMPTION_US = 10_000.0
"""A batch may be preempted once in this long."""
LOST_US = 500.0
"""A slot that lost more than this shared its cores with another process: a time slice is longer, a kernel thread's
work much shorter."""
MAX_COPIES, MAX_COPIES_BYTES = 512, 512 << 20
"""Bounds on the copies that cold calls rotate over."""
MAX_EVICTED_COPIES, EVICTED_BYTES = 16, 1 << 20
"""Copies read in one sample: together at least so many bytes, which takes tens of microseconds, if they are not too
many. The clock and the call from Python then cost little."""

Call = Callable[[], object]


def protocol_here(protocol: str) -> str:
    """Under which name measurements of ``protocol`` are taken and stored on this machine: `cold` may be `evicted`."""
    return "evicted" if protocol == "cold" and can_evict() else protocol


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
        Whether another process had one of the cores for long, at whatever time in the slot, or disturbed every batch.
        Samples are of the batches that were left alone, if there are any.
    """

    samples_us: tuple[float, ...]
    before: ControlTime
    after: ControlTime
    preempted: bool = False

    @property
    def control(self) -> ControlTime:
        return self.before.around(self.after)

    @property
    def conditions(self) -> Mapping[str, Any]:
        """What else the device said of itself meanwhile; a CPU says nothing."""
        return {}


class Reading(Protocol):
    """What a slot needs of `lowbit.search.control.Control`."""

    def time(self) -> ControlTime: ...

    def recent(self) -> ControlTime: ...


def copies_needed(operand_bytes: int, cache_bytes: int, protocol: str) -> int:
    """Copies of the packed operands that ``protocol`` needs."""
    if protocol == "warm" or operand_bytes <= 0:
        return 1
    if protocol == "evicted":
        return min(MAX_EVICTED_COPIES, -(-EVICTED_BYTES // operand_bytes))
    return max(1, min(MAX_COPIES, MAX_COPIES_BYTES // operand_bytes, -(-2 * cache_bytes // operand_bytes)))


def preemptions() -> int:
    """How often the system has taken a thread of this process off its core; 0 where it does not count."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _thread_time_is_fine() -> bool:
    return get_clock_info("thread_time").resolution < 1e-5


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
    used : callable
        Nanoseconds of processor time that the calling thread has used.

    Attributes
    ----------
    chill : callable or None
        Makes the operands of all calls cold and the threads ready before each batch, outside the timed part; a batch is
        then every call once. Returns whether the threads could be had.
    """

    def __init__(
        self,
        calls: Sequence[Call] = (),
        clock: Callable[[], int] = perf_counter_ns,
        preempted: Callable[[], int] = preemptions,
        used: Callable[[], int] | None = None,
        chill: Callable[[], bool] | None = None,
    ) -> None:
        self.calls = calls
        self.chill = chill
        self._clock = clock
        self._preempted = preempted
        self._used = used or (thread_time_ns if _thread_time_is_fine() else clock)
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
        """Warm up, then time batches for about `SLOT_US`.

        Returns
        -------
        samples_us : tuple of float
        preempted : bool
            See `Slot`.
        """
        inner, expected_us = self._warm_up()
        least = 1 if self.chill is None else MIN_EVICTED
        batches = max(least, min(MAX_BATCHES, int(SLOT_US / max(expected_us * inner, 0.1))))
        alone: list[float] = []
        others: list[float] = []
        held = False
        for _ in range(batches):
            ready = self.chill is None or self.chill()
            switches = self._preempted()
            us = self.batch(inner)
            # A kernel thread now and then is the machine's own noise; another process takes milliseconds each time.
            disturbed = not ready or self._preempted() - switches > us * inner // PREEMPTION_US
            (others if disturbed else alone).append(us)
            held = held or not ready
        if not alone:
            return tuple(others), True
        lost_us = sum(us - median(alone) for us in others) * inner
        return tuple(alone), held or lost_us > LOST_US

    def _warm_up(self) -> tuple[int, float]:
        """How many calls a batch has, and about how many microseconds each of them takes."""
        if self.chill is not None:
            self.chill()
            return len(self.calls), self.batch(len(self.calls))
        us = self.batch(1)
        if not self._inner:
            # The first call also wakes threads and faults pages in; the second says how many calls fill a batch.
            us = self.batch(1)
            self._inner = max(1, round(BATCH_US / max(us, 0.1) + 0.5))
        return self._inner, us

    def slot(self, control: Reading) -> Slot:
        """One slot on pinned threads, with the control timed before and after."""
        with pinned():
            before = control.recent()
            started, used = self._clock(), self._used()
            samples, preempted = self.samples()
            after = control.time()
            # The caller never sleeps in between: time that it did not use, another process did.
            absent_us = (self._clock() - started - (self._used() - used)) / 1e3
            return Slot(samples, before, after, preempted or absent_us > LOST_US)

"""How a GPU kernel is timed: graphs between two events, with the caches flushed or warm.

A sample is one replay of a graph that holds a few calls, behind a flush where operands are to come from memory, and
behind enough other work that the replay is queued before the GPU comes to it: what the processor takes to enqueue is
never in a sample. Launches are in it, as they are in a decode loop; what they alone cost is timed apart, by the same
graph of kernels that return at once.

Protocols
---------
warm
    The same call again and again, so often that a replay lasts `BATCH_US`.
cold
    The second-level cache is read full of other memory before each replay. A replay is one call on each of a few copies
    of the packed operands, so many that they last long beside what an event resolves (about half a microsecond).

A slot is one of `lowbit.search.timing.Slot`, with controls around it, so that candidates interleave as on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Protocol

from ..kernels.cuda.device import Driver, Graph, Memory
from .control import RECENT_NS, ControlTime
from .gpu_meters import Energy, GpuState, Meter
from .statistics import median
from .timing import Reading, Slot

BATCH_US = 200.0
"""A warm replay lasts at least this long, hundreds of times what an event resolves."""
MAX_CALLS = 256
"""Most calls of a graph."""
SLOT_US = 20_000.0
MIN_SAMPLES, MAX_SAMPLES = 5, 20
COLD_BYTES, MAX_COPIES = 32 << 20, 16
"""Packed operands of a cold replay: together at least so many bytes, if copies are not too many."""
COVER_STEPS, CONTROL_STEPS = 30_000, 10_000
"""Dependent instructions, of about four nanoseconds each. What is queued behind a hundred microseconds of them is there
in time: enqueuing takes tens."""
COVER_US = 150.0
CONTROL_BYTES = 64 << 20
TRIES = 3


class GpuCall(Protocol):
    """A bound call, `lowbit.kernels.cuda.kernel.Bound` for one."""

    driver: Driver

    def enqueue(self) -> None: ...


@dataclass(frozen=True)
class GpuSlot(Slot):
    """A slot on a GPU. ``preempted`` means that the board slowed itself down, or another process had it.

    Attributes
    ----------
    launch_us : float
        What of each sample its launches alone take.
    state : GpuState or None
        Clocks after the last sample.
    """

    launch_us: float = 0.0
    state: GpuState | None = None

    @property
    def conditions(self) -> Mapping[str, Any]:
        return {"launch_us": self.launch_us, **({} if self.state is None else self.state.as_dict())}


def copies_wanted(operand_bytes: int, protocol: str) -> int:
    """Copies of the packed operands that a replay reads: one if warm."""
    if protocol == "warm":
        return 1
    return max(1, min(MAX_COPIES, -(-COLD_BYTES // max(operand_bytes, 1))))


class GpuControl:
    """Fixed work on the GPU, which slows down only when something else uses it, or its clocks drop.

    ``compute_us`` is a chain of dependent instructions (clocks), ``stream_us`` a read of memory beyond every cache, and
    ``arrival_us`` what a launch and waiting for it take from here (time slices of other processes). Parts are the best
    of a few tries.

    Parameters
    ----------
    driver : Driver
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._buffer: Memory | None = None
        self._last: tuple[int, ControlTime] | None = None

    def time(self) -> ControlTime:
        driver = self._driver
        if self._buffer is None:
            self._buffer = driver.alloc(max(CONTROL_BYTES, 2 * driver.gpu.l2_bytes))
            driver.fill(self._buffer)
            driver.spin(CONTROL_STEPS)
            driver.nothing()
        buffer = self._buffer
        arrivals = []
        for _ in range(TRIES):
            started = perf_counter_ns()
            driver.nothing()
            driver.synchronize()
            arrivals.append((perf_counter_ns() - started) / 1e3)
        result = ControlTime(
            min(elapsed_us(driver, lambda: driver.spin(CONTROL_STEPS)) for _ in range(TRIES)),
            min(elapsed_us(driver, lambda: driver.read_through(buffer)) for _ in range(TRIES)),
            min(arrivals),
        )
        self._last = perf_counter_ns(), result
        return result

    def recent(self) -> ControlTime:
        """The last reading if it has just been taken, else a new one."""
        if self._last is not None and perf_counter_ns() - self._last[0] < RECENT_NS:
            return self._last[1]
        return self.time()


class GpuStopwatch:
    """Times one candidate's calls, slot by slot. Implements what the worker asks of `lowbit.search.timing.Stopwatch`.

    Parameters
    ----------
    calls : sequence of GpuCall
        Of one driver, one for each copy of the operands; all make the same launches.
    protocol : str
        ``warm`` or ``cold``.
    meter : Meter, optional
    """

    def __init__(self, calls: Sequence[GpuCall], protocol: str, meter: Meter | None = None) -> None:
        self.calls = tuple(calls)
        self.protocol = protocol
        self._driver = self.calls[0].driver
        self._meter = meter
        self._graph: Graph | None = None
        self._empty: Graph | None = None

    def close(self) -> None:
        for graph in (self._graph, self._empty):
            if graph is not None:
                graph.close()
        self._graph = self._empty = None

    def slot(self, control: Reading) -> GpuSlot:
        """One slot, with the control timed before and after.

        Raises
        ------
        GpuFaultError
            If a call broke the GPU's context. This process can then measure nothing more.
        """
        self._prepare()
        before = control.recent()
        samples = self.samples()
        state = self._meter.state() if self._meter is not None else None
        launch_us = self.launch_us()
        after = control.time()
        return GpuSlot(samples, before, after, state is not None and state.slowed, launch_us, state)

    def samples(self) -> tuple[float, ...]:
        """Microseconds a call, one value a replay, for about `SLOT_US`."""
        graph = self._prepare()
        first = self._replay(graph)  # wakes clocks up and is not counted
        count = int(SLOT_US / max(first * graph.calls + COVER_US, 1.0))
        return tuple(self._replay(graph) for _ in range(max(MIN_SAMPLES, min(MAX_SAMPLES, count))))

    def launch_us(self) -> float:
        """What a call's launches take when they do nothing."""
        self._prepare()
        assert self._empty is not None
        empty = self._empty
        return median([self._replay(empty) for _ in range(TRIES)])

    def energy(self, seconds: float = 2.0) -> Energy | None:
        """Energy of one call, while it is repeated without a pause; None where the board does not tell."""
        if self._meter is None:
            return None
        graph = self._prepare()
        replays = max(1, round(50_000.0 / max(self._replay(graph) * graph.calls, 1.0)))

        def run() -> None:
            for _ in range(replays):
                graph.enqueue()
            self._driver.synchronize()

        return self._meter.energy(replays * graph.calls, run, seconds)

    def _prepare(self) -> Graph:
        """Capture the graphs, once the first call has shown how long one takes."""
        if self._graph is None:
            for call in self.calls:
                call.enqueue()  # loads code and faults pages in
            self._driver.synchronize()
            work = [call.enqueue for call in self.calls]
            if self.protocol == "warm":
                us = elapsed_us(self._driver, work[0])
                work *= max(1, min(MAX_CALLS // len(work), round(BATCH_US / max(us * len(work), 0.1) + 0.5)))
            self._graph = self._driver.capture(work)
            self._empty = self._driver.capture_empty(work)
        return self._graph

    def _replay(self, graph: Graph) -> float:
        if self.protocol != "warm":
            self._driver.flush_l2()
        return elapsed_us(self._driver, graph.enqueue) / graph.calls


def elapsed_us(driver: Driver, enqueue: Callable[[], object]) -> float:
    """What the GPU takes for what ``enqueue`` enqueues, which is queued while the GPU is busy with something else."""
    driver.spin(COVER_STEPS)
    start = driver.event()
    enqueue()
    return driver.event().since(start)


def read_bandwidth_gbps(driver: Driver, nbytes: int = 1 << 30) -> float:
    """Bytes a nanosecond at which all multiprocessors read memory that no cache holds: the best of a few reads."""
    buffer = driver.alloc(min(max(nbytes, 8 * driver.gpu.l2_bytes), driver.free_bytes() // 4))
    driver.fill(buffer)
    best = 0.0
    for _ in range(2 * TRIES):
        driver.spin(COVER_STEPS)
        start = driver.event()
        done = driver.read_through(buffer)
        best = max(best, done / driver.event().since(start) / 1e3)
    buffer.free()
    return best

"""Measured read bandwidth, as a curve over the working set, for one to all threads.

Bandwidth is what the fastest of several ways to read reaches (`lowbit.costmodel.microloops.READERS`). Where caches can
be evicted, measuring memory needs no buffer larger than they are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from ..kernels.cpu.memory import can_evict
from .device import Device
from .microloops import READERS

if TYPE_CHECKING:
    from .microbench import Bench

CALL_BYTES = 8 << 20  # what one timed call streams: long against a fork, short against a scheduler's time slice
_BATCH = 5  # calls whose median is one reading
_WARM = 2  # unmeasured rounds through the buffer first: a last level that takes what others evict fills slowly
_LARGEST_BYTES = 128 << 20
_LARGEST_LEVEL_BYTES = 32 << 20  # of a huge last level, others may have the rest
_LARGEST_COPIED_BYTES = 512 << 20


@dataclass(frozen=True)
class WorkingSet:
    """Data to stream again and again.

    Attributes
    ----------
    size_bytes : int
        How much there is.
    level : str
        See `BandwidthPoint`.
    stands_for_bytes : int
        The working set whose bandwidth it shows: larger than ``size_bytes`` if it is evicted.
    evicted : bool
        Whether to evict it before each call, and to go through it once in a call.
    """

    size_bytes: int
    level: str
    stands_for_bytes: int
    evicted: bool = False


@dataclass(frozen=True)
class BandwidthPoint:
    """One reading.

    Attributes
    ----------
    threads : int
    working_set_bytes : int
        Streamed again and again, split evenly over the threads.
    gbps : float
        Decimal gigabytes per second, all threads together.
    level : str
        ``L1``, ``L2``, … where the size sits well inside that level of one core's caches, ``DRAM`` where it exceeds
        them all, empty in the transitions.
    unaided_gbps : float
        The same where prefetching is left to the hardware; 0 if that was not measured.
    """

    threads: int
    working_set_bytes: int
    gbps: float
    level: str
    unaided_gbps: float = 0.0


@dataclass(frozen=True)
class Bandwidth:
    """Read bandwidth of a device; see `measure_bandwidth`."""

    points: tuple[BandwidthPoint, ...]

    @property
    def threads(self) -> tuple[int, ...]:
        """The thread counts that were measured, ascending."""
        return tuple(sorted({point.threads for point in self.points}))

    def at(self, level: str, threads: int) -> float:
        """Decimal GB/s of ``L1``, ``L2``, … or ``DRAM`` with ``threads`` threads (the most measured, if fewer were).

        Raises
        ------
        KeyError
            If the level was not measured.
        """
        used = max((count for count in self.threads if count <= threads), default=self.threads[0])
        for point in self.points:
            if point.threads == used and point.level == level:
                return point.gbps
        raise KeyError(level)

    def gbps(
        self, working_set_bytes: NDArray[np.float64], parallelism: NDArray[np.float64], unaided: bool = False
    ) -> NDArray[np.float64]:
        """Bandwidth for each working set and each effective number of threads; ``unaided`` by software prefetches.

        Interpolated in the logarithm of the working set and linearly between measured thread counts; constant beyond
        the ends of both, since a bandwidth that was not measured is not promised.
        """
        sizes = np.log(np.maximum(working_set_bytes, 1.0))
        rows = np.stack([np.interp(sizes, *self._curve(threads, unaided)) for threads in self.threads])
        place = np.interp(parallelism, self.threads, np.arange(len(self.threads)))
        low = place.astype(np.int64)
        high = np.minimum(low + 1, len(self.threads) - 1)
        share = place - low
        each = np.arange(rows.shape[1])
        return np.asarray(rows[low, each] * (1 - share) + rows[high, each] * share)

    def _curve(self, threads: int, unaided: bool) -> tuple[list[float], list[float]]:
        chosen = sorted((p for p in self.points if p.threads == threads), key=lambda p: p.working_set_bytes)
        measured_apart = unaided and all(p.unaided_gbps for p in chosen)
        return [math.log(p.working_set_bytes) for p in chosen], [
            p.unaided_gbps if measured_apart else p.gbps for p in chosen
        ]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` is the inverse."""
        return {"points": [asdict(point) for point in self.points]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(tuple(BandwidthPoint(**point) for point in data["points"]))


def working_sets(device: Device, evicts: bool | None = None) -> list[WorkingSet]:
    """What to measure, ascending.

    Half of each level stands for the level, at most 32 MiB of the last one; the transition after it is sampled at its
    size and at one and a half times that, up to 128 MiB. Memory is four times the last level (at most 256 MiB, at least
    twice the level), or a few evicted megabytes that stand for it.

    Parameters
    ----------
    device : Device
    evicts : bool, optional
        Whether this machine can evict, if not what it says.
    """
    wanted: dict[int, str] = {}
    for cache in device.caches:
        total = cache.size_bytes
        wanted |= {total // 2: f"L{cache.level}", total: "", total * 3 // 2: ""}
    last = device.caches[-1]
    nearer = max((3 * cache.size_bytes for cache in device.caches[:-1]), default=0)
    if last.size_bytes // 2 > max(_LARGEST_LEVEL_BYTES, nearer):
        del wanted[last.size_bytes // 2]
        level = max(_LARGEST_LEVEL_BYTES, nearer)
        wanted |= {level: f"L{last.level}", 2 * level: "", 4 * level: ""}
    memory = max(min(4 * last.size_bytes, 2 * _LARGEST_BYTES, device.memory_bytes // 8), 2 * last.size_bytes)
    kept = {size: level for size, level in wanted.items() if size < memory and (level or size <= _LARGEST_BYTES)}
    sets = [WorkingSet(size, level, size) for size, level in sorted(kept.items())]
    if can_evict() if evicts is None else evicts:
        return [*sets, WorkingSet(CALL_BYTES, "DRAM", memory, evicted=True)]
    return [*sets, WorkingSet(min(memory, _LARGEST_COPIED_BYTES), "DRAM", memory)]


def windows_of(working_set: WorkingSet) -> int:
    """Calls of `CALL_BYTES` that it takes to go once through a working set, rounded down."""
    return max(working_set.size_bytes // CALL_BYTES, 1)


def measure_bandwidth(bench: Bench, thread_counts: Sequence[int]) -> Bandwidth:
    """Stream every one of `working_sets` with every thread count, once round; hold `pinned` meanwhile.

    A point is the median of several calls of the way of reading that is fastest there. Contention only ever adds time,
    so repeat and combine with `fastest`.
    """
    points = []
    for each in working_sets(bench.device):
        for threads in thread_counts:
            readings = {reader: _gbps(bench, each, threads, reader) for reader in READERS}
            unaided = max(gbps for reader, gbps in readings.items() if READERS[reader][1] == 0)
            points.append(BandwidthPoint(threads, each.stands_for_bytes, max(readings.values()), each.level, unaided))
    return Bandwidth(tuple(points))


def _gbps(bench: Bench, each: WorkingSet, threads: int, reader: str) -> float:
    windows = windows_of(each)
    per_thread = bench.whole_steps(reader, each.size_bytes // windows // threads)
    passes = 1 if each.evicted else max(CALL_BYTES // (per_thread * threads), 1)
    call = bench.call(reader, threads, threads, per_thread, passes, windows)
    if each.evicted:
        seconds = statistics.median(bench.cold_seconds(call, each.size_bytes, threads) for _ in range(_BATCH))
    else:
        for _ in range(_WARM * windows if each.level != "DRAM" else 1):
            call()
        seconds = statistics.median(bench.seconds(call) for _ in range(_BATCH))
    return per_thread * threads * passes / seconds / 1e9


def fastest(first: Bandwidth, second: Bandwidth) -> Bandwidth:
    """The faster readings of each point of two measurements of the same points."""
    return Bandwidth(
        tuple(
            replace(a, gbps=max(a.gbps, b.gbps), unaided_gbps=max(a.unaided_gbps, b.unaided_gbps))
            for a, b in zip(first.points, second.points, strict=True)
        )
    )

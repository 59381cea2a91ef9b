"""Measured read bandwidth, as a curve over the working set, for one to all threads."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from .device import Device

if TYPE_CHECKING:
    from .microbench import Bench

CALL_BYTES = 8 << 20  # what one timed call streams: long against a fork, short against a scheduler's time slice
_BATCH = 7  # calls whose median is one reading
_WARM = 3  # unmeasured calls first: a last-level cache that takes what others evict fills slowly
_LARGEST_BYTES = 256 << 20


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
    """

    threads: int
    working_set_bytes: int
    gbps: float
    level: str


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

    def gbps(self, working_set_bytes: NDArray[np.float64], parallelism: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bandwidth for each working set and each effective number of threads.

        Interpolated in the logarithm of the working set and linearly between measured thread counts; constant beyond
        the ends of both, since a bandwidth that was not measured is not promised.
        """
        sizes = np.log(np.maximum(working_set_bytes, 1.0))
        rows = np.stack([np.interp(sizes, *self._curve(threads)) for threads in self.threads])
        place = np.interp(parallelism, self.threads, np.arange(len(self.threads)))
        low = place.astype(np.int64)
        high = np.minimum(low + 1, len(self.threads) - 1)
        share = place - low
        each = np.arange(rows.shape[1])
        return np.asarray(rows[low, each] * (1 - share) + rows[high, each] * share)

    def _curve(self, threads: int) -> tuple[list[float], list[float]]:
        chosen = sorted((p.working_set_bytes, p.gbps) for p in self.points if p.threads == threads)
        return [math.log(size) for size, _ in chosen], [gbps for _, gbps in chosen]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` is the inverse."""
        return {"points": [asdict(point) for point in self.points]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(tuple(BandwidthPoint(**point) for point in data["points"]))


def sizes(device: Device) -> list[tuple[int, str]]:
    """Working sets to measure, ascending, with the level that each stands for.

    Half of each level stands for the level; the transition after it is sampled at its size and at one and a half times
    that; four times the last level (at most 256 MiB) is memory.
    """
    wanted: dict[int, str] = {}
    for cache in device.caches:
        total = cache.size_bytes
        wanted |= {total // 2: f"L{cache.level}", total: "", total * 3 // 2: ""}
    last = device.caches[-1].size_bytes
    memory = max(min(4 * last, _LARGEST_BYTES, device.memory_bytes // 8), 2 * last)
    kept = {size: level for size, level in wanted.items() if size < memory}
    return sorted((kept | {memory: "DRAM"}).items())


def windows_of(working_set_bytes: int) -> int:
    """Calls of `CALL_BYTES` that it takes to go once through a working set, rounded down."""
    return max(working_set_bytes // CALL_BYTES, 1)


def measure_bandwidth(bench: Bench, thread_counts: Sequence[int]) -> Bandwidth:
    """Stream a buffer of every size in `sizes` with every thread count, once round; hold `pinned` meanwhile.

    A point is the median of several calls. Contention only ever adds time, so repeat and combine with `fastest`.
    """
    points = []
    for size, level in sizes(bench.device):
        for threads in thread_counts:
            windows = windows_of(size)
            per_thread = bench.whole_steps("stream", size // windows // threads)
            passes = max(CALL_BYTES // (per_thread * threads), 1)
            call = bench.call("stream", threads, threads, per_thread, passes, windows)
            for _ in range(_WARM * windows if level != "DRAM" else 1):
                call()
            seconds = statistics.median(bench.seconds(call) for _ in range(_BATCH))
            gbps = per_thread * threads * passes / seconds / 1e9
            points.append(BandwidthPoint(threads, size, gbps, level))
    return Bandwidth(tuple(points))


def fastest(first: Bandwidth, second: Bandwidth) -> Bandwidth:
    """The faster reading of each point of two measurements of the same points."""
    pairs = zip(first.points, second.points, strict=True)
    return Bandwidth(tuple(max(pair, key=lambda point: point.gbps) for pair in pairs))

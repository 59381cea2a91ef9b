"""The limit that memory sets: the least time in which this machine can read so many bytes, measured on the spot.

To compare it with something, sample both in turn in one run: what the rest of the machine does then hits both alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from ..kernels.cpu.pool import pinned
from .device import Device
from .microbench import Bench
from .microloops import READERS

_TASKS = 8  # for each thread: a slow core then reads less than its share
_LEAST_TASK_BYTES = 64 << 10
_TRIALS = 7


class ReadLimit:
    """Reads a buffer as fast as this machine can, in the way that is fastest for the number of bytes and threads.

    Owned by one thread, which should be `lowbit.kernels.cpu.pool.pinned` while it samples.

    Parameters
    ----------
    nbytes : int
        Read by each call, in whole steps of the loops: at most 8 KiB a task fewer.
    threads : int
    device : Device
        This machine.
    bench : Bench, optional
        Compiled loops to share; its buffer must hold ``nbytes``.

    Raises
    ------
    ValueError
        If a count is not positive, or the buffer is too small.
    """

    def __init__(self, nbytes: int, threads: int, device: Device, bench: Bench | None = None) -> None:
        if nbytes < 1 or threads < 1:
            raise ValueError(f"cannot read {nbytes} bytes with {threads} threads")
        self.threads = threads
        self._bench = bench or Bench(device, nbytes + (1 << 20))
        tasks = threads * (_TASKS if nbytes >= threads * _TASKS * _LEAST_TASK_BYTES else 1)
        size = self._bench.whole_steps("stream", nbytes // tasks)
        self.nbytes = size * tasks
        self.calls: dict[str, Callable[[], None]] = {
            name: self._bench.call(name, threads, tasks, size, 1) for name in READERS
        }

    @property
    def region(self) -> tuple[int, int]:
        """Address and length of what calls read."""
        return self._bench.address, self.nbytes

    def chill(self) -> bool:
        """Evict the buffer where the machine can, and wake the threads; whether both worked."""
        return self._bench.chill(self.nbytes, self.threads)

    def sample_us(self, reader: str, protocol: str) -> float:
        """Microseconds of one call; ``cold`` chills before it, ``warm`` does not."""
        if protocol != "warm":
            self.chill()
        return self._bench.seconds(self.calls[reader]) * 1e6

    def fastest(self, protocol: str, rounds: int = _TRIALS) -> str:
        """The way of reading with the smallest median over interleaved rounds."""
        medians = self._medians_us(protocol, rounds)
        return min(medians, key=lambda name: medians[name])

    def median_us(self, protocol: str, rounds: int = _TRIALS) -> float:
        """The smallest median over interleaved rounds."""
        return min(self._medians_us(protocol, rounds).values())

    def _medians_us(self, protocol: str, rounds: int) -> dict[str, float]:
        taken: dict[str, list[float]] = {name: [] for name in self.calls}
        for call in self.calls.values():
            call()
        for _ in range(rounds):
            for name, seen in taken.items():
                seen.append(self.sample_us(name, protocol))
        return {name: statistics.median(seen) for name, seen in taken.items()}


def read_limit_gbps(nbytes: int, threads: int, device: Device, protocol: str = "cold", rounds: int = _TRIALS) -> float:
    """Decimal GB/s at which this machine can read ``nbytes`` bytes now.

    Parameters
    ----------
    nbytes, threads : int
    device : Device
        This machine.
    protocol : str
        ``cold`` reads from memory (where caches can be evicted), ``warm`` from wherever the last read left the bytes.
    rounds : int
        Interleaved readings of each way to read.

    Raises
    ------
    ValueError
        If a count is not positive.
    """
    with pinned():
        limit = ReadLimit(nbytes, threads, device)
        return limit.nbytes / limit.median_us(protocol, rounds) / 1e3

"""How one call is timed.

cold
    Before every timed call the lines of the packed operands are evicted from all caches, as the other layers
    of a model do to them between two steps, and the contestant's threads are woken by a call on a few rows.
warm
    The same call again and again: what fits a cache stays there.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

import numpy as np

from ...kernels.cpu.memory import evict
from ...kernels.cpu.pool import pinned
from ...search.statistics import median
from ...search.timing import BATCH_US, LOST_US, MAX_BATCHES, MIN_EVICTED, PREEMPTION_US, SLOT_US, preemptions
from .contestant import Entry
from .messages import Taken
from .settle import settle

COLD_CALLS = 24
"""Most calls of a cold slot."""
COLD_SLOT_US = 2 * SLOT_US
"""Evictions included."""


class Flush:
    """Puts operands out of every cache: line by line, or where a machine cannot, by reading twice what caches hold."""

    def __init__(self, cache_bytes: int) -> None:
        self._cache_bytes = cache_bytes
        self._sweep: np.ndarray | None = None

    def __call__(self, regions: tuple[tuple[int, int], ...]) -> None:
        if all(evict(address, nbytes) for address, nbytes in regions):
            return
        if self._sweep is None:
            self._sweep = np.ones(2 * self._cache_bytes // 8, np.int64)
        self._sweep += 1


class Stopwatch:
    """Times one entry, slot by slot."""

    def __init__(self, entry: Entry, flush: Callable[[tuple[tuple[int, int], ...]], None]) -> None:
        self._entry = entry
        self._flush = flush
        self._inner = 0

    def slot(self, protocol: str) -> Taken:
        """One slot on a pinned thread; returns when the contestant's other threads sleep."""
        with pinned():
            taken = self._cold() if protocol == "cold" else self._warm()
        settle()
        alone = tuple(us for us, disturbed in taken if not disturbed)
        if not alone:
            return Taken(tuple(us for us, _ in taken), True)
        lost_us = sum(us - median(alone) for us, disturbed in taken if disturbed)
        return Taken(alone, lost_us > LOST_US)

    def _cold(self) -> list[tuple[float, bool]]:
        taken: list[tuple[float, bool]] = []
        began, spent_us = perf_counter_ns(), 0.0
        while len(taken) < COLD_CALLS and (len(taken) < MIN_EVICTED or spent_us < COLD_SLOT_US):
            self._flush(self._entry.regions)
            ready = self._entry.wake() is not False
            us, disturbed = _timed(self._entry.run, 1)
            taken.append((us, disturbed or not ready))
            spent_us = (perf_counter_ns() - began) / 1e3
        return taken

    def _warm(self) -> list[tuple[float, bool]]:
        us, _ = _timed(self._entry.run, 1)
        if not self._inner:
            us, _ = _timed(self._entry.run, 1)
            self._inner = max(1, round(BATCH_US / max(us, 0.1) + 0.5))
        batches = max(1, min(MAX_BATCHES, int(SLOT_US / max(us * self._inner, 0.1))))
        return [_timed(self._entry.run, self._inner) for _ in range(batches)]


def _timed(run: Callable[[], object], inner: int) -> tuple[float, bool]:
    """Microseconds of one of ``inner`` calls, and whether another process ran meanwhile."""
    calls = range(inner)
    switches = preemptions()
    started = perf_counter_ns()
    for _ in calls:
        run()
    us = (perf_counter_ns() - started) / 1e3
    return us / inner, preemptions() - switches > us // PREEMPTION_US

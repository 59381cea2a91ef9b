"""The limit: reading as many bytes as a case's operands have, with every thread, and doing nothing with them."""

from __future__ import annotations

from collections.abc import Iterator

from ...costmodel.device import detect
from ...costmodel.microbench import Bench
from ...costmodel.readlimit import ReadLimit
from ...kernels.cpu.wake import wake
from .case import Case
from .contestant import Contestant, Entry


class Limit(Contestant):
    def open(self, threads: int) -> str:
        self._threads = threads
        self._bench: Bench | None = None
        self._largest = 0
        return "read bandwidth"

    def enter(self, case: Case, candidate: str) -> Iterator[Entry]:
        if self._bench is None or case.nbytes > self._largest:
            self._largest = case.nbytes
            self._bench = Bench(detect(), case.nbytes + (1 << 20))
        limit = ReadLimit(case.nbytes, self._threads, self._bench.device, self._bench)
        for reader, run in limit.calls.items():
            yield Entry(run, lambda: wake(self._threads), (limit.region,), reader, keep=limit)

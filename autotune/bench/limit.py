"""The limit: reading as many bytes as a case's operands have, with every thread, and doing nothing with them."""

from __future__ import annotations

from collections.abc import Iterator

from ...costmodel.device import detect
from ...costmodel.microbench import Bench
from ...costmodel.microloops import READERS
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
        bench = self._bench
        for reader in READERS:
            share = bench.whole_steps(reader, case.nbytes // self._threads)
            run = bench.call(reader, self._threads, self._threads, share, 1)
            region = bench.address, share * self._threads
            yield Entry(run, lambda: wake(self._threads), (region,), reader, keep=bench)

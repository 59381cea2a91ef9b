"""A contestant's process: ``python -m lowbit.autotune.bench.worker FD``, with one end of a socket pair.

It answers each request with one reply, and ends when its pipe closes. A contestant that crashes takes only this process
along.
"""

from __future__ import annotations

import gc
import math
from multiprocessing.connection import Connection

from ...kernels.cpu.pool import allowed_cpus
from ...search.wording import one_line
from .case import TOLERANCE
from .contestant import Contestant, Unsupported, contestant_named
from .inputs import relative_error, small_operand, truth
from .messages import Enter, Entered, Leave, Opened, Refused, Reply, Request, Setup, Taken
from .serving import answer_until_closed, find_modules_like, opened, run_worker
from .slot import Flush, Stopwatch

TRIALS = 3
"""Slots that decide between ways to store a case."""


class Stand:
    """One contestant and the case that it has entered."""

    def __init__(self, contestant: Contestant, cache_bytes: int) -> None:
        self._contestant = contestant
        self._flush = Flush(cache_bytes)
        self._stopwatch: Stopwatch | None = None

    def answer(self, request: Request) -> Reply:
        try:
            if isinstance(request, Enter):
                return self._enter(request)
            if isinstance(request, Leave):
                self._forget()
                return Opened()
            return self._time(request.protocol)
        except Unsupported as error:
            return Refused("unsupported", str(error))
        except Exception as error:
            return Refused("crashed", one_line(error))

    def _forget(self) -> None:
        self._stopwatch = None
        gc.collect()

    def _enter(self, request: Enter) -> Entered | Refused:
        """Check every way that the contestant has for the case, and keep the fastest of those that are right."""
        self._forget()
        case, wrong = request.case, None
        x, fastest_us = small_operand(case), math.inf
        entered: Entered | None = None
        for entry in self._contestant.enter(case, request.candidate):
            entry.run()
            error = None
            if entry.result is not None and entry.stored is not None:
                error = relative_error(entry.result(), truth(case, x, entry.stored))
                if not error <= TOLERANCE:
                    words = f"{entry.storage}: error {error:.3g} exceeds {TOLERANCE}"
                    wrong = wrong or Refused("wrong", words, error)
                    continue
            stopwatch = Stopwatch(entry, self._flush)
            us = min(min(stopwatch.slot(request.protocol).samples_us) for _ in range(TRIALS))
            if us < fastest_us:
                fastest_us, entered = us, Entered(entry.storage, entry.nbytes, error)
                self._stopwatch = stopwatch
        return entered or wrong or Refused("unsupported", "it has no operator for this")

    def _time(self, protocol: str) -> Taken:
        assert self._stopwatch is not None  # only what has entered is timed
        return self._stopwatch.slot(protocol)


def serve(connection: Connection) -> None:
    """Answer requests until the other side closes. The first message is a `Setup`."""
    setup: Setup = connection.recv()
    find_modules_like(setup.search_path)
    allowed_cpus()  # read before a library pins this thread

    def open_contestant() -> tuple[Contestant, str]:
        contestant = contestant_named(setup.contestant)
        return contestant, contestant.open(setup.threads)

    ready = opened(connection, open_contestant)
    if ready is None:
        return
    from ...costmodel.device import detect

    contestant, version = ready
    stand = Stand(contestant, max(cache.size_bytes for cache in detect().caches))
    gc.freeze()
    gc.disable()
    connection.send(Opened(version))
    answer_until_closed(connection, stand.answer)


if __name__ == "__main__":
    run_worker(serve)

"""A whole model's process: ``python -m lowbit.autotune.bench.model_worker FD``, with one end of a socket pair.

It answers each request with one reply, and ends when its pipe closes. It imports little, since its memory is measured:
what a contestant needs it imports itself.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from ...search.wording import one_line
from .contestant import Unsupported
from .messages import Leave, Opened, Refused, Taken
from .model_contestant import Decoder, ModelContestant, model_contestant_named
from .model_messages import Check, Checked, ModelRequest, ModelSetup, Reach, Reached, Repeat, Weighed
from .serving import answer_until_closed, find_modules_like, opened, run_worker
from .settle import settle

PREEMPTION_US = 10_000.0
"""A repetition may be preempted once in this long, as in `lowbit.search.timing`."""


class Stand:
    """One contestant, and the cache that it has filled.

    Parameters
    ----------
    contestant : ModelContestant
        Open.
    cpu : int
        See `ModelSetup`.
    before_bytes : int or None
        See `Weighed`.
    """

    def __init__(self, contestant: ModelContestant, cpu: int, before_bytes: int | None) -> None:
        self._contestant, self._cpu, self._before_bytes = contestant, cpu, before_bytes
        self._decoder: Decoder | None = None
        self._depth = 0
        self._warm: set[Repeat] = set()

    def answer(self, request: ModelRequest | Leave) -> object:
        try:
            if isinstance(request, Reach):
                return self._reach(request)
            if isinstance(request, Repeat):
                return self._repeat(request)
            if isinstance(request, Check):
                return self._check(request)
            if isinstance(request, Leave):
                self._forget()
                return Opened()
            return Weighed(peak_bytes(), self._before_bytes)
        except Unsupported as error:
            return Refused("unsupported", str(error))
        except Exception as error:
            return Refused("crashed", one_line(error))

    def _forget(self) -> None:
        self._decoder = None
        self._warm.clear()
        gc.collect()

    def _check(self, request: Check) -> Checked:
        self._forget()
        decoder = self._contestant.session(request.types, request.tokens)
        return Checked(decoder.prefill(self._tokens("check", request.tokens)).copy())

    def _reach(self, request: Reach) -> Reached:
        self._forget()
        decoder = self._contestant.session(request.types, request.depth + request.room)
        with _pinned(self._cpu):
            if request.depth:
                decoder.prefill(self._tokens("depth", request.depth))
        self._decoder, self._depth = decoder, request.depth
        return Reached(getattr(getattr(decoder, "cache", None), "nbytes", None))

    def _repeat(self, request: Repeat) -> Taken:
        with _pinned(self._cpu):
            if request not in self._warm:
                self._run(request)
                self._warm.add(request)
            switches = preemptions()
            us = self._run(request)
            disturbed = preemptions() - switches > us // PREEMPTION_US
        settle()
        return Taken((us,), disturbed)

    def _run(self, request: Repeat) -> float:
        """Microseconds that all tokens take; the cache is as before."""
        decoder = self._decoder
        assert decoder is not None  # a depth is reached first
        tokens = self._tokens(request.test, request.tokens)
        started = perf_counter_ns()
        if request.test == "pp":
            decoder.prefill(tokens)
        else:
            for token in tokens:
                decoder.step(token)
        us = (perf_counter_ns() - started) / 1e3
        decoder.truncate(self._depth)
        return us

    def _tokens(self, purpose: str, count: int) -> list[int]:
        """Random tokens, the same for every contestant."""
        random = np.random.default_rng([len(purpose), *purpose.encode()])
        tokens: list[int] = random.integers(0, self._contestant.vocabulary, count).tolist()
        return tokens


def peak_bytes() -> int | None:
    """The most resident bytes that this process ever had."""
    with suppress(OSError, ValueError, IndexError):
        # Linux counts what the process had before it became this program in the other number.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) << 10
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def preemptions() -> int:
    """How often the system has taken a thread of this process off its core; 0 where it does not count."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@contextmanager
def _pinned(cpu: int) -> Iterator[None]:
    """Keep the calling thread on ``cpu``, where the system has thread affinity."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def serve(connection: Connection) -> None:
    """Answer requests until the other side closes. The first message is a `ModelSetup`."""
    setup: ModelSetup = connection.recv()
    find_modules_like(setup.search_path)
    before_bytes = peak_bytes()

    def open_contestant() -> tuple[ModelContestant, str]:
        contestant = model_contestant_named(setup.contestant)
        return contestant, contestant.open(setup)

    ready = opened(connection, open_contestant)
    if ready is None:
        return
    contestant, version = ready
    stand = Stand(contestant, setup.cpu, before_bytes)
    gc.collect()
    gc.freeze()
    connection.send(Opened(version))
    answer_until_closed(connection, stand.answer)


if __name__ == "__main__":
    run_worker(serve)

"""A crew of worker processes that survives any candidate.

Compiled code cannot move between processes, and a compiler holds a lock within one; so each worker owns the candidates
that it has compiled. Compiling and checking runs on all workers at once, one candidate each. Timing goes to the owner,
one slot at a time with every other worker asleep in `recv`, and interleaves candidates across workers by asking their
owners in turn. A candidate that crashes or hangs costs its worker: the worker is replaced, the candidate gets its
class, and what the dead worker owned is compiled again where it is next asked for.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import IO, Self

from ..kernels.errors import DeviceError
from .last_reply import Last
from .messages import Count, Prepare, Prepared, Ready, Refused, Reply, Request, Setup, Stage
from .rounds import Fault

DEADLINES_S: Mapping[str, float] = {"start": 120.0, "compile": 60.0, "reference": 300.0, "pack": 120.0, "run": 20.0}
"""How long a worker may stay in a stage before what it works on counts as hung."""


def worker_module(backend: str) -> str:
    """Which module of this package is the worker for `Setup.backend`."""
    return "gpu_worker" if backend.startswith("sm_") else "worker"


@dataclass
class _Worker:
    """A running process and what it is busy with."""

    process: subprocess.Popen[bytes]
    connection: Connection
    stderr: IO[bytes]
    ready: bool = False
    stage: str = "start"
    since: float = field(default_factory=time.monotonic)
    task: Request | None = None

    def enter(self, stage: str) -> None:
        self.stage, self.since = stage, time.monotonic()

    def kill(self) -> int:
        """End it, whatever it does; returns the exit status that it had, negative for a signal."""
        with suppress(ProcessLookupError):
            self.process.kill()
        status = self.process.wait()
        self.connection.close()
        return status

    def last_words(self) -> str:
        self.stderr.seek(0)
        lines = self.stderr.read()[-4000:].decode(errors="replace").strip().splitlines()
        self.stderr.close()
        return lines[-1].strip() if lines else ""


class Crew:
    """Up to ``size`` workers, started when they are needed.

    Owned by one thread, and closed by its owner, best as a context manager; closing kills whatever runs. An exception
    during `work` (an interrupt, say) leaves the crew usable: busy workers are replaced.

    Parameters
    ----------
    setup : Setup
    size : int
    deadlines_s : mapping of str to float, optional
        Overrides of `DEADLINES_S`.
    """

    def __init__(self, setup: Setup, size: int, deadlines_s: Mapping[str, float] | None = None) -> None:
        self._setup = setup
        self._deadlines_s = {**DEADLINES_S, **(deadlines_s or {})}
        self._workers: list[_Worker | None] = [None] * max(size, 1)
        self._owner: dict[tuple[str, str], int] = {}
        self._homes: dict[tuple[str, str], int] = {}

    @property
    def size(self) -> int:
        return len(self._workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for index, worker in enumerate(self._workers):
            if worker is not None:
                worker.kill()
                worker.stderr.close()
                self._workers[index] = None
        self._owner.clear()
        self._homes.clear()

    def owns(self, problem: str, candidate: str) -> bool:
        """Whether a live worker has compiled and checked the candidate."""
        return (problem, candidate) in self._owner

    def ask(self, request: Request) -> Reply:
        """One request, answered by the owner of its candidate."""
        return next(reply for _, reply in self.work([request]))

    def work(
        self, requests: Iterable[Request], until: float | None = None
    ) -> Generator[tuple[Request, Reply], None, None]:
        """Answer ``requests`` on all workers at once, in whatever order they finish.

        Crashes and hangs come back as `Fault`. At ``until``, a `time.monotonic` value, the rest stays unanswered.

        Raises
        ------
        DeviceError
            If workers cannot start at all: a plugin that cannot be imported, an unknown backend.
        """
        queues: list[deque[Request]] = [deque() for _ in self._workers]
        shared: deque[Request] = deque()
        for request in requests:
            owner = self._owner_of(request)
            (shared if owner is None else queues[owner]).append(request)
        try:
            while until is None or time.monotonic() < until:
                for index in range(self.size):
                    self._feed(index, queues, shared)
                busy = [(i, w) for i, w in enumerate(self._workers) if w is not None and w.task is not None]
                if not busy:
                    return
                for index, worker in self._awake(busy, until):
                    task = worker.task
                    assert task is not None
                    reply = self._hear(index, worker)
                    if reply is None:
                        continue
                    if isinstance(reply, Prepared) and not isinstance(task, Count):
                        self._owner[task.problem, task.candidate] = index
                    yield task, reply
                for index in range(self.size):
                    if self._workers[index] is None:
                        # What waited for a worker that is gone may be compiled by any other.
                        shared.extend(queues[index])
                        queues[index].clear()
        finally:
            self._drop_busy()

    def _owner_of(self, request: Request) -> int | None:
        if isinstance(request, Count):
            return None
        return self._owner.get((request.problem, request.candidate))

    def _feed(self, index: int, queues: list[deque[Request]], shared: deque[Request]) -> None:
        worker = self._workers[index]
        if worker is not None and worker.task is not None:
            return
        request = self._next(index, queues, shared)
        if request is None:
            return
        if worker is not None and worker.process.poll() is not None:
            self._remove(index, worker)  # It died idle, of nothing that a candidate did.
            worker = None
        if worker is None:
            worker = self._workers[index] = self._start()
        worker.task = request
        if isinstance(request, Prepare) and request.code:
            self._homes[request.problem, request.code] = index
        if worker.ready:
            worker.enter("compile")
        # A worker that has died meanwhile is found dead when it is listened to.
        with suppress(OSError):
            worker.connection.send(request)

    def _next(self, index: int, queues: list[deque[Request]], shared: deque[Request]) -> Request | None:
        """What worker ``index`` does next; shared work that another worker has machine code for waits for that one."""
        if queues[index]:
            return queues[index].popleft()
        while shared:
            request = shared.popleft()
            home = self._homes.get((request.problem, request.code)) if isinstance(request, Prepare) else None
            if home is None or home == index:
                return request
            queues[home].append(request)
        return None

    def _start(self) -> _Worker:
        ours, theirs = Pipe()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 (the worker's, closed with it)
        module = f"{__package__}.{worker_module(self._setup.backend)}"
        command = [sys.executable, "-m", module, str(theirs.fileno())]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
        )
        theirs.close()
        ours.send(self._setup)
        return _Worker(process, ours, stderr)

    def _awake(self, busy: list[tuple[int, _Worker]], until: float | None) -> list[tuple[int, _Worker]]:
        """Busy workers that have said something, died, or overstayed; none if nothing happens before ``until``."""
        now = time.monotonic()
        left = min(w.since + self._deadlines_s[w.stage] - now for _, w in busy)
        left = left if until is None else min(left, until - now)
        spoken = wait([w.connection for _, w in busy], max(left, 0.0))
        now = time.monotonic()
        return [(i, w) for i, w in busy if w.connection in spoken or now >= w.since + self._deadlines_s[w.stage]]

    def _hear(self, index: int, worker: _Worker) -> Reply | None:
        """The reply to the worker's task; None while it has only announced a stage."""
        try:
            while worker.connection.poll():
                message = worker.connection.recv()
                if isinstance(message, Stage):
                    worker.enter(message.name)
                elif isinstance(message, Ready):
                    worker.ready = True
                    worker.enter("compile")
                elif isinstance(message, Refused):
                    raise DeviceError(f"a worker cannot start: {message.message}")
                elif isinstance(message, Last):
                    self._remove(index, worker)
                    return message.reply
                else:
                    worker.task = None
                    return message  # type: ignore[no-any-return]
        except (EOFError, OSError):
            return self._bury(index, worker)
        if time.monotonic() >= worker.since + self._deadlines_s[worker.stage]:
            stage, limit = worker.stage, self._deadlines_s[worker.stage]
            self._remove(index, worker)
            return Fault("hung", f"no answer within {limit:g} s in stage '{stage}'")
        return None

    def _bury(self, index: int, worker: _Worker) -> Fault:
        """Say what became of a worker whose pipe closed."""
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(timeout=5.0)
        status, words = self._remove(index, worker)
        if not worker.ready:
            raise DeviceError(f"a worker cannot start (exit status {status}): {words or 'it said nothing'}")
        if status >= 0:
            return Fault("crashed", f"exit status {status} in stage '{worker.stage}'" + (f": {words}" if words else ""))
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        kind = "illegal_instruction" if -status == signal.SIGILL else "crashed"
        return Fault(kind, f"{name} in stage '{worker.stage}'")

    def _remove(self, index: int, worker: _Worker) -> tuple[int, str]:
        worker.task = None
        status = worker.kill()
        words = worker.last_words()
        self._workers[index] = None
        self._owner = {key: owner for key, owner in self._owner.items() if owner != index}
        self._homes = {key: home for key, home in self._homes.items() if home != index}
        return status, words

    def _drop_busy(self) -> None:
        """Workers that still work on something nobody will wait for."""
        for index, worker in enumerate(self._workers):
            if worker is not None and worker.task is not None:
                self._remove(index, worker)

"""The bench's side of its workers: one process for each contestant, started anew when it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from types import TracebackType
from typing import Self

from ...kernels.cpu.pool import allowed_cpus
from .messages import Enter, Opened, Refused, Setup

START_S = 120.0
ENTER_S = 900.0
TIME_S = 120.0


class Player:
    """One contestant's process.

    Parameters
    ----------
    name : str
        See `lowbit.autotune.bench.contestant.contestant_named`.
    threads : int

    Attributes
    ----------
    opened : Opened
        Its version, or why it is absent.
    """

    worker = "worker"
    """Module of this package that the process runs."""
    start_s = START_S

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self._threads = threads
        self._process: subprocess.Popen[bytes] | None = None
        self.opened = self._start()

    def _start(self) -> Opened:
        self._connection, theirs = Pipe()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (the worker's, closed with it)
        command = [sys.executable, "-m", f"{__package__}.{self.worker}", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            env={**os.environ, **thread_settings(self._threads)},
        )
        theirs.close()
        self._connection.send(self._setup())
        reply = self._hear(self.start_s)
        if isinstance(reply, Opened):
            return reply
        assert isinstance(reply, Refused)
        return Opened(absent=f"it cannot start: {reply.message}")

    def _setup(self) -> object:
        """The first message."""
        return Setup(self.name, self._threads, tuple(sys.path))

    def _limit_s(self, request: object) -> float:
        """How long an answer may take."""
        return ENTER_S if isinstance(request, Enter) else TIME_S

    def send(self, request: object) -> None:
        """Ask; `receive` must follow."""
        if self._process is None:
            self._start()
        self._limit = self._limit_s(request)
        with suppress(OSError):  # a dead worker is found dead when it is listened to
            self._connection.send(request)

    def receive(self) -> object:
        """The reply; a crash or a hang comes back as `Refused` and ends the process."""
        return self._hear(self._limit)

    def ask(self, request: object) -> object:
        self.send(request)
        return self.receive()

    def _hear(self, limit_s: float) -> object:
        try:
            if self._connection.poll(limit_s):
                return self._connection.recv()
        except (EOFError, OSError):
            return Refused("crashed", self._bury())
        self.close()
        return Refused("hung", f"no answer within {limit_s:g} s")

    def _bury(self) -> str:
        """How a worker ended whose pipe closed."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        telling = [line for line in lines if "error" in line.lower() or "ASSERT" in line] or lines[-1:]
        status = self.close()
        try:
            how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        except ValueError:
            how = f"signal {-status}"
        return f"{how}: {telling[0].strip()}" if telling else how

    def close(self) -> int:
        """End the process; returns its exit status."""
        if self._process is None:
            return 0
        with suppress(ProcessLookupError):
            self._process.kill()
        status = self._process.wait()
        self._connection.close()
        self._stderr.close()
        self._process = None
        return status


class Team:
    """The players of one bench, closed with it."""

    def __init__(self, names: Sequence[str], threads: int) -> None:
        self.players: dict[str, Player] = {}
        try:
            for name in names:
                self.players[name] = Player(name, threads)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for player in self.players.values():
            player.close()


def thread_settings(threads: int) -> dict[str, str]:
    """Environment in which OpenMP and BLAS libraries use ``threads`` threads, each on a core of its own."""
    count, cpus = str(threads), allowed_cpus()
    places = ",".join(f"{{{cpus[i % len(cpus)]}}}" for i in range(threads))
    settings = {
        "OMP_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OMP_DYNAMIC": "false",
    }
    if threads <= len(cpus):
        settings |= {"OMP_PROC_BIND": "true", "OMP_PLACES": places}
    return settings

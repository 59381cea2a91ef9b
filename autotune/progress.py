"""How far a job is: a bar with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars


class LineProgress:
    """Plain lines: the first of each phase, its last, and at most one every ``interval_s`` seconds between; none twice.

    Parameters
    ----------
    stream : text stream
        Where the lines go; flushed after each.
    interval_s : float
        Seconds between two lines of one phase.
    clock : callable
        Seconds, monotonic.
    """

    def __init__(self, stream: TextIO, interval_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._clock = clock
        self._phase: str | None = None
        self._total: int | None = None
        self._began_s = self._printed_s = 0.0
        self._began_done = 0
        self._said: tuple[object, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.flush()

    def update(self, phase: str, done: int, total: int | None, message: str) -> None:
        """Report that ``done`` of ``total`` steps of ``phase`` are over; ``total`` may be unknown."""
        now = self._clock()
        known_phase = phase == self._phase
        if not known_phase or total != self._total:
            # What was done before the total was known says nothing about the speed.
            self._phase, self._total, self._began_s, self._began_done = phase, total, now, done
        saying = phase, done, total, message
        finishes = done == total and saying[:3] != self._said[:3]
        if saying == self._said or (known_phase and not finishes and now - self._printed_s < self._interval_s):
            return
        self._printed_s, self._said = now, saying
        count = f" {done}" if total is None else f" {done}/{total}"
        left = self._left(now, done, total)
        print(f"{phase}:{count}{left}{f'  {message}' if message else ''}", file=self._stream, flush=True)

    def _left(self, now: float, done: int, total: int | None) -> str:
        progressed, elapsed_s = done - self._began_done, now - self._began_s
        if total is None or done >= total or progressed < 1 or elapsed_s < 1:
            return ""
        return f", about {duration(elapsed_s / progressed * (total - done))} left"


class BarProgress:
    """One rich progress bar for each phase, with the time left.

    Parameters
    ----------
    stream : text stream
        A terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[message]}", markup=False),
            console=Console(file=stream),
        )
        self._phase: str | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def update(self, phase: str, done: int, total: int | None, message: str) -> None:
        """Report that ``done`` of ``total`` steps of ``phase`` are over; ``total`` may be unknown."""
        if phase != self._phase or self._task is None:
            if self._task is not None:
                self._bars.update(self._task, message="")
                self._bars.stop_task(self._task)
            self._phase = phase
            self._task = self._bars.add_task(phase, total=total, completed=done, message=message)
            return
        self._bars.update(self._task, completed=done, total=total, message=message)


def progress_on(stream: TextIO) -> LineProgress | BarProgress:
    """Bars where ``stream`` is a terminal, plain lines elsewhere."""
    return BarProgress(stream) if stream.isatty() else LineProgress(stream)


def duration(seconds: float) -> str:
    """Seconds in words: ``42 s``, ``3 min 20 s``, ``1 h 05 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"

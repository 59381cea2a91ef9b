"""Progress on terminals and elsewhere."""

from __future__ import annotations

import io

import pytest
from lowbit.autotune.progress import BarProgress, LineProgress, duration, progress_on


class Clock:
    """A clock that stands still until told otherwise."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_first_last_and_at_most_every_interval() -> None:
    stream, clock = io.StringIO(), Clock()
    with LineProgress(stream, interval_s=5, clock=clock) as progress:
        for done in range(101):
            progress.update("timing", done, 100, f"candidate {done}")
            clock.now_s += 0.2
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("timing: 0/100")
    assert lines[-1] == "timing: 100/100  candidate 100"
    # 20 s at one line every 5 s, the first one included, and the last.
    assert [line.split()[1].rstrip(",") for line in lines] == ["0/100", "25/100", "50/100", "75/100", "100/100"]


def test_no_line_is_repeated() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = LineProgress(stream, interval_s=5, clock=clock)
    for _ in range(4):
        progress.update("timing", 3, 9, "slow")
        clock.now_s += 6
    for message in ("one", "one", "another", "another"):
        progress.update("timing", 9, 9, message)
    clock.now_s += 6
    progress.update("timing", 9, 9, "another")
    assert stream.getvalue().splitlines() == ["timing: 3/9  slow", "timing: 9/9  one", "timing: 9/9  another"]


def test_time_left_follows_from_the_pace_of_the_phase() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = LineProgress(stream, interval_s=1, clock=clock)
    progress.update("compiling", 0, 10, "")
    clock.now_s += 60
    progress.update("timing", 20, 100, "")  # 20 were stored by an earlier run: they say nothing about the pace
    clock.now_s += 30
    progress.update("timing", 30, 100, "")
    assert stream.getvalue().splitlines()[-1] == "timing: 30/100, about 3 min 30 s left"


def test_time_left_counts_from_when_the_total_was_known() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = LineProgress(stream, interval_s=1, clock=clock)
    for known, message in ((900, "first"), (500, "second")):
        progress.update("features", 0, None, message)
        clock.now_s += 2
        progress.update("features", known, 1000, message)
        clock.now_s += 10
        progress.update("features", known + 10, 1000, message)
    lines = stream.getvalue().splitlines()
    assert "features: 910/1000, about 1 min 30 s left  first" in lines
    assert lines[-1] == "features: 510/1000, about 8 min 10 s left  second"


def test_an_unknown_total_shows_the_count_alone() -> None:
    stream = io.StringIO()
    LineProgress(stream).update("space", 12, None, "attend")
    assert stream.getvalue() == "space: 12  attend\n"


def test_each_phase_begins_at_once() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = LineProgress(stream, clock=clock)
    for phase in ("space", "features", "timing"):
        progress.update(phase, 0, 3, "")
    assert [line.partition(":")[0] for line in stream.getvalue().splitlines()] == ["space", "features", "timing"]


def test_bars_show_phases_counts_and_brackets_as_they_are() -> None:
    stream = Terminal()
    with progress_on(stream) as progress:
        assert isinstance(progress, BarProgress)
        progress.update("features", 0, None, "")
        progress.update("features", 7, 7, "T/16 [t16] d4")
        progress.update("timing", 1, 9, "")
    shown = stream.getvalue()
    for words in ("features", "7/7", "timing", "1/9"):
        assert words in shown


def test_lines_are_for_everything_but_terminals() -> None:
    assert isinstance(progress_on(io.StringIO()), LineProgress)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (7380, "2 h 03 min"),
    ],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words

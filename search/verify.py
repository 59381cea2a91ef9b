"""`verify`: measure the prediction's shortlist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..db.records import TIMED, Measurement
from .strategy import Choice, Parameters, Session, Strategy, measured_choice

REFINED = 2
"""Layouts whose other schedules are measured too."""

REFINED_MARGIN = 0.1
"""How much slower than the fastest layout the others may be for that."""

SECOND_CHANCES = 2
"""Other schedules of a layout that are tried if the shortlisted one does not work."""


class Verify(Strategy):
    """Measures a shortlist of layouts, then the schedules of the fastest of them; the nearest meet again in a final.

    The shortlist holds the `Parameters.top_k` layouts of the lowest predictions, each in its best predicted schedule,
    and the baseline: predictions tell layouts apart better than schedules. If none of it works, the next ones follow.
    """

    name = "verify"

    def choose(self, session: Session, parameters: Parameters) -> Choice:
        measured: dict[str, Measurement] = {}
        shortlisted: set[str] = set()
        yardstick = replace(parameters.screen, slow_factor=None)
        for names in _shortlists(_first_of_each_layout(session), parameters.top_k):
            shortlisted.update(names)
            wanted = list(dict.fromkeys([*names, session.baseline]))
            measured.update({m.candidate: m for m in session.measure(wanted, yardstick)})
            for _ in range(SECOND_CHANCES):
                measured.update({m.candidate: m for m in session.measure(_instead(session, measured), yardstick)})
            working = [m for m in measured.values() if m.status == "ok" and m.candidate in session.candidates]
            if session.exhausted or working:
                break
        if not session.exhausted:
            # A baseline that is on no shortlist is a yardstick: its schedules are nobody's opponents.
            yardsticks = {session.baseline} - shortlisted
            siblings = _siblings(session, {name: m for name, m in measured.items() if name not in yardsticks})
            measured.update({m.candidate: m for m in session.measure(siblings, parameters.screen)})
        return measured_choice(session, list(measured.values()), parameters, "verified")

    def planned(self, candidates: int, parameters: Parameters) -> int:
        return min(2 * parameters.top_k, candidates) + 1


def _shape(session: Session, name: str) -> tuple[str, str]:
    candidate = session.candidates[name]
    return candidate.layout, candidate.pipeline


def _first_of_each_layout(session: Session) -> list[str]:
    """Candidates in the order of their predictions, one for each layout and pipeline before any other schedule."""
    first: dict[tuple[str, str], str] = {}
    for name in session.candidates:
        first.setdefault(_shape(session, name), name)
    return list(dict.fromkeys([*first.values(), *session.candidates]))


def _instead(session: Session, measured: dict[str, Measurement]) -> list[str]:
    """The next schedule of each layout of which nothing that was tried works."""
    shapes: dict[tuple[str, str], bool] = {}
    for name, m in measured.items():
        if name in session.candidates:
            shape = _shape(session, name)
            shapes[shape] = shapes.get(shape, False) or m.status in TIMED
    following: dict[tuple[str, str], str] = {}
    for name in session.candidates:
        if name not in measured and shapes.get(_shape(session, name)) is False:
            following.setdefault(_shape(session, name), name)
    return list(following.values())


def _siblings(session: Session, measured: dict[str, Measurement]) -> list[str]:
    """Other schedules of the fastest layouts, those of the fastest first."""
    timed = sorted((m.median_us, m.candidate) for m in measured.values() if m.status == "ok" and m.median_us)
    if not timed:
        return []
    near = [name for us, name in timed if us <= timed[0][0] * (1 + REFINED_MARGIN) and name in session.candidates]
    shapes = list(dict.fromkeys(_shape(session, name) for name in near))[:REFINED]
    others = [name for name in session.candidates if name not in measured and _shape(session, name) in shapes]
    return sorted(others, key=lambda name: shapes.index(_shape(session, name)))


def _shortlists(names: Sequence[str], length: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), max(length, 1)):
        yield names[start : start + max(length, 1)]

"""`oracle`: measure everything."""

from __future__ import annotations

from dataclasses import replace

from .strategy import Choice, Parameters, Session, Strategy, measured_choice

SLOW_FACTOR = 3.0
"""Candidates this much slower than the fastest get no more than the screening rounds."""


class Oracle(Strategy):
    """Every candidate, the lowest prediction first, so that an interrupted run has measured the likely winners."""

    name = "oracle"

    def choose(self, session: Session, parameters: Parameters) -> Choice:
        yardstick = session.measure([session.baseline], parameters.screen)
        measured = session.measure(list(session.candidates), replace(parameters.screen, slow_factor=SLOW_FACTOR))
        return measured_choice(session, [*measured, *yardstick], parameters, "measured")

    def planned(self, candidates: int, parameters: Parameters) -> int:
        return candidates + 1

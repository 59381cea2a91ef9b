"""`lep`: take the prediction's word."""

from __future__ import annotations

from .strategy import Choice, Parameters, Session, Strategy, predicted_choice


class Lep(Strategy):
    """The lowest predicted time, ties settled by the least work; measures nothing."""

    name = "lep"
    measures = False

    def choose(self, session: Session, parameters: Parameters) -> Choice:
        return predicted_choice(session)

    def planned(self, candidates: int, parameters: Parameters) -> int:
        return 0

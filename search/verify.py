"""`verify`: measure the prediction's shortlist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..db.records import Measurement
from .strategy import Choice, Parameters, Session, Strategy, measured_choice


class Verify(Strategy):
    """The `Parameters.top_k` lowest predictions and the baseline, measured; the nearest meet again in a final.

    If none of the shortlist works, the next ones follow.
    """

    name = "verify"

    def choose(self, session: Session, parameters: Parameters) -> Choice:
        measured: dict[str, Measurement] = {}
        yardstick = replace(parameters.screen, slow_factor=None)
        for names in _shortlists(list(session.candidates), parameters.top_k):
            wanted = list(dict.fromkeys([*names, session.baseline]))
            measured.update({m.candidate: m for m in session.measure(wanted, yardstick)})
            if session.exhausted or any(m.status == "ok" for name, m in measured.items() if name in names):
                break
        return measured_choice(session, list(measured.values()), parameters, "verified")

    def planned(self, candidates: int, parameters: Parameters) -> int:
        return min(parameters.top_k, candidates) + 1


def _shortlists(names: Sequence[str], length: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), max(length, 1)):
        yield names[start : start + max(length, 1)]

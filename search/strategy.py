"""The seam between what is to be decided and how: strategies over a session."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..db.records import TIMED, Measurement
from ..kernels.candidate import Candidate
from ..kernels.errors import CompileError, LowbitError
from ..kernels.problem import Problem
from .rounds import Effort
from .statistics import settle, tied

SCREEN = Effort()
FINAL = Effort(min_rounds=12, max_rounds=40, target_spread=0.02)
PREDICTED_TIE = 0.03
"""Predictions closer than this are ties."""
FINALISTS = 4
FINAL_MARGIN = 0.08
"""Candidates screened within this much of the fastest meet again in the final."""


class Session(Protocol):
    """One problem at one context length on one device, as a strategy sees it.

    Owned by the caller of the strategy. Candidates are known by their names.
    """

    @property
    def problem(self) -> Problem: ...

    @property
    def tokens(self) -> int: ...

    @property
    def candidates(self) -> Mapping[str, Candidate]:
        """Every candidate, the lowest prediction first."""

    @property
    def predicted_us(self) -> Mapping[str, float]:
        """Predicted time of one call, in microseconds, of each candidate; infinite where nothing can be predicted."""

    @property
    def baseline(self) -> str:
        """Name of what speed-ups are quoted against. It may be measured, although not always among `candidates`."""

    @property
    def steady(self) -> str:
        """The layout that predictions like best over all lengths of the problem; empty if there is none."""

    @property
    def study_key(self) -> str:
        """What identifies these measurements: problem, context length, protocol, device and toolchain."""

    @property
    def exhausted(self) -> bool:
        """Whether the session's time is up. `measure` then returns what is known and times nothing."""

    def measure(self, names: Sequence[str], effort: Effort, final: bool = False) -> list[Measurement]:
        """Measure candidates against each other.

        Stored measurements of this device, toolchain and protocol are returned as they are; each fresh one is
        committed as soon as it is finished.

        Parameters
        ----------
        names : sequence of str
            Candidates, most promising first.
        effort : Effort
        final : bool
            Measure all of ``names`` anew, unless an earlier run had brought this session to its end.

        Returns
        -------
        list of Measurement
            In the order of ``names``, without those for which the time was too short.

        Raises
        ------
        NoiseError
            If something had to be measured and the machine was too busy for all of it.
        """


@dataclass(frozen=True)
class Choice:
    """What a strategy decided.

    Attributes
    ----------
    candidate : Candidate
    provenance : str
        ``predicted``, ``verified`` or ``measured``; see `lowbit.db.records.PROVENANCES`.
    predicted_us : float or None
        None for a baseline whose cost nobody predicted.
    measurement : Measurement or None
        None if nothing was measured.
    tied : tuple of str
        Other candidates that the measurement, or the prediction, cannot tell from this one.
    baseline : Measurement or None
    """

    candidate: Candidate
    provenance: str
    predicted_us: float | None
    measurement: Measurement | None = None
    tied: tuple[str, ...] = ()
    baseline: Measurement | None = None


@dataclass(frozen=True)
class Parameters:
    """What strategies can be told; each takes what concerns it.

    Parameters
    ----------
    top_k : int
        Length of the LEP shortlist.
    trials : int
        Candidates that an Optuna study evaluates, its earlier runs included.
    study_path : Path or None
        SQLite file of Optuna studies; None keeps the study in memory.
    screen, final : Effort
    seed : int
    """

    top_k: int = 8
    trials: int = 40
    study_path: Path | None = None
    screen: Effort = SCREEN
    final: Effort = FINAL
    seed: int = 0


class Strategy(ABC):
    """Chooses a candidate of a session.

    Stateless between calls; it owns nothing, keeps no reference to the session, and prints nothing. Times are in
    microseconds. Candidates that are wrong, crash or hang cannot win. If the time is up before anything correct was
    measured the choice is the prediction's, and says so.

    Raises
    ------
    CompileError
        If no candidate works.
    NoiseError
        From the session.
    """

    name: str
    measures: bool = True
    """Whether it needs the device."""

    @abstractmethod
    def choose(self, session: Session, parameters: Parameters) -> Choice:
        """Decide, measuring through the session as much as the strategy needs."""

    @abstractmethod
    def planned(self, candidates: int, parameters: Parameters) -> int:
        """How many of ``candidates`` it expects to measure, the baseline included, for estimates of the time left."""


def predicted_choice(
    session: Session, baseline: Measurement | None = None, faulty: frozenset[str] = frozenset()
) -> Choice:
    """The candidate with the lowest prediction that is not known to be ``faulty``.

    Predictions within `PREDICTED_TIE` of the lowest are ties, for the model errs by more than that. Among them the
    layout wins that suits the problem's other lengths too, so that a layout changes for a reason; then the schedule
    that walks the packed operands least often, and the one with least machinery. Each other layout and pipeline among
    them is tied, in its best predicted schedule.
    """
    working = [name for name in session.candidates if name not in faulty]
    if not working:
        raise CompileError(f"no candidate of {session.problem.key} works on this device")
    lowest = session.predicted_us[working[0]]
    ties = [name for name in working if session.predicted_us[name] <= lowest * (1 + PREDICTED_TIE)] or working[:1]

    def effort(name: str) -> tuple[int, int, int, int]:
        return session.candidates[name].plan.effort

    steady = [name for name in ties if session.candidates[name].layout == session.steady]
    chosen = session.candidates[min(steady or ties, key=effort)]
    shapes: dict[tuple[str, str], str] = {}
    for name in ties if math.isfinite(lowest) else ():
        each = session.candidates[name]
        shapes.setdefault((each.layout, each.pipeline), name)
    shapes.pop((chosen.layout, chosen.pipeline), None)
    return Choice(
        chosen, "predicted", session.predicted_us[chosen.name], tied=tuple(shapes.values()), baseline=baseline
    )


def measured_choice(
    session: Session, measurements: Sequence[Measurement], parameters: Parameters, provenance: str
) -> Choice:
    """Let the fastest of ``measurements`` meet again, and choose; the prediction if none is correct."""
    newest = {m.candidate: m for m in measurements}
    baseline = newest.get(session.baseline)
    # A baseline outside the space is a yardstick, not a contestant.
    contest = {name: m for name, m in newest.items() if name in session.candidates}
    finalists = near_best(list(contest.values()))
    if len(finalists) > 1 and not session.exhausted:
        contest.update({m.candidate: m for m in session.measure(finalists, parameters.final, final=True)})
    winners = settle(list(contest.values()), session.candidates, session.predicted_us)
    opponents = [m for name, m in contest.items() if name != session.baseline and m.status in TIMED]
    if not winners or (not opponents and len(session.candidates) > 1):
        # A baseline that found no opponent, for noise or lack of time, has won nothing.
        faulty = frozenset(name for name, m in newest.items() if m.status not in TIMED)
        return predicted_choice(session, baseline, faulty)
    best = winners[0]
    if best.candidate == session.baseline:
        baseline = best
    return Choice(
        session.candidates[best.candidate],
        provenance,
        session.predicted_us[best.candidate],
        best,
        tuple(m.candidate for m in winners[1:]),
        baseline if baseline is not None and baseline.median_us is not None else None,
    )


def near_best(measurements: Sequence[Measurement]) -> list[str]:
    """Names of the correct candidates near the fastest, fastest first, at most `FINALISTS` unless more are tied."""
    correct = sorted(
        (m for m in measurements if m.status == "ok" and m.median_us), key=lambda m: m.median_us or math.inf
    )
    if not correct:
        return []
    bound = (correct[0].median_us or math.inf) * (1 + FINAL_MARGIN)
    near = [m.candidate for m in correct if (m.median_us or math.inf) <= bound]
    return near[: max(FINALISTS, min(len(tied(measurements)), 2 * FINALISTS))]


def strategy_named(name: str) -> Strategy:
    """``lep``, ``verify``, ``optuna`` or ``oracle``.

    Raises
    ------
    LowbitError
        If there is no such strategy.
    """
    from .lep import Lep
    from .optuna_study import OptunaStudy
    from .oracle import Oracle
    from .verify import Verify

    strategies: dict[str, type[Strategy]] = {each.name: each for each in (Lep, Verify, OptunaStudy, Oracle)}
    try:
        return strategies[name]()
    except KeyError:
        raise LowbitError(f"unknown strategy {name!r}: choose one of {', '.join(strategies)}") from None

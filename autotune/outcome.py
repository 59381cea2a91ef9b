"""What tuning is told and what it reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..db.records import Measurement
from ..kernels.problem import USER, Problem
from ..search.strategy import Choice
from ..search.tiles import OUT_OF_TIME
from .phases import Phases

FAULTS = ("wrong", "crashed", "hung", "illegal_instruction")
"""Statuses of candidates that ran and did not work."""

DEFAULT_PROTOCOL = "cold"
"""Between two decode steps of one layer all other layers pass through the caches."""


@dataclass(frozen=True)
class Options:
    """How to tune.

    Parameters
    ----------
    db_path : Path
        Database; created if missing.
    device : str
        Backend: a name for `backend_named`, or ``module:callable`` that makes one.
    strategy : str or None
        ``lep``, ``verify``, ``optuna`` or ``oracle``; None for ``verify`` where the device is at hand, else ``lep``.
    top_k : int or None
        Length of the predicted shortlist; 8, or 4 with ``quick``.
    trials : int
        Trials of an Optuna study.
    budget_s : float or None
        Seconds after which counting instructions and measuring stop. What is then undecided is predicted.
    threads : int or None
        Threads of a decode step; the device's cores if None.
    quick : bool
        Fewer samples and candidates.
    plugins : tuple of str
        Modules to import first, here and in every worker.
    protocol : str
        ``cold`` or ``warm``; see `lowbit.search.timing`.
    gpu : str or None
        Board of a GPU architecture; its most common one if None.
    asked : str
        The options of the command that say which problems were asked for, for the record of runs.
    deadlines_s : mapping of str to float
        Overrides of `lowbit.search.crew.DEADLINES_S`.
    """

    db_path: Path
    device: str = "cpu"
    strategy: str | None = None
    top_k: int | None = None
    trials: int = 40
    budget_s: float | None = None
    threads: int | None = None
    quick: bool = False
    plugins: tuple[str, ...] = ()
    protocol: str = DEFAULT_PROTOCOL
    gpu: str | None = None
    asked: str = ""
    deadlines_s: Mapping[str, float] = field(default_factory=dict)

    def command(self, work: Mapping[Problem, Sequence[int]] | None = None) -> str:
        """One line that says what was asked for, for the record of runs.

        Parameters
        ----------
        work : mapping of Problem to lengths, optional
            Recorded problem by problem where `asked` does not say it.
        """
        user = self.device.startswith(USER)
        parts = [f"kernel {self.device.removeprefix(USER)}" if user else f"--device {self.device}"]
        parts += [f"--gpu {self.gpu!r}"] if self.gpu else []
        parts += [self.asked] if self.asked else []
        parts += [f"--strategy {self.strategy}"] if self.strategy else []
        parts += [f"--budget {self.budget_s:g}"] if self.budget_s is not None else []
        parts += ["--quick"] if self.quick else []
        parts += [f"--plugin {each}" for each in self.plugins]
        if work and not self.asked:
            names = (f"{problem.key} at {','.join(map(str, lengths))}" for problem, lengths in work.items())
            parts.append(f"({'; '.join(names)})")
        return " ".join(["autotune", *parts])


class Progress(Protocol):
    """Where a job says how far it is."""

    def update(self, phase: str, done: int, total: int | None, message: str) -> None:
        """``done`` of ``total`` steps of ``phase`` are over; ``total`` may be unknown."""


class Silent:
    """A `Progress` that says nothing."""

    def update(self, phase: str, done: int, total: int | None, message: str) -> None:
        pass


@dataclass(frozen=True)
class Decision:
    """What was chosen for one problem at one context length.

    Attributes
    ----------
    problem : str
    tokens : int
    choice : Choice
    bandwidth_share : float or None
        Time that reading the operands at the measured bandwidth would take, as a fraction of the median.
    """

    problem: str
    tokens: int
    choice: Choice
    bandwidth_share: float | None = None

    @property
    def speedup(self) -> float | None:
        """Baseline's time over the winner's."""
        measurement, baseline_us = self.choice.measurement, self.baseline_us
        if measurement is None or measurement.median_us is None or baseline_us is None:
            return None
        return baseline_us / measurement.median_us

    @property
    def baseline_us(self) -> float | None:
        return None if self.choice.baseline is None else self.choice.baseline.median_us

    def as_dict(self) -> dict[str, Any]:
        candidate, measurement = self.choice.candidate, self.choice.measurement
        return {
            "problem": self.problem,
            "tokens": self.tokens,
            "winner": {
                "layout": candidate.layout,
                "pipeline": candidate.pipeline,
                "schedule": candidate.plan.as_dict(),
            },
            "provenance": self.choice.provenance,
            "predicted_us": self.choice.predicted_us,
            "median_us": None if measurement is None else measurement.median_us,
            "spread": None if measurement is None else measurement.spread,
            "samples": None if measurement is None else measurement.samples,
            "protocol": None if measurement is None else measurement.protocol,
            "tied": list(self.choice.tied),
            "baseline_us": self.baseline_us,
            "speedup": self.speedup,
            "bandwidth_share": self.bandwidth_share,
        }


@dataclass
class TuneReport:
    """What a run found, complete or interrupted.

    Attributes
    ----------
    device : dict
        `lowbit.costmodel.device.Device.as_dict`.
    db : Path
    decisions : list of Decision
        In the order of problems and context lengths.
    candidates : int
        Of all problems' spaces.
    reasons : Counter
        How many were pruned from them, by reason.
    unknown : Counter
        Opcodes that the analyzer does not know, by how many kernels have one: they are priced as ``other``.
    unpredicted : Counter
        Candidates without features, by reason: their code cannot be counted, or was not within the budget. They are
        ranked last.
    select_ms : float
        Time to rank all spaces from their features, at all context lengths.
    measurements : dict
        The newest measurement of everything that the strategy asked for.
    rounds, tainted : int
        Timing rounds, and how many of them contention spoilt.
    unmeasured : int
        Candidates that contention or the budget kept from being measured; a later run measures them.
    noisy : list of str
        What could not be decided because of contention, and was predicted.
    undecided : dict of str to str
        What has no winner, for nothing of it was predicted or measured, and the most common reason why.
    phases : list of Phases
        Whether each problem's layout changes with its length, stored winners of earlier runs included.
    """

    device: dict[str, Any]
    db: Path
    decisions: list[Decision] = field(default_factory=list)
    candidates: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    unpredicted: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    select_ms: float = 0.0
    measurements: dict[tuple[str, int, str], Measurement] = field(default_factory=dict)
    rounds: int = 0
    tainted: int = 0
    unmeasured: int = 0
    noisy: list[str] = field(default_factory=list)
    undecided: dict[str, str] = field(default_factory=dict)
    phases: list[Phases] = field(default_factory=list)

    @property
    def unchecked(self) -> list[str]:
        """Where no winner was checked although candidates ran: all that ran were faulty, with how many of each fault.

        What contention kept from being decided is not among them; see `noisy`.
        """
        checked = {(each.problem, each.tokens) for each in self.decisions if each.choice.measurement is not None}
        faults: dict[tuple[str, int], Counter[str]] = {}
        for (problem, tokens, _), measurement in self.measurements.items():
            if measurement.status in FAULTS and (problem, tokens) not in checked:
                faults.setdefault((problem, tokens), Counter())[measurement.status] += 1
        found = []
        for (problem, tokens), counts in faults.items():
            place = f"{problem}, {tokens} {Problem.parse(problem).length_name}"
            if place not in self.noisy:
                found.append(f"{place} ({', '.join(f'{count} {status}' for status, count in counts.most_common())})")
        return found

    @property
    def without_winner(self) -> str:
        """What `undecided` holds in one line, each reason once; empty if everything has a winner."""
        places: dict[str, list[str]] = {}
        for place, reason in self.undecided.items():
            places.setdefault(reason, []).append(place)
        told = "; ".join(f"{reason} ({'; '.join(each)})" for reason, each in places.items())
        return told + ("; the same command goes on, further with a longer budget" if OUT_OF_TIME in places else "")

    def as_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "device": self.device,
            "problems": [decision.as_dict() for decision in self.decisions],
            "phases": [each.as_dict() for each in self.phases],
            "space": {
                "candidates": self.candidates,
                "pruned": self.reasons.total(),
                "reasons": dict(self.reasons.most_common()),
                "unpredicted": dict(self.unpredicted.most_common()),
            },
            "unknown_opcodes": dict(self.unknown.most_common()),
            "select_ms": self.select_ms,
            "statuses": dict(Counter(m.status for m in self.measurements.values()).most_common()),
            "rounds": {
                "timed": self.rounds,
                "tainted": self.tainted,
                "unmeasured": self.unmeasured,
                "too_noisy": self.noisy,
                "undecided": self.undecided,
            },
            "db": str(self.db),
        }


class TuneInterrupted(KeyboardInterrupt):
    """Tuning was interrupted; everything finished is stored. ``report`` holds what had been decided."""

    def __init__(self, report: TuneReport) -> None:
        super().__init__("tuning was interrupted; what is finished is stored, and the same command resumes it")
        self.report = report

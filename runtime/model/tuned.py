"""Which candidates a decoder uses: those of the database, or what it falls back on."""

from __future__ import annotations

from dataclasses import replace

from ...kernels.candidate import Candidate
from ...kernels.cpu import space
from ...kernels.cpu.isa import Isa
from ...kernels.problem import Problem
from ..attention import precision_of
from ..segment import KVLayout
from ..select import Database
from .config import Config


def matrix_candidate(database: Database, rows: int, columns: int, precision: str) -> Candidate:
    """What a matrix is packed in and multiplied by."""
    return database.choose(Problem("gemv", 1, 1, columns, precision), rows).candidate


def attention_problem(config: Config, k_precision: str, v_precision: str) -> Problem:
    """A decode step's attention."""
    precision = "+".join(dict.fromkeys((k_precision, v_precision)))
    return Problem("attend", config.heads, config.kv_heads, config.head_dim, precision, window=config.window)


class Readers:
    """How each pair of layouts is read: by the candidate that it was chosen with, or a middle schedule.

    Parameters
    ----------
    problem : Problem
    isa : Isa
    threads : int
    """

    def __init__(self, problem: Problem, isa: Isa, threads: int) -> None:
        self._problem, self._isa, self._threads = problem, isa, threads
        self._known: dict[KVLayout, Candidate] = {}

    def learn(self, candidate: Candidate) -> KVLayout:
        """Remember a candidate for its layouts."""
        assert candidate.k is not None and candidate.v is not None
        layout = KVLayout(candidate.k, candidate.v)
        self._known[layout] = candidate
        return layout

    def __call__(self, layout: KVLayout) -> Candidate:
        found = self._known.get(layout)
        if found is None:
            found = self._known[layout] = self._untuned(layout)
        return found

    def _untuned(self, layout: KVLayout) -> Candidate:
        """For layouts that nobody chose here, such as those of a restored cache."""
        problem = replace(self._problem, precision=precision_of(layout))
        schedules = space.schedules(problem, self._isa, self._threads)
        tried = [
            Candidate(layout.k, layout.v, pipeline, schedule)
            for pipeline in ("integer", "float")
            for schedule in schedules
        ]
        for candidate in tried:
            if (
                space.rejection(problem, candidate, self._isa) or space.unpromising(problem, candidate, self._isa)
            ) is None:
                return candidate
        return next(each for each in tried if space.rejection(problem, each, self._isa) is None)

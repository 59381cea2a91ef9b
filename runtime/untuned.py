"""What is taken for a problem that nothing fits that was tuned: predictions, and then a rule of thumb."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from ..kernels.backend import Backend
from ..kernels.candidate import Candidate
from ..kernels.problem import Problem
from .choice import Choice, untuned_length

if TYPE_CHECKING:
    from .stored_model import StoredModel

MOST_PREDICTED = 3
"""Predicted candidates that are tried, if those before them do not compile."""


class Guesses:
    """Untuned choices of one problem on one device.

    Parameters
    ----------
    problem : Problem
    backend : Backend
    threads : int
    model : StoredModel or None
        What prices candidates, where it is shipped.
    """

    def __init__(self, problem: Problem, backend: Backend, threads: int, model: StoredModel | None) -> None:
        self.model = model
        self._problem, self._backend, self._threads = problem, backend, threads

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Those that `Backend.untuned` names."""
        return tuple(self._backend.untuned(self._problem, self._threads))

    @property
    def baseline(self) -> Candidate:
        return self._backend.baseline(self._problem, self._threads)

    def choices(self, tokens: int) -> Iterator[Choice]:
        """By prediction where that can be had, by a rule of thumb, and the baseline last."""
        if self.model is not None:
            prices = self.model.prices_us(self._problem, self.candidates, untuned_length(tokens))
            for candidate in sorted(prices, key=prices.__getitem__)[:MOST_PREDICTED]:
                yield Choice(None, candidate, "predicted")
        usual = next(self._backend.untuned(self._problem, self._threads))
        for candidate in dict.fromkeys((usual, self.baseline)):
            yield Choice(None, candidate, "default")

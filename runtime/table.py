"""One problem's kernels for every context length: looked up in a decode step, made when first asked for."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ..kernels.backend import Kernel
from ..kernels.candidate import Candidate
from ..kernels.errors import CompileError, LayoutError
from ..kernels.problem import MOST_TOKENS, Problem, check_tokens
from .choice import Choice


class Break(NamedTuple):
    """From which context length on a choice comes first."""

    tokens_from: int
    choice: Choice


class SelectTable:
    """The choices of one problem on one device, by context length.

    Lengths fall into rows, within which the order of choices is the same. A row's kernel is compiled when a length in
    it is first asked for; from then on `select` is a search in a sorted tuple. Safe to use from several threads.

    Parameters
    ----------
    problem : Problem
    starts : tuple of int
        First context length of each row, ascending, the first one 1.
    choices : callable
        From a context length to its choices, best first; the last one is never skipped.
    kernel : callable
        Compiles a candidate, or returns what it made of it before. Raises `CompileError` or `LayoutError`.
    tell : callable
        Told the length, the choice and what was skipped for which reason, whenever a row gets its kernel.
    """

    def __init__(
        self,
        problem: Problem,
        starts: tuple[int, ...],
        choices: Callable[[int], Iterator[Choice]],
        kernel: Callable[[Candidate], Kernel],
        tell: Callable[[int, Choice, Mapping[str, str]], None],
    ) -> None:
        self.problem = problem
        self._ranked, self._kernel, self._tell = choices, kernel, tell
        # The last row begins beyond the longest context and never gets a kernel. So has a length below 1 none, whose
        # row is the one before the first.
        self._starts = (*starts, MOST_TOKENS + 1)
        self._kernels: list[Kernel | None] = [None] * len(self._starts)
        self._choices: list[Choice | None] = [None] * len(self._starts)
        self._refused: dict[str, str] = {}
        self._lock = threading.Lock()

    def select(self, tokens: int) -> Kernel:
        """The kernel for a context length. Allocates nothing, once a length of the same row has been asked for.

        Raises
        ------
        ProblemError
            If ``tokens`` is no context length.
        CompileError
            If nothing compiles.
        """
        return self.ready(tokens) or self._compiled(check_tokens(tokens))

    def ready(self, tokens: int) -> Kernel | None:
        """The same if it takes no compiling; None as well for what is no context length."""
        return self._kernels[bisect_right(self._starts, tokens) - 1] if type(tokens) is int else None

    def choose(self, tokens: int) -> Choice:
        """What `select` uses, or would try to compile first.

        Raises
        ------
        ProblemError
            If ``tokens`` is no context length.
        """
        row = self._row(check_tokens(tokens))
        choice = self._choices[row]
        if choice is None:
            with self._lock:
                for choice in self._ranked(self._starts[row]):
                    if choice.candidate.name not in self._refused:
                        break
                assert choice is not None, "there is always a default"
                self._choices[row] = choice
        return choice

    def breaks(self) -> tuple[Break, ...]:
        """The choices that come first, each with the length from which on it does."""
        found: list[Break] = []
        for start in self._starts[:-1]:
            choice = self.choose(start)
            if not found or found[-1].choice != choice:
                found.append(Break(start, choice))
        return tuple(found)

    def _row(self, tokens: int) -> int:
        return bisect_right(self._starts, tokens) - 1

    def _compiled(self, tokens: int) -> Kernel:
        row = self._row(tokens)
        kernel = self._kernels[row]
        if kernel is not None:
            return kernel  # the length was of another integer type
        skipped: dict[str, str] = {}
        ranked = self._ranked(self._starts[row])
        choice = next(ranked)
        while kernel is None:
            name = choice.candidate.name
            try:
                if name in self._refused:
                    raise CompileError(self._refused[name])
                kernel = self._kernel(choice.candidate)
            except (CompileError, LayoutError) as error:
                following = next(ranked, None)
                if following is None:
                    raise
                choice, skipped[name] = following, str(error)
                self._refuse(name, skipped[name])
        self._tell(tokens, choice, skipped)
        self._kernels[row] = kernel
        return kernel

    def _refuse(self, name: str, reason: str) -> None:
        with self._lock:
            self._refused[name] = reason
            self._choices = [None] * len(self._choices)

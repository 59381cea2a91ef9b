"""Kernels of somebody's own on the CPU: their space, and why a candidate does not compile.

The candidates are those of the operator that contracts the same operands, without what the kernel cannot use: threads
where it takes no range of tokens, blocks where it takes no block. A candidate's tile functions are the very ones that
are counted; the kernel around them is compiled by Numba, once for all candidates unless it reads single elements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from numba.core.errors import NumbaError

from ..backend import Backend, Code, Rejected
from ..candidate import PIPELINES, Candidate
from ..errors import CompileError, LowbitError, ProblemError
from ..plugin import LAYOUT_NEEDED
from ..problem import USER, Problem
from ..user import Definition, definition_of, load_definition
from . import space as candidates
from .backend import CpuBackend
from .spec import TileSpec
from .user_kernel import UserKernel

BLOCK_TOKENS = 256
"""Tokens of a block in the space of kernels that do not take one."""

MOST_OPERATOR_CHANNELS = 1024
_PLACE = re.compile(r"During: .* at (\S+) \((\d+)\)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CONTRACTIONS = {("k",): "qk", ("v",): "sv", ("k", "v"): "attend"}


class UserBackend(Backend):
    """One kernel of somebody's own on the CPU. See `lowbit.kernels.backend.Backend`.

    Parameters
    ----------
    definition : Definition
    """

    name = "cpu"

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self._cpu = CpuBackend()

    def target(self) -> str:
        return self._cpu.target()

    def toolchain(self) -> str:
        return f"{self._cpu.toolchain()}, {self.definition.operator} {self.definition.digest}"

    def tile_toolchain(self) -> str:
        return self._cpu.tile_toolchain()

    def space(self, problem: Problem, threads: int) -> Iterator[Candidate | Rejected]:
        seen: set[Candidate] = set()
        for each in self._cpu.space(self._contraction(problem), threads):
            if (each.candidate if isinstance(each, Rejected) else each).pipeline not in PIPELINES:
                continue
            candidate = self._usable(each.candidate if isinstance(each, Rejected) else each)
            if candidate in seen:
                continue
            seen.add(candidate)
            if isinstance(each, Rejected):
                yield replace(each, candidate=candidate)
            elif candidate.pipeline not in self.definition.pipelines:
                yield Rejected(candidate, f"the kernel is declared for {self.definition.pipelines[0]}s alone", True)
            elif problem.rows % candidate.schedule.rows:
                rows = candidate.schedule.rows
                yield Rejected(candidate, f"tiles of {rows} rows do not divide the kernel's {problem.rows}")
            else:
                yield candidate

    def baseline(self, problem: Problem, threads: int) -> Candidate:
        found = self._usable(self._cpu.baseline(self._contraction(problem), threads))
        rows = next(count for count in range(found.schedule.rows, 0, -1) if problem.rows % count == 0)
        return replace(found, plan=replace(found.schedule, rows=rows))

    def compile(self, problem: Problem, candidate: Candidate) -> UserKernel:
        specs = self._specs(problem, candidate)
        if problem.rows % candidate.schedule.rows:
            raise CompileError(f"tiles of {candidate.schedule.rows} rows do not divide the kernel's {problem.rows}")
        try:
            return self._compiled(problem, candidate, specs)
        except LowbitError as error:
            raise CompileError(f"{candidate.layout}: {error}") from error
        except Exception as error:
            raise CompileError(f"{self.definition.name}: {numba_reason(error)}") from error

    def _compiled(self, problem: Problem, candidate: Candidate, specs: Mapping[str, TileSpec]) -> UserKernel:
        """The kernel, its operands' layouts in their types if it turns out to need them."""
        try:
            return UserKernel(self.definition, problem, candidate, specs)
        except NumbaError as error:
            if LAYOUT_NEEDED not in str(error):
                raise
        self.definition.reads_elements = True
        return UserKernel(self.definition, problem, candidate, specs)

    def tiles(self, problem: Problem, candidate: Candidate) -> tuple[str, ...]:
        return self._cpu.tiles(self._contraction(problem), candidate)

    def tile(self, problem: Problem, candidate: Candidate, symbol: str) -> Code:
        return self._cpu.tile(self._contraction(problem), candidate, symbol)

    def code(self, problem: Problem, candidate: Candidate) -> list[Code]:
        return self._cpu.code(self._contraction(problem), candidate)

    def _specs(self, problem: Problem, candidate: Candidate) -> dict[str, TileSpec]:
        contraction, isa = self._contraction(problem), self._cpu.isa()
        reason = candidates.rejection(contraction, candidate, isa)
        if reason is not None:
            raise CompileError(f"{candidate.layout}: {reason}")
        return {spec.role: spec.canonical for spec in candidates.tile_specs(contraction, candidate, isa)}

    def _contraction(self, problem: Problem) -> Problem:
        """The operator that has the same tiles, on one head: a range of tokens is what a kernel's threads share."""
        if problem.operator != self.definition.operator:
            raise ProblemError(f"{problem.key} is no problem of {self.definition.operator}")
        operator = _CONTRACTIONS[tuple(self.definition.roles)]
        if operator == "qk" and problem.head_dim > MOST_OPERATOR_CHANNELS:
            operator = "gemv"
        return Problem(operator, 1, 1, problem.head_dim, problem.precision, problem.rows)

    def _usable(self, candidate: Candidate) -> Candidate:
        """The candidate without what the kernel has no use for."""
        schedule = candidate.schedule
        if not self.definition.ranged:
            schedule = replace(schedule, splits=1, threads=1)
        if not self.definition.blocked:
            schedule = replace(schedule, block=BLOCK_TOKENS)
        return replace(candidate, plan=schedule)


def numba_reason(error: Exception) -> str:
    """One line of what Numba says in many: its first real message, and the line of source that it points at."""
    text = _COLOUR.sub("", str(error))
    refusals = re.findall(r"raised a specific error:\s*(?:TypingError: )?(.+)", text)
    told = [line.strip() for line in [*reversed(refusals), *text.splitlines()]]
    message = next((line for line in told if line and not line.startswith("Failed in")), "")
    places = [(Path(name), line) for name, line in _PLACE.findall(text) if not name.startswith("<")]
    where = f" ({places[0][0].name}, line {places[0][1]})" if places else ""
    return f"{message[:300] or type(error).__name__}{where}"


def backend_of(operator: str) -> UserBackend:
    """The backend of a kernel that this process has imported, by its operator ``user:name``."""
    return UserBackend(definition_of(operator))


def backend_at(target: str) -> UserBackend:
    """The backend of the kernel at ``file.py:name`` or ``module:name``, with or without ``user:`` before it."""
    return UserBackend(load_definition(target.removeprefix(USER)))

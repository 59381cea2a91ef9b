"""A backend whose assembly is written by hand; workers load it as ``hand_written:HandWritten``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lowbit.kernels.backend import Backend, Code, Rejected
from lowbit.kernels.candidate import Candidate, Schedule
from lowbit.kernels.errors import CompileError
from lowbit.kernels.layout import Layout
from lowbit.kernels.packing import packings
from lowbit.kernels.problem import Problem

PROBLEM = Problem("qk", 8, 2, 64, "w4a8")
TOKENS = 256
SHIFTS = {"int4/contiguous/signed": 8, "int4/contiguous/offset": 6, "int4/planes/signed": 3, "int4/planes/offset": 2}
"""Unpacking instructions for 64 values with 4 rows in a pass; a pass of 2 rows needs one more. Others are rejected."""


def candidate(packing: str, rows: int, pipeline: str = "integer", order: str = "T D") -> Candidate:
    return Candidate(Layout.parse(f"{order} | {packing}"), None, pipeline, Schedule(rows, 1, 32, 1, 0, 1))


def assembly(symbol: str, shifts: int) -> str:
    """A loop that loads, shifts ``shifts`` times, and multiplies into an accumulator."""
    body = "".join("\tvpsrlw $4, %ymm1, %ymm1\n" for _ in range(shifts))
    return (
        f"{symbol}:\n.LBB0_1:\n\tvmovdqu (%rdi), %ymm1\n"
        f"{body}\tvpdpbusd (%rsi), %ymm1, %ymm0\n\taddq $32, %rdi\n\tdecq %rdx\n\tjne .LBB0_1\n\tretq\n.Lfunc_end0:\n"
    )


class HandWritten(Backend):
    name = "cpu"

    def target(self) -> str:
        return "by_hand"

    def toolchain(self) -> str:
        return "by hand 1"

    def space(self, problem: Problem, threads: int) -> Iterator[Candidate | Rejected]:
        for packing in packings(problem.stored("k").format):
            for rows in (2, 4):
                made = candidate(packing.name, rows)
                yield made if packing.name in SHIFTS else Rejected(made, f"{packing.arrangement} does not fit")
        yield candidate("int4/contiguous/signed", 4, "float")

    def baseline(self, problem: Problem, threads: int) -> Candidate:
        return candidate("int4/contiguous/signed", 4, "float")

    def compile(self, problem: Problem, candidate: Candidate) -> Any:
        raise AssertionError("explaining runs nothing")

    def tiles(self, problem: Problem, candidate: Candidate) -> tuple[str, ...]:
        assert candidate.k is not None
        packing = candidate.k.packing.name.replace("/", "_")
        return (f"{packing}_{candidate.pipeline}_{candidate.schedule.rows}",)

    def code(self, problem: Problem, candidate: Candidate) -> list[Code]:
        assert candidate.k is not None
        packing, rows = candidate.k.packing.name, candidate.schedule.rows
        (symbol,) = self.tiles(problem, candidate)
        shifts = 0 if candidate.pipeline == "float" else SHIFTS[packing] + (rows == 2)
        return [Code("k", symbol, f"define void @{symbol}()", assembly(symbol, shifts), 64, rows, packing)]


class PartlyUncountable(HandWritten):
    """The same, but one arrangement's code cannot be counted."""

    def code(self, problem: Problem, candidate: Candidate) -> list[Code]:
        if "planes" in candidate.layout:
            raise CompileError("no loop here")
        return super().code(problem, candidate)

"""A backend whose kernels take known times, or fail in known ways; workers load it as ``fake_backend:FakeBackend``.

A candidate's ``schedule.block / 32`` is its time in tens of microseconds; ``schedule.prefetch`` selects a behaviour.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from lowbit.kernels.backend import Backend, Code, Kernel, Rejected
from lowbit.kernels.candidate import Candidate, Schedule
from lowbit.kernels.errors import CompileError
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import pack
from lowbit.kernels.problem import Problem
from lowbit.kernels.quantize import Quantized, quantize
from lowbit.kernels.reference import Operands, reference

OK, SEGV, ILLEGAL, HANG, WRONG, NAN, REFUSES, COMPILER_DIES, RAISES, WRONG_AT_33, EXITS, COMPILER_HANGS = range(12)
COMPILERS = (REFUSES, COMPILER_DIES, COMPILER_HANGS)
TILE_LOG = "FAKE_TILE_LOG"
"""Environment variable: a file in which every tile function that is generated gets a line."""
PROBLEM = Problem("attend", 2, 1, 32, "fp16")
LAYOUTS = ("T D | fp16", "T/16 D/4 t16 d4 | fp16", "T D | fp16 | pad 64")


def candidate(
    tens_us: int, behaviour: int = OK, layout: str = LAYOUTS[0], threads: int = 1, splits: int = 1
) -> Candidate:
    parsed = Layout.parse(layout)
    return Candidate(parsed, parsed, "float", Schedule(1, 1, 32 * tens_us, splits, behaviour, threads))


class FakeKernel(Kernel):
    def __init__(self, problem: Problem, made_of: Candidate) -> None:
        self.problem, self.candidate = problem, made_of

    def pack(self, role: str, values: Any, capacity: int | None = None) -> Any:
        layout = self.candidate.k if role == "k" else self.candidate.v
        assert layout is not None
        quantized = values if isinstance(values, Quantized) else quantize(values, self.problem.stored("k"))
        return pack(quantized, layout, capacity)

    def __call__(self, *operands: Any, tokens: int | None = None, out: Any = None) -> Any:
        behaviour, duration_s = self.candidate.schedule.prefetch, self.candidate.schedule.block / 32 * 1e-5
        if behaviour == SEGV:
            os.kill(os.getpid(), signal.SIGSEGV)
        elif behaviour == ILLEGAL:
            os.kill(os.getpid(), signal.SIGILL)
        elif behaviour == EXITS:
            os._exit(3)
        elif behaviour == RAISES:
            raise ArithmeticError("division\nby zero")
        while behaviour == HANG:
            time.sleep(1)
        if out is not None:
            end = time.perf_counter() + duration_s
            while time.perf_counter() < end:
                pass
            return out
        x, k, v = operands
        k, v = (each.quantized() for each in (k, v))
        if behaviour == WRONG_AT_33 and tokens == 33:
            tokens = 32
        result = reference(self.problem, Operands(x, k, v).first(tokens or k.codes.shape[1])).astype(np.float32)
        if behaviour == WRONG:
            result *= 1.5
        if behaviour == NAN:
            result[-1, -1, -1] = np.nan
        return result


class FakeBackend(Backend):
    name = "fake"

    def target(self) -> str:
        return "fake"

    def toolchain(self) -> str:
        return "fake 1"

    def space(self, problem: Problem, threads: int) -> Iterator[Candidate | Rejected]:
        for layout in LAYOUTS[:2]:
            for tens_us in (30, 20):
                yield candidate(tens_us, layout=layout)
            yield Rejected(candidate(50, layout=layout), "takes too long")
        for behaviour in (SEGV, WRONG, REFUSES):
            yield candidate(10, behaviour)

    def baseline(self, problem: Problem, threads: int) -> Candidate:
        return candidate(60)

    def compile(self, problem: Problem, candidate: Candidate) -> Kernel:
        behaviour = candidate.schedule.prefetch
        if behaviour == REFUSES:
            raise CompileError("no such instruction")
        if behaviour == COMPILER_DIES:
            os.kill(os.getpid(), signal.SIGABRT)
        while behaviour == COMPILER_HANGS:
            time.sleep(1)
        return FakeKernel(problem, candidate)

    def tiles(self, problem: Problem, candidate: Candidate) -> tuple[str, ...]:
        """One tile for each operand, layout and behaviour of the compiler."""
        assert candidate.k is not None
        behaviour = candidate.schedule.prefetch
        place = f"{LAYOUTS.index(candidate.k.name)}_{behaviour if behaviour in COMPILERS else OK}"
        return f"k_{place}", f"v_{place}"

    def code(self, problem: Problem, candidate: Candidate) -> list[Code]:
        return [self.tile(problem, candidate, symbol) for symbol in self.tiles(problem, candidate)]

    def tile(self, problem: Problem, candidate: Candidate, symbol: str) -> Code:
        """A loop with as many shifts as the layout's place in `LAYOUTS`; what is made is noted in a file."""
        log = os.environ.get(TILE_LOG)
        if log:
            with open(log, "a") as file:
                file.write(f"{symbol}\n")
        behaviour = candidate.schedule.prefetch
        if behaviour == REFUSES:
            raise CompileError("no such instruction")
        if behaviour == COMPILER_DIES:
            os.kill(os.getpid(), signal.SIGABRT)
        while behaviour == COMPILER_HANGS:
            time.sleep(1)
        shifts = "\tvpsrlw $4, %ymm1, %ymm1\n" * int(symbol.split("_")[1])
        body = f"\tvmovdqu (%rdi), %ymm1\n{shifts}\tvfmadd231ps (%rsi), %ymm1, %ymm0\n\taddq $32, %rdi\n"
        text = f"{symbol}:\n.LBB0_1:\n{body}\tdecq %rdx\n\tjne .LBB0_1\n\tretq\n.Lfunc_end0:\n"
        return Code(symbol[0], symbol, "", text, 16, candidate.schedule.rows, "fp16")


class BrokenBackend(FakeBackend):
    def __init__(self) -> None:
        raise RuntimeError("no such device")


class AllWrong(FakeBackend):
    """Computes something else in every layout, the baseline's included."""

    def space(self, problem: Problem, threads: int) -> Iterator[Candidate | Rejected]:
        for layout in LAYOUTS:
            for splits in (1, 2, 3, 4):
                yield candidate(10, WRONG, layout, splits=splits)

    def baseline(self, problem: Problem, threads: int) -> Candidate:
        return candidate(60, WRONG)


class Particular(FakeBackend):
    """Compiles nothing for several query rows."""

    def tiles(self, problem: Problem, candidate: Candidate) -> tuple[str, ...]:
        if problem.query_rows > 1:
            raise CompileError("no such instruction" if candidate.schedule.prefetch else "too wide")
        return super().tiles(problem, candidate)

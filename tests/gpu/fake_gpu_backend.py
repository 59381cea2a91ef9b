"""A backend whose kernels compute on the CPU and launch on the fake driver; workers load it as ``fake_gpu_backend:…``.

A candidate's ``splits`` is its time in tens of microseconds; ``warps`` selects a behaviour.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from lowbit.kernels.backend import Backend, Code, Kernel, Rejected
from lowbit.kernels.candidate import Candidate, Launch
from lowbit.kernels.cuda.device import Blocks, Driver
from lowbit.kernels.errors import CompileError
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import pack
from lowbit.kernels.problem import Problem
from lowbit.kernels.quantize import Quantized, quantize
from lowbit.kernels.reference import Operands, reference

OK, FAULT, FAULT_WHEN_TIMED, RAISES = 1, 2, 3, 4
PROBLEM = Problem("qk", 2, 1, 32, "fp16")
CODE = b".version 7.0\n.target sm_80\n.visible .entry {}(.param .u64 k) {{ ret; }}\n"
LOADED: list[Driver] = []


def candidate(tens_us: int, behaviour: int = OK) -> Candidate:
    return Candidate(Layout.parse("T D | fp16"), None, "float", Launch(1, 1, 1, 0, tens_us, behaviour))


def driver() -> Driver:
    if not LOADED:
        LOADED.append(Driver())
    return LOADED[0]


class Bound:
    def __init__(self, kernel: FakeGpuKernel, operands: Any, tokens: int | None) -> None:
        self.driver, self.kernel, self.operands, self.tokens = driver(), kernel, operands, tokens
        splits, behaviour = kernel.candidate.launch.splits, kernel.candidate.launch.warps
        symbol = "fault" if behaviour == FAULT else f"kernel{splits}"
        code = f".version 7.0\n.target sm_80\n.visible .entry {symbol}(.param .u64 k) {{ ret; }}\n"
        self.function = self.driver.load(code.encode(), symbol)
        if behaviour == FAULT_WHEN_TIMED:
            fault = CODE.decode().format("fault").encode()
            self.late = self.driver.load(fault, "fault")

    def enqueue(self) -> None:
        function = self.function if self.kernel.candidate.launch.warps != FAULT_WHEN_TIMED else self.late
        self.driver.launch(function, Blocks((1, 1, 1), 32, 0), [np.int64(1)])

    def __call__(self) -> Any:
        if self.kernel.candidate.launch.warps == RAISES:
            raise ArithmeticError("no")
        self.driver.launch(self.function, Blocks((1, 1, 1), 32, 0), [np.int64(1)])
        self.driver.synchronize()
        x, k = self.operands
        k = k.quantized()
        made = Operands(x, k, None).first(self.tokens or k.codes.shape[1])
        return reference(self.kernel.problem, made).astype(np.float32)


class FakeGpuKernel(Kernel):
    def __init__(self, problem: Problem, made_of: Candidate) -> None:
        self.problem, self.candidate = problem, made_of

    def pack(self, role: str, values: Any, capacity: int | None = None) -> Any:
        quantized = values if isinstance(values, Quantized) else quantize(values, "fp16")
        return pack(quantized, self.candidate.k, capacity)

    def __call__(self, *operands: Any, tokens: int | None = None, out: Any = None) -> Any:
        return self.bind(*operands, tokens=tokens)()

    def bind(self, *operands: Any, tokens: int | None = None, out: Any = None) -> Any:
        return Bound(self, operands, tokens)


class FakeGpuBackend(Backend):
    name = "cuda"

    def target(self) -> str:
        return "sm_86"

    def toolchain(self) -> str:
        return "t"

    def space(self, problem: Problem, threads: int) -> Iterator[Candidate | Rejected]:
        yield candidate(1)

    def baseline(self, problem: Problem, threads: int) -> Candidate:
        return candidate(1)

    def compile(self, problem: Problem, made_of: Candidate) -> Kernel:
        return FakeGpuKernel(problem, made_of)

    def tiles(self, problem: Problem, made_of: Candidate) -> tuple[str, ...]:
        return ()

    def code(self, problem: Problem, made_of: Candidate) -> list[Code]:
        raise CompileError("none")

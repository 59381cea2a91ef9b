"""The GPU backend with machine code written by hand, so that nothing is compiled; workers load it by name.

A candidate's code unpacks with as many instructions as its packing's place in `PACKINGS`, and that of the last one has
an instruction that no GPU has; `SPILLING` spills and `REFUSED` does not compile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from lowbit.kernels.backend import Rejected
from lowbit.kernels.candidate import Candidate, Launch
from lowbit.kernels.cuda.backend import CudaBackend, Shipped
from lowbit.kernels.cuda.code import KernelCode
from lowbit.kernels.cuda.program import build
from lowbit.kernels.cuda.toolchain import Cubin
from lowbit.kernels.errors import CompileError
from lowbit.kernels.layout import Layout
from lowbit.kernels.problem import Problem

PROBLEM = Problem("attend", 8, 2, 64, "w4a8")
PACKINGS = ("int4/contiguous/offset", "int4/contiguous_permuted/offset", "int4/lane_interleaved/offset")
ORDERS = ("T/32 D/32 t32 d32", "T/8 D t8")
LOG = "FAKE_GPU_LOG"
"""Environment variable: a file in which everything that is compiled gets a line."""
SPILLING, REFUSED = 1, 2
"""Vectors in flight of such candidates."""


def candidate(packing: str, loads: int = 4, splits: int = 8) -> Candidate:
    k, v = (Layout.parse(f"{order} | {packing}") for order in ORDERS)
    return Candidate(k, v, "integer", Launch(4, 1, loads, 0, splits, 4))


def sass(symbol: str, arch: str, unpacking: int) -> str:
    """A loop over tiles with a load, ``unpacking`` masks, and four dots."""
    body = ["MOV R1, c[0x0][0x28]", "PMTRIG 0x2", "LDG.E.128 R4, [R2.64]"]
    body += [f"LOP3.LUT R{8 + n}, R4, 0xf0f0f0f, RZ, 0xc0, !PT" for n in range(unpacking)]
    body += [f"IDP.4A.S8.S8 R20, R{8 + n % unpacking if unpacking else 4}, R12, R20" for n in range(4)]
    body += ["FROB R40, R41"] * (unpacking == len(PACKINGS) - 1)
    body += ["ISETP.NE.AND P0, PT, R30, RZ, PT", "@P0 BRA `(.L_x_0)", "EXIT"]
    lines = [f"        /*{16 * n:04x}*/                   {text} ;" for n, text in enumerate(body)]
    lines.insert(1, ".L_x_0:")
    return f"\t.target\t{arch}\n.text.{symbol}:\n" + "\n".join(lines) + "\n"


def _log(what: str) -> None:
    if path := os.environ.get(LOG):
        with open(path, "a") as file:
            file.write(f"{what}\n")


class FakeGpu(CudaBackend):
    def __init__(self) -> None:
        super().__init__("sm_86")

    def toolchain(self) -> str:
        return "by hand 1"

    def require_compiler(self) -> None:
        """Code that is written by hand needs none."""

    def space(self, problem: Problem, threads: int) -> Iterator[Candidate | Rejected]:
        for packing in PACKINGS:
            for splits in (1, 8):
                yield candidate(packing, splits=splits)
        yield candidate(PACKINGS[0], SPILLING)
        yield candidate(PACKINGS[0], REFUSED)
        yield Rejected(candidate(PACKINGS[0], 8), "too many vectors")

    def baseline(self, problem: Problem, threads: int) -> Candidate:
        return replace(candidate(PACKINGS[1]), pipeline="float")

    def code(self, problem: Problem, candidate: Candidate) -> list[KernelCode]:  # type: ignore[override]
        assert candidate.k is not None
        (symbol,) = self.tiles(problem, candidate)
        _log("count")
        loads, packing = candidate.launch.loads, candidate.k.packing.name
        if loads == REFUSED:
            raise CompileError("ptxas failed")
        text = sass("kernel", self.arch, PACKINGS.index(packing))
        spills = 24 if loads == SPILLING else 0
        return [KernelCode("kv", symbol, "PTX here", text, 2048, 4, packing, "sm_86", "sass", 64, spills, 0, "kernel")]

    def shipped(self, problem: Problem, candidate: Candidate) -> tuple[Shipped, ...]:
        _log("ship")
        program = build(problem, candidate, self.arch)
        cubin = Cubin(b"code", self.arch, 64, 0, 0, 0, 128, 0, 0)
        return tuple(Shipped(each, f"PTX of {each.symbol}", cubin) for each in (program.main, program.merge) if each)


class WithoutAssembler(FakeGpu):
    """Nothing compiles."""

    def code(self, problem: Problem, candidate: Candidate) -> list[KernelCode]:  # type: ignore[override]
        raise CompileError("ptxas failed")

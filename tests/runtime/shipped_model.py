"""A database that ships a cost model and counts of code, both made up, for a machine that is made up too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lowbit.costmodel.assembly import CLASSES
from lowbit.costmodel.bandwidth import Bandwidth, BandwidthPoint
from lowbit.costmodel.lep import EXTENDED, Coefficients
from lowbit.costmodel.tile import TileCounts
from lowbit.db import Store
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.cpu.backend import CpuBackend
from lowbit.kernels.cpu.share import Share
from lowbit.kernels.problem import Problem

MACHINE = SimpleNamespace(fingerprint="here", isa="avx2", cores=2)
DESCRIPTION = {
    "description": "This chip",
    "isa": "avx2",
    "line_bytes": 64,
    "caches": [
        {"level": 1, "size_bytes": 1 << 15, "shared_by": 1},
        {"level": 2, "size_bytes": 1 << 20, "shared_by": 1},
    ],
}
GBPS = {1 << 12: 100.0, 1 << 20: 10.0}
"""In cache and from memory."""

COEFFICIENTS = Coefficients(
    EXTENDED,
    {f"{name}_ns": 0.0 for name in CLASSES}
    | {"dot_ns": 1.0, "exponential_ns": 0, "task_us": 0, "fork_us": 3, "gamma": 0},
    Bandwidth(tuple(BandwidthPoint(1, size, gbps, "DRAM" if gbps == 10 else "L1") for size, gbps in GBPS.items())),
    MACHINE.cores,
)


class Shown(CpuBackend):
    """The CPU's backend for AVX2, which names and ranks candidates as ever and compiles none."""

    def __init__(self) -> None:
        super().__init__("avx2")
        self.compiled: list[Candidate] = []

    def toolchain(self) -> str:
        return "t"

    def compile(self, problem: Problem, candidate: Candidate) -> Any:
        self.compiled.append(candidate)
        return SimpleNamespace(problem=problem, candidate=candidate)


def ship(path: Path, problem: Problem, dots: Mapping[Candidate, int], device: str = "here") -> None:
    """Store the model, and counts of the candidates' tile functions: so many dots for 32 values."""
    with Store.open(path) as store:
        store.put_device(device, DESCRIPTION)
        store.put_calibration(device, MACHINE.cores, {"extended": COEFFICIENTS.as_dict()}, "t")
        for candidate, count in dots.items():
            for symbol, role in zip(Shown().tiles(problem, candidate), problem.roles, strict=True):
                counts = TileCounts(symbol, role, 2, "", 32, {}, ((Share(32), {"dot": count}),))
                store.put_tiles("t", {symbol: counts.as_dict()})

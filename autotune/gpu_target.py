"""An NVIDIA GPU as a target, in this machine or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..costmodel.gpu_here import chosen_gpu
from ..costmodel.kernel_counts import KernelCounts
from ..costmodel.occupancy import refusal
from ..kernels.backend import Backend
from ..kernels.candidate import Candidate
from ..kernels.cuda.marks import NAMES
from ..kernels.problem import Problem
from .target import Target

if TYPE_CHECKING:
    from ..costmodel.counts import Counts

WARP = 32


def kernel_of(counts: Sequence[Counts]) -> KernelCounts:
    """A GPU's candidate is one kernel."""
    (only,) = counts
    return cast(KernelCounts, only)


class GpuTarget(Target):
    """A board of an architecture.

    Parameters
    ----------
    name : str
    backend : Backend
        Of the architecture.
    board : str, optional
        The one that is here otherwise, or else the architecture's most common one.

    Raises
    ------
    DeviceError
        If there is no such board.
    """

    threads = 1
    """A GPU's candidates have no threads of the host's to choose."""

    def __init__(self, name: str, backend: Backend, board: str | None = None) -> None:
        from ..costmodel.device import detect

        self.name, self.backend = name, backend
        self.gpu, self.here, self.chosen = chosen_gpu(backend.target(), board)
        self.workers = detect().cores
        self.cache_bytes = self.gpu.l2_bytes
        self.languages = ("PTX", f"machine code for {backend.target()}")

    @property
    def fingerprint(self) -> str:
        return self.gpu.fingerprint

    @property
    def description(self) -> str:
        return self.gpu.description

    @property
    def present(self) -> bool:
        return self.here is not None

    def as_dict(self) -> dict[str, Any]:
        return {**self.gpu.as_dict(), "isa": self.gpu.arch, "cores": self.gpu.sms, "chosen": self.chosen}

    def protocol(self, asked: str) -> str:
        return asked

    def unfit(self, problem: Problem, candidate: Candidate, counts: Sequence[Counts]) -> str | None:
        kernel = kernel_of(counts)
        if kernel.spill_bytes:
            return f"spills {kernel.spill_bytes} bytes"
        return refusal(self.gpu, candidate.launch.warps * WARP, kernel.registers, kernel.shared_bytes)

    def unpacking(self, counts: Sequence[Counts]) -> dict[str, Mapping[str, int]]:
        found: dict[str, Mapping[str, int]] = {}
        for loop in kernel_of(counts).loops:
            if loop.mark is not None and loop.unpacking:
                found.setdefault(NAMES[loop.mark], loop.unpacking)
        return found

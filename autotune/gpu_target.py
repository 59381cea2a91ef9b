"""An NVIDIA GPU as a target, in this machine or not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ..costmodel.gpu import Gpu
from ..costmodel.gpu_features import GpuFeatures, gpu_features, warm
from ..costmodel.gpu_here import chosen_gpu
from ..costmodel.gpu_lep import GpuCoefficients, default_coefficients, explain, predict_many
from ..costmodel.kernel_counts import KernelCounts, LoopCounts
from ..costmodel.occupancy import occupancy, refusal
from ..kernels.backend import Backend
from ..kernels.candidate import Candidate
from ..kernels.cuda.mapping import LANES
from ..kernels.cuda.marks import NAMES
from ..kernels.cuda.program import build
from ..kernels.cuda.work import work
from ..kernels.errors import DeviceError
from ..kernels.problem import Problem
from .target import Fit, Target

if TYPE_CHECKING:
    from ..costmodel.counts import Counts
    from ..db.records import Winner
    from ..db.store import Store
    from ..kernels.cuda.backend import CudaBackend
    from ..search.features import Features
    from ..search.gpu_calibrate import GpuCalibration
    from .target import Prices

TOKENS = 1
"""Any length: a block's threads and shared memory are the same at all."""
OVERLAPPING = ("memory", "l2", "latency", "compute")
"""Terms of a prediction that hide behind each other."""
LIMITS = {"memory": "memory", "l2": "the L2 cache", "latency": "latency", "compute": "instructions"}
"""What a call is limited by where such a term is its largest."""
MOST_CONTEXTS, CONTEXT_BYTES = 8, 2 << 30
"""Each worker that runs candidates has a context on the GPU and operands there: so many, so much memory each."""

_INT_TO_FLOAT = re.compile(r"I2F|cvt(\.\w+)*\.f(16|32|64)\.[su]\d")
"""Opcodes that make floats of integers, in SASS or PTX."""


@dataclass(frozen=True)
class GpuPrices:
    """Implements `lowbit.autotune.target.Prices` with a board's figures, measured or published."""

    coefficients: GpuCoefficients

    def restored(self, values: Mapping[str, Any]) -> GpuFeatures:
        return GpuFeatures.from_dict(values)

    def as_timed(self, features: Features, protocol: str) -> GpuFeatures:
        return _as_timed(features, protocol, self.coefficients.gpu)

    def predict_us(self, features: Sequence[Features]) -> NDArray[np.float64]:
        return predict_many(cast(Sequence[GpuFeatures], features), self.coefficients)

    def terms_us(self, features: Features) -> dict[str, float]:
        terms = self._terms(features)
        parts = {name: terms[name] for name in ("launch", *OVERLAPPING, "merge")}
        return {**parts, "overlap": terms["overlapped"] - sum(terms[name] for name in OVERLAPPING)}

    def units_us(self, features: Features) -> dict[str, float]:
        """How long each unit of the multiprocessors is busy, if all share the work evenly."""
        named = {*OVERLAPPING, "launch", "merge", "overlapped", "floor", "total"}
        return {name: time_us for name, time_us in self._terms(features).items() if name not in named}

    def limit(self, features: Features) -> str:
        terms = self._terms(features)
        spent = [(terms[name], LIMITS[name]) for name in OVERLAPPING]
        return max([*spent, (terms["launch"] + terms["merge"], "launching")])[1]

    def transfer_us(self, features: Features) -> float:
        return self._terms(features)["floor"]

    def _terms(self, features: Features) -> dict[str, float]:
        found = explain(cast(GpuFeatures, features), self.coefficients)
        return {name.removesuffix("_us"): time_us for name, time_us in found.items()}


def _as_timed(features: Features, protocol: str, gpu: Gpu) -> GpuFeatures:
    seen = cast(GpuFeatures, features)
    return warm(seen, gpu) if protocol == "warm" else seen


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

    calibration_s = (150.0, 90.0)
    threads = 1
    """A GPU's candidates have no threads of the host's to choose."""

    def __init__(self, name: str, backend: Backend, board: str | None = None) -> None:
        from ..costmodel.device import detect

        self.name, self.backend = name, backend
        self.gpu, self.here, self.chosen = chosen_gpu(backend.target(), board)
        cores = detect().cores
        room = max(self.gpu.memory_bytes // CONTEXT_BYTES, 1)
        self.workers = cores if self.here is None else min(cores, MOST_CONTEXTS, room)
        self.cache_bytes = self.gpu.l2_bytes
        self.languages = ("PTX", f"machine code for {backend.target()}")

    @property
    def fingerprint(self) -> str:
        return self.gpu.fingerprint

    @property
    def description(self) -> str:
        return self.gpu.description

    @property
    def notice(self) -> str:
        return f"{self.description}: {self.chosen}"

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
        geometry = build(problem, candidate, self.gpu.arch).geometry(TOKENS)
        shared_bytes = kernel.shared_bytes + geometry.shared_bytes
        reason = refusal(self.gpu, geometry.threads, kernel.registers, shared_bytes)
        return None if reason is None else f"cannot be launched: {reason}"

    def features(self, problem: Problem, candidate: Candidate, tokens: int, counts: Sequence[Counts]) -> GpuFeatures:
        done = work(problem, candidate, tokens, self.gpu.arch)
        return gpu_features(problem, candidate, tokens, kernel_of(counts), self.gpu, done)

    def as_timed(self, features: Features, protocol: str) -> GpuFeatures:
        return _as_timed(features, protocol, self.gpu)

    def known_prices(self, store: Store | None) -> GpuPrices | None:
        """Those of the newest stored calibration, or else of the published figures if the board is not here."""
        stored = store.calibration(self.fingerprint, self.threads) if store is not None else None
        if stored is not None:
            return _calibrated(stored)
        return None if self.present else GpuPrices(default_coefficients(self.gpu))

    def calibrate(self, budget_s: float | None = None) -> GpuCalibration:
        from ..search.gpu_calibrate import calibrate_gpu

        if self.here is None:
            raise DeviceError(f"{self.description} is not in this machine: nothing can be calibrated")
        return calibrate_gpu(self.name, self.backend, self.gpu, self.here.ordinal, budget_s)

    def rough_prices(self, report: Callable[[str], None]) -> GpuPrices:
        """The published figures: calibrating takes minutes, for it compiles dozens of kernels."""
        return GpuPrices(default_coefficients(self.gpu))

    def prices(self, fit: Fit) -> GpuPrices:
        return GpuPrices(cast("GpuCalibration", fit).coefficients)

    def unpacking(self, counts: Sequence[Counts]) -> dict[str, Mapping[str, int]]:
        found: dict[str, Mapping[str, int]] = {}
        for loop in kernel_of(counts).loops:
            if loop.mark is not None and loop.unpacking:
                found.setdefault(NAMES[loop.mark], loop.unpacking)
        return found

    def unknown(self, counts: Sequence[Counts]) -> Mapping[str, int]:
        return kernel_of(counts).unknown

    def kernel(self, counts: Sequence[Counts], prices: Prices | None, features: Features) -> dict[str, Any]:
        kernel, seen = kernel_of(counts), cast(GpuFeatures, features)
        held = occupancy(self.gpu, seen.warps * LANES, seen.registers, seen.shared_bytes)
        priced: dict[str, Any] = {} if prices is None else {"bound": prices.limit(seen)}
        if isinstance(prices, GpuPrices):
            priced["units_us"] = prices.units_us(seen)
        return {
            "counted": kernel.language,
            "registers": seen.registers,
            "shared_bytes": seen.shared_bytes,
            "blocks": seen.blocks,
            "blocks_per_sm": seen.blocks_per_sm,
            "occupancy": held.share,
            "limiter": held.limiter,
            **priced,
            "hot_loop": _hot_loop(kernel),
            "loops": [_loop(each) for each in kernel.loops],
            "unknown": dict(kernel.unknown),
        }

    def ship(self, store: Store, winners: Sequence[Winner]) -> None:
        """See `Target.ship`: PTX, machine code where there is an assembler, and launches."""
        from .shipping import ship

        ship(store, cast("CudaBackend", self.backend), winners)


def _loop(loop: LoopCounts) -> dict[str, Any]:
    """One iteration of a loop, without classes that it has none of."""
    return {
        "loop": "outside loops" if loop.mark is None else NAMES[loop.mark],
        "passes": loop.marks,
        "instructions": {kind: count for kind, count in loop.counts.items() if count},
        "int_to_float": sum(count for opcode, count in loop.opcodes.items() if _INT_TO_FLOAT.match(opcode)),
        "unpacking": dict(loop.unpacking),
        "opcodes": dict(loop.opcodes),
    }


def _hot_loop(kernel: KernelCounts) -> dict[str, Any]:
    """The loop that contracts: most dots, or else most float operations, to an iteration."""
    marked = [loop for loop in kernel.loops if loop.mark is not None] or list(kernel.loops)
    told = _loop(max(marked, key=lambda loop: (loop.counts.get("dot", 0), loop.counts.get("float", 0))))
    dots = told["instructions"].get("dot", 0)
    return {"loop": told["loop"], "dot": dots, "int_to_float": told["int_to_float"]}


def stored_gpu_prices(store: Store, description: Mapping[str, Any]) -> GpuPrices:
    """Those of a GPU that a database describes, calibrated or not."""
    gpu = Gpu.from_dict(description)
    stored = store.calibration(gpu.fingerprint, GpuTarget.threads)
    return (stored and _calibrated(stored)) or GpuPrices(default_coefficients(gpu))


def _calibrated(stored: Mapping[str, Any]) -> GpuPrices | None:
    """None for another release's form."""
    try:
        return GpuPrices(GpuCoefficients.from_dict(stored))
    except (KeyError, TypeError):
        return None

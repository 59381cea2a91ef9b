"""This machine's CPU as a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ..costmodel.features import Features
from ..costmodel.lep import Coefficients, explain, predict_many
from ..costmodel.tile import TileCounts
from ..kernels.backend import Backend
from ..kernels.candidate import Candidate
from ..kernels.problem import Problem
from .target import Fit, Target

if TYPE_CHECKING:
    from ..costmodel.calibrate import Calibration
    from ..costmodel.counts import Counts
    from ..db.store import Store
    from ..search.features import Features as AnyFeatures


@dataclass(frozen=True)
class CpuPrices:
    """Implements `lowbit.autotune.target.Prices` with a calibration's extended form."""

    coefficients: Coefficients
    threads: int
    cache_bytes: int

    def restored(self, values: Mapping[str, Any]) -> Features:
        return Features.from_dict(dict(values))

    def as_timed(self, features: AnyFeatures, protocol: str) -> Features:
        return _as_timed(features, protocol, self.cache_bytes)

    def predict_us(self, features: Sequence[AnyFeatures]) -> NDArray[np.float64]:
        return predict_many(cast(Sequence[Features], features), self.coefficients)

    def terms_us(self, features: AnyFeatures) -> dict[str, float]:
        found = asdict(explain(cast(Features, features), self.coefficients))
        instructions = {f"{kind} instructions": time_us for kind, time_us in found.pop("instructions_us").items()}
        overlap_us = found.pop("overlap_us")
        rest = {name.removesuffix("_us"): time_us for name, time_us in found.items()}
        return {"memory": rest.pop("memory"), **instructions, **rest, "overlap": -overlap_us}

    def limit(self, features: AnyFeatures) -> str:
        terms = self.terms_us(features)
        memory_us = terms.pop("memory")
        fork_us = terms.pop("tasks") + terms.pop("fork")
        terms.pop("overlap")
        return max((memory_us, "memory"), (sum(terms.values()), "instructions"), (fork_us, "waking threads"))[1]

    def transfer_us(self, features: AnyFeatures) -> float:
        seen = cast(Features, features)
        gbps = self.coefficients.bandwidth.gbps(
            np.array([float(seen.working_set_bytes)]), np.array([float(self.threads)])
        )
        return seen.bytes / (float(gbps[0]) * 1e3)


class CpuTarget(Target):
    """The CPU that this process runs on, with its own instruction set or another one to look at.

    Parameters
    ----------
    name : str
    backend : Backend
        The machine's own, or what somebody's ``module:callable`` makes.
    threads : int, optional
        The cores that this process may use otherwise.
    isa : str
        Another instruction set, whose code is generated and not run.

    Raises
    ------
    DeviceError
        For an unknown instruction set.
    """

    calibration_s = (40.0, 10.0)

    def __init__(self, name: str, backend: Backend, threads: int | None = None, isa: str = "") -> None:
        from ..costmodel.device import detect

        if isa:
            from ..kernels.cpu.backend import CpuBackend
            from ..kernels.cpu.isa import isa_named

            backend = CpuBackend(isa_named(isa).name)
        self.name, self.backend, self.isa = name, backend, isa
        self.device = detect()
        self.threads = threads or self.device.cores
        self.workers = self.device.cores
        self.cache_bytes = max(cache.size_bytes for cache in self.device.caches)
        self.languages = ("IR", f"assembly for {backend.target()}")

    @property
    def fingerprint(self) -> str:
        return self.device.fingerprint

    @property
    def description(self) -> str:
        return f"{self.device.description}, {self.threads} threads"

    @property
    def present(self) -> bool:
        return not self.isa or self.isa == self.device.isa

    def as_dict(self) -> dict[str, Any]:
        return self.device.as_dict()

    def protocol(self, asked: str) -> str:
        from ..search.timing import protocol_here

        return protocol_here(asked)

    def unfit(self, problem: Problem, candidate: Candidate, counts: Sequence[Counts]) -> str | None:
        return None

    def features(self, problem: Problem, candidate: Candidate, tokens: int, counts: Sequence[Counts]) -> Features:
        from ..costmodel.features import features

        return features(problem, candidate, tokens, cast(Sequence[TileCounts], counts), self.device.line_bytes)

    def as_timed(self, features: AnyFeatures, protocol: str) -> Features:
        return _as_timed(features, protocol, self.cache_bytes)

    def known_prices(self, store: Store | None) -> CpuPrices | None:
        """Those of the newest stored calibration; None where there is none, or another release's form of one."""
        if store is None or not self.present:
            return None
        return _known(store, self.fingerprint, self.threads, self.cache_bytes)

    def calibrate(self, budget_s: float | None = None) -> Calibration:
        from ..costmodel.calibrate import calibrate

        budget = () if budget_s is None else (budget_s,)
        return calibrate(self.device, self.threads, *budget)

    def rough_prices(self, report: Callable[[str], None]) -> CpuPrices:
        from ..costmodel.calibrate import QUICK_BUDGET_S

        report(f"there is no calibration for {self.threads} threads here")
        return self.prices(self.calibrate(QUICK_BUDGET_S))

    def prices(self, fit: Fit) -> CpuPrices:
        return CpuPrices(cast("Calibration", fit).extended, self.threads, self.cache_bytes)

    def unpacking(self, counts: Sequence[Counts]) -> dict[str, Mapping[str, int]]:
        return {tile.role: tile.unpacking for tile in cast(Sequence[TileCounts], counts)}


def stored_cpu_prices(store: Store, device: str, description: Mapping[str, Any], threads: int) -> CpuPrices | None:
    """Those of a CPU that a database describes and holds a calibration of."""
    sizes = [cache["size_bytes"] for cache in description.get("caches", ())]
    return _known(store, device, threads, max(sizes)) if sizes else None


def _known(store: Store, device: str, threads: int, cache_bytes: int) -> CpuPrices | None:
    stored = store.calibration(device, threads)
    if stored is None:
        return None
    try:
        return CpuPrices(Coefficients.from_dict(stored["extended"]), threads, cache_bytes)
    except (KeyError, TypeError):
        return None


def _as_timed(features: AnyFeatures, protocol: str, cache_bytes: int) -> Features:
    seen = cast(Features, features)
    return seen if protocol == "warm" else seen.from_memory(cache_bytes)

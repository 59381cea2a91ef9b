"""The Layout Efficiency Predictor on a GPU: what a call costs, from its features and a board's figures.

Two forms. ``gpu_two_term`` is the published one, α1 · bytes / bandwidth + α2 · unpacking instructions. ``gpu`` is

    t = launches · launch + (memory^p + l2^p + latency^p + compute^p)^(1/p) + merge

    memory  = dram_bytes / (bandwidth · dram_share)
    l2      = l2_bytes / (L2 bandwidth · l2_share)
    latency = waves · block + max(loaded_bytes · λ / bytes in flight, waves · rounds · λ) ⊕ waves · chain
    compute = balance · max(issue, every pipe, load/store unit) / compute_share

with λ the latency of memory, or of the L2 cache for the share of requests that it answers, and chain the longest warp's
instructions at ``dependent_cycles`` each. ⊕ adds where a warp waits for what it loads, and is the larger where copies
run ahead. The p-norm is a maximum with soft corners: units overlap, but two that are nearly busy get in each other's
way. As dram_share is at most 1, no prediction is below bytes over bandwidth.

Every coefficient has a default, so that a board can be predicted that is not in this machine; `fit_gpu` adjusts them to
measurements where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..kernels.cuda.mapping import LANES
from . import gpu_pipes as pipe
from .gpu import Gpu
from .gpu_features import GpuFeatures
from .lep import Residual

Floats = NDArray[np.float64]
GPU, GPU_TWO_TERM = "gpu", "gpu_two_term"
BANK_ROW_BYTES = 128

DEFAULTS = {
    "launch_us": 0.9,
    "block_us": 0.23,
    "dram_share": 0.95,
    "l2_share": 0.77,
    "compute_share": 0.85,
    "dependent_cycles": 2.0,
    "overlap_power": 2.5,
}
"""Coefficients where nothing is measured. See docs/gpu-model.md for the reason of each."""

BOUNDS = {
    "launch_us": (0.1, 20.0),
    "block_us": (0.01, 2.0),
    "dram_share": (0.3, 1.0),
    "l2_share": (0.1, 1.0),
    "compute_share": (0.1, 1.0),
    "dependent_cycles": (0.25, 16.0),
    "overlap_power": (1.0, 12.0),
}
_LOYALTY = 1e-3
"""Weight of the squared logarithm of a coefficient over its default: what no measurement tells stays as it is."""
_STEPS = (2.0, 1.3, 1.1, 1.03, 1.01)
_ROUNDS = 40


@dataclass(frozen=True)
class GpuCoefficients:
    """A model of one board.

    Attributes
    ----------
    form : str
        ``gpu`` or ``gpu_two_term``.
    values : dict of str to float
        Units are in the names. ``gpu``: those of `DEFAULTS`. ``gpu_two_term``: ``alpha1``, a pure number, and
        ``alpha2_ns`` for each unpacking warp instruction.
    gpu : Gpu
    residual : Residual
        Of the measurements it was fitted to; 0 samples if there were none.
    """

    form: str
    values: dict[str, float]
    gpu: Gpu
    residual: Residual = field(default=Residual(0.0, 0.0, 0))

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` is the inverse."""
        residual = {"median": self.residual.median, "p95": self.residual.p95, "samples": self.residual.samples}
        return {"form": self.form, "values": dict(self.values), "gpu": self.gpu.as_dict(), "residual": residual}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(data["form"], dict(data["values"]), Gpu.from_dict(data["gpu"]), Residual(**data["residual"]))


def default_coefficients(gpu: Gpu, form: str = GPU) -> GpuCoefficients:
    """What is predicted with before anything is measured on the board.

    Parameters
    ----------
    gpu : Gpu
    form : str
        ``gpu`` or ``gpu_two_term``.
    """
    if form == GPU:
        return GpuCoefficients(GPU, dict(DEFAULTS), gpu)
    # An unpacking instruction takes its turn in the logic pipe of one multiprocessor.
    alpha2_ns = LANES / gpu.logic_per_clock / gpu.sms / gpu.clock_mhz * 1e3
    return GpuCoefficients(GPU_TWO_TERM, {"alpha1": 1.0, "alpha2_ns": alpha2_ns}, gpu)


def predict_us(features: GpuFeatures, coefficients: GpuCoefficients) -> float:
    """Predicted time of one call in microseconds."""
    return float(predict_many([features], coefficients)[0])


def predict_many(features: Sequence[GpuFeatures], coefficients: GpuCoefficients) -> Floats:
    """`predict_us` of each, vectorised: shape (len(features),)."""
    if not features:
        return np.zeros(0)
    return _predicted(_Table(features), coefficients)


def explain(features: GpuFeatures, coefficients: GpuCoefficients) -> dict[str, float]:
    """Every term of a prediction in microseconds, by name, and ``total_us``.

    Of the ``gpu`` form, ``memory_us``, ``l2_us``, ``latency_us`` and ``compute_us`` overlap; ``overlapped_us`` is what
    they take together, and with ``launch_us`` and ``merge_us`` it adds up to the total. ``issue_us``, ``load_store_us``
    and one for each pipe are what ``compute_us`` is the largest of; ``floor_us`` is bytes over bandwidth.
    """
    table = _Table([features])
    if coefficients.form == GPU_TWO_TERM:
        terms = {name: float(value[0]) for name, value in _two_terms(table, coefficients).items()}
        return {**terms, "total_us": sum(terms.values())}
    terms = {name: float(value[0]) for name, value in _terms(table, coefficients).items()}
    return {**terms, "total_us": terms["launch_us"] + terms["overlapped_us"] + terms["merge_us"]}


class _Table:
    """Features as columns."""

    def __init__(self, features: Sequence[GpuFeatures]) -> None:
        def column(name: str) -> Floats:
            return np.array([getattr(each, name) for each in features], np.float64)

        self.dram, self.l2, self.loaded = column("dram_bytes"), column("l2_bytes"), column("loaded_bytes")
        self.in_flight, self.rounds, self.chain = (
            column("in_flight_bytes"),
            column("rounds"),
            column("chain_instructions"),
        )
        self.ahead = column("stages") > 0
        self.blocks, self.waves, self.balance = column("blocks"), column("waves"), column("balance")
        self.shared, self.l1 = column("shared_wavefronts"), column("l1_cycles")
        self.launches, self.merge = column("launches"), column("merge_bytes")
        self.unpack = column("unpack_ops")
        self.pipes = {name: np.array([each.pipes.get(name, 0.0) for each in features]) for name in pipe.PIPES}


def _predicted(table: _Table, coefficients: GpuCoefficients) -> Floats:
    if coefficients.form == GPU_TWO_TERM:
        return np.asarray(sum(_two_terms(table, coefficients).values()))
    terms = _terms(table, coefficients)
    return np.asarray(terms["launch_us"] + terms["overlapped_us"] + terms["merge_us"])


def _two_terms(table: _Table, coefficients: GpuCoefficients) -> dict[str, Floats]:
    values = coefficients.values
    return {
        "memory_us": values["alpha1"] * table.dram / coefficients.gpu.bandwidth_gbps * 1e-3,
        "unpack_us": values["alpha2_ns"] * table.unpack * 1e-3,
    }


def _terms(table: _Table, coefficients: GpuCoefficients) -> dict[str, Floats]:
    values, gpu = coefficients.values, coefficients.gpu
    floor = table.dram / gpu.bandwidth_gbps * 1e-3
    memory = floor / values["dram_share"]
    l2 = table.l2 / (gpu.l2_gbps * values["l2_share"]) * 1e-3
    latency = _latency_us(table, values, gpu)
    units = _units_us(table, gpu)
    compute = np.max(list(units.values()), axis=0) * table.balance / values["compute_share"]
    power = values["overlap_power"]
    parts = np.stack([memory, l2, latency, compute])
    largest = np.maximum(parts.max(axis=0), 1e-9)
    overlapped = largest * np.sum((parts / largest) ** power, axis=0) ** (1 / power)
    return {
        "launch_us": table.launches * values["launch_us"],
        "overlapped_us": overlapped,
        "merge_us": _merge_us(table, values, gpu),
        "memory_us": memory,
        "l2_us": l2,
        "latency_us": latency,
        "compute_us": compute,
        **{f"{name}_us": value for name, value in units.items()},
        "floor_us": floor,
    }


def _latency_us(table: _Table, values: Mapping[str, float], gpu: Gpu) -> Floats:
    from_memory = np.minimum(table.dram / np.maximum(table.l2, 1.0), 1.0)
    each_us = (gpu.l2_latency_ns + (gpu.dram_latency_ns - gpu.l2_latency_ns) * from_memory) * 1e-3
    # Little's law over the multiprocessors that have a block at all.
    asked = table.in_flight * np.minimum(table.blocks, gpu.sms)
    waiting = np.where(asked > 0, table.loaded * each_us / np.maximum(asked, 1.0), 0.0)
    waiting = np.maximum(waiting, table.waves * table.rounds * each_us)
    working = table.waves * table.chain * values["dependent_cycles"] / gpu.clock_mhz
    both = np.where(table.ahead, np.maximum(waiting, working), waiting + working)
    return np.asarray(table.waves * values["block_us"] + both)


def _units_us(table: _Table, gpu: Gpu) -> dict[str, Floats]:
    """Time that every unit is busy if all multiprocessors share the work evenly."""
    used = table.pipes

    def busy(warp_instructions: Floats, lanes: int) -> Floats:
        return np.asarray(warp_instructions * LANES / lanes / gpu.sms / gpu.clock_mhz)

    heavy = busy(used[pipe.HEAVY], gpu.dp4a_per_clock)
    passes = (table.shared + table.l1) * BANK_ROW_BYTES / gpu.l1_bytes_per_clock / gpu.sms / gpu.clock_mhz
    shuffles = busy(used[pipe.SHUFFLE], gpu.shuffle_per_clock)
    return {
        "issue": busy(used[pipe.ISSUE], LANES * gpu.schedulers),
        "integer": busy(used[pipe.ADD], gpu.int32_per_clock) + busy(used[pipe.LOGIC], gpu.logic_per_clock),
        "dot": heavy,
        "float": np.maximum(heavy, busy(used[pipe.FLOAT] + used[pipe.HEAVY], gpu.fp32_per_clock)),
        "special": busy(used[pipe.SLOW], gpu.special_per_clock),
        "load_store": np.maximum(busy(used[pipe.LOAD_STORE], gpu.load_store_lanes), passes) + shuffles,
    }


def _merge_us(table: _Table, values: Mapping[str, float], gpu: Gpu) -> Floats:
    """A second, small kernel: it starts, waits once for what the first left in the L2 cache, and reads it."""
    merged = table.launches > 1
    read = table.merge / (gpu.l2_gbps * values["l2_share"]) * 1e-3
    return np.where(merged, values["block_us"] + gpu.l2_latency_ns * 1e-3 + read, 0.0)


def fit_gpu(
    features: Sequence[GpuFeatures], measured_us: Sequence[float], coefficients: GpuCoefficients
) -> GpuCoefficients:
    """Coefficients of the same form with the least squared logarithmic error over the samples.

    Each coefficient in turn is tried larger and smaller by factors that get finer, within `BOUNDS`. What the samples
    do not determine stays at ``coefficients``.

    Raises
    ------
    ValueError
        Unless there is one positive measurement for each of at least one sample.
    """
    times = np.asarray(measured_us, np.float64)
    if not len(features) or len(features) != len(times) or not (times > 0).all():
        raise ValueError(f"cannot fit {len(times)} times to {len(features)} samples; all must be positive")
    table, start = _Table(features), coefficients.values
    bounds = BOUNDS if coefficients.form == GPU else dict.fromkeys(start, (1e-12, 1e12))

    def loss(values: dict[str, float]) -> float:
        error = np.log(_predicted(table, replace(coefficients, values=values)) / times)
        strayed = sum(np.log(values[name] / start[name]) ** 2 for name in start)
        return float(np.mean(error**2) + _LOYALTY * strayed)

    best, least = dict(start), loss(start)
    for step in _STEPS:
        for _ in range(_ROUNDS):
            before = least
            for name, (low, high) in bounds.items():
                for factor in (step, 1 / step):
                    tried = {**best, name: min(max(best[name] * factor, low), high)}
                    error = loss(tried)
                    if error < least:
                        best, least = tried, error
            if least == before:
                break
    fitted = replace(coefficients, values=best)
    return replace(fitted, residual=Residual.of(_predicted(table, fitted), times))

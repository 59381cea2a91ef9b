"""The Layout Efficiency Predictor: what a candidate costs, from its features and a device's fitted coefficients.

Two forms. ``two_term`` is the published one,

    t = α1 · bytes / BW + α2 · unpack_ops,

with BW the DRAM read bandwidth at the calibrated thread count, α1 a pure number and α2 in nanoseconds per unpacking
instruction (the publication adds a time and a count; these units make it a sum). ``extended`` adds what that leaves
out: the cache level that holds the working set, dot products and all other instructions, load imbalance, the fork and
the softmax,

    compute = (Σ_class w_class · instructions_class + w_exp · exponentials) / p,     p = tasks / ceil(tasks / threads)
    memory  = bytes · (1 / BW(working set, p) − 1 / BW(first level))
    t = max(memory, compute) + γ · min(memory, compute) + (task · tasks + fork) · [tasks > 1 and threads > 1]

BW is that of code which prefetches or of code which does not, as the candidate does. ``memory`` is only what lies
beyond the first cache level, because loads that hit it are instructions. γ is 0 for a core
that overlaps transfers and computation completely and 1 for one that does not at all. Threads that
share tasks claim each from one word in memory, one after the other; a single thread only counts, which costs nothing
worth a term. No coefficient is negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .assembly import CLASSES
from .bandwidth import Bandwidth
from .features import Features

Floats = NDArray[np.float64]
TWO_TERM, EXTENDED = "two_term", "extended"
_REGIME_ROUNDS = 12


@dataclass(frozen=True)
class Residual:
    """How far a fit is from the times it was fitted to: |predicted / measured − 1|."""

    median: float
    p95: float
    samples: int

    @classmethod
    def of(cls, predicted: Floats, measured: Floats) -> Self:
        error = np.abs(predicted / measured - 1)
        return cls(float(np.median(error)), float(np.quantile(error, 0.95)), len(error))


@dataclass(frozen=True)
class Coefficients:
    """A fitted model.

    Attributes
    ----------
    form : str
        ``two_term`` or ``extended``.
    values : dict of str to float
        Units are in the names. ``two_term``: ``alpha1``, ``alpha2_ns``. ``extended``: ``<class>_ns`` per executed
        instruction of each class, ``exponential_ns``, ``task_us``, ``fork_us``, ``gamma``.
    bandwidth : Bandwidth
    threads : int
        Thread count of the calibration; the one whose bandwidth ``two_term`` divides by.
    residual : Residual
    """

    form: str
    values: dict[str, float]
    bandwidth: Bandwidth
    threads: int
    residual: Residual = field(default=Residual(0.0, 0.0, 0))

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` is the inverse."""
        return asdict(self) | {"bandwidth": self.bandwidth.as_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        bandwidth, residual = Bandwidth.from_dict(data["bandwidth"]), Residual(**data["residual"])
        return cls(data["form"], dict(data["values"]), bandwidth, data["threads"], residual)


@dataclass(frozen=True)
class Terms:
    """The parts of one ``extended`` prediction, in microseconds, for explanations."""

    memory_us: float
    instructions_us: dict[str, float]
    exponentials_us: float
    tasks_us: float
    fork_us: float
    overlap_us: float
    """What overlapping memory and computation saves."""


def predict_us(features: Features, coefficients: Coefficients) -> float:
    """Predicted time of one call in microseconds."""
    return float(predict_many([features], coefficients)[0])


def predict_many(features: Sequence[Features], coefficients: Coefficients) -> Floats:
    """`predict_us` of each, vectorised: shape (len(features),)."""
    if not features:
        return np.zeros(0)
    table = _Table(features)
    values = coefficients.values
    if coefficients.form == TWO_TERM:
        stream = table.bytes / (coefficients.bandwidth.at("DRAM", coefficients.threads) * 1e3)
        return np.asarray(values["alpha1"] * stream + values["alpha2_ns"] * 1e-3 * table.unpack)
    memory = table.memory_us(coefficients.bandwidth)
    weights = np.array([values[name] for name in _COMPUTE])
    compute = table.compute @ weights * 1e-3
    low, high = np.minimum(memory, compute), np.maximum(memory, compute)
    fixed = table.serial @ np.array([values["task_us"], values["fork_us"]])
    return np.asarray(high + values["gamma"] * low + fixed)


def explain(features: Features, coefficients: Coefficients) -> Terms:
    """The terms that an ``extended`` prediction adds up; their sum less ``overlap_us`` is `predict_us`."""
    table, values = _Table([features]), coefficients.values
    memory = float(table.memory_us(coefficients.bandwidth)[0])
    each = {name: float(x) * values[name] * 1e-3 for name, x in zip(_COMPUTE, table.compute[0], strict=True)}
    exponentials = each.pop("exponential_ns")
    tasks, fork = (float(x) for x in table.serial[0])
    compute = sum(each.values()) + exponentials
    return Terms(
        memory,
        {name.removesuffix("_ns"): each_us for name, each_us in each.items()},
        exponentials,
        tasks * values["task_us"],
        fork * values["fork_us"],
        (1 - values["gamma"]) * min(memory, compute),
    )


_COMPUTE = (*(f"{kind}_ns" for kind in CLASSES), "exponential_ns")


class _Table:
    """Features as columns."""

    def __init__(self, features: Sequence[Features]) -> None:
        rows = [(f.bytes, f.working_set_bytes, f.unpack_ops, f.exponentials, f.tasks, f.threads) for f in features]
        columns = np.array(rows, np.float64).T
        self.bytes, self.working_set, self.unpack, exponentials, tasks, threads = columns
        self.prefetched = np.array([f.prefetched for f in features], bool)
        self.parallelism = tasks / np.ceil(tasks / threads)
        counts = np.array([[f.instructions.get(kind, 0) for kind in CLASSES] for f in features], np.float64)
        self.compute = np.column_stack([counts, exponentials]) / self.parallelism[:, None]
        forks = np.minimum(tasks, threads) > 1
        self.serial = np.column_stack([tasks * forks, forks])

    def memory_us(self, bandwidth: Bandwidth) -> Floats:
        nearest = np.zeros_like(self.bytes)
        here = np.where(
            self.prefetched,
            bandwidth.gbps(self.working_set, self.parallelism),
            bandwidth.gbps(self.working_set, self.parallelism, unaided=True),
        )
        first = np.maximum(bandwidth.gbps(nearest, self.parallelism), here)
        return np.asarray(self.bytes * (1 / here - 1 / first) * 1e-3)


def fit_two_term(
    features: Sequence[Features], measured_us: Sequence[float], bandwidth: Bandwidth, threads: int
) -> Coefficients:
    """Least relative error over the samples; see the module's text for the form."""
    table, times = _Table(features), np.asarray(measured_us, np.float64)
    design = np.column_stack([table.bytes / (bandwidth.at("DRAM", threads) * 1e3), table.unpack * 1e-3])
    alpha1, alpha2 = nonnegative_least_squares(design / times[:, None], np.ones_like(times))
    fitted = Coefficients(TWO_TERM, {"alpha1": float(alpha1), "alpha2_ns": float(alpha2)}, bandwidth, threads)
    return _with_residual(fitted, features, times)


def fit_extended(
    features: Sequence[Features], measured_us: Sequence[float], bandwidth: Bandwidth, threads: int
) -> Coefficients:
    """Least relative error over the samples, by alternating two exact steps for each γ on a grid that gets finer.

    Given which of memory and computation is the longer for each sample, the model is linear in the other coefficients;
    given those, which is the longer follows. The γ with the smallest error wins.
    """
    table, times = _Table(features), np.asarray(measured_us, np.float64)
    memory = table.memory_us(bandwidth)
    compute = table.compute * 1e-3

    def fit(gamma: float) -> tuple[float, float, Floats]:
        solution = _fit_for_gamma(gamma, memory, compute, table.serial, times)
        return _loss(gamma, solution, memory, compute, table.serial, times), gamma, solution

    best = min((fit(float(gamma)) for gamma in np.linspace(0, 1, 21)), key=lambda tried: tried[0])
    for step in (0.01, 0.002, 0.0005):
        near = np.clip(best[1] + step * np.arange(-5, 6), 0.0, 1.0)
        best = min([best, *(fit(float(gamma)) for gamma in near)], key=lambda tried: tried[0])
    names = (*_COMPUTE, "task_us", "fork_us")
    values = {name: float(x) for name, x in zip(names, best[2], strict=True)} | {"gamma": best[1]}
    return _with_residual(Coefficients(EXTENDED, values, bandwidth, threads), features, times)


def _fit_for_gamma(gamma: float, memory: Floats, compute: Floats, serial: Floats, times: Floats) -> Floats:
    bound = memory > 0.5 * times
    seen: set[bytes] = set()
    best: tuple[float, Floats] | None = None
    while bound.tobytes() not in seen and len(seen) < _REGIME_ROUNDS:
        seen.add(bound.tobytes())
        share = np.where(bound, gamma, 1.0)
        design = np.column_stack([compute * share[:, None], serial]) / times[:, None]
        target = 1 - np.where(bound, memory, gamma * memory) / times
        solution = nonnegative_least_squares(design, target)
        error = _loss(gamma, solution, memory, compute, serial, times)
        if best is None or error < best[0]:
            best = (error, solution)
        bound = memory > compute @ solution[: compute.shape[1]]
    assert best is not None
    return best[1]


def _loss(gamma: float, solution: Floats, memory: Floats, compute: Floats, serial: Floats, times: Floats) -> float:
    worked = compute @ solution[: compute.shape[1]]
    overlapped = np.maximum(memory, worked) + gamma * np.minimum(memory, worked)
    predicted = overlapped + serial @ solution[compute.shape[1] :]
    return float(np.sum((predicted / times - 1) ** 2))


def _with_residual(fitted: Coefficients, features: Sequence[Features], times: Floats) -> Coefficients:
    residual = Residual.of(predict_many(features, fitted), times)
    return Coefficients(fitted.form, fitted.values, fitted.bandwidth, fitted.threads, residual)


def nonnegative_least_squares(a: Floats, b: Floats) -> Floats:
    """x ≥ 0 that minimises ‖a·x − b‖₂, by the active-set method of Lawson and Hanson (1974, chapter 23).

    Parameters
    ----------
    a : ndarray, shape (m, n)
        Columns of any scale; a zero column gets coefficient 0.
    b : ndarray, shape (m,)

    Returns
    -------
    ndarray, shape (n,)
    """
    scale = np.linalg.norm(a, axis=0)
    usable = scale > 0
    a = a[:, usable] / scale[usable]
    n = a.shape[1]
    x = np.zeros(n)
    free = np.zeros(n, bool)
    tolerance = 1e-12 * max(float(np.linalg.norm(b)), 1e-300)
    for _ in range(10 * (n + 1)):
        gradient = a.T @ (b - a @ x)
        entering = np.where(free, -np.inf, gradient)
        if not n or entering.max() <= tolerance:
            break
        free[int(entering.argmax())] = True
        while True:
            trial = np.zeros(n)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            leaving = free & (trial <= 0)
            if not leaving.any():
                break
            step = np.min(x[leaving] / np.maximum(x[leaving] - trial[leaving], 1e-300))
            x = x + step * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
        x = trial
    result = np.zeros(len(scale))
    result[usable] = x / scale[usable]
    return result

"""Fit a board's cost model to what it does: its bandwidth, its launches, and a few dozen candidates of all kinds.

Candidates run in a worker process, as they do when tuning: one that breaks the GPU's context costs its own sample.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..costmodel.device import detect
from ..costmodel.gpu import Gpu
from ..costmodel.gpu_features import GpuFeatures, gpu_features
from ..costmodel.gpu_lep import BOUNDS, GpuCoefficients, default_coefficients, fit_gpu, predict_us
from ..costmodel.kernel_counts import KernelCounts
from ..kernels.backend import Backend
from ..kernels.candidate import Candidate
from ..kernels.cuda.device import Driver
from ..kernels.cuda.work import work
from ..kernels.errors import LowbitError, NoiseError
from ..kernels.problem import Problem
from .crew import Crew
from .gpu_timing import GpuSlot, read_bandwidth_gbps
from .messages import Count, Counted, Setup, TimeSlot
from .rounds import Fault
from .statistics import median

PROBLEMS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("attend h32/8 d128 q1 w8a8", (1024, 16384)),
    ("attend h32/8 d128 q1 w4a8", (4096,)),
    ("attend h32/8 d128 q1 fp16", (1024, 16384)),
    ("gemv k4096 c1 w8a8", (4096,)),
    ("gemv k4096 c1 w4a8", (14336,)),
    ("qk h32/8 d128 q1 w4a8", (16384,)),
    ("sv h32/8 d128 q1 w8a8", (16384,)),
)
"""Problems and their lengths: short and long, each format, each operator."""
EACH = 5
"""Candidates of each problem, spread evenly over its space."""
LEAST_SAMPLES = 8
MOST_WORKERS = 8
"""Processes that compile and count; only the one that times opens the GPU."""
DEFAULT_BUDGET_S = 150.0


@dataclass(frozen=True)
class GpuSample:
    """One candidate timed."""

    problem: str
    tokens: int
    candidate: str
    features: GpuFeatures
    measured_us: float


@dataclass(frozen=True)
class GpuCalibration:
    """What calibrating a board found.

    Attributes
    ----------
    coefficients : GpuCoefficients
    bandwidth_gbps : float
        At which it read memory.
    launch_us : float
        Of one launch in a graph.
    samples : tuple of GpuSample
    failed : dict of str to str
        Why candidates gave no sample.
    seconds : float
        What it took.
    """

    coefficients: GpuCoefficients
    bandwidth_gbps: float
    launch_us: float
    samples: tuple[GpuSample, ...]
    failed: dict[str, str]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """What is stored: the coefficients, which `GpuCoefficients.from_dict` reads, and what they were fitted to."""
        return {
            **self.coefficients.as_dict(),
            "bandwidth_gbps": self.bandwidth_gbps,
            "measured_launch_us": self.launch_us,
            "samples": [
                {
                    "problem": each.problem,
                    "tokens": each.tokens,
                    "candidate": each.candidate,
                    "measured_us": each.measured_us,
                    "predicted_us": predict_us(each.features, self.coefficients),
                }
                for each in self.samples
            ],
        }


def calibrate_gpu(
    name: str,
    backend: Backend,
    gpu: Gpu,
    ordinal: int,
    budget_s: float | None = None,
    problems: Sequence[tuple[str, Sequence[int]]] = PROBLEMS,
    each: int = EACH,
) -> GpuCalibration:
    """Calibrate the GPU number ``ordinal``, whose profile is ``gpu``.

    Parameters
    ----------
    name : str
        Of the backend, as workers resolve it.
    backend : Backend
    budget_s : float, optional
        Stop sampling then; `DEFAULT_BUDGET_S` unless given.
    problems : sequence
        What to sample: keys of problems, and lengths of each.
    each : int
        Candidates of each problem.

    Raises
    ------
    DeviceError
        If the GPU cannot be used.
    NoiseError
        If fewer than `LEAST_SAMPLES` candidates could be timed.
    """
    started = time.monotonic()
    until = started + (DEFAULT_BUDGET_S if budget_s is None else budget_s)
    driver = Driver(ordinal)
    bandwidth_gbps = read_bandwidth_gbps(driver)
    samples: list[GpuSample] = []
    launches_us: list[float] = []
    failed: dict[str, str] = {}
    chosen = {key: tuple(spread(Problem.parse(key), backend, each).values()) for key, _ in problems}
    groups = [(key, tokens) for key, lengths in problems for tokens in lengths]
    with Crew(Setup(name), min(detect().cores, MOST_WORKERS)) as crew:
        counted = _counted(crew, backend, chosen, failed, (started + until) / 2)
        for done, (key, tokens) in enumerate(groups):
            # Short of time, all kinds of problems are sampled rather than the first ones well.
            last = time.monotonic() + (until - time.monotonic()) / (len(groups) - done)
            problem = Problem.parse(key)
            for candidate in chosen[key]:
                counts = counted.get((key, candidate.name))
                if counts is None or time.monotonic() >= last:
                    continue
                reply = crew.ask(TimeSlot(key, tokens, candidate.name, "cold"))
                if isinstance(reply, Fault):
                    failed[f"{key}: {candidate.name}"] = f"{reply.status}: {reply.message}"
                    continue
                assert isinstance(reply, GpuSlot)
                try:
                    made = work(problem, candidate, tokens, gpu.arch)
                    features = gpu_features(problem, candidate, tokens, counts, gpu, made)
                except LowbitError as error:
                    failed[f"{key}: {candidate.name}"] = str(error)
                    continue
                launches_us.append(reply.launch_us / features.launches)
                samples.append(GpuSample(key, tokens, candidate.name, features, median(reply.samples_us)))
    if len(samples) < LEAST_SAMPLES:
        why = next(iter(failed.values()), "the time was up")
        raise NoiseError(f"only {len(samples)} candidates could be timed for calibrating {gpu.name}: {why}")
    launch_us = median(launches_us)
    start = _measured(default_coefficients(gpu), bandwidth_gbps, launch_us)
    fitted = fit_gpu([each.features for each in samples], [each.measured_us for each in samples], start)
    seconds = time.monotonic() - started
    return GpuCalibration(fitted, bandwidth_gbps, launch_us, tuple(samples), failed, seconds)


def spread(problem: Problem, backend: Backend, count: int = EACH) -> dict[str, Candidate]:
    """``count`` candidates by name, the baseline and others evenly over the space."""
    space = [each for each in backend.space(problem, 1) if isinstance(each, Candidate)]
    steps = max(count - 1, 1)
    chosen = [backend.baseline(problem, 1)]
    chosen += [space[(2 * n + 1) * len(space) // (2 * steps)] for n in range(min(count - 1, len(space)))]
    return {each.name: each for each in chosen}


def _measured(coefficients: GpuCoefficients, bandwidth_gbps: float, launch_us: float) -> GpuCoefficients:
    """Coefficients to start from, with those that are measured by themselves, within their bounds."""
    found = {"dram_share": bandwidth_gbps / coefficients.gpu.bandwidth_gbps, "launch_us": launch_us}
    values = {name: min(max(value, BOUNDS[name][0]), BOUNDS[name][1]) for name, value in found.items()}
    return replace(coefficients, values={**coefficients.values, **values})


def _counted(
    crew: Crew, backend: Backend, chosen: Mapping[str, Sequence[Candidate]], failed: dict[str, str], until: float
) -> dict[tuple[str, str], KernelCounts]:
    """Counts of each candidate's code, by all workers; ``failed`` is told why others have none."""
    requests = [
        Count(key, ((symbol, candidate.name),))
        for key, candidates in chosen.items()
        for candidate in candidates
        for symbol in backend.tiles(Problem.parse(key), candidate)
    ]
    found: dict[tuple[str, str], KernelCounts] = {}
    for request, reply in crew.work(requests, until=until):
        assert isinstance(request, Count)
        ((symbol, name),) = request.tiles
        if isinstance(reply, Counted) and isinstance(counts := reply.counts.get(symbol), KernelCounts):
            found[request.problem, name] = counts
        else:
            reason = reply.message if isinstance(reply, Fault) else getattr(reply, "failed", {}).get(symbol, "")
            failed[f"{request.problem}: {name}"] = reason
    return found

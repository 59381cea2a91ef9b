"""Fit the cost model to a device with microbenchmarks that are not the operators being ranked."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from ..kernels.backend import backend_named
from ..kernels.cpu.pool import allowed_cpus, pinned
from ..kernels.cpu.wake import Meeting, wake
from .bandwidth import Bandwidth, WorkingSet, fastest, measure_bandwidth, windows_of, working_sets
from .device import Device
from .features import Features
from .lep import Coefficients, fit_extended, fit_two_term, predict_many
from .microbench import MOST_TASKS, Bench
from .microloops import STREAMED

QUICK_BUDGET_S = 8.0
"""A budget that still gives a usable fit."""

_ROUNDS = 20
_WARM = 3  # unmeasured calls first: a last-level cache that takes what others evict fills slowly
_BATCH, _MOST_CALLS, _READING_S = 5, 101, 500e-6  # a reading: at least so many calls, more of short ones
_COMPUTE_BYTES = 8 << 10  # a quarter of the smallest common first-level cache
_COMPUTE_S = 150e-6  # a hundred times the cost of a call
_PARKED_S = 0.002  # four times as long as idle threads spin
_FORK = ("fork_us", "parked_us")
_PROBE_BYTES = 256 << 10


@dataclass(frozen=True)
class Sample:
    """One microbenchmark: measured, and what each fitted form says.

    Attributes
    ----------
    loop : str
        A loop of `lowbit.costmodel.microloops.LOOPS`, ``nothing`` (empty tasks) or ``meeting`` (one empty task for each
        thread, which all have to come).
    level : str
        Cache level that holds its data.
    features : Features
    measured_us, two_term_us, extended_us : float
        The cost of calling an empty task inline is taken off.
    """

    loop: str
    level: str
    features: Features
    measured_us: float
    two_term_us: float
    extended_us: float


@dataclass(frozen=True)
class Calibration:
    """Everything one calibration learnt.

    Attributes
    ----------
    device : Device
    threads : int
        Most threads measured with.
    bandwidth : Bandwidth
    two_term, extended : Coefficients
        Their residuals are over the samples that each form can describe: ``two_term`` has no term for caches, the fork
        and the softmax, and is fitted to what ``threads`` threads read from memory.
    samples : tuple of Sample
    fork_us : float or None
        A fork that all threads join, their pool spinning, as between the calls of a decode loop: what the extended
        form's fork is fitted to. None for one thread.
    parked_us : float or None
        The same after a pause in which the pool's threads have gone to sleep.
    noise : float
        Median over the samples of how much slower than the best round the middle round was; above 0.1 something else
        was running.
    seconds : float
        What the calibration took.
    toolchain : str
    """

    device: Device
    threads: int
    bandwidth: Bandwidth
    two_term: Coefficients
    extended: Coefficients
    samples: tuple[Sample, ...]
    noise: float
    seconds: float
    toolchain: str
    fork_us: float | None = None
    parked_us: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` is the inverse."""
        parts = {name: getattr(self, name).as_dict() for name in ("device", "bandwidth", "two_term", "extended")}
        samples = [asdict(sample) for sample in self.samples]
        rest = {name: getattr(self, name) for name in ("threads", "noise", "seconds", "toolchain", *_FORK)}
        return {**parts, **rest, "samples": samples}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        samples = (Sample(**(row | {"features": Features.from_dict(row["features"])})) for row in data["samples"])
        return cls(
            Device.from_dict(data["device"]),
            data["threads"],
            Bandwidth.from_dict(data["bandwidth"]),
            Coefficients.from_dict(data["two_term"]),
            Coefficients.from_dict(data["extended"]),
            tuple(samples),
            data["noise"],
            data["seconds"],
            data["toolchain"],
            *(data.get(name) for name in _FORK),
        )


@dataclass(frozen=True)
class _Plan:
    loop: str
    level: str
    call: Callable[[], None]
    features: Features
    warm: int
    evicted_bytes: int = 0


def calibrate(device: Device, threads: int, budget_s: float = 60.0) -> Calibration:
    """Measure and fit, on a thread pinned meanwhile.

    Parameters
    ----------
    device : Device
        This machine.
    threads : int
        Most threads that kernels will use.
    budget_s : float
        Wall time not to exceed. A fit needs about 4 s, `QUICK_BUDGET_S` gives a usable one, and no more is used than
        some 20 s.

    Raises
    ------
    ValueError
        If ``threads`` is not positive.
    CompileError
        If a loop's assembly cannot be counted.
    """
    if threads < 1:
        raise ValueError(f"cannot calibrate {threads} threads")
    started = time.perf_counter()
    bench = Bench(device, max(each.size_bytes for each in working_sets(device)))
    counts = sorted({1 << bit for bit in range(threads.bit_length())} | {threads})
    counts = [count for count in counts if count <= threads]
    with pinned():
        plans = _plans(bench, threads)
        overhead = _Plan(
            "nothing", "", bench.call("nothing", 1, 1, 64, 1), bench.features("nothing", 1, 1, 64, 1), _WARM
        )
        readings: list[list[float]] = [[] for _ in plans]
        empty: list[float] = []
        parked: list[float] = []
        bandwidth = measure_bandwidth(bench, counts)
        for _ in range(_ROUNDS):
            round_started = time.perf_counter()
            empty.append(_reading(bench, overhead))
            for plan, seen in zip(plans, readings, strict=True):
                seen.append(_reading(bench, plan))
            parked += _parked(bench, threads)
            bandwidth = fastest(bandwidth, measure_bandwidth(bench, counts))
            now = time.perf_counter()
            if now - started + 1.3 * (now - round_started) > 0.75 * budget_s:
                break
    # Contention only adds time, so the fastest round is nearest the truth; but empty tasks that the caller runs before
    # anybody comes are cheaper than a fork that is joined, so of those the middle round is.
    typical = [
        statistics.median(seen) if plan.loop == "nothing" else min(seen)
        for plan, seen in zip(plans, readings, strict=True)
    ]
    measured = [max(seconds - min(empty), 1e-9) * 1e6 for seconds in typical]
    noise = statistics.median(statistics.median(seen) / min(seen) - 1 for seen in readings)
    features = [plan.features for plan in plans]
    streams = [i for i, plan in enumerate(plans) if plan.features.threads == threads and _two_term_sees(plan)]
    two_term = fit_two_term([features[i] for i in streams], [measured[i] for i in streams], bandwidth, threads)
    extended = fit_extended(features, measured, bandwidth, threads)
    predictions = (predict_many(features, two_term), predict_many(features, extended))
    samples = tuple(
        Sample(plan.loop, plan.level, plan.features, time_us, float(short), float(long))
        for plan, time_us, short, long in zip(plans, measured, *predictions, strict=True)
    )
    toolchain = backend_named("cpu").toolchain()
    fork_us = next((sample.measured_us for sample in samples if sample.loop == "meeting"), None)
    parked_us = min(parked) * 1e6 if parked else None
    seconds = time.perf_counter() - started
    return Calibration(
        device, threads, bandwidth, two_term, extended, samples, noise, seconds, toolchain, fork_us, parked_us
    )


def _two_term_sees(plan: _Plan) -> bool:
    """The published form has one bandwidth, the memory's: what caches hold would contradict it."""
    return plan.level == "DRAM"


def _parked(bench: Bench, threads: int) -> list[float]:
    """Seconds of a fork that all threads join when they were asleep; nothing if they cannot all be on a core."""
    if not _can_meet(threads):
        return []

    def call() -> None:
        wake(threads)

    time.sleep(_PARKED_S)
    return [bench.seconds(call)]


def _can_meet(threads: int) -> bool:
    return 1 < threads <= len(allowed_cpus())


def _reading(bench: Bench, plan: _Plan) -> float:
    call = plan.call
    if plan.evicted_bytes:
        threads = plan.features.threads
        return statistics.median(bench.cold_seconds(call, plan.evicted_bytes, threads) for _ in range(_BATCH))
    for _ in range(plan.warm):
        call()
    seconds = [bench.seconds(call) for _ in range(_BATCH)]
    more = int(_READING_S / min(seconds)) - _BATCH
    return statistics.median(seconds + [bench.seconds(call) for _ in range(min(more, _MOST_CALLS))])


def _plans(bench: Bench, threads: int) -> list[_Plan]:
    """The microbenchmarks: every loop on data in the first level, some at each further level, and empty tasks."""
    plans = []

    def add(loop: str, level: str, used: int, tasks: int, bytes_per_task: int, passes: int, windows: int = 1) -> None:
        call = bench.call(loop, used, tasks, bytes_per_task, passes, windows)
        features = bench.features(loop, used, tasks, bytes_per_task, passes, windows)
        plans.append(_Plan(loop, level, call, features, 0 if level == "DRAM" else _WARM * windows))

    def long_enough(loop: str, size: int) -> int:
        passes = max(_PROBE_BYTES // size, 1)
        probe = bench.call(loop, 1, 1, size, passes)
        probe()
        return math.ceil(_COMPUTE_S * passes / min(bench.seconds(probe) for _ in range(3)))

    for loop in bench.names:
        size = bench.whole_steps(loop, _COMPUTE_BYTES)
        passes = long_enough(loop, size)
        for used in sorted({1, threads}):
            add(loop, "L1", used, used, size, passes)
        if threads > 1 and loop in STREAMED:
            add(loop, "L1", threads, 2 * threads - 1, size, passes)
    for each in working_sets(bench.device):
        for loop in STREAMED if each.level not in ("", "L1") else ():
            if loop in bench.names:
                plans += [_streamed(bench, loop, each, used, long_enough) for used in sorted({1, threads})]
    if _can_meet(threads):
        plans.append(_Plan("meeting", "", Meeting(threads), bench.features("nothing", threads, threads, 64, 1), _WARM))
    elif threads > 1:
        add("nothing", "", threads, threads, 64, 1)
    if threads > 1:
        for tasks in (8 * threads, 64 * threads):
            add("nothing", "", threads, min(tasks, MOST_TASKS), 64, 1)
    return plans


def _streamed(bench: Bench, loop: str, each: WorkingSet, used: int, long_enough: Callable[[str, int], int]) -> _Plan:
    """``loop`` on ``used`` threads, over a working set beyond the first level."""
    windows = windows_of(each)
    size = bench.whole_steps(loop, each.size_bytes // windows // used)
    passes = 1 if each.evicted else long_enough(loop, size)
    features = bench.features(loop, used, used, size, passes, windows)
    call = bench.call(loop, used, used, size, passes, windows)
    if each.evicted:
        features = replace(features, working_set_bytes=each.stands_for_bytes)
        return _Plan(loop, each.level, call, features, 0, each.size_bytes)
    return _Plan(loop, each.level, call, features, 0 if each.level == "DRAM" else _WARM * windows)

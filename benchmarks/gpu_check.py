"""Check the NVIDIA GPU of this machine, in under eight minutes.

    python benchmarks/gpu_check.py [--seconds 440] [--out gpu_check.json] [--gpu 0]
    python benchmarks/gpu_check.py --simulate

Parts, in order: kernels of each operator and precision in a spread of layouts against float64; the read bandwidth; a
calibration; on four problems what the cost model chooses against the fastest of what was timed, its share of the
bandwidth and its energy; PyTorch's attention and a Triton kernel, where installed, beside it. A part that would not end
in time is cut short or left out, and said to be. A short table is printed last; everything is in the JSON file.

Without a GPU this says so and ends with status 3. ``--simulate`` runs the first part on tiny shapes in the simulator.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

if "--simulate" in sys.argv:
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # read when Numba is imported

import lowbit
from lowbit.costmodel.gpu import Gpu
from lowbit.costmodel.gpu_features import GpuFeatures, gpu_features
from lowbit.costmodel.gpu_here import profile_here
from lowbit.costmodel.gpu_lep import GpuCoefficients, default_coefficients, explain, predict_us
from lowbit.kernels.backend import Backend, backend_named
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.cuda.device import Driver
from lowbit.kernels.cuda.gpus import GpuHere, gpus_here, has_driver, why_no_driver
from lowbit.kernels.errors import LowbitError
from lowbit.kernels.problem import Problem
from lowbit.kernels.reference import make_operands
from lowbit.search.check import expect
from lowbit.search.crew import Crew
from lowbit.search.gpu_calibrate import calibrate_gpu, spread
from lowbit.search.gpu_meters import Meter
from lowbit.search.gpu_timing import GpuSlot, GpuStopwatch, copies_wanted, read_bandwidth_gbps
from lowbit.search.messages import Prepare, Prepared, Setup, TimeSlot
from lowbit.search.rounds import Fault
from lowbit.search.statistics import median
from lowbit.search.tiles import TileCounter

NO_GPU = 3
CHECKED = (
    *(f"attend h8/2 d{d} q1 {p}" for p in ("fp16", "w8a8", "w4a8") for d in (128, 64, 80, 256)),
    *(f"{operator} h8/2 d128 q1 {p}" for operator in ("qk", "sv") for p in ("fp16", "w8a8", "w4a8")),
    *(f"gemv k1024 c{c} {p}" for p in ("fp16", "w8a8", "w4a8") for c in (1, 4)),
    "attend h8/2 d128 q1 w8a8+w4a8",
    "attend h8/1 d128 q4 w8a8",
    "attend h8/8 d64 q1 w4a8 window 100 softcap 30",
)
SIMULATED = tuple(
    f"{operator} {'k64 c1' if operator == 'gemv' else 'h2/1 d32 q1'} {p}"
    for operator in ("attend", "qk", "sv", "gemv")
    for p in ("fp16", "w8a8", "w4a8")
)
CHECK_TOKENS, SIMULATED_TOKENS = 300, 33
LAYOUTS = 6
RACES = (
    ("attend h32/8 d128 q1 w8a8", 16384),
    ("attend h32/8 d128 q1 w4a8", 16384),
    ("attend h32/8 d128 q1 fp16", 4096),
    ("gemv k4096 c1 w4a8", 14336),
)
RACERS = 24
"""Candidates timed of a problem, besides the model's first `FIRST`."""
FIRST = 6
ROUNDS = 3
FOR_PEERS_S = 35.0


@dataclass
class Check:
    """One run: what it found, and how long it may take."""

    deadline: float
    found: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    @contextmanager
    def part(self, name: str, least_s: float) -> Iterator[dict[str, Any] | None]:
        """Where a part puts what it finds; None if there is no time for it. Errors end the part, not the run."""
        if self.left_s() < least_s:
            self.notes.append(f"{name}: left out, {self.left_s():.0f} s were left")
            yield None
            return
        started, values = time.monotonic(), self.found.setdefault(name, {})
        print(f"{name} …", flush=True)
        try:
            yield values
        except Exception as error:
            values["error"] = f"{type(error).__name__}: {error}"
            self.notes.append(f"{name}: {values['error']}")
        values["seconds"] = round(time.monotonic() - started, 1)


# -- correctness -------------------------------------------------------------------------------------------------------


def correctness(check: Check, name: str, backend: Backend, until: float) -> None:
    """Each candidate in a worker, at awkward lengths and at one that fits no tile."""
    with check.part("correctness", 20) as values, Crew(Setup(name), workers()) as crew:
        if values is None:
            return
        chosen = {key: list(spread(Problem.parse(key), backend, LAYOUTS)) for key in CHECKED}
        # Short of time, every problem has been met with some layouts.
        turns = (slice(0, LAYOUTS // 2), slice(LAYOUTS // 2, None))
        requests = [
            Prepare(key, CHECK_TOKENS, each) for turn in turns for key, names in chosen.items() for each in names[turn]
        ]
        tally = Tally()
        for request, reply in crew.work(requests, until=until):
            assert isinstance(request, Prepare)
            tally.add(request.problem, request.candidate, reply)
        values.update(tally.as_dict(len(requests)))
        if tally.checked < len(requests):
            check.notes.append(f"correctness: {tally.checked} of {len(requests)} candidates, the time was up")


@dataclass
class Tally:
    """What became of checked candidates."""

    checked: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)

    def add(self, problem: str, candidate: str, reply: object) -> None:
        self.checked += 1
        if isinstance(reply, Prepared):
            self.worst[problem] = max(self.worst.get(problem, 0.0), reply.max_error)
        elif isinstance(reply, Fault):
            kind = self.refused if reply.status == "compile_failed" else self.wrong
            kind[f"{problem}: {candidate}"] = f"{reply.status}: {reply.message}"

    def as_dict(self, wanted: int) -> dict[str, Any]:
        return {"wanted": wanted, "correct": self.checked - len(self.refused) - len(self.wrong), **asdict(self)}


def simulated(check: Check, backend: Backend) -> None:
    """Tiny shapes in the simulator, in this process."""
    with check.part("correctness", 0) as values:
        assert values is not None
        tally, wanted = Tally(), 0
        for key in SIMULATED:
            problem = Problem.parse(key)
            for candidate in map(small, spread(problem, backend, 3).values()):
                wanted += 1
                tally.add(key, candidate.name, simulate(problem, candidate, backend))
        values.update(tally.as_dict(wanted))


def small(candidate: Candidate) -> Candidate:
    """The same code with few threads: splits and warps are no part of it."""
    launch = candidate.launch
    return replace(candidate, plan=replace(launch, splits=min(launch.splits, 2), warps=1))


def simulate(problem: Problem, candidate: Candidate, backend: Backend) -> Prepared | Fault:
    started = time.monotonic()
    try:
        kernel = backend.compile(problem, candidate)
        operands = make_operands(problem, SIMULATED_TOKENS)
        packed = [kernel.pack(role, getattr(operands, role)) for role in problem.roles]
        expectation = expect(problem, operands, candidate.pipeline)
        error = expectation.error(kernel(operands.x, *packed))
    except LowbitError as reason:
        return Fault("compile_failed", str(reason))
    if not error <= expectation.tolerance:
        return Fault("wrong", f"error {error:.3g} exceeds {expectation.tolerance:.3g}", error)
    return Prepared(error, time.monotonic() - started)


# -- speed -------------------------------------------------------------------------------------------------------------


def bandwidth(check: Check, driver: Driver, gpu: Gpu) -> float:
    """Bytes a nanosecond; the published figure if it could not be measured."""
    with check.part("bandwidth", 5) as values:
        if values is not None:
            values["read_gbps"] = read_bandwidth_gbps(driver)
            values["published_gbps"] = gpu.bandwidth_gbps
            return float(values["read_gbps"])
    return gpu.bandwidth_gbps


def calibration(check: Check, name: str, backend: Backend, gpu: Gpu, ordinal: int, seconds: float) -> GpuCoefficients:
    with check.part("calibration", 45) as values:
        if values is not None:
            fit = calibrate_gpu(name, backend, gpu, ordinal, min(seconds, check.left_s() - 30))
            values.update(fit.as_dict())
            values["failed"] = fit.failed
            return fit.coefficients
    return default_coefficients(gpu)


class _Kept:
    """Counts of this run's code."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def tiles(self, toolchain: str, symbols: Any = None) -> dict[str, dict[str, Any]]:
        return {name: self.kept[name] for name in symbols or self.kept if name in self.kept}

    def put_tiles(self, toolchain: str, tiles: Any) -> None:
        self.kept.update(tiles)


def race(
    check: Check,
    key: str,
    tokens: int,
    name: str,
    backend: Backend,
    coefficients: GpuCoefficients,
    gbps: float,
    seconds: float,
) -> None:
    """The model's choice against the fastest of what is timed."""
    title = f"{key} at {tokens}"
    with check.part(title, 25) as values:
        if values is None:
            return
        problem = Problem.parse(key)
        until = time.monotonic() + seconds
        candidates = {each.name: each for each in backend.space(problem, 1) if isinstance(each, Candidate)}
        with Crew(Setup(name), workers()) as crew:
            counter = TileCounter(backend, crew, _Kept(), "")
            half = time.monotonic() + (until - time.monotonic()) / 2
            features = featured(problem, tokens, candidates, counter, coefficients.gpu, half)
            predicted = {each: predict_us(own, coefficients) for each, own in features.items()}
            order = sorted(predicted, key=predicted.__getitem__)
            baseline = backend.baseline(problem, 1).name
            step = max(len(order) // RACERS, 1)
            racers = [each for each in (*order[:FIRST], baseline, *order[::step]) if each in predicted]
            timed, faults = measured(crew, key, tokens, list(dict.fromkeys(racers)), until)
        if not timed:
            raise LowbitError(f"nothing could be timed: {next(iter(faults.values()), 'nothing was counted in time')}")
        best = min(timed, key=timed.__getitem__)
        choice = next(each for each in order if each in timed)
        floor_us = explain(features[best], coefficients)["floor_us"] * coefficients.gpu.bandwidth_gbps / gbps
        values.update(
            space=len(candidates),
            predicted=len(predicted),
            timed_us=timed,
            faults=faults,
            best=best,
            best_us=timed[best],
            choice=choice,
            choice_us=timed[choice],
            choice_predicted_us=predicted[choice],
            regret=timed[choice] / timed[best] - 1,
            baseline_us=timed.get(baseline),
            bandwidth_share=floor_us / timed[best],
            energy=energy(problem, candidates[best], tokens, backend),
        )


def featured(
    problem: Problem, tokens: int, candidates: dict[str, Candidate], counter: TileCounter, gpu: Gpu, until: float
) -> dict[str, GpuFeatures]:
    from lowbit.kernels.cuda.work import work

    counts, _ = counter.count(problem, candidates, lambda done, total: None, until)
    found = {}
    for name, own in counts.items():
        candidate = candidates[name]
        try:
            made = work(problem, candidate, tokens, gpu.arch)
            found[name] = gpu_features(problem, candidate, tokens, own[0], gpu, made)  # type: ignore[arg-type]
        except LowbitError:
            continue
    return found


def measured(
    crew: Crew, key: str, tokens: int, racers: list[str], until: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Medians of `ROUNDS` interleaved slots, or of fewer when the time is up."""
    faults, samples = {}, {}
    for request, reply in crew.work([Prepare(key, tokens, each) for each in racers], until=until):
        assert isinstance(request, Prepare)
        if isinstance(reply, Fault):
            faults[request.candidate] = f"{reply.status}: {reply.message}"
        else:
            samples[request.candidate] = []
    for number in range(ROUNDS):
        for name in [each for each in racers if each in samples]:
            if number and time.monotonic() >= until:
                break
            slot = crew.ask(TimeSlot(key, tokens, name, "cold"))
            if isinstance(slot, GpuSlot):
                samples[name] += slot.samples_us
            elif isinstance(slot, Fault):
                faults[name] = f"{slot.status}: {slot.message}"
                del samples[name]
    return {name: median(each) for name, each in samples.items() if each}, faults


def energy(problem: Problem, candidate: Candidate, tokens: int, backend: Backend) -> dict[str, Any] | str:
    """Joules of one call, or why there are none. In this process: the candidate has run in a worker before."""
    kernel = backend.compile(problem, candidate)
    operands = make_operands(problem, tokens)
    packed = [kernel.pack(role, getattr(operands, role)) for role in problem.roles]
    copies = copies_wanted(sum(each.nbytes for each in packed), "cold")
    calls: list[Any] = [kernel.bind(operands.x, *packed, tokens=tokens) for _ in range(copies)]
    meter = Meter(calls[0].driver.gpu.pci)
    found = GpuStopwatch(calls, "cold", meter).energy(seconds=1.0)
    return asdict(found) if found is not None else meter.missing or "the board has no counter of energy"


def peers(check: Check) -> None:
    with check.part("peers", 20) as values:
        if values is not None:
            from gpu_peers import compare  # lies beside this script

            values.update(compare(32, 8, 128, (4096, 16384)))
            check.notes += [f"peers: {note}" for note in values["notes"]]


# -- the run -----------------------------------------------------------------------------------------------------------


def workers() -> int:
    """Processes that compile and check at once; each has a context on the GPU."""
    return max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


def run_on_gpu(check: Check, here: GpuHere) -> None:
    name, gpu, start = here.arch, profile_here(here), time.monotonic()
    backend = backend_named(name)
    check.found["gpu"] = {**here.as_dict(), "profile": gpu.name, "fingerprint": gpu.fingerprint}
    check.found["clocks"] = state.as_dict() if (state := Meter(here.pci).state()) is not None else None
    total_s = check.left_s()
    correctness(check, name, backend, start + 0.25 * total_s)
    gbps = bandwidth(check, Driver(here.ordinal), gpu)
    coefficients = calibration(check, name, backend, gpu, here.ordinal, 0.15 * total_s)
    for done, (key, tokens) in enumerate(RACES):
        seconds = (check.left_s() - FOR_PEERS_S) / (len(RACES) - done)
        race(check, key, tokens, name, backend, coefficients, gbps, seconds)
    peers(check)


def table(found: dict[str, Any], notes: list[str]) -> Iterator[str]:
    """The last lines."""
    if "gpu" in found:
        gpu = found["gpu"]
        yield f"{gpu['name']} ({gpu['arch']}, {gpu['sms']} multiprocessors, driver {gpu['driver']})"
    checked = found.get("correctness", {})
    if "wanted" in checked:
        yield (
            f"correct: {checked['correct']} of {checked['checked']} candidates "
            f"({len(checked['wrong'])} wrong, {len(checked['refused'])} not compiled)"
        )
    if "read_gbps" in found.get("bandwidth", {}):
        yield f"read: {found['bandwidth']['read_gbps']:.0f} GB/s of {found['bandwidth']['published_gbps']:.0f}"
    if "residual" in found.get("calibration", {}):
        residual = found["calibration"]["residual"]
        yield f"model: median error {residual['median']:.1%} over {residual['samples']} samples"
    raced = {name: values for name, values in found.items() if "best_us" in values}
    if raced:
        yield f"{'problem':44}{'best us':>10}{'chosen us':>11}{'regret':>8}{'of read':>9}{'baseline':>10}{'mJ':>8}"
    for name, values in raced.items():
        cost = values["energy"]
        joules = f"{cost['joules'] * 1e3:.3f}" if isinstance(cost, dict) else "-"
        ratio = f"{values['baseline_us'] / values['best_us']:.2f}x" if values["baseline_us"] else "-"
        yield (
            f"{name:44}{values['best_us']:10.2f}{values['choice_us']:11.2f}{values['regret']:8.1%}"
            f"{values['bandwidth_share']:9.1%}{ratio:>10}{joules:>8}"
        )
    for name, us in found.get("peers", {}).get("us", {}).items():
        yield f"{name:44}{us:10.2f}"
    yield from (f"note: {note}" for note in notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=440.0, help="time to take at most")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="file for everything that was found")
    parser.add_argument("--gpu", type=int, default=0, help="number of the GPU")
    parser.add_argument("--simulate", action="store_true", help="only kernels on tiny shapes, in the simulator")
    options = parser.parse_args()
    check = Check(time.monotonic() + options.seconds)
    check.found["lowbit"], check.found["python"] = lowbit.__version__, platform.python_version()
    if options.simulate:
        simulated(check, backend_named("sm_86"))
    else:
        here = next((gpu for gpu in gpus_here() if gpu.ordinal == options.gpu), None)
        if here is None:
            reason = f"there is no GPU {options.gpu}" if has_driver() else why_no_driver()
            print(f"error: no NVIDIA GPU to check: {reason}", file=sys.stderr)
            return NO_GPU
        run_on_gpu(check, here)
    check.found["notes"] = check.notes
    options.out.write_text(json.dumps(check.found, indent=1, default=str) + "\n")
    for line in table(check.found, check.notes):
        print(line)
    checked = check.found["correctness"]
    return 0 if checked.get("correct") and not checked["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())

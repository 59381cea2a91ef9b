"""How long `Database.select` takes, beside the stated 2 µs: ``python benchmarks/select_time.py [--json]``.

The database is made up: winners at many lengths for one problem on this machine. Kernels are compiled before timing.
So are the prices of five layouts that a phase switcher compares.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from lowbit.autotune.ranges import with_ranges
from lowbit.costmodel.device import detect
from lowbit.db import Store, Winner
from lowbit.kernels.backend import backend_named
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.problem import Problem
from lowbit.runtime import open_db
from lowbit.runtime.curve import Curve
from lowbit.runtime.prices import LayoutPrices
from lowbit.runtime.switching import PhaseSwitcher

PROBLEM = Problem("attend", 9, 3, 64, "w8a8")
LENGTHS = (128, 512, 2048, 8192, 32768)
CALLS = 20_000


def medians_us(database: Path) -> dict[str, float]:
    """Median microseconds of a call: with a problem, an equal problem of its own, a key, and the table itself."""
    db = open_db(database)
    table, twin = db.table(PROBLEM), Problem.parse(PROBLEM.key)
    ways: dict[str, Callable[[int], object]] = {
        "select(problem)": lambda tokens: db.select(PROBLEM, tokens),
        "select(equal problem)": lambda tokens: db.select(twin, tokens),
        "select(key)": lambda tokens, key=PROBLEM.key: db.select(key, tokens),  # type: ignore[misc]
        "table.select": table.select,
    }
    found = {}
    for name, way in ways.items():
        times = []
        for tokens in range(1, CALLS + 1):
            way(tokens)
            started = time.perf_counter_ns()
            way(tokens)
            times.append(time.perf_counter_ns() - started)
        found[name] = statistics.median(times) / 1e3
    return found | switcher_us(list(islice(backend_named("cpu").untuned(PROBLEM, 2), 5)))


def switcher_us(layouts: list[Candidate]) -> dict[str, float]:
    """Median microseconds of asking a switcher between two comparisons, and of a comparison."""
    curves = {each: Curve({0: 3e-6 + n * 1e-7, 512: 8e-6, 8192: 7e-5 - n * 1e-6}) for n, each in enumerate(layouts)}
    found = {}
    for name, period in (("switcher", 1 << 30), ("switcher compares", 1)):
        switcher, times = PhaseSwitcher(LayoutPrices(curves), period=period), []
        for tokens in range(1, CALLS + 1):
            segments = [(layouts[0], tokens)]
            started = time.perf_counter_ns()
            switcher.layout_at(segments, tokens)
            times.append(time.perf_counter_ns() - started)
        found[name] = statistics.median(times) / 1e3
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    backend, device = backend_named("cpu"), detect()
    candidate = next(backend.untuned(PROBLEM, device.cores)).name
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        path = Path(folder) / "t.db"
        with Store.open(path) as store:
            store.put_device(device.fingerprint, device.as_dict())
            for winner in with_ranges(
                Winner(
                    device=device.fingerprint, problem=PROBLEM.key, tokens=tokens, tokens_from=1, tokens_to=None,
                    candidate=candidate, provenance="measured", median_us=1.0, protocol="cold",
                    toolchain=backend.toolchain(),
                )
                for tokens in LENGTHS
            ):  # fmt: skip
                store.put_winner(winner)
        found = medians_us(path)
    if as_json:
        print(json.dumps({"median_us": found}, indent=2))
        return
    for name, median in found.items():
        print(f"{name:22} {median:6.2f} µs")


if __name__ == "__main__":
    main()

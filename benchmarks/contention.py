"""How many timing rounds count as disturbed, with the machine to itself and with a process that holds a core.

    python benchmarks/contention.py [slots]

Each slot times a 4 MiB read by all cores from memory, as a candidate would be timed: operands evicted, threads awake,
between two controls. Printed for each scenario: the share of slots that are tainted, and by what (a slot may count
twice); percentiles of the controls; the median of the clean samples; and which share of the processors everything else
used meanwhile, as the system counts it. Numbers for an idle machine mean something only if that last one is near zero.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from lowbit.costmodel.device import Device, detect
from lowbit.costmodel.microbench import Bench
from lowbit.kernels.cpu.memory import evict
from lowbit.kernels.cpu.pool import allowed_cpus
from lowbit.kernels.cpu.wake import wake
from lowbit.search.control import Contention, Control
from lowbit.search.rounds import tainted
from lowbit.search.timing import Slot, Stopwatch

READ_BYTES = 4 << 20
PAUSE_S = 0.002  # between slots: another worker answers


def busy_s() -> float:
    """Seconds that all processors together have been busy since the start."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


@contextmanager
def hog(cpus: list[int]) -> Iterator[None]:
    """A process that does nothing but use one of ``cpus``; none of them, no process."""
    if not cpus:
        yield
        return
    command = f"import os\nos.sched_setaffinity(0, {set(cpus)})\nwhile True: pass"
    child = subprocess.Popen([sys.executable, "-c", command])
    time.sleep(0.3)
    try:
        yield
    finally:
        child.kill()
        child.wait()


def slots(device: Device, count: int) -> list[Slot]:
    """``count`` slots of the read."""
    threads = device.cores
    bench = Bench(device, READ_BYTES)
    call = bench.call("stream", threads, 8 * threads, bench.whole_steps("stream", READ_BYTES // threads // 8), 1)

    def chill() -> bool:
        evict(bench.address, READ_BYTES)
        return wake(threads)

    control = Control(allowed_cpus()[:threads], device.caches[-1].size_bytes)
    stopwatch, taken = Stopwatch([call], chill=chill), []
    for _ in range(count):
        taken.append(stopwatch.slot(control))
        time.sleep(PAUSE_S)
    return taken


def report(name: str, taken: list[Slot], others: float) -> None:
    def share(contention: Contention, count_preempted: bool) -> float:
        for slot in taken:
            contention.see(slot.before)
            contention.see(slot.after)
        return sum(contention.tainted(slot.control) or (count_preempted and slot.preempted) for slot in taken) / len(
            taken
        )

    never = math.inf
    why = {
        "a thread preempted or kept waiting": sum(slot.preempted for slot in taken) / len(taken),
        "arrival": share(Contention(compute_limit=never, stream_limit=never), False),
        "compute": share(Contention(stream_limit=never, arrival_floor_us=never), False),
        "stream": share(Contention(compute_limit=never, arrival_floor_us=never), False),
    }
    contention = Contention()
    print(f"{name}: {share(contention, True):.0%} of {len(taken)} slots tainted; everything else used {others:.0%}")
    print("    by " + ", ".join(f"{part} {each:.0%}" for part, each in why.items()))
    for part in ("arrival_us", "compute_us", "stream_us"):
        readings = [getattr(each, part) for slot in taken for each in (slot.before, slot.after)]
        print(f"    {part:10} ", "  ".join(f"p{p} {np.percentile(readings, p):.1f}" for p in (5, 10, 50, 90, 95, 99)))
    clean = [us for slot in taken if not tainted(slot, contention) for us in slot.samples_us]
    if clean:
        low, middle, high = np.percentile(clean, (25, 50, 75))
        print(f"    clean samples: median {middle:.1f} us, quartiles {low:.1f} and {high:.1f}")


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    device, cpus = detect(), list(allowed_cpus())
    print(device.description)
    for name, hogged in {
        "idle": [],
        f"a process on CPU {cpus[0]}, the caller's": cpus[:1],
        f"a process on CPU {cpus[-1]}": cpus[-1:],
        "a process on any CPU": cpus,
        "idle again": [],
    }.items():
        with hog(hogged):
            before, own, started = busy_s(), time.process_time(), time.monotonic()
            taken = slots(device, count)
            spent = busy_s() - before - (time.process_time() - own)
            report(name, taken, spent / (time.monotonic() - started) / len(cpus))


if __name__ == "__main__":
    main()

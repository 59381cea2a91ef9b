"""Where the time of an attention kernel goes: its scores, its weighted values, and both with the softmax between them.

    python benchmarks/operator_parts.py [--tokens 4096] [--precision w8a8] [--rounds 60]

One thread, one key/value head with four query heads of 128 channels. Prints nanoseconds for 32 packed values of each
operand (times four query rows), the unit in which tile code is counted, and the relative error of the integer pipeline
against activations that were not rounded.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from lowbit.kernels.backend import backend_named
from lowbit.kernels.candidate import Candidate, Schedule
from lowbit.kernels.cpu.pool import pinned
from lowbit.kernels.layout import Layout
from lowbit.kernels.problem import Problem
from lowbit.kernels.reference import error, make_operands, reference

HEADS, HEAD_DIM = 4, 128
PACKINGS = {"w8a8": "int8/bytes/signed", "w4a8": "int4/planes/offset"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--precision", choices=PACKINGS, default="w8a8")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()

    backend = backend_named("cpu")
    packing = PACKINGS[options.precision]
    k = Layout.parse(f"T/16 D/4 t16 d4 | {packing}")
    v = Layout.parse(f"T/32 D/16 t32/4 d16 t4 | {packing}")
    calls, errors = {}, {}
    for pipeline, registers in (("integer", 1), ("float", 2)):
        rows = HEADS if pipeline == "integer" else 1
        schedule = Schedule(rows=rows, registers=registers, block=256, splits=1, prefetch=0, threads=1)
        for operator in ("qk", "sv", "attend"):
            problem = Problem(operator, HEADS, 1, HEAD_DIM, options.precision)
            candidate = Candidate(k if operator != "sv" else None, v if operator != "qk" else None, pipeline, schedule)
            operands = make_operands(problem, options.tokens)
            kernel = backend.compile(problem, candidate)
            packed = [
                kernel.pack(role, part) for role, part in (("k", operands.k), ("v", operands.v)) if part is not None
            ]
            name = operator, pipeline, registers
            calls[name] = kernel.bind(operands.x, *packed)
            errors[name] = error(calls[name](), reference(problem, operands))
    times = {name: [] for name in calls}
    with pinned():
        for _ in range(options.rounds):
            for name, call in calls.items():
                call()
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    units = options.tokens * HEAD_DIM / 32
    print(f"{backend.target()}, {options.precision}, {options.tokens} tokens")
    for (operator, pipeline, registers), taken in times.items():
        low, middle = (1e9 * f(taken) / units for f in (np.min, np.median))
        wrong = errors[operator, pipeline, registers]
        line = f"{operator:7} {pipeline:8} registers {registers}"
        print(f"{line}: {low:6.2f} ns least, {middle:6.2f} median, error {wrong:.1e}")


if __name__ == "__main__":
    main()

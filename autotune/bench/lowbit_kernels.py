"""This project's kernels: the candidate that the bench was told to use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import __version__
from ...kernels.backend import Backend, Kernel, backend_named
from ...kernels.candidate import Candidate
from ...kernels.cpu.wake import wake
from ...kernels.quantize import Quantized, quantize
from .case import Case, Part
from .contestant import Contestant, Entry
from .inputs import small_operand, values

WAKE_ROWS = 64


class LowbitKernels(Contestant):
    def __init__(self) -> None:
        self._backend: Backend = backend_named("cpu")

    def open(self, threads: int) -> str:
        return f"{__version__} ({self._backend.target()}; {self._backend.toolchain()})"

    def enter(self, case: Case, candidate: str) -> Iterator[Entry]:
        kernel = self._backend.compile(case.problem, Candidate.parse(candidate))
        roles = case.problem.roles
        quantized = {role: _quantized(case, role) for role in roles}
        x = small_operand(case)
        packed = [kernel.pack(role, quantized[role]) for role in roles]
        call = kernel.bind(x, *packed, tokens=case.tokens)
        small = replace(case, tokens=min(case.tokens, WAKE_ROWS))
        few = kernel.bind(x, *_packed(kernel, small), tokens=small.tokens)
        out: dict[str, Any] = {}

        def run() -> None:
            out["y"] = call()

        def ready() -> bool:
            few()
            return wake(kernel.candidate.schedule.threads)

        def stored(role: str, part: Part) -> NDArray[np.float64]:
            rows = (slice(part.head, part.head + 1), slice(part.start, part.stop))
            held = quantized[role]
            rows_held: NDArray[np.float64] = Quantized(held.format, held.codes[rows], held.scales[rows]).dequantize()[0]
            return rows_held

        regions = []
        for each in packed:
            regions += [(array.ctypes.data, array.nbytes) for array in (each.words, each.scales) if array.nbytes]
        yield Entry(run, ready, tuple(regions), _storage(kernel), lambda: out["y"], stored, (packed, kernel))


def _storage(kernel: Kernel) -> str:
    layouts = [layout for layout in (kernel.candidate.k, kernel.candidate.v) if layout is not None]
    return ", ".join(dict.fromkeys(layout.packing.name for layout in layouts))


def _packed(kernel: Kernel, case: Case) -> list[Any]:
    return [kernel.pack(role, _quantized(case, role)) for role in case.problem.roles]


def _quantized(case: Case, role: str) -> Quantized:
    """Codes and scales of a whole operand, quantised a part at a time."""
    problem, precision = case.problem, case.problem.stored(role)
    shape = (problem.kv_heads, case.tokens)
    codes = np.empty((*shape, problem.head_dim), np.float16 if precision.format == "fp16" else np.int8)
    scales = np.empty((*shape, problem.scale_groups(role)), np.float16)
    for part in case.parts():
        each = quantize(values(case, role, part)[None], precision, role)
        codes[part.head, part.start : part.stop] = each.codes[0]
        scales[part.head, part.start : part.stop] = each.scales[0]
    return Quantized(precision.format, codes, scales)

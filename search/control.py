"""The control: fixed work timed between measurements, which slows down only when something else uses the machine.

It has two parts, an arithmetic loop that lives in registers (sensitive to preemption and to the clock frequency) and a
read of the next part of a buffer that exceeds the last cache level (sensitive to contention for memory, and independent
of what ran before, because a part is evicted long before its turn comes again). Each core that the measured kernels
use takes part, one after the other, once the kernels' own idle threads have stopped spinning on it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter_ns
from typing import Any

import numpy as np

COMPUTE_STEPS = 10_000
WINDOW_BYTES = 2 << 20
MAX_BUFFER_BYTES = 512 << 20
SETTLE_NS = 700_000
"""Idle threads of `lowbit.kernels.cpu.pool` spin for less than this after a call."""
RECENT_NS = 3_000_000
"""How long one reading may serve as the "before" of what follows it directly."""


@dataclass(frozen=True)
class ControlTime:
    """The slowest core's times of the two parts, in microseconds."""

    compute_us: float
    stream_us: float

    def worse(self, other: ControlTime) -> ControlTime:
        return ControlTime(max(self.compute_us, other.compute_us), max(self.stream_us, other.stream_us))


_IR = """
define i64 @compute(i64 %steps) {{
entry:
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %head ]
  %x = phi i64 [ 88172645463325252, %entry ], [ %x3, %head ]
  %a = shl i64 %x, 13
  %x1 = xor i64 %x, %a
  %b = lshr i64 %x1, 7
  %x2 = xor i64 %x1, %b
  %c = shl i64 %x2, 17
  %x3 = xor i64 %x2, %c
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %steps
  br i1 %more, label %head, label %end
end:
  ret i64 %x3
}}

define i64 @stream(i64 %address, i64 %bytes) {{
entry:
  %base = inttoptr i64 %address to ptr
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %head ]
  %sum = phi <4 x i64> [ zeroinitializer, %entry ], [ %sum{last}, %head ]
{loads}
  %next = add i64 %i, {step}
  %more = icmp ult i64 %next, %bytes
  br i1 %more, label %head, label %end
end:
  %result = extractelement <4 x i64> %sum{last}, i32 0
  ret i64 %result
}}
"""
_LOAD = """
  %offset{n} = add i64 %i, {offset}
  %p{n} = getelementptr i8, ptr %base, i64 %offset{n}
  %v{n} = load <4 x i64>, ptr %p{n}, align 8
  %sum{n} = xor <4 x i64> %{before}, %v{n}"""
_LOADS = 8
_LOAD_BYTES = 32


class _Kernels:
    """The two parts, compiled. The code is fixed here, down to the instruction, so that no compiler option moves it."""

    def __init__(self) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        loads = "".join(
            _LOAD.format(n=n, offset=n * _LOAD_BYTES, before=f"sum{n - 1}" if n else "sum") for n in range(_LOADS)
        )
        text = _IR.format(loads=loads, last=_LOADS - 1, step=_LOADS * _LOAD_BYTES)
        machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
        self._engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(text), machine)
        self._engine.finalize_object()
        word = ctypes.c_int64
        self.compute = ctypes.CFUNCTYPE(word, word)(self._engine.get_function_address("compute"))
        self.stream = ctypes.CFUNCTYPE(word, word, word)(self._engine.get_function_address("stream"))


_kernels = cache(_Kernels)


class Control:
    """Compiles once; `time` takes a few hundred microseconds a core.

    Parameters
    ----------
    cores : sequence of int
        Cores to visit, the caller's own first; it returns there. Empty where threads cannot be pinned: the control then
        runs where it is.
    cache_bytes : int
        Size of the last cache level.
    """

    def __init__(self, cores: Sequence[int], cache_bytes: int) -> None:
        self.cores = tuple(cores)
        size = min(max(2 * cache_bytes, 4 * WINDOW_BYTES), MAX_BUFFER_BYTES)
        self._buffer = np.ones(size // WINDOW_BYTES * (WINDOW_BYTES // 8), np.int64)
        self._position = 0
        kernels = _kernels()
        self._compute, self._stream = kernels.compute, kernels.stream
        self._last: tuple[int, ControlTime] | None = None

    def time(self) -> ControlTime:
        started = perf_counter_ns()
        result = self._here()
        if len(self.cores) > 1:
            while perf_counter_ns() - started < SETTLE_NS:
                self._compute(COMPUTE_STEPS // 10)
            for core in self.cores[1:]:
                os.sched_setaffinity(0, {core})
                result = result.worse(self._here())
            os.sched_setaffinity(0, {self.cores[0]})
        self._last = perf_counter_ns(), result
        return result

    def recent(self) -> ControlTime:
        """The last reading if it has just been taken, else a new one."""
        if self._last is not None and perf_counter_ns() - self._last[0] < RECENT_NS:
            return self._last[1]
        return self.time()

    def _here(self) -> ControlTime:
        window = self._buffer.ctypes.data + self._position
        self._position = (self._position + WINDOW_BYTES) % self._buffer.nbytes
        start = perf_counter_ns()
        self._compute(COMPUTE_STEPS)
        middle = perf_counter_ns()
        self._stream(window, WINDOW_BYTES)
        return ControlTime((middle - start) / 1e3, (perf_counter_ns() - middle) / 1e3)


class Contention:
    """Tells clean rounds from tainted ones by what the control took.

    The best-known control is the tenth percentile of all that a run has seen, not the minimum: one lucky reading at
    a boosted clock must not taint everything that follows. It is re-evaluated as readings arrive, so an early round
    that passed for clean can turn out to be tainted.

    Parameters
    ----------
    compute_limit, stream_limit : float
        Ratio to the best-known control beyond which a round is tainted.
    """

    def __init__(self, compute_limit: float = 1.25, stream_limit: float = 1.6) -> None:
        self.compute_limit = compute_limit
        self.stream_limit = stream_limit
        self._seen: list[ControlTime] = []
        self._best: ControlTime | None = None

    def see(self, control: ControlTime) -> None:
        self._seen.append(control)
        self._best = None

    @property
    def best(self) -> ControlTime:
        """The best-known control.

        Raises
        ------
        ValueError
            Before the first reading.
        """
        if not self._seen:
            raise ValueError("no control has been timed yet")
        if self._best is None:
            readings = np.array([(c.compute_us, c.stream_us) for c in self._seen])
            compute, stream = np.percentile(readings, 10, axis=0, method="lower")
            self._best = ControlTime(float(compute), float(stream))
        return self._best

    def tainted(self, control: ControlTime) -> bool:
        best = self.best
        return (
            control.compute_us > self.compute_limit * best.compute_us
            or control.stream_us > self.stream_limit * best.stream_us
        )

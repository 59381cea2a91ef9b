"""The control: fixed work timed between measurements, which slows down only when something else uses the machine.

It has three parts, taken on each core that the measured kernels use, one after the other, once the kernels' own idle
threads have stopped spinning there: how long the thread takes to arrive (another process that holds the core keeps it
waiting), an arithmetic loop that lives in registers (sensitive to the clock frequency and to whoever shares the core
unseen, as other guests of a virtual machine's host do), and a read from memory (sensitive to contention for it). The
loop and the read are the best of a few short tries, since an interrupt in one of them says nothing about the
measurement next to it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from time import perf_counter_ns
from typing import Any

import numpy as np

from ..kernels.cpu.memory import can_evict, evict, huge_zeros

COMPUTE_STEPS = 5_000
WINDOW_BYTES = 512 << 10
TRIES = 3
MAX_BUFFER_BYTES = 512 << 20
SETTLE_NS = 700_000
"""Idle threads of `lowbit.kernels.cpu.pool` spin for less than this after a call."""
RECENT_NS = 3_000_000
"""How long one reading may serve as the "before" of what follows it directly."""


@dataclass(frozen=True)
class ControlTime:
    """The slowest core's times of the parts, in microseconds."""

    compute_us: float
    stream_us: float
    arrival_us: float = 0.0

    def worse(self, other: ControlTime) -> ControlTime:
        return self._each(max, other)

    def around(self, after: ControlTime) -> ControlTime:
        """One reading for what was measured between two.

        Contention for memory and frequency that matter last longer than a slot, so both readings show them. A process
        that holds a core may let every other arrival through.
        """
        return replace(self._each(min, after), arrival_us=max(self.arrival_us, after.arrival_us))

    def _each(self, choose: Callable[[float, float], float], other: ControlTime) -> ControlTime:
        return ControlTime(
            choose(self.compute_us, other.compute_us),
            choose(self.stream_us, other.stream_us),
            choose(self.arrival_us, other.arrival_us),
        )


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
    """The loop and the read, compiled. The code is fixed here, so that no compiler option moves it."""

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
        Size of the last cache level. Matters where memory cannot be evicted: the read is then of the next part of a
        buffer that exceeds it.
    """

    def __init__(self, cores: Sequence[int], cache_bytes: int) -> None:
        self.cores = tuple(cores)
        self._evicts = can_evict()
        windows = 1 if self._evicts else min(max(2 * cache_bytes, 4 * WINDOW_BYTES), MAX_BUFFER_BYTES) // WINDOW_BYTES
        self._buffer = huge_zeros(windows * WINDOW_BYTES)
        self._buffer[:] = 1
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
                leaving = perf_counter_ns()
                os.sched_setaffinity(0, {core})
                arrival_us = (perf_counter_ns() - leaving) / 1e3
                result = result.worse(replace(self._here(), arrival_us=arrival_us))
            os.sched_setaffinity(0, {self.cores[0]})
        self._last = perf_counter_ns(), result
        return result

    def recent(self) -> ControlTime:
        """The last reading if it has just been taken, else a new one."""
        if self._last is not None and perf_counter_ns() - self._last[0] < RECENT_NS:
            return self._last[1]
        return self.time()

    def _here(self) -> ControlTime:
        return ControlTime(
            min(self._try_compute() for _ in range(TRIES)), min(self._try_stream() for _ in range(TRIES))
        )

    def _try_compute(self) -> float:
        start = perf_counter_ns()
        self._compute(COMPUTE_STEPS)
        return (perf_counter_ns() - start) / 1e3

    def _try_stream(self) -> float:
        window = self._buffer.ctypes.data + self._position
        self._position = (self._position + WINDOW_BYTES) % self._buffer.nbytes
        if self._evicts:
            evict(window, WINDOW_BYTES)
        start = perf_counter_ns()
        self._stream(window, WINDOW_BYTES)
        return (perf_counter_ns() - start) / 1e3


class Contention:
    """Tells clean rounds from tainted ones by what the control took.

    Readings are judged by the run's own: against its best-known control, the tenth percentile of all that a run has
    seen, and against its median. To be tainted a reading must be slow by both, for on some machines the fast tenth is a
    boosted clock, or a moment when the neighbours sleep, that must not taint everything else. Both are re-evaluated as
    readings arrive, so an early round that passed for clean can turn out to be tainted.

    Parameters
    ----------
    compute_limit, stream_limit, arrival_limit : float
        Ratio to the best-known control beyond which a round is tainted.
    typical_limit : float
        Ratio to the median that it must exceed as well. Arrivals are exempt: a process that holds a core for the whole
        run is no typical state.
    arrival_floor_us, arrival_ceiling_us : float
        Arrivals faster than the floor are normal, whatever the best was: a sleeping core takes time to wake. Later than
        the ceiling is late even if every reading of the run is: no core takes that long, but a time slice does.
    """

    def __init__(
        self,
        compute_limit: float = 1.25,
        stream_limit: float = 1.6,
        arrival_limit: float = 3.0,
        typical_limit: float = 1.15,
        arrival_floor_us: float = 150.0,
        arrival_ceiling_us: float = 1000.0,
    ) -> None:
        self.compute_limit = compute_limit
        self.stream_limit = stream_limit
        self.arrival_limit = arrival_limit
        self.typical_limit = typical_limit
        self.arrival_floor_us = arrival_floor_us
        self.arrival_ceiling_us = arrival_ceiling_us
        self._seen: list[ControlTime] = []
        self._known: tuple[ControlTime, ControlTime] | None = None

    def see(self, control: ControlTime) -> None:
        self._seen.append(control)
        self._known = None

    @property
    def best(self) -> ControlTime:
        """The best-known control.

        Raises
        ------
        ValueError
            Before the first reading.
        """
        return self._statistics()[0]

    @property
    def typical(self) -> ControlTime:
        """The median of each part; raises as `best` does."""
        return self._statistics()[1]

    def _statistics(self) -> tuple[ControlTime, ControlTime]:
        if not self._seen:
            raise ValueError("no control has been timed yet")
        if self._known is None:
            readings = np.array([astuple(control) for control in self._seen])
            best, typical = np.percentile(readings, (10, 50), axis=0, method="lower").tolist()
            self._known = ControlTime(*best), ControlTime(*typical)
        return self._known

    def tainted(self, control: ControlTime) -> bool:
        best, typical = self._statistics()

        def slow(us: float, limit: float, best_us: float, typical_us: float) -> bool:
            return us > limit * best_us and us > self.typical_limit * typical_us

        late_us = max(min(self.arrival_limit * best.arrival_us, self.arrival_ceiling_us), self.arrival_floor_us)
        return (
            control.arrival_us > late_us
            or slow(control.compute_us, self.compute_limit, best.compute_us, typical.compute_us)
            or slow(control.stream_us, self.stream_limit, best.stream_us, typical.stream_us)
        )

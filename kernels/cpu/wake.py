"""Waking a pool's threads before something is timed, as the decode loop around it would keep them awake.

Each thread of the pool has to arrive before any may leave, so a run that succeeds has found all of them on their cores,
and leaves them spinning for the next one. That it fails says that something else holds a core.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from time import perf_counter_ns
from typing import Any

from .pool import allowed_cpus, pool

PATIENCE_NS = 1_500_000
"""How long the threads may take to arrive: a woken one needs a tenth, and another process's time slice lasts longer."""
_TURNS = 4_000
"""Turns of the waiting loop before a meeting is called anew, to look at the clock."""

_IR = """
define void @meet(ptr %args, i64 %index) {{
entry:
  %expected.p = getelementptr i64, ptr %args, i64 1
  %patience.p = getelementptr i64, ptr %args, i64 2
  %late.p = getelementptr i64, ptr %args, i64 3
  %expected = load i64, ptr %expected.p
  %patience = load i64, ptr %patience.p
  %before = atomicrmw add ptr %args, i64 1 seq_cst
  br label %head
head:
  %turn = phi i64 [ 0, %entry ], [ %next, %wait ]
  %here = load atomic i64, ptr %args acquire, align 8
  %met = icmp uge i64 %here, %expected
  br i1 %met, label %done, label %wait
wait:
  call void asm sideeffect "{pause}", "~{{memory}}"()
  %next = add i64 %turn, 1
  %long = icmp ugt i64 %next, %patience
  br i1 %long, label %late, label %head
late:
  %count = atomicrmw add ptr %late.p, i64 1 seq_cst
  br label %done
done:
  ret void
}}
"""


@functools.cache
def _meet() -> tuple[Any, int]:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    pause = {"x86_64": "pause", "AMD64": "pause", "aarch64": "yield", "arm64": "yield"}.get(platform.machine(), "")
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(_IR.format(pause=pause)), machine)
    engine.finalize_object()
    return engine, engine.get_function_address("meet")


class Meeting:
    """A parallel run that ends when all threads of a pool have come: the least that a fork and join can take.

    Parameters
    ----------
    threads : int
        Of the pool, all of them on cores of their own.
    """

    def __init__(self, threads: int) -> None:
        engine, self._address = _meet()
        self._words = (ctypes.c_int64 * 4)(0, threads, _TURNS, 0)
        self._run, self._threads, self._engine = pool(threads).run, threads, engine
        self._where = ctypes.addressof(self._words)

    def __call__(self) -> None:
        self._words[0] = 0
        self._run(self._address, self._where, self._threads)

    def complete(self) -> bool:
        """Hold the meeting; whether everybody came before the first gave up."""
        self._words[3] = 0
        self()
        return self._words[3] == 0


def wake(threads: int) -> bool:
    """Have all threads of the pool of ``threads`` threads on their cores.

    Returns
    -------
    bool
        Whether they came within `PATIENCE_NS`. Pools with more threads than this process has cores are left alone,
        since they never spin; that counts as success.
    """
    if threads < 2 or threads > len(allowed_cpus()):
        return True
    meeting = Meeting(threads)
    until = perf_counter_ns() + PATIENCE_NS
    while not meeting.complete():
        if perf_counter_ns() >= until:
            return False
    return True

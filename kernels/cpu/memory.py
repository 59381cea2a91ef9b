"""Memory of large operands: allocated in huge pages, and evicted from every cache on request.

A cold measurement evicts what it is about to read. The instruction that does so works on lines, costs about as much as
reading them, needs no privilege and knows nothing of cache sizes: it is right on machines whose last level is huge or
shared with neighbours.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import platform
import sys
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE_BYTES = 2 << 20
HUGE_FROM_BYTES = 1 << 20
"""Smaller arrays stay in ordinary pages: most of a huge one would be wasted on them."""

_IR = """
define i64 @line_bytes() {{
  {line}
  ret i64 %line
}}

define void @evict(i64 %start, i64 %end, i64 %step) {{
entry:
  {fence}
  br label %head
head:
  %at = phi i64 [ %start, %entry ], [ %next, %body ]
  %more = icmp ult i64 %at, %end
  br i1 %more, label %body, label %done
body:
  call void asm sideeffect "{flush}", "r,~{{memory}}"(i64 %at)
  %next = add i64 %at, %step
  br label %head
done:
  {fence}
  ret void
}}
"""
_X86_LINE = "%line = add i64 64, 0"
# CTR_EL0, bits 16 to 19: the smallest data cache line, as the logarithm of its four-byte words.
_ARM_LINE = """%ctr = call i64 asm sideeffect "mrs $0, ctr_el0", "=r"()
  %shifted = lshr i64 %ctr, 16
  %field = and i64 %shifted, 15
  %line = shl i64 4, %field"""


def evict(address: int, nbytes: int) -> bool:
    """Remove every cache line of ``nbytes`` bytes at ``address`` from all levels of all cores' caches.

    Modified lines are written back first. What prefetchers may fetch beyond the range stays.

    Parameters
    ----------
    address, nbytes : int
        Mapped memory.

    Returns
    -------
    bool
        Whether this machine can; if not, nothing happened.

    Raises
    ------
    ValueError
        If ``nbytes`` is negative.
    """
    if nbytes < 0:
        raise ValueError(f"cannot evict {nbytes} bytes")
    native = _native()
    if native is None:
        return False
    native.evict(address, nbytes)
    return True


def can_evict() -> bool:
    """Whether `evict` works on this machine."""
    return _native() is not None


def huge_zeros(nbytes: int) -> NDArray[np.uint8]:
    """``nbytes`` zero bytes, from `HUGE_FROM_BYTES` on aligned to and backed by huge pages where the system has them.

    The memory lives as long as the array or any view of it.

    Raises
    ------
    ValueError
        If ``nbytes`` is negative.
    MemoryError
        If there is no room.
    """
    if nbytes < HUGE_FROM_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(nbytes, np.uint8)
    size = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        # Private, or the system would take it for shared memory and leave it in small pages.
        room = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot map {size} bytes: {error.strerror}") from None
    whole = np.frombuffer(room, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    with suppress(OSError):  # a kernel built without huge pages: the memory is as good, only slower
        room.madvise(mmap.MADV_HUGEPAGE, start, size)
    return whole[start : start + nbytes]


def source(line: str, flush: str, fence: str) -> str:
    """The loop over lines as LLVM IR, with a machine's instructions in place."""
    barrier = f'call void asm sideeffect "{fence}", "~{{memory}}"()'
    return _IR.format(line=line, flush=flush, fence=barrier)


class _Native:
    """The compiled loop over lines."""

    def __init__(self, line: str, flush: str, fence: str) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        llvm.initialize_native_asmparser()
        machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
        self._engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(source(line, flush, fence)), machine)
        self._engine.finalize_object()
        word = ctypes.c_int64
        self._evict = ctypes.CFUNCTYPE(None, word, word, word)(self._engine.get_function_address("evict"))
        self._line_bytes = int(ctypes.CFUNCTYPE(word)(self._engine.get_function_address("line_bytes"))())

    def evict(self, address: int, nbytes: int) -> None:
        self._evict(address - address % self._line_bytes, address + nbytes, self._line_bytes)


@functools.cache
def _native() -> _Native | None:
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        import llvmlite.binding as llvm

        # clflushopt does not wait for the line before it; both take an address in any register.
        instruction = "clflushopt" if llvm.get_host_cpu_features().get("clflushopt") else "clflush"
        return _Native(_X86_LINE, f"{instruction} ($0)", "mfence")
    if machine == "aarch64" and sys.platform == "linux":  # other systems do not say that a process may
        return _Native(_ARM_LINE, "dc civac, $0", "dsb sy")
    return None

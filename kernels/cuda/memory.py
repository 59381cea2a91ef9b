"""How simulated kernels see memory: raw addresses, every access checked.

Kernels take plain 64-bit addresses. On a GPU they load through them; in the simulator the functions below do, from
host buffers that are registered for the time of a launch:

    with registered(words, scales, out):
        load_words(address, 4)

An access outside every registered buffer, across the end of one, into one that is only read, or at an address that is
no multiple of its width raises `IllegalAccessError`, where a GPU would end the whole process's context. Launches of
one process are simulated one after the other; nothing here is safe to use from two launches at once.

    load_words(address, count) -> tuple of count signed 32-bit words, at a multiple of 4·count
    store_words(address, values)
    load_f16, load_f32 (address) -> float
    store_u8, store_f32 (address, value)
"""

from __future__ import annotations

import ctypes
import math
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ..errors import DeviceError


class IllegalAccessError(DeviceError):
    """A load or store outside a kernel's operands, or at a misaligned address."""


@dataclass(frozen=True)
class Region:
    """Memory that a launch may touch.

    Attributes
    ----------
    address : int
    nbytes : int
    writable : bool
    name : str
        What to call it in an error.
    """

    address: int
    nbytes: int
    writable: bool = True
    name: str = "buffer"

    @property
    def end(self) -> int:
        return self.address + self.nbytes

    def view(self) -> memoryview:
        """The bytes themselves; whoever registers the region keeps them alive."""
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address)).cast("B")


_starts: list[int] = []
_regions: list[tuple[Region, memoryview]] = []

_WORDS = {count: struct.Struct(f"<{count}i") for count in (1, 2, 4)}
_UNSIGNED_WORDS = {count: struct.Struct(f"<{count}I") for count in (1, 2, 4)}
_F16, _F32 = (struct.Struct(f"<{code}") for code in "ef")


@contextmanager
def registered(*memory: NDArray[Any] | Region) -> Iterator[None]:
    """Let simulated kernels touch these arrays and regions, besides what is registered already.

    Arrays must be contiguous; read-only arrays may only be read. Memory that is given twice may be written if it may
    be in either role.
    """
    saved = _starts[:], _regions[:]
    given = [item if isinstance(item, Region) else _region(item) for item in memory]
    _replace(_merged([region for region, _ in _regions] + given))
    try:
        yield
    finally:
        _starts[:], _regions[:] = saved


def _region(array: NDArray[Any]) -> Region:
    if not array.flags.c_contiguous:
        raise DeviceError(f"an array of shape {array.shape} is not contiguous: kernels cannot address it")
    return Region(array.ctypes.data, array.nbytes, array.flags.writeable)


def _merged(regions: list[Region]) -> list[Region]:
    """Regions in order of address, overlapping ones united."""
    merged: list[Region] = []
    for region in sorted((r for r in regions if r.nbytes), key=lambda r: r.address):
        last = merged[-1] if merged else None
        if last is None or region.address >= last.end:
            merged.append(region)
            continue
        size = max(last.end, region.end) - last.address
        merged[-1] = Region(last.address, size, last.writable or region.writable, last.name)
    return merged


def _replace(regions: list[Region]) -> None:
    _starts[:] = [region.address for region in regions]
    _regions[:] = [(region, region.view()) for region in regions]


def _place(address: int, width: int, writes: bool) -> tuple[memoryview, int]:
    """The buffer that ``width`` bytes at ``address`` lie in, and their offset there."""
    if address % width:
        raise IllegalAccessError(f"misaligned memory access: {width} bytes at {address:#x}")
    index = bisect_right(_starts, address) - 1
    if index >= 0:
        region, view = _regions[index]
        offset = address - region.address
        if offset + width <= region.nbytes:
            if writes and not region.writable:
                raise IllegalAccessError(f"illegal memory access: {width} bytes stored to {region.name}, which is read")
            return view, offset
    raise IllegalAccessError(
        f"illegal memory access: {'store' if writes else 'load'} of {width} bytes at {address:#x}{_nearby(address)}"
    )


def _nearby(address: int) -> str:
    """Where an illegal address lies, seen from the nearest registered region."""
    if not _regions:
        return ", and no memory is registered"
    nearest = min((r for r, _ in _regions), key=lambda r: max(r.address - address, address - r.end))
    if address < nearest.address:
        return f", {nearest.address - address} bytes before {nearest.name} of {nearest.nbytes} bytes"
    return f", at byte {address - nearest.address} of {nearest.name} of {nearest.nbytes} bytes"


def load_words(address: int, count: int) -> tuple[int, ...]:
    """1, 2 or 4 signed 32-bit words at a multiple of their width."""
    view, offset = _place(address, 4 * count, False)
    return _WORDS[count].unpack_from(view, offset)


def store_words(address: int, values: Sequence[int]) -> None:
    """Store 1, 2 or 4 words, each signed or unsigned, at a multiple of their width."""
    count = len(values)
    view, offset = _place(address, 4 * count, True)
    _UNSIGNED_WORDS[count].pack_into(view, offset, *(int(value) & 0xFFFFFFFF for value in values))


def store_u8(address: int, value: int) -> None:
    view, offset = _place(address, 1, True)
    view[offset] = int(value) & 0xFF


def load_f16(address: int) -> float:
    view, offset = _place(address, 2, False)
    found: float = _F16.unpack_from(view, offset)[0]
    return found


def load_f32(address: int) -> float:
    view, offset = _place(address, 4, False)
    found: float = _F32.unpack_from(view, offset)[0]
    return found


def store_f32(address: int, value: float) -> None:
    """Store ``value`` rounded to float32."""
    view, offset = _place(address, 4, True)
    try:
        _F32.pack_into(view, offset, value)
    except OverflowError:  # rounds to infinity, as a device's conversion does
        _F32.pack_into(view, offset, math.copysign(math.inf, value))

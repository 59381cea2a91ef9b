"""φ: how codes sit in bytes. A registry that users can add to.

A packing places a run of codes, in layout order, into bytes. It works on blocks: ``block_codes`` codes fill
``block_bytes`` bytes, and `Packing.place` says where inside the block each code goes. Everything else (packing,
unpacking, address maps, which code a register byte holds after the nibbles are split) follows from that function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import LayoutError

Int = NDArray[np.int64]
CODINGS = ("signed", "offset")
"""``signed``: two's complement. ``offset``: the code plus half its range, an unsigned number (int8 + 128, int4 + 8)."""

FORMATS = {"fp16": 16, "int8": 8, "int4": 4}
"""Bits of a code of each format."""


@dataclass(frozen=True)
class Packing:
    """Placement of codes in bytes.

    Parameters
    ----------
    format : str
        ``fp16``, ``int8`` or ``int4``.
    arrangement : str
        Name of the placement within its format.
    bits : int
        Bits of a code.
    block_codes : int
        Codes of a block; a block takes ``block_codes * bits / 8`` bytes.
    place : callable
        Maps code indices (int64, any shape, 0 ≤ i < block_codes) to ``(byte, shift)``: the byte within the block and
        the bit within the byte.
    in_order : bool
        Whether a kernel restores layout order after splitting nibbles (costs shuffles) instead of permuting the small
        operand.
    coding : str
        One of `CODINGS`; ``fp16`` codes are always ``signed``.
    lower : callable, optional
        Replaces the built-in unpacking on CPUs: ``lower(block, word) -> [register, ...]``, see docs/packings.md.
    """

    format: str
    arrangement: str
    bits: int
    block_codes: int
    place: Callable[[Int], tuple[Int, Int]]
    in_order: bool = False
    coding: str = "signed"
    lower: Callable[[Any, Any], list[Any]] | None = None

    @property
    def name(self) -> str:
        return "fp16" if self.format == "fp16" else f"{self.format}/{self.arrangement}/{self.coding}"

    @property
    def block_bytes(self) -> int:
        return self.block_codes * self.bits // 8

    @property
    def offset(self) -> int:
        """What an ``offset`` code exceeds its value by; 0 for signed codes."""
        return 1 << (self.bits - 1) if self.coding == "offset" else 0

    def address(self, index: Int) -> tuple[Int, Int]:
        """Byte and shift of the ``index``-th code of a run that starts on a block boundary."""
        block, within = np.divmod(index, self.block_codes)
        byte, shift = self.place(within)
        return block * self.block_bytes + byte, shift

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Packing) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


_REGISTRY: dict[str, Packing] = {}


def register_packing(packing: Packing) -> Packing:
    """Add ``packing`` under its name; tuning then tries it wherever its format is asked for.

    Raises
    ------
    LayoutError
        If its format, coding or block cannot be, its placement is not a bijection onto the block's bits, or the name is
        taken by a different packing.
    """
    if FORMATS.get(packing.format) != packing.bits or packing.coding not in CODINGS:
        raise LayoutError(f"packing {packing.name!r} of {packing.bits} bits: formats are {FORMATS}, codings {CODINGS}")
    if packing.block_codes < 1 or packing.block_codes * packing.bits % 8:
        raise LayoutError(
            f"packing {packing.name!r}: {packing.block_codes} codes of {packing.bits} bits are no whole bytes"
        )
    byte, shift = map(np.asarray, packing.place(np.arange(packing.block_codes)))
    expected = np.arange(0, packing.block_codes * packing.bits, packing.bits)
    if not np.array_equal(np.unique(byte * 8 + shift), expected) or (shift < 0).any() or (shift > 7).any():
        raise LayoutError(f"packing {packing.name!r} does not place its {packing.block_codes} codes one to a slot")
    known = _REGISTRY.get(packing.name)
    if known is not None and vars(known) != vars(packing):
        raise LayoutError(f"packing {packing.name!r} is already registered")
    _REGISTRY[packing.name] = packing
    return packing


def packing_named(name: str) -> Packing:
    """Look a packing up.

    Raises
    ------
    LayoutError
        If no packing has this name.
    """
    try:
        return _REGISTRY[name]
    except KeyError:
        raise LayoutError(f"unknown packing {name!r}: known are {', '.join(sorted(_REGISTRY))}") from None


def packings(format: str) -> tuple[Packing, ...]:
    """All registered packings of ``fp16``, ``int8`` or ``int4``, in registration order."""
    return tuple(p for p in _REGISTRY.values() if p.format == format)


def _whole_bytes(index: Int) -> tuple[Int, Int]:
    return index, np.zeros_like(index)


def _halves(index: Int) -> tuple[Int, Int]:
    return 2 * index, np.zeros_like(index)


def _contiguous(index: Int) -> tuple[Int, Int]:
    return index // 2, index % 2 * 4


def _lane_interleaved(index: Int) -> tuple[Int, Int]:
    lane, within = np.divmod(index, 8)
    return lane * 4 + within % 4, within // 4 * 4


def _planes(index: Int) -> tuple[Int, Int]:
    return index % 32, index // 32 * 4


register_packing(Packing("fp16", "halves", 16, 1, _halves))
for _coding in CODINGS:
    register_packing(Packing("int8", "bytes", 8, 1, _whole_bytes, coding=_coding))
    register_packing(Packing("int4", "contiguous", 4, 2, _contiguous, in_order=True, coding=_coding))
    register_packing(Packing("int4", "contiguous_permuted", 4, 2, _contiguous, coding=_coding))
    register_packing(Packing("int4", "lane_interleaved", 4, 8, _lane_interleaved, coding=_coding))
    register_packing(Packing("int4", "planes", 4, 64, _planes, coding=_coding))

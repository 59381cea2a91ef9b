"""Packed operands that are kept for reuse, within a bound on memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..kernels.backend import Kernel
from ..kernels.packed import SLACK_BYTES, PackedTensor, aligned_zeros
from ..kernels.quantize import Quantized
from ..kernels.reference import Operands

Key = tuple[str, str]


class PackedOperands:
    """Keys and values of one context length in each layout that has been asked for, and copies of them.

    Parameters
    ----------
    operands : Operands
    limit_bytes : int
        The least recently used layouts are dropped beyond it. One candidate's operands are always kept.
    """

    def __init__(self, operands: Operands, limit_bytes: int) -> None:
        self.operands = operands
        self._limit_bytes = limit_bytes
        self._packed: OrderedDict[Key, list[Any]] = OrderedDict()

    def arguments(self, kernel: Kernel, copies: int = 1) -> list[tuple[Any, ...]]:
        """``copies`` argument lists of ``kernel``, which share the small operand and no packed one."""
        roles = self._roles(kernel)
        packed = [self._copies(kernel, role, copies) for role in roles]
        self._drop(roles)
        return [(self.operands.x, *(each[i] for each in packed)) for i in range(copies)]

    def nbytes(self, kernel: Kernel) -> int:
        """Bytes of one copy of what ``kernel`` reads."""
        return sum(int(self._copies(kernel, role, 1)[0].nbytes) for role in self._roles(kernel))

    def _roles(self, kernel: Kernel) -> list[Key]:
        layouts = (("k", kernel.candidate.k), ("v", kernel.candidate.v))
        return [(role, layout.name) for role, layout in layouts if layout is not None]

    def _copies(self, kernel: Kernel, key: Key, copies: int) -> Sequence[Any]:
        kept = self._packed.setdefault(key, [])
        self._packed.move_to_end(key)
        if not kept:
            kept.append(kernel.pack(key[0], self._quantized(key[0])))
        while len(kept) < copies:
            kept.append(_duplicate(kept[0]))
        return kept

    def _quantized(self, role: str) -> Quantized:
        quantized = self.operands.k if role == "k" else self.operands.v
        assert quantized is not None  # a candidate has a layout for each operand of its operator
        return quantized

    def _drop(self, used: Sequence[Key]) -> None:
        total = sum(sum(int(each.nbytes) for each in kept) for kept in self._packed.values())
        for key in [key for key in self._packed if key not in used]:
            if total <= self._limit_bytes:
                return
            total -= sum(int(each.nbytes) for each in self._packed.pop(key))


def _duplicate(packed: PackedTensor) -> PackedTensor:
    copies = []
    for array in (packed.words, packed.scales):
        room = aligned_zeros(array.size + SLACK_BYTES // array.itemsize, array.dtype)
        copy = room[: array.size].reshape(array.shape)
        copy[...] = array
        copies.append(copy)
    return replace(packed, words=copies[0], scales=copies[1])

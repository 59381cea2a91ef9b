"""Codes into the words of a layout.

A layout whose outermost axis is tokens repeats: each storage row holds as many tokens, laid out alike. Which code comes
to which byte of a row is worked out once, and the rows are filled by gathering.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .layout import TOKEN, Layout

CHUNK_VALUES = 1 << 22
"""Codes that are gathered at a time, to bound the memory it takes."""

Bytes = NDArray[np.uint8]


def store_codes(words: Bytes, codes: NDArray[Any], layout: Layout, capacity: int) -> None:
    """Write ``codes`` to their places; what lies between and after them is left as it is.

    Parameters
    ----------
    words : ndarray of uint8, shape (heads, bytes of a head)
    codes : ndarray of int8 or float16, shape (heads, tokens, head_dim)
    layout : Layout
    capacity : int
        Tokens that ``words`` has room for.
    """
    heads, tokens, head_dim = codes.shape
    period = layout.unit(TOKEN)
    outermost = layout.factors[0]
    if outermost.axis != TOKEN or outermost.block or layout.fold_rows:
        period = tokens  # a single row, as long as it takes
    whole = tokens // period * period
    pitch = layout.pitch_bytes(capacity, head_dim)
    rows = _Rows(layout, capacity, period, head_dim)
    for head in range(heads):
        step = max(1, CHUNK_VALUES // (period * head_dim))
        for first in range(0, whole // period, step):
            last = min(first + step, whole // period)
            part = codes[head, first * period : last * period].reshape(last - first, period * head_dim)
            if last - first == 1:
                rows.store(words[head, first * pitch :][None, :], part)
            else:
                rows.store(words[head, first * pitch : last * pitch].reshape(last - first, pitch), part)
    if whole < tokens:
        rest = _Rows(layout, capacity, tokens - whole, head_dim)
        for head in range(heads):
            start = whole // period * pitch
            rest.store(words[head, start:][None, :], codes[head, whole:].reshape(1, -1))


class _Rows:
    """Storage rows of ``period`` tokens: the code of each byte, or of each part of one."""

    def __init__(self, layout: Layout, capacity: int, period: int, head_dim: int) -> None:
        self._packing = packing = layout.packing
        t, d = np.arange(period)[:, None], np.arange(head_dim)[None, :]
        byte, shift = (table.ravel() for table in np.broadcast_arrays(*layout.address(t, d, capacity, head_dim)))
        places = byte // 2 if packing.bits == 16 else byte
        self._parts = []
        for bit in range(0, 8, packing.bits) if packing.bits < 8 else (0,):
            sources = np.flatnonzero(shift == bit)
            order = np.argsort(places[sources], kind="stable")
            sources = sources[order]
            self._parts.append((bit, _as_slice(places[sources]), sources))

    def store(self, words: Bytes, codes: NDArray[Any]) -> None:
        """``codes`` (rows, period · head_dim) into ``words`` (rows, bytes)."""
        packing = self._packing
        if packing.bits == 16:
            for _, places, sources in self._parts:
                words.view(np.float16)[:, places] = np.take(codes, sources, axis=1)
            return
        raw = codes.view(np.uint8) + np.uint8(packing.offset)
        if packing.bits == 8:
            for _, places, sources in self._parts:
                words[:, places] = np.take(raw, sources, axis=1)
            return
        mask = (1 << packing.bits) - 1
        raw &= np.uint8(mask)
        for bit, places, sources in self._parts:
            kept = words[:, places] & np.uint8(~(mask << bit) & 0xFF)
            words[:, places] = kept | np.take(raw, sources, axis=1) << np.uint8(bit)


def _as_slice(places: NDArray[np.int64]) -> Any:
    """Ascending places as a slice, where they are neighbours."""
    if len(places) and places[-1] - places[0] == len(places) - 1:
        return slice(int(places[0]), int(places[-1]) + 1)
    return places

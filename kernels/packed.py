"""A packed operand: words, scales and the layout that says where each code is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .cpu.memory import huge_zeros
from .errors import LayoutError
from .layout import HEAD_ALIGNMENT_BYTES, Layout
from .problem import GROUP
from .quantize import Quantized
from .storing import store_codes

TOKEN_BLOCK = 32
"""Kernels read whole blocks of this many tokens; capacities are multiples of it."""

OPERAND = ("words", "words_stride", "scales", "scales_stride", "tokens", "capacity", "heads", "tile")
"""What a compiled kernel is told of an operand: `PackedTensor.addresses`, and the address of the tile function or 0."""

OPERAND_FIELDS = len(OPERAND)

SLACK_BYTES = 256
"""Readable bytes after the last head: vector loads of a short row may run past it."""


def aligned_zeros(count: int, dtype: Any) -> NDArray[Any]:
    """A zeroed array of ``count`` elements that starts on a cache line."""
    size = np.dtype(dtype).itemsize * count
    raw = huge_zeros(size + HEAD_ALIGNMENT_BYTES)
    start = -raw.ctypes.data % HEAD_ALIGNMENT_BYTES
    return raw[start : start + size].view(dtype)


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """Keys or values of all heads, packed in one layout.

    Attributes
    ----------
    layout : Layout
    heads, tokens, head_dim : int
        Logical shape.
    capacity : int
        Tokens that the storage holds, a multiple of 32; those past ``tokens`` are zero.
    words : ndarray of uint8, shape (heads, head stride in bytes)
        Codes of each head, followed in memory by `SLACK_BYTES` readable bytes.
    scales : ndarray of float16, shape (heads, head stride)
        In the fixed order ``T/32 D/32 t32``, whatever the layout: a vector of neighbouring tokens' scales is what
        every kernel wants. Zero columns for fp16.
    """

    layout: Layout
    heads: int
    tokens: int
    head_dim: int
    capacity: int
    words: NDArray[np.uint8]
    scales: NDArray[np.float16]

    @property
    def groups(self) -> int:
        return 0 if self.layout.packing.format == "fp16" else -(-self.head_dim // GROUP)

    @property
    def addresses(self) -> tuple[int, int, int, int, int, int, int]:
        """What a kernel needs: words, their head stride in bytes, scales, theirs, tokens, capacity, heads."""
        return (
            self.words.ctypes.data,
            self.words.strides[0],
            self.scales.ctypes.data,
            self.scales.strides[0],
            self.tokens,
            self.capacity,
            self.heads,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of words and scales."""
        return self.words.nbytes + self.scales.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by the layout's name; unpickled storage is aligned and has its slack again."""
        shape = (self.heads, self.tokens, self.head_dim, self.capacity)
        return _restored, (self.layout.name, *shape, self.words.tobytes(), self.scales.tobytes())

    def quantized(self) -> Quantized:
        """Codes and scales read back from storage."""
        t, d = np.arange(self.tokens)[:, None], np.arange(self.head_dim)[None, :]
        byte, shift = self.layout.address(t, d, self.capacity, self.head_dim)
        packing = self.layout.packing
        if packing.format == "fp16":
            codes = self.words.view(np.float16)[:, byte // 2]
            return Quantized("fp16", codes, np.zeros((self.heads, self.tokens, 0), np.float16))
        raw = (self.words[:, byte] >> shift.astype(np.uint8)).astype(np.int16) & ((1 << packing.bits) - 1)
        if packing.coding == "offset":
            raw -= packing.offset
        else:
            raw -= (raw >> (packing.bits - 1)) << packing.bits
        scales = self.scales[
            :, scale_address(np.arange(self.tokens)[:, None], np.arange(self.groups)[None, :], self.groups)
        ]
        return Quantized(packing.format, raw.astype(np.int8), scales)

    def dequantize(self) -> NDArray[np.float64]:
        """Values of shape (heads, tokens, head_dim), exactly as the codes and scales say."""
        return self.quantized().dequantize()

    def converted(self, layout: Layout) -> PackedTensor:
        """The same codes in another layout of the same format.

        Raises
        ------
        LayoutError
            If the formats differ: that would be a requantisation.
        """
        if layout.packing.format != self.layout.packing.format:
            raise LayoutError(f"cannot convert {self.layout.packing.format} codes to {layout.packing.format}")
        return pack(self.quantized(), layout, self.capacity)


def _restored(
    name: str, heads: int, tokens: int, head_dim: int, capacity: int, words: bytes, scales: bytes
) -> PackedTensor:
    return PackedTensor(
        Layout.parse(name),
        heads,
        tokens,
        head_dim,
        capacity,
        _stored(np.frombuffer(words, np.uint8).reshape(heads, -1)),
        _stored(np.frombuffer(scales, np.float16).reshape(heads, -1)),
    )


def _stored(array: NDArray[Any]) -> NDArray[Any]:
    """A copy that starts on a cache line and has `SLACK_BYTES` readable bytes behind it."""
    copy = aligned_zeros(array.size + SLACK_BYTES // array.itemsize, array.dtype)[: array.size].reshape(array.shape)
    copy[:] = array
    return copy


def scale_address(t: NDArray[np.int64], g: NDArray[np.int64], groups: int) -> NDArray[np.int64]:
    """Index of scale (t, g) within its head: the fixed order ``T/32 D/32 t32``."""
    return (t // TOKEN_BLOCK * groups + g) * TOKEN_BLOCK + t % TOKEN_BLOCK


def round_capacity(layouts: Iterable[Layout], tokens: int) -> int:
    """The smallest capacity for ``tokens`` that is whole in kernels' token blocks and in each layout's tiles."""
    step = int(np.lcm.reduce([TOKEN_BLOCK, *(layout.unit("T") for layout in layouts)]))
    return max(-(-tokens // step), 1) * step


def pack(quantized: Quantized, layout: Layout, capacity: int | None = None) -> PackedTensor:
    """Store codes in ``layout``.

    Parameters
    ----------
    quantized : Quantized
    layout : Layout
    capacity : int, optional
        Tokens to leave room for; rounded up to whole tiles.

    Raises
    ------
    LayoutError
        If the layout is of another format, or cannot hold the shape.
    """
    packing = layout.packing
    if packing.format != quantized.format:
        raise LayoutError(f"layout {layout.name!r} holds {packing.format}, the operand is {quantized.format}")
    heads, tokens, head_dim = quantized.codes.shape
    capacity = round_capacity([layout], max(tokens, capacity or 0))
    stride = layout.head_bytes(capacity, head_dim)
    words = aligned_zeros(heads * stride + SLACK_BYTES, np.uint8)[: heads * stride].reshape(heads, stride)
    if packing.offset:
        # Padding decodes to zero in every coding, so that a tile past the end adds nothing.
        words[:] = packing.offset if packing.bits == 8 else packing.offset * 0x11
    store_codes(words, quantized.codes, layout, capacity)
    groups = quantized.scales.shape[2]
    scale_stride = -(-capacity * groups * 2 // HEAD_ALIGNMENT_BYTES) * HEAD_ALIGNMENT_BYTES // 2
    scales = aligned_zeros(heads * scale_stride + SLACK_BYTES, np.float16)[: heads * scale_stride].reshape(
        heads, scale_stride
    )
    if groups:
        blocks = scales[:, : capacity * groups].reshape(heads, capacity // TOKEN_BLOCK, groups, TOKEN_BLOCK)
        whole = tokens // TOKEN_BLOCK
        given = quantized.scales[:, : whole * TOKEN_BLOCK].reshape(heads, whole, TOKEN_BLOCK, groups)
        blocks[:, :whole] = given.transpose(0, 1, 3, 2)
        if rest := tokens % TOKEN_BLOCK:
            blocks[:, whole, :, :rest] = quantized.scales[:, whole * TOKEN_BLOCK :].transpose(0, 2, 1)
    return PackedTensor(layout, heads, tokens, head_dim, capacity, words, scales)


def require_packed(value: object, role: str) -> PackedTensor:
    """``value`` if it is a packed operand, else `LayoutError`."""
    if not isinstance(value, PackedTensor):
        raise LayoutError(f"operand {role} must be a PackedTensor, not {type(value).__name__}")
    return value

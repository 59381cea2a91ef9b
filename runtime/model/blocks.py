"""Blocks of quantised tensors in GGUF files, as codes, scales and minima.

Types of four and eight bits are taken apart without going through floating point, so that their values stay what they
are: `Q4_0`, `Q4_1` and `Q8_0` exactly. `Q4_K` has products of two numbers for its scales and minima, which are rounded
to fp16: a value changes by at most 2⁻¹¹ · (15 · scale + |minimum|), above fp16's subnormal numbers. Everything else is
dequantised and quantised again: it changes by at most 1/250 of the largest of its group of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...kernels.errors import QuantizationError
from ...kernels.problem import PRECISIONS
from ...kernels.quantize import quantize
from .tensor_types import TensorType

Bytes = NDArray[np.uint8]


class Parts(NamedTuple):
    """Rows of a tensor: int8 codes (rows, columns), float16 scales and minima (rows, groups); minima may be None."""

    codes: NDArray[np.int8]
    scales: NDArray[np.float16]
    minima: NDArray[np.float16] | None

    def with_minima(self) -> Parts:
        """The same values in the form that has minima: −8 times an fp16 number is one, short of overflow."""
        if self.minima is not None:
            return self
        with np.errstate(over="ignore"):
            return self._replace(minima=self.scales * np.float16(-8))


def dequantized(raw: Bytes, kind: TensorType) -> NDArray[np.float32]:
    """The exact values of whole rows, shape (rows, columns). ``raw`` has shape (rows, bytes of a row)."""
    if kind.name == "F32":
        return raw.view(np.float32)
    if kind.name == "F16":
        return raw.view(np.float16).astype(np.float32)
    if kind.name == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    # Damage can make any number, infinity among them, which the caller looks for.
    with np.errstate(all="ignore"):
        from gguf import GGMLQuantizationType, dequantize

        values: NDArray[np.float32] = dequantize(raw, GGMLQuantizationType[kind.name])
    return values


def parts(raw: Bytes, kind: TensorType, minima: bool = False) -> Parts:
    """Whole rows taken apart; int4 codes in the form with minima if ``minima`` asks for it.

    Raises
    ------
    QuantizationError
        If values or scales are not finite, or too large for fp16 scales.
    """
    split = _EXACT.get(kind.name)
    if split is None:
        values = dequantized(raw, kind)
        again = quantize(values[None], PRECISIONS["w8a8"], "tensor")
        return Parts(again.codes[0].view(np.int8), again.scales[0], None)
    with np.errstate(over="ignore", invalid="ignore"):
        found = split(raw)
    if minima:
        found = found.with_minima()
    for numbers in (found.scales, found.minima):
        if numbers is not None and not np.isfinite(numbers).all():
            row = int(np.argwhere(~np.isfinite(numbers))[0, 0])
            raise QuantizationError(f"row {row} has a scale or minimum that is not finite")
    return found


def _q4_0(raw: Bytes) -> Parts:
    blocks = raw.reshape(len(raw), -1, 18)
    return Parts(_nibbles(blocks[:, :, 2:]), _half(blocks, 0), None)


def _q4_1(raw: Bytes) -> Parts:
    blocks = raw.reshape(len(raw), -1, 20)
    return Parts(_nibbles(blocks[:, :, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q8_0(raw: Bytes) -> Parts:
    blocks = raw.reshape(len(raw), -1, 34)
    return Parts(blocks[:, :, 2:].reshape(len(raw), -1).view(np.int8), _half(blocks, 0), None)


def _q4_k(raw: Bytes) -> Parts:
    """Blocks of 8 groups: d, dmin, 12 bytes with eight 6-bit scales and minima, and four runs of 32 bytes.

    The low halves of a run are one group of 32, the high halves the next one.
    """
    blocks = raw.reshape(len(raw), -1, 144)
    packed = blocks[:, :, 4:16].reshape(*blocks.shape[:2], 3, 4)
    low, middle, high = packed[:, :, 0], packed[:, :, 1], packed[:, :, 2]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=2)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=2)
    d, dmin = (_half(blocks, at).astype(np.float32)[:, :, None] for at in (0, 2))
    quads = blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 1, 32)
    codes = np.concatenate([quads & 15, quads >> 4], axis=3)
    return Parts(
        _centred(codes.reshape(len(raw), -1)),
        (d * scales).astype(np.float16).reshape(len(raw), -1),
        (-dmin * minima).astype(np.float16).reshape(len(raw), -1),
    )


def _nibbles(packed: Bytes) -> NDArray[np.int8]:
    """Bytes (rows, blocks, 16) as codes (rows, columns): the low halves are a block's first 16 values."""
    halves = np.stack([packed & 15, packed >> 4], axis=2)
    return _centred(halves.reshape(len(packed), -1))


def _centred(codes: Bytes) -> NDArray[np.int8]:
    """Codes 0 … 15 as −8 … 7."""
    return codes.view(np.int8) - np.int8(8)


def _half(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """The fp16 number at byte ``at`` of each block."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[:, :, 0]


_EXACT: dict[str, Callable[[Bytes], Parts]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k}

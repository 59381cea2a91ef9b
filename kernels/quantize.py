"""Group quantisation: one fp16 scale for 32 channels of one token, symmetric codes.

Scales are non-negative, so that folding a value's scale into an attention probability keeps the probability unsigned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import QuantizationError
from .problem import GROUP, Precision

LARGEST_CODE = {"int8": 127, "int4": 7}
ACTIVATION_LARGEST_CODE = 127

LARGEST_WEIGHT = 127
"""Largest code of a product of probability and scale: 7 bits, so that pairs of u8 × s8 products fit 16 bits."""

DITHER = [(int(f"{i:05b}"[::-1], 2) + 0.5) / GROUP for i in range(GROUP)]
"""Rounding thresholds of 32 neighbouring tokens' weights, a van der Corput sequence.

Rounding to nearest would drop every weight below half a step, and the many small weights of a long context add up to a
visible share of the output. Thresholds spread over [0, 1) round such weights up in proportion to their size instead.
"""


@dataclass(frozen=True)
class Quantized:
    """Codes and scales of one operand.

    Attributes
    ----------
    format : str
        ``fp16``, ``int8`` or ``int4``.
    codes : ndarray, shape (heads, tokens, head_dim)
        float16 values for ``fp16``, else int8 codes.
    scales : ndarray of float16, shape (heads, tokens, groups)
        Empty last axis for ``fp16``.
    """

    format: str
    codes: NDArray[np.float16] | NDArray[np.int8]
    scales: NDArray[np.float16]

    def dequantize(self) -> NDArray[np.float64]:
        """The values that the codes stand for, exactly, in float64."""
        values = self.codes.astype(np.float64)
        if self.format == "fp16":
            return values
        head_dim = self.codes.shape[2]
        return values * np.repeat(self.scales.astype(np.float64), GROUP, axis=2)[:, :, :head_dim]


def quantize(values: NDArray[np.floating], precision: Precision, name: str = "operand") -> Quantized:
    """Quantise ``values`` of shape (heads, tokens, head_dim).

    A group of zeros gets scale 0 and codes 0. A group whose scale underflows fp16 is stored as zeros.

    Parameters
    ----------
    values : float array, shape (heads, tokens, head_dim)
    precision : Precision
    name : str
        What to call the operand in an error.

    Raises
    ------
    QuantizationError
        For NaN, infinity, or magnitudes that fp16 cannot scale; names the first offending position.
    """
    values = np.asarray(values, np.float32)
    if values.ndim != 3:
        raise QuantizationError(f"{name} must have shape (heads, tokens, head_dim), not {values.shape}")
    _refuse(~np.isfinite(values), values, name, "is not finite")
    heads, tokens, head_dim = values.shape
    if precision.format == "fp16":
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        _refuse(~np.isfinite(halves), values, name, "exceeds fp16")
        return Quantized("fp16", halves, np.zeros((heads, tokens, 0), np.float16))
    groups = -(-head_dim // GROUP)
    padded = np.zeros((heads, tokens, groups * GROUP), np.float32)
    padded[:, :, :head_dim] = values
    grouped = padded.reshape(heads, tokens, groups, GROUP)
    largest = LARGEST_CODE[precision.format]
    peaks = np.abs(grouped).max(axis=3, keepdims=True)
    with np.errstate(over="ignore"):
        scales = (peaks[..., 0] / largest).astype(np.float16)
    culprits = (~np.isfinite(scales)[..., None] & (np.abs(grouped) == peaks)).reshape(padded.shape)
    _refuse(culprits[:, :, :head_dim], values, name, "needs a scale that exceeds fp16")
    exact = scales.astype(np.float32)[..., None]
    inverse = np.divide(1.0, exact, out=np.zeros_like(exact), where=exact > 0)
    codes = np.clip(np.rint(grouped * inverse), -largest, largest).astype(np.int8)
    return Quantized(precision.format, codes.reshape(heads, tokens, -1)[:, :, :head_dim].copy(), scales)


def _refuse(bad: NDArray[np.bool_], values: NDArray[np.float32], name: str, why: str) -> None:
    if bad.any():
        head, token, channel = (int(i) for i in np.argwhere(bad)[0])
        value = values[head, token, channel]
        raise QuantizationError(f"{name}[head {head}, token {token}, channel {channel}] = {value} {why}")

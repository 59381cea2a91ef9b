"""ggml's block formats in NumPy: what its stored rows mean, read from their bytes.

A row is cut into blocks of 32 values with one fp16 scale d in front. ``q8_0``: 32 signed bytes, value = d · code.
``q4_0``: 16 bytes, whose low nibbles are the first 16 values and whose high nibbles the last, value = d · (code − 8).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
HALVES = ("f16", "bf16")
BLOCK_BYTES = {"q8_0": 2 + BLOCK, "q4_0": 2 + BLOCK // 2}


def row_bytes(kind: str, width: int) -> int:
    """Bytes of a row of ``width`` values; ``kind`` is ``f16``, ``bf16``, ``q8_0`` or ``q4_0``."""
    return 2 * width if kind in HALVES else -(-width // BLOCK) * BLOCK_BYTES[kind]


def dequantise(kind: str, raw: NDArray[np.uint8], width: int) -> NDArray[np.float64]:
    """Values (rows, width), exactly, of rows given as their bytes (rows, `row_bytes`)."""
    rows = len(raw)
    if kind == "f16":
        return np.ascontiguousarray(raw).view(np.float16).astype(np.float64)
    if kind == "bf16":
        upper = np.ascontiguousarray(raw).view(np.uint16).astype(np.uint32)
        return (upper << 16).view(np.float32).astype(np.float64)
    blocks = raw.reshape(rows, -1, BLOCK_BYTES[kind])
    scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16).astype(np.float64)
    body = blocks[:, :, 2:]
    if kind == "q8_0":
        codes = body.view(np.int8).astype(np.float64)
    else:
        codes = np.concatenate([body & 15, body >> 4], axis=2).astype(np.float64) - 8
    return (codes * scales).reshape(rows, -1)[:, :width]

"""The bench's inputs as rows of ggml blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import ggml
from .blocks import dequantise, row_bytes
from .case import Case, Part
from .inputs import values

KIND = {"fp16": "f16", "int8": "q8_0", "int4": "q4_0"}
WAKE_ROWS = 64


def fill(graph: ggml.Graph, tensor: int, case: Case, role: str, kind: str) -> None:
    """Quantise the inputs into ``tensor``, of the type called ``kind``, with the library's own quantiser."""
    width = case.problem.head_dim
    size = row_bytes(kind, width)
    address, nbytes = graph.region(tensor)
    stride = nbytes // case.problem.kv_heads
    for part in case.parts():
        rows = values(case, role, part)
        target = address + part.head * stride + part.start * size
        graph.ggml.quantize_chunk(ggml.TYPES[kind], rows.ctypes.data, target, 0, len(rows), width, None)


def read(graph: ggml.Graph, tensor: int, case: Case, kind: str, part: Part) -> NDArray[np.float64]:
    """What ``tensor`` holds of a part."""
    width = case.problem.head_dim
    heads = graph.bytes_of(tensor).reshape(case.problem.kv_heads, -1, row_bytes(kind, width))
    return dequantise(kind, heads[part.head, part.start : part.stop], width)

"""Cosine similarity of a query with int4 embeddings, in a kernel of one's own.

Rows of embeddings are stored as the keys of one head. ``scan`` is ordinary Numba code: passing it a `PackedTensor`
compiles it for that operand's layout, and `dot_tile` becomes the tile code of this machine's instruction set. Another
layout is another specialisation of the same function.

    python examples/cosine_scan.py
"""

from __future__ import annotations

import numpy as np
from lowbit.kernels.cpu.keys import preparation
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import PackedTensor, pack
from lowbit.kernels.plugin import dot_tile, tile_spec
from lowbit.kernels.problem import PRECISIONS
from lowbit.kernels.quantize import quantize
from numba import njit, typeof
from numpy.typing import NDArray

BLOCK = 256
"""Rows of embeddings in one call of a tile: a multiple of 32."""


@njit
def scan(embeddings, norms, query, aux, query_norm, scores):
    """scores[i] = cosine of the query and row i, for all rows that the operand has room for."""
    for first in range(0, embeddings.capacity, BLOCK):
        count = min(BLOCK, embeddings.capacity - first)
        target = scores[first : first + count]
        dot_tile(embeddings, 0, first, count, query.ctypes.data, aux.ctypes.data, target.ctypes.data, count)
        for i in range(count):
            target[i] /= max(query_norm * norms[first + i], np.float32(1e-30))


def prepared(query: NDArray[np.float32], embeddings: PackedTensor) -> tuple[NDArray, NDArray]:
    """The small operand as tiles read it: 8-bit codes in the layout's order, and each lane's start value and scale."""
    tables = preparation(tile_spec("k", typeof(embeddings)))
    group = np.arange(len(query)) // 32
    scale = np.array([np.abs(query[group == g]).max() / 127 for g in range(group[-1] + 1)], np.float32)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.append(np.floor(query * inverse[group] + 0.5), 0).astype(np.int8)  # the appended 0 fills short rows
    sums = np.array([codes[:-1][group == g].sum(dtype=np.int32) for g in range(group[-1] + 1)])
    start = (-tables.offset * sums[tables.aux_group] * tables.aux_first).astype(np.int32)
    return codes[tables.order], np.concatenate([start, scale[tables.aux_group].view(np.int32)])


def cosines(query: NDArray[np.float32], embeddings: PackedTensor, norms: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cosine of ``query`` with each row of ``embeddings``, whose Euclidean norms are ``norms``."""
    codes, aux = prepared(query, embeddings)
    padded = np.ones(embeddings.capacity, np.float32)
    padded[: len(norms)] = norms
    scores = np.empty(embeddings.capacity, np.float32)
    scan(embeddings, padded, codes, aux, np.float32(np.linalg.norm(query)), scores)
    return scores[: embeddings.tokens]


def main() -> float:
    """Compare with NumPy in two layouts; return the largest difference."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((5000, 384)).astype(np.float32)
    query = (rows[1234] + 0.5 * rng.standard_normal(384)).astype(np.float32)
    quantized = quantize(rows[None], PRECISIONS["w4a8"])
    values = quantized.dequantize()[0]
    norms = np.linalg.norm(values, axis=1)
    exact = values @ query / (norms * np.linalg.norm(query))
    worst = 0.0
    for name in ("T/16 D/8 t16 d8 | int4/lane_interleaved/offset", "T D | int4/planes/signed"):
        found = cosines(query, pack(quantized, Layout.parse(name)), norms.astype(np.float32))
        best = int(found.argmax())
        difference = float(np.abs(found - exact).max())
        worst = max(worst, difference)
        print(f"{name}: row {best} at cosine {found[best]:.4f}, within {difference:.1e} of NumPy")
    print(f"specialisations of scan: {len(scan.signatures)}")
    return worst


if __name__ == "__main__":
    main()

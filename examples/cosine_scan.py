"""Cosine similarity of a query with int4 embeddings, in a kernel of one's own.

``cosine_scan`` is ordinary Numba code over rows of embeddings, which are stored as the keys of one head. It is compiled
for whatever layout its operand has; `autotune kernel` finds out which one is fastest.

    python examples/cosine_scan.py
    autotune kernel examples/cosine_scan.py --precision w4a8 --tokens 65536 --db scan.db
    python examples/cosine_scan.py scan.db
"""

from __future__ import annotations

import sys

import lowbit
import numpy as np
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import pack
from lowbit.kernels.problem import PRECISIONS
from lowbit.kernels.quantize import quantize
from lowbit.kernels.rows import dot_rows, prepare_rows
from numba import njit

CHANNELS = 384


def make_operands(tokens: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Embeddings, and a query near the one in the middle."""
    index = rng.standard_normal((tokens, CHANNELS), np.float32)
    query = index[tokens // 2] + 0.5 * rng.standard_normal(CHANNELS, np.float32)
    return {"query": query[None], "index": index, "norms": np.linalg.norm(index, axis=1)}


def reference(query: np.ndarray, index: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """The same in NumPy; ``index`` holds the values that the codes stand for."""
    return index @ query[0].astype(np.float64) / (np.linalg.norm(query) * norms)


@lowbit.kernel(
    operands={"index": lowbit.Packed(formats=("int4", "int8"))},
    reference=reference,
    make_operands=make_operands,
    tolerance=0.01,
)
@njit(nogil=True, fastmath=True)
def cosine_scan(query, index, norms, out, first, last, block):
    """out[i] = cosine of the query and row i, for the rows from ``first`` to ``last``."""
    length = np.sqrt(np.sum(query[0] * query[0]))
    small = prepare_rows(index, query)
    scores = np.empty((1, block), np.float32)
    for start in range(first, last, block):
        count = min(block, last - start)
        dot_rows(index, 0, start, count, small, scores)
        for i in range(min(count, out.shape[0] - start)):
            out[start + i] = scores[0, i] / max(length * norms[start + i], np.float32(1e-30))


def untuned(inputs: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Cosines by a plain call of the function, with int4 embeddings in the layout of this name."""
    index = pack(quantize(inputs["index"][None], PRECISIONS["w4a8"]), Layout.parse(name))
    out = np.empty(index.tokens, np.float32)
    cosine_scan(inputs["query"], index, inputs["norms"], out, 0, index.capacity, 256)
    return out


def tuned(inputs: dict[str, np.ndarray], database: str) -> np.ndarray:
    """Cosines by the stored winner for this many int4 embeddings."""
    rows = len(inputs["index"])
    scan = lowbit.open_db(database).select(cosine_scan.problem("w4a8"), rows)
    print(f"{database}: {scan.candidate}")
    out = np.empty(rows, np.float32)
    return scan(inputs["query"], scan.pack("index", inputs["index"]), inputs["norms"], out)


def main(database: str | None = None) -> float:
    """Scan 5000 embeddings; return the largest difference from the reference."""
    inputs = make_operands(5000, np.random.default_rng(0))
    stored = quantize(inputs["index"][None], PRECISIONS["w4a8"]).dequantize()[0]
    exact = reference(inputs["query"], stored, inputs["norms"])
    layouts = ("T/16 D/8 t16 d8 | int4/lane_interleaved/offset", "T D | int4/planes/signed")
    results = {name: untuned(inputs, name) for name in layouts}
    if database is not None:
        results[database] = tuned(inputs, database)
    worst = 0.0
    for name, found in results.items():
        best, difference = int(found.argmax()), float(np.abs(found - exact).max())
        worst = max(worst, difference)
        print(f"{name}: row {best} at cosine {found[best]:.4f}, within {difference:.1e} of NumPy")
    return worst


if __name__ == "__main__":
    main(*sys.argv[1:2])

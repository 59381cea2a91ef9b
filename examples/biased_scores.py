"""Attention scores with a bias for each token, fused.

scores[h, r, t] = q[h, r] · K[h, t] + bias[h, t]

A kernel of one's own over two heads of keys and four rows of queries; the bias could be ALiBi's or a retriever's.

    python examples/biased_scores.py
    autotune kernel examples/biased_scores.py --precision w8a8 --tokens 8192 --db scores.db
    python examples/biased_scores.py scores.db
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

HEADS, ROWS, CHANNELS = 2, 4, 128


def make_operands(tokens: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Keys with uneven channels, and a bias that grows with the distance from the last token."""
    keys = rng.standard_normal((HEADS, tokens, CHANNELS), np.float32)
    keys[:, :, 7] *= 6
    slope = np.array([[0.5], [0.0625]], np.float32)
    return {
        "queries": rng.standard_normal((HEADS, ROWS, CHANNELS), np.float32),
        "keys": keys,
        "bias": slope * np.arange(1 - tokens, 1, dtype=np.float32),
    }


def reference(queries: np.ndarray, keys: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The same in NumPy, in float64."""
    return np.einsum("hrd,htd->hrt", queries, keys) + bias[:, None, :]


@lowbit.kernel(
    operands={"keys": lowbit.Packed(formats=("int8", "int4", "fp16"))},
    reference=reference,
    make_operands=make_operands,
    tolerance=0.02,
    rows=ROWS,
)
@njit(nogil=True, fastmath=True)
def biased_scores(queries, keys, bias, out, first, last, block):
    """Scores of the tokens from ``first`` to ``last``, every head and row."""
    rows = queries.shape[1]
    scores = np.empty((rows, block), np.float32)
    for head in range(queries.shape[0]):
        small = prepare_rows(keys, queries[head])
        for start in range(first, last, block):
            count = min(block, last - start)
            dot_rows(keys, head, start, count, small, scores)
            stored = min(count, bias.shape[1] - start)
            for row in range(rows):
                for i in range(stored):
                    out[head, row, start + i] = scores[row, i] + bias[head, start + i]


def main(database: str | None = None) -> float:
    """Score 1000 tokens; return the largest difference from the reference, relative to the largest score."""
    tokens = 1000
    inputs = make_operands(tokens, np.random.default_rng(1))
    out = np.empty((HEADS, ROWS, tokens), np.float32)
    if database is None:
        keys = pack(quantize(inputs["keys"], PRECISIONS["w8a8"]), Layout.parse("T/16 D/4 t16 d4 | int8/bytes/offset"))
        biased_scores(inputs["queries"], keys, inputs["bias"], out, 0, keys.capacity, 256)
        print(f"untuned, {keys.layout}")
    else:
        score = lowbit.open_db(database).select(biased_scores.problem("w8a8"), tokens)
        keys = score.pack("keys", inputs["keys"])
        score(inputs["queries"], keys, inputs["bias"], out=out)
        print(f"{database}: {score.candidate}")
    expected = reference(inputs["queries"], keys.dequantize(), inputs["bias"])
    difference = float(np.abs(out - expected).max() / np.abs(expected).max())
    print(f"scores of {tokens} tokens, within {difference:.1e} of NumPy")
    return difference


if __name__ == "__main__":
    main(*sys.argv[1:2])

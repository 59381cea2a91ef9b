"""Decode with a tuned kernel: quantise keys and values, pack them in the winner's layout, attend, check.

make tune                                  # writes lowbit.db
python examples/decode.py lowbit.db
"""

from __future__ import annotations

import sys

import lowbit
import numpy as np

TOKENS = 1000


def softmax_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention in float64 of q (heads, 1, head_dim) over k, v (kv_heads, tokens, head_dim)."""
    group = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    scores = np.einsum("hqd,htd->hqt", q, k) / np.sqrt(q.shape[2])
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    return np.einsum("hqt,htd->hqd", weights / weights.sum(axis=2, keepdims=True), v)


def main(path: str) -> None:
    database = lowbit.open_db(path)
    problem = lowbit.Problem("attend", heads=9, kv_heads=3, head_dim=64, precision="w8a8")
    kernel = database.select(problem, TOKENS)
    print(f"{problem.key} at {TOKENS} tokens: {kernel.candidate}")

    rng = np.random.default_rng(0)
    q = rng.standard_normal((problem.heads, 1, problem.head_dim))
    k, v = rng.standard_normal((2, problem.kv_heads, TOKENS, problem.head_dim))
    packed_k, packed_v = kernel.pack("k", k), kernel.pack("v", v)
    out = kernel(q, packed_k, packed_v)

    stored = packed_k.nbytes + packed_v.nbytes
    print(f"cache: {stored} bytes, {stored / (k.size + v.size):.3f} per value")
    for name, expected in (
        ("the codes in float64", softmax_attention(q, packed_k.dequantize(), packed_v.dequantize())),
        ("the original values in float64", softmax_attention(q, k, v)),
    ):
        error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
        print(f"relative error against {name}: {error:.5f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "lowbit.db")

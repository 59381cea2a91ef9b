"""The operators in float64, and how far a kernel may be from them.

The ``float`` pipeline is held to the activations as given. The ``integer`` pipeline is held to rounded ones, which is
what "a8" means: queries to 8 bits a group of 32 channels, products of probability and scale to 7 bits a group of 32
tokens. What that rounding costs a model is a question of quality, not of a kernel's correctness. The ``bfloat``
pipeline is held to rounded queries, and to exact products of probability and scale: its own have 8 significant bits.

Query rows of one problem are the last positions of the context: row i of n sees tokens 0 … tokens − n + i (causal
inside the block), or the latest ``window`` of those, in ``attend``. ``qk``, ``sv`` and ``gemv`` are plain contractions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .candidate import BFLOAT
from .problem import GROUP, Problem
from .quantize import ACTIVATION_LARGEST_CODE, DITHER, LARGEST_WEIGHT, Quantized, quantize

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Operands:
    """Inputs of one operator: float activations, quantised keys and values.

    Attributes
    ----------
    x : ndarray of float32
        Queries (heads, query_rows, head_dim), or probabilities (heads, query_rows, tokens) for ``sv``.
    k, v : Quantized or None
        Shape (kv_heads, tokens, head_dim); None where the operator has no such operand.
    """

    x: NDArray[np.float32]
    k: Quantized | None
    v: Quantized | None

    def first(self, tokens: int) -> Operands:
        """The same operands cut to their first ``tokens`` tokens."""
        cut = [q and Quantized(q.format, q.codes[:, :tokens], q.scales[:, :tokens]) for q in (self.k, self.v)]
        x = self.x[:, :, :tokens] if self.k is None else self.x
        return Operands(np.ascontiguousarray(x), cut[0], cut[1])


DISTINCT_VALUES = 16 << 20
"""Values of a matrix beyond which its rows repeat: making hundreds of millions takes longer than tuning does."""


def make_operands(problem: Problem, tokens: int, seed: int = 0) -> Operands:
    """Random operands with the traits that break kernels: outlier channels, a bias, groups of zeros, uneven scales."""
    rng = np.random.default_rng([seed, problem.head_dim, tokens])
    distinct = tokens
    if problem.operator == "gemv":
        # An odd number, so that no two splits, blocks or tiles hold the same rows in the same places.
        distinct = min(tokens, max(DISTINCT_VALUES // problem.head_dim, 97) | 1)
    shape = (problem.kv_heads, distinct, problem.head_dim)

    def packed(role: str, outlier: float) -> Quantized:
        values = rng.standard_normal(shape, np.float32)
        values *= np.exp(rng.normal(0, 0.4, shape[:2])).astype(np.float32)[..., None]
        values += rng.normal(0, 0.5, (shape[0], 1, shape[2])).astype(np.float32)
        values[:, :, rng.integers(problem.head_dim)] *= outlier
        values[:, :: max(distinct // 3, 2), :GROUP] = 0
        found = quantize(values, problem.stored(role))
        if distinct == tokens:
            return found
        rows = np.arange(tokens) % distinct
        return Quantized(found.format, found.codes[:, rows], found.scales[:, rows])

    k = packed("k", 4.0) if "k" in problem.roles else None
    v = packed("v", 2.0) if "v" in problem.roles else None
    if problem.operator == "sv":
        x = rng.exponential(size=(problem.heads, problem.query_rows, tokens)).astype(np.float32)
        x /= x.sum(axis=2, keepdims=True)
    else:
        x = rng.standard_normal((problem.heads, problem.query_rows, problem.head_dim), np.float32)
    return Operands(x, k, v)


def softmax_scale(head_dim: int) -> float:
    """Factor on the scores of ``attend``: 1/√head_dim."""
    return 1.0 / math.sqrt(head_dim)


def scores(x: NDArray[np.floating], k: Float64, group: int) -> Float64:
    """q·K per head: (heads, query_rows, tokens)."""
    product: Float64 = np.einsum("hqd,htd->hqt", x.astype(np.float64), np.repeat(k, group, axis=0), optimize=True)
    return product


def causal_limit(tokens: int, query_rows: int) -> NDArray[np.int64]:
    """Tokens that each query row sees, or would without a window; at least one."""
    return np.maximum(tokens - query_rows + 1 + np.arange(query_rows), 1)


def visible(problem: Problem, tokens: int) -> NDArray[np.bool_]:
    """Which tokens each query row sees: (query_rows, tokens)."""
    limit = causal_limit(tokens, problem.query_rows)[:, None]
    token = np.arange(tokens)[None, :]
    first = limit - problem.window if problem.window else 0
    return (token < limit) & (token >= first)


def probabilities(problem: Problem, s: Float64) -> Float64:
    """Softmax of ``attend``'s scaled scores (heads, query_rows, tokens), capped and masked as the problem says."""
    if problem.softcap:
        s = problem.softcap * np.tanh(s / problem.softcap)
    s = np.where(visible(problem, s.shape[2])[None], s, -np.inf)
    p = np.exp(s - s.max(axis=2, keepdims=True))
    normalised: Float64 = p / p.sum(axis=2, keepdims=True)
    return normalised


def rounded_queries(x: NDArray[np.floating]) -> Float64:
    """Queries as the integer pipeline sees them: symmetric 8-bit codes a group of 32 channels, times their scale."""
    rounded = np.zeros(x.shape, np.float64)
    for start in range(0, x.shape[2], GROUP):
        part = x[:, :, start : start + GROUP].astype(np.float64)
        scale = np.abs(part).max(axis=2, keepdims=True) / ACTIVATION_LARGEST_CODE
        codes = np.floor(np.divide(part, scale, out=np.zeros_like(part), where=scale > 0) + 0.5)
        rounded[:, :, start : start + GROUP] = codes * scale
    return rounded


def reference(problem: Problem, operands: Operands, pipeline: str = "float") -> Float64:
    """The operator in float64 on the values that the codes stand for; shapes as in `lowbit.kernels.backend.Kernel`."""
    x = rounded_queries(operands.x) if problem.integer("k", pipeline) and operands.k is not None else operands.x
    if problem.operator in ("qk", "gemv"):
        assert operands.k is not None
        return scores(x, operands.k.dequantize(), problem.group)
    assert operands.v is not None
    if problem.operator == "sv":
        p = x.astype(np.float64)
    else:
        assert operands.k is not None
        s = scores(x, operands.k.dequantize(), problem.group) * softmax_scale(problem.head_dim)
        p = probabilities(problem, s)
    if problem.integer("v", pipeline):
        return _weighted_rounded(p, operands.v, problem.group)
    v = np.repeat(operands.v.dequantize(), problem.group, axis=0)
    weighted: Float64 = np.einsum("hqt,htd->hqd", p, v, optimize=True)
    return weighted


def weight_steps(p: Float64, scales: Float64) -> tuple[Float64, Float64]:
    """Products p·scale of one channel group, and the step each is rounded with: both (heads, rows, tokens)."""
    product = p * scales[:, None, :]
    tokens = product.shape[2]
    padded = np.zeros((*product.shape[:2], -(-tokens // GROUP) * GROUP))
    padded[:, :, :tokens] = product
    step = padded.reshape(*product.shape[:2], -1, GROUP).max(axis=3) / LARGEST_WEIGHT
    return product, np.repeat(step, GROUP, axis=2)[:, :, :tokens]


def _weighted_rounded(p: Float64, v: Quantized, group: int) -> Float64:
    """Weighted values with products of probability and scale rounded as the integer pipeline rounds them."""
    codes = np.repeat(v.codes.astype(np.float64), group, axis=0)
    scales = np.repeat(v.scales.astype(np.float64), group, axis=0)
    thresholds = np.resize(DITHER, p.shape[2])
    out = np.zeros((*p.shape[:2], codes.shape[2]))
    for g in range(scales.shape[2]):
        product, step = weight_steps(p, scales[:, :, g])
        ratio = np.divide(product, step, out=np.zeros_like(product), where=step > 0)
        part = slice(g * GROUP, (g + 1) * GROUP)
        weights = np.floor(ratio + thresholds) * step
        out[:, :, part] = np.einsum("hqt,htd->hqd", weights, codes[:, :, part], optimize=True)
    return out


def error(result: NDArray[np.floating], expected: Float64) -> float:
    """Largest ‖result − expected‖ / ‖expected‖ over (head, query row); NaN and infinity count as infinite."""
    if result.shape != expected.shape:
        return math.inf
    difference = np.linalg.norm(result.astype(np.float64) - expected, axis=2)
    scale = np.linalg.norm(expected, axis=2)
    ratio = difference / np.maximum(scale, np.finfo(np.float32).tiny)
    return float(ratio.max()) if np.isfinite(ratio).all() else math.inf


def tolerance(problem: Problem, operands: Operands, pipeline: str = "float") -> float:
    """What `error` may reach, from the formats' rounding on these very operands.

    float32 arithmetic: 2e-5 of the operands' magnitude. The integer pipeline also gets a quarter of its rounding's
    standard deviation Δ/√12, propagated to first order, and a whole step for each activation that lies on a rounding
    threshold: float32 may take it to either side, and in a short sum that step is more than the rest. The bfloat
    pipeline gets its weights' rounding, which no reference repeats.
    """
    expected = reference(problem, operands, pipeline)
    scale = np.maximum(np.linalg.norm(expected, axis=2), np.finfo(np.float32).tiny)
    group = problem.group
    magnitude = np.ones_like(scale)
    allowed = np.zeros_like(scale)
    p = operands.x.astype(np.float64)
    noise = tipped = None
    if operands.k is not None:
        k = np.repeat(operands.k.dequantize(), group, axis=0)
        noise, tipped = np.zeros((2, *scale.shape, k.shape[1]))
        if problem.integer("k", pipeline):
            noise, tipped = _score_noise(operands.x.astype(np.float64), k)
        magnitude = np.linalg.norm(operands.x, axis=2) * np.linalg.norm(k, axis=2).max(axis=1)[:, None]
        if problem.operator in ("qk", "gemv"):
            allowed = 0.25 * np.linalg.norm(noise, axis=2) + np.linalg.norm(tipped, axis=2)
            allowed = allowed + 2e-5 * magnitude * math.sqrt(k.shape[1])
            return float(np.max(allowed / scale))
        factor = softmax_scale(problem.head_dim)
        noise, tipped, magnitude = noise * factor, tipped * factor, magnitude * factor
        x = rounded_queries(operands.x) if problem.integer("k", pipeline) else operands.x
        p = probabilities(problem, scores(x, k, 1) * factor)
    assert operands.v is not None
    size = np.linalg.norm(np.repeat(operands.v.dequantize(), group, axis=0), axis=2)
    if noise is not None and tipped is not None:
        allowed = 0.25 * np.sqrt(np.einsum("hqt,ht->hq", (p * noise) ** 2, size**2))
        allowed = allowed + 2 * np.einsum("hqt,ht->hq", p * tipped, size)
    if problem.integer("v", pipeline):
        margin = THRESHOLD_MARGIN if problem.operator == "sv" else SOFTMAX_MARGIN
        allowed = allowed + _weight_noise(p, operands.v, group, margin)
    if pipeline == BFLOAT:
        # Rounding errors of products are up to 2^-9 of each. Where products differ they are independent, √3 standard
        # deviations, of which four are allowed; where products are equal they all go the same way, and so do those of
        # the unit's float32 sums, for which a tenth is added.
        independent = 4 / math.sqrt(3) * np.sqrt(np.einsum("hqt,ht->hq", p**2, size**2))
        allowed = allowed + 2.0**-9 * (independent + 1.1 * scale)
    allowed = allowed + 2e-5 * np.maximum(magnitude, 1) * np.einsum("hqt,ht->hq", p, size)
    return float(np.max(allowed / scale))


THRESHOLD_MARGIN = 4e-5
"""Distance from a rounding threshold, in steps, within which float32 may go either way: a few ulp of 127."""

SOFTMAX_MARGIN = 1e-3
"""The same for weights that are exponentials of float32 scores."""


def _on_threshold(position: Float64, margin: float) -> NDArray[np.bool_]:
    """Where ``floor(position)`` is in doubt."""
    return np.abs(position - np.rint(position)) < margin


def _score_noise(x: Float64, k: Float64) -> tuple[Float64, Float64]:
    """Of q·k when q is rounded to 8 bits a group of 32: standard deviation, and what queries on a threshold may add."""
    head_dim = x.shape[2]
    variance, tipped = np.zeros((2, *x.shape[:2], k.shape[1]))
    for start in range(0, head_dim, GROUP):
        part = slice(start, min(start + GROUP, head_dim))
        step = np.abs(x[:, :, part]).max(axis=2, keepdims=True) / ACTIVATION_LARGEST_CODE
        variance += step**2 / 12 * (k[:, :, part] ** 2).sum(axis=2)[:, None, :]
        position = np.divide(x[:, :, part], step, out=np.zeros_like(x[:, :, part]), where=step > 0) + 0.5
        doubtful = _on_threshold(position, THRESHOLD_MARGIN) * step
        tipped += np.einsum("hqd,htd->hqt", doubtful, np.abs(k[:, :, part]), optimize=True)
    return np.sqrt(variance), tipped


def _weight_noise(p: Float64, v: Quantized, group: int, margin: float) -> Float64:
    """What rounding products of probability and scale may do, per (head, query row).

    A quarter of the rounding's standard deviation, and a step for each product within ``margin`` of a threshold.
    """
    codes = np.repeat(v.codes.astype(np.float64), group, axis=0)
    scales = np.repeat(v.scales.astype(np.float64), group, axis=0)
    thresholds = np.resize(DITHER, p.shape[2])
    variance, tipped = np.zeros((2, *p.shape[:2]))
    for g in range(scales.shape[2]):
        size = (codes[:, :, g * GROUP : (g + 1) * GROUP] ** 2).sum(axis=2)
        product, step = weight_steps(p, scales[:, :, g])
        position = np.divide(product, step, out=np.full_like(product, 0.5), where=step > 0) + thresholds
        variance += np.einsum("hqt,ht->hq", step**2 / 12, size)
        tipped += np.einsum("hqt,ht->hq", _on_threshold(position, margin) * step**2, size)
    noise: Float64 = 0.25 * np.sqrt(variance) + np.sqrt(tipped)
    return noise

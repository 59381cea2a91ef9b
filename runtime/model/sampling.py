"""From logits to the next token: greedy, or drawn from what a chain of filters leaves.

The filters and their order are llama.cpp's defaults: top-k, then top-p, then min-p, then the temperature. Top-p and
min-p therefore look at the distribution at temperature 1, and the temperature only reweights what is left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...kernels.errors import LogitsError, ProblemError

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

CHUNK = 64
"""Logits that share one maximum in the search for the largest ones."""
FIRST = 256
"""Tokens that top-p looks at first; four times as many where they do not suffice."""


@dataclass(frozen=True)
class Distribution:
    """What the next token is drawn from.

    Attributes
    ----------
    tokens : ndarray of int64, shape (n,)
        Most probable first where a filter sorts them, equal ones in the order of their tokens; else in that order.
    probabilities : ndarray of float64, shape (n,)
        Positive, of sum 1.
    """

    tokens: NDArray[np.int64]
    probabilities: Float64


@dataclass(frozen=True)
class Chain:
    """The filters. Each is off at its neutral value.

    Parameters
    ----------
    temperature : float
        Divides the logits at the end; at 0 the most probable token is certain, whatever the other filters say.
    top_k : int
        Keeps so many of the most probable tokens; 0 keeps all.
    top_p : float
        Keeps the fewest of the most probable tokens whose probabilities sum to this; 1 keeps all.
    min_p : float
        Keeps tokens at least this fraction as probable as the most probable one; 0 keeps all.

    Raises
    ------
    ProblemError
        For a value out of its range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ProblemError(f"the temperature must be 0 or more, not {self.temperature}")
        if self.top_k < 0:
            raise ProblemError(f"top-k must be 0 (all) or more, not {self.top_k}")
        for name, value in (("top-p", self.top_p), ("min-p", self.min_p)):
            if not 0 <= value <= 1:
                raise ProblemError(f"{name} must be 0 to 1, not {value}")

    def distribution(self, logits: Float32) -> Distribution:
        """What a token is drawn from.

        Parameters
        ----------
        logits : ndarray of float32, shape (vocabulary,)
            May hold −∞, which excludes a token.

        Raises
        ------
        LogitsError
            If one is NaN or +∞, or all are −∞.
        """
        if self.temperature == 0:
            return Distribution(np.array([greedy(logits)]), np.ones(1))
        top = _finite(logits, float(logits.max()))
        tokens = self._kept(logits, top)
        if self.min_p > 0:
            tokens = tokens[logits[tokens].astype(np.float64) - top >= math.log(self.min_p)]
        weights = np.exp((logits[tokens].astype(np.float64) - top) / self.temperature)
        positive = weights > 0
        tokens, weights = tokens[positive], weights[positive]
        return Distribution(tokens, weights / weights.sum())

    def probabilities(self, logits: Float32) -> Float64:
        """The same distribution over the whole vocabulary, (vocabulary,); raises as `distribution` does."""
        found = self.distribution(logits)
        dense = np.zeros(len(logits))
        dense[found.tokens] = found.probabilities
        return dense

    def _kept(self, logits: Float32, top: float) -> NDArray[np.int64]:
        """What top-k and top-p keep, in order."""
        count = self.top_k or len(logits)
        if self.top_p == 1:
            return largest(logits, count) if self.top_k else np.arange(count)
        if self.top_k:
            tokens = largest(logits, count)
            weights = np.exp(logits[tokens].astype(np.float64) - top)
            return tokens[: _needed(weights, self.top_p * weights.sum())]
        total = np.exp(logits.astype(np.float64) - top).sum()
        count = FIRST
        while True:
            tokens = largest(logits, count)
            weights = np.exp(logits[tokens].astype(np.float64) - top)
            if count >= len(logits) or weights.sum() >= self.top_p * total:
                return tokens[: _needed(weights, self.top_p * total)]
            count *= 4


class Sampler:
    """Draws tokens. The same seed and logits give the same tokens.

    Parameters
    ----------
    chain : Chain
    seed : int
        0 or more.
    """

    def __init__(self, chain: Chain, seed: int = 0) -> None:
        self.chain = chain
        self._random = np.random.default_rng(seed)

    def sample(self, logits: Float32) -> int:
        """The next token; takes one random number unless the chain is greedy. Raises as `Chain.distribution` does."""
        if self.chain.temperature == 0:
            return greedy(logits)
        found = self.chain.distribution(logits)
        cumulative = np.cumsum(found.probabilities)
        drawn = np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right")
        return int(found.tokens[min(int(drawn), len(found.tokens) - 1)])


def greedy(logits: Float32) -> int:
    """The token with the largest logit, the first of several.

    Raises
    ------
    LogitsError
        If a logit is NaN or +∞, or all are −∞.
    """
    token = int(logits.argmax())
    _finite(logits, float(logits[token]))
    return token


def largest(logits: Float32, count: int) -> NDArray[np.int64]:
    """The tokens of the ``count`` largest logits, in order; equal ones in the order of their tokens.

    The ``count``-th largest of the maxima of chunks is a bound that few logits reach, and only those are sorted.

    Parameters
    ----------
    logits : ndarray of float32, shape (vocabulary,)
        None of them NaN.
    count : int
        Everything is sorted if it exceeds the vocabulary.
    """
    whole = len(logits) // CHUNK
    if count > whole:
        return _in_order(logits, np.arange(len(logits)))[:count]
    maxima = logits[: whole * CHUNK].reshape(whole, CHUNK).max(axis=1)
    bound = np.partition(maxima, whole - count)[whole - count]
    reached = np.flatnonzero(logits >= bound)
    return _in_order(logits, reached)[:count]


def _in_order(logits: Float32, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """``tokens``, the largest logit first. Sorts integers, whose upper half is the logit and whose lower the token."""
    bits = (logits[tokens] + np.float32(0)).view(np.uint32)  # a zero has no sign then
    falling = np.where(bits >> 31, bits, ~bits & np.uint32(0x7FFFFFFF))
    keys = falling.astype(np.uint64) << np.uint64(32) | tokens.astype(np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _needed(weights: Float64, share: float) -> int:
    """How many of the first weights sum to ``share``; at least one."""
    return min(int(np.searchsorted(np.cumsum(weights), share)) + 1, len(weights))


def _finite(logits: Float32, top: float) -> float:
    """``top``, the largest logit; NumPy's largest is NaN if any is."""
    if math.isfinite(top):
        return top
    nan = np.flatnonzero(np.isnan(logits))
    if len(nan):
        raise LogitsError(f"the model's logits cannot be sampled: {len(nan)} of {len(logits)} are NaN, first {nan[0]}")
    raise LogitsError(f"the model's logits cannot be sampled: the largest of {len(logits)} is {top}")

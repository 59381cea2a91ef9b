"""How far next-token distributions are from a reference, token by token, and what a sample of windows says about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.errors import LogitsError

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

ROWS = 32
"""Distributions that are in float64 at a time."""
RESAMPLES = 1000
"""Bootstrap samples of the windows."""
TAIL = 0.999


@dataclass(frozen=True)
class Scores:
    """Of n consecutive tokens.

    Attributes
    ----------
    nll : ndarray of float64, shape (n,)
        Negative log-likelihood of the token that follows in the text, in nats.
    divergence : ndarray of float64, shape (n,)
        Kullback–Leibler divergence of the distribution from the reference's, Σ p (ln p − ln q), in nats.
    same_top : ndarray of bool, shape (n,)
        Whether the most probable token is the reference's.
    """

    nll: Float64
    divergence: Float64
    same_top: NDArray[np.bool_]


def score(logits: Float32, reference: Float32, targets: NDArray[np.integer[Any]]) -> Scores:
    """Compare rows of logits.

    Parameters
    ----------
    logits, reference : ndarray of float32, shape (n, vocabulary)
    targets : ndarray of int, shape (n,)
        The tokens that follow in the text.

    Raises
    ------
    LogitsError
        If a logit is NaN or infinite.
    """
    nll, divergence, same_top = [], [], []
    for start in range(0, len(targets), ROWS):
        rows = slice(start, start + ROWS)
        own, other = log_softmax(logits[rows]), log_softmax(reference[rows])
        nll.append(-own[np.arange(len(own)), targets[rows]])
        divergence.append((np.exp(other) * (other - own)).sum(axis=1))
        same_top.append(logits[rows].argmax(axis=1) == reference[rows].argmax(axis=1))
    return Scores(np.concatenate(nll), np.concatenate(divergence), np.concatenate(same_top))


def log_softmax(logits: Float32) -> Float64:
    """Logarithms of the probabilities, rows of (n, vocabulary); raises as `score` does."""
    if not np.isfinite(logits).all():
        raise LogitsError("the model's logits cannot be compared: some are NaN or infinite")
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    return values


@dataclass(frozen=True)
class Estimate:
    """A number and its standard error; None where one window says nothing about it."""

    value: float
    error: float | None

    def as_dict(self) -> dict[str, float | None]:
        return {"value": self.value, "error": self.error}


def joined(windows: Sequence[Scores]) -> Scores:
    """Consecutive parts as one."""
    return Scores(
        np.concatenate([each.nll for each in windows]),
        np.concatenate([each.divergence for each in windows]),
        np.concatenate([each.same_top for each in windows]),
    )


def mean(windows: Sequence[NDArray[Any]]) -> Estimate:
    """The mean over all tokens.

    Its standard error takes each window as one observation, since tokens of one window depend on each other.
    """
    means = np.array([each.mean() for each in windows], np.float64)
    weights = np.array([len(each) for each in windows], np.float64)
    value = float((means * weights).sum() / weights.sum())
    if len(means) < 2:
        return Estimate(value, None)
    deviations = (means - value) * weights / weights.sum()
    error = math.sqrt(float((deviations**2).sum()) * len(means) / (len(means) - 1))
    return Estimate(value, error)


def perplexity(windows: Sequence[Float64]) -> Estimate:
    """exp of the mean negative log-likelihood; its error follows from the mean's."""
    found = mean(windows)
    value = math.exp(found.value)
    return Estimate(value, None if found.error is None else value * found.error)


def ratio(windows: Sequence[Float64], others: Sequence[Float64]) -> Estimate:
    """Of two perplexities on the same tokens. Differences of a window are taken first, so what they share cancels."""
    return perplexity([one - other for one, other in zip(windows, others, strict=True)])


def quantile(windows: Sequence[Float64], share: float, seed: int = 0) -> Estimate:
    """Of all tokens, with the error of `bootstrap`."""
    return bootstrap(windows, lambda values: float(np.quantile(values, share)), seed)


def bootstrap(windows: Sequence[Float64], statistic: Callable[[Float64], float], seed: int = 0) -> Estimate:
    """``statistic`` of all tokens.

    Its error is the standard deviation over `RESAMPLES` draws of as many windows, with replacement.
    """
    value = statistic(np.concatenate(windows))
    if len(windows) < 2:
        return Estimate(value, None)
    random = np.random.default_rng(seed)
    draws = random.integers(0, len(windows), (RESAMPLES, len(windows)))
    found = [statistic(np.concatenate([windows[index] for index in draw])) for draw in draws]
    return Estimate(value, float(np.std(found)))


@dataclass(frozen=True)
class Summary:
    """What a sample of windows says.

    Attributes
    ----------
    tokens : int
    perplexity : Estimate
    divergence_mean, divergence_median, divergence_tail : Estimate
        In nats; the tail is the `TAIL` quantile.
    divergence_max : float
    same_top : Estimate
        Share of tokens with the reference's most probable token.
    """

    tokens: int
    perplexity: Estimate
    divergence_mean: Estimate
    divergence_median: Estimate
    divergence_tail: Estimate
    divergence_max: float
    same_top: Estimate

    @classmethod
    def of(cls, windows: Sequence[Scores]) -> Summary:
        """Of one `Scores` a window."""
        divergences = [each.divergence for each in windows]
        return cls(
            tokens=sum(len(each.nll) for each in windows),
            perplexity=perplexity([each.nll for each in windows]),
            divergence_mean=mean(divergences),
            divergence_median=quantile(divergences, 0.5),
            divergence_tail=quantile(divergences, TAIL),
            divergence_max=max(float(each.max()) for each in divergences),
            same_top=mean([each.same_top for each in windows]),
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "perplexity": self.perplexity.as_dict(),
            "kl_divergence": {
                "mean": self.divergence_mean.as_dict(),
                "median": self.divergence_median.as_dict(),
                "p99.9": self.divergence_tail.as_dict(),
                "max": self.divergence_max,
            },
            "same_top": self.same_top.as_dict(),
        }

"""What samples say: spread, ties and the deterministic choice among ties."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..db.records import Measurement
from ..kernels.candidate import Candidate

TIE = 0.02
"""Candidates further than this from the best are no ties, however noisy they are."""


def spread(samples_us: Sequence[float]) -> float:
    """Interquartile range over the median; infinite for fewer than two samples."""
    if len(samples_us) < 2:
        return math.inf
    low, median, high = np.percentile(samples_us, (25, 50, 75))
    return float((high - low) / median)


def median(samples_us: Sequence[float]) -> float:
    return float(np.median(samples_us))


def tied(measurements: Sequence[Measurement], limit: float = TIE) -> list[Measurement]:
    """Correct measurements that noise cannot tell from the fastest one, which is among them.

    Two medians tie if they differ by less than the root of the summed squares of the two spreads, and by less than
    ``limit``.

    Returns
    -------
    list of Measurement
        In order of their medians; empty if nothing was measured correctly.
    """
    correct = sorted(
        (m for m in measurements if m.status == "ok" and m.median_us), key=lambda m: (m.median_us, m.candidate)
    )
    if not correct:
        return []
    best = correct[0]
    return [m for m in correct if _excess(m, best) <= min(limit, math.hypot(m.spread or 0.0, best.spread or 0.0))]


def _excess(m: Measurement, best: Measurement) -> float:
    assert m.median_us is not None and best.median_us is not None  # `tied` keeps only rows with a median
    return m.median_us / best.median_us - 1


def settle(
    measurements: Sequence[Measurement], candidates: Mapping[str, Candidate], predicted_us: Mapping[str, float]
) -> list[Measurement]:
    """The ties of `tied`, the winner first, in an order that repeats from run to run.

    Among ties the lower prediction wins, then fewer threads, then fewer splits, then the name.
    """

    def rank(m: Measurement) -> tuple[float, int, int, str]:
        return predicted_us.get(m.candidate, math.inf), *candidates[m.candidate].plan.size, m.candidate

    return sorted(tied(measurements), key=rank)

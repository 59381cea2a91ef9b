"""Divergences of distributions and what windows say of them, against definitions and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.autotune import divergence
from lowbit.autotune.divergence import Estimate, Summary, bootstrap, joined, mean, perplexity, quantile, ratio, score
from lowbit.kernels.errors import LogitsError


def logits_of(seed: int, rows: int, vocabulary: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocabulary)) * scale).astype(np.float32)


@given(
    st.integers(0, 2**31), st.sampled_from([1, 5, 31, 32, 33, 70]), st.integers(2, 50), st.sampled_from([0.01, 1, 8.0])
)
@settings(max_examples=60, deadline=None)
def test_scores_are_what_their_definitions_say(seed: int, rows: int, vocabulary: int, scale: float) -> None:
    own, other = logits_of(seed, rows, vocabulary), logits_of(seed, rows, vocabulary)
    own += logits_of(seed + 1, rows, vocabulary, scale)
    targets = np.random.default_rng(seed).integers(0, vocabulary, rows)
    found = score(own, other, targets)
    for row in range(rows):
        p, q = ([math.exp(float(v)) for v in each[row]] for each in (other, own))
        p, q = [v / math.fsum(p) for v in p], [v / math.fsum(q) for v in q]
        expected = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        assert found.divergence[row] == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert found.nll[row] == pytest.approx(-math.log(q[targets[row]]), rel=1e-9, abs=1e-12)
        assert found.same_top[row] == (p.index(max(p)) == q.index(max(q)))
    assert (found.divergence > -1e-12).all()


def test_a_divergence_from_itself_is_nothing_and_a_shift_of_logits_is_no_change() -> None:
    own = logits_of(1, 40, 300, 10)
    found = score(own + np.float32(64), own, np.zeros(40, int))
    assert found.divergence == pytest.approx(0, abs=1e-9)
    assert found.same_top.all()


def test_two_values_in_closed_form() -> None:
    p, q = 0.75, 0.5
    found = score(np.log([[q, 1 - q]]).astype(np.float32), np.log([[p, 1 - p]]).astype(np.float32), np.array([1]))
    assert found.divergence[0] == pytest.approx(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)), rel=1e-6)
    assert found.nll[0] == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_refused(value: float) -> None:
    own = logits_of(1, 40, 30)
    own[35, 7] = value
    with pytest.raises(LogitsError, match="NaN or infinite"):
        score(own, logits_of(1, 40, 30), np.zeros(40, int))


def test_the_perplexity_of_a_uniform_model_is_its_vocabulary() -> None:
    windows = [score(np.zeros((9, 50), np.float32), np.zeros((9, 50), np.float32), np.arange(9)).nll for _ in range(3)]
    assert perplexity(windows).value == pytest.approx(50)
    assert perplexity(windows).error == pytest.approx(0, abs=1e-9)


def test_the_error_of_a_mean_takes_windows_as_observations() -> None:
    windows = [np.array([1.0, 3.0]), np.array([4.0, 4.0]), np.array([6.0, 6.0])]
    assert mean(windows) == Estimate(4.0, pytest.approx(np.std([2, 4, 6], ddof=1) / math.sqrt(3)))  # type: ignore[arg-type]
    # A thousand equal tokens are no more evidence than one.
    assert mean([np.repeat(each, 1000) for each in windows]).error == pytest.approx(mean(windows).error)
    assert mean(windows[:1]) == Estimate(2.0, None)
    assert mean([np.array([1.0, 1.0, 1.0]), np.array([5.0])]).value == 2.0


def test_errors_cover_the_truth_as_often_as_they_should() -> None:
    """Windows with common parts: the true mean and median lie within two errors in about 95 % of samples."""
    random = np.random.default_rng(3)
    inside, inside_median = 0, 0
    for _ in range(200):
        windows = [random.normal(random.normal(0, 1), 0.5, 20) for _ in range(24)]
        found, middle = mean(windows), quantile(windows, 0.5)
        assert found.error is not None and middle.error is not None
        inside += abs(found.value) < 2 * found.error
        inside_median += abs(middle.value) < 2 * middle.error
    assert 180 <= inside <= 199
    assert 175 <= inside_median <= 200


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "RESAMPLES", 200)


def test_quantiles_and_their_errors() -> None:
    windows = [np.arange(100.0) for _ in range(5)]
    assert quantile(windows, 0.5).value == np.quantile(np.tile(np.arange(100.0), 5), 0.5)
    assert quantile(windows, 0.999).value == pytest.approx(99)
    assert quantile(windows, 0.5).error == 0  # every draw is the same sample
    assert quantile(windows[:1], 0.5).error is None
    spread = bootstrap([np.full(4, float(i)) for i in range(10)], lambda values: float(values.mean()))
    assert spread.error == pytest.approx(np.std(np.arange(10)) / math.sqrt(10), rel=0.2)


def test_a_ratio_is_surer_than_its_parts() -> None:
    random = np.random.default_rng(1)
    base = [random.normal(3, 1) + random.normal(0, 0.1, 50) for _ in range(20)]
    other = [each + 0.01 for each in base]
    found = ratio(other, base)
    assert found.value == pytest.approx(math.exp(0.01))
    assert found.error == pytest.approx(0, abs=1e-9)
    assert (perplexity(other).error or 0) > 1


def test_a_summary_reports_every_number() -> None:
    windows = []
    for seed in range(4):
        own, other = logits_of(seed, 20, 30), logits_of(seed + 100, 20, 30)
        windows.append(score(own, other, np.zeros(20, int)))
    everything = joined(windows)
    found = Summary.of(windows).as_dict()
    assert found["tokens"] == 80
    assert found["perplexity"]["value"] == pytest.approx(math.exp(everything.nll.mean()))
    assert found["kl_divergence"]["mean"]["value"] == pytest.approx(everything.divergence.mean())
    assert found["kl_divergence"]["median"]["value"] == pytest.approx(np.median(everything.divergence))
    assert found["kl_divergence"]["p99.9"]["value"] == pytest.approx(np.quantile(everything.divergence, 0.999))
    assert found["kl_divergence"]["max"] == everything.divergence.max()
    assert found["same_top"]["value"] == pytest.approx(everything.same_top.mean())
    assert all(found["kl_divergence"][name]["error"] > 0 for name in ("mean", "median", "p99.9"))

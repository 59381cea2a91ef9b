"""Samplers: each filter against a plain float64 reference, draws against their distribution, and refusals."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.kernels.errors import LogitsError, ProblemError
from lowbit.runtime.model.sampling import CHUNK, Chain, Sampler, greedy, largest

OFF = Chain(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def plain(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The chain as its definition says, one token at a time."""
    values = [float(v) for v in logits]
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    order = order[: top_k or len(order)]
    weights = [math.exp(values[i] - values[order[0]]) for i in order]
    total, kept, reached = math.fsum(weights), [], 0.0
    for token, weight in zip(order, weights, strict=True):
        kept.append(token)
        reached += weight
        if top_p < 1 and reached >= top_p * total:
            break
    kept = [i for i in kept if math.exp(values[i] - values[order[0]]) >= min_p]
    hot = [math.exp((values[i] - values[order[0]]) / temperature) for i in kept]
    out = np.zeros(len(values))
    out[kept] = np.array(hot) / math.fsum(hot)
    return out


def logits_of(seed: int, vocabulary: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocabulary) * scale).astype(np.float32)


@given(
    seed=st.integers(0, 2**31),
    vocabulary=st.sampled_from([1, 2, 7, 63, 64, 65, 640, 3001]),
    scale=st.sampled_from([0.1, 1.0, 4.0, 20.0]),
    temperature=st.sampled_from([0.2, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1, 0.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
@settings(max_examples=300, deadline=None)
def test_the_chain_is_what_its_definition_says(
    seed: int, vocabulary: int, scale: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = logits_of(seed, vocabulary, scale)
    found = Chain(temperature, top_k, top_p, min_p).probabilities(logits)
    expected = plain(logits, temperature, top_k, top_p, min_p)
    assert found.shape == (vocabulary,)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert np.array_equal(found > 0, expected > 0)


def test_each_filter_alone() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    assert OFF.probabilities(logits) == pytest.approx([0.1, 0.4, 0.2, 0.3], rel=1e-6)
    assert Chain(1, 2, 1, 0).probabilities(logits) == pytest.approx([0, 4 / 7, 0, 3 / 7], rel=1e-6)
    assert Chain(1, 0, 0.65, 0).probabilities(logits) == pytest.approx([0, 4 / 7, 0, 3 / 7], rel=1e-6)
    assert Chain(1, 0, 0.75, 0).probabilities(logits) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9], rel=1e-6)
    assert Chain(1, 0, 1, 0.45).probabilities(logits) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9], rel=1e-6)
    assert Chain(0.5, 0, 1, 0).probabilities(logits) == pytest.approx(np.array([1, 16, 4, 9]) / 30, rel=1e-6)


def test_top_p_looks_at_temperature_1() -> None:
    """At temperature 10 the first token alone would no longer reach 0.5."""
    logits = np.log(np.array([0.6, 0.2, 0.2], np.float32))
    assert Chain(10, 0, 0.5, 0).probabilities(logits) == pytest.approx([1, 0, 0])


def test_a_flat_distribution_needs_more_tokens_than_top_p_looks_at_first() -> None:
    logits = logits_of(3, 20_000, 0.01)
    found = Chain(1, 0, 0.9, 0).distribution(logits)
    assert 17_000 < len(found.tokens) < 19_000
    assert found.probabilities == pytest.approx(
        np.sort(plain(logits, 1, 0, 0.9, 0))[::-1][: len(found.tokens)], rel=1e-9
    )


@given(st.integers(0, 2**31), st.integers(1, 500), st.integers(1, 600), st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_largest_are_found_in_order(seed: int, vocabulary: int, count: int, coarse: bool) -> None:
    logits = logits_of(seed, vocabulary * 5)
    if coarse:
        logits = np.round(logits)  # many ties
    expected = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:count]
    assert largest(logits, count).tolist() == expected


def test_ties_go_to_the_first_tokens_across_chunks() -> None:
    logits = np.zeros(50 * CHUNK + 3, np.float32)
    logits[[7, 3 * CHUNK, len(logits) - 1]] = 5
    assert largest(logits, 5).tolist() == [7, 3 * CHUNK, len(logits) - 1, 0, 1]
    assert greedy(logits) == 7


def test_zeros_of_both_signs_tie() -> None:
    assert largest(np.array([-1, -0.0, 0.0, -0.0, 2], np.float32), 9).tolist() == [4, 1, 2, 3, 0]


def test_excluded_tokens_are_never_drawn() -> None:
    logits = np.array([1.0, -np.inf, 2.0, -np.inf], np.float32)
    for chain in (OFF, Chain(1, 3, 1, 0), Chain(1, 0, 0.999, 0), Chain()):
        found = chain.probabilities(logits)
        assert found[[1, 3]].tolist() == [0, 0]
        assert found.sum() == pytest.approx(1)


def test_temperature_zero_is_the_most_probable_token() -> None:
    logits = logits_of(1, 999)
    chain = Chain(temperature=0, top_k=0, top_p=1, min_p=0)
    assert Sampler(chain, 5).sample(logits) == int(np.argmax(logits))
    assert chain.probabilities(logits).tolist() == [float(i == np.argmax(logits)) for i in range(999)]


def test_draws_follow_the_distribution() -> None:
    """Chi-squared over 16 tokens: 99.99 % of such runs stay below 44 at 15 degrees of freedom."""
    logits = logits_of(11, 16, 1.0)
    chain, draws = Chain(0.9, 0, 1, 0), 20_000
    sampler = Sampler(chain, 42)
    counts = np.bincount([sampler.sample(logits) for _ in range(draws)], minlength=16)
    expected = chain.probabilities(logits) * draws
    assert expected.min() > 5
    assert ((counts - expected) ** 2 / expected).sum() < 44
    other = Chain(0.5, 0, 1, 0).probabilities(logits) * draws
    assert ((counts - other) ** 2 / other).sum() > 44  # the test tells another temperature


def test_draws_repeat_with_the_seed() -> None:
    steps = [logits_of(i, 500) for i in range(64)]

    def run(seed: int) -> list[int]:
        sampler = Sampler(Chain(), seed)
        return [sampler.sample(logits) for logits in steps]

    runs = [run(seed) for seed in (1, 1, 2, 3)]
    assert runs[0] == runs[1]
    assert all(one != other for one, other in pairwise(runs[1:]))


@pytest.mark.parametrize("chain", [Chain(), Chain(temperature=0), Chain(1, 0, 0.9, 0), OFF], ids=str)
@pytest.mark.parametrize(
    ("value", "said"), [(np.nan, "1 of 300 are NaN, first 123"), (np.inf, "the largest of 300 is inf")]
)
def test_logits_that_are_no_numbers_are_refused(chain: Chain, value: float, said: str) -> None:
    logits = logits_of(0, 300)
    logits[123] = value
    for ask in (chain.probabilities, Sampler(chain).sample):
        with pytest.raises(LogitsError, match=said):
            ask(logits)
    with pytest.raises(LogitsError, match="the largest of 2 is -inf"):
        Sampler(chain).sample(np.full(2, -np.inf, np.float32))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or more"),
        ({"temperature": math.nan}, "temperature must be 0 or more"),
        ({"temperature": math.inf}, "temperature must be 0 or more"),
        ({"top_k": -1}, "top-k must be 0"),
        ({"top_p": 1.01}, "top-p must be 0 to 1"),
        ({"min_p": -0.5}, "min-p must be 0 to 1"),
        ({"min_p": math.nan}, "min-p must be 0 to 1"),
    ],
)
def test_values_out_of_range_are_refused(words: dict[str, float], said: str) -> None:
    with pytest.raises(ProblemError, match=said):
        Chain(**words)  # type: ignore[arg-type]

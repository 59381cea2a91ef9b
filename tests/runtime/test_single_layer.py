"""One layer of one sequence against float64 on the values that it holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lowbit.kernels.errors import CacheFullError
from lowbit.kernels.layout import Layout
from lowbit.kernels.problem import PRECISIONS
from lowbit.kernels.quantize import quantize
from lowbit.runtime.segment import KVLayout
from lowbit.runtime.select import Database
from lowbit.runtime.single_layer import Choices, SingleLayer, attention_problem

NOTHING = Database(Path("none"), (), {})
TOLERANCE = {"fp16": 2e-4, "w8a8": 0.03, "w4a8": 0.03}
SHAPES = [(3, 3, 64), (6, 2, 80), (4, 1, 96)]


def made(heads, kv_heads, head_dim, precision="fp16", window=0, softcap=0.0, capacity=4096, segment_tokens=None):
    problem = attention_problem(heads, kv_heads, head_dim, (precision, precision), window, softcap)
    return SingleLayer(Choices(problem, NOTHING, 2, capacity, segment_tokens))


def tokens_of(rng, heads, kv_heads, head_dim, count):
    """Queries, keys and values as a framework hands them over: one row a token, heads within."""
    return tuple(
        rng.standard_normal((count, each, head_dim)).astype(np.float32).transpose(1, 0, 2)
        for each in (heads, kv_heads, kv_heads)
    )


def reference(queries, k, v, window=0, softcap=0.0):
    """Attention of (heads, n, head_dim), the last n positions of k and v, in float64; (n, heads · head_dim)."""
    heads, count, head_dim = queries.shape
    total = k.shape[1]
    group = heads // k.shape[0]
    out = np.zeros((count, heads, head_dim))
    for position in range(count):
        stop = total - count + position + 1
        first = max(stop - window, 0) if window else 0
        for head in range(heads):
            keys, values = (each[head // group, first:stop].astype(np.float64) for each in (k, v))
            scores = keys @ queries[head, position].astype(np.float64) / np.sqrt(head_dim)
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[position, head] = weights / weights.sum() @ values
    return out.reshape(count, -1)


def error(out, expected):
    return (np.linalg.norm(out - expected, axis=1) / np.linalg.norm(expected, axis=1)).max()


def as_stored(values, precision):
    """(kv_heads, tokens, head_dim) as a cache keeps them."""
    return quantize(values, PRECISIONS[precision]).dequantize()


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_calls_of_any_size_make_one_context(shape, precision):
    rng = np.random.default_rng(1)
    layer = made(*shape, precision)
    parts = [tokens_of(rng, *shape, count) for count in (70, 1, 1, 3, 129, 1)]
    for position, (queries, k, v) in enumerate(parts):
        out = layer.attend(queries, k, v)
        held = [
            as_stored(np.concatenate([each[which] for each in parts[: position + 1]], 1), precision) for which in (1, 2)
        ]
        assert out.shape == (k.shape[1], shape[0] * shape[2])
        assert error(out, reference(queries, *held)) < TOLERANCE[precision]
    assert layer.length == 205
    for mine, given in zip(layer.held(205), held, strict=True):
        np.testing.assert_array_equal(mine, given.astype(np.float32))


@pytest.mark.parametrize("window", [1, 50, 200])
def test_a_window_hides_what_is_older_even_within_one_call(window):
    """Segments are dropped while a long prompt is read, each after its queries have seen it."""
    rng = np.random.default_rng(window)
    layer = made(4, 2, 64, window=window)
    parts = [tokens_of(rng, 4, 2, 64, count) for count in (600, 1, 90, 1)]
    for position, (queries, k, v) in enumerate(parts):
        out = layer.attend(queries, k, v)
        k, v = (
            as_stored(np.concatenate([each[which] for each in parts[: position + 1]], 1), "fp16") for which in (1, 2)
        )
        assert error(out, reference(queries, k, v, window=window)) < TOLERANCE["fp16"]
    assert layer.cache.start > 0


def test_scores_are_capped():
    rng = np.random.default_rng(3)
    layer = made(4, 2, 64, softcap=2.0)
    queries, k, v = tokens_of(rng, 4, 2, 64, 40)
    queries = queries * 5
    out = layer.attend(queries, k, v)
    k, v = (as_stored(each, "fp16") for each in (k, v))
    assert error(out, reference(queries, k, v, softcap=2.0)) < TOLERANCE["fp16"]
    assert error(out, reference(queries, k, v)) > 0.1


@pytest.mark.parametrize("window", [0, 100])
def test_appended_values_are_those_that_are_held(window):
    """What is given is what later queries see: the past as asked for, and the new tokens as they were rounded."""
    rng = np.random.default_rng(4)
    layer = made(2, 2, 64, "w4a8", window=window, segment_tokens=128)
    seen = [np.zeros((2, 0, 64)), np.zeros((2, 0, 64))]
    for count in (300, 1, 77):
        _, k, v = tokens_of(rng, 2, 2, 64, count)
        past = min(seen[0].shape[1], window - 1 if window else 10**6)
        given = layer.append(k, v, past)
        seen = [np.concatenate([old, as_stored(new, "w4a8")], axis=1) for old, new in zip(seen, (k, v), strict=True)]
        for mine, expected in zip(given, seen, strict=True):
            np.testing.assert_array_equal(mine, expected[:, -past - count :].astype(np.float32))
    assert len(layer.cache.segments) > 1


def test_what_does_not_fit_leaves_no_trace():
    rng = np.random.default_rng(5)
    layer = made(2, 2, 64, capacity=50)
    layer.attend(*tokens_of(rng, 2, 2, 64, 40))
    before = layer.held(40)
    with pytest.raises(CacheFullError, match="holds 40 of at most 50 tokens: no room for 11 more"):
        layer.attend(*tokens_of(rng, 2, 2, 64, 11))
    assert layer.length == 40
    np.testing.assert_array_equal(layer.held(99), before)


def test_a_call_that_fails_is_forgotten(monkeypatch):
    rng = np.random.default_rng(6)
    layer = made(2, 2, 64)
    layer.attend(*tokens_of(rng, 2, 2, 64, 40))
    monkeypatch.setattr(layer._choices, "work", lambda tokens, positions: 1 // (tokens < 41))
    with pytest.raises(ZeroDivisionError):
        layer.attend(*tokens_of(rng, 2, 2, 64, 9))
    assert layer.length == 40


def test_rolled_back_tokens_are_not_seen():
    rng = np.random.default_rng(7)
    layer = made(2, 2, 64)
    queries, k, v = tokens_of(rng, 2, 2, 64, 40)
    layer.attend(queries, k, v)
    layer.truncate(33)
    out = layer.attend(*(each[:, 33:34] for each in (queries, k, v)))
    expected = reference(queries[:, 33:34], as_stored(k[:, :34], "fp16"), as_stored(v[:, :34], "fp16"))
    assert error(out, expected) < TOLERANCE["fp16"]


@pytest.mark.parametrize("precision", TOLERANCE)
def test_a_merged_layer_holds_the_same_codes(precision):
    """Rounding what was rounded changes nothing."""
    rng = np.random.default_rng(8)
    layer = made(2, 2, 80, precision)
    for count in (40, 1, 2, 3):
        other = layer.fork()
        for each in (other, layer):
            _, k, v = tokens_of(rng, 2, 2, 80, count)
            each.append((k * 10.0 ** rng.integers(-3, 4, (2, count, 1))).astype(np.float32), v, 0)
    assert len(layer.cache.segments) == 4
    copy = layer.merged()
    assert len(copy.cache.segments) == 1
    for mine, given in zip(copy.held(99), layer.held(99), strict=True):
        np.testing.assert_array_equal(mine, given)


def test_layouts_may_change_on_the_way(monkeypatch):
    """Every so often, the layout of tokens to come is asked for again."""
    rng = np.random.default_rng(9)
    layer = made(2, 2, 64)
    other = KVLayout(*(Layout.parse(f"T/32 D t32 | {name}") for name in ("int8/bytes/offset", "fp16")))
    layer._choices.period = 100
    monkeypatch.setattr(layer._choices, "layout", lambda cache, ahead: other)
    parts = [tokens_of(rng, 2, 2, 64, count) for count in (64, 64, 1)]
    for queries, k, v in parts:
        out = layer.attend(queries, k, v)
    assert [each.tokens for each in layer.cache.segments] == [128, 1]
    assert error(out, reference(queries, *layer.held(129))) < TOLERANCE["w8a8"]

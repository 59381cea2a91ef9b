"""Attention over segments against float64 on the values that the cache really holds."""

import numpy as np
import pytest
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.cpu import space
from lowbit.kernels.cpu.isa import detect
from lowbit.kernels.cpu.pool import pool
from lowbit.kernels.layout import Layout
from lowbit.kernels.packing import packings
from lowbit.kernels.problem import Problem
from lowbit.runtime.attention import SegmentedAttention, precision_of
from lowbit.runtime.kvcache import KVCache
from lowbit.runtime.segment import KVLayout

ISA = detect()
LAYERS = 2


ORDERS = ("T/16 D/4 t16 d4", "T D", "T/32 D t32", "T/16 D/16 t16 d16", "T/16 D t16")


def candidates(problem, wanted):
    """A few candidates, far apart."""
    schedule = space.schedules(problem, ISA, 2)[0]
    formats = [problem.stored(role).format for role in ("k", "v")]
    found = []
    for turn, order in enumerate(ORDERS):
        k, v = (packings(each)[turn % len(packings(each))].name for each in formats)
        layouts = Layout.parse(f"{order} | {k}"), Layout.parse(f"{space.mirrored(order) or order} | {v}")
        for pipeline in ("integer", "float"):
            candidate = Candidate(*layouts, pipeline, schedule)
            if space.rejection(problem, candidate, ISA) is None:
                found.append(candidate)
                break
    assert len(found) >= wanted
    return found[:wanted]


def held(cache, layer, role):
    """(kv_heads, tokens, head_dim) float64 values of all segments, and the position of the first."""
    parts = [each.operand(role, layer).dequantize() for each in cache.segments]
    return np.concatenate(parts, axis=1), cache.segments[0].start


def reference(queries, cache, layer, problem, positions):
    k, first = held(cache, layer, "k")
    v, _ = held(cache, layer, "v")
    out = np.zeros((positions, problem.heads, problem.head_dim))
    for head in range(problem.heads):
        kv = head // problem.group
        for r in range(positions):
            stop = cache.length - positions + 1 + r
            start = max(stop - problem.window, first) if problem.window else first
            scores = k[kv, start - first : stop - first] @ queries[head, r].astype(np.float64)
            scores /= np.sqrt(problem.head_dim)
            weights = np.exp(scores - scores.max())
            out[r, head] = weights / weights.sum() @ v[kv, start - first : stop - first]
    return out.reshape(positions, -1)


def filled(problem, choices, lengths, rng, window=0):
    """A cache with a segment of each length, in the layouts of ``choices`` by turns."""
    layouts = [KVLayout(each.k, each.v) for each in choices]
    cache = KVCache(LAYERS, problem.kv_heads, problem.head_dim, 4096, layouts[0], window=window)
    for position, length in enumerate(lengths):
        cache.switch(layouts[position % len(layouts)])
        shape = (LAYERS, problem.kv_heads, length, problem.head_dim)
        cache.append(*(rng.standard_normal(shape).astype(np.float32) for _ in range(2)))
    return cache


def run(attention, layer, threads=2):
    stages = np.array(
        [
            [attention.attend, attention.jobs[layer].ctypes.data, attention.tasks, threads],
            [attention.merge, attention.jobs[layer].ctypes.data, attention._problem.kv_heads, 1],
        ],
        np.int64,
    )
    pool(threads).sequence(stages)()


TOLERANCE = {"fp16": 2e-5, "w8a8": 0.03, "w4a8": 0.03, "w8a8+w4a8": 0.03}
"""Of a row's norm: the integer pipeline rounds queries and weights to 8 bits."""


@pytest.mark.parametrize("precision", ["fp16", "w8a8", "w4a8", "w8a8+w4a8"])
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, positions",
    [(3, 3, 64, 1), (9, 3, 64, 1), (4, 1, 80, 1), (7, 1, 96, 3), (9, 3, 64, 16), (2, 2, 128, 33), (6, 2, 256, 5)],
)
def test_many_segments_are_one_context(precision, heads, kv_heads, head_dim, positions):
    problem = Problem("attend", heads, kv_heads, head_dim, precision)
    rng = np.random.default_rng(head_dim + positions)
    choices = candidates(problem, 4)
    lengths = [31, 64, 1, 200, max(positions, 33)]
    cache = filled(problem, choices, lengths, rng)
    by_layout = {KVLayout(each.k, each.v): each for each in choices}
    assert len(cache.segments) >= min(len(by_layout), 3)
    attention = SegmentedAttention(cache, problem, positions, by_layout.__getitem__, ISA)
    attention.queries[:] = rng.standard_normal(attention.queries.shape).astype(np.float32)
    for splits in (1, 2, 5):
        attention.prepare(splits)
        for layer in range(LAYERS):
            run(attention, layer)
            expected = reference(attention.queries, cache, layer, problem, positions)
            error = np.linalg.norm(attention.out - expected, axis=1) / np.linalg.norm(expected, axis=1)
            assert error.max() < TOLERANCE[precision]


@pytest.mark.parametrize("window", [1, 32, 50, 333])
@pytest.mark.parametrize("positions", [1, 4])
def test_windows_reach_across_segments(window, positions):
    problem = Problem("attend", 4, 2, 64, "fp16", window=window)
    rng = np.random.default_rng(window)
    choices = candidates(Problem("attend", 4, 2, 64, "fp16"), 3)
    cache = filled(problem, choices, [100, 33, 70, 128, 40], rng)
    by_layout = {KVLayout(each.k, each.v): each for each in choices}
    attention = SegmentedAttention(cache, problem, positions, by_layout.__getitem__, ISA)
    attention.queries[:] = rng.standard_normal(attention.queries.shape).astype(np.float32)
    attention.prepare(3)
    run(attention, 1)
    np.testing.assert_allclose(attention.out, reference(attention.queries, cache, 1, problem, positions), atol=2e-4)


def test_formats_may_change_with_the_segment():
    rng = np.random.default_rng(5)
    problems = [Problem("attend", 4, 2, 64, precision) for precision in ("w4a8", "fp16", "w8a8")]
    choices = [candidates(each, 1)[0] for each in problems]
    cache = filled(problems[0], choices, [90, 45, 120], rng)
    by_layout = {KVLayout(each.k, each.v): each for each in choices}
    attention = SegmentedAttention(cache, problems[0], 1, by_layout.__getitem__, ISA)
    attention.queries[:] = rng.standard_normal(attention.queries.shape).astype(np.float32)
    attention.prepare(2)
    run(attention, 0)
    expected = reference(attention.queries, cache, 0, problems[0], 1)
    assert np.linalg.norm(attention.out - expected) / np.linalg.norm(expected) < 0.03


def test_growth_and_roll_back_are_followed():
    """The same object serves a cache that grows, opens segments, and is shortened across them."""
    problem = Problem("attend", 6, 2, 64, "fp16")
    rng = np.random.default_rng(7)
    choices = candidates(problem, 3)
    by_layout = {KVLayout(each.k, each.v): each for each in choices}
    layouts = list(by_layout)
    cache = filled(problem, choices[:1], [40], rng)
    attention = SegmentedAttention(cache, problem, 1, by_layout.__getitem__, ISA)
    attention.queries[:] = rng.standard_normal(attention.queries.shape).astype(np.float32)
    for step, change in enumerate([0, "open", 0, "cut", 0, "open", "cut", 0]):
        if change == "open":
            cache.switch(layouts[step % len(layouts)])
        elif change == "cut":
            cache.truncate(cache.length - 35)
        shape = (LAYERS, 2, 1 + 7 * step, 64)
        cache.append(*(rng.standard_normal(shape).astype(np.float32) for _ in range(2)))
        attention.prepare(2)
        run(attention, 1)
        np.testing.assert_allclose(attention.out, reference(attention.queries, cache, 1, problem, 1), atol=2e-4)


def test_precision_names_both_formats():
    by_name = {each: candidates(Problem("attend", 2, 2, 64, each), 1)[0] for each in ("fp16", "w8a8", "w8a8+w4a8")}
    for name, candidate in by_name.items():
        assert isinstance(candidate, Candidate)
        assert precision_of(KVLayout(candidate.k, candidate.v)) == name

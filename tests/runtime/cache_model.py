"""A cache as plain arrays, and random histories that a cache and its forks must agree with."""

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from lowbit.kernels.append_fields import check_appendable
from lowbit.kernels.errors import CacheFullError, LayoutError, ProblemError
from lowbit.kernels.layout import Factor, Layout
from lowbit.kernels.packing import packings
from lowbit.kernels.problem import PRECISIONS
from lowbit.kernels.quantize import quantize
from lowbit.runtime.kvcache import ROLLBACK_TOKENS, KVCache
from lowbit.runtime.segment import KVLayout

PRECISION = {precision.format: precision for precision in PRECISIONS.values()}
OPERATIONS = ("append", "append", "append", "one", "one", "truncate", "truncate", "fork", "switch", "restore", "leave")
MOST_FORKS = 4


def random_layouts(head_dim, count, seed):
    """Layouts that grow along tokens, of every packing."""
    rng = np.random.default_rng([seed, head_dim])
    every = [packing for format in PRECISION for packing in packings(format)]
    found = []
    while len(found) < count:
        factors = [Factor("T", 0, 1), Factor("D", 0, 1)]
        if rng.random() < 0.8:
            inner = []
            for axis, unit in (("T", int(rng.choice([1, 2, 3, 8, 16, 32]))), ("D", int(rng.choice([1, 2, 4, 8, 32])))):
                factors["TD".index(axis)] = Factor(axis, 0, unit)
                steps = [unit, int(rng.choice([1, 2, 4]))] if unit > 4 else [unit, 1]
                if unit > 1 and unit % steps[1] == 0 and steps[1] > 1:
                    inner += [Factor(axis, unit, steps[1]), Factor(axis, steps[1], 1)]
                elif unit > 1:
                    inner.append(Factor(axis, unit, 1))
            rest = [factors[1], *inner]
            factors = [factors[0], *(rest[i] for i in rng.permutation(len(rest)))]
        packing = every[len(found) % len(every)]
        pad = int(rng.choice([0, 0, 2, 64]))
        try:
            layout = Layout(tuple(factors), packing, pad)
            check_appendable(layout, head_dim)
        except LayoutError:
            continue
        found.append(layout)
    return found


SHAPES = ((1, 1, 8), (2, 1, 32), (1, 3, 40), (2, 2, 16), (1, 2, 72))
"""Layers, heads, channels."""

LAYOUTS = {shape: random_layouts(shape[2], 60, 1) for shape in SHAPES}
ROWS = {shape: np.random.default_rng(7).standard_normal((2, 256, *shape)).astype(np.float32) for shape in SHAPES}
"""What is appended: keys and values of token i are entry i, modulo their number."""


@dataclass
class Model:
    """What a cache must hold: the numbers that each token's codes stand for, and nothing of how it is stored."""

    cache: KVCache
    layout: KVLayout
    rows: list = field(default_factory=list)  # (keys, values) of each token, (layers, heads, channels) each
    peak: int = 0  # most tokens so far

    def check(self):
        cache, segments = self.cache, self.cache.segments
        assert cache.length == len(self.rows)
        at = cache.start
        assert at <= max(cache.length + 1 - cache.window, 0) if cache.window else at == 0
        for segment in segments:
            assert segment.start == at and segment.tokens > 0
            assert segment.tokens <= segment.storage.filled <= segment.storage.capacity
            at = segment.stop
        assert at == cache.length
        if cache.window:
            held = cache.window + ROLLBACK_TOKENS + 2 * max(cache.segment_tokens, 96) + 64
            assert cache.length - cache.start <= held
        for role, name in enumerate("kv"):
            for layer in range(cache.layers):
                parts = [segment.operand(name, layer).dequantize() for segment in segments]
                got = np.concatenate(parts, axis=1) if parts else np.zeros((cache.kv_heads, 0, cache.head_dim))
                expected = [row[role][layer] for row in self.rows[cache.start :]]
                np.testing.assert_array_equal(got, np.stack(expected, axis=1) if expected else got)

    def check_padding(self):
        """What kernels read past the end, and multiply by zero."""
        for segment in self.cache.segments:
            for operand in (*segment.storage.k, *segment.storage.v):
                assert np.isfinite(operand.dequantize()).all()


def quantized_rows(values, layout):
    """float64 (layers, heads, channels) of each of the tokens of float32 (layers, heads, tokens, channels)."""
    layers, heads, tokens, channels = values.shape
    done = quantize(values.reshape(layers * heads, tokens, channels), PRECISION[layout.packing.format]).dequantize()
    return list(np.moveaxis(done.reshape(values.shape), 2, 0))


class History:
    """Carries out operations on caches and on their models."""

    def __init__(self, shape, capacity, window, segment_tokens, first):
        self.shape, self.next_row = shape, 0
        layout = self.layout(first)
        cache = KVCache(*shape, capacity, layout, window=window, segment_tokens=segment_tokens)
        self.models = [Model(cache, layout)]
        self.seen = Counter()

    def layout(self, number):
        layouts = LAYOUTS[self.shape]
        return KVLayout(layouts[number % len(layouts)], layouts[number // 7 % len(layouts)])

    def run(self, operation, which, amount):
        model = self.models[which % len(self.models)]
        generation, segments, start = model.cache.generation, model.cache.segments, model.cache.start
        getattr(self, operation)(model, amount)
        model.check()
        self.note(operation, model.cache, segments, start)
        if model.cache.generation == generation and operation != "restore":
            # Compiled programs keep what they were told of segments.
            now = model.cache.segments
            assert now[:-1] == segments[:-1] and len(now) == len(segments)
            assert all(a.storage is b.storage and a.start == b.start for a, b in zip(now, segments, strict=True))

    def note(self, operation, cache, segments, start):
        """What happened, so that a test can tell that its histories are worth something."""
        self.seen["slid"] += cache.start > start
        self.seen["rolled back across a boundary"] += operation == "truncate" and len(cache.segments) < len(segments)
        for other in self.models:
            pair = cache.segments, other.cache.segments
            if all(pair) and pair[0][0].storage is pair[1][0].storage:
                self.seen["parted"] += pair[0][-1].storage is not pair[1][-1].storage

    def one(self, model, amount):
        self.append(model, 1)

    def append(self, model, amount):
        cache, count = model.cache, amount % (200 if amount % 4 == 0 else 71)
        taken = np.arange(self.next_row, self.next_row + count) % 256
        k, v = (np.moveaxis(rows[taken], 0, 2) for rows in ROWS[self.shape])
        if cache.length + count > cache.capacity:
            try:
                cache.append(k, v)
            except CacheFullError:
                return
            raise AssertionError("more tokens than the capacity")
        self.next_row += count
        cache.append(k, v)
        model.peak = max(model.peak, cache.length)
        if count:
            model.rows += zip(quantized_rows(k, model.layout.k), quantized_rows(v, model.layout.v), strict=True)

    def truncate(self, model, amount):
        cache = model.cache
        length = max(cache.length - amount % (90 if amount % 3 == 0 else 9), 0)
        lost = cache.window and cache.start > max(length + 1 - cache.window, 0)
        try:
            cache.truncate(length)
        except ProblemError:
            assert lost and model.peak - length > ROLLBACK_TOKENS
            return
        assert not lost
        del model.rows[length:]

    def fork(self, model, amount):
        if len(self.models) < MOST_FORKS:
            other = model.cache.fork()
            assert [each.storage for each in other.segments] == [each.storage for each in model.cache.segments]
            self.models.append(Model(other, model.layout, list(model.rows), model.peak))

    def leave(self, model, amount):
        if len(self.models) > 1:
            self.models.remove(model)
            self.models[0].check()

    def switch(self, model, amount):
        model.layout = self.layout(amount)
        model.cache.switch(model.layout)

    def restore(self, model, amount):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "cache")
            model.cache.save(path)
            model.cache = KVCache.restore(path)

    def finish(self):
        for model in self.models:
            model.check()
            model.check_padding()

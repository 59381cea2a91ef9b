"""Random histories of caches and their forks agree with plain arrays; and what a cache promises of memory."""

import sys
from collections import Counter

import numpy as np
import pytest
from cache_model import OPERATIONS, ROWS, SHAPES, History
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lowbit.kernels import append_fields as fields
from lowbit.kernels.cpu.compiled import operator
from lowbit.kernels.cpu.isa import detect
from lowbit.kernels.cpu.pool import pool
from lowbit.kernels.errors import CacheFullError, LayoutError, ProblemError
from lowbit.kernels.layout import Layout
from lowbit.runtime.kvcache import ROLLBACK_TOKENS, KVCache
from lowbit.runtime.segment import KVLayout

FEW = KVLayout(Layout.parse("T/16 D/4 t16 d4 | int8/bytes/offset"), Layout.parse("T/32 D t32 | int4/contiguous/signed"))
HALVES = KVLayout(Layout.parse("T D | fp16"), Layout.parse("T D | fp16"))

operations = st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 3), st.integers(0, 10_000))
configurations = st.tuples(
    st.sampled_from(SHAPES),
    st.sampled_from([40, 200, 1000]),  # capacity
    st.sampled_from([0, 0, 1, 7, 50]),  # window
    st.sampled_from([None, None, 1, 33, 64]),  # tokens of a segment
    st.integers(0, 10_000),  # layout
)


def test_any_history_agrees_with_plain_arrays():
    seen = Counter()

    @settings(max_examples=2000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(configurations, st.lists(operations, min_size=4, max_size=20))
    def check(configuration, history):
        run = History(*configuration)
        for operation in history:
            run.run(*operation)
        run.finish()
        seen.update(+run.seen)

    check()
    assert len(seen) == 3 and min(seen.values()) > 100, seen


def rows(shape, count, first=0):
    """float32 (layers, heads, count, channels) of keys, and of values."""
    taken = np.arange(first, first + count) % 256
    return [np.ascontiguousarray(np.moveaxis(each[taken], 0, 2)) for each in ROWS[shape]]


SHAPE = SHAPES[2]


def addresses(cache):
    return [operand.addresses for each in cache.segments for operand in (*each.storage.k, *each.storage.v)]


def test_growth_moves_nothing():
    cache = KVCache(*SHAPE, 1000, FEW)
    cache.append(*rows(SHAPE, 1))
    before, storage, job = addresses(cache), cache.segments[0].storage, cache.jobs.ctypes.data
    held = cache.segments[0].operand("k", 0).words[:, :8].tobytes()
    for _ in range(37):
        cache.append(*rows(SHAPE, 27, cache.length))
        assert cache.segments[0].storage is storage
        assert (addresses(cache), cache.jobs.ctypes.data, cache.generation) == (before, job, 1)
    assert cache.length == 1000
    assert cache.segments[0].operand("k", 0).words[:, :8].tobytes() != held  # other tokens of the tile came
    assert len({a[0] for a in before}) == len(before)


def test_a_full_cache_says_so_and_is_left_as_it_was():
    cache = KVCache(*SHAPE, 40, FEW)
    cache.append(*rows(SHAPE, 39))
    with pytest.raises(CacheFullError, match="39 of at most 40 tokens: no room for 2 more"):
        cache.append(*rows(SHAPE, 2))
    assert cache.length == 39 and cache.begin(5) == 1
    with pytest.raises(CacheFullError, match="40 of at most 40 tokens"):
        cache.begin(1)
    cache.truncate(38)
    cache.append(*rows(SHAPE, 2))


def test_begin_counts_no_more_than_the_last_segment_holds():
    cache = KVCache(*SHAPE, 100, FEW, segment_tokens=64)
    assert [cache.begin(50), cache.begin(50), cache.begin(50)] == [50, 14, 36]
    assert [(each.start, each.tokens) for each in cache.segments] == [(0, 64), (64, 36)]
    np.testing.assert_array_equal(cache.jobs[:, [fields.COUNT, fields.POSITION]], [[36, 0]] * SHAPE[0])


def test_programs_store_through_the_jobs_what_store_stores():
    one, other = (KVCache(*SHAPES[1], 200, FEW, segment_tokens=96) for _ in "ab")
    k, v = rows(SHAPES[1], 130)
    one.append(k, v)
    task, done = operator("append", detect()), 0
    other.jobs[:, fields.SOURCE_TOKEN_BYTES] = k.strides[2]
    other.jobs[:, fields.SOURCE_HEAD_BYTES] = k.strides[1]
    while done < 130:
        for layer in range(SHAPES[1][0]):
            other.jobs[layer, fields.SOURCE_K] = k[layer, :, done:].ctypes.data
            other.jobs[layer, fields.SOURCE_V] = v[layer, :, done:].ctypes.data
        done += other.begin(min(130 - done, 41))
        for job in other.jobs:
            pool(1).run(task, job.ctypes.data, 2 * SHAPES[1][1])
    for mine, its in zip(one.segments, other.segments, strict=True):
        for role in "kv":
            for layer in range(SHAPES[1][0]):
                expected, got = (each.operand(role, layer).dequantize() for each in (mine, its))
                np.testing.assert_array_equal(got, expected)


def test_a_fork_copies_nothing_and_the_first_to_go_on_takes_the_tail():
    cache = KVCache(*SHAPE, 200, FEW)
    cache.append(*rows(SHAPE, 50))
    storage = cache.segments[0].storage
    fork = cache.fork()
    assert fork.segments[0].storage is storage and addresses(fork) == addresses(cache)
    fork.append(*rows(SHAPE, 3, 100))
    cache.append(*rows(SHAPE, 5, 50))
    assert [(each.start, each.tokens) for each in fork.segments] == [(0, 53)]
    assert [(each.start, each.tokens) for each in cache.segments] == [(0, 50), (50, 5)]
    assert cache.segments[0].storage is fork.segments[0].storage is storage


def test_rolling_back_what_nobody_else_sees_makes_its_room_free_again():
    cache = KVCache(*SHAPE, 200, FEW)
    cache.append(*rows(SHAPE, 50))
    fork = cache.fork()
    for _ in range(9):  # speculation beside a fork
        cache.append(*rows(SHAPE, 8, cache.length))
        cache.truncate(cache.length - 5)
    assert [each.tokens for each in cache.segments] == [77]
    assert cache.segments[0].storage.filled == 77
    fork.append(*rows(SHAPE, 1))
    assert len(fork.segments) == 2
    cache.truncate(20)
    assert cache.segments[0].storage.filled == 50  # the fork's
    cache.append(*rows(SHAPE, 1))
    assert len(cache.segments) == 2
    del fork
    cache.truncate(20)
    cache.append(*rows(SHAPE, 1))
    assert [each.tokens for each in cache.segments] == [21]


def test_rows_that_were_rolled_back_are_not_seen_again():
    cache = KVCache(*SHAPE, 200, HALVES)
    cache.append(*rows(SHAPE, 40))
    cache.truncate(10)
    k, v = rows(SHAPE, 7, 200)
    cache.append(k, v)
    operand = cache.segments[0].operand("k", 0)
    assert operand.tokens == 17
    np.testing.assert_array_equal(operand.dequantize()[:, 10:], k[0].astype(np.float16))


def test_a_switch_opens_a_segment_with_the_next_token_only_if_the_layout_is_another():
    cache = KVCache(*SHAPE, 200, FEW)
    cache.append(*rows(SHAPE, 5))
    cache.switch(KVLayout(Layout.parse(FEW.k.name), FEW.v))
    cache.append(*rows(SHAPE, 5))
    assert len(cache.segments) == 1
    cache.switch(HALVES)
    cache.switch(FEW)
    cache.append(*rows(SHAPE, 5))
    cache.switch(HALVES)
    assert len(cache.segments) == 1 and cache.layout == HALVES
    cache.append(*rows(SHAPE, 5))
    assert [each.layout for each in cache.segments] == [FEW, HALVES]
    cache.truncate(12)  # back in the first segment, and the layout stays the new one
    cache.append(*rows(SHAPE, 5))
    assert [(each.start, each.layout) for each in cache.segments] == [(0, FEW), (12, HALVES)]


def test_a_window_takes_bounded_memory_and_uses_it_again():
    cache = KVCache(*SHAPE, 1 << 20, FEW, window=100, segment_tokens=64)
    storages, sizes = set(), []
    for _ in range(3000):
        cache.append(*rows(SHAPE, 1, cache.length))
        storages.add(id(cache.segments[-1].storage))
        sizes.append(cache.nbytes)
        assert cache.length - cache.start >= min(cache.length, 100)
    assert len(storages) <= 5 and max(sizes) == max(sizes[:400])
    cache.truncate(3000 - ROLLBACK_TOKENS)
    with pytest.raises(ProblemError, match="have left the window of 100"):
        cache.truncate(1000)


def test_by_default_a_window_holds_about_a_quarter_more():
    cache = KVCache(1, 1, 8, 1 << 20, HALVES, window=1024)
    for _ in range(30):
        cache.begin(200)
    held = cache.length - cache.start
    assert 1024 <= held <= 1024 + 256 + ROLLBACK_TOKENS + 200
    assert len(cache.segments) <= 7


def test_memory_is_reserved_for_all_tokens_and_used_for_those_there_are():
    cache = KVCache(4, 8, 128, 1 << 16, FEW)
    cache.append(*(np.ones((4, 8, 1, 128), np.float32) for _ in "kv"))
    bytes_of_a_token = 4 * 8 * (128 + 64 + 16)
    assert cache.reserved_bytes > bytes_of_a_token << 16
    assert cache.nbytes <= 32 * bytes_of_a_token
    cache.begin(4095)
    assert cache.nbytes == 4096 * bytes_of_a_token


def test_what_a_sealed_segment_had_committed_past_its_end_is_given_back():
    cache = KVCache(1, 2, 64, 1 << 14, HALVES)
    ones = np.ones((1, 2, 1 << 13, 64), np.float32)
    cache.append(ones, ones)
    first = cache.segments[0].storage
    assert first.k[0].words[0, (1 << 13) * 128 - 1] == 0x3C
    cache.truncate(100)
    cache.switch(FEW)
    cache.append(ones[:, :, :1], ones[:, :, :1])
    assert first.nbytes == 2 * 2 * 100 * 128
    assert not first.k[0].words[:, 4 * 4096 : (1 << 13) * 128 - 4096].any()
    assert (first.k[0].quantized().codes[:, :100] == 1).all()


def test_numbers_that_cannot_be_quantised_leave_everything_finite():
    cache = KVCache(*SHAPE, 64, FEW)
    k, v = (np.full((*SHAPE[:2], 40, SHAPE[2]), value, np.float32) for value in (np.nan, np.inf))
    cache.append(k, v)
    cache.truncate(3)
    for operand in (*cache.segments[0].storage.k, *cache.segments[0].storage.v):
        assert np.isfinite(operand.dequantize()).all()
    assert not cache.segments[0].operand("k", 0).dequantize().any()


def test_sources_of_any_strides_are_stored():
    cache = KVCache(*SHAPE, 64, FEW)
    k, v = rows(SHAPE, 9)
    cache.append(k, v)
    other = KVCache(*SHAPE, 64, FEW)
    other.append(np.moveaxis(np.ascontiguousarray(np.moveaxis(k, 1, 2)), 2, 1), np.asfortranarray(v))
    for role in "kv":
        expected = cache.segments[0].operand(role, 0).dequantize()
        np.testing.assert_array_equal(other.segments[0].operand(role, 0).dequantize(), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers of a cache must be 1 to"),
        ({"capacity": 1 << 25}, "capacity of a cache must be 1 to"),
        ({"window": -1}, "window of a cache must be 0 to"),
        ({"segment_tokens": 0}, "segment_tokens of a cache must be 1 to"),
    ],
)
def test_impossible_caches_are_refused(change, message):
    with pytest.raises(ProblemError, match=message):
        KVCache(**{"layers": 1, "kv_heads": 1, "head_dim": 64, "capacity": 100, "layout": FEW, **change})


def test_layouts_that_cannot_grow_or_hold_the_heads_are_refused():
    tall = KVLayout(FEW.k, Layout.parse("D T | int8/bytes/signed"))
    with pytest.raises(LayoutError, match="grows along tokens"):
        KVCache(*SHAPE, 100, tall)
    cache = KVCache(*SHAPE, 100, FEW)
    with pytest.raises(LayoutError, match="no whole number"):
        cache.switch(KVLayout(Layout.parse("T D | int4/planes/signed"), FEW.v))
    assert cache.layout == FEW


def test_wrong_calls_are_refused():
    cache = KVCache(*SHAPE, 100, FEW)
    k, v = rows(SHAPE, 4)
    with pytest.raises(ProblemError, match="cannot append 0"):
        cache.begin(0)
    with pytest.raises(ProblemError, match=r"v must have shape \(layers"):
        cache.append(k, v[:, :, :3])
    cache.begin(4)
    with pytest.raises(ProblemError, match="has no layer 1"):
        cache.store(1, k[0], v[0])
    with pytest.raises(ProblemError, match="k must have shape"):
        cache.store(0, k[0, :, :3], v[0])
    for length in (-1, 5):
        with pytest.raises(ProblemError, match="cannot shorten a cache of 4 tokens"):
            cache.truncate(length)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("change", ["begin", "switch", "truncate"])
def test_an_interrupt_at_any_call_leaves_a_cache_that_goes_on(change):
    """Every call within the change is interrupted once, and then everything is forgotten from before it on."""

    def interrupted(at):
        cache, calls = KVCache(*SHAPE, 200, HALVES, segment_tokens=32), 0
        if change != "begin":
            cache.append(*rows(SHAPE, 40))
        if change == "switch":
            cache.switch(FEW)

        def trace(frame, event, argument):
            nonlocal calls
            if "runtime" in frame.f_code.co_filename:
                calls += 1
                if calls == at:
                    raise KeyboardInterrupt

        before = 20 if change == "truncate" else cache.length
        sys.settrace(trace)
        try:
            if change == "truncate":
                cache.truncate(20)
            else:
                cache.begin(5)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        cache.truncate(before)
        cache.switch(HALVES)
        k, v = rows(SHAPE, 7, 200)
        cache.append(k, v)
        kept = cache.segments[-1].operand("k", 0)
        np.testing.assert_array_equal(kept.dequantize()[:, -7:], k[0].astype(np.float16))
        assert sum(each.tokens for each in cache.segments) == cache.length == before + 7
        return calls >= at

    at = 1
    while interrupted(at):
        at += 1
    assert at > 3

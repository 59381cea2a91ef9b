"""Storage of segments: where heads lie, and what memory is committed."""

import ctypes
import mmap
import sys
from itertools import pairwise

import numpy as np
import pytest
from cache_model import OPERATIONS, SHAPES, History
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import SLACK_BYTES
from lowbit.runtime import reservation, segment
from lowbit.runtime.kvcache import KVCache
from lowbit.runtime.reservation import Reservation
from lowbit.runtime.segment import KVLayout, Shape, Storage

PAGE = mmap.PAGESIZE
INT8 = KVLayout(
    Layout.parse("T/16 D/4 t16 d4 | int8/bytes/offset"), Layout.parse("T/32 D t32 | int4/contiguous/signed | pad 64")
)


def resident_pages(start, nbytes):
    """Pages of a mapping that are in memory."""
    first = start - start % PAGE
    pages = -(-(start + nbytes - first) // PAGE)
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * PAGE), found) == 0
    return sum(each & 1 for each in found)


def memory_of(storage):
    return storage._memory.bytes.ctypes.data, storage.reserved_bytes


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="how pages are counted is Linux's")


def regions(storage):
    """First and last address of each head's words and scales."""
    found = []
    for operand in (*storage.k, *storage.v):
        words, words_stride, scales, scales_stride, _, _, heads = operand.addresses
        used = storage.used_bytes("k" if operand in storage.k else "v", "words", storage.capacity)
        found += [(words + head * words_stride, used) for head in range(heads)]
        if operand.groups:
            found += [(scales + head * scales_stride, 2 * storage.capacity * operand.groups) for head in range(heads)]
    return found


@pytest.mark.parametrize("capacity", [32, 96, 8192])
@pytest.mark.parametrize("layout", [INT8, KVLayout(Layout.parse("T D | fp16"), INT8.k)], ids=lambda each: each.name)
def test_heads_lie_apart_on_cache_lines_with_slack_behind_the_last(layout, capacity):
    storage = Storage(Shape(3, 5, 40), layout, capacity)
    found = sorted(regions(storage))
    start, size = memory_of(storage)
    assert found[0][0] >= start and found[-1][0] + found[-1][1] + SLACK_BYTES <= start + size
    assert all(first + used <= following for (first, used), (following, _) in pairwise(found))
    assert all(first % 64 == 0 for first, _ in found)


def test_heads_do_not_all_reach_a_new_page_with_the_same_token():
    """A power of two of tokens and channels would have them do so."""
    storage = Storage(Shape(30, 4, 64), INT8, 8192)
    offsets = [(first % 4096) for first, used in regions(storage) if used == 8192 * 64]
    assert len(offsets) == 120
    assert max(np.unique(offsets, return_counts=True)[1]) <= 8


@linux
def test_pages_are_committed_as_tokens_come():
    cache = KVCache(4, 4, 64, 8192, INT8)
    row = np.ones((4, 4, 1, 64), np.float32)
    cache.append(row, row)
    storage = cache.segments[0].storage
    start, size = memory_of(storage)
    regions_there_are = 4 * 4 * 4
    assert size > 1000 * PAGE
    assert resident_pages(start, size) <= 2 * regions_there_are
    block = np.ones((4, 4, 2048, 64), np.float32)
    cache.append(block[:, :, 1:], block[:, :, 1:])
    assert resident_pages(start, size) * PAGE <= cache.nbytes + 2 * regions_there_are * PAGE


@linux
def test_trimming_gives_pages_back_and_leaves_what_is_seen():
    cache = KVCache(2, 2, 64, 8192, INT8)
    block = np.ones((2, 2, 4096, 64), np.float32)
    cache.append(block, block)
    storage = cache.segments[0].storage
    cache.truncate(1000)
    before = resident_pages(*memory_of(storage))
    given = storage.trim()
    assert given > 2 * 2 * 3000 * 64
    after = resident_pages(*memory_of(storage))
    assert 0 <= after - (before - given // PAGE) <= 2 * 2 * 4  # a page of each region may not have been there
    assert (cache.segments[0].operand("v", 1).quantized().codes == 7).all()
    assert storage.trim() == 0
    cache.append(block[:, :, :5], block[:, :, :5])
    assert (cache.segments[0].operand("k", 1).dequantize() == cache.segments[0].operand("k", 0).dequantize()).all()


def test_only_whole_pages_are_given_back():
    memory = Reservation(5 * PAGE)
    memory.bytes[:] = 7
    given = memory.give_back(PAGE - 1, 4 * PAGE + 1)
    assert given in (0, 3 * PAGE)  # 0 where the system has no such call
    assert (memory.bytes[:PAGE] == 7).all() and (memory.bytes[4 * PAGE :] == 7).all()
    assert (memory.bytes[PAGE : 4 * PAGE] == (0 if given else 7)).all()
    assert memory.give_back(4 * PAGE + 1, 5 * PAGE - 1) == 0


def test_memory_that_cannot_be_had_is_a_memory_error():
    for nbytes in (1 << 62, 1 << 70):
        with pytest.raises(MemoryError, match="cannot reserve"):
            Reservation(nbytes)


def test_systems_without_anonymous_mappings_have_plain_memory(monkeypatch):
    monkeypatch.delattr(mmap, "MAP_ANONYMOUS", raising=False)
    memory = reservation.Reservation(3 * PAGE)
    assert memory.bytes.shape == (3 * PAGE,) and not memory.bytes.any()
    assert memory.give_back(0, 3 * PAGE) == 0


def test_histories_in_huge_pages(monkeypatch):
    monkeypatch.setattr(segment, "HUGE_FROM_BYTES", 0)
    rng = np.random.default_rng(11)
    for turn in range(30):
        run = History(SHAPES[turn % 2], 200, int(rng.choice([0, 7])), int(rng.choice([33, 200])), int(rng.integers(99)))
        for _ in range(8):
            run.run(str(rng.choice(OPERATIONS)), int(rng.integers(4)), int(rng.integers(10_000)))
        run.finish()

"""Checked memory of simulated kernels."""

import math

import numpy as np
import pytest
from lowbit.kernels.cuda import memory
from lowbit.kernels.cuda.memory import IllegalAccessError, Region, registered


def aligned(dtype, count):
    raw = np.zeros(count * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * np.dtype(dtype).itemsize].view(dtype)


def test_loads_are_what_numpy_stored():
    words = aligned(np.int32, 16)
    words[:] = np.arange(-8, 8) * 0x0123_4567
    address = words.ctypes.data
    halves, floats = words.view(np.float16), words.view(np.float32)
    with registered(words):
        for count in (1, 2, 4):
            for first in range(0, 16, count):
                assert memory.load_words(address + 4 * first, count) == tuple(words[first : first + count].tolist())
        for i in range(32):
            assert np.float16(memory.load_f16(address + 2 * i)).tobytes() == halves[i].tobytes() or math.isnan(
                halves[i]
            )
        assert [memory.load_f32(address + 4 * i) for i in range(16)] == floats.astype(float).tolist()


def test_stores_are_what_numpy_loads():
    words = aligned(np.int32, 8)
    address = words.ctypes.data
    with registered(words):
        memory.store_words(address, (-1, 0xFFFF_FFFE, 5, np.int32(-7)))
        memory.store_f32(address + 16, 0.1)
        memory.store_f32(address + 20, -1e300)
        memory.store_u8(address + 24, -1)
        memory.store_u8(address + 25, 3)
    assert words[:4].tolist() == [-1, -2, 5, -7]
    assert words.view(np.float32)[4:6].tolist() == [float(np.float32(0.1)), -math.inf]
    assert words.view(np.uint8)[24:26].tolist() == [255, 3]


@pytest.mark.parametrize("offset", [-16, -1 << 20, 64, 80, 1 << 40])
def test_accesses_outside_every_buffer_are_illegal(offset):
    words = aligned(np.int32, 16)
    with registered(words), pytest.raises(IllegalAccessError, match="illegal memory access: load of 16 bytes"):
        memory.load_words(words.ctypes.data + offset, 4)


def test_accesses_across_the_end_are_illegal():
    region = Region(aligned(np.int32, 16).ctypes.data, 56)
    with registered(region):
        memory.load_words(region.address + 48, 2)
        with pytest.raises(IllegalAccessError, match="at byte 48 of buffer of 56 bytes"):
            memory.load_words(region.address + 48, 4)


@pytest.mark.parametrize(("offset", "count"), [(4, 4), (8, 4), (4, 2), (2, 1), (1, 1)])
def test_misaligned_vectors_are_illegal(offset, count):
    words = aligned(np.int32, 16)
    with registered(words), pytest.raises(IllegalAccessError, match="misaligned"):
        memory.load_words(words.ctypes.data + offset, count)
    with registered(words), pytest.raises(IllegalAccessError, match="misaligned"):
        memory.store_words(words.ctypes.data + offset, [0] * count)


def test_operands_that_are_read_cannot_be_stored_to():
    words = aligned(np.int32, 4)
    words.setflags(write=False)
    with registered(words):
        assert memory.load_words(words.ctypes.data, 4) == (0, 0, 0, 0)
        with pytest.raises(IllegalAccessError, match="stored to buffer, which is read"):
            memory.store_words(words.ctypes.data, (1,))
    assert not words.any()


def test_memory_is_gone_after_its_launch_and_nests():
    outer, inner = aligned(np.int32, 4), aligned(np.int32, 4)
    with registered(outer):
        with registered(inner):
            memory.store_words(outer.ctypes.data, (1,))
            memory.store_words(inner.ctypes.data, (2,))
        assert memory.load_words(outer.ctypes.data, 1) == (1,)
        with pytest.raises(IllegalAccessError):
            memory.load_words(inner.ctypes.data, 1)
    with pytest.raises(IllegalAccessError, match="no memory is registered"):
        memory.load_words(outer.ctypes.data, 1)


def test_overlapping_registrations_unite():
    words = aligned(np.int32, 16)
    address = words.ctypes.data
    with registered(Region(address, 32, writable=False), Region(address + 16, 48), Region(address + 16, 4)):
        assert len(memory.load_words(address + 48, 4)) == 4
        memory.store_words(address + 32, (1, 2, 3, 4))
    assert words[8:12].tolist() == [1, 2, 3, 4]

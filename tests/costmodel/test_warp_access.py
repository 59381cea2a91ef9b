"""Sectors, lines and wavefronts: equal to enumeration byte by byte, to known patterns and to published measurements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowbit.costmodel.warp_access import coalescing, ideal_sectors, l1_cycles, lines, sectors, wavefronts
from lowbit.kernels.cuda.work import INACTIVE, WarpAccess


def access(addresses, width=4, space="shared", kind="load"):
    return WarpAccess("k", space, kind, width, tuple(addresses), 1, 1.0)


def strided(stride, width=4):
    return access([lane * stride for lane in range(32)], width)


def enumerated_units(request, size):
    touched = set()
    for start in request.addresses:
        for byte in range(start, start + request.width_bytes) if start != INACTIVE else ():
            touched.add(byte // size)
    return len(touched)


def enumerated_wavefronts(request):
    """Serve the lanes of each phase pass by pass: a pass takes one row of each bank, for all lanes that want it."""
    group = {1: 32, 2: 32, 4: 32, 8: 16, 16: 8}[request.width_bytes]
    total = 0
    for first in range(0, 32, group):
        wanted = {
            (byte // 4 % 32, byte // 128)
            for start in request.addresses[first : first + group]
            if start != INACTIVE
            for byte in range(start, start + request.width_bytes)
        }
        while wanted:
            taken = {}
            for bank, row in sorted(wanted):
                taken.setdefault(bank, row)
            wanted -= set(taken.items())
            total += 1
    return total


@st.composite
def requests(draw):
    width = draw(st.sampled_from([1, 2, 4, 8, 16]))
    # A small range makes shared words and conflicts common.
    most = draw(st.sampled_from([8, 64, 1024, 1 << 16]))
    lanes = draw(st.lists(st.integers(-1, most), min_size=32, max_size=32))
    return access([INACTIVE if lane < 0 else lane * width for lane in lanes], width)


@given(requests())
def test_counts_equal_enumeration(request):
    assert sectors(request) == enumerated_units(request, 32)
    assert lines(request) == enumerated_units(request, 128)
    assert wavefronts(request) == enumerated_wavefronts(request)
    assert ideal_sectors(request) == -(-enumerated_units(request, 1) // 32)


@given(requests())
def test_nobody_is_better_than_ideal(request):
    active = [start for start in request.addresses if start != INACTIVE]
    assert lines(request) <= sectors(request) <= 4 * lines(request)
    assert 0 < coalescing(request) <= 1
    assert (wavefronts(request) > 0) == bool(active)
    # Each pass serves at most 128 bytes.
    assert enumerated_units(request, 4) * 4 <= 128 * wavefronts(request)


@pytest.mark.parametrize(
    ("stride", "width", "conflicts"),
    [(4, 4, 1), (8, 4, 2), (12, 4, 1), (16, 4, 4), (64, 4, 16), (128, 4, 32), (132, 4, 1), (0, 4, 1), (1, 1, 1)],
)
def test_known_strides_of_words(stride, width, conflicts):
    assert wavefronts(strided(stride, width)) == conflicts


def test_padding_and_swizzle_take_the_conflicts_out_of_columns():
    column = [row * 128 for row in range(32)]
    padded = [row * 132 for row in range(32)]
    # Row r keeps its word c at c xor r.
    swizzled = [row * 128 + (5 ^ row) * 4 for row in range(32)]
    assert wavefronts(access(column)) == 32
    assert wavefronts(access(padded)) == 1
    assert wavefronts(access(swizzled)) == 1


def test_vectors_of_128_bits_are_served_in_quarter_warps():
    # Without conflicts 512 bytes take four passes.
    assert wavefronts(strided(16, 16)) == 4
    # Rows of 128 bytes, one lane each: all eight lanes of a quarter want the same four banks.
    assert wavefronts(strided(128, 16)) == 32
    # A pad of one vector a row spreads them again.
    assert wavefronts(strided(144, 16)) == 4
    # So does a swizzle of vectors: row r keeps vector c at c xor r.
    assert wavefronts(access([row * 128 + (3 ^ row % 8) * 16 for row in range(32)], 16)) == 4
    assert wavefronts(strided(8, 8)) == 2
    assert wavefronts(strided(0, 16)) == 4


def test_lanes_that_sit_out_cost_nothing():
    lone = access([256, *[INACTIVE] * 31], 16)
    assert (wavefronts(lone), sectors(lone), lines(lone), ideal_sectors(lone)) == (1, 1, 1, 1)
    nobody = access([INACTIVE] * 32)
    assert (wavefronts(nobody), sectors(nobody), coalescing(nobody)) == (0, 0, 1.0)


@pytest.mark.parametrize(
    ("stride", "width", "moved", "touched", "efficiency"),
    [
        (4, 4, 4, 1, 1.0),
        (16, 16, 16, 4, 1.0),
        (32, 4, 32, 8, 4 / 32),
        # Row-major int8 keys of 128 channels, a lane a token: half of each sector is left for the next load.
        (128, 16, 32, 32, 0.5),
        (64, 16, 32, 16, 0.5),
        (0, 16, 1, 1, 1.0),
    ],
)
def test_known_global_patterns(stride, width, moved, touched, efficiency):
    request = strided(stride, width)
    assert (sectors(request), lines(request)) == (moved, touched)
    assert coalescing(request) == pytest.approx(efficiency)


def test_a_misaligned_row_touches_one_sector_more():
    assert sectors(access([4 + 4 * lane for lane in range(32)])) == 5
    assert lines(access([4 + 4 * lane for lane in range(32)])) == 2


# RRZE-HPC/gpu-benches, gpu-strides/a100.txt: measured cycles of a warp's load from the L1 cache, by stride in elements.
FLOATS = {
    0: 1.02,
    1: 1.02,
    2: 2.00,
    3: 1.63,
    4: 4.00,
    5: 2.20,
    8: 8.0,
    12: 4.00,
    16: 16.0,
    17: 5.1,
    24: 8.0,
    32: 32.0,
    33: 8.8,
}
# gpu-strides/h200.txt, eight-byte elements.
DOUBLES = {0: 2.01, 1: 2.01, 2: 4.01, 3: 2.32, 4: 8.0, 5: 3.16, 6: 4.01, 8: 16.0, 10: 5.5, 11: 6.0}


@pytest.mark.parametrize(
    ("stride", "width", "cycles"),
    [(s * 4, 4, c) for s, c in FLOATS.items()] + [(s * 8, 8, c) for s, c in DOUBLES.items()],
)
def test_measured_cycles_of_strided_loads_are_predicted(stride, width, cycles):
    request = strided(stride, width)
    assert wavefronts(request) <= cycles + 0.05
    assert l1_cycles(request) == pytest.approx(cycles, rel=0.15)
    if wavefronts(request) == l1_cycles(request):
        # The banks decide, not the tags: then the count is exact.
        assert wavefronts(request) == pytest.approx(cycles, rel=0.03)

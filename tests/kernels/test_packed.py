"""Packed operands: what is stored is what was given, in every layout."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lowbit.kernels.errors import LayoutError
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import SLACK_BYTES, pack, round_capacity
from lowbit.kernels.packing import packings
from lowbit.kernels.problem import PRECISIONS
from lowbit.kernels.quantize import Quantized, quantize
from random_layouts import factorisations, layouts


def random_codes(format, heads, tokens, head_dim, seed=0):
    rng = np.random.default_rng([seed, heads, tokens, head_dim])
    shape = (heads, tokens, head_dim)
    if format == "fp16":
        return Quantized(
            format, rng.standard_normal(shape).astype(np.float16), np.zeros((heads, tokens, 0), np.float16)
        )
    largest = {"int8": 127, "int4": 7}[format]
    scales = rng.random((heads, tokens, -(-head_dim // 32))).astype(np.float16)
    return Quantized(format, rng.integers(-largest, largest + 1, shape).astype(np.int8), scales)


def holds(layout, tokens, head_dim):
    capacity = round_capacity([layout], tokens)
    return layout.row_codes(capacity, head_dim) % layout.packing.block_codes == 0


@settings(max_examples=150)
@given(layouts(), st.integers(1, 3), st.integers(1, 70), st.integers(1, 12), st.integers(0, 80))
def test_what_was_packed_is_read_back(layout, heads, tokens, octets, spare):
    head_dim = 8 * octets
    quantized = random_codes(layout.packing.format, heads, tokens, head_dim)
    capacity = round_capacity([layout], max(tokens, spare))
    if layout.row_codes(capacity, head_dim) % layout.packing.block_codes:
        with pytest.raises(LayoutError, match="no whole number"):
            pack(quantized, layout, spare)
        return
    packed = pack(quantized, layout, spare)
    again = packed.quantized()
    np.testing.assert_array_equal(again.codes, quantized.codes)
    np.testing.assert_array_equal(again.scales, quantized.scales)
    np.testing.assert_array_equal(packed.dequantize(), quantized.dequantize())
    assert packed.capacity == capacity
    assert (packed.heads, packed.tokens, packed.head_dim) == (heads, tokens, head_dim)


@settings(max_examples=60)
@given(st.sampled_from(["fp16", "int8", "int4"]), st.data(), st.integers(1, 40), st.sampled_from([16, 64, 96]))
def test_conversion_is_packing_anew(format, data, tokens, head_dim):
    a, b = (data.draw(layouts(formats=(format,))) for _ in range(2))
    assume(holds(a, tokens, head_dim) and holds(b, tokens, head_dim))
    quantized = random_codes(format, 2, tokens, head_dim)
    first = pack(quantized, a)
    converted, direct = first.converted(b), pack(quantized, b, first.capacity)
    assert converted.layout == b
    assert converted.capacity == direct.capacity
    np.testing.assert_array_equal(converted.words, direct.words)
    np.testing.assert_array_equal(converted.scales, direct.scales)


@pytest.mark.parametrize("packing", [p for f in ("fp16", "int8", "int4") for p in packings(f)], ids=lambda p: p.name)
@pytest.mark.parametrize("order", ["T D", "T/32 D/8 t32/4 d8 t4"])
def test_tokens_past_the_last_one_are_zero(packing, order):
    """Also for codings in which zero is not the zero byte."""
    layout = Layout.parse(f"{order} | {packing.name}")
    packed = pack(random_codes(packing.format, 2, 37, 64), layout, 90)
    assert packed.capacity == 96
    whole = type(packed)(layout, 2, 96, 64, 96, packed.words, packed.scales).quantized()
    assert np.any(whole.codes[:, 36])
    assert not np.any(whole.codes[:, 37:])
    assert not np.any(whole.scales[:, 37:])


@given(st.lists(factorisations(), min_size=1, max_size=2), st.integers(1, 300))
def test_capacities_are_the_smallest_whole_tiles(factors, tokens):
    chosen = [Layout(f, packings("int8")[0]) for f in factors]
    capacity = round_capacity(chosen, tokens)
    steps = [32, *(layout.unit("T") for layout in chosen)]
    expected = next(n for n in range(tokens, 10**6) if all(n % step == 0 for step in steps))
    assert capacity == expected


def test_capacity_of_no_tokens_is_one_block():
    assert round_capacity([], 0) == 32
    assert round_capacity([Layout.parse("T/48 D t48 | fp16")], 1) == 96


def test_scales_have_one_order_in_every_layout():
    """T/32 D/32 t32: 32 neighbouring tokens' scales of a group, then the next group, then the next 32 tokens."""
    quantized = random_codes("int8", 1, 40, 80)
    for order in ("T D", "D T", "T/16 D/4 t16 d4"):
        scales = pack(quantized, Layout.parse(f"{order} | int8/bytes/signed")).scales[0]
        for token, group in ((0, 0), (31, 0), (0, 2), (32, 0), (39, 1)):
            assert scales[token // 32 * 96 + group * 32 + token % 32] == quantized.scales[0, token, group]


def test_storage_is_aligned_and_may_be_read_a_little_past_its_end():
    packed = pack(random_codes("int8", 3, 5, 40), Layout.parse("T D | int8/bytes/signed"))
    assert packed.words.ctypes.data % 64 == 0
    assert packed.scales.ctypes.data % 64 == 0
    assert packed.words.strides[0] % 64 == packed.scales.strides[0] % 64 == 0
    assert packed.words.base.nbytes >= packed.words.nbytes + SLACK_BYTES
    assert packed.nbytes == packed.words.nbytes + packed.scales.nbytes == 3 * 32 * 40 + 3 * 32 * 2 * 2
    assert packed.addresses == (
        packed.words.ctypes.data, 1280, packed.scales.ctypes.data, 128, 5, 32, 3,
    )  # fmt: skip


@pytest.mark.parametrize("restore", [lambda packed: pickle.loads(pickle.dumps(packed)), copy.deepcopy])
@pytest.mark.parametrize("name", ["T/16 D/4 t16 d4 | int8/bytes/offset | pad 64", "T D | fp16"])
def test_copies_are_aligned_and_readable_past_their_end_too(restore, name):
    """Kernels rely on it: an operand that came from another process must not end at the end of its memory."""
    layout = Layout.parse(name)
    packed = pack(random_codes(layout.packing.format, 2, 37, 80), layout)
    again = restore(packed)
    assert (again.layout, again.heads, again.tokens, again.head_dim, again.capacity) == (
        layout,
        2,
        37,
        80,
        packed.capacity,
    )
    np.testing.assert_array_equal(again.dequantize(), packed.dequantize())
    for ours, theirs in ((again.words, packed.words), (again.scales, packed.scales)):
        assert ours.strides == theirs.strides
        assert ours.flags.writeable
        assert ours.ctypes.data % 64 == 0
        assert ours.base.nbytes >= ours.nbytes + SLACK_BYTES


def test_values_are_packed_with_bounded_error():
    """From float values to storage and back: half a step of the group's scale, in a layout of short groups."""
    values = np.random.default_rng(0).standard_normal((2, 21, 80)).astype(np.float32)
    packed = pack(
        quantize(values, PRECISIONS["w4a8"]), Layout.parse("T/16 D/16 t16 d16 | int4/lane_interleaved/offset")
    )
    step = np.repeat(packed.quantized().scales.astype(np.float64), 32, axis=2)[:, :, :80]
    assert (np.abs(packed.dequantize() - values) <= step * 0.504).all()


def test_formats_do_not_mix():
    quantized = random_codes("int8", 1, 4, 32)
    with pytest.raises(LayoutError, match=r"'T D \| fp16' holds fp16, the operand is int8"):
        pack(quantized, Layout.parse("T D | fp16"))
    with pytest.raises(LayoutError, match="cannot convert int8 codes to int4"):
        pack(quantized, Layout.parse("T D | int8/bytes/signed")).converted(Layout.parse("T D | int4/planes/signed"))

"""Layouts: names, address maps in closed form, and what holds for every factorisation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.kernels.errors import LayoutError
from lowbit.kernels.layout import Factor, Layout
from lowbit.kernels.packing import packing_named
from random_layouts import layouts, stored

INT8 = "int8/bytes/signed"


def grid(tokens, channels):
    return np.arange(tokens)[:, None], np.arange(channels)[None, :]


@given(layouts())
def test_a_name_parses_to_the_same_layout(layout):
    again = Layout.parse(layout.name)
    assert again == layout
    assert hash(again) == hash(layout)
    assert again.name == layout.name == str(layout)


@given(layouts(), layouts())
def test_different_layouts_have_different_names(a, b):
    assert (a == b) == (a.name == b.name)


def test_names_are_as_documented():
    layout = Layout((Factor("T", 0, 16), Factor("D", 0, 4), Factor("T", 16, 1), Factor("D", 4, 1)), packing_named(INT8))
    assert layout.name == "T/16 D/4 t16 d4 | int8/bytes/signed"
    full = Layout.parse("T/32 D t32/4 t4 | int4/planes/offset | pad 64 | fold 128")
    assert full.factors == (Factor("T", 0, 32), Factor("D", 0, 1), Factor("T", 32, 4), Factor("T", 4, 1))
    assert (full.packing.name, full.pad_bytes, full.fold_rows) == ("int4/planes/offset", 64, 128)
    assert full.with_packing(packing_named(INT8)).name == "T/32 D t32/4 t4 | int8/bytes/signed | pad 64 | fold 128"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "T D",
        "|",
        f"| {INT8}",
        "T D | int8",
        "T D | int3/bytes/signed",
        f"T D | {INT8} | pad",
        f"T D | {INT8} | pad -1",
        f"T D | {INT8} | pad 6.5",
        f"T D | {INT8} | padding 64",
        f"T D | {INT8} | fold x",
        f"T D | {INT8} | pad 64 | pad 128",
        "T D | fp16 | pad 3",
        f"T | {INT8}",
        f"D | {INT8}",
        f"t16 d4 | {INT8}",
        f"T T D | {INT8}",
        f"T D D/4 d4 | {INT8}",
        f"T/16 D | {INT8}",
        f"T/16 D t8 | {INT8}",
        f"T/16 D t16/4 | {INT8}",
        f"T/16 D t16/3 t3 | {INT8}",
        f"T/16 D t16 t16 | {INT8}",
        f"T/0 D | {INT8}",
        f"T D d1 | {INT8}",
        f"T/16 D t16/0 | {INT8}",
        f"X D | {INT8}",
        f"T, D | {INT8}",
        f"T/x D | {INT8}",
        f"T/-4 D t4 | {INT8}",
        f"T16 D | {INT8}",
        f"T d | {INT8}",
    ],
)
def test_malformed_names_are_refused_in_one_line(name):
    with pytest.raises(LayoutError) as caught:
        Layout.parse(name)
    assert str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("pad", "fold"), [(-1, 0), (0, -1)])
def test_negative_pad_and_fold_are_refused(pad, fold):
    with pytest.raises(LayoutError, match="negative"):
        Layout((Factor("T", 0, 1), Factor("D", 0, 1)), packing_named(INT8), pad, fold)


@pytest.mark.parametrize("option", ["pad", "fold"])
def test_pad_and_fold_are_bounded(option):
    assert Layout.parse(f"T D | {INT8} | {option} {1 << 24}").name.endswith(str(1 << 24))
    with pytest.raises(LayoutError, match="at most 16777216"):
        Layout.parse(f"T D | {INT8} | {option} {(1 << 24) + 8}")


@settings(max_examples=150)
@given(stored())
def test_every_element_has_bits_of_its_own_inside_the_head(case):
    layout, tokens, channels = case
    byte, shift = layout.address(*grid(tokens, channels), tokens, channels)
    assert byte.shape == shift.shape == (tokens, channels)
    bits = layout.packing.bits
    first = byte * 8 + shift
    assert np.unique(first).size == tokens * channels
    assert (first % bits == 0).all()
    assert first.min() >= 0
    assert first.max() + bits <= 8 * layout.head_bytes(tokens, channels)
    assert layout.head_bytes(tokens, channels) % 64 == 0


@settings(max_examples=60)
@given(stored(formats=("int8",), folds=False))
def test_strides_say_what_addresses_do(case):
    """An element's byte is its row times the pitch, plus each coordinate times its stride."""
    layout, tokens, channels = case
    rng = np.random.default_rng(tokens * 100 + channels)
    pitch, strides = layout.pitch_bytes(tokens, channels), layout.strides(tokens, channels)
    assert strides[0] == 0
    for t, d in zip(rng.integers(tokens, size=20), rng.integers(channels, size=20), strict=True):
        expected = 0
        for number, factor in enumerate(layout.factors):
            x = int(t if factor.axis == "T" else d)
            coordinate = (x % factor.block if factor.block else x) // factor.unit
            expected += coordinate * (pitch if number == 0 else strides[number])
        byte, shift = layout.address(t, d, tokens, channels)
        assert (byte, shift) == (expected, 0)


@pytest.mark.parametrize(
    ("order", "closed_form"),
    [
        ("T D", lambda t, d, n, c: t * c + d),
        ("D T", lambda t, d, n, c: d * n + t),
        ("T/16 D t16", lambda t, d, n, c: t // 16 * 16 * c + d * 16 + t % 16),
        ("T/16 D/4 t16 d4", lambda t, d, n, c: t // 16 * 16 * c + d // 4 * 64 + t % 16 * 4 + d % 4),
        (
            "T/32 D/8 t32/4 d8 t4",
            lambda t, d, n, c: t // 32 * 32 * c + d // 8 * 256 + t % 32 // 4 * 32 + d % 8 * 4 + t % 4,
        ),
        ("t4 D T/4", lambda t, d, n, c: t % 4 * (c * (n // 4)) + d * (n // 4) + t // 4),
    ],
)
def test_closed_forms(order, closed_form):
    tokens, channels = 64, 24
    t, d = grid(tokens, channels)
    byte, shift = Layout.parse(f"{order} | {INT8}").address(t, d, tokens, channels)
    np.testing.assert_array_equal(byte, closed_form(t, d, tokens, channels))
    assert not shift.any()
    byte, _ = Layout.parse(f"{order} | fp16").address(t, d, tokens, channels)
    np.testing.assert_array_equal(byte, 2 * closed_form(t, d, tokens, channels))
    byte, shift = Layout.parse(f"{order} | int4/contiguous/signed").address(t, d, tokens, channels)
    np.testing.assert_array_equal(byte, closed_form(t, d, tokens, channels) // 2)
    np.testing.assert_array_equal(shift, closed_form(t, d, tokens, channels) % 2 * 4)


def test_padding_lies_between_rows():
    t, d = grid(64, 24)
    byte, _ = Layout.parse(f"T/16 D/4 t16 d4 | {INT8} | pad 64").address(t, d, 64, 24)
    np.testing.assert_array_equal(byte, t // 16 * (16 * 24 + 64) + d // 4 * 64 + t % 16 * 4 + d % 4)
    assert Layout.parse(f"T D | {INT8} | pad 40").pitch_bytes(64, 24) == 64
    assert Layout.parse(f"T D | {INT8} | pad 40").head_bytes(3, 24) == 192


def test_a_fold_continues_in_the_next_panel():
    """Five rows folded after two: three panels side by side, rows 0, 2, 4 above rows 1 and 3."""
    layout = Layout.parse(f"T D | {INT8} | fold 2")
    t, d = grid(5, 8)
    byte, _ = layout.address(t, d, 5, 8)
    np.testing.assert_array_equal(byte, t % 2 * 24 + t // 2 * 8 + d)
    assert layout.head_bytes(5, 8) == 64
    assert layout.head_bytes(50, 8) == 448  # 2 rows of 25 panels, 400 bytes
    unfolded, _ = layout.address(*grid(2, 8), 2, 8)
    np.testing.assert_array_equal(unfolded, t[:2] * 8 + d)


@pytest.mark.parametrize(
    ("order", "pi", "tokens_run", "channels_run"),
    [
        ("T D", "D", 1, 24),
        ("D T", "T", 64, 1),
        ("T/16 D t16", "T", 16, 1),
        ("T/16 D/4 t16 d4", "D", 1, 4),
        ("T/32 D/8 t32/4 d8 t4", "T", 4, 1),
        ("T/32 D t32/4 t4", "T", 32, 1),
        ("D T/4 t4", "T", 64, 1),
        ("T/16 t16 D", "D", 1, 24),
    ],
)
def test_pi_and_the_adjacent_run(order, pi, tokens_run, channels_run):
    layout = Layout.parse(f"{order} | {INT8}")
    assert layout.pi == pi
    assert (layout.run("T", 64), layout.run("D", 24)) == (tokens_run, channels_run)


@given(stored(formats=("int8",), folds=False))
def test_run_counts_neighbours_that_are_adjacent(case):
    layout, tokens, channels = case
    for axis, length in (("T", tokens), ("D", channels)):
        run = min(layout.run(axis, length), length)
        x, zero = np.arange(run), np.zeros(run, np.int64)
        t, d = (x, zero) if axis == "T" else (zero, x)
        byte, _ = layout.address(t, d, tokens, channels)
        np.testing.assert_array_equal(byte, byte[0] + x)


@pytest.mark.parametrize(
    ("name", "rows", "pitch", "head"),
    [
        ("T D | int8/bytes/signed", 33, 20, 704),
        ("T/16 D/4 t16 d4 | int8/bytes/signed", 3, 320, 960),
        ("D T | int8/bytes/signed", 20, 33, 704),
        ("T/32 D t32 | int4/planes/signed", 2, 320, 640),
        ("T D | fp16 | pad 24", 33, 64, 2112),
    ],
)
def test_rows_pitch_and_size(name, rows, pitch, head):
    layout = Layout.parse(name)
    assert (layout.rows(33, 20), layout.pitch_bytes(33, 20), layout.head_bytes(33, 20)) == (rows, pitch, head)


def test_a_row_must_be_whole_packing_blocks():
    with pytest.raises(LayoutError, match="row of 80 codes is no whole number of 64-code blocks"):
        Layout.parse("T D | int4/planes/signed").head_bytes(32, 80)


@given(st.integers(1, 8), st.integers(0, 500))
def test_addresses_do_not_depend_on_capacity_when_tokens_are_outermost(blocks, extra):
    layout = Layout.parse(f"T/32 D/16 t32/4 d16 t4 | {INT8}")
    t, d = grid(32 * blocks, 48)
    here, _ = layout.address(t, d, 32 * blocks, 48)
    there, _ = layout.address(t, d, 32 * blocks + extra, 48)
    np.testing.assert_array_equal(here, there)

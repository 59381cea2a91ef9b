"""New tokens of a cache: quantised as `quantize` does, bit for bit, and stored where `pack` would have put them."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.kernels import append_fields as fields
from lowbit.kernels.append_fields import FIELDS, places
from lowbit.kernels.cpu.compiled import operator
from lowbit.kernels.cpu.isa import ISAS, detect, runs_here
from lowbit.kernels.cpu.pool import pool
from lowbit.kernels.errors import LayoutError
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import pack, round_capacity
from lowbit.kernels.packing import packings
from lowbit.kernels.problem import PRECISIONS
from lowbit.kernels.quantize import LARGEST_CODE, Quantized, quantize
from random_layouts import growing

PRECISION = {precision.format: precision for precision in PRECISIONS.values()}
LARGEST_HALF = 65504.0


def empty(layout, heads, head_dim, capacity):
    format = layout.packing.format
    groups = 0 if format == "fp16" else -(-head_dim // 32)
    codes = np.zeros((heads, 0, head_dim), np.float16 if format == "fp16" else np.int8)
    return pack(Quantized(format, codes, np.zeros((heads, 0, groups), np.float16)), layout, capacity)


def run_append(k, v, k_values, v_values, position, isa=None):
    """Store float32 (heads, tokens, head_dim) from ``position`` on."""
    job = np.zeros(len(FIELDS), np.int64)
    job[fields.SOURCE_K], job[fields.SOURCE_V] = k_values.ctypes.data, v_values.ctypes.data
    job[fields.SOURCE_HEAD_BYTES], job[fields.SOURCE_TOKEN_BYTES] = k_values.strides[:2]
    job[fields.COUNT], job[fields.POSITION] = k_values.shape[1], position
    job[fields.HEADS], job[fields.HEAD_DIM] = k.heads, k.head_dim
    for first, operand in ((fields.K, k), (fields.V, v)):
        packing, table = operand.layout.packing, places(operand.layout, operand.head_dim)
        words, words_stride, scales, scales_stride, *_ = operand.addresses
        job[first : first + len(fields.ROLE)] = (
            packing.bits,
            LARGEST_CODE.get(packing.format, 0),
            packing.offset,
            words,
            words_stride,
            scales,
            scales_stride,
            table.ctypes.data,
            table.shape[0],
            operand.layout.pitch_bytes(operand.capacity, operand.head_dim),
        )
    pool(1).run(operator("append", isa or detect()), job.ctypes.data, 2 * k.heads)


def values(rng, heads, tokens, head_dim):
    """Numbers of every size that can be quantised, some groups of zeros among them."""
    sizes = np.exp2(rng.integers(-30, 12, (heads, tokens, 1)))
    x = (rng.standard_normal((heads, tokens, head_dim)) * sizes).astype(np.float32)
    x[rng.random((heads, tokens)) < 0.05] = 0
    return x


@settings(max_examples=300)
@given(st.sampled_from([8, 32, 40, 64, 80, 96]), st.integers(1, 3), st.integers(1, 70), st.data())
def test_what_is_appended_in_parts_is_what_packing_stores_at_once(head_dim, heads, tokens, data):
    k_layout, v_layout = data.draw(growing(head_dim)), data.draw(growing(head_dim))
    cuts = sorted(data.draw(st.sets(st.integers(1, tokens), max_size=4)) | {tokens})
    rng = np.random.default_rng([tokens, heads, head_dim])
    capacity = round_capacity([k_layout, v_layout], tokens)
    given_values = [values(rng, heads, tokens, head_dim) for _ in "kv"]
    stored = [empty(layout, heads, head_dim, capacity) for layout in (k_layout, v_layout)]
    first = 0
    for last in cuts:
        run_append(*stored, *(np.ascontiguousarray(each[:, first:last]) for each in given_values), first)
        first = last
    for operand, x in zip(stored, given_values, strict=True):
        expected = pack(quantize(x, PRECISION[operand.layout.packing.format]), operand.layout, capacity)
        np.testing.assert_array_equal(operand.words, expected.words)
        np.testing.assert_array_equal(operand.scales, expected.scales)


@pytest.mark.parametrize("isa", [isa for isa in ISAS.values() if runs_here(isa)], ids=lambda isa: isa.name)
@pytest.mark.parametrize("format", ["fp16", "int8", "int4"])
def test_rounding_is_quantize_s_on_every_instruction_set(format, isa):
    """Scales and halves next to every rounding boundary of fp16, subnormal ones included."""
    edges = np.arange(0, 0x7BFF, 37, dtype=np.uint16).view(np.float16).astype(np.float64)
    next_edges = (np.arange(0, 0x7BFF, 37, dtype=np.uint16) + 1).view(np.float16).astype(np.float64)
    middle = ((edges + next_edges) / 2).astype(np.float32)
    nearby = np.concatenate([edges, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)])
    nearby = np.concatenate([nearby, [1e-40, 2.0**-25, 65504.0]]).astype(np.float32)
    nearby = np.resize(nearby * (1 if format == "fp16" else LARGEST_CODE[format]), -(-len(nearby) // 64) * 64)
    if format == "fp16":
        x = (nearby * np.resize([1, -1, -1], len(nearby))).astype(np.float32).reshape(1, -1, 64)
    else:
        shares = np.random.default_rng(3).uniform(-1, 1, (len(nearby), 32))
        shares[:, 0] = 1
        # Halves of codes are ties where the scale is a power of two.
        shares[:, 1:9] = (np.arange(-4, 4) + 0.5) / LARGEST_CODE[format]
        x = (nearby[:, None] * shares).astype(np.float32).reshape(1, -1, 64)
    layout = Layout.parse(f"T D | {packings(format)[0].name}")
    k, v = (empty(layout, 1, 64, x.shape[1]) for _ in "kv")
    run_append(k, v, x, -x, 0, isa)
    for operand, source in ((k, x), (v, -x)):
        expected = pack(quantize(source, PRECISION[format]), layout, x.shape[1])
        np.testing.assert_array_equal(operand.words, expected.words)
        np.testing.assert_array_equal(operand.scales, expected.scales)


@pytest.mark.parametrize("format", ["fp16", "int8", "int4"])
def test_what_cannot_be_quantised_becomes_finite(format):
    layout = Layout.parse(f"T D | {packings(format)[-1].name}")
    x = np.ones((1, 4, 64), np.float32)
    x[0, 0, 3] = np.nan
    x[0, 1, 3], x[0, 1, 40] = np.inf, -np.inf
    x[0, 2, 3] = -3e38
    x[0, 3] = -np.nan
    k, v = (empty(layout, 1, 64, 32) for _ in "kv")
    run_append(k, v, x, x, 0)
    got = replace(k, tokens=4).dequantize()[0]
    assert np.isfinite(got).all()
    largest = LARGEST_HALF * LARGEST_CODE.get(format, 1)
    without = np.where(np.arange(64) == 3, 0, 1)
    np.testing.assert_allclose(got[0], without, rtol=1e-3)  # NaN is zero, and its group is as fine as before
    assert (got[1, 3], got[1, 40]) == (largest, -largest)
    assert got[2, 3] == -largest
    np.testing.assert_allclose(got[2, 32:], 1, rtol=1e-3)
    assert not got[3].any()


def test_neighbours_are_left_alone():
    """4-bit codes share bytes with other tokens', and heads lie next to each other."""
    layout = Layout.parse("T/32 D t32 | int4/contiguous/offset")
    rng = np.random.default_rng(0)
    before = quantize(values(rng, 2, 32, 64), PRECISION["int4"])
    k, v = (pack(before, layout) for _ in "kv")
    x = values(rng, 2, 1, 64)
    run_append(k, v, x, x, 7)
    after = k.quantized()
    others = np.arange(32) != 7
    np.testing.assert_array_equal(after.codes[:, others], before.codes[:, others])
    np.testing.assert_array_equal(after.scales[:, others], before.scales[:, others])
    np.testing.assert_array_equal(after.codes[:, 7:8], quantize(x, PRECISION["int4"]).codes)


@pytest.mark.parametrize("name", ["D T | int8/bytes/signed", "T D | int8/bytes/signed | fold 16", "D/4 T d4 | fp16"])
def test_storage_that_does_not_grow_along_tokens_is_refused(name):
    with pytest.raises(LayoutError, match="grows along tokens"):
        places(Layout.parse(name), 64)


def test_a_row_that_is_no_whole_number_of_blocks_is_refused():
    with pytest.raises(LayoutError, match="no whole number"):
        places(Layout.parse("T D | int4/planes/signed"), 80)


def test_the_task_is_loaded_without_numba(tmp_path):
    script = (
        "import sys, json; from lowbit.kernels.cpu.compiled import operator; from lowbit.kernels.cpu.isa import detect;"
        "from lowbit.kernels.cpu import objects; operator('append', detect());"
        "print(json.dumps([objects.counts.built, 'numba' in sys.modules]))"
    )
    environment = {**os.environ, "LOWBIT_CACHE": str(tmp_path)}
    runs = [
        json.loads(
            subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True).stdout
        )
        for _ in range(2)
    ]
    assert runs == [[1, True], [0, False]]

"""Users' own Numba kernels over packed operands."""

import importlib.metadata
import pickle
import subprocess
import sys

import numpy as np
import pytest
from kernel_check import problem
from lowbit.kernels.errors import LayoutError
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import aligned_zeros, pack
from lowbit.kernels.packing import Packing, packings, register_packing
from lowbit.kernels.plugin import accumulate_tile, load_element, tile_spec
from lowbit.kernels.reference import make_operands, tolerance
from numba import njit, typeof
from numba.core.errors import NumbaError

ORDERS = ("T D", "T/16 D/4 t16 d4", "T/32 D t32", "T/32 D/16 t32/4 d16 t4", "T/16 D/8 d8 t16")


def decoded(operand, out):
    for head in range(out.shape[0]):
        for t in range(out.shape[1]):
            for d in range(out.shape[2]):
                out[head, t, d] = load_element(operand, head, t, d)


def operand(precision, layout, heads=2, tokens=37, head_dim=80):
    p = problem(f"qk h{heads}/{heads} d{head_dim} q1 {precision}")
    return pack(make_operands(p, tokens).k, Layout.parse(layout))


def rotated(index):
    return (index + 3) % 16 // 2, index % 2 * 4 ^ 4


@pytest.mark.parametrize("format", ["fp16", "int8", "int4"])
def test_each_element_is_what_the_operand_decodes_to(format, registry):
    """Every packing in some order, every order with some packing, and a packing of one's own."""
    precision = {"fp16": "fp16", "int8": "w8a8", "int4": "w4a8"}[format]
    known = packings(format)
    names = [
        f"{ORDERS[i % len(ORDERS)]} | {known[i % len(known)].name} | pad 64"
        for i in range(max(len(known), len(ORDERS)))
    ]
    if format == "int4":
        own = register_packing(Packing("int4", "rotated", 4, 16, rotated, coding="offset"))
        names.append(f"T/16 D t16 | {own.name} | pad 8")
    for name in names:
        layout = Layout.parse(name)
        # Rows of 80 channels are no whole number of 64-code blocks.
        head_dim = 80 if layout.row_codes(32, 80) % layout.packing.block_codes == 0 else 128
        packed = operand(precision, name, head_dim=head_dim)
        out = np.zeros((2, 37, head_dim), np.float32)
        njit(decoded)(packed, out)
        np.testing.assert_array_equal(out, packed.dequantize().astype(np.float32), name)


def test_a_layout_is_a_type_and_another_one_another_specialisation():
    kernel = njit(decoded)
    out = np.zeros((2, 37, 80), np.float32)
    first, second = (operand("w8a8", f"{order} | int8/bytes/signed") for order in ("T D", "T/32 D t32"))
    for packed in (first, second, first, operand("w8a8", "T D | int8/bytes/signed", tokens=40)):
        kernel(packed, out)
    assert len(kernel.signatures) == 2
    assert typeof(first) == typeof(operand("w8a8", "T D | int8/bytes/signed", heads=3))
    assert typeof(first) != typeof(second)
    assert typeof(first) != typeof(operand("w8a8", "T D | int8/bytes/signed", head_dim=96))


def test_shape_is_visible_in_a_kernel():
    @njit
    def shape(operand):
        return operand.tokens, operand.capacity

    assert shape(operand("w4a8", "T/16 D/8 t16 d8 | int4/lane_interleaved/signed")) == (37, 64)


def test_single_elements_need_token_major_storage():
    with pytest.raises(LayoutError, match="single elements are read from token-major storage"):
        njit(decoded)(operand("w8a8", "D T | int8/bytes/signed"), np.zeros((2, 37, 80), np.float32))


def test_tiles_of_a_layout_that_cannot_feed_them_fail_with_the_reason():
    p = problem("sv h1/1 d64 q1 w8a8")
    packed = pack(make_operands(p, 40).v, Layout.parse("T/48 D t48 | int8/bytes/signed"))
    weights, scratch, out = np.ones((1, 96), np.float32), np.zeros(9999, np.uint8), np.zeros((1, 64), np.float32)
    with pytest.raises(LayoutError, match="a tile of 48 tokens does not divide"):
        weighted(packed, weights, scratch, out)


def test_intrinsics_refuse_other_arguments():
    with pytest.raises(NumbaError):
        njit(decoded)(np.zeros((2, 3, 4)), np.zeros((2, 3, 4), np.float32))


@njit
def weighted(values, weights, scratch, out):
    """Weighted sums of each head's values, 64 tokens at a time."""
    for head in range(out.shape[0]):
        for first in range(0, values.capacity, 64):
            count = min(64, values.capacity - first)
            part = weights[head, first : first + count]
            accumulate_tile(
                values,
                head,
                first,
                count,
                part.ctypes.data,
                count,
                scratch.ctypes.data,
                out[head].ctypes.data,
                out.shape[1],
            )


@pytest.mark.parametrize(
    ("precision", "layout"), [("fp16", "T D | fp16"), ("w4a8", "T/32 D/16 t32/8 d16 t8 | int4/lane_interleaved/signed")]
)
def test_accumulate_tile_in_a_kernel_of_ones_own(precision, layout):
    from lowbit.kernels.cpu.values import scratch_bytes

    p = problem(f"sv h2/2 d96 q1 {precision}")
    operands = make_operands(p, 100)
    packed = pack(operands.v, Layout.parse(layout))
    weights = np.zeros((2, packed.capacity), np.float32)
    weights[:, :100] = operands.x[:, 0]
    out = np.zeros((2, 96), np.float32)
    scratch = aligned_zeros(scratch_bytes(tile_spec("v", typeof(packed))), np.uint8)
    weighted(packed, weights, scratch, out)
    pipeline = "float" if precision == "fp16" else "integer"
    expected = np.einsum("ht,htd->hd", operands.x[:, 0].astype(np.float64), operands.v.dequantize())
    # The plain sum, not the rounded one: within the rounding of the weights to 7 bits.
    scale = np.abs(expected).max()
    np.testing.assert_allclose(out, expected, atol=scale * (1e-6 if pipeline == "float" else 0.02))
    assert tolerance(p, operands, pipeline) < 0.01


def test_numba_finds_the_plugin_by_itself(tmp_path):
    """A program that imports numba and unpickles an operand: the entry point registers its type on first use."""
    (entry,) = [e for e in importlib.metadata.entry_points(group="numba_extensions") if e.value.startswith("lowbit.")]
    assert entry.value == "lowbit.kernels.plugin:register"
    path = tmp_path / "operand.pickle"
    packed = operand("w4a8", "T/16 D/8 t16 d8 | int4/lane_interleaved/signed")
    path.write_bytes(pickle.dumps(packed))
    script = f"""
import pickle, sys
from numba import njit
@njit
def capacity(operand):
    return operand.capacity
with open({str(path)!r}, "rb") as file:
    operand = pickle.load(file)
assert "lowbit.kernels.plugin" not in sys.modules
print(capacity(operand))
assert "lowbit.kernels.plugin" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "64\n"), done.stderr

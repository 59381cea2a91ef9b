"""Row-wise stages against NumPy in float64, on every instruction set of this machine."""

import ctypes

import numpy as np
import pytest
from lowbit.kernels import gemv_fields
from lowbit.kernels.cpu.compiled import operator
from lowbit.kernels.cpu.isa import ISAS, runs_here
from lowbit.kernels.cpu.pool import run
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import pack
from lowbit.kernels.problem import PRECISIONS
from lowbit.kernels.quantize import Quantized, quantize
from lowbit.kernels.rowwise_fields import Center, Embed, Gate, Multiply, Normalise, Ready, Rotate, Turn

ISAS_HERE = [isa for isa in ISAS.values() if runs_here(isa)]
pytestmark = pytest.mark.parametrize("isa", ISAS_HERE, ids=lambda isa: isa.name)


def job(fields, **values):
    """The fields as int64; floats lie in the lower half, arrays are addresses."""
    found = np.zeros(len(fields), np.int64)
    for name, value in values.items():
        position = fields[name.upper()]
        if isinstance(value, float):
            found[position : position + 1].view(np.float32)[0] = value
        else:
            found[position] = value.ctypes.data if isinstance(value, np.ndarray) else value
    return found


def rows(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("width", [1, 7, 64, 576])
@pytest.mark.parametrize("added", [False, True])
def test_normalise(isa, width, added):
    rng = np.random.default_rng(width)
    x, y, weight, out = rows(rng, 3, width), rows(rng, 3, width), rows(rng, width), np.zeros((3, width), np.float32)
    before = x.astype(np.float64) + (y if added else 0)
    fields = job(Normalise, x=x, add=y if added else 0, weight=weight, eps=1e-5, out=out, width=width)
    run(operator("normalise", isa), fields.ctypes.data, 3, 1)
    expected = before / np.sqrt((before**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(x, before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width, stride", [(1, 1), (96, 200), (1536, 3072)])
def test_gate(isa, width, stride):
    rng = np.random.default_rng(width)
    gate, up = 20 * rows(rng, 2, stride), rows(rng, 2, stride)
    gate[0, 0] = -1e4
    gate[1, 0] = 1e4
    out = np.zeros((2, width), np.float32)
    fields = job(Gate, gate=gate, up=up, stride=stride, out=out, width=width)
    run(operator("gate", isa), fields.ctypes.data, 2, 1)
    exact = gate[:, :width].astype(np.float64)
    with np.errstate(over="ignore"):
        expected = exact / (1 + np.exp(-exact)) * up[:, :width]
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


def head(x, bias, norm, cos, sin, dims):
    """One head of queries or keys in float64, by complex numbers."""
    x = x.astype(np.float64) + bias
    if norm is not None:
        x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * norm
    half = dims // 2
    turned = (x[..., :half] + 1j * x[..., half:dims]) * (cos + 1j * sin)
    return np.concatenate([turned.real, turned.imag, x[..., dims:]], axis=-1)


@pytest.mark.parametrize("head_dim, dims", [(64, 64), (80, 32), (96, 96), (128, 128)])
@pytest.mark.parametrize("heads, kv_heads", [(9, 3), (4, 4), (7, 1)])
@pytest.mark.parametrize("extras, k_turn, v_turn", [(False, 0, 0), (True, 16, 0), (True, 0, 16), (False, 8, 2)])
def test_rotate(isa, head_dim, dims, heads, kv_heads, extras, k_turn, v_turn):
    rng = np.random.default_rng(head_dim + heads)
    positions = 3
    width, narrow = heads * head_dim, kv_heads * head_dim
    qkv = rows(rng, positions, width + 2 * narrow)
    biases = rows(rng, width + 2 * narrow) if extras else np.zeros(width + 2 * narrow, np.float32)
    q_norm, k_norm = rows(rng, head_dim), rows(rng, head_dim)
    angle = rng.uniform(0, 100, (positions, dims // 2))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    queries = np.zeros((heads, positions, head_dim), np.float32)
    keys, values = (np.zeros((kv_heads, positions, head_dim), np.float32) for _ in range(2))
    stride, base = qkv.shape[1], qkv.ctypes.data
    bias = biases.ctypes.data
    fields = job(
        Rotate,
        q=base, k=base + 4 * width, v=base + 4 * (width + narrow),
        q_stride=stride, k_stride=stride, v_stride=stride,
        q_bias=bias if extras else 0,
        k_bias=bias + 4 * width if extras else 0,
        v_bias=bias + 4 * (width + narrow) if extras else 0,
        q_norm=q_norm if extras else 0, k_norm=k_norm if extras else 0, eps=1e-6,
        cos=cos, sin=sin, dims=dims, heads=heads, kv_heads=kv_heads, head_dim=head_dim, positions=positions,
        k_turn=k_turn, v_turn=v_turn, queries=queries, keys=keys, values=values,
    )  # fmt: skip
    run(operator("rotate", isa), fields.ctypes.data, positions, 1)
    for first, count, out, norm in ((0, heads, queries, q_norm), (width, kv_heads, keys, k_norm)):
        part = slice(first, first + count * head_dim)
        x = qkv[:, part].reshape(positions, count, head_dim)
        expected = head(
            x, biases[part].reshape(count, head_dim), norm if extras else None, cos[:, None], sin[:, None], dims
        )
        np.testing.assert_allclose(out.transpose(1, 0, 2), turned(expected, k_turn), rtol=3e-6, atol=8e-6)
    plain = (qkv + biases)[:, width + narrow :].reshape(positions, kv_heads, head_dim)
    np.testing.assert_allclose(values.transpose(1, 0, 2), turned(plain, v_turn), rtol=1e-6, atol=1e-6)


def turned(x, block):
    """Blocks of the last axis times the Hadamard matrix that signs of common bits make."""
    if not block:
        return x
    i = np.arange(block)
    matrix = np.array([[(-1) ** (int(a) & int(b)).bit_count() for a in i] for b in i]) / np.sqrt(block)
    return (x.reshape(*x.shape[:-1], -1, block) @ matrix).reshape(x.shape)


@pytest.mark.parametrize("width, block", [(64, 64), (160, 16), (96, 32), (256, 256), (6, 2)])
def test_turn_is_its_own_inverse(isa, width, block):
    x = rows(np.random.default_rng(block), 3, width)
    out = x.copy()
    fields = job(Turn, x=out, width=width, block=block)
    run(operator("turn", isa), fields.ctypes.data, 3, 1)
    np.testing.assert_allclose(out, turned(x.astype(np.float64), block), rtol=1e-5, atol=2e-6)
    run(operator("turn", isa), fields.ctypes.data, 3, 1)
    np.testing.assert_allclose(out, x, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("positions, head_dim", [(1, 64), (5, 80), (64, 96)])
def test_center(isa, positions, head_dim):
    rng = np.random.default_rng(head_dim)
    mean = np.zeros((3, head_dim), np.float32)
    first, second = rows(rng, 3, positions, head_dim) + 4, rows(rng, 3, positions, head_dim)
    expected = first.mean(axis=1, dtype=np.float64)
    for keys, learn in ((first, 1), (second, 0)):
        out = keys.copy()
        fields = job(Center, keys=out, mean=mean, positions=positions, head_dim=head_dim, learn=learn)
        run(operator("center", isa), fields.ctypes.data, 3, 1)
        np.testing.assert_allclose(mean, expected, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(out, keys - expected[:, None], rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("columns", [32, 80, 576])
def test_ready_sums_groups_and_prepares(isa, columns):
    rng = np.random.default_rng(columns)
    x, groups = rows(rng, 2, columns), -(-columns // 32)
    sums, calls = np.zeros((2, groups), np.float32), []
    matrix = np.zeros(len(gemv_fields.FIELDS), np.int64)
    matrix[gemv_fields.X], matrix[gemv_fields.X_BYTES] = x.ctypes.data, 4 * columns
    matrix[gemv_fields.GROUPS], matrix[gemv_fields.SUMS] = groups, sums.ctypes.data
    prepare = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(lambda at, row: calls.append((at, row)))
    fields = job(Ready, job=matrix, prepare=ctypes.cast(prepare, ctypes.c_void_p).value)
    run(operator("ready", isa), fields.ctypes.data, 2, 1)
    expected = [[row[32 * g : 32 * g + 32].sum(dtype=np.float64) for g in range(groups)] for row in x]
    np.testing.assert_allclose(sums, expected, atol=2e-5)
    assert calls == [(matrix.ctypes.data, 0), (matrix.ctypes.data, 1)]


@pytest.mark.parametrize("vectors", [1, 3])
@pytest.mark.parametrize("rows_, columns", [(1, 8), (45, 80), (64, 576)])
def test_multiply(isa, vectors, rows_, columns):
    rng = np.random.default_rng(columns)
    matrix, x, out = rows(rng, rows_, columns), rows(rng, vectors, columns), np.zeros((vectors, rows_), np.float32)
    fields = job(Multiply, x=x, out=out, matrix=matrix, rows=rows_, columns=columns, vectors=vectors, splits=3)
    run(operator("multiply", isa), fields.ctypes.data, 3, 1)
    np.testing.assert_allclose(out, x.astype(np.float64) @ matrix.T.astype(np.float64), rtol=1e-5, atol=2e-5)


LAYOUTS = [
    "T D | fp16",
    "T/16 D t16 | fp16",
    "T/16 D/4 t16 d4 | int8/bytes/signed",
    "T/16 D/4 t16 d4 | int8/bytes/offset",
    "T D | int4/contiguous/offset",
    "T/16 D/4 t16 d4 | int4/planes/offset",
    "T/32 D t32 | int4/lane_interleaved/signed",
]


CASES = [(name, False) for name in LAYOUTS] + [(name, True) for name in LAYOUTS if "int4" in name]


@pytest.mark.parametrize("name, minima", CASES)
def test_embed(isa, name, minima):
    layout, width, vocabulary = Layout.parse(name), 96, 75
    bits = layout.packing.bits
    rng = np.random.default_rng(width)
    precision = {16: "fp16", 8: "w8a8", 4: "w4a8"}[bits]
    stored = quantize(rows(rng, 1, vocabulary, width), PRECISIONS[precision])
    packed = pack(stored, layout)
    expected = stored.dequantize()[0]
    least = 0
    if minima:
        offsets = rng.standard_normal((1, vocabulary, 3)).astype(np.float16)
        least = pack(Quantized("int4", stored.codes, offsets), layout).scales
        steps = 8 * stored.scales[0].astype(np.float64) + offsets[0]
        expected = expected + np.repeat(steps, 32, axis=1)
    period = layout.unit("T")
    byte, shift = layout.address(np.arange(period)[:, None], np.arange(width)[None], packed.capacity, width)
    places = np.ascontiguousarray(np.broadcast_to(byte * 8 + shift, (period, width)), np.int32)
    ids = np.array([0, 74, 31, 32, 33], np.int32)
    out = np.zeros((len(ids), width), np.float32)
    fields = job(
        Embed,
        ids=ids, out=out, width=width, format=bits, words=packed.words, scales=packed.scales, minima=least,
        places=places, period=period, pitch=layout.pitch_bytes(packed.capacity, width), offset=layout.packing.offset,
        factor=2.0,
    )  # fmt: skip
    run(operator("embed", isa), fields.ctypes.data, len(ids), 1)
    np.testing.assert_allclose(out, 2 * expected[ids], rtol=1e-6, atol=1e-6)


def test_embed_of_plain_floats(isa):
    matrix = rows(np.random.default_rng(0), 10, 24)
    ids, out = np.array([9, 0], np.int32), np.zeros((2, 24), np.float32)
    fields = job(Embed, ids=ids, out=out, width=24, format=32, words=matrix, factor=1.0)
    run(operator("embed", isa), fields.ctypes.data, 2, 1)
    np.testing.assert_array_equal(out, matrix[ids])

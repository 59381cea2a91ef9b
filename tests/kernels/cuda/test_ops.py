"""Each instruction's PTX against its Python meaning: both compute the same from the same bits."""

import math
import struct

import numpy as np
import pytest

pytest.importorskip("numba_cuda")
from lowbit.kernels.cuda import ptx
from lowbit.kernels.cuda.ops import AND_AND, AND_XOR, MAGIC, MAGIC_BITS, step
from lowbit.kernels.cuda.program import Entry, Parameter
from lowbit.kernels.cuda.python_ops import PythonOps, rounded, signed
from ptx_machine import Buffers, run

THREADS = 128
GIVEN = 5
"""Words of a thread: three integers and two floats."""

INTEGERS = {
    "add": lambda ops, a, b, c, f, g: ops.add(a, b),
    "sub": lambda ops, a, b, c, f, g: ops.sub(a, b),
    "mul": lambda ops, a, b, c, f, g: ops.mul(a, b),
    "and": lambda ops, a, b, c, f, g: ops.and_(a, b),
    "xor": lambda ops, a, b, c, f, g: ops.xor(a, b),
    "constant": lambda ops, a, b, c, f, g: ops.add(a, ops.i32(-(1 << 31))),
    "shift_left": lambda ops, a, b, c, f, g: ops.shift_left(a, 5),
    "shift_right": lambda ops, a, b, c, f, g: ops.shift_right(a, 7),
    "extract": lambda ops, a, b, c, f, g: ops.extract(a, 12, 4),
    "extract_byte": lambda ops, a, b, c, f, g: ops.extract(a, 24, 8),
    "lop3_and": lambda ops, a, b, c, f, g: ops.lop3(a, 0xF0F0F0F0, 0, AND_AND),
    "lop3_xor": lambda ops, a, b, c, f, g: ops.lop3(a, 0x0F0F0F0F, 0x08080808, AND_XOR),
    "prmt": lambda ops, a, b, c, f, g: ops.prmt(a, b, 0x5140),
    "prmt_high": lambda ops, a, b, c, f, g: ops.prmt(a, b, 0x7362),
    "dp4a_signed": lambda ops, a, b, c, f, g: ops.dp4a(a, b, c, True),
    "dp4a_unsigned": lambda ops, a, b, c, f, g: ops.dp4a(a, b, c, False),
    "select_less": lambda ops, a, b, c, f, g: ops.select_less(a, b, c, a),
    "select_less_float": lambda ops, a, b, c, f, g: ops.select_less(f, g, a, b),
    "remainder": lambda ops, a, b, c, f, g: ops.remainder(ops.shift_right(a, 1), ops.i32(97)),
    "address": lambda ops, a, b, c, f, g: ops.address(ops.shift_right(a, 4), ops.i32(12)),
    "table": lambda ops, a, b, c, f, g: ops.table([7 * i * i - 9 for i in range(32)], ops.shift_right(a, 27)),
    "select_lane": lambda ops, a, b, c, f, g: ops.select_lane(ops.and_(a, ops.i32(31)), 4, b, c),
    "as_int": lambda ops, a, b, c, f, g: ops.as_int(ops.as_float(a)),
    "magic": lambda ops, a, b, c, f, g: ops.as_int(
        ops.fadd(ops.as_float(ops.add(ops.shift_right(a, 11), ops.i32(MAGIC_BITS))), ops.f32(-MAGIC))
    ),
}

FLOATS = {
    "fadd": lambda ops, a, b, c, f, g: ops.fadd(f, g),
    "fmul": lambda ops, a, b, c, f, g: ops.fmul(f, g),
    "ffma": lambda ops, a, b, c, f, g: ops.ffma(f, g, ops.f32(0.1)),
    "fmax": lambda ops, a, b, c, f, g: ops.fmax(f, g),
    "fabs": lambda ops, a, b, c, f, g: ops.fabs(f),
    "exp2": lambda ops, a, b, c, f, g: ops.exp2(f),
    "exp2_tiny": lambda ops, a, b, c, f, g: ops.exp2(ops.f32(-1e30)),
    "reciprocal": lambda ops, a, b, c, f, g: ops.reciprocal(f),
    "to_float": lambda ops, a, b, c, f, g: ops.to_float(a),
    "low_half": lambda ops, a, b, c, f, g: ops.halves(ops.and_(a, ops.i32(0x3FFF3FFF)))[0],
    "high_half": lambda ops, a, b, c, f, g: ops.halves(ops.and_(a, ops.i32(0x3FFF3FFF)))[1],
    "float_table": lambda ops, a, b, c, f, g: ops.table([i / 7 for i in range(32)], ops.shift_right(a, 27)),
    "select_less_of_floats": lambda ops, a, b, c, f, g: ops.select_less(a, b, f, g),
}

ALL = {**INTEGERS, **FLOATS}


def given():
    """Random words, with the corners of their range in front."""
    rng = np.random.default_rng(5)
    words = rng.integers(-(1 << 31), 1 << 31, (THREADS, GIVEN), np.int64).astype(np.int32)
    corners = [0, -1, 1, (1 << 31) - 1, -(1 << 31), 0x80808080 - (1 << 32), 0x7F7F7F7F]
    words[: len(corners), 0], words[: len(corners), 1] = corners, corners[::-1]
    words[:, 3:] = rng.normal(0, 5, (THREADS, 2)).astype(np.float32).view(np.int32)
    return words


def body(ops, source, target):
    """Loads a thread's words, and stores every instruction's result."""
    thread = ops.thread()
    place = ops.address(source, ops.mul(thread, ops.i32(4 * GIVEN)))
    a, b, c, f, g = (ops.load_global(place, 4 * i, 1, False)[0] for i in range(GIVEN))
    f, g = ops.as_float(f), ops.as_float(g)
    place = ops.address(target, ops.mul(thread, ops.i32(4 * len(ALL))))
    for number, expression in enumerate(ALL.values()):
        at = ops.address(place, ops.i32(4 * number))
        ops.store_global_if_less(ops.i32(0), ops.i32(1), at, expression(ops, a, b, c, f, g))


@pytest.fixture(scope="module")
def results():
    """What the PTX computes: (threads, instructions) words, by name."""
    every = step(body, ["i64", "i64"], None)

    def kernel(source, target):
        every(source, target)

    entry = Entry("instructions", kernel, (Parameter("source", "pointer"), Parameter("target", "pointer")))
    words = given()
    buffers = Buffers({"source": words, "target": np.zeros((THREADS, len(ALL)), np.int32)}, frozenset({"target"}))
    arguments = [buffers.addresses["source"], buffers.addresses["target"]]
    run(ptx.compile_entry(entry, "sm_86"), (1, 1, 1), THREADS, 0, arguments, buffers)
    return dict(zip(ALL, buffers.read("target").T, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_ptx_and_python_agree(results, name):
    ops = PythonOps()
    for words, found in zip(given(), results[name], strict=True):
        a, b, c = (int(word) for word in words[:3])
        f, g = (float(word) for word in words[3:].view(np.float32))
        expected = ALL[name](ops, a, b, c, f, g)
        if name in INTEGERS:
            assert found == expected
            assert signed(expected) == expected
        else:
            assert rounded(expected) == expected
            assert struct.unpack("<f", struct.pack("<i", found))[0] == pytest.approx(expected, rel=2.5e-7)


def test_python_means_what_numpy_computes():
    """The Python meaning is not only self-consistent: some of it against NumPy, which computes the same otherwise."""
    ops, words = PythonOps(), given()
    for x, y, z in words[:, :3].tolist():
        pair = np.array([x, y], np.int32).view(np.int8).astype(np.int64)
        unsigned = np.array([x], np.int32).view(np.uint8).astype(np.int64)
        with np.errstate(over="ignore"):
            assert ops.dp4a(x, y, z, True) == np.int64(z + pair[:4] @ pair[4:]).astype(np.int32)
            assert ops.dp4a(x, y, z, False) == np.int64(z + unsigned @ pair[4:]).astype(np.int32)
            assert ops.mul(x, y) == np.int32(x) * np.int32(y)
        assert ops.lop3(x, 0x0F0F0F0F, 0x08080808, AND_XOR) == (x & 0x0F0F0F0F) ^ 0x08080808
        eight = np.array([x, y], np.int32).view(np.uint8)
        assert ops.prmt(x, y, 0x7362) == eight[[2, 6, 3, 7]].view(np.int32)[0]
        assert ops.extract(x, 12, 4) == (x >> 12 & 15) - 16 * (x >> 15 & 1)
    assert ops.exp2(-math.inf) == 0
    assert ops.exp2(1000.0) == ops.reciprocal(0.0) == math.inf

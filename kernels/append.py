"""Quantise new tokens of a cache and put them where their layout says: one task for each role and head.

Codes and scales are those of `lowbit.kernels.quantize.quantize`, bit for bit, for everything that it accepts. What it
refuses becomes finite: NaN becomes zero and does not count towards its group's scale; infinities, and magnitudes that
fp16 cannot scale, become the largest number of their format. Kernels multiply rows that they hide by zero, which must
not make NaN of them.

Rounding to nearest even is done with integers and additions alone: no instruction set lacks these, and none of them
calls a library function.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .append_fields import (
    BITS,
    COUNT,
    HEAD_DIM,
    HEADS,
    LARGEST,
    OFFSET,
    PERIOD,
    PERIOD_BYTES,
    POSITION,
    ROLE,
    SCALES,
    SCALES_STRIDE,
    SOURCE_HEAD_BYTES,
    SOURCE_K,
    SOURCE_TOKEN_BYTES,
    TABLE,
    WORDS,
    WORDS_STRIDE,
    K,
)
from .plugin import load_f32, load_i8, load_i32, peek, store_f32, store_i8
from .problem import GROUP

TOKEN_BLOCK = 32

_INNER = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_F32 = ir.FloatType()

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_LEAST_NORMAL = 0x38800000  # 2^-14, fp16's
_BIAS = 112 << 23  # what float32's exponent exceeds fp16's by
_HALF = 0x3F000000  # 0.5, whose last place is 2^-24: fp16's smallest number
_LARGEST_HALF = 0x7BFF
_ROUNDER = 0x4B400000  # 1.5 · 2^23, whose last place is 1


class _Lanes:
    """Arithmetic on a scalar, or on a vector of a group's lanes, with constants written as Python numbers."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.builder, self.lanes = builder, lanes

    def type(self, element: ir.Type) -> ir.Type:
        return ir.VectorType(element, self.lanes) if self.lanes > 1 else element

    def int(self, value: int) -> ir.Constant:
        return ir.Constant(self.type(_I32), [value] * self.lanes if self.lanes > 1 else value)

    def load(self, address: Any) -> Any:
        pointer = self.builder.inttoptr(address, self.type(_I32).as_pointer())
        return self.builder.load(pointer, align=4)

    def as_float(self, bits: Any) -> Any:
        return self.builder.bitcast(bits, self.type(_F32))

    def as_bits(self, value: Any) -> Any:
        return self.builder.bitcast(value, self.type(_I32))

    def spread(self, scalar: Any) -> Any:
        vector = ir.VectorType(scalar.type, self.lanes)
        one = self.builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(
            one, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(_I32, self.lanes), [0] * self.lanes)
        )

    def without_nan(self, bits: Any) -> Any:
        magnitude = self.builder.and_(bits, self.int(_MAGNITUDE))
        return self.builder.select(self.builder.icmp_signed(">", magnitude, self.int(_INFINITY)), self.int(0), bits)

    def half(self, magnitude: Any) -> Any:
        """fp16's bits of float32's, neither with a sign: to nearest even, and at most the largest finite number."""
        build = self.builder
        odd = build.and_(build.lshr(magnitude, self.int(13)), self.int(1))
        up = build.add(build.add(magnitude, self.int(0xFFF - _BIAS)), odd)
        normal = build.ashr(up, self.int(13))
        raised = build.fadd(self.as_float(magnitude), self.as_float(self.int(_HALF)))
        small = build.sub(self.as_bits(raised), self.int(_HALF))
        rounded = build.select(build.icmp_signed("<", magnitude, self.int(_LEAST_NORMAL)), small, normal)
        most = self.int(_LARGEST_HALF)
        return build.select(build.icmp_signed(">", rounded, most), most, rounded)


@intrinsic
def group_room(typingctx: Any) -> Any:
    """Address of memory of the calling function's own: a group's floats, then its codes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        room = cgutils.alloca_once(builder, ir.ArrayType(_I32, 2 * GROUP))
        return builder.ptrtoint(room, ir.IntType(64))

    return types.intp(), codegen


@intrinsic
def halve_group(typingctx: Any, x: Any, codes: Any) -> Any:
    """A group of float32 at an address to fp16 at another."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _Lanes(builder, GROUP)
        bits = lanes.without_nan(lanes.load(args[0]))
        sign = builder.and_(builder.lshr(bits, lanes.int(16)), lanes.int(0x8000))
        halves = builder.or_(sign, lanes.half(builder.and_(bits, lanes.int(_MAGNITUDE))))
        target = builder.inttoptr(args[1], lanes.type(_I16).as_pointer())
        builder.store(builder.trunc(halves, lanes.type(_I16)), target, align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def copy_half(typingctx: Any, source: Any, target: Any) -> Any:
    """Two bytes from one address to another."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from_, to = (builder.inttoptr(each, _I16.as_pointer()) for each in args)
        builder.store(builder.load(from_), to)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def quantize_group(typingctx: Any, x: Any, largest: Any, offset: Any, codes: Any, scale: Any) -> Any:
    """A group of float32 at an address to codes of a byte each and a scale; ``offset`` is added to the codes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes, one = _Lanes(builder, GROUP), _Lanes(builder, 1)
        bits = lanes.without_nan(lanes.load(args[0]))
        magnitude = builder.and_(bits, lanes.int(_MAGNITUDE))
        reduce = ir.FunctionType(_I32, [magnitude.type])
        peak = builder.call(
            cgutils.get_or_insert_function(builder.module, reduce, f"llvm.vector.reduce.smax.v{GROUP}i32"), [magnitude]
        )
        scale = one.half(one.as_bits(builder.fdiv(one.as_float(peak), args[1])))
        # fp16 to float32, exactly: numbers below 2^-14 count its last place.
        normal = one.as_float(builder.add(builder.shl(scale, one.int(13)), one.int(_BIAS)))
        small = builder.fmul(builder.sitofp(scale, _F32), ir.Constant(_F32, 2.0**-24))
        exact = builder.select(builder.icmp_signed("<", scale, one.int(0x400)), small, normal)
        zero = ir.Constant(_F32, 0.0)
        some = builder.icmp_signed(">", scale, one.int(0))
        inverse = builder.select(some, builder.fdiv(ir.Constant(_F32, 1.0), exact), zero)
        scaled = builder.fmul(lanes.as_float(bits), lanes.spread(inverse))
        most, least = lanes.spread(args[1]), lanes.spread(builder.fneg(args[1]))
        scaled = builder.select(builder.fcmp_ordered("<", scaled, most), scaled, most)
        scaled = builder.select(builder.fcmp_ordered(">", scaled, least), scaled, least)
        rounder = lanes.int(_ROUNDER)
        whole = builder.sub(lanes.as_bits(builder.fadd(scaled, lanes.as_float(rounder))), rounder)
        stored = builder.add(whole, lanes.spread(builder.trunc(args[2], _I32)))
        target = builder.inttoptr(args[3], lanes.type(_I8).as_pointer())
        builder.store(builder.trunc(stored, lanes.type(_I8)), target, align=4)
        builder.store(builder.trunc(scale, _I16), builder.inttoptr(args[4], _I16.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.int64, types.intp, types.intp), codegen


@njit(**_INNER)
def staged(x: Any, count: Any, room: Any) -> Any:
    """Address of a group's floats: where they are, or a copy that zeros fill up."""
    if count == GROUP:
        return x
    for i in range(GROUP):
        store_f32(room, i, np.float32(0.0))
    for i in range(count):
        store_f32(room, i, load_f32(x, i))
    return room


@njit(**_INNER)
def scatter(codes: Any, count: Any, bits: Any, words: Any, table: Any) -> None:
    """Codes, one a byte or a half, to their places."""
    if bits == 16:
        for i in range(count):
            copy_half(codes + 2 * i, words + (load_i32(table, i) >> 1))
    elif bits == 8:
        for i in range(count):
            store_i8(words, load_i32(table, i) >> 1, load_i8(codes, i))
    else:
        for i in range(count):
            place = load_i32(table, i)
            shift = 4 * (place & 1)
            kept = load_i8(words, place >> 1) & ~(15 << shift)
            store_i8(words, place >> 1, np.int8(kept | (load_i8(codes, i) & 15) << shift))


def build_append() -> Any:
    """The task; heads and roles write disjoint memory."""

    def append(job: int, index: int) -> None:
        heads, head_dim = peek(job, HEADS), peek(job, HEAD_DIM)
        role = index // heads
        head = index - role * heads
        fields = job + 8 * (K + len(ROLE) * role)
        bits, period, offset = peek(fields, BITS), peek(fields, PERIOD), peek(fields, OFFSET)
        largest = np.float32(peek(fields, LARGEST))
        groups = (head_dim + GROUP - 1) // GROUP
        x = peek(job, SOURCE_K + role) + head * peek(job, SOURCE_HEAD_BYTES)
        room = group_room()
        codes = room + 4 * GROUP
        position = peek(job, POSITION)
        for token in range(position, position + peek(job, COUNT)):
            row = token // period
            words = peek(fields, WORDS) + head * peek(fields, WORDS_STRIDE) + row * peek(fields, PERIOD_BYTES)
            table = peek(fields, TABLE) + 4 * (token - row * period) * head_dim
            block = token // TOKEN_BLOCK
            scales = peek(fields, SCALES) + head * peek(fields, SCALES_STRIDE)
            for group in range(groups):
                first = group * GROUP
                count = min(head_dim - first, GROUP)
                values = staged(x + 4 * first, count, room)
                if bits == 16:
                    halve_group(values, codes)
                else:
                    at = (block * groups + group) * TOKEN_BLOCK + token - block * TOKEN_BLOCK
                    quantize_group(values, largest, offset, codes, scales + 2 * at)
                scatter(codes, count, bits, words, table + 4 * first)
            x += peek(job, SOURCE_TOKEN_BYTES)

    return cfunc(types.void(types.intp, types.int64), nopython=True, error_model="numpy")(append)

"""Decode one element: address arithmetic in IR, from the layout's factors."""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from ..layout import Layout
from ..problem import GROUP
from .isa import detect
from .mapping import TOKENS, Infeasible
from .vector import F32, HALF, I8, I32, I64, Emitter, Value


def emit_load_element(
    builder: ir.IRBuilder, layout: Layout, head_dim: int, words: Value, scales: Value, t: Value, d: Value
) -> Value:
    """The float32 value of element (t, d) of a head.

    Raises
    ------
    Infeasible
        For layouts whose strides depend on the capacity (channels outermost) or that fold.
    """
    if layout.factors[0].axis != "T" or layout.fold_rows:
        raise Infeasible(f"{layout.name}: single elements are read from token-major storage without folds")
    emit = Emitter(builder, detect())
    packing = layout.packing
    code = emit.i64(0)
    for factor, stride in zip(layout.factors[1:], layout.strides(TOKENS, head_dim)[1:], strict=True):
        x = t if factor.axis == "T" else d
        if factor.block:
            x = builder.urem(x, emit.i64(factor.block))
        code = builder.add(code, builder.mul(builder.udiv(x, emit.i64(factor.unit)), emit.i64(stride)))
    row = builder.mul(builder.udiv(t, emit.i64(layout.unit("T"))), emit.i64(layout.pitch_bytes(TOKENS, head_dim)))
    block = builder.mul(builder.udiv(code, emit.i64(packing.block_codes)), emit.i64(packing.block_bytes))
    base = emit.at(words, builder.add(row, block))
    if packing.format == "fp16":
        half = emit.load(base, ir.VectorType(HALF, 1))
        return builder.extract_element(emit.widen_half(half), ir.Constant(I32, 0))
    within = builder.urem(code, emit.i64(packing.block_codes))
    byte, shift = (_table(emit, packing.place(np.arange(packing.block_codes))[i], within) for i in range(2))
    raw = builder.lshr(emit.load(base, I8, byte), builder.trunc(shift, I8))
    if packing.bits == 4:
        raw = builder.and_(raw, ir.Constant(I8, 15))
    number = builder.zext(raw, I32)
    if packing.coding == "signed":
        sign = ir.Constant(I32, 1 << (packing.bits - 1))
        number = builder.sub(builder.xor(number, sign), sign)
    else:
        number = builder.sub(number, ir.Constant(I32, packing.offset))
    groups = -(-head_dim // GROUP)
    group = builder.add(
        builder.mul(builder.udiv(t, emit.i64(TOKENS)), emit.i64(groups)), builder.udiv(d, emit.i64(GROUP))
    )
    place = builder.add(builder.mul(group, emit.i64(TOKENS)), builder.urem(t, emit.i64(TOKENS)))
    half = emit.load(scales, ir.VectorType(HALF, 1), builder.mul(place, emit.i64(2)))
    scale = builder.extract_element(emit.widen_half(half), ir.Constant(I32, 0))
    return builder.fmul(builder.sitofp(number, F32), scale)


def _table(emit: Emitter, values: np.ndarray, index: Value) -> Value:
    """``values[index]`` from a constant vector; a shift or a mask where LLVM recognises one."""
    constant = emit.constant(I64, len(values), [int(v) for v in values])
    if len(values) == 1:
        return emit.i64(int(values[0]))
    return emit.builder.extract_element(constant, index)

"""What unsigned codes add to a matrix's products: a minimum for each group of columns.

4-bit codes of many files stand for ``scale · code + minimum`` with codes from 0 to 15. The signed codes that tiles
contract are 8 less, so that y = Σ scale · (x · signed) + Σ_g (8 · scale_g + minimum_g) · Σx_g, the second sum over
groups of 32 columns. ``void add_minima(i8 *scales, i8 *minima, i64 first, i64 count, i64 groups, float *sums, float
*out, i64 stride)`` adds it for ``count`` rows from ``first`` on, both multiples of 32, and a few vectors:
``out[v·stride + i] += Σ_g (8 · scales[g, first + i] + minima[g, first + i]) · sums[v·groups + g]``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from llvmlite import ir

from .isa import Isa
from .machine import triple_of
from .mapping import TOKENS
from .vector import BYTES, F32, HALF, I64, VOID, Emitter, Value

ADD_MINIMA = ir.FunctionType(VOID, [BYTES, BYTES, I64, I64, I64, BYTES, BYTES, I64])


@dataclass(frozen=True)
class MinimaSpec:
    """Everything that the code depends on.

    Parameters
    ----------
    isa : Isa
    rows : int
        Vectors served in one call.
    """

    isa: Isa
    rows: int

    @property
    def symbol(self) -> str:
        """The function's name, which no other code has, on whatever machine it is generated."""
        digest = hashlib.sha256(f"{self.isa.name} {triple_of(self.isa)}".encode()).hexdigest()[:16]
        return f"lowbit_add_minima_{self.rows}_{digest}"


def emit_add_minima(module: ir.Module, spec: MinimaSpec) -> ir.Function:
    """The function for ``spec`` in ``module``."""
    function = ir.Function(module, ADD_MINIMA, spec.symbol)
    names = ("scales", "minima", "first", "count", "groups", "sums", "out", "stride")
    for argument, name in zip(function.args, names, strict=True):
        argument.name = name
    emit = Emitter(ir.IRBuilder(function.append_basic_block("entry")), spec.isa)
    _build(emit, spec, function.args)
    return function


def _build(emit: Emitter, spec: MinimaSpec, args: list[Value]) -> None:
    scales, minima, first, count, groups, sums, out, stride = args
    builder, lanes = emit.builder, spec.isa.lanes
    vector, half = ir.VectorType(F32, lanes), ir.VectorType(HALF, lanes)
    parts = TOKENS // lanes
    eight = emit.constant(F32, lanes, 8.0)
    block_bytes = emit.mul(groups, 2 * TOKENS)
    start = builder.mul(emit.div(first, TOKENS), block_bytes)
    scales, minima = emit.at(scales, start), emit.at(minima, start)
    blocks = emit.begin(emit.div(count, TOKENS))
    at = builder.mul(blocks.index, block_bytes)
    block_scales, block_minima = emit.at(scales, at), emit.at(minima, at)
    rows = [emit.at(out, emit.mul(builder.add(emit.mul(stride, row), emit.mul(blocks.index, TOKENS)), 4))
            for row in range(spec.rows)]  # fmt: skip
    before = [emit.load(row, vector, 4 * lanes * part) for row in rows for part in range(parts)]
    loop = emit.begin(groups, before)
    factors = []
    for part in range(parts):
        place = emit.offset(loop.index, 2 * TOKENS, 2 * lanes * part)
        scale, least = (emit.widen_half(emit.load(base, half, place)) for base in (block_scales, block_minima))
        factors.append(emit.fma(scale, eight, least))
    totals = []
    for row in range(spec.rows):
        index = builder.add(emit.mul(groups, row), loop.index)
        total = emit.splat(emit.load(sums, F32, emit.mul(index, 4)), lanes)
        for part in range(parts):
            totals.append(emit.fma(factors[part], total, loop.carried[row * parts + part]))
    after = emit.end(loop, totals)
    for position, total in enumerate(after):
        emit.store(total, rows[position // parts], 4 * lanes * (position % parts))
    emit.end(blocks)
    builder.ret_void()

"""One online-softmax update of a few rows of scores, in vectors.

``void softmax_tile(float *scores, i64 stride, i64 rows, i64 first, i64 last, i64 count, float *state, float *out, i64
channels, float cap)`` turns ``scores[row·stride + i]``, in units of log2, into weights ``2^(score − maximum)`` for
``first ≤ i < last`` and zeros elsewhere up to ``count``, a multiple of 32.
``state`` holds each row's running maximum and sum; where a maximum grows, the sum and the row's ``channels`` results at
``out`` shrink (Milakov & Gimelshein, arXiv:1805.02867). Scores of a capped softmax come in natural units and become
``cap·tanh(score / cap)`` first.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from llvmlite import ir

from .fold import Combine, fold
from .isa import Isa
from .machine import triple_of
from .mapping import TOKENS
from .vector import BYTES, F32, I32, I64, VOID, Emitter, Value

HIDDEN = -1e30
"""Running maximum of a row that has seen no token, and score of a token that it does not see."""

SMALLEST_EXPONENT = -100.0
"""2 to less than this is 0: nothing beside a sum of at least 1. No product of more with a scale is denormal."""

SMALL_RATIO = 0.25
"""Up to this |y| tanh y is taken from its series, within 3e-7; (1 - e) / (1 + e) would lose its digits."""

LOG2_E = 1.4426950408889634
EXP2 = (1.0, 0.6931471824645996, 0.24022646248340607, 0.05550328642129898, 0.009618489071726799,
         0.0013399930903688073, 0.0001534580806037411)  # fmt: skip
"""2^f for |f| ≤ 1/2: coefficients of the polynomial of degree 6 with the least relative error, 1e-7 in float32."""

_ROUND = 1.5 * 2**23
"""Added to a small float32, it leaves the nearest whole number in the lowest bits."""

SOFTMAX_TILE = ir.FunctionType(VOID, [BYTES, I64, I64, I64, I64, I64, BYTES, BYTES, I64, F32])


@dataclass(frozen=True)
class SoftmaxSpec:
    """Everything that the code of the softmax depends on.

    Parameters
    ----------
    isa : Isa
    capped : bool
        Whether scores are soft-capped.
    """

    isa: Isa
    capped: bool

    @property
    def symbol(self) -> str:
        """The function's name, which no other code has, on whatever machine it is generated."""
        digest = hashlib.sha256(f"{self.isa.name} {triple_of(self.isa)}".encode()).hexdigest()[:16]
        return f"lowbit_{'capped_' if self.capped else ''}softmax_tile_{digest}"


def emit_softmax_tile(module: ir.Module, spec: SoftmaxSpec) -> ir.Function:
    """The function for ``spec`` in ``module``."""
    function = ir.Function(module, SOFTMAX_TILE, spec.symbol)
    names = ("scores", "stride", "rows", "first", "last", "count", "state", "out", "channels", "cap")
    for argument, name in zip(function.args, names, strict=True):
        argument.name = name
    _SoftmaxTile(Emitter(ir.IRBuilder(function.append_basic_block("entry")), spec.isa), spec).build()
    return function


class _SoftmaxTile:
    def __init__(self, emit: Emitter, spec: SoftmaxSpec):
        self.emit, self.spec = emit, spec
        self.lanes = spec.isa.lanes
        self.vector = ir.VectorType(F32, self.lanes)

    def build(self) -> None:
        emit = self.emit
        scores, stride, rows, first, last, count, state, out, channels, self.cap = emit.builder.function.args
        rest = emit.builder.sub(count, last)
        self.blocks = emit.builder.udiv(count, emit.i64(TOKENS))
        loop = emit.begin(rows)
        mine = emit.at(scores, emit.mul(emit.builder.mul(loop.index, stride), 4))
        self._hide(mine, first)
        self._hide(emit.at(mine, emit.mul(last, 4)), rest)
        state = emit.at(state, emit.mul(loop.index, 8))
        before = emit.load(state, F32)
        best = self._largest(mine, before)
        total = self._weights(mine, emit.splat(best, self.lanes))
        change = emit.splat(emit.builder.fsub(before, best), self.lanes)
        shrink = emit.builder.extract_element(self._exp2(change), ir.Constant(I32, 0))
        sums = emit.builder.fmul(emit.load(state, F32, 4), shrink)
        emit.store(best, state)
        emit.store(emit.builder.fadd(sums, total), state, 4)
        grown = emit.builder.fcmp_ordered(">", best, before)
        with emit.builder.if_then(grown, likely=False):
            mine = emit.at(out, emit.mul(emit.builder.mul(loop.index, channels), 4))
            self._shrink(mine, channels, shrink)
        emit.end(loop)
        emit.builder.ret_void()

    def _hide(self, scores: Value, count: Value) -> None:
        emit = self.emit
        loop = emit.begin(count)
        emit.store(ir.Constant(F32, HIDDEN), scores, emit.mul(loop.index, 4))
        emit.end(loop)

    def _parts(self, loop_index: Value) -> list[Value]:
        """Byte offsets of the vectors of 32 tokens."""
        start = self.emit.mul(loop_index, 4 * TOKENS)
        return [self.emit.builder.add(start, self.emit.i64(4 * i)) for i in range(0, TOKENS, self.lanes)]

    def _whole(self, vector: Value, combine: Combine) -> Value:
        lanes = (0,) * self.lanes
        return self.emit.builder.extract_element(fold(self.emit, [vector], [lanes], [0], combine), ir.Constant(I32, 0))

    def _largest(self, scores: Value, before: Value) -> Value:
        """The larger of ``before`` and all scores; capped scores are stored."""
        emit = self.emit
        count = TOKENS // self.lanes
        loop = emit.begin(self.blocks, [emit.splat(before, self.lanes)] * count)
        largest = []
        for offset, peak in zip(self._parts(loop.index), loop.carried, strict=True):
            score = emit.load(scores, self.vector, offset)
            if self.spec.capped:
                score = self._capped(score)
                emit.store(score, scores, offset)
            largest.append(emit.maximum(score, peak))
        peaks = emit.end(loop, largest)
        peak = peaks[0]
        for other in peaks[1:]:
            peak = emit.maximum(peak, other)
        return self._whole(peak, emit.maximum)

    def _weights(self, scores: Value, best: Value) -> Value:
        """Scores become weights; returns their sum."""
        emit = self.emit
        zero = emit.constant(F32, self.lanes, 0.0)
        loop = emit.begin(self.blocks, [zero] * (TOKENS // self.lanes))
        sums = []
        for offset, total in zip(self._parts(loop.index), loop.carried, strict=True):
            weight = self._exp2(emit.builder.fsub(emit.load(scores, self.vector, offset), best))
            emit.store(weight, scores, offset)
            sums.append(emit.builder.fadd(total, weight))
        sums = emit.end(loop, sums)
        total = sums[0]
        for other in sums[1:]:
            total = emit.builder.fadd(total, other)
        return self._whole(total, emit.builder.fadd)

    def _shrink(self, out: Value, channels: Value, factor: Value) -> None:
        """Multiply a row's results; its channels are a multiple of 8."""
        emit = self.emit
        width = min(self.lanes, 8)
        vector = ir.VectorType(F32, width)
        loop = emit.begin(emit.builder.udiv(channels, emit.i64(width)))
        offset = emit.mul(loop.index, 4 * width)
        emit.store(emit.builder.fmul(emit.load(out, vector, offset), emit.splat(factor, width)), out, offset)
        emit.end(loop)

    def _exp2(self, x: Value) -> Value:
        """2^x for x ≤ 0; 0 below `SMALLEST_EXPONENT`."""
        emit = self.emit
        lanes = self.lanes
        least = emit.constant(F32, lanes, SMALLEST_EXPONENT)
        nothing = emit.builder.fcmp_ordered("<", x, least)
        x = emit.maximum(x, least)
        shifted = emit.builder.fadd(x, emit.constant(F32, lanes, _ROUND))
        fraction = emit.builder.fsub(x, emit.builder.fsub(shifted, emit.constant(F32, lanes, _ROUND)))
        power = emit.constant(F32, lanes, EXP2[-1])
        for coefficient in EXP2[-2::-1]:
            power = emit.fma(power, fraction, emit.constant(F32, lanes, coefficient))
        words = ir.VectorType(I32, lanes)
        exponent = emit.builder.shl(emit.builder.bitcast(shifted, words), emit.constant(I32, lanes, 23))
        power = emit.builder.bitcast(emit.builder.add(emit.builder.bitcast(power, words), exponent), power.type)
        return emit.builder.select(nothing, emit.constant(F32, lanes, 0.0), power)

    def _capped(self, score: Value) -> Value:
        """cap·tanh(score / cap) in units of log2: tanh |y| = (1 − e) / (1 + e), e = exp(−2|y|), or its series."""
        emit = self.emit
        lanes = self.lanes
        cap = emit.splat(self.cap, lanes)
        ratio = emit.builder.fdiv(score, cap)
        size = emit.unary("fabs", ratio)
        e = self._exp2(emit.builder.fmul(size, emit.constant(F32, lanes, -2 * LOG2_E)))
        one = emit.constant(F32, lanes, 1.0)
        tanh = emit.builder.fdiv(emit.builder.fsub(one, e), emit.builder.fadd(one, e))
        signed = emit.builder.call(
            emit.intrinsic(f"llvm.copysign.v{lanes}f32", tanh.type, [tanh.type] * 2), [tanh, ratio]
        )
        # tanh y = y·(1 − y²/3 + 2y⁴/15 − 17y⁶/315 …), times the score instead of y·cap, which may leave float32.
        square = emit.builder.fmul(ratio, ratio)
        series = emit.constant(F32, lanes, -17 / 315)
        for coefficient in (2 / 15, -1 / 3, 1.0):
            series = emit.fma(series, square, emit.constant(F32, lanes, coefficient))
        small = emit.builder.fcmp_ordered("<", size, emit.constant(F32, lanes, SMALL_RATIO))
        capped = emit.builder.select(small, emit.builder.fmul(score, series), emit.builder.fmul(signed, cap))
        capped = emit.builder.fmul(capped, emit.constant(F32, lanes, LOG2_E))
        # Hidden tokens stay hidden: no cap lifts them to where a visible score could be.
        hidden = emit.builder.fcmp_ordered("<", score, emit.constant(F32, lanes, HIDDEN / 2))
        return emit.builder.select(hidden, score, capped)

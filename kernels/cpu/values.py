"""Accumulate a tile: a run of values weighted by a few rows of probabilities.

``void accumulate_tile(i8 *words, i8 *scales, i64 first, i64 count, float *p, i64 stride, i8 *scratch, float *out, i64
out_stride)`` computes ``out[row·out_stride + d] += Σ_i p[row·stride + i] · V[first + i, d]`` over ``count`` tokens,
both multiples of 32, of one head. Probabilities are not negative.

A value's scale is folded into its probability first, once for each 32-channel group: p'[row, group, i] = p·s[i,
group]. The integer pipeline rounds p' to 7 bits, one scale for 32 tokens, so that the contraction of those tokens
stays in integers. ``scratch`` holds p' in the order in which registers meet it, then for each (group, row, 32 tokens)
the scale of its codes and the start value of its accumulators: see `scratch_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from ..quantize import DITHER, LARGEST_WEIGHT
from .fold import fold
from .keys import Key, dequantised
from .mapping import TOKENS, Lanes, Region
from .multiply import IntegerDots, SmallOperand, Unpacker, arranged, float_offset, integer_form
from .share import Share
from .spec import TileSpec
from .vector import BYTES, F32, HALF, I8, I32, I64, VOID, Emitter, Value

FACT_BYTES = 8
SMALLEST_WEIGHT = 1e-30
"""Products of probability and scale below this are nothing; it keeps a block without weight from dividing by zero."""


def scratch_bytes(spec: TileSpec, block: int) -> int:
    """Bytes of scratch for ``block`` tokens: codes or floats of p', then a scale and a start for each 32 of them."""
    pairs = max(spec.groups, 1) * spec.rows
    return pairs * (block * (1 if spec.integer else 4) + block // TOKENS * FACT_BYTES)


ACCUMULATE_TILE = ir.FunctionType(VOID, [BYTES, BYTES, I64, I64, BYTES, I64, BYTES, BYTES, I64])


def emit_accumulate_tile(module: ir.Module, spec: TileSpec) -> ir.Function:
    """The tile function for ``spec`` in ``module``, emitted on first use."""
    if spec.symbol in module.globals:
        return module.globals[spec.symbol]
    function = ir.Function(module, ACCUMULATE_TILE, spec.symbol)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    names = ("words", "scales", "first", "count", "p", "stride", "scratch", "out", "out_stride")
    for argument, name in zip(function.args, names, strict=True):
        argument.name = name
    _AccumulateTile(Emitter(ir.IRBuilder(function.append_basic_block("entry")), spec.isa), spec).build()
    return function


class _AccumulateTile:
    def __init__(self, emit: Emitter, spec: TileSpec):
        self.emit, self.spec, self.plan = emit, spec, spec.plan
        self.form = integer_form(spec.layout.packing, "v", spec.isa) if spec.integer else None
        self.element_bytes = 1 if spec.integer else 4
        self.groups = max(spec.groups, 1)
        if self.form is not None:
            self.offset = self.form.offset
        else:
            self.offset = float_offset(spec.layout.packing)

    def build(self) -> None:
        emit, plan = self.emit, self.plan
        self.words, self.scales, first, self.count, self.p, self.stride, self.scratch, self.out, self.out_stride = (
            emit.builder.function.args
        )
        self.pair_bytes = emit.builder.mul(self.count, emit.i64(self.element_bytes))
        pairs = emit.i64(self.groups * self.spec.rows)
        self.facts = emit.at(self.scratch, emit.builder.mul(pairs, self.pair_bytes))
        self.trips = emit.builder.udiv(self.count, emit.i64(TOKENS))
        self.base = emit.at(
            self.words, emit.builder.mul(emit.builder.udiv(first, emit.i64(plan.tile)), emit.i64(plan.pitch_bytes))
        )
        if self.spec.groups:
            block = emit.builder.mul(first, emit.i64(2 * self.spec.groups))
            self.scales = emit.at(self.scales, block)
        self._fold_scales()
        if plan.main is not None and plan.trips:
            if plan.trips == 1:
                self._channels(plan.main, emit.i64(0))
            else:
                share = Share(max(self.spec.head_dim // plan.trips, 1), per_block=True)
                outer = emit.begin(emit.opaque(plan.trips), share=share)
                self._channels(plan.main, outer.index)
                emit.end(outer)
        if plan.tail is not None:
            self._channels(plan.tail, emit.i64(plan.trips))
        emit.builder.ret_void()

    # -- folding scales into probabilities ------------------------------------------------------------------------

    def _fold_scales(self) -> None:
        emit, spec = self.emit, self.spec
        lanes = emit.isa.lanes
        outer = emit.begin(emit.opaque(self.groups), share=Share(max(spec.head_dim // self.groups, 1), per_block=True))
        inner = emit.begin(self.trips, share=Share(max(TOKENS * spec.head_dim // self.groups, 1)))
        scales = [self._scale_part(inner.index, outer.index, part) for part in range(0, TOKENS, lanes)]
        start = emit.builder.mul(inner.index, emit.i64(4 * TOKENS))
        step = emit.builder.mul(inner.index, emit.i64(TOKENS * self.element_bytes))
        for row in range(spec.rows):
            base = emit.at(self.p, emit.builder.add(start, emit.builder.mul(self.stride, emit.i64(4 * row))))
            parts = [emit.load(base, ir.VectorType(F32, lanes), 4 * part) for part in range(0, TOKENS, lanes)]
            if spec.groups:
                parts = [emit.builder.fmul(p, s) for p, s in zip(parts, scales, strict=True)]
            if self.form is not None:
                whole = self._rounded(parts, row, outer.index, inner.index)
            else:
                whole = emit.gather(parts, [divmod(i, lanes) for i in range(TOKENS)])
                if self.offset:
                    owed = emit.builder.fmul(emit.total(parts), ir.Constant(F32, -float(self.offset)))
                    self._store_fact(row, outer.index, inner.index, 4, owed)
            emit.store(emit.shuffle(whole, self.plan.any.order), emit.at(self._pair(row, outer.index), step))
        emit.end(inner)
        emit.end(outer)

    def _scale_part(self, trip: Value, group: Value, part: int) -> Value:
        emit = self.emit
        if not self.spec.groups:
            return None
        block = emit.builder.add(emit.builder.mul(trip, emit.i64(self.spec.groups)), group)
        offset = emit.builder.add(emit.builder.mul(block, emit.i64(2 * TOKENS)), emit.i64(2 * part))
        return emit.widen_half(emit.load(self.scales, ir.VectorType(HALF, emit.isa.lanes), offset))

    def _rounded(self, parts: list[Value], row: int, group: Value, trip: Value) -> Value:
        """Codes of 32 products as bytes; their scale and the accumulators' start value are stored."""
        emit = self.emit
        lanes = emit.isa.lanes
        largest = emit.largest([*parts, emit.constant(F32, lanes, SMALLEST_WEIGHT)])
        inverse = emit.splat(emit.builder.fdiv(ir.Constant(F32, float(LARGEST_WEIGHT)), largest), lanes)
        scale = emit.builder.fmul(largest, ir.Constant(F32, 1.0 / LARGEST_WEIGHT))
        self._store_fact(row, group, trip, 0, scale)
        codes = []
        for i, part in enumerate(parts):
            threshold = emit.constant(F32, lanes, DITHER[i * lanes : (i + 1) * lanes])
            codes.append(emit.builder.fptosi(emit.fma(part, inverse, threshold), ir.VectorType(I32, lanes)))
        if self.offset:
            total = emit.total(codes)
            self._store_fact(row, group, trip, 4, emit.builder.mul(total, ir.Constant(I32, -self.offset)))
        return emit.narrow(codes)

    def _pair(self, row: int, group: Value) -> Value:
        emit = self.emit
        number = emit.builder.add(emit.builder.mul(group, emit.i64(self.spec.rows)), emit.i64(row))
        return emit.at(self.scratch, emit.builder.mul(number, self.pair_bytes))

    def _fact(self, row: int, group: Value, trip: Value) -> Value:
        emit = self.emit
        number = emit.builder.add(emit.builder.mul(group, emit.i64(self.spec.rows)), emit.i64(row))
        place = emit.builder.add(emit.builder.mul(number, self.trips), trip)
        return emit.at(self.facts, emit.builder.mul(place, emit.i64(FACT_BYTES)))

    def _store_fact(self, row: int, group: Value, trip: Value, offset: int, value: Value) -> None:
        self.emit.store(value, self._fact(row, group, trip), offset)

    # -- the contraction ------------------------------------------------------------------------------------------

    def _channels(self, region: Region, trip: Value) -> None:
        """Contract the ``trip``-th block of output channels with all tokens."""
        emit, spec, plan = self.emit, self.spec, self.plan
        lanes = emit.isa.lanes
        width = plan.main.outputs if plan.main is not None else region.outputs
        channel = emit.builder.mul(trip, emit.i64(width))
        first_group = emit.builder.udiv(channel, emit.i64(TOKENS)) if spec.groups else emit.i64(0)
        names = [(row, output.o) for row in range(spec.rows) for output in region.lanes]
        repeats = plan.trips if region is plan.main else 1
        share = Share(max(TOKENS * spec.head_dim // repeats, 1))
        loop = emit.begin(self.trips, [emit.constant(F32, lanes, 0.0)] * len(names), share)
        totals: dict[Key, Value] = dict(zip(names, loop.carried, strict=True))
        tokens = emit.builder.mul(loop.index, emit.i64(TOKENS // plan.tile * plan.pitch_bytes))
        at = emit.at(self.base, emit.builder.add(tokens, emit.builder.mul(trip, emit.i64(plan.channel_step_bytes))))
        slot = emit.builder.mul(loop.index, emit.i64(TOKENS * self.element_bytes))

        def group_number(group: int) -> Value:
            return emit.builder.add(first_group, emit.i64(group)) if group else first_group

        def pointer(row: int, group: int) -> Value:
            return emit.at(self._pair(row, group_number(group)), slot)

        def fact(row: int, group: int) -> Value:
            return self._fact(row, group_number(group), loop.index)

        small = SmallOperand(emit, region, I8 if spec.integer else F32, pointer)
        unpacker = Unpacker(emit, spec, at, region)
        if self.form is not None:
            self._integer(region, small, unpacker, fact, totals)
        else:
            self._float(region, small, unpacker, totals)
        after = emit.end(loop, [totals[name] for name in names])
        self._finish(region, dict(zip(names, after, strict=True)), channel, first_group)

    def _integer(
        self,
        region: Region,
        small: SmallOperand,
        unpacker: Unpacker,
        fact: Callable[[int, int], Value],
        totals: dict[Key, Value],
    ) -> None:
        emit, spec = self.emit, self.spec
        lanes = emit.isa.lanes
        assert self.form is not None
        dots = IntegerDots(emit, self.form)
        sums: dict[Key, Value] = {}
        for unit in region.units:
            for output, w in zip(unit.outputs, arranged(emit, unit, unpacker), strict=True):
                groups = self._groups(output.o, region)
                for row in range(spec.rows):
                    key = (row, output.o)
                    if key not in sums:
                        sums[key] = self._start(row, output, groups, fact)
                    dots.add(key, sums, w, small.load(row, output, groups))
            dots.settle(sums)
        dots.finish(sums)
        for (row, outputs), total in sums.items():
            scale = self._per_lane(row, self._groups(outputs, region), fact, F32, 0)
            values = emit.builder.sitofp(total, ir.VectorType(F32, lanes))
            totals[row, outputs] = emit.fma(values, scale, totals[row, outputs])

    def _start(self, row: int, output: Lanes, groups: Sequence[int], fact: Callable[[int, int], Value]) -> Value:
        """Start value of an accumulator: the correction for offset codes, on the first lane of each output."""
        emit = self.emit
        lanes = emit.isa.lanes
        if not self.offset:
            return emit.constant(I32, lanes, 0)
        start = self._per_lane(row, groups, fact, I32, 4)
        if len(set(output.o)) == lanes:
            return start
        leads = [-1 if output.o.index(o) == lane else 0 for lane, o in enumerate(output.o)]
        return emit.builder.and_(start, emit.constant(I32, lanes, leads))

    def _per_lane(
        self, row: int, groups: Sequence[int], fact: Callable[[int, int], Value], element: ir.Type, offset: int
    ) -> Value:
        """A fact of each lane's group."""
        emit = self.emit
        names = sorted(set(groups))
        splats = [emit.splat(emit.load(fact(row, group), element, offset), len(groups)) for group in names]
        return emit.gather(splats, [(names.index(group), lane) for lane, group in enumerate(groups)])

    def _float(self, region: Region, small: SmallOperand, unpacker: Unpacker, totals: dict[Key, Value]) -> None:
        emit, spec = self.emit, self.spec
        for unit in region.units:
            register = unpacker.register(unit.sources[0])
            for part, output in enumerate(unit.outputs):
                w = dequantised(emit, spec, register, part)
                for row in range(spec.rows):
                    x = small.load(row, output, self._groups(output.o, region))
                    totals[row, output.o] = emit.pin(emit.fma(w, x, totals[row, output.o]))

    def _groups(self, outputs: Sequence[int], region: Region) -> list[int]:
        """Group of each lane relative to the block's first; channels past a short row borrow the last one."""
        if not self.spec.groups:
            return [0] * len(outputs)
        return [min(o, region.outputs - 1) // TOKENS for o in outputs]

    def _finish(self, region: Region, totals: dict[Key, Value], channel: Value, first_group: Value) -> None:
        """Add the block's totals to ``out``."""
        emit = self.emit
        step = min(emit.isa.lanes, region.outputs)
        names = [output.o for output in region.lanes]
        for row in range(self.spec.rows):
            for start in range(0, region.outputs, step):
                wanted = range(start, min(start + step, region.outputs))
                total = fold(emit, [totals[row, name] for name in names], names, wanted)
                if self.offset and self.form is None:
                    group = emit.builder.add(first_group, emit.i64(start // TOKENS))
                    total = emit.builder.fadd(total, emit.splat(self._correction(row, group), len(wanted)))
                where = emit.builder.add(
                    emit.builder.mul(emit.builder.add(channel, emit.i64(start)), emit.i64(4)),
                    emit.builder.mul(self.out_stride, emit.i64(4 * row)),
                )
                before = emit.load(self.out, ir.VectorType(F32, len(wanted)), where)
                emit.store(emit.builder.fadd(total, before), self.out, where)

    def _correction(self, row: int, group: Value) -> Value:
        """Sum over all tokens of what offset codes of the float pipeline owe."""
        emit = self.emit
        loop = emit.begin(self.trips, [ir.Constant(F32, 0.0)])
        owed = emit.load(self._fact(row, group, loop.index), F32, 4)
        (total,) = emit.end(loop, [emit.builder.fadd(loop.carried[0], owed)])
        return total

"""Accumulate a tile: a run of values weighted by a few rows of probabilities.

``void accumulate_tile(i8 *words, i8 *scales, i64 first, i64 count, float *p, i64 stride, i8 *scratch, float *out, i64
out_stride)`` computes ``out[row·out_stride + d] += Σ_i p[row·stride + i] · V[first + i, d]`` over ``count`` tokens,
both multiples of 32, of one head. Probabilities are not negative.

Tokens are walked 32 at a time, so that values are read in the order in which they are stored. A value's scale is folded
into its probability first, once for each 32-channel group: p'[row, group, i] = p·s[i, group]. The integer pipeline
rounds p' to 7 bits, one scale for the 32 tokens, so that their contraction stays in integers. ``scratch`` holds the 32
tokens' p' in the order in which registers meet it, then the scale of its codes and the start value of its accumulators
for each (group, row): see `scratch_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from llvmlite import ir

from ..quantize import DITHER, LARGEST_WEIGHT
from .bfloat import WeightedByUnit
from .fold import Combine, fold
from .keys import Key, dequantised
from .mapping import TOKENS, Lanes, Region
from .matrix import MatrixUnit, sums_of
from .multiply import IntegerDots, SmallOperand, Unpacker, arranged, float_offset, integer_form
from .share import Share
from .spec import TileSpec
from .vector import BYTES, F32, HALF, I8, I32, I64, VOID, Emitter, Value

FACT_BYTES = 8
FOLDED_ROWS = 4
"""Rows whose products with scales stay in registers between the two steps of rounding; half of it with 16 registers."""

SMALLEST_WEIGHT = 1e-30
"""Products of probability and scale below this are nothing; it keeps a block without weight from dividing by zero."""


def scratch_bytes(spec: TileSpec) -> int:
    """Bytes of scratch: codes or floats of p' of 32 tokens, then a scale and a start for each (group, row).

    The bfloat pipeline has room of its own.
    """
    if spec.bfloat:
        return 0
    return max(spec.groups, 1) * spec.rows * (TOKENS * (1 if spec.integer else 4) + FACT_BYTES)


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
    emit = Emitter(ir.IRBuilder(function.append_basic_block("entry")), spec.isa)
    (WeightedByUnit if spec.bfloat else _AccumulateTile)(emit, spec).build()
    return function


def _steps(spec: TileSpec) -> tuple[int, int]:
    """Channels whose scales are folded and that are contracted together, and how often that is done."""
    plan = spec.plan
    width = plan.main.outputs if plan.main is not None else 0
    channels = math.lcm(width, TOKENS) if spec.groups and width else plan.trips * width
    return channels, plan.trips * width // channels if channels else 0


def accumulated_per_iteration(spec: TileSpec) -> int:
    """Codes that one iteration of the hot loop consumes: of a few channels, or of whole rows where there are few."""
    if spec.bfloat:
        return TOKENS * spec.plan.any.outputs
    channels, steps = _steps(spec)
    return TOKENS * (channels if steps > 2 else spec.head_dim)


class _AccumulateTile:
    def __init__(self, emit: Emitter, spec: TileSpec):
        self.emit, self.spec, self.plan = emit, spec, spec.plan
        self.form = integer_form(spec.layout.packing, "v", spec.isa, spec.matrix) if spec.integer else None
        self.element_bytes = 1 if spec.integer else 4
        self.groups = max(spec.groups, 1)
        self.offset = self.form.offset if self.form is not None else float_offset(spec.layout.packing)

    def build(self) -> None:
        emit, spec, plan = self.emit, self.spec, self.plan
        words, scales, first, count, p, self.stride, self.scratch, self.out, self.out_stride = (
            emit.builder.function.args
        )
        if spec.matrix:
            assert self.form is not None
            self.matrix = MatrixUnit(emit, spec, self.form)
        words = emit.at(words, emit.mul(emit.builder.udiv(first, emit.i64(plan.tile)), plan.pitch_bytes))
        scales = emit.at(scales, emit.mul(first, 2 * spec.groups))
        pairs = self.groups * spec.rows
        self.facts = emit.at(self.scratch, pairs * TOKENS * self.element_bytes)
        loop = emit.begin(emit.builder.udiv(count, emit.i64(TOKENS)), share=Share(TOKENS * spec.head_dim))
        self.p = emit.at(p, emit.mul(loop.index, 4 * TOKENS))
        self.scales = emit.at(scales, emit.mul(loop.index, 2 * TOKENS * spec.groups))
        emit.prefetch_scales(self.scales, spec.groups, spec.prefetched_scale_blocks)
        self._tokens(emit.at(words, emit.mul(loop.index, TOKENS // plan.tile * plan.pitch_bytes)))
        emit.end(loop)
        if spec.matrix:
            self.matrix.release()
        emit.builder.ret_void()

    def _tokens(self, base: Value) -> None:
        """32 tokens, some channels at a time: the next ones' scales are folded before these are contracted.

        Neither memory nor the multipliers then wait for weights that are being prepared.
        """
        emit, plan = self.emit, self.plan
        width = plan.main.outputs if plan.main is not None else 0
        channels, steps = _steps(self.spec)
        groups = channels // TOKENS if self.spec.groups else self.groups
        trips = channels // width if width else 0

        def fold(step: Value, count: int = groups) -> None:
            for i in range(count):
                self._fold_scales(emit.offset(step, groups, i))

        def contract(step: Value, count: int = trips) -> None:
            for i in range(count):
                trip = emit.offset(step, trips, i)
                assert plan.main is not None
                self._channels(plan.main, emit.at(base, emit.mul(trip, plan.channel_step_bytes)), trip)

        if steps:
            fold(emit.i64(0))
        if steps > 2:
            loop = emit.begin(emit.opaque(steps - 1), share=Share(TOKENS * channels))
            fold(emit.offset(loop.index, 1, 1))
            contract(loop.index)
            emit.end(loop)
        elif steps == 2:
            fold(emit.i64(1))
            contract(emit.i64(0))
        fold(emit.i64(steps), self.groups - steps * groups)
        if steps:
            contract(emit.i64(steps - 1))
        contract(emit.i64(steps), plan.trips - steps * trips)
        if plan.tail is not None:
            self._channels(plan.tail, emit.at(base, plan.trips * plan.channel_step_bytes), emit.i64(plan.trips))

    # -- folding scales into probabilities ------------------------------------------------------------------------

    def _fold_scales(self, group: Value) -> None:
        """p' of the 32 tokens for one group, every row; a few rows at a time stay in registers."""
        emit, spec = self.emit, self.spec
        lanes = emit.isa.lanes
        order = self.plan.any.order
        if spec.groups:
            halves = emit.at(self.scales, emit.mul(group, 2 * TOKENS))
            load = ir.VectorType(HALF, lanes)
            scales = [emit.widen_half(emit.load(halves, load, 2 * part)) for part in range(0, TOKENS, lanes)]
        step = FOLDED_ROWS if emit.isa.registers > 16 else FOLDED_ROWS // 2
        for start in range(0, spec.rows, step):
            rows = range(start, min(start + step, spec.rows))
            products = []
            for row in rows:
                base = emit.at(self.p, emit.mul(self.stride, 4 * row))
                parts = [emit.load(base, ir.VectorType(F32, lanes), 4 * part) for part in range(0, TOKENS, lanes)]
                if spec.groups:
                    parts = [emit.builder.fmul(part, scale) for part, scale in zip(parts, scales, strict=True)]
                products.append(parts)
            prepared = self._rounded(products, group, start) if self.form else self._plain(products, group, start)
            for row, whole in zip(rows, prepared, strict=True):
                emit.store(emit.shuffle(whole, order), self._pair(row, group))

    def _plain(self, products: list[list[Value]], group: Value, first: int) -> list[Value]:
        """p' as floats; what offset codes owe is stored."""
        emit = self.emit
        lanes = emit.isa.lanes
        if self.offset:
            sums = [_all(emit, parts, emit.builder.fadd) for parts in products]
            totals = fold(emit, sums, [(row,) * lanes for row in range(len(sums))], range(len(sums)))
            self._store_facts(
                first, group, 1, emit.builder.fmul(totals, emit.constant(F32, len(sums), -float(self.offset)))
            )
        return [emit.gather(parts, [divmod(i, lanes) for i in range(TOKENS)]) for parts in products]

    def _rounded(self, products: list[list[Value]], group: Value, first: int) -> list[Value]:
        """Codes of p' as bytes; their scale and the accumulators' start value are stored."""
        emit, form = self.emit, self.form
        assert form is not None
        lanes, rows = emit.isa.lanes, len(products)
        peaks = [_all(emit, parts, emit.maximum) for parts in products]
        names = [(row,) * lanes for row in range(rows)]
        peak = emit.maximum(
            fold(emit, peaks, names, range(rows), emit.maximum), emit.constant(F32, rows, SMALLEST_WEIGHT)
        )
        inverse = emit.builder.fdiv(emit.constant(F32, rows, float(LARGEST_WEIGHT)), peak)
        step = emit.constant(F32, rows, 1.0 / (LARGEST_WEIGHT * form.multiple))
        self._store_facts(first, group, 0, emit.builder.fmul(peak, step))
        dither = [emit.constant(F32, lanes, DITHER[i : i + lanes]) for i in range(0, TOKENS, lanes)]
        words = []
        for row, parts in enumerate(products):
            factor = emit.shuffle(inverse, [row] * lanes)
            rounded = (emit.fma(part, factor, threshold) for part, threshold in zip(parts, dither, strict=True))
            words.append([emit.builder.fptosi(each, ir.VectorType(I32, lanes)) for each in rounded])
        if self.offset:
            sums = [_all(emit, each, emit.builder.add) for each in words]
            totals = fold(emit, sums, names, range(rows))
            self._store_facts(first, group, 1, emit.builder.mul(totals, emit.constant(I32, rows, -self.offset)))
        return emit.narrow(words)

    def _pair(self, row: int, group: Value) -> Value:
        size = TOKENS * self.element_bytes
        return self.emit.at(self.emit.at(self.scratch, self.emit.mul(group, self.spec.rows * size)), row * size)

    def _fact(self, kind: int, row: int, group: Value) -> Value:
        """Where fact ``kind`` of (group, row) is: 0 is the scale of its codes, 1 the start of its accumulators."""
        start = kind * 4 * self.groups * self.spec.rows + 4 * row
        return self.emit.at(self.emit.at(self.facts, self.emit.mul(group, 4 * self.spec.rows)), start)

    def _store_facts(self, first: int, group: Value, kind: int, rows: Value) -> None:
        self.emit.store(rows, self._fact(kind, first, group))

    # -- the contraction ------------------------------------------------------------------------------------------

    def _channels(self, region: Region, base: Value, trip: Value) -> None:
        """Contract the ``trip``-th block of output channels with the 32 tokens."""
        emit, spec, plan = self.emit, self.spec, self.plan
        width = plan.main.outputs if plan.main is not None else region.outputs
        channel = emit.mul(trip, width)
        first = emit.div(channel, TOKENS) if spec.groups else emit.i64(0)

        def group_number(group: int) -> Value:
            return emit.offset(first, 1, group)

        small = SmallOperand(
            emit, region, I8 if spec.integer else F32, lambda row, group: self._pair(row, group_number(group))
        )
        unpacker = Unpacker(emit, spec, base, region)
        if spec.matrix:
            sums = self._by_matrix(region, unpacker, first)
        elif self.form is not None:
            sums = self._integer(region, small, unpacker, first)
        else:
            sums = self._float(region, small, unpacker)
        names = [output.o for output in region.lanes]
        step = min(emit.isa.lanes, region.outputs)
        for row in range(spec.rows):
            out = emit.at(self.out, emit.mul(emit.plus(emit.mul(self.out_stride, row), channel), 4))
            for start in range(0, region.outputs, step):
                wanted = range(start, min(start + step, region.outputs))
                total = fold(emit, [sums[row, name] for name in names], names, wanted)
                before = emit.load(out, ir.VectorType(F32, len(wanted)), 4 * start)
                group = group_number(min(start, region.outputs - 1) // TOKENS)
                emit.store(self._added(before, total, row, group), out, 4 * start)

    def _added(self, before: Value, total: Value, row: int, group: Value) -> Value:
        """``before`` and the 32 tokens' ``total`` of one group's channels."""
        emit = self.emit
        lanes = total.type.count
        if self.form is None:
            if self.offset:
                before = emit.builder.fadd(before, emit.splat(emit.load(self._fact(1, row, group), F32), lanes))
            return emit.builder.fadd(total, before)
        scale = emit.splat(emit.load(self._fact(0, row, group), F32), lanes)
        return emit.fma(emit.builder.sitofp(total, ir.VectorType(F32, lanes)), scale, before)

    def _integer(self, region: Region, small: SmallOperand, unpacker: Unpacker, first: Value) -> dict[Key, Value]:
        emit, spec = self.emit, self.spec
        assert self.form is not None
        dots = IntegerDots(emit, self.form)
        sums: dict[Key, Value] = {}
        for unit in region.units:
            for output, w in zip(unit.outputs, arranged(emit, unit, unpacker), strict=True):
                groups = self._groups(output.o, region)
                for row in range(spec.rows):
                    key = (row, output.o)
                    if key not in sums:
                        sums[key] = self._start(row, output, groups, first)
                    dots.add(key, sums, w, small.load(row, output, groups))
            dots.settle(sums)
        dots.finish(sums)
        return sums

    def _by_matrix(self, region: Region, unpacker: Unpacker, first: Value) -> dict[Key, Value]:
        """Integer sums of one region, from the matrix unit; its forms need no correction."""
        emit = self.emit
        sums = self.matrix.sums
        self.matrix.contract(
            region,
            unpacker,
            lambda group: (self._pair(0, emit.offset(first, 1, group)), TOKENS),
            lambda key: None,
            sums,
        )
        return {
            (row, outputs): sums_of(emit, emit.at(sums, place), row)
            for (outputs, _), place in self.matrix.places(region).items()
            for row in range(self.spec.rows)
        }

    def _start(self, row: int, output: Lanes, groups: Sequence[int], first: Value) -> Value:
        """Start value of an accumulator: the correction for offset codes, on the first lane of each output."""
        emit = self.emit
        lanes = emit.isa.lanes
        if not self.offset:
            return emit.constant(I32, lanes, 0)
        names = sorted(set(groups))
        facts = (self._fact(1, row, emit.builder.add(first, emit.i64(group))) for group in names)
        splats = [emit.splat(emit.load(fact, I32), lanes) for fact in facts]
        start = emit.gather(splats, [(names.index(group), lane) for lane, group in enumerate(groups)])
        if len(set(output.o)) == lanes:
            return start
        leads = [-1 if output.o.index(o) == lane else 0 for lane, o in enumerate(output.o)]
        return emit.builder.and_(start, emit.constant(I32, lanes, leads))

    def _float(self, region: Region, small: SmallOperand, unpacker: Unpacker) -> dict[Key, Value]:
        emit, spec = self.emit, self.spec
        zero = emit.constant(F32, emit.isa.lanes, 0.0)
        sums: dict[Key, Value] = {(row, output.o): zero for row in range(spec.rows) for output in region.lanes}
        for unit in region.units:
            register = unpacker.register(unit.sources[0])
            for part, output in enumerate(unit.outputs):
                w = dequantised(emit, spec, register, part)
                for row in range(spec.rows):
                    x = small.load(row, output, self._groups(output.o, region))
                    sums[row, output.o] = emit.pin(emit.fma(w, x, sums[row, output.o]))
        return sums

    def _groups(self, outputs: Sequence[int], region: Region) -> list[int]:
        """Group of each lane relative to the block's first; channels past a short row borrow the last one."""
        if not self.spec.groups:
            return [0] * len(outputs)
        return [min(o, region.outputs - 1) // TOKENS for o in outputs]


def _all(emit: Emitter, parts: Sequence[Value], combine: Combine) -> Value:
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return total

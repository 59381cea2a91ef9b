"""Dot a tile: scores of a run of tokens with a few rows of queries.

``void dot_tile(i8 *words, i8 *scales, i64 first, i64 count, i8 *x, i8 *aux, float *scores, i64 stride)`` computes
``scores[row·stride + i] = q[row] · K[first + i]`` for ``count`` tokens, both multiples of 32, of one head. ``x``
holds the prepared rows (see `Preparation`), ``aux`` what each row adds per group: the accumulator's start value and
its scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from ..problem import GROUP
from .fold import fold
from .mapping import TOKENS, Lanes, Region
from .matrix import MatrixUnit, aligned_room, held_at_once, sums_of
from .multiply import IntegerDots, SmallOperand, Unpacker, arranged, float_offset, integer_form, widened
from .plan import Plan
from .share import Share
from .spec import TileSpec
from .vector import BYTES, F32, HALF, I8, I32, I64, VOID, Emitter, Value

NEAR = 32
"""Cache lines ahead that the matrix unit's loads find in the nearest cache; nothing else would bring them there."""

Key = tuple[int, tuple[int, ...]]
"""An accumulator: row, and the output of each lane."""

Pattern = tuple[tuple[int, bool], ...]
"""Per lane of an integer accumulator: its group within the region, and whether it is the output's first lane there."""

Sum = tuple[int, tuple[int, ...], Pattern]
"""A sum: row, the output of each lane, and what its scales are."""


def _pattern(output: Lanes) -> Pattern:
    seen: set[tuple[int, int]] = set()
    lanes = []
    for o, r in zip(output.o, output.r, strict=True):
        group = r[0] // GROUP
        lanes.append((group, (o, group) not in seen))
        seen.add((o, group))
    return tuple(lanes)


def _patterns(region: Region) -> list[Pattern]:
    found: dict[Pattern, None] = {}
    for unit in region.units:
        for output in unit.outputs:
            found.setdefault(_pattern(output))
    return list(found)


@dataclass(frozen=True)
class Preparation:
    """How a row of queries becomes the small operand: tables for `lowbit.kernels.cpu.operators.prepare_row`.

    Attributes
    ----------
    order : ndarray of int32
        Channel stored in each slot; head_dim for slots past a short row, which hold zero.
    aux_group, aux_first : ndarrays of int32, shape (aux lanes,)
        Group of each lane of ``aux``, and 1 where the lane carries the offset's correction.
    offset : int
        What codes exceed their values by.
    """

    order: NDArray[np.int32]
    aux_group: NDArray[np.int32]
    aux_first: NDArray[np.int32]
    offset: int


def preparation(spec: TileSpec) -> Preparation:
    """Tables for ``spec``."""
    plan = spec.plan
    order: list[int] = []
    group: list[int] = []
    first: list[int] = []
    last = max(spec.groups - 1, 0)
    for region, start in _regions(plan):
        order += [min(start + r, spec.head_dim) for r in region.order]
        if spec.integer:
            for pattern in _patterns(region):
                group += [min(start // GROUP + g, last) for g, _ in pattern]
                # A group past the end of a short row has no codes whose offset would need correcting.
                first += [int(leads and start // GROUP + g <= last) for g, leads in pattern]
    offset = integer_form(spec.layout.packing, "k", spec.isa, spec.matrix).offset if spec.integer else 0
    return Preparation(np.array(order, np.int32), np.array(group, np.int32), np.array(first, np.int32), offset)


def _regions(plan: Plan) -> list[tuple[Region, int]]:
    regions: list[tuple[Region, int]] = []
    start = 0
    if plan.main is not None:
        regions = [(plan.main, i * plan.main.reductions) for i in range(plan.trips)]
        start = plan.trips * plan.main.reductions
    if plan.tail is not None:
        regions.append((plan.tail, start))
    return regions


DOT_TILE = ir.FunctionType(VOID, [BYTES, BYTES, I64, I64, BYTES, BYTES, BYTES, I64])


def emit_dot_tile(module: ir.Module, spec: TileSpec) -> ir.Function:
    """The tile function for ``spec`` in ``module``, emitted on first use."""
    if spec.symbol in module.globals:
        return module.globals[spec.symbol]
    function = ir.Function(module, DOT_TILE, spec.symbol)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    for argument, name in zip(
        function.args, ("words", "scales", "first", "count", "x", "aux", "scores", "stride"), strict=True
    ):
        argument.name = name
    _DotTile(Emitter(ir.IRBuilder(function.append_basic_block("entry")), spec.isa), spec).build()
    return function


def dotted_per_iteration(spec: TileSpec) -> int:
    """Codes that one iteration of the hot loop consumes: a region's, or whole rows' where there is no inner loop."""
    region = spec.plan.any
    whole = spec.plan.trips <= 1 or (spec.matrix and held_at_once(spec))
    channels = spec.head_dim if whole else min(region.reductions, spec.head_dim)
    return channels * region.outputs


class _DotTile:
    def __init__(self, emit: Emitter, spec: TileSpec):
        self.emit, self.spec, self.plan = emit, spec, spec.plan
        self.prepared = preparation(spec)
        self.outputs = spec.plan.any.outputs

    def build(self) -> None:
        emit, outputs = self.emit, self.outputs
        words, scales, first, count, x, aux, scores, stride = emit.builder.function.args
        if self.spec.matrix:
            form = integer_form(self.spec.layout.packing, "k", self.spec.isa, matrix=True)
            self.matrix = MatrixUnit(emit, self.spec, form)
        blocks = emit.builder.udiv(count, emit.i64(outputs))
        self.x, self.aux = x, aux
        if self.spec.matrix and held_at_once(self.spec):
            with emit.builder.if_then(emit.builder.icmp_signed(">", blocks, emit.i64(0))):
                self._by_unit(words, scales, first, blocks, scores, emit.mul(stride, 4))
        else:
            self._by_blocks(words, scales, first, blocks, scores, stride)
        if self.spec.matrix:
            self.matrix.release()
        emit.builder.ret_void()

    def _by_blocks(
        self, words: Value, scales: Value, first: Value, blocks: Value, scores: Value, stride: Value
    ) -> None:
        """All tokens, a block at a time and scaled region by region."""
        emit, plan, outputs = self.emit, self.plan, self.outputs
        loop = emit.begin(blocks, share=Share(outputs * self.spec.head_dim))
        token = emit.builder.add(first, emit.builder.mul(loop.index, emit.i64(outputs)))
        base = emit.at(words, self._token_offset(token))
        self.scale_base = emit.at(scales, self._scale_offset(token)) if self.spec.groups else None
        totals = self._zeros()
        done = 0
        if plan.main is not None and plan.trips:
            totals = self._main(plan.main, base, totals)
            done = plan.trips
        if plan.tail is not None:
            at = emit.at(base, done * plan.channel_step_bytes)
            main = plan.main.reductions if plan.main else 0
            aux_bytes = self._aux_bytes(plan.main) if plan.main else 0
            totals = self._region(plan.tail, at, emit.i64(done), main, aux_bytes, totals)
        target = emit.at(scores, emit.builder.mul(loop.index, emit.i64(4 * outputs)))
        names = [lanes.o for lanes in plan.any.lanes]
        for row in range(self.spec.rows):
            result = fold(emit, [totals[row, name] for name in names], names, range(outputs))
            emit.store(result, target, emit.builder.mul(stride, emit.i64(4 * row)))
        emit.end(loop)

    def _by_unit(
        self, words: Value, scales: Value, first: Value, blocks: Value, scores: Value, row_bytes: Value
    ) -> None:
        """All tokens: the matrix unit's sums of a block, while vectors scale those of the block before.

        A row's running totals stay in registers, and so do scales for all rows. In the program, some rows follow each
        region's products, so that neither vectors nor the unit wait.
        """
        emit, spec = self.emit, self.spec
        regions = _regions(self.plan)

        def token(index: Value) -> Value:
            return emit.plus(first, emit.mul(index, self.outputs))

        def room(index: Value) -> Value:
            return emit.at(self.matrix.sums, emit.mul(emit.builder.and_(index, emit.i64(1)), self.matrix.sums_bytes))

        def contract(index: Value, number: int) -> list[tuple[Value, int, int]]:
            """Returns lines to fetch in the meantime."""
            region, start = regions[number]
            base = emit.at(words, self._token_offset(token(index)))
            at = emit.at(base, number * self.plan.channel_step_bytes)
            aux = emit.at(self.aux, sum(self._aux_bytes(earlier) for earlier, _ in regions[:number]))
            unpacker = Unpacker(emit, replace(spec, prefetch=0), at, region)
            self._unit_sums(region, emit.at(self.x, start), unpacker, aux, room(index), number)
            lines = (row * self.plan.pitch_bytes + byte for row, byte in region.chunks)
            distances = ((spec.prefetch, 2), (min(NEAR, spec.prefetch), 1)) if spec.prefetch else ()
            return [(at, line + 64 * distance, level) for line in lines for distance, level in distances]

        def scale(index: Value) -> Callable[[Value], None]:
            """What scales one row of a block."""
            self.scale_base = emit.at(scales, self._scale_offset(token(index)))
            vectors = self._unit_scales()
            sums, target = room(index), emit.at(scores, emit.mul(index, 4 * self.outputs))
            return lambda row: self._scale_row(row, vectors, sums, emit.at(target, emit.builder.mul(row, row_bytes)))

        self._compact_factors()
        for number in range(len(regions)):
            contract(emit.i64(0), number)
        loop = emit.begin(emit.builder.sub(blocks, emit.i64(1)), share=Share(self.outputs * spec.head_dim))
        following, scale_row = emit.plus(loop.index, emit.i64(1)), scale(loop.index)
        for number in range(len(regions)):
            lines = contract(following, number)
            rows = range(spec.rows * number // len(regions), spec.rows * (number + 1) // len(regions))
            for i, row in enumerate(rows):
                scale_row(emit.i64(row))
                for base, offset, level in lines[len(lines) * i // len(rows) : len(lines) * (i + 1) // len(rows)]:
                    emit.prefetch(base, offset, level)
        emit.end(loop)
        scale_row = scale(emit.builder.sub(blocks, emit.i64(1)))
        loop = emit.begin(emit.opaque(spec.rows))
        scale_row(loop.index)
        emit.end(loop)

    def _compact_factors(self) -> None:
        """Each row's factors of groups side by side: ``aux`` repeats them for all lanes, and leaves less cache."""
        emit, prepared = self.emit, self.prepared
        lanes, count = emit.isa.lanes, len(prepared.aux_group)
        places = range(0, count, lanes)
        self.factors = aligned_room(emit, 4 * len(places) * self.spec.rows)
        loop = emit.begin(emit.opaque(self.spec.rows))
        aux = emit.at(self.aux, emit.mul(loop.index, 8 * count))
        target = emit.at(self.factors, emit.mul(loop.index, 4 * len(places)))
        for number, place in enumerate(places):
            emit.store(emit.load(aux, F32, 4 * (count + place)), target, 4 * number)
        emit.end(loop)

    def _unit_scales(self) -> list[tuple[tuple[int, ...], Value, int, int]]:
        """For each tile of sums its outputs, scales, the number of a row's factor, and where in memory it is."""
        emit, spec = self.emit, self.spec
        found, earlier = [], 0
        for number, (region, start) in enumerate(_regions(self.plan)):
            patterns = _patterns(region)
            self.group_base, self.clamp = emit.i64(start // GROUP * 2 * TOKENS), spec.groups - 1 - start // GROUP
            cache: dict[Any, Value] = {}
            for (outputs, group), place in self.matrix.places(region, number).items():
                pattern = ((group, True),) * emit.isa.lanes
                scales = self._scale_vector(outputs, [group] * emit.isa.lanes, cache)
                found.append((outputs, scales, earlier + patterns.index(pattern), place))
            earlier += len(patterns)
        return found

    def _scale_row(
        self, row: Value, tiles: list[tuple[tuple[int, ...], Value, int, int]], sums: Value, target: Value
    ) -> None:
        """Scores of one row from the sums of all tiles."""
        emit = self.emit
        vector = ir.VectorType(F32, emit.isa.lanes)
        factors = emit.at(self.factors, emit.mul(row, 4 * len(self.prepared.aux_group) // emit.isa.lanes))
        totals: dict[tuple[int, ...], Value] = {}
        for outputs, scale, factor, place in tiles:
            value = emit.builder.sitofp(sums_of(emit, emit.at(sums, place), row), vector)
            whole = emit.builder.fmul(scale, emit.splat(emit.load(factors, F32, 4 * factor), emit.isa.lanes))
            before = totals.get(outputs)
            totals[outputs] = emit.builder.fmul(value, whole) if before is None else emit.fma(value, whole, before)
        names = list(totals)
        emit.store(fold(emit, list(totals.values()), names, range(self.outputs)), target)

    def _zeros(self) -> dict[Key, Value]:
        zero = self.emit.constant(F32, self.emit.isa.lanes, 0.0)
        return {(row, lanes.o): zero for row in range(self.spec.rows) for lanes in self.plan.any.lanes}

    def _token_offset(self, token: Value) -> Value:
        emit, plan = self.emit, self.plan
        row = emit.builder.udiv(token, emit.i64(plan.tile))
        offset = emit.builder.mul(row, emit.i64(plan.pitch_bytes))
        if plan.token_step_bytes:
            block = emit.builder.udiv(emit.builder.urem(token, emit.i64(plan.tile)), emit.i64(self.outputs))
            offset = emit.builder.add(offset, emit.builder.mul(block, emit.i64(plan.token_step_bytes)))
        return offset

    def _scale_offset(self, token: Value) -> Value:
        emit = self.emit
        block = emit.builder.mul(emit.builder.udiv(token, emit.i64(TOKENS)), emit.i64(2 * TOKENS * self.spec.groups))
        within = emit.builder.mul(emit.builder.urem(token, emit.i64(TOKENS)), emit.i64(2))
        return emit.builder.add(block, within)

    def _main(self, region: Region, base: Value, totals: dict[Key, Value]) -> dict[Key, Value]:
        emit, plan = self.emit, self.plan
        if plan.trips == 1:
            return self._region(region, base, emit.i64(0), region.reductions, self._aux_bytes(region), totals)
        names = list(totals)
        share = Share(max(self.outputs * self.spec.head_dim // plan.trips, 1))
        inner = emit.begin(emit.opaque(plan.trips), [totals[name] for name in names], share)
        at = emit.at(base, emit.builder.mul(inner.index, emit.i64(plan.channel_step_bytes)))
        carried = dict(zip(names, inner.carried, strict=True))
        after = self._region(region, at, inner.index, region.reductions, self._aux_bytes(region), carried)
        return dict(zip(names, emit.end(inner, [after[name] for name in names]), strict=True))

    def _aux_bytes(self, region: Region) -> int:
        return len(_patterns(region)) * self.emit.isa.vector_bytes if self.spec.integer else 0

    def _region(
        self, region: Region, base: Value, trip: Value, step: int, aux_step: int, totals: dict[Key, Value]
    ) -> dict[Key, Value]:
        """Contract one region; ``step`` slots and ``aux_step`` bytes of aux precede it for each earlier trip."""
        emit, spec = self.emit, self.spec
        element = 1 if spec.integer else 4
        start = emit.builder.mul(trip, emit.i64(step * element))
        row_bytes = len(self.prepared.order) * element

        def pointer(row: int, group: int) -> Value:
            return emit.at(self.x, emit.builder.add(start, emit.i64(row * row_bytes)))

        small = SmallOperand(emit, region, I8 if spec.integer else F32, pointer)
        unpacker = Unpacker(emit, spec, base, region)
        self.group_base = emit.builder.mul(trip, emit.i64(step // GROUP * 2 * TOKENS))
        self.clamp = self._last_group(region, step)
        scales: dict[Any, Value] = {}
        if spec.integer:
            aux_at = emit.at(self.aux, emit.builder.mul(trip, emit.i64(aux_step)))
            return self._integer(region, small, unpacker, aux_at, scales, totals)
        return self._float(region, small, unpacker, scales, totals)

    def _last_group(self, region: Region, step: int) -> int:
        """Groups of the region that exist: a short row's padding reads the last one's scales."""
        if self.plan.main is not None and region is self.plan.main:
            return max(region.reductions // GROUP - 1, 0)
        return max(self.spec.groups - self.plan.trips * step // GROUP - 1, 0)

    def _scale_vector(self, outputs: Sequence[int], groups: Sequence[int], cache: dict[Any, Value]) -> Value:
        emit = self.emit
        groups = [min(group, self.clamp) for group in groups]
        key = (tuple(outputs), tuple(groups))
        if key not in cache:
            names = sorted(set(groups))
            loaded = []
            for group in names:
                at = emit.builder.add(self.group_base, emit.i64(group * 2 * TOKENS))
                if (group,) not in cache:
                    halves = emit.load(self.scale_base, ir.VectorType(HALF, self.outputs), at)
                    cache[(group,)] = emit.widen_half(halves)
                loaded.append(cache[(group,)])
            cache[key] = emit.gather(loaded, [(names.index(g), o) for o, g in zip(outputs, groups, strict=True)])
        return cache[key]

    def _integer(
        self,
        region: Region,
        small: SmallOperand,
        unpacker: Unpacker,
        aux: Value,
        scales: dict[Any, Value],
        totals: dict[Key, Value],
    ) -> dict[Key, Value]:
        emit, spec = self.emit, self.spec
        lanes, width = emit.isa.lanes, emit.isa.vector_bytes
        patterns = _patterns(region)
        aux_row = 2 * 4 * len(self.prepared.aux_group)
        scale_half = 4 * len(self.prepared.aux_group)
        if spec.matrix:
            sums = self._by_matrix(region, small, unpacker, aux)
        else:
            sums = self._by_vectors(region, small, unpacker, aux, aux_row)
        totals = dict(totals)
        for (row, outputs, pattern), total in sums.items():
            scale = self._scale_vector(outputs, [g for g, _ in pattern], scales)
            offset = row * aux_row + scale_half + patterns.index(pattern) * width
            mine = emit.load(aux, ir.VectorType(F32, lanes), offset)
            values = emit.builder.sitofp(total, ir.VectorType(F32, lanes))
            totals[row, outputs] = emit.fma(values, emit.builder.fmul(scale, mine), totals[row, outputs])
        return totals

    def _by_matrix(self, region: Region, small: SmallOperand, unpacker: Unpacker, aux: Value) -> dict[Sum, Value]:
        """Integer sums of one region, from the matrix unit."""
        emit = self.emit
        sums = self.matrix.sums
        self._unit_sums(region, small.pointers(0, 0), unpacker, aux, sums)
        return {
            (row, outputs, ((group, True),) * emit.isa.lanes): sums_of(emit, emit.at(sums, place), row)
            for (outputs, group), place in self.matrix.places(region).items()
            for row in range(self.spec.rows)
        }

    def _unit_sums(
        self, region: Region, x: Value, unpacker: Unpacker, aux: Value, sums: Value, number: int = 0
    ) -> None:
        """Have the unit put integer sums of one region, the ``number``-th that is held, in memory at ``sums``."""
        emit = self.emit
        width, patterns, aux_row = emit.isa.vector_bytes, _patterns(region), 8 * len(self.prepared.aux_group)

        def start(key: tuple[tuple[int, ...], int]) -> tuple[Value, int] | None:
            if not self.prepared.offset:
                return None
            pattern = ((key[1], True),) * emit.isa.lanes
            return emit.at(aux, patterns.index(pattern) * width), aux_row

        row_bytes = len(self.prepared.order)
        self.matrix.contract(region, unpacker, lambda group: (x, row_bytes), start, sums, number)

    def _by_vectors(
        self, region: Region, small: SmallOperand, unpacker: Unpacker, aux: Value, aux_row: int
    ) -> dict[Sum, Value]:
        """Integer sums of one region, from four-way dots."""
        emit, spec = self.emit, self.spec
        lanes, width, patterns = emit.isa.lanes, emit.isa.vector_bytes, _patterns(region)
        dots = IntegerDots(emit, integer_form(spec.layout.packing, "k", spec.isa))
        sums: dict[Sum, Value] = {}
        for unit in region.units:
            for output, w in zip(unit.outputs, arranged(emit, unit, unpacker), strict=True):
                pattern = _pattern(output)
                for row in range(spec.rows):
                    key = (row, output.o, pattern)
                    if key not in sums:
                        offset = row * aux_row + patterns.index(pattern) * width
                        sums[key] = (
                            emit.load(aux, ir.VectorType(I32, lanes), offset)
                            if self.prepared.offset
                            else emit.constant(I32, lanes, 0)
                        )
                    dots.add(key, sums, w, small.load(row, output, [0] * lanes))
            dots.settle(sums)
        dots.finish(sums)
        return sums

    def _float(
        self,
        region: Region,
        small: SmallOperand,
        unpacker: Unpacker,
        scales: dict[Any, Value],
        totals: dict[Key, Value],
    ) -> dict[Key, Value]:
        emit, spec = self.emit, self.spec
        totals = dict(totals)
        for unit in region.units:
            register = unpacker.register(unit.sources[0])
            for part, output in enumerate(unit.outputs):
                w = dequantised(emit, spec, register, part)
                if spec.groups:
                    scale = self._scale_vector(output.o, [r[0] // GROUP for r in output.r], scales)
                    w = emit.builder.fmul(w, scale)
                for row in range(spec.rows):
                    x = small.load(row, output, [0] * emit.isa.lanes)
                    totals[row, output.o] = emit.pin(emit.fma(w, x, totals[row, output.o]))
        return totals


def dequantised(emit: Emitter, spec: TileSpec, register: Value, part: int) -> Value:
    """Float32 codes of one part of a code register, without their scale."""
    piece = widened(emit, register, part)
    if piece.type.element == F32:
        return piece
    packing = spec.layout.packing
    extend = emit.builder.zext if packing.bits == 4 else emit.builder.sext
    codes = extend(piece, ir.VectorType(I32, piece.type.count))
    offset = float_offset(packing)
    if offset and spec.role == "k":
        codes = emit.builder.sub(codes, emit.constant(I32, piece.type.count, offset))
    return emit.builder.sitofp(codes, ir.VectorType(F32, piece.type.count))

"""Dot a tile: scores of a run of tokens with a few rows of queries.

``void dot_tile(i8 *words, i8 *scales, i64 first, i64 count, i8 *x, i8 *aux, float *scores, i64 stride)`` computes
``scores[row·stride + i] = q[row] · K[first + i]`` for ``count`` tokens, both multiples of 32, of one head. ``x``
holds the prepared rows (see `Preparation`), ``aux`` what each row adds per group: the accumulator's start value and
its scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from ..problem import GROUP
from .fold import fold
from .mapping import TOKENS, Lanes, Region
from .matrix import MatrixUnit, sums_of
from .multiply import IntegerDots, SmallOperand, Unpacker, arranged, float_offset, integer_form, widened
from .plan import Plan
from .share import Share
from .spec import TileSpec
from .vector import BYTES, F32, HALF, I8, I32, I64, VOID, Emitter, Value

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
    channels = spec.head_dim if spec.plan.trips <= 1 else min(region.reductions, spec.head_dim)
    return channels * region.outputs


class _DotTile:
    def __init__(self, emit: Emitter, spec: TileSpec):
        self.emit, self.spec, self.plan = emit, spec, spec.plan
        self.prepared = preparation(spec)
        self.outputs = spec.plan.any.outputs

    def build(self) -> None:
        emit, plan, outputs = self.emit, self.plan, self.outputs
        words, scales, first, count, x, aux, scores, stride = emit.builder.function.args
        if self.spec.matrix:
            form = integer_form(self.spec.layout.packing, "k", self.spec.isa, matrix=True)
            self.matrix = MatrixUnit(emit, self.spec, form)
        blocks = emit.builder.udiv(count, emit.i64(outputs))
        loop = emit.begin(blocks, share=Share(outputs * self.spec.head_dim))
        token = emit.builder.add(first, emit.builder.mul(loop.index, emit.i64(outputs)))
        base = emit.at(words, self._token_offset(token))
        self.scale_base = emit.at(scales, self._scale_offset(token)) if self.spec.groups else None
        self.x, self.aux = x, aux
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
        where = emit.builder.mul(loop.index, emit.i64(4 * outputs))
        for row in range(self.spec.rows):
            vectors = [totals[row, lanes.o] for lanes in plan.any.lanes]
            names = [lanes.o for lanes in plan.any.lanes]
            result = fold(emit, vectors, names, range(outputs))
            offset = emit.builder.add(where, emit.builder.mul(stride, emit.i64(4 * row)))
            emit.store(result, scores, offset)
        emit.end(loop)
        if self.spec.matrix:
            self.matrix.release()
        emit.builder.ret_void()

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
            sums = self._by_matrix(region, small, unpacker, aux, aux_row)
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

    def _by_matrix(
        self, region: Region, small: SmallOperand, unpacker: Unpacker, aux: Value, aux_row: int
    ) -> dict[Sum, Value]:
        """Integer sums of one region, from the matrix unit."""
        emit, spec = self.emit, self.spec
        width, patterns = emit.isa.vector_bytes, _patterns(region)

        def start(key: tuple[tuple[int, ...], int]) -> tuple[Value, int] | None:
            if not self.prepared.offset:
                return None
            pattern = ((key[1], True),) * emit.isa.lanes
            return emit.at(aux, patterns.index(pattern) * width), aux_row

        row_bytes = len(self.prepared.order)
        places = self.matrix.contract(region, unpacker, lambda group: (small.pointers(0, 0), row_bytes), start)
        return {
            (row, outputs, ((group, True),) * emit.isa.lanes): sums_of(emit, place, row)
            for (outputs, group), place in places.items()
            for row in range(spec.rows)
        }

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

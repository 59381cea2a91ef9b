"""Activations made ready for dot tiles: quantised, reordered, with what each group adds.

``void prepare(i64 *job, i64 row)`` prepares one row of float32 activations. Its signature is a task's, so that rows are
prepared on one thread or on several. The work is vector code for one order of slots, emitted from the tables of
`lowbit.kernels.cpu.keys.Preparation`: 8,192 activations take one to two microseconds where a table look-up for each
would take twenty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from ..problem import GROUP
from .keys import Preparation
from .spec import TileSpec
from .vector import BYTES, F32, I8, I32, I64, VOID, Emitter, Value

X, PREPARED, AUX, X_BYTES, PREPARED_BYTES, AUX_BYTES = range(6)
"""Fields of the job that the function reads: addresses of the first row's activations, slots and aux, and the bytes
from one row to the next of each."""

TINY = 2.0**-64
"""Activations below it are scaled up by its inverse before they are divided by: the quotient must be finite."""

LEAST = 2.0**-90
"""Below every float32 scaled up so, but zero."""


@dataclass(frozen=True)
class Stretch:
    """Channels whose slots and aux lanes are prepared together: one region of the tile, ``trips`` times.

    Attributes
    ----------
    channels : int
        Real channels; slots past them hold zero.
    trips : int
    order : tuple of int
        Channel of each slot, relative to the stretch; ``channels`` or more for a slot that holds zero.
    groups, leads : tuple of int
        Of each aux lane: its group, relative to the stretch, and 1 if it carries the offset's correction.
    """

    channels: int
    trips: int
    order: tuple[int, ...]
    groups: tuple[int, ...]
    leads: tuple[int, ...]


def stretches(spec: TileSpec, tables: Preparation) -> list[Stretch]:
    """The tables of ``spec`` as at most two stretches: the repeated region and the remainder."""
    plan, columns = spec.plan, spec.head_dim
    size = plan.main.reductions if plan.main is not None else 0
    done = plan.trips * size
    # An aux lane of the remainder names a group past the repeated ones.
    lanes = int(np.count_nonzero(tables.aux_group < done // GROUP)) if done else 0
    found = []
    if done:
        one = slice(0, lanes // plan.trips)
        found.append(_stretch(size, plan.trips, tables.order[:size], tables.aux_group[one], tables.aux_first[one]))
    if columns > done:
        groups = tables.aux_group[lanes:] - done // GROUP
        found.append(_stretch(columns - done, 1, tables.order[done:] - done, groups, tables.aux_first[lanes:]))
    return found


def _stretch(channels: int, trips: int, *tables: NDArray[np.int32]) -> Stretch:
    order, groups, leads = (tuple(int(value) for value in table) for table in tables)
    return Stretch(channels, trips, order, groups, leads)


def in_place(spec: TileSpec, tables: Preparation) -> bool:
    """Whether the activations already lie as the tile reads them: floats in channel order, none missing."""
    return not spec.integer and np.array_equal(tables.order, np.arange(spec.head_dim))


def prepare_symbol(spec: TileSpec, tables: Preparation) -> str:
    """Name of the function that prepares rows for ``spec``. Equal tables have equal ones, whatever their layouts."""
    facts = (stretches(spec, tables), spec.integer, tables.offset, spec.isa.name)
    return f"lowbit_prepare_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


def prepare_text(spec: TileSpec, tables: Preparation) -> str:
    """The module that holds the function."""
    module = ir.Module(name="lowbit")
    function = ir.Function(module, ir.FunctionType(VOID, [BYTES, I64]), prepare_symbol(spec, tables))
    for argument, name in zip(function.args, ("job", "row"), strict=True):
        argument.name = name
    emit = Emitter(ir.IRBuilder(function.append_basic_block("entry")), spec.isa)
    _Preparer(emit, spec, tables).build(stretches(spec, tables))
    return str(module)


class _Preparer:
    def __init__(self, emit: Emitter, spec: TileSpec, tables: Preparation):
        self.emit, self.isa = emit, spec.isa
        self.integer, self.offset = spec.integer, tables.offset
        self.aux_lanes = len(tables.aux_group)
        self.element_bytes = 1 if spec.integer else 4

    def build(self, parts: Sequence[Stretch]) -> None:
        emit = self.emit
        job, row = emit.builder.function.args
        x, out, aux = (self._row(job, row, field, step) for field, step in
                       ((X, X_BYTES), (PREPARED, PREPARED_BYTES), (AUX, AUX_BYTES)))  # fmt: skip
        for part in parts:
            loop = emit.begin(emit.i64(part.trips))
            starts = (4 * part.channels, self.element_bytes * len(part.order), 4 * len(part.groups))
            at = [emit.builder.mul(loop.index, emit.i64(size)) for size in starts]
            places = emit.at(x, at[0]), emit.at(out, at[1]), emit.at(aux, at[2])
            (self._integers if self.integer else self._floats)(part, *places)
            emit.end(loop)
            done = [part.trips * size for size in starts]
            x, out, aux = emit.at(x, done[0]), emit.at(out, done[1]), emit.at(aux, done[2])
        emit.builder.ret_void()

    def _row(self, job: Value, row: Value, field: int, step: int) -> Value:
        emit = self.emit
        base, size = (emit.load(job, I64, 8 * each) for each in (field, step))
        return emit.builder.inttoptr(emit.builder.add(base, emit.builder.mul(row, size)), BYTES)

    def _floats(self, part: Stretch, x: Value, out: Value, aux: Value) -> None:
        emit = self.emit
        values = emit.load(x, ir.VectorType(F32, part.channels))
        zero = ir.Constant(values.type, None)
        lanes = [min(channel, part.channels) for channel in part.order]
        if lanes != list(range(part.channels)):
            values = emit.shuffle(values, lanes, zero)
        emit.store(values, out)

    def _integers(self, part: Stretch, x: Value, out: Value, aux: Value) -> None:
        emit = self.emit
        codes, sums, scales = [], [], []
        for start in range(0, part.channels, GROUP):
            values = self._group(x, start, min(GROUP, part.channels - start))
            code, total, scale = self._quantised(values)
            codes.append(code)
            sums.append(total)
            scales.append(scale)
        emit.store(self._slots(codes, part), out)
        width = self.isa.lanes
        for first in range(0, len(part.groups), width):
            groups = part.groups[first : first + width]
            if self.offset:
                leads = emit.constant(I32, width, [-self.offset * lead for lead in part.leads[first : first + width]])
                emit.store(emit.builder.mul(self._spread(sums, groups), leads), aux, 4 * first)
            emit.store(self._spread(scales, groups), aux, 4 * (self.aux_lanes + first))

    def _group(self, x: Value, start: int, count: int) -> Value:
        """Activations of one group, zeros past a short one."""
        emit = self.emit
        values = emit.load(x, ir.VectorType(F32, count), 4 * start)
        if count < GROUP:
            lanes = [min(lane, count) for lane in range(GROUP)]
            values = emit.shuffle(values, lanes, ir.Constant(values.type, None))
        return values

    def _quantised(self, values: Value) -> tuple[Value, Value, Value]:
        """Codes of a group, their sum and their scale: floor(x·127/max + 1/2)."""
        emit, builder = self.emit, self.emit.builder
        words = ir.VectorType(I32, GROUP)
        positive = emit.constant(I32, GROUP, 0x7FFFFFFF)
        magnitudes = builder.bitcast(builder.and_(builder.bitcast(values, words), positive), values.type)
        largest = self._largest(magnitudes)
        tiny = builder.fcmp_ordered("<", largest, _float(TINY))
        up = builder.select(tiny, _float(1 / TINY), _float(1.0))
        scaled = builder.fmul(largest, up)
        # A group of zeros has codes of zero whatever it is multiplied by, if that is finite.
        some = builder.fcmp_ordered(">", scaled, _float(LEAST))
        inverse = builder.fdiv(_float(127.0), builder.select(some, scaled, _float(LEAST)))
        # Above zero, cutting the fraction off is rounding down.
        scaled = builder.fmul(values, emit.splat(up, GROUP))
        shifted = emit.fma(scaled, emit.splat(inverse, GROUP), emit.constant(F32, GROUP, 128.5))
        above = builder.fptosi(shifted, words)
        codes = builder.xor(builder.trunc(above, ir.VectorType(I8, GROUP)), emit.constant(I8, GROUP, 0x80))
        total = ir.Constant(I32, 0)
        if self.offset:
            add = emit.intrinsic(f"llvm.vector.reduce.add.v{GROUP}i32", I32, [words])
            total = builder.sub(builder.call(add, [above]), ir.Constant(I32, 128 * GROUP))
        return codes, total, builder.fdiv(largest, _float(127.0))

    def _largest(self, magnitudes: Value) -> Value:
        """The largest of non-negative floats, which are ordered as their bits are."""
        emit, builder = self.emit, self.emit.builder
        words = ir.VectorType(I32, GROUP)
        largest = emit.intrinsic(f"llvm.vector.reduce.umax.v{GROUP}i32", I32, [words])
        return builder.bitcast(builder.call(largest, [builder.bitcast(magnitudes, words)]), F32)

    def _slots(self, codes: Sequence[Value], part: Stretch) -> Value:
        """Codes in slot order; short groups hold zeros, and so does every slot without a channel."""
        emit = self.emit
        joined = codes[0]
        for code in codes[1:]:
            count = joined.type.count
            wide = emit.shuffle(code, [min(lane, GROUP - 1) for lane in range(count)]) if count > GROUP else code
            joined = emit.shuffle(joined, [*range(count), *range(count, count + GROUP)], wide)
        lanes = [channel if channel < part.channels else joined.type.count for channel in part.order]
        if lanes == list(range(joined.type.count)):
            return joined
        return emit.shuffle(joined, lanes, ir.Constant(joined.type, None))

    def _spread(self, scalars: Sequence[Value], groups: Sequence[int]) -> Value:
        """A vector with each lane's group's scalar."""
        emit, names = self.emit, sorted(set(groups))
        vectors = [emit.splat(scalars[min(group, len(scalars) - 1)], len(groups)) for group in names]
        if len(vectors) == 1:
            return vectors[0]
        return emit.gather(vectors, [(names.index(group), lane) for lane, group in enumerate(groups)])


def _float(value: float) -> ir.Constant:
    return ir.Constant(F32, value)

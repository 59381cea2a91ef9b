"""The two halves of attention on one tile: dot products with keys, weighted sums of values.

Both unpack vectors into dot words and contract them with a small operand that lies in shared memory in the order of
consumption; they differ in what is summed and in where scales come in. Integer sums become floats by an addition
(`lowbit.kernels.cuda.ops.MAGIC`), never by a conversion.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..packing import Packing
from ..problem import GROUP
from .mapping import LANES, TILE, Infeasible, Tiling, group_of, lane_part
from .ops import MAGIC, MAGIC_BITS, Ops, Value
from .unpacking import Unpacking, order, plan, unpack

Bundle = Sequence[Sequence[Value]]

SCALE_BYTES = 2
FACTOR_BYTES = 8
"""A scale and a correction, float32 each."""


@dataclass(frozen=True)
class Contraction:
    """One packed operand as a kernel reads it.

    Attributes
    ----------
    tiling : Tiling
    packing : Packing
    unpacking : Unpacking or None
        None for the float pipeline.
    order : tuple of int
        Reduced index at each slot of the small operand. A slot is a byte, or a float of the float pipeline.
    groups : int
        Scale groups along the channels; 1 for fp16, which has none.
    rows : int
    """

    tiling: Tiling
    packing: Packing
    unpacking: Unpacking | None
    order: tuple[int, ...]
    groups: int
    rows: int

    @property
    def integer(self) -> bool:
        return self.unpacking is not None

    @property
    def scale(self) -> int:
        """What integer sums have to be divided by."""
        return 1 if self.unpacking is None else self.unpacking.scale

    @property
    def offset(self) -> int:
        """What unpacked codes exceed their value by."""
        return 0 if self.unpacking is None else self.unpacking.offset

    @property
    def scaled(self) -> bool:
        return self.packing.bits < 16

    @property
    def slot_bytes(self) -> int:
        return 1 if self.integer else 4

    @property
    def bundle(self) -> int:
        """Vectors of a bundle."""
        return 1 if self.unpacking is None else self.unpacking.vectors

    @property
    def bundle_bytes(self) -> int:
        """Of the small operand that meets one bundle of one lane."""
        return self.bundle * len(self.tiling.vectors.reduced_each) * self.slot_bytes

    @property
    def words(self) -> int:
        """Words of a vector."""
        return self.tiling.vectors.width // 4

    def small_offset(self, bundle: int) -> int:
        """Byte of r_lane 0's part of a row."""
        return bundle * self.tiling.lanes_r * self.bundle_bytes


def contraction(tiling: Tiling, packing: Packing, pipeline: str, head_dim: int, rows: int) -> Contraction:
    """``pipeline`` as the operand has it: fp16 is float in each.

    Raises
    ------
    Infeasible
        If the layout does not lend itself to the pipeline.
    """
    if tiling.vectors.width < 4:
        raise Infeasible(f"{packing.name}: runs of {tiling.vectors.width} bytes are no whole words")
    groups = 1 if packing.bits == 16 else -(-head_dim // GROUP)
    if pipeline == "float" or packing.bits == 16:
        slots = _float_order(tiling)
        return Contraction(tiling, packing, None, slots, groups, rows)
    unpacking = plan(tiling, packing, pipeline)
    return Contraction(tiling, packing, unpacking, order(tiling, unpacking), groups, rows)


def _float_order(tiling: Tiling) -> tuple[int, ...]:
    return tuple(int(start) + each for start in tiling.vectors.reduced for each in tiling.vectors.reduced_each)


@dataclass(frozen=True)
class Term:
    """Codes of one output and one scale group that meet words of the small operand.

    Attributes
    ----------
    output : int
        Index of the output among the lane's.
    group : int
        Scale group that r_lane 0, or o_lane 0, sees.
    """

    output: int
    group: int


class KeyStep:
    """Dot products over ``vectors`` vectors along the channels, for every token of a lane.

    Parameters
    ----------
    contraction : Contraction
    loads : int
        Vectors that a lane should have in flight.

    Attributes
    ----------
    count : int
        Steps of a tile.
    data_bytes, group_step : int
        From one step to the next: bytes of the packed operand, scale groups.
    slots : int
        Of one row of the small operand in one step; the small operand is stored [step][row][slot].
    slot_of_channel : list of int
        Slot of each channel of a step, whose channels are a run.
    row_bytes : int
        Of one row of one step, a multiple of 16.
    group_part, token_part : pair of int
        How a lane's scale group, and its first token, differ from lane 0's; see `mapping.lane_part`.
    """

    def __init__(self, contraction: Contraction, loads: int) -> None:
        self.contraction = c = contraction
        tiling = c.tiling
        self._groups = self._group_table()
        self.vectors = self._step_vectors(loads)
        self.count = tiling.iters_r // self.vectors
        offsets = tiling.offsets
        last = (self.count - 1) * self.vectors
        self.data_bytes = int(offsets[0, self.vectors] - offsets[0, 0]) if self.count > 1 else 0
        self.group_step = self._groups[self.vectors // c.bundle][0] - self._groups[0][0] if self.count > 1 else 0
        self.slots = c.small_offset(self.vectors // c.bundle) // c.slot_bytes
        self.row_bytes = -(-self.slots * c.slot_bytes // 16) * 16
        self.slot_of_channel = self._slot_table()
        for step in range(self.count):
            first = step * self.vectors
            regular = offsets[:, first : first + self.vectors] == offsets[:, : self.vectors] + step * self.data_bytes
            bundles = range(self.vectors // c.bundle)
            groups = all(
                self._groups[first // c.bundle + q][k] == self._groups[q][k] + step * self.group_step
                for q in bundles
                for k in range(len(self._groups[q]))
            )
            if not regular.all() or not groups:
                raise Infeasible(f"{c.packing.name}: steps along the channels differ, the last at vector {last}")
        first_tokens = [tiling.output(0, o_lane)[0] for o_lane in range(tiling.lanes_o)]
        self.token_part = lane_part(first_tokens, "a lane's token")
        self.tokens = [token - first_tokens[0] for i in range(tiling.iters_o) for token in tiling.output(i, 0)]

    def _group_table(self) -> list[list[int]]:
        """Scale group of each small word of each bundle, for r_lane 0."""
        c = self.contraction
        lanes, size = c.tiling.lanes_r, 4 if c.integer else 1
        each = c.bundle_bytes // c.slot_bytes
        table, parts = [], set()
        for q in range(c.tiling.iters_r // c.bundle):
            by_lane = []
            for r_lane in range(lanes):
                first = (q * lanes + r_lane) * each
                slots = c.order[first : first + each]
                groups = [{group_of(r) for r in slots[i : i + size]} for i in range(0, each, size)]
                if c.scaled and any(len(group) > 1 for group in groups):
                    raise Infeasible(f"{c.packing.name}: four codes of a word have different scales")
                by_lane.append([min(group) if c.scaled else 0 for group in groups])
            for word in range(len(by_lane[0])):
                parts.add(lane_part([groups[word] for groups in by_lane], "a lane's scale group"))
            table.append(by_lane[0])
        if len(parts) > 1:
            raise Infeasible(f"{c.packing.name}: lanes differ in their scale groups in several ways")
        self.group_part = parts.pop()
        return table

    def _slot_table(self) -> list[int]:
        order = np.array(self.contraction.order).reshape(self.count, self.slots)
        if (order != order[0] + self.slots * np.arange(self.count)[:, None]).any():
            raise Infeasible(f"{self.contraction.packing.name}: the channels of a step are no run")
        return [int(slot) for slot in np.argsort(order[0])]

    @property
    def step_bytes(self) -> int:
        """Of the small operand's rows in one step."""
        return self.contraction.rows * self.row_bytes

    @property
    def step_factors(self) -> int:
        """Bytes of factors of one step, which are stored [group][row]."""
        return self.group_step * self.contraction.rows * FACTOR_BYTES

    def steps_of_split(self, splits: int) -> int:
        """Steps of the longest of ``splits`` ranges of steps."""
        return -(-self.count // splits)

    def _step_vectors(self, loads: int) -> int:
        """The longest step of about ``loads`` vectors that holds whole bundles, and whole groups unless it is all."""
        c = self.contraction
        total, outputs = c.tiling.iters_r, c.tiling.iters_o
        per_group = max(GROUP // (c.tiling.lanes_r * len(c.tiling.vectors.reduced_each)), 1) if c.scaled else 1
        fits = [n for n in range(1, total + 1) if total % n == 0 and n % c.bundle == 0 and n % per_group == 0]
        small = [n for n in fits if n * outputs <= max(loads, per_group, c.bundle)]
        return max(small) if small else min(fits, default=total)

    @property
    def loads(self) -> int:
        """Vectors of a lane that one step loads."""
        return self.vectors * self.contraction.tiling.iters_o

    @property
    def groups_of_step(self) -> tuple[int, ...]:
        """Scale groups that one lane meets in one step."""
        bundles = self.vectors // self.contraction.bundle
        return tuple(sorted({group for q in range(bundles) for group in self._groups[q]}))

    @functools.cached_property
    def shares(self) -> list[int]:
        """How many (lane, step, word-run) sums of one token each scale group is spread over, by group."""
        c = self.contraction
        lanes = c.tiling.lanes_r
        shares = [0] * c.groups
        for step in range(self.count):
            keys = {self._groups[q][k] for q in range(self.vectors // c.bundle) for k in range(len(self._groups[q]))}
            for r_lane in range(lanes):
                part = r_lane * self.group_part[0] >> self.group_part[1]
                for key in keys:
                    shares[key + part + step * self.group_step] += 1
        return shares

    def load(self, ops: Ops, data: Value, staged: bool, stream: bool) -> list[list[list[Value]]]:
        """Words of [i][vector], from a 64-bit global address or from a byte of shared memory."""
        tiling = self.contraction.tiling
        return [
            [
                _load(ops, data, int(tiling.offsets[i, j]), self.contraction.words, staged, stream)
                for j in range(self.vectors)
            ]
            for i in range(tiling.iters_o)
        ]

    def body(
        self,
        ops: Ops,
        sums: Sequence[Value],
        data: Value,
        scales: Value,
        small: Value,
        factors: Value,
        staged: bool,
        stream: bool,
    ) -> tuple[Value, ...]:
        """Add one step's products to ``sums``, [row][token of the lane].

        Parameters
        ----------
        data, scales : Value
            The lane's place in the step's vectors and in its first scale: global addresses, or bytes of shared memory.
        small, factors : Value
            Bytes of shared memory: the lane's place in a row of the small operand, and in its factors.
        """
        c = self.contraction
        loaded = self.load(ops, data, staged, stream)
        keys = self.groups_of_step
        scale = self._scales(ops, scales, keys, staged) if c.scaled else {}
        totals: dict[tuple[int, int, int], _Sum] = {}
        reader = _SmallReader(ops, c, small, self.row_bytes)
        for q in range(self.vectors // c.bundle):
            bundles = [
                unpacked(ops, c, [loaded[i][q * c.bundle + v] for v in range(c.bundle)]) for i in range(len(loaded))
            ]
            for row in range(c.rows):
                words = reader.words(row * self.row_bytes, q)
                for i, bundle in enumerate(bundles):
                    for output, slot, value in bundle:
                        token = i * len(c.tiling.vectors.outputs_each) + output
                        key = row, token, self._groups[q][slot]
                        value.accumulate(ops, words, slot, totals.setdefault(key, _Sum()))
        found = list(sums)
        tokens = len(self.tokens)
        for (row, token, group), total in totals.items():
            place = row * tokens + token
            if not c.integer:
                value = total.floating
                found[place] = (
                    ops.ffma(value, scale[group, token], found[place]) if c.scaled else ops.fadd(value, found[place])
                )
                continue
            multiplier, correction = factor(ops, factors, (group * c.rows + row) * FACTOR_BYTES)
            exact = (
                ops.ffma(total.as_float(ops, c.scale), multiplier, correction)
                if c.unpacking and c.unpacking.offset
                else (ops.fmul(total.as_float(ops, c.scale), multiplier))
            )
            found[place] = ops.ffma(exact, scale[group, token], found[place])
        return tuple(found)

    def _scales(self, ops: Ops, scales: Value, keys: Sequence[int], staged: bool) -> dict[tuple[int, int], Value]:
        found = {}
        for group in keys:
            for token, offset in enumerate(self.tokens):
                place = (group * TILE + offset) * SCALE_BYTES
                found[group, token] = (
                    ops.load_shared_half(scales, place) if staged else ops.load_global_half(scales, place)
                )
        return found


class ValueTile:
    """Weighted sums over the 32 tokens of a tile, for every channel of a lane.

    Attributes
    ----------
    group_part : pair of int
        How a lane's scale group differs from lane 0's.
    channels : list of int
        The lane's channels less o_lane · ``channel_part``.
    """

    def __init__(self, contraction: Contraction, loads: int) -> None:
        self.contraction = c = contraction
        tiling = c.tiling
        self.loads = loads
        lanes = tiling.lanes_o if tiling.iters_o > 1 else tiling.last_o
        first = [tiling.output(0, o_lane)[0] for o_lane in range(lanes)]
        self.channel_part = lane_part(first, "a lane's channel")
        self.first_channel = first[0]
        self.channels = [channel - first[0] for i in range(tiling.iters_o) for channel in tiling.output(i, 0)]
        self.group_part = self._group_part()
        self.groups = [group_of(first[0] + channel) if c.scaled else 0 for channel in self.channels]
        factor_, shift = self.group_part
        if tiling.iters_o > 1 and max(self.groups) + ((tiling.lanes_o - 1) * factor_ >> shift) >= c.groups:
            raise Infeasible(f"{c.packing.name}: lanes without a vector have no scale group to read")

    def _group_part(self) -> tuple[int, int]:
        """The one that fits all lanes that have a vector, for each of the lane's channels."""
        c, tiling = self.contraction, self.contraction.tiling
        if not c.scaled:
            return 0, 0
        known: list[tuple[list[int], int]] = []
        for i in range(tiling.iters_o):
            lanes = tiling.last_o if i == tiling.iters_o - 1 else tiling.lanes_o
            outputs = [tiling.output(i, o_lane) for o_lane in range(lanes)]
            known += [([group_of(each[place]) for each in outputs], lanes) for place in range(len(outputs[0]))]
        part = lane_part(max(known, key=lambda each: each[1])[0], "a lane's scale group")
        for groups, lanes in known:
            if any(groups[lane] - groups[0] != (lane * part[0] >> part[1]) for lane in range(lanes)):
                raise Infeasible(f"{c.packing.name}: lanes differ in their scale groups in several ways")
        return part

    @property
    def outputs(self) -> int:
        return len(self.channels)

    def body(
        self,
        ops: Ops,
        sums: Sequence[Value],
        data: Sequence[Value],
        small: Value,
        factors: Value,
        staged: bool,
        stream: bool,
    ) -> tuple[Value, ...]:
        """Add a tile's weighted values to ``sums``, [row][channel of the lane].

        Parameters
        ----------
        data : pair of Value
            The lane's place in the tile, and the same for the last of its vectors across the channels, which some
            lanes do not have: global addresses, or bytes of shared memory.
        small, factors : Value
            Bytes of shared memory: the lane's place among weights [row][group][slot], and in their factors.
        """
        c = self.contraction
        tiling = c.tiling
        found = list(sums)
        totals: dict[tuple[int, int], _Sum] = {}
        reader = _SmallReader(ops, c, small, TILE * c.slot_bytes)
        bundles, last = tiling.iters_r // c.bundle, tiling.iters_o - 1
        ahead = max(self.loads // (tiling.iters_o * c.bundle), 1)
        each = len(tiling.vectors.outputs_each)
        for start in range(0, bundles, ahead):
            some = range(start, min(start + ahead, bundles))
            loaded = {
                (i, q): [
                    _load(ops, data[i == last], int(tiling.offsets[i, q * c.bundle + v]), c.words, staged, stream)
                    for v in range(c.bundle)
                ]
                for q in some
                for i in range(tiling.iters_o)
            }
            for q in some:
                for i in range(tiling.iters_o):
                    bundle = unpacked(ops, c, loaded[i, q])
                    for group in dict.fromkeys(self.groups[i * each : (i + 1) * each]):
                        for row in range(c.rows):
                            words = reader.words((row * c.groups + group) * TILE * c.slot_bytes, q)
                            for output, slot, value in bundle:
                                channel = i * each + output
                                if self.groups[channel] == group:
                                    total = totals.setdefault((row, channel), _Sum())
                                    value.accumulate(ops, words, slot, total)
        for (row, channel), total in totals.items():
            place = row * self.outputs + channel
            if not c.integer:
                found[place] = ops.fadd(found[place], total.floating)
                continue
            step, correction = factor(ops, factors, (row * c.groups + self.groups[channel]) * FACTOR_BYTES)
            found[place] = ops.ffma(total.as_float(ops, c.scale), step, found[place])
            if c.offset:
                found[place] = ops.fadd(found[place], correction)
        return tuple(found)


class _Sum:
    """A sum of products: of low and of high nibbles apart, and of what the raw pipeline subtracts."""

    def __init__(self) -> None:
        self.low: Value | None = None
        self.high: Value | None = None
        self.less: Value | None = None
        self.floating: Value | None = None

    def as_float(self, ops: Ops, scale: int) -> Value:
        """``scale`` times the integer sum, which is 1 or 16 where high nibbles were left in their place."""
        bits = self.low
        if scale > 1:
            bits = ops.i32(MAGIC_BITS) if self.high is None else self.high
            if self.low is not None:
                bits = ops.add(ops.shift_left(self.low, 4), bits)
            if self.less is not None:
                bits = ops.sub(bits, self.less)
        return ops.fadd(ops.as_float(bits), ops.f32(-MAGIC))


@dataclass(frozen=True)
class _Word:
    """A dot word; ``magic`` says that its sums begin with the magic number, ``less`` what to subtract as well."""

    value: Value
    high: bool
    signed: bool
    magic: bool
    less: Value | None = None

    def accumulate(self, ops: Ops, small: Sequence[Value], slot: int, total: _Sum) -> None:
        before = total.high if self.high else total.low
        if before is None:
            before = ops.i32(MAGIC_BITS if self.magic else 0)
        found = ops.dp4a(self.value, small[slot], before, self.signed)
        if self.high:
            total.high = found
        else:
            total.low = found
        if self.less is not None:
            total.less = ops.dp4a(self.less, small[slot], ops.i32(0) if total.less is None else total.less, False)


@dataclass(frozen=True)
class _Float:
    """One code as a float."""

    value: Value

    def accumulate(self, ops: Ops, small: Sequence[Value], slot: int, total: _Sum) -> None:
        factor_ = ops.as_float(small[slot])
        total.floating = (
            ops.fmul(self.value, factor_) if total.floating is None else ops.ffma(self.value, factor_, total.floating)
        )


def unpacked(ops: Ops, c: Contraction, bundle: Bundle) -> list[tuple[int, int, Any]]:
    """(output of the vector, word of the bundle's small operand, `_Word` or `_Float`) of a bundle."""
    if c.unpacking is None:
        return list(_floats(ops, c, bundle[0]))
    unpacking, values = c.unpacking, unpack(ops, c.unpacking, bundle)
    signed, sixteen = unpacking.signed, unpacking.scale > 1
    found = []
    for n, (word, value) in enumerate(zip(unpacking.words, values, strict=True)):
        magic = word.high or not sixteen
        if unpacking.pipeline == "raw" and word.high:
            # The whole byte is 16 times its high nibble and its low one, which comes before it.
            found.append((word.output, word.small, _Word(bundle[0][n // 2], True, False, magic, values[n - 1])))
        else:
            found.append((word.output, word.small, _Word(value, word.high, signed, magic)))
    return found


def _floats(ops: Ops, c: Contraction, words: Sequence[Value]) -> Iterator[tuple[int, int, _Float]]:
    vectors, bits = c.tiling.vectors, c.packing.bits
    values: list[Value] = []
    for word in words:
        if bits == 16:
            values += ops.halves(word)
            continue
        for bit in range(0, 32, bits):
            code = ops.extract(word, bit, bits) if c.packing.coding == "signed" else _unsigned(ops, word, bit, bits)
            values.append(ops.to_float(ops.sub(code, ops.i32(c.packing.offset)) if c.packing.offset else code))
    for p, value in enumerate(values):
        output = vectors.outputs_each.index(vectors.code_o[p])
        yield output, vectors.reduced_each.index(vectors.code_r[p]), _Float(value)


def _unsigned(ops: Ops, word: Value, bit: int, bits: int) -> Value:
    return ops.shift_right(ops.shift_left(word, 32 - bit - bits), 32 - bits)


def _load(ops: Ops, data: Value, offset: int, words: int, staged: bool, stream: bool) -> list[Value]:
    if not staged:
        return list(ops.load_global(data, offset, words, stream))
    return list(ops.load_shared(swizzled(ops, ops.add(data, ops.i32(offset))), 0, words))


def swizzled(ops: Ops, place: Value) -> Value:
    """Where byte ``place`` of a staged tile lies: lines of 128 bytes have their 16-byte chunks permuted by line number.

    Lanes that read the same chunk of different lines then read different banks.
    """
    line = ops.shift_right(place, 7)
    return ops.xor(place, ops.shift_left(ops.and_(line, ops.i32(7)), 4))


def factor(ops: Ops, factors: Value, offset: int) -> tuple[Value, Value]:
    """A scale and a correction as floats."""
    multiplier, correction = ops.load_shared(factors, offset, 2)
    return ops.as_float(multiplier), ops.as_float(correction)


class _SmallReader:
    """Reads the small operand of bundles, 16 bytes at a time where the next bundle's lies behind this one's."""

    def __init__(self, ops: Ops, c: Contraction, small: Value, row_bytes: int) -> None:
        self._ops, self._c, self._small, self._row_bytes = ops, c, small, row_bytes
        self._chunks: dict[tuple[int, int], tuple[Value, ...]] = {}

    def words(self, row: int, bundle: int) -> list[Value]:
        """Words that meet a bundle, from the row that begins at byte ``row``."""
        c, first = self._c, self._c.small_offset(bundle)
        if c.tiling.lanes_r > 1:
            return self._load(row + first, c.bundle_bytes // 4)
        size = next(n for n in (16, 8, 4) if self._row_bytes % n == 0)
        found: list[Value] = []
        for chunk in range(first // size, -(-(first + c.bundle_bytes) // size)):
            key = row, chunk
            if key not in self._chunks:
                self._chunks[key] = self._ops.load_shared(self._small, row + chunk * size, size // 4)
            found += self._chunks[key]
        skipped = first % size // 4
        return found[skipped : skipped + c.bundle_bytes // 4]

    def _load(self, place: int, words: int) -> list[Value]:
        found: list[Value] = []
        size = next(n for n in (4, 2, 1) if words % n == 0)
        while len(found) < words:
            found += self._ops.load_shared(self._small, place + 4 * len(found), size)
        return found


def lanes_of(tiling: Tiling) -> list[tuple[int, int]]:
    """(o_lane, r_lane) of each lane."""
    return [divmod(lane, tiling.lanes_r) for lane in range(LANES)]

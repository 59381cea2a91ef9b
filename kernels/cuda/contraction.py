"""What dot products with keys and weighted sums of values have in common.

Both unpack vectors into dot words and contract them with a small operand that lies in shared memory in the order of
consumption; they differ in what is summed and in where scales come in. Integer sums become floats by an addition
(`lowbit.kernels.cuda.ops.MAGIC`), never by a conversion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..packing import Packing
from ..problem import GROUP
from .mapping import Tiling
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
    groups = 1 if packing.bits == 16 else -(-head_dim // GROUP)
    if pipeline == "float" or packing.bits == 16:
        slots = _float_order(tiling)
        return Contraction(tiling, packing, None, slots, groups, rows)
    unpacking = plan(tiling, packing, pipeline)
    return Contraction(tiling, packing, unpacking, order(tiling, unpacking), groups, rows)


def _float_order(tiling: Tiling) -> tuple[int, ...]:
    return tuple(int(start) + each for start in tiling.vectors.reduced for each in tiling.vectors.reduced_each)


class Sum:
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
class Word:
    """A dot word; ``magic`` says that its sums begin with the magic number, ``less`` what to subtract as well."""

    value: Value
    high: bool
    signed: bool
    magic: bool
    less: Value | None = None

    def accumulate(self, ops: Ops, small: Sequence[Value], slot: int, total: Sum) -> None:
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
class Float:
    """One code as a float."""

    value: Value

    def accumulate(self, ops: Ops, small: Sequence[Value], slot: int, total: Sum) -> None:
        factor_ = ops.as_float(small[slot])
        total.floating = (
            ops.fmul(self.value, factor_) if total.floating is None else ops.ffma(self.value, factor_, total.floating)
        )


def unpacked(ops: Ops, c: Contraction, bundle: Bundle) -> list[tuple[int, int, Any]]:
    """(output of the vector, word of the bundle's small operand, `Word` or `Float`) of a bundle."""
    if c.unpacking is None:
        return list(_floats(ops, c, bundle[0]))
    unpacking, values = c.unpacking, unpack(ops, c.unpacking, bundle)
    signed, sixteen = unpacking.signed, unpacking.scale > 1
    found = []
    for n, (word, value) in enumerate(zip(unpacking.words, values, strict=True)):
        magic = word.high or not sixteen
        if unpacking.pipeline == "raw" and word.high:
            # The whole byte is 16 times its high nibble and its low one, which comes before it.
            found.append((word.output, word.small, Word(bundle[0][n // 2], True, False, magic, values[n - 1])))
        else:
            found.append((word.output, word.small, Word(value, word.high, signed, magic)))
    return found


def _floats(ops: Ops, c: Contraction, words: Sequence[Value]) -> Iterator[tuple[int, int, Float]]:
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
        yield output, vectors.reduced_each.index(vectors.code_r[p]), Float(value)


def _unsigned(ops: Ops, word: Value, bit: int, bits: int) -> Value:
    return ops.shift_right(ops.shift_left(word, 32 - bit - bits), 32 - bits)


def load(ops: Ops, data: Value, offset: int, words: int, staged: bool, stream: bool) -> list[Value]:
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


def small_width(c: Contraction, row_bytes: int) -> int:
    """Bytes of one load of the small operand: of a bundle's part, or of a row where bundles follow each other."""
    run = c.bundle_bytes if c.tiling.lanes_r > 1 else row_bytes
    return next(size for size in (16, 8, 4) if run % size == 0)


class SmallReader:
    """Reads the small operand of bundles, 16 bytes at a time where the next bundle's lies behind this one's."""

    def __init__(self, ops: Ops, c: Contraction, small: Value, row_bytes: int) -> None:
        self._ops, self._c, self._small, self._row_bytes = ops, c, small, row_bytes
        self._chunks: dict[tuple[int, int], tuple[Value, ...]] = {}

    def words(self, row: int, bundle: int) -> list[Value]:
        """Words that meet a bundle, from the row that begins at byte ``row``."""
        c, first = self._c, self._c.small_offset(bundle)
        if c.tiling.lanes_r > 1:
            return self._load(row + first, c.bundle_bytes // 4, small_width(c, self._row_bytes) // 4)
        size = small_width(c, self._row_bytes)
        found: list[Value] = []
        for chunk in range(first // size, -(-(first + c.bundle_bytes) // size)):
            key = row, chunk
            if key not in self._chunks:
                self._chunks[key] = self._ops.load_shared(self._small, row + chunk * size, size // 4)
            found += self._chunks[key]
        skipped = first % size // 4
        return found[skipped : skipped + c.bundle_bytes // 4]

    def _load(self, place: int, words: int, size: int) -> list[Value]:
        found: list[Value] = []
        while len(found) < words:
            found += self._ops.load_shared(self._small, place + 4 * len(found), size)
        return found

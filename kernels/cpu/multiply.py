"""Multiply-accumulate over one region: unpack, arrange, contract.

The integer forms are, with w the stored code and x the small operand:

- ``wx``: w unsigned, x signed. ``vpdpbusd(acc, w, x)``, or ``maddubs(w, x)`` while pairs fit 16 bits.
- ``xw``: x unsigned (probabilities), w signed.
- ``sign``: ``maddubs(|w|, sign(x, w))`` for signed × signed where the hardware only has unsigned × signed.
- ``ss``: signed × signed (``sdot``, and plain vector IR).

Offset codes need Σ x·(w − offset) = Σ x·w − offset·Σ x, and the correction costs nothing in the loop: keys start their
accumulators from it, values subtract it at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from llvmlite import ir

from ..packing import Packing
from .isa import Isa
from .mapping import Lanes, Region, Unit, broadcast, interleaved, transposed
from .spec import TileSpec
from .vector import F32, HALF, I8, I16, I32, Emitter, Value


@dataclass(frozen=True)
class IntegerForm:
    """How codes of one packing are multiplied on one instruction set.

    Attributes
    ----------
    form : str
        ``wx``, ``xw``, ``sign`` or ``ss``; see the module's description.
    flip : int
        Exclusive-or on each code byte after unpacking, 0 for none.
    offset : int
        What the multiplied code exceeds its value by.
    bound : int
        Largest |w·x| of one product.
    multiple : int
        What codes are multiplied by when they meet the small operand.
    """

    form: str
    flip: int
    offset: int
    bound: int
    multiple: int = 1


def integer_form(packing: Packing, role: str, isa: Isa, matrix: bool = False) -> IntegerForm:
    """Choose the cheapest exact form; the ``matrix`` unit also multiplies signed by signed codes."""
    if matrix and packing.bits == 8 and role == "k" and packing.coding == "signed":
        return IntegerForm("ss", 0, 0, 127 * 127)
    if matrix and packing.bits == 8 and role == "v":
        return IntegerForm("xw", 0x80 if packing.coding == "offset" else 0, 0, 127 * 127)
    if packing.bits == 4 and isa.dot == "vpdpbusd" and role == "v":
        # Nibbles at the top of their bytes are 16 times signed codes, and unsigned weights need no correction.
        return IntegerForm("xw", 0x88 if packing.coding == "offset" else 0, 0, 128 * 127, 16)
    if packing.bits == 4:
        # Both codings multiply as 0 … 15: one exclusive-or turns a signed nibble into an offset one.
        form = "ss" if isa.dot in ("sdot", "widen") else "wx"
        return IntegerForm(form, 0x88 if packing.coding == "signed" else 0, 8, 15 * 127)
    to_signed = 0x80 if packing.coding == "offset" else 0
    if isa.dot in ("sdot", "widen"):
        return IntegerForm("ss", to_signed, 0, 127 * 127)
    if isa.dot == "vpdpbusd":
        if role == "v" and packing.coding == "signed":
            return IntegerForm("xw", 0, 0, 127 * 127)
        return IntegerForm("wx", 0 if packing.coding == "offset" else 0x80, 128, 255 * 127)
    return IntegerForm("xw" if role == "v" else "sign", to_signed, 0, 127 * 127)


class Unpacker:
    """Turns loaded words into code registers, once per chunk and iteration."""

    def __init__(self, emit: Emitter, spec: TileSpec, base: Value, region: Region):
        self.emit, self.spec, self.base, self.region = emit, spec, base, region
        self._done: dict[int, list[Value]] = {}

    def register(self, source: tuple[int, int]) -> Value:
        chunk, index = source
        if chunk not in self._done:
            self._done[chunk] = self._unpack(chunk)
        return self._done[chunk][index]

    def tile(self, sources: Sequence[tuple[int, int]]) -> tuple[Value, int] | None:
        """Where the first of several chunks is and the bytes between them, if they are evenly spaced; prefetches them.

        Chunks of packings with one code a byte, for a unit that reads them itself.
        """
        spec = self.spec
        places = [self.region.chunks[chunk] for chunk, _ in sources]
        offsets = [row * spec.plan.pitch_bytes + byte for row, byte in places]
        strides = {b - a for a, b in pairwise(offsets)} or {spec.chunk_bytes}
        if len(strides) > 1:
            return None
        if spec.prefetch:
            for offset in offsets:
                self.emit.prefetch(self.base, offset + 64 * spec.prefetch)
        return self.emit.at(self.base, offsets[0]), strides.pop()

    def _unpack(self, chunk: int) -> list[Value]:
        emit, spec = self.emit, self.spec
        packing = spec.layout.packing
        row, byte = self.region.chunks[chunk]
        offset = row * spec.plan.pitch_bytes + byte
        width = spec.chunk_bytes
        if spec.prefetch and chunk * width % 64 == 0:
            emit.prefetch(self.base, offset + 64 * spec.prefetch)
        if packing.format == "fp16":
            return [emit.load(self.base, ir.VectorType(HALF, width // 2), offset)]
        word = emit.load(self.base, ir.VectorType(I8, width), offset)
        form = integer_form(packing, spec.role, spec.isa, spec.matrix) if spec.integer else None
        flip = form.flip if form is not None else float_flip(packing)
        if flip:
            word = emit.builder.xor(word, emit.constant(I8, width, flip))
        if packing.lower is not None:
            return [_raised(emit, each, form) for each in packing.lower(emit, word)]
        if packing.bits == 8:
            return [word]
        low, high = raised_nibbles(emit, word) if form is not None and form.multiple > 1 else split_nibbles(emit, word)
        if not packing.in_order:
            return [low, high]
        return [emit.shuffle(low, [which * width + byte for which, byte in half], high) for half in interleaved(width)]


def split_nibbles(emit: Emitter, word: Value) -> tuple[Value, Value]:
    """Low and high nibble of each byte, as bytes 0 … 15: one shift and two masks for the whole register."""
    width = word.type.count
    mask = emit.constant(I8, width, 15)
    wide = ir.VectorType(I16, width // 2)
    shifted = emit.builder.lshr(emit.builder.bitcast(word, wide), emit.constant(I16, width // 2, 4))
    return emit.builder.and_(word, mask), emit.builder.and_(emit.builder.bitcast(shifted, word.type), mask)


def raised_nibbles(emit: Emitter, word: Value) -> tuple[Value, Value]:
    """16 times the low and the high nibble of each byte, as signed bytes: one shift and two masks."""
    width = word.type.count
    mask = emit.constant(I8, width, 0xF0)
    wide = ir.VectorType(I16, width // 2)
    shifted = emit.builder.shl(emit.builder.bitcast(word, wide), emit.constant(I16, width // 2, 4))
    return emit.builder.and_(emit.builder.bitcast(shifted, word.type), mask), emit.builder.and_(word, mask)


def _raised(emit: Emitter, codes: Value, form: IntegerForm | None) -> Value:
    """Codes 0 … 15 of a packing's own unpacking in the form that they are multiplied in."""
    if form is None or form.multiple == 1:
        return codes
    return emit.builder.shl(codes, emit.constant(I8, codes.type.count, 4))


def float_flip(packing: Packing) -> int:
    """Exclusive-or that makes codes of the float pipeline offset (int4) or signed (int8) numbers."""
    if packing.bits == 4:
        return 0x88 if packing.coding == "signed" else 0
    return 0x80 if packing.coding == "offset" else 0


def float_offset(packing: Packing) -> int:
    """What a widened code of the float pipeline exceeds its value by."""
    return 8 if packing.bits == 4 else 0


def arranged(emit: Emitter, unit: Unit, unpacker: Unpacker) -> list[Value]:
    """The unit's code registers as accumulator operands: as they are, or four interleaved into quads."""
    registers = [unpacker.register(source) for source in unit.sources]
    if unit.kind == "direct":
        return registers
    width = registers[0].type.count
    pairs = [
        emit.shuffle(registers[a], [which * width + byte for which, byte in half], registers[a + 1])
        for a in (0, 2)
        for half in interleaved(width)
    ]
    low0, high0, low1, high1 = (emit.builder.bitcast(pair, ir.VectorType(I16, width // 2)) for pair in pairs)
    quads = []
    for quarter, (a, b) in enumerate(((low0, low1), (low0, low1), (high0, high1), (high0, high1))):
        start = quarter % 2 * 4
        lanes = [
            which * (width // 2) + 8 * lane + start + i
            for lane in range(width // 16)
            for i in range(4)
            for which in range(2)
        ]
        quads.append(emit.builder.bitcast(emit.shuffle(a, lanes, b), ir.VectorType(I8, width)))
    assert len(quads) == len(transposed(width))
    return quads


def widened(emit: Emitter, register: Value, part: int) -> Value:
    """Float32 lanes of one quarter of a code register (half of an fp16 one)."""
    lanes = emit.isa.lanes
    piece = emit.shuffle(register, range(part * lanes, (part + 1) * lanes))
    if register.type.element == HALF:
        return emit.widen_half(piece)
    return piece


class SmallOperand:
    """The reordered small operand of one region in memory: rows × slots."""

    def __init__(self, emit: Emitter, region: Region, element: ir.Type, pointers: Callable[[int, int], Value]):
        """``pointers(row, group)``: where a row's slots start; ``group`` counts 32-channel groups (values only)."""
        self.emit, self.region, self.element, self.pointers = emit, region, element, pointers
        self.integer = element == I8
        self._slots: dict[tuple[int, int, tuple[int, ...]], Value] = {}

    def load(self, row: int, output: Lanes, groups: Sequence[int]) -> Value:
        """The vector that meets ``output``; ``groups`` names the group of each lane."""
        positions = [self.region.slots[r] for r in output.r]
        parts = {}
        for group in sorted(set(groups)):
            parts[group] = self._pattern(row, group, tuple(positions))
        if len(parts) == 1:
            return parts[groups[0]]
        names = sorted(parts)
        vectors = [self.emit.builder.bitcast(parts[g], ir.VectorType(I32, len(groups))) for g in names]
        merged = self.emit.gather(vectors, [(names.index(g), lane) for lane, g in enumerate(groups)])
        return self.emit.builder.bitcast(merged, parts[names[0]].type)

    def _pattern(self, row: int, group: int, positions: tuple[int, ...]) -> Value:
        key = (row, group, positions)
        if key not in self._slots:
            self._slots[key] = self._build(self.pointers(row, group), positions)
        return self._slots[key]

    def _build(self, base: Value, positions: tuple[int, ...]) -> Value:
        emit = self.emit
        lane = I32 if self.integer else F32
        run = broadcast(positions)
        if run is not None:
            first, period = run
            vector = emit.load(base, ir.VectorType(lane, period), 4 * first)
            value = emit.shuffle(vector, [i % period for i in range(len(positions))])
        else:
            lowest = min(positions)
            vector = emit.load(base, ir.VectorType(lane, max(positions) - lowest + 1), 4 * lowest)
            value = emit.shuffle(vector, [p - lowest for p in positions])
        return emit.builder.bitcast(value, ir.VectorType(I8, 4 * len(positions))) if self.integer else value


class IntegerDots:
    """Accumulates integer products; on ``maddubs`` targets several 16-bit sums are taken before widening to 32 bits."""

    def __init__(self, emit: Emitter, form: IntegerForm):
        self.emit, self.form = emit, form
        self.depth = 32767 // (2 * form.bound) if emit.isa.dot == "maddubs" else 0
        self._pending: dict[Any, tuple[Value, int]] = {}
        self._touched: dict[Any, None] = {}

    def settle(self, accumulators: dict[Any, Value]) -> None:
        """Finish what has been added so far before anything emitted later."""
        for key in self._touched:
            if key in self._pending:
                value, count = self._pending[key]
                self._pending[key] = (self.emit.pin(value), count)
            else:
                accumulators[key] = self.emit.pin(accumulators[key])
        self._touched.clear()

    def add(self, key: Any, accumulators: dict[Any, Value], w: Value, x: Value) -> None:
        """accumulators[key] += dot of each 32-bit lane's four bytes."""
        emit, form = self.emit, self.form
        self._touched[key] = None
        if emit.isa.dot == "vpdpbusd":
            a, b = (w, x) if form.form == "wx" else (x, w)
            accumulators[key] = _vpdpbusd(emit, accumulators[key], a, b)
        elif emit.isa.dot == "sdot":
            accumulators[key] = _sdot(emit, accumulators[key], w, x)
        elif emit.isa.dot == "widen":
            accumulators[key] = emit.builder.add(accumulators[key], _widening_dot(emit, w, x))
        else:
            self._add_pairs(key, accumulators, w, x)

    def _add_pairs(self, key: Any, accumulators: dict[Any, Value], w: Value, x: Value) -> None:
        emit = self.emit
        if self.form.form == "sign":
            magnitude = emit.intrinsic("llvm.abs.v32i8", w.type, [w.type, ir.IntType(1)])
            sign = emit.intrinsic("llvm.x86.avx2.psign.b", w.type, [w.type, w.type])
            a = emit.builder.call(magnitude, [w, ir.Constant(ir.IntType(1), 0)])
            b = emit.builder.call(sign, [x, w])
        else:
            a, b = (w, x) if self.form.form == "wx" else (x, w)
        halves = ir.VectorType(I16, 16)
        pairs = emit.builder.call(emit.intrinsic("llvm.x86.avx2.pmadd.ub.sw", halves, [w.type, w.type]), [a, b])
        if key in self._pending:
            value, count = self._pending[key]
            pairs, count = emit.builder.add(value, pairs), count + 1
        else:
            count = 1
        self._pending[key] = (pairs, count)
        if count >= self.depth:
            self._flush(key, accumulators)

    def _flush(self, key: Any, accumulators: dict[Any, Value]) -> None:
        emit = self.emit
        pairs, _ = self._pending.pop(key)
        madd = emit.intrinsic("llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), [pairs.type, pairs.type])
        sums = emit.builder.call(madd, [pairs, emit.constant(I16, 16, 1)])
        accumulators[key] = emit.builder.add(accumulators[key], sums)

    def finish(self, accumulators: dict[Any, Value]) -> None:
        """Widen what is still pending."""
        for key in list(self._pending):
            self._flush(key, accumulators)


def _vpdpbusd(emit: Emitter, accumulator: Value, a: Value, b: Value) -> Value:
    bits = emit.isa.vector_bytes * 8
    words = accumulator.type
    # Declared with 32-bit lanes, the form that every LLVM release accepts or upgrades.
    dot = emit.intrinsic(f"llvm.x86.avx512.vpdpbusd.{bits}", words, [words] * 3)
    return emit.builder.call(dot, [accumulator, emit.builder.bitcast(a, words), emit.builder.bitcast(b, words)])


def _sdot(emit: Emitter, accumulator: Value, a: Value, b: Value) -> Value:
    dot = emit.intrinsic("llvm.aarch64.neon.sdot.v4i32.v16i8", accumulator.type, [accumulator.type, a.type, b.type])
    return emit.builder.call(dot, [accumulator, a, b])


def _widening_dot(emit: Emitter, a: Value, b: Value) -> Value:
    """Four signed products a lane in plain vector IR: 32-bit products of 16-bit pairs, then neighbours added."""
    width = a.type.count
    wide = ir.VectorType(I32, width)
    products = emit.builder.mul(emit.builder.sext(a, wide), emit.builder.sext(b, wide))
    while products.type.count > width // 4:
        lanes = products.type.count
        even = emit.shuffle(products, range(0, lanes, 2))
        odd = emit.shuffle(products, range(1, lanes, 2))
        products = emit.builder.add(even, odd)
    return products

"""LLVM IR for vectors: the small vocabulary that tiles are written in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llvmlite import ir

from .isa import Isa
from .share import Share

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, HALF = ir.FloatType(), ir.HalfType()
VOID = ir.VoidType()
BYTES = I8.as_pointer()
Value = Any


@dataclass
class Loop:
    """A counted loop being built; see `Emitter.loop`."""

    index: Value
    carried: list[Value]
    outside: str
    after: ir.Block
    phis: list[Any] = field(default_factory=list)


class Emitter:
    """Writes vector code for one instruction set into a function.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
    isa : Isa
    """

    def __init__(self, builder: ir.IRBuilder, isa: Isa):
        self.builder = builder
        self.isa = isa
        self._block_name = "once.per.call."

    # -- constants ------------------------------------------------------------------------------------------------

    def i64(self, value: int) -> ir.Constant:
        return ir.Constant(I64, value)

    def mul(self, value: Value, factor: int) -> Value:
        """A 64-bit number times a constant."""
        if isinstance(value, ir.Constant):
            return self.i64(value.constant * factor)
        if factor == 0:
            return self.i64(0)
        return value if factor == 1 else self.builder.mul(value, self.i64(factor))

    def div(self, value: Value, divisor: int) -> Value:
        """A non-negative 64-bit number divided by a constant, rounded down."""
        if isinstance(value, ir.Constant):
            return self.i64(value.constant // divisor)
        return self.builder.udiv(value, self.i64(divisor))

    def plus(self, a: Value, b: Value) -> Value:
        """The sum of two 64-bit numbers."""
        if isinstance(a, ir.Constant):
            a, b = b, a
        if isinstance(b, ir.Constant):
            if isinstance(a, ir.Constant):
                return self.i64(a.constant + b.constant)
            if b.constant == 0:
                return a
        return self.builder.add(a, b)

    def offset(self, value: Value, factor: int, addend: int) -> Value:
        """value · factor + addend."""
        return self.plus(self.mul(value, factor), self.i64(addend))

    def constant(self, element: ir.Type, lanes: int, value: float | Sequence[float]) -> ir.Constant:
        values = list(value) if isinstance(value, Sequence) else [value] * lanes
        return ir.Constant(ir.VectorType(element, lanes), values)

    # -- memory ---------------------------------------------------------------------------------------------------

    def at(self, base: Value, offset: Value | int) -> Value:
        """``base`` (bytes) moved by ``offset`` bytes."""
        if isinstance(offset, int):
            offset = self.i64(offset)
        if isinstance(offset, ir.Constant) and offset.constant == 0:
            return base
        return self.builder.gep(base, [offset])

    def load(self, base: Value, type_: ir.Type, offset: Value | int = 0) -> Value:
        pointer = self.builder.bitcast(self.at(base, offset), type_.as_pointer())
        return self.builder.load(pointer, align=1)

    def store(self, value: Value, base: Value, offset: Value | int = 0) -> None:
        pointer = self.builder.bitcast(self.at(base, offset), value.type.as_pointer())
        self.builder.store(value, pointer, align=1)

    def prefetch(self, base: Value, offset: int, level: int = 2) -> None:
        """Fetch a line into the cache of this level, 1 or 2."""
        call = self.intrinsic("llvm.prefetch.p0", VOID, [BYTES, I32, I32, I32])
        pointer = self.at(base, offset)
        self.builder.call(call, [pointer, ir.Constant(I32, 0), ir.Constant(I32, 4 - level), ir.Constant(I32, 1)])

    def prefetch_scales(self, scales: Value, groups: int, blocks: int) -> None:
        """Fetch the scales of 32 tokens, ``blocks`` blocks after those at ``scales``: a line for each group."""
        for group in range(groups if blocks else 0):
            self.prefetch(scales, 64 * (groups * blocks + group))

    def intrinsic(self, name: str, result: ir.Type, arguments: Sequence[ir.Type]) -> ir.Function:
        module = self.builder.module
        if name in module.globals:
            return module.globals[name]
        return ir.Function(module, ir.FunctionType(result, arguments), name)

    def unary(self, name: str, value: Value) -> Value:
        """A type-overloaded one-operand LLVM intrinsic on a float vector."""
        lanes = value.type.count
        function = self.intrinsic(f"llvm.{name}.v{lanes}f32", value.type, [value.type])
        return self.builder.call(function, [value])

    def binary(self, name: str, a: Value, b: Value) -> Value:
        function = self.intrinsic(f"llvm.{name}.v{a.type.count}f32", a.type, [a.type, a.type])
        return self.builder.call(function, [a, b])

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a·b + c; contracted where the target fuses, two operations elsewhere."""
        function = self.intrinsic(f"llvm.fmuladd.v{a.type.count}f32", a.type, [a.type] * 3)
        return self.builder.call(function, [a, b, c])

    # -- lanes ----------------------------------------------------------------------------------------------------

    def splat(self, scalar: Value, lanes: int) -> Value:
        vector = ir.VectorType(scalar.type, lanes)
        one = self.builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), self.constant(I32, lanes, 0))

    def shuffle(self, a: Value, lanes: Sequence[int], b: Value | None = None) -> Value:
        if b is None:
            if list(lanes) == list(range(a.type.count)):
                return a
            b = ir.Constant(a.type, ir.Undefined)
        return self.builder.shuffle_vector(a, b, self.constant(I32, len(lanes), list(lanes)))

    def gather(self, vectors: Sequence[Value], lanes: Sequence[tuple[int, int]]) -> Value:
        """A vector whose i-th lane is lane ``lanes[i][1]`` of ``vectors[lanes[i][0]]``."""
        merged: Value = None
        for source in sorted({source for source, _ in lanes}):
            mine = [owner == source for owner, _ in lanes]
            part = self.shuffle(
                vectors[source], [lane if owned else 0 for owned, (_, lane) in zip(mine, lanes, strict=True)]
            )
            take = [i + len(lanes) if owned else i for i, owned in enumerate(mine)]
            merged = part if merged is None else self.shuffle(merged, take, part)
        return merged

    def narrow(self, rows: Sequence[Sequence[Value]]) -> list[Value]:
        """Each row's 32-bit lanes, 0 … 127 each and in several vectors, as the bytes of one vector."""
        lanes = self.isa.lanes
        if self.isa.vector_bytes < 32 or self.isa.dot == "widen":
            count = lanes * len(rows[0])
            wholes = (self.gather(words, [divmod(i, lanes) for i in range(count)]) for words in rows)
            return [self.builder.trunc(whole, ir.VectorType(I8, count)) for whole in wholes]
        # Saturating packs work within 128-bit lanes, and one permutation restores the order: half of what trunc takes.
        words = [word for row in rows for word in row]
        words += words[-1:] * (-len(words) % 4)
        narrowed = [self._packed_four(words[i : i + 4]) for i in range(0, len(words), 4)]
        if lanes == 8:
            return narrowed
        halves = [self.shuffle(each, range(half, half + 32)) for each in narrowed for half in (0, 32)]
        return halves[: len(rows)]

    def _packed_four(self, words: Sequence[Value]) -> Value:
        """The lanes of four vectors in order, as bytes."""
        lanes = self.isa.lanes
        avx = "avx2" if lanes == 8 else "avx512"
        suffix = "" if lanes == 8 else ".512"
        halves, narrow = ir.VectorType(I16, 2 * lanes), ir.VectorType(I8, 4 * lanes)
        pack_words = self.intrinsic(f"llvm.x86.{avx}.packssdw{suffix}", halves, [words[0].type] * 2)
        pack_halves = self.intrinsic(f"llvm.x86.{avx}.packuswb{suffix}", narrow, [halves] * 2)
        low, high = (self.builder.call(pack_words, [words[i], words[i + 1]]) for i in (0, 2))
        packed = self.builder.bitcast(self.builder.call(pack_halves, [low, high]), ir.VectorType(I32, lanes))
        quads = [4 * lane + source for source in range(4) for lane in range(lanes // 4)]
        return self.builder.bitcast(self.shuffle(packed, quads), narrow)

    def maximum(self, a: Value, b: Value) -> Value:
        """The larger of each lane of float vectors without NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def widen_half(self, halves: Value) -> Value:
        """fp16 lanes to float32."""
        lanes = halves.type.count
        if self.isa.half_conversion:
            return self.builder.fpext(halves, ir.VectorType(F32, lanes))
        # Without hardware: move exponent and mantissa into place and rescale by 2^112; exact for all finite values.
        bits = self.builder.zext(self.builder.bitcast(halves, ir.VectorType(I16, lanes)), ir.VectorType(I32, lanes))
        magnitude = self.builder.shl(
            self.builder.and_(bits, self.constant(I32, lanes, 0x7FFF)), self.constant(I32, lanes, 13)
        )
        sign = self.builder.shl(
            self.builder.and_(bits, self.constant(I32, lanes, 0x8000)), self.constant(I32, lanes, 16)
        )
        scaled = self.builder.fmul(
            self.builder.bitcast(magnitude, ir.VectorType(F32, lanes)), self.constant(F32, lanes, 2.0**112)
        )
        signed = self.builder.or_(self.builder.bitcast(scaled, ir.VectorType(I32, lanes)), sign)
        return self.builder.bitcast(signed, ir.VectorType(F32, lanes))

    def opaque(self, value: int) -> Value:
        """``value`` as a number that the optimiser cannot see, so that a loop of few trips stays a loop."""
        hidden = ir.InlineAsm(ir.FunctionType(I64, [I64]), "", "=r,0", side_effect=False)
        return self.builder.call(hidden, [self.i64(value)])

    def pin(self, value: Value) -> Value:
        """``value``, computed before anything that is emitted later.

        Without pins the scheduler gathers a region's loads in front of its arithmetic and spills them.
        """
        constraint = {"aarch64": "w"}.get(self.isa.triple.split("-")[0], "v" if self.isa.registers > 16 else "x")
        signature = ir.FunctionType(value.type, [value.type])
        barrier = ir.InlineAsm(signature, "", f"={constraint},0,~{{memory}}", side_effect=True)
        return self.builder.call(barrier, [value])

    # -- control flow ---------------------------------------------------------------------------------------------

    def begin(self, trips: Value, carried: Sequence[Value] = (), share: Share | None = None) -> Loop:
        """Open a loop over 0 … trips − 1 that carries values from one iteration to the next and runs at ``share``."""
        before = self.builder.block
        outside, inside = self._block_name, share.name if share is not None else self._block_name
        head = self.builder.append_basic_block(inside)
        body = self.builder.append_basic_block(inside)
        after = self.builder.append_basic_block(outside)
        self._block_name = inside
        self.builder.branch(head)
        self.builder.position_at_end(head)
        index = self.builder.phi(I64, "i")
        index.add_incoming(self.i64(0), before)
        phis = []
        for value in carried:
            phi = self.builder.phi(value.type)
            phi.add_incoming(value, before)
            phis.append(phi)
        self.builder.cbranch(self.builder.icmp_signed("<", index, trips), body, after)
        self.builder.position_at_end(body)
        return Loop(index, list(phis), outside, after, [index, head, *phis])

    def end(self, loop: Loop, carried: Sequence[Value] = ()) -> list[Value]:
        """Close ``loop``; returns the carried values as they are after it."""
        index, head, *phis = loop.phis
        index.add_incoming(self.builder.add(index, self.i64(1)), self.builder.block)
        for phi, value in zip(phis, carried, strict=True):
            phi.add_incoming(value, self.builder.block)
        self.builder.branch(head)
        self.builder.position_at_end(loop.after)
        self._block_name = loop.outside
        return list(phis)

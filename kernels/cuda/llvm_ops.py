"""What each instruction is on a GPU: `Ops` over LLVM values, with inline PTX where LLVM has no word for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from .ops import Ops

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
GLOBAL, SHARED, CONSTANT = 1, 3, 4
"""Address spaces."""
SHARED_MEMORY = "lowbit_shared"
"""The block's dynamic shared memory in PTX."""


class LlvmOps(Ops):
    """See `lowbit.kernels.cuda.ops.Ops`.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
        Where the code goes.
    """

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def _asm(self, text: str, result: Any, values: Sequence[Any], constraints: str, volatile: bool = False) -> Any:
        function = ir.FunctionType(result, [value.type for value in values])
        return self._builder.call(ir.InlineAsm(function, text, constraints, side_effect=volatile), values)

    def i32(self, value: int) -> Any:
        return ir.Constant(I32, (value + (1 << 31)) % (1 << 32) - (1 << 31))

    def f32(self, value: float) -> Any:
        return ir.Constant(F32, value)

    def add(self, a: Any, b: Any) -> Any:
        return self._builder.add(a, b)

    def sub(self, a: Any, b: Any) -> Any:
        return self._builder.sub(a, b)

    def mul(self, a: Any, b: Any) -> Any:
        return self._builder.mul(a, b)

    def and_(self, a: Any, b: Any) -> Any:
        return self._builder.and_(a, b)

    def xor(self, a: Any, b: Any) -> Any:
        return self._builder.xor(a, b)

    def divide(self, a: Any, b: int) -> Any:
        return self._builder.udiv(a, self.i32(b))

    def quotient(self, a: Any, b: Any) -> Any:
        return self._builder.udiv(a, b)

    def wide_mul(self, a: Any, b: int) -> Any:
        return self._builder.mul(self._builder.sext(a, I64), ir.Constant(I64, b))

    def shift_left(self, a: Any, bits: int) -> Any:
        return self._builder.shl(a, self.i32(bits))

    def shift_right(self, a: Any, bits: int) -> Any:
        return self._builder.lshr(a, self.i32(bits))

    def extract(self, a: Any, bit: int, width: int) -> Any:
        return self._builder.ashr(self._builder.shl(a, self.i32(32 - bit - width)), self.i32(32 - width))

    def lop3(self, a: Any, b: int, c: int, table: int) -> Any:
        return self._asm(f"lop3.b32 $0, $1, $2, $3, {table};", I32, [a, self.i32(b), self.i32(c)], "=r,r,r,r")

    def prmt(self, a: Any, b: Any, selector: int) -> Any:
        return self._asm("prmt.b32 $0, $1, $2, $3;", I32, [a, b, self.i32(selector)], "=r,r,r,r")

    def dp4a(self, a: Any, b: Any, c: Any, signed: bool) -> Any:
        return self._asm(f"dp4a.{'s' if signed else 'u'}32.s32 $0, $1, $2, $3;", I32, [a, b, c], "=r,r,r,r")

    def fadd(self, a: Any, b: Any) -> Any:
        return self._builder.fadd(a, b)

    def fmul(self, a: Any, b: Any) -> Any:
        return self._builder.fmul(a, b)

    def ffma(self, a: Any, b: Any, c: Any) -> Any:
        return self._asm("fma.rn.f32 $0, $1, $2, $3;", F32, [a, b, c], "=f,f,f,f")

    def fmax(self, a: Any, b: Any) -> Any:
        return self._asm("max.f32 $0, $1, $2;", F32, [a, b], "=f,f,f")

    def fabs(self, a: Any) -> Any:
        return self._asm("abs.f32 $0, $1;", F32, [a], "=f,f")

    def exp2(self, a: Any) -> Any:
        return self._asm("ex2.approx.ftz.f32 $0, $1;", F32, [a], "=f,f")

    def reciprocal(self, a: Any) -> Any:
        return self._asm("rcp.approx.ftz.f32 $0, $1;", F32, [a], "=f,f")

    def as_float(self, bits: Any) -> Any:
        return self._builder.bitcast(bits, F32)

    def as_int(self, value: Any) -> Any:
        return self._builder.bitcast(value, I32)

    def to_float(self, a: Any) -> Any:
        return self._builder.sitofp(a, F32)

    def halves(self, word: Any) -> tuple[Any, Any]:
        low = self._builder.trunc(word, I16)
        high = self._builder.trunc(self._builder.lshr(word, self.i32(16)), I16)
        return self._half(low), self._half(high)

    def _half(self, bits: Any) -> Any:
        return self._asm("cvt.f32.f16 $0, $1;", F32, [bits], "=f,h")

    def _less(self, a: Any, b: Any) -> Any:
        return self._builder.fcmp_ordered("<", a, b) if a.type == F32 else self._builder.icmp_signed("<", a, b)

    def select_less(self, a: Any, b: Any, then: Any, otherwise: Any) -> Any:
        return self._builder.select(self._less(a, b), then, otherwise)

    def remainder(self, a: Any, b: Any) -> Any:
        return self._builder.urem(a, b)

    def address(self, base: Any, offset: Any) -> Any:
        if base.type == I64 and offset.type == I32:
            offset = self._builder.sext(offset, I64)
        return self._builder.add(base, offset)

    def load_global(self, address: Any, offset: int, words: int, stream: bool) -> tuple[Any, ...]:
        hint = ".L1::no_allocate" if stream else ""
        place = f"[${words}{f'+{offset}' if offset else ''}]"
        if words == 1:
            return (self._asm(f"ld.global.nc{hint}.b32 $0, {place};", I32, [address], "=r,l"),)
        targets = ", ".join(f"${i}" for i in range(words))
        text = f"ld.global.nc{hint}.v{words}.b32 {{{targets}}}, {place};"
        loaded = self._asm(text, ir.LiteralStructType([I32] * words), [address], ",".join(["=r"] * words + ["l"]))
        return tuple(self._builder.extract_value(loaded, i) for i in range(words))

    def load_global_half(self, address: Any, offset: int) -> Any:
        place = f"[$1{f'+{offset}' if offset else ''}]"
        return self._half(self._asm(f"ld.global.nc.b16 $0, {place};", I16, [address], "=h,l"))

    def store_global_if_less(self, a: Any, b: Any, address: Any, value: Any) -> None:
        with self._builder.if_then(self._less(a, b)):
            self._builder.store(value, self._builder.inttoptr(address, value.type.as_pointer(GLOBAL)), align=4)

    def _shared(self, address: Any, offset: int, kind: Any) -> Any:
        """Pointer to ``kind`` at a byte of dynamic shared memory."""
        module = self._builder.module
        memory = module.globals.get(SHARED_MEMORY)
        if memory is None:
            memory = ir.GlobalVariable(module, ir.ArrayType(I8, 0), SHARED_MEMORY, addrspace=SHARED)
            memory.linkage, memory.align = "external", 16
        base = self._builder.bitcast(memory, I8.as_pointer(SHARED))
        pointer = self._builder.gep(self._builder.gep(base, [address]), [self.i32(offset)])
        return self._builder.bitcast(pointer, kind.as_pointer(SHARED))

    def load_shared(self, address: Any, offset: int, words: int) -> tuple[Any, ...]:
        if words == 1:
            return (self._builder.load(self._shared(address, offset, I32), align=4),)
        loaded = self._builder.load(self._shared(address, offset, ir.VectorType(I32, words)), align=4 * words)
        return tuple(self._builder.extract_element(loaded, self.i32(i)) for i in range(words))

    def load_shared_half(self, address: Any, offset: int) -> Any:
        return self._half(self._builder.load(self._shared(address, offset, I16), align=2))

    def store_shared(self, address: Any, offset: int, values: Sequence[Any]) -> None:
        words = [self.as_int(value) if value.type == F32 else value for value in values]
        if len(words) == 1:
            self._builder.store(words[0], self._shared(address, offset, I32), align=4)
            return
        vector = ir.VectorType(I32, len(words))
        packed: Any = ir.Constant(vector, ir.Undefined)
        for i, word in enumerate(words):
            packed = self._builder.insert_element(packed, word, self.i32(i))
        self._builder.store(packed, self._shared(address, offset, vector), align=4 * len(words))

    def store_shared_if_less(self, a: Any, b: Any, address: Any, value: Any) -> None:
        with self._builder.if_then(self._less(a, b)):
            self.store_shared(address, 0, (value,))

    def store_shared_byte_if_less(self, a: Any, b: Any, address: Any, value: Any) -> None:
        with self._builder.if_then(self._less(a, b)):
            self._builder.store(self._builder.trunc(value, I8), self._shared(address, 0, I8), align=1)

    def table(self, values: Sequence[int] | Sequence[float], index: Any) -> Any:
        module = self._builder.module
        kind = ir.ArrayType(F32 if isinstance(values[0], float) else I32, len(values))
        constant = ir.Constant(kind, list(values))
        name = module.get_unique_name("table")
        table = ir.GlobalVariable(module, kind, name, addrspace=CONSTANT)
        table.global_constant, table.linkage, table.initializer = True, "internal", constant
        return self._builder.load(self._builder.gep(table, [self.i32(0), index]), align=4)

    def _register(self, name: str) -> Any:
        return self._asm(f"mov.u32 $0, %{name};", I32, [], "=r")

    def thread(self) -> Any:
        return self._register("tid.x")

    def threads(self) -> Any:
        return self._register("ntid.x")

    def block(self, axis: int) -> Any:
        return self._register(f"ctaid.{'xyz'[axis]}")

    def block_barrier(self) -> None:
        self._asm("bar.sync 0;", ir.VoidType(), [], "~{memory}", volatile=True)

    def shuffle_xor(self, value: Any, mask: int) -> Any:
        text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, -1;"
        constraints = "=f,f" if value.type == F32 else "=r,r"
        return self._asm(text, value.type, [value], constraints, volatile=True)

    def select_lane(self, lane: Any, mask: int, set_: Any, clear: Any) -> Any:
        bit = self._builder.and_(lane, self.i32(mask))
        return self._builder.select(self._builder.icmp_signed("!=", bit, self.i32(0)), set_, clear)

    def copy_async_if_less(self, a: Any, b: Any, shared: Any, address: Any) -> None:
        text = "cp.async.cg.shared.global [$0], [$1], 16;"
        with self._builder.if_then(self._less(a, b)):
            pointer = self._builder.ptrtoint(self._shared(shared, 0, I8), I32)
            self._asm(text, ir.VoidType(), [pointer, address], "r,l,~{memory}", volatile=True)

    def commit(self) -> None:
        self._asm("cp.async.commit_group;", ir.VoidType(), [], "~{memory}", volatile=True)

    def wait(self, groups: int) -> None:
        self._asm(f"cp.async.wait_group {groups};", ir.VoidType(), [], "~{memory}", volatile=True)

    def warp_barrier(self) -> None:
        self._asm("bar.warp.sync -1;", ir.VoidType(), [], "~{memory}", volatile=True)

    def mark(self, number: int) -> None:
        self._asm(f"pmevent {number};", ir.VoidType(), [], "", volatile=True)

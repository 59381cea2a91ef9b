"""A machine that runs PTX on the CPU, as PTX's own manual defines it: what a compiled kernel computes, without a GPU.

It knows nothing of how kernels are made, so that it is independent of the simulator, where every instruction has a
meaning written by the kernels' own author. All threads of all blocks advance together, as NumPy vectors: of the
threads that are furthest behind those of one place execute one instruction. Threads at a barrier wait for the others of
their warp or block. Asynchronous copies arrive when they are waited for and not before, uninitialised memory is all
ones, and an access outside the buffers or a misaligned one is an error. An instruction that the machine does not know
is one too.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field

import numpy as np
from ptx_module import Instruction, PtxError, parse

BASE = 0x7E00_0000_0000
"""Address of the first buffer."""
GUARD = 512
"""Bytes between buffers that nobody may touch, and the buffers' alignment."""
WARP = 32
MOST_STEPS = 2_000_000

BITS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64, "f16": 16, "f32": 32, "f64": 64}
BITS |= {f"{sign}{bits}": bits for sign in "su" for bits in (8, 16, 32, 64)}
RAW = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
NUMBERS = {"pred": np.bool_, "f16": np.float16, "f32": np.float32, "f64": np.float64}
NUMBERS |= {f"b{bits}": RAW[bits] for bits in (8, 16, 32, 64)} | {f"u{bits}": RAW[bits] for bits in (8, 16, 32, 64)}
NUMBERS |= {"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64}

_COMPARE = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt}
_COMPARE |= {"ge": operator.ge, "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}


@dataclass
class Buffers:
    """Global memory: arrays at addresses of their own, with guards between them."""

    arrays: dict[str, np.ndarray]
    writable: frozenset[str] = frozenset()
    slack: int = 0
    addresses: dict[str, int] = field(default_factory=dict)

    def __post_init__(self):
        self.bytes, given = np.full(GUARD, 0xFF, np.uint8), self.arrays
        self.readable_at = self.writable_at = np.zeros(GUARD, np.bool_)
        self.arrays = {}
        for name, array in given.items():
            self.include(name, array, name in self.writable)

    def include(self, name, array, writable=False):
        """Put a copy of ``array`` behind the others."""
        offset, size = len(self.bytes), array.nbytes + self.slack
        grown = -(-size // GUARD) * GUARD + GUARD
        self.arrays[name], self.addresses[name] = array, BASE + offset
        self.bytes = np.concatenate([self.bytes, np.full(grown, 0xFF, np.uint8)])
        self.bytes[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        place = np.arange(grown)
        self.readable_at = np.concatenate([self.readable_at, place < size])
        self.writable_at = np.concatenate([self.writable_at, (place < array.nbytes) & writable])

    def undefine(self, name):
        """Make a buffer's bytes those of uninitialised memory."""
        first = self.addresses[name] - BASE
        self.bytes[first : first + self.arrays[name].nbytes] = 0xFF

    def read(self, name):
        array = self.arrays[name]
        first = self.addresses[name] - BASE
        return self.bytes[first : first + array.nbytes].view(array.dtype).reshape(array.shape).copy()


class Machine:
    """One launch."""

    def __init__(self, kernel, grid, threads, shared_bytes, values, buffers):
        self.kernel, self.buffers = kernel, buffers
        self.constants = {}
        for name, content in kernel.constants.items():
            held = f"{kernel.name}.{name}"  # another kernel's constant may have the same name
            if held not in buffers.addresses:
                buffers.include(held, np.frombuffer(content, np.uint8))
            self.constants[name] = buffers.addresses[held]
        self.grid, self.threads = grid, threads
        blocks = grid[0] * grid[1] * grid[2]
        padded = -(-threads // WARP) * WARP
        self.count = blocks * padded
        lane = np.arange(self.count)
        self.tid, self.block = (lane % padded).astype(np.uint32), lane // padded
        self.special = {
            "%tid.x": self.tid,
            "%ctaid.x": (self.block % grid[0]).astype(np.uint32),
            "%ctaid.y": (self.block // grid[0] % grid[1]).astype(np.uint32),
            "%ctaid.z": (self.block // (grid[0] * grid[1])).astype(np.uint32),
            "%laneid": self.tid % WARP,
        }
        constants = {"%ntid.x": threads, "%nctaid.x": grid[0], "%nctaid.y": grid[1], "%nctaid.z": grid[2]}
        constants |= {"%tid.y": 0, "%tid.z": 0, "%ntid.y": 1, "%ntid.z": 1, "%dynamic_smem_size": shared_bytes}
        for name, value in constants.items():
            self.special[name] = np.full(self.count, value, np.uint32)
        self.warp = lane // WARP
        self.registers = {name: np.zeros(self.count, RAW[BITS[kind]]) for name, kind in kernel.registers.items()}
        self.parameters = {}
        for (kind, name), value in zip(kernel.parameters, values, strict=True):
            typed = (
                np.array(value, NUMBERS[kind]) if kind.startswith("f") else np.array(int(value)).astype(RAW[BITS[kind]])
            )
            self.parameters[name] = typed
        dynamic = max(kernel.shared.values(), default=0) + shared_bytes
        self.shared_bytes = max(dynamic, kernel.static_bytes)
        self.shared_stride = -(-self.shared_bytes // 16) * 16 + 16
        self.shared = np.full(blocks * self.shared_stride, 0xFF, np.uint8)
        self.pc = np.where(self.tid < threads, 0, len(kernel.instructions)).astype(np.int64)
        self.waiting = np.zeros(self.count, np.int8)  # 1 at a barrier of the warp, 2 at the block's
        self.copies, self.commits = [], np.zeros(self.count, np.int64)
        self.executed = 0
        self.names = [instruction.name for instruction in kernel.instructions]

    def run(self):
        end = len(self.kernel.instructions)
        with np.errstate(all="ignore"):
            while True:
                able = (self.pc < end) & (self.waiting == 0)
                if not able.any():
                    if not self._release():
                        if (self.pc < end).any():
                            raise PtxError("threads wait for each other at different barriers")
                        return self
                    continue
                place = int(self.pc[able].min())
                mask = able & (self.pc == place)
                self.executed += 1
                if self.executed > MOST_STEPS:
                    raise PtxError(f"still running after {MOST_STEPS} instructions")
                self._step(self.kernel.instructions[place], place, mask)

    def _step(self, instruction, place, mask):
        if instruction.guard:
            held = self.registers[instruction.guard] ^ instruction.negated
            taken = mask & held
        else:
            taken = mask
        name = instruction.name
        if name == "bra":
            self.pc[mask] = place + 1
            self.pc[taken] = self.kernel.labels[instruction.operands[0]]
            return
        if name in ("ret", "exit"):
            self.pc[mask] = place + 1
            self.pc[taken] = len(self.kernel.instructions)
            return
        if name in ("bar", "barrier", "shfl"):
            if taken is not mask and (taken != mask).any():
                raise PtxError(f"a barrier under a condition: {instruction.text}")
            whole = "warp" in instruction.modifiers or name == "shfl"
            self.waiting[mask] = 1 if whole else 2
            return
        self.pc[mask] = place + 1
        if not taken.any():
            return
        method = getattr(self, f"_{name}", None)
        if method is None:
            raise PtxError(f"unknown instruction: {instruction.text}")
        try:
            method(instruction, taken)
        except PtxError:
            raise
        except Exception as error:
            raise PtxError(f"{instruction.text}: {type(error).__name__}: {error}") from error

    def _release(self):
        """Let threads on whose whole warp or block is at one barrier; False if there are none."""
        end = len(self.kernel.instructions)
        alive = self.pc < end
        released = False
        for kind, groups in ((1, self.warp), (2, self.block)):
            here = alive & (self.waiting == kind)
            if not here.any():
                continue
            count = int(groups.max()) + 1
            lacking = np.bincount(groups[alive & ~here], minlength=count)
            free = here & (lacking[groups] == 0)
            for place in np.unique(self.pc[free]):
                mask = free & (self.pc == place)
                # Lanes of one warp must be at one instruction; blocks may meet at several.
                if kind == 1:
                    complete = np.bincount(groups[mask], minlength=count) == np.bincount(groups[alive], minlength=count)
                    mask &= complete[groups]
                if mask.any():
                    instruction = self.kernel.instructions[place]
                    if instruction.name == "shfl":
                        self._shfl(instruction, mask)
                    self.waiting[mask] = 0
                    self.pc[mask] = place + 1
                    released = True
        return released

    # -- operands -----------------------------------------------------------------------------------------------------

    def _read(self, operand, kind):
        """Values of an operand for all threads, as NumPy numbers of the type."""
        dtype = NUMBERS[kind]
        if operand in self.registers:
            raw = self.registers[operand]
            if raw.dtype.itemsize * 8 == BITS[kind] or kind == "pred":
                return raw.view(dtype)
            return raw.astype(RAW[BITS[kind]]).view(dtype)  # a wider register's low bits
        if operand in self.special:
            return self.special[operand].astype(RAW[BITS[kind]]).view(dtype)
        if operand.startswith("!") and operand[1:] in self.registers:
            return ~self.registers[operand[1:]]
        if operand in self.kernel.shared:
            return np.full(self.count, self.kernel.shared[operand], dtype)
        if operand in self.constants:
            return np.full(self.count, self.constants[operand], dtype)
        return np.full(self.count, self._literal(operand, kind), dtype)

    @staticmethod
    def _literal(text, kind):
        if text.startswith("0f"):
            value = np.uint32(int(text[2:], 16))
            return value.view(np.float32) if kind.startswith("f") else value
        if text.startswith("0d"):
            return np.uint64(int(text[2:], 16)).view(np.float64)
        value = int(text.rstrip("U"), 0)
        if kind == "pred":
            return bool(value)
        raw = np.array([value & ((1 << BITS[kind]) - 1)], np.uint64).astype(RAW[BITS[kind]])
        return raw.view(NUMBERS[kind])[0] if not kind.startswith("f") else float(value)

    def _write(self, operand, values, mask):
        if operand == "_":
            return
        target = self.registers[operand]
        values = np.asarray(values)
        if values.dtype != np.bool_ and values.dtype.itemsize != target.dtype.itemsize:
            signed = values.dtype.kind == "i"
            size = target.dtype.itemsize
            values = values.astype(f"i{size}" if signed else f"u{size}")
        np.copyto(target, values.view(target.dtype), where=mask)

    @staticmethod
    def _kind(instruction):
        return next(m for m in reversed(instruction.modifiers) if m in BITS)

    def _vector(self, operand):
        return [part.strip() for part in operand[1:-1].split(",")] if operand.startswith("{") else [operand]

    def _binary(self, instruction, mask, function):
        kind = self._kind(instruction)
        a, b = (self._read(operand, kind) for operand in instruction.operands[1:3])
        found = np.asarray(function(a, b))
        if found.dtype != np.bool_ or kind != "pred":
            found = found.astype(NUMBERS[kind])
        self._write(instruction.operands[0], found, mask)

    def _unary(self, instruction, mask, function):
        kind = self._kind(instruction)
        found = np.asarray(function(self._read(instruction.operands[1], kind))).astype(NUMBERS[kind])
        self._write(instruction.operands[0], found, mask)

    # -- arithmetic ---------------------------------------------------------------------------------------------------

    def _add(self, instruction, mask):
        self._binary(instruction, mask, operator.add)

    def _sub(self, instruction, mask):
        self._binary(instruction, mask, operator.sub)

    def _min(self, instruction, mask):
        self._binary(instruction, mask, np.fmin if self._kind(instruction)[0] == "f" else np.minimum)

    def _max(self, instruction, mask):
        self._binary(instruction, mask, np.fmax if self._kind(instruction)[0] == "f" else np.maximum)

    def _and(self, instruction, mask):
        self._binary(instruction, mask, operator.and_)

    def _or(self, instruction, mask):
        self._binary(instruction, mask, operator.or_)

    def _xor(self, instruction, mask):
        self._binary(instruction, mask, operator.xor)

    def _not(self, instruction, mask):
        self._unary(instruction, mask, operator.invert)

    def _neg(self, instruction, mask):
        self._unary(instruction, mask, operator.neg)

    def _abs(self, instruction, mask):
        self._unary(instruction, mask, np.abs)

    def _ex2(self, instruction, mask):
        self._unary(instruction, mask, np.exp2)

    def _lg2(self, instruction, mask):
        self._unary(instruction, mask, np.log2)

    def _rcp(self, instruction, mask):
        self._unary(instruction, mask, lambda a: np.float32(1) / a)

    def _sqrt(self, instruction, mask):
        self._unary(instruction, mask, np.sqrt)

    def _tanh(self, instruction, mask):
        self._unary(instruction, mask, np.tanh)

    def _mul(self, instruction, mask):
        kind, modifiers = self._kind(instruction), instruction.modifiers
        if kind.startswith("f"):
            self._binary(instruction, mask, operator.mul)
            return
        wide = "wide" in modifiers
        a, b = (self._read(operand, kind) for operand in instruction.operands[1:3])
        self._write(instruction.operands[0], self._product(a, b, kind, wide, "hi" in modifiers), mask)

    @staticmethod
    def _product(a, b, kind, wide, high):
        bits = BITS[kind]
        if wide:
            double = NUMBERS[f"{kind[0]}{2 * bits}"]
            return a.astype(double) * b.astype(double)
        if high:
            found = [int(x) * int(y) >> bits & ((1 << bits) - 1) for x, y in zip(a, b, strict=True)]
            return np.array(found, RAW[bits]).view(NUMBERS[kind])
        return (a * b).astype(NUMBERS[kind])

    def _mad(self, instruction, mask):
        kind, wide = self._kind(instruction), "wide" in instruction.modifiers
        if kind.startswith("f"):
            self._fma(instruction, mask)
            return
        a, b = (self._read(operand, kind) for operand in instruction.operands[1:3])
        product = self._product(a, b, kind, wide, "hi" in instruction.modifiers)
        c = self._read(instruction.operands[3], f"{kind[0]}{BITS[kind] * (2 if wide else 1)}")
        self._write(instruction.operands[0], product + c, mask)

    def _fma(self, instruction, mask):
        a, b, c = (self._read(operand, "f32").astype(np.float64) for operand in instruction.operands[1:4])
        if self._kind(instruction) != "f32":
            raise PtxError(f"unknown instruction: {instruction.text}")
        self._write(instruction.operands[0], (a * b + c).astype(np.float32), mask)

    def _div(self, instruction, mask):
        kind = self._kind(instruction)
        if kind.startswith("f"):
            self._binary(instruction, mask, operator.truediv)
            return
        self._divided(instruction, mask, lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1))

    def _rem(self, instruction, mask):
        self._divided(instruction, mask, lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1))

    def _divided(self, instruction, mask, function):
        kind = self._kind(instruction)
        a, b = (self._read(operand, kind) for operand in instruction.operands[1:3])
        found = np.zeros(self.count, NUMBERS[kind])
        for i in np.flatnonzero(mask):
            if not b[i]:
                raise PtxError(f"division by zero: {instruction.text}")
            found[i] = function(int(a[i]), int(b[i]))
        self._write(instruction.operands[0], found, mask)

    # -- bits ---------------------------------------------------------------------------------------------------------

    def _shl(self, instruction, mask):
        bits = BITS[self._kind(instruction)]
        a, by = self._read(instruction.operands[1], f"u{bits}"), self._read(instruction.operands[2], "u32")
        found = np.where(by < bits, a << np.minimum(by, bits - 1).astype(a.dtype), 0)
        self._write(instruction.operands[0], found.astype(RAW[bits]), mask)

    def _shr(self, instruction, mask):
        kind = self._kind(instruction)
        bits = BITS[kind]
        kind = f"u{bits}" if kind[0] == "b" else kind
        a, by = self._read(instruction.operands[1], kind), self._read(instruction.operands[2], "u32")
        shifted = a >> np.minimum(by, bits - 1).astype(a.dtype)
        found = shifted if kind[0] == "s" else np.where(by < bits, shifted, 0)
        self._write(instruction.operands[0], found.astype(NUMBERS[kind]), mask)

    def _shf(self, instruction, mask):
        low, high, by = (self._read(operand, "u32").astype(np.uint64) for operand in instruction.operands[1:4])
        by = np.minimum(by, np.uint64(32)) if "clamp" in instruction.modifiers else by & np.uint64(31)
        both = high << np.uint64(32) | low
        found = both >> by if "r" in instruction.modifiers else both << by >> np.uint64(32)
        self._write(instruction.operands[0], found.astype(np.uint32), mask)

    def _bfe(self, instruction, mask):
        kind = self._kind(instruction)
        a = self._read(instruction.operands[1], kind)
        position, length = (int(operand, 0) for operand in instruction.operands[2:4])
        bits = BITS[kind]
        left = bits - position - length
        self._write(instruction.operands[0], (a << NUMBERS[kind](left)) >> NUMBERS[kind](bits - length), mask)

    def _bfi(self, instruction, mask):
        f, a = (self._read(operand, "u32") for operand in instruction.operands[1:3])
        position, length = (int(operand, 0) for operand in instruction.operands[3:5])
        hole = np.uint32(((1 << length) - 1) << position)
        self._write(instruction.operands[0], (a & ~hole) | (f << np.uint32(position) & hole), mask)

    def _lop3(self, instruction, mask):
        a, b, c = (self._read(operand, "u32") for operand in instruction.operands[1:4])
        table, found = int(instruction.operands[4], 0), np.zeros(self.count, np.uint32)
        for row in range(8):
            if table >> row & 1:
                found |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        self._write(instruction.operands[0], found, mask)

    def _prmt(self, instruction, mask):
        a, b, selector = (self._read(operand, "u32").astype(np.uint64) for operand in instruction.operands[1:4])
        both, found = b << np.uint64(32) | a, np.zeros(self.count, np.uint64)
        for i in range(4):
            nibble = selector >> np.uint64(4 * i) & np.uint64(15)
            byte = both >> ((nibble & np.uint64(7)) * np.uint64(8)) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            found |= np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * i)
        self._write(instruction.operands[0], found.astype(np.uint32), mask)

    def _dp4a(self, instruction, mask):
        kinds = [m for m in instruction.modifiers if m in BITS]
        a, b = (
            np.ascontiguousarray(self._read(operand, "u32")).view(np.int8 if kind == "s32" else np.uint8)
            for operand, kind in zip(instruction.operands[1:3], kinds, strict=True)
        )
        dots = (a.reshape(-1, 4).astype(np.int64) * b.reshape(-1, 4).astype(np.int64)).sum(axis=1)
        found = self._read(instruction.operands[3], "s32").astype(np.int64) + dots
        self._write(instruction.operands[0], found.astype(np.int32), mask)

    def _selp(self, instruction, mask):
        kind = self._kind(instruction)
        a, b = (self._read(operand, kind) for operand in instruction.operands[1:3])
        self._write(instruction.operands[0], np.where(self._read(instruction.operands[3], "pred"), a, b), mask)

    def _setp(self, instruction, mask):
        kind, (comparison, *rest) = self._kind(instruction), instruction.modifiers
        a, b = (self._read(operand, kind) for operand in instruction.operands[1:3])
        found = self._compared_floats(comparison, a, b) if kind[0] == "f" else _COMPARE[comparison](a, b)
        for word, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
            if word in rest:
                found = function(found, self._read(instruction.operands[3], "pred"))
        self._write(instruction.operands[0], found, mask)

    @staticmethod
    def _compared_floats(comparison, a, b):
        unordered = np.isnan(a) | np.isnan(b)
        if comparison in ("num", "nan"):
            return unordered if comparison == "nan" else ~unordered
        if comparison.endswith("u"):
            return _COMPARE[comparison[:-1]](a, b) | unordered
        return _COMPARE[comparison](a, b) & ~unordered

    # -- moves and conversions ----------------------------------------------------------------------------------------

    def _mov(self, instruction, mask):
        kind = self._kind(instruction)
        target, source = instruction.operands
        if target.startswith("{"):
            parts = self._vector(target)
            bits = BITS[kind] // len(parts)
            whole = self._read(source, f"u{BITS[kind]}")
            for i, part in enumerate(parts):
                self._write(part, (whole >> whole.dtype.type(bits * i)).astype(RAW[bits]), mask)
        elif source.startswith("{"):
            parts = self._vector(source)
            bits = BITS[kind] // len(parts)
            whole = np.zeros(self.count, RAW[BITS[kind]])
            for i, part in enumerate(parts):
                whole |= self._read(part, f"u{bits}").astype(whole.dtype) << whole.dtype.type(bits * i)
            self._write(target, whole, mask)
        else:
            self._write(target, self._read(source, kind), mask)

    def _cvt(self, instruction, mask):
        to, source = (m for m in instruction.modifiers if m in BITS)
        a = self._read(instruction.operands[1], source)
        if to.startswith("f"):
            found = a.astype(NUMBERS[to])
            if "rni" in instruction.modifiers:
                found = np.rint(found)
        elif source.startswith("f"):
            rounding = next(m for m in instruction.modifiers if m in ("rni", "rzi", "rmi", "rpi"))
            rounded = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding](a)
            limits = np.iinfo(NUMBERS[to])
            found = np.clip(np.nan_to_num(rounded.astype(np.float64)), limits.min, limits.max).astype(NUMBERS[to])
        else:
            found = a.astype(NUMBERS[to]) if BITS[to] <= BITS[source] else a.astype(f"{a.dtype.kind}{BITS[to] // 8}")
        self._write(instruction.operands[0], found, mask)

    def _cvta(self, instruction, mask):
        self._write(instruction.operands[0], self._read(instruction.operands[1], self._kind(instruction)), mask)

    # -- memory -------------------------------------------------------------------------------------------------------

    def _address(self, operand):
        base, sign, offset = re.fullmatch(r"\[\s*([%$\w.]+)\s*(?:([+-])\s*(-?\w+))?\s*\]", operand).groups()
        shift = int(offset, 0) * (-1 if sign == "-" else 1) if offset else 0
        if base in self.kernel.shared:
            return np.full(self.count, self.kernel.shared[base] + shift, np.int64)
        if base in self.constants:
            return np.full(self.count, self.constants[base] + shift, np.int64)
        if base not in self.registers:
            return np.full(self.count, int(base, 0) + shift, np.int64)
        return self.registers[base].astype(np.uint64).view(np.int64) + shift

    def _places(self, instruction, operand, width, mask, write):
        """The memory of an access and each thread's byte in it; threads outside ``mask`` get byte 0."""
        address = np.where(mask, self._address(operand), 0)
        if (address % width).any():
            raise PtxError(f"misaligned: {instruction.text}")
        if "shared" in instruction.modifiers or any(m.startswith("shared::") for m in instruction.modifiers):
            if (mask & ((address < 0) | (address + width > self.shared_bytes))).any():
                worst = int(address[mask].max())
                raise PtxError(f"byte {worst} of {self.shared_bytes} of shared memory: {instruction.text}")
            return self.shared, np.where(mask, self.block * self.shared_stride + address, 0)
        place = np.where(mask, address - BASE, 0)
        allowed = self.buffers.writable_at if write else self.buffers.readable_at
        inside = (place >= 0) & (place + width <= len(allowed))
        valid = inside & allowed[np.where(inside, place, 0)] & allowed[np.where(inside, place + width - 1, 0)]
        if (mask & ~valid).any():
            lost = int(address[mask & ~valid][0])
            known = ", ".join(f"{name} {a - BASE}" for name, a in self.buffers.addresses.items())
            raise PtxError(f"illegal address {lost - BASE} ({known}): {instruction.text}")
        return self.buffers.bytes, place

    def _ld(self, instruction, mask):
        kind = self._kind(instruction)
        targets = self._vector(instruction.operands[0])
        if "param" in instruction.modifiers:
            name = instruction.operands[1].strip("[]")
            value = self.parameters[name]
            self._write(targets[0], np.full(self.count, value, value.dtype).view(NUMBERS[kind]), mask)
            return
        size = BITS[kind] // 8
        memory, place = self._places(instruction, instruction.operands[1], size * len(targets), mask, False)
        words = memory[: len(memory) // size * size].view(NUMBERS[kind])
        for i, target in enumerate(targets):
            self._write(target, words[place // size + i], mask)

    def _st(self, instruction, mask):
        kind = self._kind(instruction)
        sources = self._vector(instruction.operands[1])
        size = BITS[kind] // 8
        memory, place = self._places(instruction, instruction.operands[0], size * len(sources), mask, True)
        words = memory[: len(memory) // size * size].view(NUMBERS[kind])
        for i, source in enumerate(sources):
            words[place[mask] // size + i] = self._read(source, kind)[mask]

    def _cp(self, instruction, mask):
        modifiers = instruction.modifiers
        if "commit_group" in modifiers:
            self.commits[mask] += 1
        elif "wait_group" in modifiers or "wait_all" in modifiers:
            behind = int(instruction.operands[0], 0) if "wait_group" in modifiers else -1
            self._arrive(mask, behind)
        else:
            size = int(instruction.operands[2], 0)
            to = Instruction("", False, "cp", ("shared",), [], instruction.text)
            _, target = self._places(to, instruction.operands[0], size, mask, True)
            source = Instruction("", False, "cp", ("global",), [], instruction.text)
            memory, place = self._places(source, instruction.operands[1], size, mask, False)
            data = memory[place[:, None] + np.arange(size)]
            self.copies.append([mask.copy(), target.copy(), data, self.commits.copy()])

    def _arrive(self, mask, behind):
        for copy in self.copies:
            pending, target, data, group = copy
            due = pending & mask & (group < self.commits - behind)
            self.shared[target[due][:, None] + np.arange(data.shape[1])] = data[due]
            copy[0] = pending & ~due
        self.copies = [copy for copy in self.copies if copy[0].any()]

    def _shfl(self, instruction, mask):
        _, mode, _ = instruction.modifiers
        target, value, amount, clamp, members = instruction.operands
        if int(members, 0) & 0xFFFFFFFF != 0xFFFFFFFF or int(clamp, 0) not in (31, 0):
            raise PtxError(f"a shuffle of part of a warp: {instruction.text}")
        lane, by = np.arange(self.count) % WARP, self._read(amount, "u32").astype(np.int64)
        partner = {"bfly": lane ^ by, "idx": by % WARP, "down": lane + by, "up": lane - by}[mode]
        partner = np.where((partner < 0) | (partner >= WARP), lane, partner)
        place = np.arange(self.count) // WARP * WARP + partner
        if (~mask[place[mask]]).any():
            raise PtxError(f"a shuffle from a lane that has ended: {instruction.text}")
        self._write(target.split("|")[0], self._read(value, "b32")[place], mask)

    def _pmevent(self, instruction, mask):
        pass

    def _fence(self, instruction, mask):
        pass

    _membar = _fence


def run(ptx, grid, threads, shared_bytes, values, buffers, name=None):
    """Launch the module's kernel; ``values`` are its parameters in order. Returns the machine after its last step."""
    return Machine(parse(ptx, name), grid, threads, shared_bytes, values, buffers).run()

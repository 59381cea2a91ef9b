"""What each instruction means: `Ops` over Python's numbers, for the simulator."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from . import memory, simulator
from .ops import Ops

LEAST, MOST = -(1 << 31), (1 << 31) - 1
_F32, _I32, _TWO_HALVES = struct.Struct("<f"), struct.Struct("<i"), struct.Struct("<ee")


def signed(value: int, bits: int = 32) -> int:
    """The two's complement number of the low bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def rounded(value: float) -> float:
    """The nearest float32."""
    try:
        found: float = _F32.unpack(_F32.pack(value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return found


def _bytes(word: int) -> bytes:
    return (word & 0xFFFFFFFF).to_bytes(4, "little")


class PythonOps(Ops):
    """See `lowbit.kernels.cuda.ops.Ops`. Must run in a simulated thread where it touches memory or other lanes."""

    def i32(self, value: int) -> int:
        return value if LEAST <= value <= MOST else signed(value)

    def f32(self, value: float) -> float:
        return rounded(value)

    def add(self, a: int, b: int) -> int:
        return self.i32(a + b)

    def sub(self, a: int, b: int) -> int:
        return self.i32(a - b)

    def mul(self, a: int, b: int) -> int:
        return self.i32(a * b)

    def and_(self, a: int, b: int) -> int:
        return a & b

    def xor(self, a: int, b: int) -> int:
        return signed(a ^ b)

    def divide(self, a: int, b: int) -> int:
        return a // b

    def quotient(self, a: int, b: int) -> int:
        return a // b

    def wide_mul(self, a: int, b: int) -> int:
        return a * b

    def shift_left(self, a: int, bits: int) -> int:
        return self.i32(a << bits)

    def shift_right(self, a: int, bits: int) -> int:
        return signed((a & 0xFFFFFFFF) >> bits)

    def extract(self, a: int, bit: int, width: int) -> int:
        return signed(a >> bit, width)

    def lop3(self, a: int, b: int, c: int, table: int) -> int:
        result = 0
        for row in range(8):
            if table >> row & 1:
                result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return signed(result)

    def prmt(self, a: int, b: int, selector: int) -> int:
        eight = _bytes(a) + _bytes(b)
        return signed(int.from_bytes(bytes(eight[selector >> 4 * i & 7] for i in range(4)), "little"))

    def dp4a(self, a: int, b: int, c: int, signed: bool) -> int:
        left = struct.unpack("4b" if signed else "4B", _bytes(a))
        return self.i32(c + sum(x * y for x, y in zip(left, struct.unpack("4b", _bytes(b)), strict=True)))

    def fadd(self, a: float, b: float) -> float:
        return rounded(a + b)

    def fmul(self, a: float, b: float) -> float:
        return rounded(a * b)

    def ffma(self, a: float, b: float, c: float) -> float:
        return rounded(a * b + c)

    def fmax(self, a: float, b: float) -> float:
        return b if math.isnan(a) else a if math.isnan(b) else max(a, b)

    def fabs(self, a: float) -> float:
        return abs(a)

    def exp2(self, a: float) -> float:
        return rounded(2.0**a) if a < 128 else a + math.inf

    def reciprocal(self, a: float) -> float:
        return rounded(1.0 / a) if a else math.copysign(math.inf, a)

    def as_float(self, bits: int) -> float:
        found: float = _F32.unpack(_bytes(bits))[0]
        return found

    def as_int(self, value: float) -> int:
        found: int = _I32.unpack(_F32.pack(value))[0]
        return found

    def to_float(self, a: int) -> float:
        return rounded(float(a))

    def halves(self, word: int) -> tuple[float, float]:
        found: tuple[float, float] = _TWO_HALVES.unpack(_bytes(word))
        return found

    def select_less(self, a: Any, b: Any, then: Any, otherwise: Any) -> Any:
        return then if a < b else otherwise

    def remainder(self, a: int, b: int) -> int:
        return a % b

    def address(self, base: int, offset: int) -> int:
        return base + offset

    def load_global(self, address: int, offset: int, words: int, stream: bool) -> tuple[int, ...]:
        return memory.load_words(address + offset, words)

    def load_global_half(self, address: int, offset: int) -> float:
        return memory.load_f16(address + offset)

    def store_global_if_less(self, a: int, b: int, address: int, value: int | float) -> None:
        if a < b:
            memory.store_words(address, (self._word(value),))

    def _word(self, value: int | float) -> int:
        return self.as_int(value) if isinstance(value, float) else value

    def load_shared(self, address: int, offset: int, words: int) -> tuple[int, ...]:
        return memory.load_words(simulator.shared_address() + address + offset, words)

    def load_shared_half(self, address: int, offset: int) -> float:
        return memory.load_f16(simulator.shared_address() + address + offset)

    def store_shared(self, address: int, offset: int, values: Sequence[int | float]) -> None:
        memory.store_words(simulator.shared_address() + address + offset, [self._word(value) for value in values])

    def store_shared_if_less(self, a: int, b: int, address: int, value: int | float) -> None:
        if a < b:
            self.store_shared(address, 0, (value,))

    def store_shared_byte_if_less(self, a: int, b: int, address: int, value: int) -> None:
        if a < b:
            memory.store_u8(simulator.shared_address() + address, value)

    def table(self, values: Sequence[Any], index: int) -> Any:
        value = values[index]
        return rounded(value) if isinstance(value, float) else value

    def thread(self) -> int:
        return simulator.thread().x

    def threads(self) -> int:
        return len(simulator.thread().launch.lanes)

    def block(self, axis: int) -> int:
        return simulator.thread().block[axis]

    def block_barrier(self) -> None:
        simulator.block_barrier()

    def shuffle_xor(self, value: Any, mask: int) -> Any:
        # Numba's indices are those of whole warps, so that every partner is there.
        return simulator.exchange(value)[simulator.thread().lane ^ mask]

    def select_lane(self, lane: int, mask: int, set_: Any, clear: Any) -> Any:
        return set_ if lane & mask else clear

    def copy_async_if_less(self, a: int, b: int, shared: int, address: int) -> None:
        # The simulator copies at once: a missing wait shows on a device only.
        if a < b:
            self.store_shared(shared, 0, memory.load_words(address, 4))

    def commit(self) -> None:
        pass

    def wait(self, groups: int) -> None:
        pass

    def warp_barrier(self) -> None:
        simulator.warp_barrier()

    def mark(self, number: int) -> None:
        pass

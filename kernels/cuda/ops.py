"""The instructions that kernels are made of, each with two meanings: inline PTX, and Python in the simulator.

A *step* of a kernel is written once, as a function of an `Ops` object and values. `step` makes it callable in a kernel:
as a Numba intrinsic whose code `LlvmOps` emits, or, under ``NUMBA_ENABLE_CUDASIM=1``, as a Python function over
`PythonOps`. Values are opaque to a step: 32-bit integers and floats, 64-bit addresses, and tuples of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

Value = Any
"""An `llvmlite.ir.Value`, or an int or float."""

MAGIC_BITS = 0x4B400000
MAGIC = 12582912.0
"""1.5 · 2^23. Integers below 2^22 that are added to its bits give the float that exceeds it by as much, and the other
way round: conversions that cost an addition."""

AND_AND, AND_XOR = 0xC0, (0xF0 & 0xCC) ^ 0xAA
"""Truth tables of ``lop3``: a & b, and (a & b) ^ c."""


class Ops(ABC):
    """What a step may compute. Integers are 32 bits and wrap; floats are float32."""

    @abstractmethod
    def i32(self, value: int) -> Value: ...
    @abstractmethod
    def f32(self, value: float) -> Value: ...

    @abstractmethod
    def add(self, a: Value, b: Value) -> Value: ...
    @abstractmethod
    def sub(self, a: Value, b: Value) -> Value: ...
    @abstractmethod
    def mul(self, a: Value, b: Value) -> Value: ...
    @abstractmethod
    def and_(self, a: Value, b: Value) -> Value: ...
    @abstractmethod
    def xor(self, a: Value, b: Value) -> Value: ...
    @abstractmethod
    def divide(self, a: Value, b: int) -> Value:
        """The quotient of a number that is not negative, by a constant."""

    @abstractmethod
    def quotient(self, a: Value, b: Value) -> Value:
        """a / b of integers that are not negative, rounded down."""

    @abstractmethod
    def wide_mul(self, a: Value, b: int) -> Value:
        """The 64-bit product with a constant."""

    @abstractmethod
    def shift_left(self, a: Value, bits: int) -> Value: ...
    @abstractmethod
    def shift_right(self, a: Value, bits: int) -> Value:
        """Logical."""

    @abstractmethod
    def extract(self, a: Value, bit: int, width: int) -> Value:
        """The signed field of ``width`` bits from ``bit``."""

    @abstractmethod
    def lop3(self, a: Value, b: int, c: int, table: int) -> Value:
        """Bitwise function of three words, two of them constants, by its truth table."""

    @abstractmethod
    def prmt(self, a: Value, b: Value, selector: int) -> Value:
        """Four bytes of the eight of (b, a), chosen by the selector's nibbles."""

    @abstractmethod
    def dp4a(self, a: Value, b: Value, c: Value, signed: bool) -> Value:
        """c + Σ a_i·b_i over four bytes; ``a``'s are signed or not, ``b``'s are."""

    @abstractmethod
    def fadd(self, a: Value, b: Value) -> Value: ...
    @abstractmethod
    def fmul(self, a: Value, b: Value) -> Value: ...
    @abstractmethod
    def ffma(self, a: Value, b: Value, c: Value) -> Value:
        """a·b + c, rounded once."""

    @abstractmethod
    def fmax(self, a: Value, b: Value) -> Value: ...
    @abstractmethod
    def fabs(self, a: Value) -> Value: ...
    @abstractmethod
    def exp2(self, a: Value) -> Value:
        """2^a, to about 2 ulp; 0 for large negative ``a``."""

    @abstractmethod
    def reciprocal(self, a: Value) -> Value:
        """1/a, to 1 ulp."""

    @abstractmethod
    def as_float(self, bits: Value) -> Value: ...
    @abstractmethod
    def as_int(self, value: Value) -> Value: ...
    @abstractmethod
    def to_float(self, a: Value) -> Value:
        """Convert a signed integer."""

    @abstractmethod
    def halves(self, word: Value) -> tuple[Value, Value]:
        """The two float16 numbers of a word as float32, the low one first."""

    @abstractmethod
    def select_less(self, a: Value, b: Value, then: Value, otherwise: Value) -> Value:
        """``then`` where a < b, of two integers or two floats."""

    @abstractmethod
    def remainder(self, a: Value, b: Value) -> Value:
        """a mod b of integers that are not negative."""

    @abstractmethod
    def address(self, base: Value, offset: Value) -> Value:
        """A 64-bit address and a 32-bit offset, or two 32-bit ones."""

    @abstractmethod
    def load_global(self, address: Value, offset: int, words: int, stream: bool) -> tuple[Value, ...]:
        """1, 2 or 4 words of read-only memory at a 64-bit address; ``stream`` keeps them out of the first cache."""

    @abstractmethod
    def load_global_half(self, address: Value, offset: int) -> Value:
        """A float16 of read-only memory as float32."""

    @abstractmethod
    def store_global_if_less(self, a: Value, b: Value, address: Value, value: Value) -> None:
        """Store one word, integer or float, where a < b."""

    @abstractmethod
    def load_shared(self, address: Value, offset: int, words: int) -> tuple[Value, ...]:
        """1, 2 or 4 words at a byte of the block's dynamic shared memory."""

    @abstractmethod
    def load_shared_half(self, address: Value, offset: int) -> Value:
        """A float16 as float32."""

    @abstractmethod
    def store_shared(self, address: Value, offset: int, values: Sequence[Value]) -> None:
        """1, 2 or 4 words, integers or floats."""

    @abstractmethod
    def store_shared_if_less(self, a: Value, b: Value, address: Value, value: Value) -> None:
        """Store one word where a < b."""

    @abstractmethod
    def store_shared_byte_if_less(self, a: Value, b: Value, address: Value, value: Value) -> None: ...

    @abstractmethod
    def table(self, values: Sequence[int] | Sequence[float], index: Value) -> Value:
        """``values[index]`` of constants, all integers or all floats."""

    @abstractmethod
    def thread(self) -> Value:
        """Index of the thread in its block."""

    @abstractmethod
    def threads(self) -> Value:
        """Threads of a block."""

    @abstractmethod
    def block(self, axis: int) -> Value:
        """Index of the block along x, y or z."""

    @abstractmethod
    def block_barrier(self) -> None: ...

    @abstractmethod
    def shuffle_xor(self, value: Value, mask: int) -> Value:
        """The value, integer or float, of the lane whose number differs in ``mask``."""

    @abstractmethod
    def select_lane(self, lane: Value, mask: int, set_: Value, clear: Value) -> Value:
        """``set_`` in lanes whose number has a bit of ``mask``."""

    @abstractmethod
    def copy_async_if_less(self, a: Value, b: Value, shared: Value, address: Value) -> None:
        """Where a < b, begin to copy 16 bytes of global memory to a multiple of 16 in shared memory."""

    @abstractmethod
    def commit(self) -> None:
        """Make the copies begun since the last commit a group."""

    @abstractmethod
    def wait(self, groups: int) -> None:
        """Wait until at most so many groups of this thread are on their way."""

    @abstractmethod
    def warp_barrier(self) -> None: ...
    @abstractmethod
    def mark(self, number: int) -> None:
        """See `lowbit.kernels.cuda.marks`."""


Type = str | tuple[str, int]
"""``i32``, ``f32``, ``i64``, or a pair of one of them and a length: a tuple."""

Body = Callable[..., Any]


def step(body: Body, arguments: Sequence[Type], result: Type | None) -> Callable[..., Any]:
    """``body(ops, *arguments) -> result`` as a function that kernels can call.

    Parameters
    ----------
    body : callable
        Tuples come and go as Python tuples of values.
    arguments : sequence of Type
        At most eight.
    result : Type or None
    """
    from .simulator import simulating

    return _simulated(body, arguments) if simulating() else _compiled(body, arguments, result)


def _simulated(body: Body, arguments: Sequence[Type]) -> Callable[..., Any]:
    from .python_ops import PythonOps

    ops = PythonOps()

    def plain(kind: Type, value: Any) -> Any:
        if isinstance(kind, tuple):
            return tuple(plain(kind[0], each) for each in value)
        return float(value) if kind == "f32" else int(value)

    def run(*values: Any) -> Any:
        return body(ops, *map(plain, arguments, values))

    return run


def _compiled(body: Body, arguments: Sequence[Type], result: Type | None) -> Callable[..., Any]:
    from numba import types
    from numba.cuda.extending import intrinsic

    from .llvm_ops import LlvmOps

    scalars = {"i32": types.int32, "f32": types.float32, "i64": types.int64}

    def numba_type(kind: Type) -> Any:
        return types.UniTuple(scalars[kind[0]], kind[1]) if isinstance(kind, tuple) else scalars[kind]

    signature = (types.void if result is None else numba_type(result))(*map(numba_type, arguments))

    def codegen(context: Any, builder: Any, _: Any, values: Any) -> Any:
        ops = LlvmOps(builder)
        given = [
            tuple(builder.extract_value(value, i) for i in range(kind[1])) if isinstance(kind, tuple) else value
            for kind, value in zip(arguments, values, strict=True)
        ]
        found = body(ops, *given)
        if result is None:
            return context.get_dummy_value()
        if not isinstance(result, tuple):
            return found
        packed = context.get_constant_undef(signature.return_type)
        for i, value in enumerate(found):
            packed = builder.insert_value(packed, value, i)
        return packed

    def typed(*_: Any) -> Any:
        return signature, codegen

    return intrinsic(_ARITIES[len(arguments)](typed))  # type: ignore[no-any-return]


# Numba reads the number of an intrinsic's arguments from its signature.
_ARITIES: tuple[Callable[[Any], Any], ...] = (
    lambda f: lambda context: f(context),
    lambda f: lambda context, a: f(context, a),
    lambda f: lambda context, a, b: f(context, a, b),
    lambda f: lambda context, a, b, c: f(context, a, b, c),
    lambda f: lambda context, a, b, c, d: f(context, a, b, c, d),
    lambda f: lambda context, a, b, c, d, e: f(context, a, b, c, d, e),
    lambda f: lambda context, a, b, c, d, e, g: f(context, a, b, c, d, e, g),
    lambda f: lambda context, a, b, c, d, e, g, h: f(context, a, b, c, d, e, g, h),
    lambda f: lambda context, a, b, c, d, e, g, h, i: f(context, a, b, c, d, e, g, h, i),
)

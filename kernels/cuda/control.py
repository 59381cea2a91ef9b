"""Steps that no layout decides: indices, barriers, marks, ranges of tiles, single numbers in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .mapping import LANES, TILE
from .ops import Ops, Type, Value, step
from .softmax import NOTHING

WARP_BITS = 5


class Control:
    """Functions for kernels.

    Parameters
    ----------
    marked : bool
        Whether loops carry marks; see `lowbit.kernels.cuda.marks`.
    """

    def __init__(self, marked: bool) -> None:
        self._marked = marked
        self.thread = step(lambda ops: ops.thread(), [], "i32")
        self.threads = step(lambda ops: ops.threads(), [], "i32")
        self.lane = step(lambda ops: ops.and_(ops.thread(), ops.i32(LANES - 1)), [], "i32")
        self.warp = step(lambda ops: ops.shift_right(ops.thread(), WARP_BITS), [], "i32")
        self.warps = step(lambda ops: ops.shift_right(ops.threads(), WARP_BITS), [], "i32")
        self.block_barrier = step(lambda ops: ops.block_barrier(), [], None)
        self.warp_barrier = step(lambda ops: ops.warp_barrier(), [], None)
        self._blocks = [step(lambda ops, axis=axis: ops.block(axis), [], "i32") for axis in range(3)]
        pair: Sequence[Type] = ["f32", "f32"]
        self.zero = step(lambda ops: ops.f32(0.0), [], "f32")
        self.nothing = step(lambda ops: ops.f32(NOTHING), [], "f32")
        self.larger = step(lambda ops, a, b: ops.fmax(a, b), pair, "f32")
        self.add = step(lambda ops, a, b: ops.fadd(a, b), pair, "f32")
        self.split_of = step(_split_of, ["i32"] * 4, ("i32", 2))
        self.tiles = step(_tiles, ["i32"] * 6, ("i32", 2))
        self.load_shared_float = step(lambda ops, at: ops.as_float(*ops.load_shared(at, 0, 1)), ["i32"], "f32")
        self.load_global_float = step(lambda ops, at: ops.as_float(*ops.load_global(at, 0, 1, False)), ["i64"], "f32")
        self.store_global_float = step(
            lambda ops, at, value: ops.store_global_if_less(ops.i32(0), ops.i32(1), at, value), ["i64", "f32"], None
        )

    def block(self, axis: int) -> Callable[[], Any]:
        """Reads the block's index along an axis."""
        return self._blocks[axis]

    def mark(self, number: int) -> Callable[[], None]:
        """Marks a loop, in a build for counting."""
        return step((lambda ops: ops.mark(number)) if self._marked else (lambda ops: None), [], None)

    def device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as kernels can call it."""
        from .simulator import simulating

        if simulating():
            return function
        from numba import cuda

        inlined: Callable[..., Any] = cuda.jit(device=True, forceinline=True)(function)
        return inlined


def _split_of(ops: Ops, count: Value, split: Value, splits: Value, warp: Value) -> tuple[Value, Value]:
    """A warp's first of the split's range of ``count`` things, and the range's end. 32-bit loop bounds are cheap."""
    first = ops.quotient(ops.mul(count, split), splits)
    stop = ops.quotient(ops.mul(count, ops.add(split, ops.i32(1))), splits)
    return ops.add(first, warp), stop


def _tiles(
    ops: Ops, tokens: Value, query_rows: Value, window: Value, split: Value, splits: Value, warp: Value
) -> tuple[Value, Value]:
    """The same of tiles, from the first that a window lets any row see."""
    zero, one = ops.i32(0), ops.i32(1)
    count = ops.shift_right(ops.add(tokens, ops.i32(TILE - 1)), WARP_BITS)
    start = ops.sub(ops.sub(ops.add(tokens, one), query_rows), window)
    start = ops.select_less(window, one, zero, ops.select_less(start, zero, zero, start))
    hidden = ops.shift_right(start, WARP_BITS)
    first, stop = _split_of(ops, ops.sub(count, hidden), split, splits, warp)
    return ops.add(first, hidden), ops.add(stop, hidden)

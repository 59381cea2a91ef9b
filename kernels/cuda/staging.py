"""Tiles on their way: copies into a warp's ring of stages, made while earlier tiles are computed.

A warp copies its own tiles in the order of memory, whatever the layout, so that every request is whole lines; lanes
then read their vectors from shared memory, where 16-byte chunks lie swizzled.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import CompileError
from .contraction import SCALE_BYTES, Contraction, swizzled
from .mapping import LANES, TILE
from .ops import Ops, Value, step
from .shared import Stage

CHUNK = 16
"""Bytes of one copy."""


def stage_of(keys: Contraction, values: Contraction) -> Stage:
    """What one tile of both takes.

    Raises
    ------
    CompileError
        If a tile is no run of whole chunks.
    """
    for role, c in (("K", keys), ("V", values)):
        if not c.tiling.contiguous:
            raise CompileError(f"{role}: a tile of 32 tokens is no run of memory that can be copied")

    def scales(c: Contraction) -> int:
        return c.groups * TILE * SCALE_BYTES if c.scaled else 0

    return Stage((keys.tiling.tile_bytes, scales(keys), values.tiling.tile_bytes, scales(values)))


def copy_tile(
    ops: Ops, stage: Stage, sources: Sequence[Value], tile: Value, stop: Value, place: Value, lane: Value
) -> None:
    """Begin to copy a tile's operands and scales into the stage at byte ``place``, if ``tile`` < ``stop``.

    Parameters
    ----------
    sources : sequence of Value
        Global addresses of tile 0 of keys, their scales, values, theirs.
    """
    for number, (source, size, offset) in enumerate(zip(sources, stage.sizes, stage.places, strict=True)):
        packed = number % 2 == 0
        chunks = size // CHUNK
        for first in range(0, chunks, LANES):
            index = ops.add(lane, ops.i32(first))
            inside = ops.select_less(index, ops.i32(chunks), tile, stop) if first + LANES > chunks else tile
            byte = ops.shift_left(index, 4)
            target = ops.add(place, ops.i32(offset))
            target = ops.add(target, swizzled(ops, byte) if packed else byte)
            address = ops.address(ops.address(source, ops.wide_mul(tile, size)), byte)
            ops.copy_async_if_less(inside, stop, target, address)
    ops.commit()


class Ring:
    """Functions for kernels.

    Parameters
    ----------
    stage : Stage
    stages : int
    """

    def __init__(self, stage: Stage, stages: int) -> None:
        self.copy_tile = step(
            lambda ops, *given: copy_tile(ops, stage, *given), [("i64", 4), "i32", "i32", "i32", "i32"], None
        )
        self.wait = step(lambda ops: ops.wait(stages - 1), [], None)
        self.four = step(lambda ops, a, b, c, d: (a, b, c, d), ["i64"] * 4, ("i64", 4))

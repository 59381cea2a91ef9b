"""Tiles on their way: copies into a warp's ring of stages, made while earlier tiles are computed.

A warp copies its own tiles in the order of memory, whatever the layout, so that every request is whole lines; lanes
then read their vectors from shared memory, where 16-byte chunks lie swizzled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import CompileError
from .contraction import SCALE_BYTES, Contraction, swizzled
from .control import Control
from .mapping import LANES, TILE
from .ops import Ops, Value, step
from .shared import LINES, Shared, Stage

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


def in_tile(shared: Shared, operand: int, tile_bytes: int) -> Callable[..., Any]:
    """A step ``(base, tile, stage, offset) -> address``: where byte ``offset`` of a tile of one operand is to be read.

    Parameters
    ----------
    operand : int
        Keys, their scales, values, theirs.
    tile_bytes : int
        From one tile to the next in global memory, which begins at ``base``; ``stage`` is where the tile's stage begins
        in shared memory, if there are stages.
    """
    if shared.stage is None:
        return step(
            lambda ops, base, tile, stage, offset: ops.address(
                ops.address(base, ops.wide_mul(tile, tile_bytes)), offset
            ),
            ["i64", "i32", "i32", "i32"],
            "i64",
        )
    place = shared.stage.places[operand]
    return step(
        lambda ops, base, tile, stage, offset: ops.add(ops.add(stage, offset), ops.i32(place)),
        ["i64", "i32", "i32", "i32"],
        "i32",
    )


class Ring:
    """A warp's stages, or none: kernels take tiles from it either way.

    Parameters
    ----------
    shared : Shared
    control : Control

    Attributes
    ----------
    begin : callable
        ``(sources, first, stop, warps, warp, lane) -> ring``: ask for the warp's first tiles.
    advance : callable
        ``(sources, tile, stop, warps, ring, number, lane) -> stage``: ask for a later tile, and wait for this one,
        which is in stage ``number``.
    following : callable
        The next stage's number.
    sources : callable
        The four operands' addresses as one value.
    """

    def __init__(self, shared: Shared, control: Control) -> None:
        self.sources = step(lambda ops, a, b, c, d: (a, b, c, d), ["i64"] * 4, ("i64", 4))
        none = step(lambda ops: ops.i32(0), [], "i32")
        if shared.stage is None:
            self.begin = control.device(lambda sources, first, stop, warps, warp, lane: none())
            self.advance = control.device(lambda sources, tile, stop, warps, ring, number, lane: none())
            self.following = control.device(lambda number: none())
            return
        stage, stages = shared.stage, shared.stages
        stage_bytes, ring_bytes = stage.nbytes, shared.ring_bytes
        warp_base, warp_bytes = shared.warps, shared.warp
        copy = step(lambda ops, *given: copy_tile(ops, stage, *given), [("i64", 4), "i32", "i32", "i32", "i32"], None)
        wait, warp_barrier = step(lambda ops: ops.wait(stages - 1), [], None), control.warp_barrier

        def begin(sources: Any, first: Any, stop: Any, warps: Any, warp: Any, lane: Any) -> Any:
            ring = (warp_base + warps * warp_bytes + LINES - 1) // LINES * LINES + warp * ring_bytes
            for ahead in range(stages - 1):
                copy(sources, first + ahead * warps, stop, ring + ahead * stage_bytes, lane)
            return ring

        def advance(sources: Any, tile: Any, stop: Any, warps: Any, ring: Any, number: Any, lane: Any) -> Any:
            last = number - 1 if number > 0 else stages - 1
            copy(sources, tile + (stages - 1) * warps, stop, ring + last * stage_bytes, lane)
            wait()
            warp_barrier()
            return ring + number * stage_bytes

        def following(number: Any) -> Any:
            return number + 1 if number + 1 < stages else 0

        self.begin, self.advance = control.device(begin), control.device(advance)
        self.following = control.device(following)

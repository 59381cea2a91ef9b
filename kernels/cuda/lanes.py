"""What a lane's number means to a step: its place among lanes that share an output, and sums over them."""

from __future__ import annotations

from collections.abc import Sequence

from .key_tile import KeyTile
from .ops import Ops, Value


def lanes_of(ops: Ops, lane: Value, lanes_r: int) -> tuple[Value, Value]:
    """(o_lane, r_lane); see `lowbit.kernels.cuda.mapping.Tiling`."""
    bits = lanes_r.bit_length() - 1
    return ops.shift_right(lane, bits), ops.and_(lane, ops.i32(lanes_r - 1))


def part_of(ops: Ops, lane: Value, part: tuple[int, int]) -> Value:
    """What `lowbit.kernels.cuda.mapping.lane_part` stands for."""
    factor, shift = part
    return ops.shift_right(ops.mul(lane, ops.i32(factor)), shift)


def scatter(ops: Ops, values: Sequence[Value], lane: Value) -> Value:
    """Add as many lanes' values as there are values, and leave each lane with the sum of the one of its number."""
    mask = len(values) // 2
    while mask:
        half = len(values) // 2
        kept = [ops.select_lane(lane, mask, values[half + i], values[i]) for i in range(half)]
        sent = [ops.select_lane(lane, mask, values[i], values[half + i]) for i in range(half)]
        values = [ops.fadd(a, ops.shuffle_xor(b, mask)) for a, b in zip(kept, sent, strict=True)]
        mask //= 2
    return values[0]


def token_of(keys: KeyTile, lane: int) -> int:
    """The token of a tile whose score a lane is left with; see `scatter`."""
    tiling = keys.contraction.tiling
    o_lane, r_lane = divmod(lane, tiling.lanes_r)
    own = [token for i in range(tiling.iters_o) for token in tiling.output(i, o_lane)]
    return own[r_lane]

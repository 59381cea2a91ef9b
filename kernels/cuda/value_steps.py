"""Steps that the values' layout decides."""

from __future__ import annotations

from collections.abc import Sequence

from . import softmax
from .contraction import FACTOR_BYTES, SCALE_BYTES
from .key_tile import KeyTile
from .lanes import lanes_of, part_of, token_of
from .mapping import LANES, TILE
from .ops import Ops, Type, Value, step
from .shared import Shared
from .softmax import NOTHING
from .staging import in_tile
from .value_tile import ValueTile


class ValueSteps:
    """Functions for kernels.

    Parameters
    ----------
    values : ValueTile
    keys : KeyTile or None
        Which decide the token that a lane has a weight of; without them it is the lane's number.
    shared : Shared
    stream : bool
        Whether values pass the first cache by.
    """

    def __init__(self, values: ValueTile, keys: KeyTile | None, shared: Shared, stream: bool) -> None:
        self.values = values
        c, tiling, count = values.contraction, values.contraction.tiling, values.contraction.rows
        outputs: Type = ("f32", count * values.outputs)
        rows: Type = ("f32", count)
        state: Type = ("f32", 2 * count)
        position = {token: slot for slot, token in enumerate(c.order)}
        slots = [position[token_of(keys, lane) if keys is not None else lane] for lane in range(LANES)]
        thresholds: Type = ("f32", softmax.WEIGHTS_PER_LANE)
        staged = shared.stage is not None
        address = "i32" if staged else "i64"
        places: Type = ("i32", 2)

        def data_place(ops: Ops, lane: Value) -> tuple[Value, Value]:
            """The lane's byte in a tile, for all of its vectors across the channels but the last, and for that."""
            o_lane, r_lane = lanes_of(ops, lane, tiling.lanes_r)
            along = ops.mul(r_lane, ops.i32(tiling.r_stride))
            across = ops.mul(o_lane, ops.i32(tiling.o_stride))
            last = ops.select_less(o_lane, ops.i32(tiling.last_o), across, ops.i32(0))
            return ops.add(across, along), ops.add(last, along)

        def small_place(ops: Ops, mine: Value, lane: Value) -> tuple[Value, Value]:
            """Of weights, and of factors."""
            o_lane, r_lane = lanes_of(ops, lane, tiling.lanes_r)
            inside = ops.select_less(o_lane, ops.i32(tiling.last_o), o_lane, ops.i32(0))
            group = part_of(ops, o_lane if tiling.iters_o > 1 else inside, values.group_part)
            weights = ops.i32(shared.products if c.integer else 0)
            along = ops.mul(r_lane, ops.i32(c.bundle_bytes))
            across = ops.mul(group, ops.i32(TILE * c.slot_bytes))
            factors = ops.i32(shared.products + shared.weights)
            return (
                ops.add(ops.add(mine, weights), ops.add(along, across)),
                ops.add(ops.add(mine, factors), ops.mul(group, ops.i32(FACTOR_BYTES))),
            )

        def accumulate(
            ops: Ops, total: Sequence[Value], tile: Value, lane_bytes: Sequence[Value], mine: Value, lane: Value
        ) -> tuple[Value, ...]:
            small, factors = small_place(ops, mine, lane)
            data = [ops.address(tile, each) for each in lane_bytes]
            return values.body(ops, total, data, small, factors, staged, stream)

        def round_pair(ops: Ops, first: Value, mine: Value, lane: Value, given: Sequence[Value]) -> None:
            """Round the lane's weights of the ``first`` pair of (row, group) or one of the next ones."""
            lanes = LANES // softmax.PAIRS
            last = ops.i32(count * c.groups - 1)
            pair = ops.add(first, ops.shift_right(lane, lanes.bit_length() - 1))
            pair = ops.select_less(pair, last, pair, last)
            each = ops.mul(ops.and_(lane, ops.i32(lanes - 1)), ops.i32(softmax.WEIGHTS_PER_LANE))
            slot = ops.add(ops.mul(pair, ops.i32(TILE)), each)
            weights, factors = ops.i32(shared.products), ops.i32(shared.products + shared.weights)
            softmax.round_weights(
                ops,
                c,
                ops.add(mine, ops.mul(slot, ops.i32(4))),
                ops.add(ops.add(mine, weights), slot),
                ops.add(ops.add(mine, factors), ops.mul(pair, ops.i32(FACTOR_BYTES))),
                given,
            )

        def given_weights(ops: Ops, source: Value, token: Value, tokens: Value, live: Value) -> tuple[Value, ...]:
            inside = ops.select_less(token, tokens, token, ops.i32(0))
            found = []
            for row in range(count):
                exists = ops.select_less(ops.i32(row), live, ops.i32(row), ops.i32(0))
                place = ops.add(ops.mul(exists, tokens), inside)
                (word,) = ops.load_global(ops.address(source, ops.shift_left(place, 2)), 0, 1, False)
                value = ops.select_less(token, tokens, ops.as_float(word), ops.f32(0.0))
                found.append(ops.select_less(ops.i32(row), live, value, ops.f32(0.0)))
            return tuple(found)

        self.place = step(data_place, ["i32"], places)
        scale_bytes = c.groups * TILE * SCALE_BYTES if c.scaled else 0
        self.data = in_tile(shared, 2, tiling.tile_bytes)
        self.scales = in_tile(shared, 3, scale_bytes)
        self.slot_of = step(lambda ops, lane: ops.table(slots, lane), ["i32"], "i32")
        self.zeros = step(lambda ops: (ops.f32(0.0),) * (count * values.outputs), [], outputs)
        self.start = step(lambda ops: (ops.f32(NOTHING),) * count + (ops.f32(0.0),) * count, [], state)
        self.dither = step(lambda ops, lane: softmax.dither(ops, c.order, lane), ["i32"], thresholds)
        self.store_products = step(
            lambda ops, weights, scales, slot: softmax.store_products(ops, c, weights, scales, slot, staged),
            [rows, address, "i32"],
            None,
        )
        self.round_pair = step(round_pair, ["i32", "i32", "i32", thresholds], None)
        self.accumulate = step(accumulate, [outputs, address, places, "i32", "i32"], outputs)
        self.given_weights = step(given_weights, ["i64", "i32", "i32", "i32"], rows)

"""Steps that the keys' layout decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import queries
from .contraction import FACTOR_BYTES, SCALE_BYTES
from .control import Control
from .key_tile import KeyTile
from .lanes import lanes_of, part_of, scatter, token_of
from .mapping import LANES, TILE
from .marks import K_STEP
from .ops import Ops, Type, Value, step
from .shared import Shared
from .staging import in_tile


class KeySteps:
    """Functions for kernels.

    Parameters
    ----------
    keys : KeyTile
    head_dim : int
    shared : Shared
    control : Control
    stream : bool
        Whether keys pass the first cache by: their sectors are used whole by one load.
    """

    def __init__(self, keys: KeyTile, head_dim: int, shared: Shared, control: Control, stream: bool) -> None:
        self.keys = keys
        c, tiling, count = keys.contraction, keys.contraction.tiling, keys.contraction.rows
        tokens = len(keys.tokens)
        sums: Type = ("f32", count * tokens)
        rows: Type = ("f32", count)
        address: Type = "i32" if shared.stage is not None else "i64"
        token_table = [token_of(keys, lane) for lane in range(LANES)]
        first_token = tiling.output(0, 0)[0]

        def data_place(ops: Ops, lane: Value) -> Value:
            """The lane's byte in a tile."""
            o_lane, r_lane = lanes_of(ops, lane, tiling.lanes_r)
            across, along = ops.mul(o_lane, ops.i32(tiling.o_stride)), ops.mul(r_lane, ops.i32(tiling.r_stride))
            return ops.add(across, along)

        def scale_place(ops: Ops, lane: Value) -> Value:
            """The lane's byte in a tile's scales."""
            o_lane, r_lane = lanes_of(ops, lane, tiling.lanes_r)
            token = ops.add(part_of(ops, o_lane, keys.token_part), ops.i32(first_token))
            group = part_of(ops, r_lane, keys.group_part)
            return ops.add(ops.mul(group, ops.i32(TILE * SCALE_BYTES)), ops.mul(token, ops.i32(SCALE_BYTES)))

        def small_place(ops: Ops, lane: Value) -> Value:
            _, r_lane = lanes_of(ops, lane, tiling.lanes_r)
            return ops.add(ops.mul(r_lane, ops.i32(c.bundle_bytes)), ops.i32(shared.small))

        def factor_place(ops: Ops, lane: Value) -> Value:
            _, r_lane = lanes_of(ops, lane, tiling.lanes_r)
            each = ops.i32(count * FACTOR_BYTES)
            return ops.mul(part_of(ops, r_lane, keys.group_part), each)

        def reduce(ops: Ops, found: Sequence[Value], lane: Value) -> tuple[Value, ...]:
            return tuple(scatter(ops, found[row * tokens : (row + 1) * tokens], lane) for row in range(count))

        def store_scores(
            ops: Ops, scores: Sequence[Value], target: Value, token: Value, count: Value, live: Value
        ) -> None:
            place = ops.address(target, ops.shift_left(token, 2))
            pitch = ops.shift_left(count, 2)
            for row, score in enumerate(scores):
                # A token past the end or a row that does not exist compares as 1 < 0.
                inside = ops.select_less(token, count, ops.i32(row), ops.i32(1 << 20))
                ops.store_global_if_less(inside, live, place, score)
                place = ops.address(place, pitch)

        def store_rows(ops: Ops, values: Sequence[Value], place: Value) -> None:
            for row, value in enumerate(values):
                ops.store_shared(place, 4 * row * TILE, (value,))

        self.place = step(data_place, ["i32"], "i32")
        self.scale_place = step(scale_place, ["i32"], "i32")
        scale_bytes = c.groups * TILE * SCALE_BYTES if c.scaled else 0
        self.data = in_tile(shared, 0, tiling.tile_bytes)
        self.scales = in_tile(shared, 1, scale_bytes)
        self.small_place = step(small_place, ["i32"], "i32")
        self.factor_place = step(factor_place, ["i32"], "i32")
        self.zeros = step(lambda ops: (ops.f32(0.0),) * (count * tokens), [], sums)
        self.reduce = step(reduce, [sums, "i32"], rows)
        self.token_of = step(lambda ops, lane: ops.table(token_table, lane), ["i32"], "i32")
        self.store_rows = step(store_rows, [rows, "i32"], None)
        self.store_scores = step(store_scores, [rows, "i64", "i32", "i32", "i32"], None)
        self._sum_steps(control, sums, address, shared.stage is not None, stream)
        at = shared.small
        groups, group_step, slots = c.groups, keys.group_step, keys.slots

        def group_units(ops: Ops, first: Value, stop: Value, warp: Value) -> tuple[Value, Value]:
            """A warp's first (group, row) pair of a range of steps, and the range's end."""
            each = ops.i32(count)
            last = ops.mul(stop, ops.i32(group_step)) if keys.count > 1 else ops.i32(groups)
            last = ops.select_less(stop, ops.i32(keys.count), last, ops.i32(groups))
            start = ops.mul(first, ops.i32(group_step))
            return ops.add(ops.mul(start, each), warp), ops.mul(last, each)

        def slot_units(ops: Ops, first: Value, stop: Value, thread: Value) -> tuple[Value, Value]:
            """A thread's first (slot, row) pair of a range of steps, and the range's end."""
            each = ops.i32(count * slots)
            return ops.add(ops.mul(first, each), thread), ops.mul(stop, each)

        self.group_units = step(group_units, ["i32"] * 3, ("i32", 2))
        self.slot_units = step(slot_units, ["i32"] * 3, ("i32", 2))
        self.round_group = step(
            lambda ops, *given: queries.round_group(ops, keys, head_dim, at, *given),
            ["i64", "i32", "i32", "i32", "i32", "i32", "f32"],
            None,
        )
        self.copy_float = step(
            lambda ops, *given: queries.copy_float(ops, keys, head_dim, at, *given),
            ["i64", "i32", "i32", "i32", "i32", "f32"],
            None,
        )

    def _sum_steps(self, control: Control, sums: Type, address: Type, staged: bool, stream: bool) -> None:
        """Sums of a tile's products: one step, or a loop over steps."""
        keys, c = self.keys, self.keys.contraction
        one = step(
            lambda ops, found, data, scales, small, factors: keys.body(
                ops, found, data, scales, small, factors, staged, stream
            ),
            [sums, address, address, "i32", "i32"],
            sums,
        )
        count, data_bytes, small_bytes = keys.count, keys.data_bytes, keys.step_bytes
        scale_bytes, factor_bytes = keys.group_step * TILE * SCALE_BYTES, keys.step_factors
        self.step, self.scale_step = one, scale_bytes if c.scaled else 0
        mark = control.mark(K_STEP)

        def loop(found: Any, data: Any, scales: Any, small: Any, factors: Any) -> Any:
            for number in range(count):
                mark()
                found = one(
                    found,
                    data + number * data_bytes,
                    scales + number * scale_bytes,
                    small + number * small_bytes,
                    factors + number * factor_bytes,
                )
            return found

        self.sums = one if count == 1 else control.device(loop)

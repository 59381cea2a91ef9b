"""Results of warps and splits, and how they are folded.

A record is, for each row, a maximum, a sum and the outputs: what an online softmax leaves. ``sv`` has no softmax; its
maxima are all alike, and its sums go unused.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import softmax
from .lanes import lanes_of, part_of
from .ops import Ops, Type, Value, step
from .softmax import NOTHING
from .value_tile import ValueTile

RECORD_HEAD = 2
"""Floats of a row's record before its outputs."""


class Records:
    """Functions for kernels.

    Parameters
    ----------
    values : ValueTile
    head_dim : int
    normalise : bool
        Whether outputs are divided by the sum.
    """

    def __init__(self, values: ValueTile, head_dim: int, normalise: bool) -> None:
        tiling, rows = values.contraction.tiling, values.contraction.rows
        row_bytes = 4 * (RECORD_HEAD + head_dim)
        each: Type = ("f32", rows)
        totals: Type = ("f32", 2 * rows)

        def store_record(ops: Ops, given: Sequence[Value], total: Sequence[Value], lane: Value, place: Value) -> None:
            o_lane, _ = lanes_of(ops, lane, tiling.lanes_r)
            first = ops.add(part_of(ops, o_lane, values.channel_part), ops.i32(values.first_channel))
            for row in range(rows):
                maximum, length = given[row], softmax.warp_sum(ops, given[rows + row])
                ops.store_shared(place, row * row_bytes, (maximum,))
                ops.store_shared(place, row * row_bytes + 4, (length,))
                for i, offset in enumerate(values.channels):
                    value = softmax.warp_sum(ops, total[row * values.outputs + i], tiling.lanes_r)
                    channel = ops.add(first, ops.i32(offset))
                    at = ops.add(place, ops.add(ops.i32(row * row_bytes + 4 * RECORD_HEAD), ops.shift_left(channel, 2)))
                    ops.store_shared_if_less(channel, ops.i32(head_dim), at, value)

        def maxima(ops: Ops, best: Sequence[Value], place: Value) -> tuple[Value, ...]:
            loaded = [ops.as_float(*ops.load_shared(place, row * row_bytes, 1)) for row in range(rows)]
            return tuple(ops.fmax(a, b) for a, b in zip(best, loaded, strict=True))

        def fold(
            ops: Ops, total: Sequence[Value], best: Sequence[Value], place: Value, channel: Value
        ) -> tuple[Value, ...]:
            here = ops.add(place, ops.shift_left(channel, 2))
            lengths, values = [], []
            for row in range(rows):
                maximum, length = (ops.as_float(word) for word in ops.load_shared(place, row * row_bytes, 2))
                value = ops.as_float(*ops.load_shared(here, row * row_bytes + 4 * RECORD_HEAD, 1))
                found = _folded(ops, total[row], total[rows + row], best[row], maximum, length, value)
                lengths.append(found[0])
                values.append(found[1])
            return (*lengths, *values)

        def result(ops: Ops, length: Value, value: Value) -> Value:
            return ops.fmul(value, ops.reciprocal(length)) if normalise else value

        def write(ops: Ops, total: Sequence[Value], place: Value, live: Value) -> None:
            for row in range(rows):
                value = result(ops, total[row], total[rows + row])
                at = ops.address(place, ops.i32(4 * row * head_dim))
                ops.store_global_if_less(ops.i32(row), live, at, value)

        def write_record(
            ops: Ops,
            total: Sequence[Value],
            best: Sequence[Value],
            place: Value,
            splits: Value,
            channel: Value,
            live: Value,
        ) -> None:
            pitch = ops.mul(splits, ops.i32(row_bytes))
            for row in range(rows):
                number = ops.i32(row)
                head = ops.select_less(channel, ops.i32(1), number, live)
                ops.store_global_if_less(head, live, place, best[row])
                ops.store_global_if_less(head, live, ops.address(place, ops.i32(4)), total[row])
                at = ops.address(ops.address(place, ops.i32(4 * RECORD_HEAD)), ops.shift_left(channel, 2))
                ops.store_global_if_less(number, live, at, total[rows + row])
                place = ops.address(place, pitch)

        def merge_fold(
            ops: Ops, total: Sequence[Value], best: Value, place: Value, channel: Value
        ) -> tuple[Value, ...]:
            maximum, length = (ops.as_float(*ops.load_global(place, 4 * i, 1, False)) for i in range(2))
            here = ops.address(place, ops.shift_left(channel, 2))
            value = ops.as_float(*ops.load_global(here, 4 * RECORD_HEAD, 1, False))
            return _folded(ops, total[0], total[1], best, maximum, length, value)

        one: Type = ("f32", 2)
        self.store = step(store_record, [totals, ("f32", rows * values.outputs), "i32", "i32"], None)
        self.no_maxima = step(lambda ops: (ops.f32(NOTHING),) * rows, [], each)
        self.maxima = step(maxima, [each, "i32"], each)
        self.start_fold = step(lambda ops: (ops.f32(0.0),) * (2 * rows), [], totals)
        self.fold = step(fold, [totals, each, "i32", "i32"], totals)
        self.write = step(write, [totals, "i64", "i32"], None)
        self.write_record = step(write_record, [totals, each, "i64", "i32", "i32", "i32"], None)
        self.start_merge = step(lambda ops: (ops.f32(0.0),) * 2, [], one)
        self.merge_fold = step(merge_fold, [one, "f32", "i64", "i32"], one)
        self.merge_write = step(
            lambda ops, total, at: ops.store_global_if_less(ops.i32(0), ops.i32(1), at, result(ops, *total)),
            [one, "i64"],
            None,
        )


def _folded(
    ops: Ops, length: Value, value: Value, best: Value, maximum: Value, more: Value, output: Value
) -> tuple[Value, Value]:
    """Sum and output with those of another record, whose maximum may be below the common one."""
    weight = ops.exp2(ops.fadd(maximum, ops.fmul(best, ops.f32(-1.0))))
    return ops.ffma(weight, more, length), ops.ffma(weight, output, value)

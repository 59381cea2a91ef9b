"""The keys' small operand: queries rounded to 8 bits a group of 32 channels, in the order that dot words consume.

Rounding is that of `lowbit.kernels.reference.rounded_queries`. The float pipeline takes queries as they are.
"""

from __future__ import annotations

from ..quantize import ACTIVATION_LARGEST_CODE
from .contraction import FACTOR_BYTES
from .key_tile import KeyTile
from .ops import MAGIC, MAGIC_BITS, Ops, Value
from .softmax import TINY, warp_max, warp_sum


def slot_place(ops: Ops, step: KeyTile, at: int, channel: Value, row: Value, first_step: Value) -> Value:
    """Byte of shared memory of a channel's slot; ``first_step`` is the first one that the block has."""
    c = step.contraction
    number = ops.divide(channel, step.slots)
    slot = ops.table(step.slot_of_channel, ops.sub(channel, ops.mul(number, ops.i32(step.slots))))
    rows = ops.add(ops.mul(ops.sub(number, first_step), ops.i32(c.rows)), row)
    place = ops.add(ops.mul(rows, ops.i32(step.row_bytes)), ops.mul(slot, ops.i32(c.slot_bytes)))
    return ops.add(place, ops.i32(at))


def load_query(ops: Ops, row: Value, channel: Value, live: Value, head_dim: int) -> Value:
    """x[channel] of the row at a global address; 0 past the last channel, and where ``live`` is 0."""
    zero = ops.i32(0)
    inside = ops.select_less(channel, ops.i32(head_dim), channel, zero)
    (word,) = ops.load_global(ops.address(row, ops.shift_left(inside, 2)), 0, 1, False)
    value = ops.select_less(channel, ops.i32(head_dim), ops.as_float(word), ops.f32(0.0))
    return ops.select_less(zero, live, value, ops.f32(0.0))


def round_group(
    ops: Ops,
    step: KeyTile,
    head_dim: int,
    at: int,
    source: Value,
    live: Value,
    group: Value,
    row: Value,
    first_step: Value,
    lane: Value,
    factor: Value,
) -> None:
    """Round one group of 32 channels, a channel to a lane, and store its codes, scale and correction.

    Parameters
    ----------
    at : int
        Byte of shared memory where the small operand begins; its factors begin at 0.
    source : Value
        Global address of the row's floats.
    live : Value
        0 or less for a row that does not exist, whose codes are zeros.
    row, first_step : Value
        Where in shared memory; see `slot_place`.
    factor : Value
        What scores are to be multiplied by.
    """
    c = step.contraction
    stored = ops.i32(len(c.order))
    channel = ops.add(ops.shift_left(group, 5), lane)
    value = load_query(ops, source, channel, live, head_dim)
    largest = warp_max(ops, ops.fabs(value))
    inverse = ops.fmul(ops.reciprocal(ops.fmax(largest, ops.f32(TINY))), ops.f32(float(ACTIVATION_LARGEST_CODE)))
    code = ops.sub(ops.as_int(ops.ffma(value, inverse, ops.f32(MAGIC))), ops.i32(MAGIC_BITS))
    inside = ops.select_less(channel, stored, channel, ops.i32(0))
    ops.store_shared_byte_if_less(channel, stored, slot_place(ops, step, at, inside, row, first_step), code)
    scale = ops.fmul(ops.fmul(largest, ops.f32(1.0 / ACTIVATION_LARGEST_CODE)), factor)
    correction = ops.f32(0.0)
    if c.offset:
        total = ops.to_float(warp_sum(ops, code, integer=True))
        shares = [-float(c.offset) / max(share, 1) for share in step.shares]
        correction = ops.fmul(ops.fmul(total, scale), ops.table(shares, group))
    multiplier = ops.fmul(scale, ops.f32(1.0 / c.scale))
    number = ops.sub(group, ops.mul(first_step, ops.i32(step.group_step)))
    place = ops.mul(ops.add(ops.mul(number, ops.i32(c.rows)), row), ops.i32(FACTOR_BYTES))
    ops.store_shared(place, 0, (multiplier, correction))


def copy_float(
    ops: Ops,
    step: KeyTile,
    head_dim: int,
    at: int,
    source: Value,
    live: Value,
    channel: Value,
    row: Value,
    first_step: Value,
    factor: Value,
) -> None:
    """Store one channel, times ``factor``, for the float pipeline."""
    value = ops.fmul(load_query(ops, source, channel, live, head_dim), factor)
    ops.store_shared(slot_place(ops, step, at, channel, row, first_step), 0, (value,))

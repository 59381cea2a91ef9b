"""The keys' small operand: queries rounded to 8 bits a group of 32 channels, in the order that dot words consume.

Rounding is that of `lowbit.kernels.reference.rounded_queries`. The float pipeline takes queries as they are.
"""

from __future__ import annotations

from ..quantize import ACTIVATION_LARGEST_CODE
from .contraction import FACTOR_BYTES, KeyStep
from .ops import MAGIC, MAGIC_BITS, Ops, Value
from .softmax import TINY, warp_max, warp_sum


def slots(step: KeyStep) -> list[int]:
    """Slot of each stored channel."""
    order = step.contraction.order
    found = [0] * len(order)
    for slot, channel in enumerate(order):
        found[channel] = slot
    return found


def load_query(ops: Ops, row: Value, channel: Value, live: Value, head_dim: int) -> Value:
    """x[channel] of the row at a global address; 0 past the last channel, and where ``live`` is 0."""
    zero = ops.i32(0)
    inside = ops.select_less(channel, ops.i32(head_dim), channel, zero)
    (word,) = ops.load_global(ops.address(row, ops.shift_left(inside, 2)), 0, 1, False)
    value = ops.select_less(channel, ops.i32(head_dim), ops.as_float(word), ops.f32(0.0))
    return ops.select_less(zero, live, value, ops.f32(0.0))


def round_group(
    ops: Ops,
    step: KeyStep,
    head_dim: int,
    row: Value,
    live: Value,
    group: Value,
    lane: Value,
    factor: Value,
    codes: Value,
    factors: Value,
) -> None:
    """Round one group of 32 channels, a channel to a lane, and store its codes, scale and correction.

    Parameters
    ----------
    row : Value
        Global address of the row's floats.
    live : Value
        0 for a row that does not exist, whose codes are zeros.
    factor : Value
        What scores are to be multiplied by.
    codes, factors : Value
        Bytes of shared memory: the row's codes, and the group's factors.
    """
    c = step.contraction
    channel = ops.add(ops.shift_left(group, 5), lane)
    value = load_query(ops, row, channel, live, head_dim)
    largest = warp_max(ops, ops.fabs(value))
    inverse = ops.fmul(ops.reciprocal(ops.fmax(largest, ops.f32(TINY))), ops.f32(float(ACTIVATION_LARGEST_CODE)))
    code = ops.sub(ops.as_int(ops.ffma(value, inverse, ops.f32(MAGIC))), ops.i32(MAGIC_BITS))
    stored = len(c.order)
    inside = ops.select_less(channel, ops.i32(stored), channel, ops.i32(0))
    place = ops.add(codes, ops.table(slots(step), inside))
    ops.store_shared_byte_if_less(channel, ops.i32(stored), place, code)
    scale = ops.fmul(ops.fmul(largest, ops.f32(1.0 / ACTIVATION_LARGEST_CODE)), factor)
    correction = ops.f32(0.0)
    if c.offset:
        total = ops.to_float(warp_sum(ops, code, integer=True))
        shares = [-float(c.offset) / max(share, 1) for share in step.shares()]
        correction = ops.fmul(ops.fmul(total, scale), ops.table(shares, group))
    multiplier = ops.fmul(scale, ops.f32(1.0 / c.scale))
    ops.store_shared(ops.add(factors, ops.mul(group, ops.i32(FACTOR_BYTES))), 0, (multiplier, correction))


def copy_float(
    ops: Ops, step: KeyStep, head_dim: int, row: Value, live: Value, channel: Value, factor: Value, floats: Value
) -> None:
    """Store one channel, times ``factor``, for the float pipeline."""
    value = ops.fmul(load_query(ops, row, channel, live, head_dim), factor)
    slot = ops.table(slots(step), channel)
    ops.store_shared(ops.add(floats, ops.shift_left(slot, 2)), 0, (value,))

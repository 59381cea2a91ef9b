"""Online softmax of a warp, a token to a lane, and rounding of weights for the integer pipeline.

Scores are in units of log2. Maxima are common to a warp, sums a lane's own until the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..quantize import DITHER, LARGEST_WEIGHT
from .contraction import SCALE_BYTES, Contraction
from .mapping import LANES, TILE
from .ops import MAGIC, MAGIC_BITS, Ops, Value

HIDDEN = -1e30
"""Score of a token that a row does not see."""
NOTHING = -1e29
"""Maximum before any token is seen: its distance from `HIDDEN` makes hidden tokens weigh nothing from the start."""
SMALL_RATIO = 0.1
TINY = 2.0**-119
"""Divisor instead of 0, the smallest that 127 over it is finite of: what is divided by it is 0, or below 1.5e-36."""
WEIGHTS_PER_LANE = 4
PAIRS = LANES * WEIGHTS_PER_LANE // TILE
"""(row, group) pairs that a warp rounds at once."""
ONES = 0x01010101


def warp_max(ops: Ops, value: Value, lanes: int = LANES) -> Value:
    """The largest of each ``lanes`` neighbouring lanes' values."""
    mask = lanes // 2
    while mask:
        value = ops.fmax(value, ops.shuffle_xor(value, mask))
        mask //= 2
    return value


def warp_sum(ops: Ops, value: Value, lanes: int = LANES, integer: bool = False) -> Value:
    """The sum of each ``lanes`` neighbouring lanes' values."""
    mask = lanes // 2
    while mask:
        other = ops.shuffle_xor(value, mask)
        value = ops.add(value, other) if integer else ops.fadd(value, other)
        mask //= 2
    return value


def seen(ops: Ops, rows: int, first_row: Value, tokens: Value, query_rows: Value, window: Value) -> tuple[Value, ...]:
    """First hidden token of each row, then first seen one; see `lowbit.kernels.reference.visible`."""
    zero, one = ops.i32(0), ops.i32(1)
    limits, firsts = [], []
    position = ops.remainder(first_row, query_rows)
    for row in range(rows):
        if row:
            following = ops.add(position, one)
            position = ops.select_less(following, query_rows, following, zero)
        limit = ops.add(ops.sub(ops.add(tokens, one), query_rows), position)
        limit = ops.select_less(limit, one, one, limit)
        start = ops.sub(limit, window)
        start = ops.select_less(start, zero, zero, start)
        limits.append(limit)
        firsts.append(ops.select_less(window, one, zero, start))
    return (*limits, *firsts)


def capped(ops: Ops, score: Value, cap: Value) -> Value:
    """cap · tanh(score / cap), and from then on in units of log2.

    1 − 2 / (1 + exp(2r)) cancels for small r, where three terms of the series are exact to 6e-8.
    """
    ratio = ops.fmul(score, ops.reciprocal(cap))
    power = ops.exp2(ops.fmul(ratio, ops.f32(2 * math.log2(math.e))))
    far = ops.ffma(ops.reciprocal(ops.fadd(power, ops.f32(1.0))), ops.f32(-2.0), ops.f32(1.0))
    square = ops.fmul(ratio, ratio)
    series = ops.ffma(square, ops.ffma(square, ops.f32(2 / 15), ops.f32(-1 / 3)), ops.f32(1.0))
    tangent = ops.select_less(ops.fabs(ratio), ops.f32(SMALL_RATIO), ops.fmul(ratio, series), far)
    return ops.fmul(ops.fmul(cap, tangent), ops.f32(math.log2(math.e)))


def update(
    ops: Ops,
    state: Sequence[Value],
    scores: Sequence[Value],
    token: Value,
    bounds: Sequence[Value],
    cap: Value,
    has_cap: bool,
) -> tuple[Value, ...]:
    """One tile of the online softmax.

    Parameters
    ----------
    state : sequence of Value
        Maxima of the rows, then their sums.
    scores : sequence of Value
        The lane's token's, of each row.
    token : Value
        Its position in the context.
    bounds : sequence of Value
        From `seen`.

    Returns
    -------
    tuple of Value
        The state after it, the weights of the token, and what earlier results have to be multiplied by.
    """
    rows = len(scores)
    maxima, sums, weights, shrinks = [], [], [], []
    for row, raw in enumerate(scores):
        score = capped(ops, raw, cap) if has_cap else raw
        score = ops.select_less(token, bounds[row], score, ops.f32(HIDDEN))
        score = ops.select_less(token, bounds[rows + row], ops.f32(HIDDEN), score)
        before = state[row]
        maximum = ops.fmax(before, warp_max(ops, score))
        minus = ops.fmul(maximum, ops.f32(-1.0))
        shrink = ops.exp2(ops.fadd(before, minus))
        weight = ops.exp2(ops.fadd(score, minus))
        maxima.append(maximum)
        sums.append(ops.ffma(state[rows + row], shrink, weight))
        weights.append(weight)
        shrinks.append(shrink)
    return (*maxima, *sums, *weights, *shrinks)


def store_products(
    ops: Ops, values: Contraction, weights: Sequence[Value], scales: Value, place: Value, staged: bool
) -> None:
    """Write weight · scale of a lane's token to [row][group][slot].

    Parameters
    ----------
    scales : Value
        Of the token's first group: a global address, or a byte of shared memory.
    place : Value
        Byte of shared memory of the token's slot.
    """
    for group in range(values.groups):
        scale = None
        if values.scaled:
            offset = group * TILE * SCALE_BYTES
            scale = ops.load_shared_half(scales, offset) if staged else ops.load_global_half(scales, offset)
        for row, weight in enumerate(weights):
            product = weight if scale is None else ops.fmul(weight, scale)
            ops.store_shared(place, (row * values.groups + group) * TILE * 4, (product,))


def dither(ops: Ops, order: Sequence[int], lane: Value) -> tuple[Value, ...]:
    """Rounding thresholds, less a half, of the four slots that a lane rounds."""
    table = [DITHER[token] - 0.5 for token in order]
    first = ops.shift_left(ops.and_(lane, ops.i32(TILE // WEIGHTS_PER_LANE - 1)), 2)
    return tuple(ops.table(table, ops.add(first, ops.i32(i))) for i in range(WEIGHTS_PER_LANE))


def round_weights(
    ops: Ops,
    values: Contraction,
    products: Value,
    weights: Value,
    factors: Value,
    thresholds: Sequence[Value],
) -> None:
    """Round four products of one (row, group) to codes; eight lanes share its step.

    floor(x + threshold) is the nearest integer to x + threshold − 1/2, which adding a large number finds.

    Parameters
    ----------
    products, weights : Value
        Bytes of shared memory of the lane's four floats, and of their word of codes.
    factors : Value
        Where the pair's scale and correction go.
    """
    lanes = TILE // WEIGHTS_PER_LANE
    given = [ops.as_float(word) for word in ops.load_shared(products, 0, WEIGHTS_PER_LANE)]
    largest = given[0]
    for value in given[1:]:
        largest = ops.fmax(largest, value)
    largest = warp_max(ops, largest, lanes)
    inverse = ops.fmul(ops.reciprocal(ops.fmax(largest, ops.f32(TINY))), ops.f32(float(LARGEST_WEIGHT)))
    codes = [
        ops.as_int(ops.fadd(ops.ffma(value, inverse, threshold), ops.f32(MAGIC)))
        for value, threshold in zip(given, thresholds, strict=True)
    ]
    word = ops.prmt(ops.prmt(codes[0], codes[1], 0x0040), ops.prmt(codes[2], codes[3], 0x0040), 0x5410)
    ops.store_shared(weights, 0, (word,))
    step = ops.fmul(largest, ops.f32(1.0 / LARGEST_WEIGHT / values.scale))
    correction = ops.f32(0.0)
    if values.offset:
        total = ops.dp4a(word, ops.i32(ONES), ops.i32(0), True)
        total = warp_sum(ops, total, lanes, integer=True)
        exact = ops.fadd(ops.as_float(ops.add(total, ops.i32(MAGIC_BITS))), ops.f32(-MAGIC))
        share = -float(values.offset * values.scale) / values.tiling.lanes_r
        correction = ops.fmul(ops.fmul(exact, step), ops.f32(share))
    ops.store_shared(factors, 0, (step, correction))

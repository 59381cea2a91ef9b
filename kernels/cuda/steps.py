"""The steps of a candidate's kernels, made once: everything that its layout, packing and launch decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..problem import Problem
from . import queries, softmax, staging
from .contraction import FACTOR_BYTES, SCALE_BYTES, KeyStep, ValueTile
from .mapping import LANES, TILE
from .marks import K_STEP
from .ops import Ops, Type, Value, step
from .shared import Shared, Stage
from .softmax import NOTHING

WARP_BITS = 5

RECORD_HEAD = 2
"""Floats of a row's record before its outputs: maximum and sum."""


class Steps:
    """Functions for `lowbit.kernels.cuda.operators`.

    Parameters
    ----------
    problem : Problem
    rows : int
        Rows of the small operand that a block serves.
    keys : KeyStep or None
    values : ValueTile or None
    shared : Shared
    marked : bool
        Whether loops carry marks; see `lowbit.kernels.cuda.marks`.
    streams : pair of bool
        Whether keys, and values, pass the first cache by: their sectors are used whole by one load.
    """

    def __init__(
        self,
        problem: Problem,
        rows: int,
        keys: KeyStep | None,
        values: ValueTile | None,
        shared: Shared,
        marked: bool,
        streams: tuple[bool, bool],
    ) -> None:
        self._staged = shared.stage is not None
        self._place: Type = "i32" if self._staged else "i64"
        self.problem, self.rows, self.shared = problem, rows, shared
        self._keys, self._values, self._marked, self._streams = keys, values, marked, streams
        self.thread = step(lambda ops: ops.thread(), [], "i32")
        self.threads = step(lambda ops: ops.threads(), [], "i32")
        self.lane = step(lambda ops: ops.and_(ops.thread(), ops.i32(LANES - 1)), [], "i32")
        self.warp = step(lambda ops: ops.shift_right(ops.thread(), WARP_BITS), [], "i32")
        self.warps = step(lambda ops: ops.shift_right(ops.threads(), WARP_BITS), [], "i32")
        self.block_barrier = step(lambda ops: ops.block_barrier(), [], None)
        self.warp_barrier = step(lambda ops: ops.warp_barrier(), [], None)
        self._blocks = [step(lambda ops, axis=axis: ops.block(axis), [], "i32") for axis in range(3)]
        self._arithmetic()
        if keys is not None:
            self._key_steps(keys)
        if values is not None:
            self._value_steps(values)
            self._record_steps()
        if keys is not None and values is not None:
            self._softmax_steps()
        if shared.stage is not None:
            self._stage_steps(shared.stage, shared.stages)

    @property
    def keys(self) -> KeyStep:
        assert self._keys is not None
        return self._keys

    @property
    def values(self) -> ValueTile:
        assert self._values is not None
        return self._values

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

    def _arithmetic(self) -> None:
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

    # -- keys -----------------------------------------------------------------------------------------------------

    def _key_steps(self, keys: KeyStep) -> None:
        c, tiling = keys.contraction, keys.contraction.tiling
        head_dim, tokens = self.problem.head_dim, len(keys.tokens)
        sums: Type = ("f32", self.rows * tokens)
        rows: Type = ("f32", self.rows)
        token_table = [keys_token(keys, lane) for lane in range(LANES)]

        def data_place(ops: Ops, base: Value, lane: Value) -> Value:
            return ops.address(base, _lane_offset(ops, lane, tiling.lanes_r, tiling.o_stride, tiling.r_stride))

        def scale_place(ops: Ops, base: Value, lane: Value) -> Value:
            o_lane, r_lane = _lanes(ops, lane, tiling.lanes_r)
            first = keys_first(keys)
            token = ops.add(_part(ops, o_lane, keys.token_part), ops.i32(first))
            group = _part(ops, r_lane, keys.group_part)
            offset = ops.add(ops.mul(group, ops.i32(TILE * SCALE_BYTES)), ops.mul(token, ops.i32(SCALE_BYTES)))
            return ops.address(base, offset)

        def small_place(ops: Ops, lane: Value) -> Value:
            _, r_lane = _lanes(ops, lane, tiling.lanes_r)
            return ops.add(ops.mul(r_lane, ops.i32(c.bundle_bytes)), ops.i32(self.shared.small))

        def factor_place(ops: Ops, lane: Value) -> Value:
            _, r_lane = _lanes(ops, lane, tiling.lanes_r)
            each = ops.i32(self.rows * FACTOR_BYTES)
            return ops.mul(_part(ops, r_lane, keys.group_part), each)

        def reduce(ops: Ops, found: Sequence[Value], lane: Value) -> tuple[Value, ...]:
            return tuple(_scatter(ops, found[row * tokens : (row + 1) * tokens], lane) for row in range(self.rows))

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

        self.key_place = step(data_place, [self._place, "i32"], self._place)
        self.key_scale_place = step(scale_place, [self._place, "i32"], self._place)
        self.key_small_place = step(small_place, ["i32"], "i32")
        self.key_factor_place = step(factor_place, ["i32"], "i32")
        self.zeros_scores = step(lambda ops: (ops.f32(0.0),) * (self.rows * tokens), [], sums)
        self.reduce = step(reduce, [sums, "i32"], rows)
        self.token_of = step(lambda ops, lane: ops.table(token_table, lane), ["i32"], "i32")
        self.store_rows = step(store_rows, [rows, "i32"], None)
        self.store_scores = step(store_scores, [rows, "i64", "i32", "i32", "i32"], None)
        self.scores = self._scores(keys, sums)
        at = self.shared.small
        groups, group_step, slots = c.groups, keys.group_step, keys.slots

        def group_units(ops: Ops, first: Value, stop: Value, warp: Value) -> tuple[Value, Value]:
            """A warp's first (group, row) pair of a range of steps, and the range's end."""
            count = ops.i32(self.rows)
            last = ops.mul(stop, ops.i32(group_step)) if keys.count > 1 else ops.i32(groups)
            last = ops.select_less(stop, ops.i32(keys.count), last, ops.i32(groups))
            start = ops.mul(first, ops.i32(group_step))
            return ops.add(ops.mul(start, count), warp), ops.mul(last, count)

        def slot_units(ops: Ops, first: Value, stop: Value, thread: Value) -> tuple[Value, Value]:
            """A thread's first (slot, row) pair of a range of steps, and the range's end."""
            each = ops.i32(self.rows * slots)
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

    def _scores(self, keys: KeyStep, sums: Type) -> Callable[..., Any]:
        """Sums of a tile's products: one step, or a loop over steps."""
        c = keys.contraction
        scale_tile = c.groups * TILE * SCALE_BYTES if c.scaled else 0
        tile_bytes, stream, staged = c.tiling.tile_bytes, self._streams[0], self._staged
        one = step(
            lambda ops, found, data, scales, small, factors: keys.body(
                ops, found, data, scales, small, factors, staged, stream
            ),
            [sums, self._place, self._place, "i32", "i32"],
            sums,
        )
        count, data_bytes, small_bytes = keys.count, keys.data_bytes, keys.step_bytes
        scale_bytes, factor_bytes = keys.group_step * TILE * SCALE_BYTES, keys.step_factors
        self.key_step, self.key_tile_bytes = one, tile_bytes
        self.key_scale_tile, self.key_scale_step = scale_tile, scale_bytes if c.scaled else 0
        mark = self.mark(K_STEP)

        def once(found: Any, data: Any, scales: Any, small: Any, factors: Any, tile: Any) -> Any:
            return one(found, data + tile * tile_bytes, scales + tile * scale_tile, small, factors)

        def loop(found: Any, data: Any, scales: Any, small: Any, factors: Any, tile: Any) -> Any:
            data += tile * tile_bytes
            scales += tile * scale_tile
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

        return self.device(once if count == 1 else loop)

    # -- values ---------------------------------------------------------------------------------------------------

    def _value_steps(self, values: ValueTile) -> None:
        c, tiling = values.contraction, values.contraction.tiling
        outputs: Type = ("f32", self.rows * values.outputs)
        rows: Type = ("f32", self.rows)
        state: Type = ("f32", 2 * self.rows)
        position = {token: slot for slot, token in enumerate(c.order)}
        keys = self._keys
        slots = [position[keys_token(keys, lane) if keys is not None else lane] for lane in range(LANES)]
        thresholds: Type = ("f32", softmax.WEIGHTS_PER_LANE)
        staged = self._staged
        places: Type = ("i32" if staged else "i64", 2)

        def data_place(ops: Ops, base: Value, lane: Value) -> tuple[Value, Value]:
            o_lane, r_lane = _lanes(ops, lane, tiling.lanes_r)
            along = ops.mul(r_lane, ops.i32(tiling.r_stride))
            across = ops.mul(o_lane, ops.i32(tiling.o_stride))
            last = ops.select_less(o_lane, ops.i32(tiling.last_o), across, ops.i32(0))
            return ops.address(base, ops.add(across, along)), ops.address(base, ops.add(last, along))

        def small_place(ops: Ops, mine: Value, lane: Value) -> tuple[Value, Value]:
            """Of weights, and of factors."""
            o_lane, r_lane = _lanes(ops, lane, tiling.lanes_r)
            inside = ops.select_less(o_lane, ops.i32(tiling.last_o), o_lane, ops.i32(0))
            group = _part(ops, o_lane if tiling.iters_o > 1 else inside, values.group_part)
            weights = ops.i32(self.shared.products if c.integer else 0)
            along = ops.mul(r_lane, ops.i32(c.bundle_bytes))
            across = ops.mul(group, ops.i32(TILE * c.slot_bytes))
            factors = ops.i32(self.shared.products + self.shared.weights)
            return (
                ops.add(ops.add(mine, weights), ops.add(along, across)),
                ops.add(ops.add(mine, factors), ops.mul(group, ops.i32(FACTOR_BYTES))),
            )

        def accumulate(
            ops: Ops, total: Sequence[Value], data: Sequence[Value], tile: Value, mine: Value, lane: Value
        ) -> tuple[Value, ...]:
            small, factors = small_place(ops, mine, lane)
            # ``tile`` is the place of its stage where there are stages.
            moved = tile if staged else ops.wide_mul(tile, tiling.tile_bytes)
            here = [ops.address(each, moved) for each in data]
            return values.body(ops, total, here, small, factors, staged, self._streams[1])

        def store_record(ops: Ops, given: Sequence[Value], total: Sequence[Value], lane: Value, place: Value) -> None:
            row_bytes = 4 * (RECORD_HEAD + self.problem.head_dim)
            o_lane, _ = _lanes(ops, lane, tiling.lanes_r)
            first = ops.add(_part(ops, o_lane, values.channel_part), ops.i32(values.first_channel))
            for row in range(self.rows):
                maximum, length = given[row], softmax.warp_sum(ops, given[self.rows + row])
                ops.store_shared(place, row * row_bytes, (maximum,))
                ops.store_shared(place, row * row_bytes + 4, (length,))
                for i, offset in enumerate(values.channels):
                    value = softmax.warp_sum(ops, total[row * values.outputs + i], tiling.lanes_r)
                    channel = ops.add(first, ops.i32(offset))
                    at = ops.add(place, ops.add(ops.i32(row * row_bytes + 4 * RECORD_HEAD), ops.shift_left(channel, 2)))
                    ops.store_shared_if_less(channel, ops.i32(self.problem.head_dim), at, value)

        def given_weights(ops: Ops, source: Value, token: Value, tokens: Value, live: Value) -> tuple[Value, ...]:
            inside = ops.select_less(token, tokens, token, ops.i32(0))
            found = []
            for row in range(self.rows):
                exists = ops.select_less(ops.i32(row), live, ops.i32(row), ops.i32(0))
                place = ops.add(ops.mul(exists, tokens), inside)
                (word,) = ops.load_global(ops.address(source, ops.shift_left(place, 2)), 0, 1, False)
                value = ops.select_less(token, tokens, ops.as_float(word), ops.f32(0.0))
                found.append(ops.select_less(ops.i32(row), live, value, ops.f32(0.0)))
            return tuple(found)

        self.value_place = step(data_place, [self._place, "i32"], places)
        self.slot_of = step(lambda ops, lane: ops.table(slots, lane), ["i32"], "i32")
        self.zeros_out = step(lambda ops: (ops.f32(0.0),) * (self.rows * values.outputs), [], outputs)
        self.start = step(lambda ops: (ops.f32(NOTHING),) * self.rows + (ops.f32(0.0),) * self.rows, [], state)
        self.dither = step(lambda ops, lane: softmax.dither(ops, c.order, lane), ["i32"], thresholds)
        self.store_products = step(
            lambda ops, weights, scales, slot: softmax.store_products(ops, c, weights, scales, slot, staged),
            [rows, self._place, "i32"],
            None,
        )
        self.round_weights = step(
            lambda ops, products, weights, factors, given: softmax.round_weights(
                ops, c, products, weights, factors, given
            ),
            ["i32", "i32", "i32", thresholds],
            None,
        )
        self.accumulate = step(accumulate, [outputs, places, "i32", "i32", "i32"], outputs)
        self.store_record = step(store_record, [state, outputs, "i32", "i32"], None)
        self.given_weights = step(given_weights, ["i64", "i32", "i32", "i32"], rows)

    # -- results --------------------------------------------------------------------------------------------------

    def _record_steps(self) -> None:
        """A row's record is a maximum, a sum and its outputs; records of warps, then of splits, are folded."""
        rows, head_dim = self.rows, self.problem.head_dim
        row_bytes = 4 * (RECORD_HEAD + head_dim)
        each: Type = ("f32", rows)
        totals: Type = ("f32", 2 * rows)
        normalise = self.problem.operator == "attend"

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

    # -- stages ---------------------------------------------------------------------------------------------------

    def _stage_steps(self, stage: Stage, stages: int) -> None:
        self.copy_tile = step(
            lambda ops, *given: staging.copy_tile(ops, stage, *given), [("i64", 4), "i32", "i32", "i32", "i32"], None
        )
        self.wait = step(lambda ops: ops.wait(stages - 1), [], None)
        self.four = step(lambda ops, a, b, c, d: (a, b, c, d), ["i64"] * 4, ("i64", 4))

    # -- both -----------------------------------------------------------------------------------------------------

    def _softmax_steps(self) -> None:
        rows, values = self.rows, self.values
        bounds: Type = ("i32", 2 * rows)
        found: Type = ("f32", 4 * rows)
        each: Type = ("f32", rows)
        outputs: Type = ("f32", rows * values.outputs)
        has_cap = self.problem.softcap > 0

        def rescale(ops: Ops, total: Sequence[Value], shrinks: Sequence[Value]) -> tuple[Value, ...]:
            return tuple(ops.fmul(value, shrinks[i // values.outputs]) for i, value in enumerate(total))

        self.seen = step(
            lambda ops, first, tokens, query_rows, window: softmax.seen(ops, rows, first, tokens, query_rows, window),
            ["i32"] * 4,
            bounds,
        )
        self.update = step(
            lambda ops, state, scores, token, limits, cap: softmax.update(
                ops, state, scores, token, limits, cap, has_cap
            ),
            [("f32", 2 * rows), each, "i32", bounds, "f32"],
            found,
        )
        self.state_of = step(lambda ops, given: given[: 2 * rows], [found], ("f32", 2 * rows))
        self.weights_of = step(lambda ops, given: given[2 * rows : 3 * rows], [found], each)
        self.shrinks_of = step(lambda ops, given: given[3 * rows :], [found], each)
        self.rescale = step(rescale, [outputs, each], outputs)


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


def _folded(
    ops: Ops, length: Value, value: Value, best: Value, maximum: Value, more: Value, output: Value
) -> tuple[Value, Value]:
    """Sum and output with those of another record, whose maximum may be below the common one."""
    weight = ops.exp2(ops.fadd(maximum, ops.fmul(best, ops.f32(-1.0))))
    return ops.ffma(weight, more, length), ops.ffma(weight, output, value)


def keys_first(keys: KeyStep) -> int:
    """Lane 0's first token."""
    return keys.contraction.tiling.output(0, 0)[0]


def keys_token(keys: KeyStep, lane: int) -> int:
    """The token of a tile whose score a lane is left with; see `_scatter`."""
    tiling = keys.contraction.tiling
    o_lane, r_lane = divmod(lane, tiling.lanes_r)
    own = [token for i in range(tiling.iters_o) for token in tiling.output(i, o_lane)]
    return own[r_lane]


def _scatter(ops: Ops, values: Sequence[Value], lane: Value) -> Value:
    """Add as many lanes' values as there are values, and leave each lane with the sum of the one of its number."""
    mask = len(values) // 2
    while mask:
        half = len(values) // 2
        kept = [ops.select_lane(lane, mask, values[half + i], values[i]) for i in range(half)]
        sent = [ops.select_lane(lane, mask, values[i], values[half + i]) for i in range(half)]
        values = [ops.fadd(a, ops.shuffle_xor(b, mask)) for a, b in zip(kept, sent, strict=True)]
        mask //= 2
    return values[0]


def _lanes(ops: Ops, lane: Value, lanes_r: int) -> tuple[Value, Value]:
    """(o_lane, r_lane)."""
    bits = lanes_r.bit_length() - 1
    return ops.shift_right(lane, bits), ops.and_(lane, ops.i32(lanes_r - 1))


def _part(ops: Ops, lane: Value, part: tuple[int, int]) -> Value:
    """What `mapping.lane_part` stands for."""
    factor, shift = part
    return ops.shift_right(ops.mul(lane, ops.i32(factor)), shift)


def _lane_offset(ops: Ops, lane: Value, lanes_r: int, o_stride: int, r_stride: int) -> Value:
    o_lane, r_lane = _lanes(ops, lane, lanes_r)
    return ops.add(ops.mul(o_lane, ops.i32(o_stride)), ops.mul(r_lane, ops.i32(r_stride)))

"""The operators as Numba kernels over steps.

A block has a key/value head, a range of tokens (a split) and some rows of the small operand. Its warps take tiles of 32
tokens in turns and meet at the end only: they need no barrier on the way. Splits are merged by a second kernel.

What depends on the layout is in the steps, which a `Steps` object makes once for a candidate; the kernels below are
loops over tiles, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import marks
from .contraction import SCALE_BYTES
from .mapping import TILE
from .records import RECORD_HEAD
from .softmax import PAIRS
from .steps import Steps

Kernel = Callable[..., None]

ATTEND = (
    ("k_words", "pointer"),
    ("k_scales", "pointer"),
    ("v_words", "pointer"),
    ("v_scales", "pointer"),
    ("x", "pointer"),
    ("out", "pointer"),
    ("partials", "pointer"),
    ("k_stride", "int64"),
    ("k_scale_stride", "int64"),
    ("v_stride", "int64"),
    ("v_scale_stride", "int64"),
    ("tokens", "int32"),
    ("rows", "int32"),
    ("query_rows", "int32"),
    ("splits", "int32"),
    ("window", "int32"),
    ("factor", "float32"),
    ("cap", "float32"),
)
SV = (
    ("v_words", "pointer"),
    ("v_scales", "pointer"),
    ("x", "pointer"),
    ("out", "pointer"),
    ("partials", "pointer"),
    ("v_stride", "int64"),
    ("v_scale_stride", "int64"),
    ("tokens", "int32"),
    ("rows", "int32"),
    ("splits", "int32"),
)
QK = (
    ("k_words", "pointer"),
    ("k_scales", "pointer"),
    ("x", "pointer"),
    ("out", "pointer"),
    ("k_stride", "int64"),
    ("k_scale_stride", "int64"),
    ("tokens", "int32"),
    ("rows", "int32"),
    ("splits", "int32"),
    ("factor", "float32"),
)
MERGE = (("partials", "pointer"), ("out", "pointer"), ("splits", "int32"))


def build_prepare(steps: Steps) -> Callable[..., None]:
    """Store a block's rows of queries in shared memory, of the steps from ``first`` to ``stop``."""
    k = steps.keys
    control = steps.control
    rows, head_dim, keys = steps.rows, steps.problem.head_dim, k.keys
    lane_index, warp_index, warps_of_block = control.lane, control.warp, control.warps
    thread_index, threads_of_block = control.thread, control.threads
    group_units, slot_units = k.group_units, k.slot_units
    round_group, copy_float, mark = k.round_group, k.copy_float, control.mark(marks.PROLOGUE)

    def integers(x: Any, live_rows: Any, factor: Any, first: Any, stop: Any) -> None:
        lane = lane_index()
        start, end = group_units(first, stop, warp_index())
        for unit in range(start, end, warps_of_block()):
            mark()
            group = unit // rows
            row = unit - group * rows
            live = live_rows - row
            source = x + 4 * head_dim * (row if live > 0 else 0)
            round_group(source, live, group, row, first, lane, factor)

    def floats(x: Any, live_rows: Any, factor: Any, first: Any, stop: Any) -> None:
        start, end = slot_units(first, stop, thread_index())
        for index in range(start, end, threads_of_block()):
            mark()
            channel = index // rows
            row = index - channel * rows
            live = live_rows - row
            source = x + 4 * head_dim * (row if live > 0 else 0)
            copy_float(source, live, channel, row, first, factor)

    return integers if keys.contraction.integer else floats


def build_attend(steps: Steps) -> Kernel:
    """Fused decode attention."""
    control, online, ring = steps.control, steps.online(), steps.ring()
    k, v = steps.keys, steps.values
    prepare = control.device(build_prepare(steps))
    finish = control.device(build_finish(steps))
    weigh = control.device(build_weigh(steps))
    rows, head_dim, count = steps.rows, steps.problem.head_dim, k.keys.count
    lane_index, warp_index, warps_of_block, tiles_of = control.lane, control.warp, control.warps, control.tiles
    block_x, block_y, block_z = (control.block(axis) for axis in range(3))
    block_barrier, warp_barrier = control.block_barrier, control.warp_barrier
    sources_of, begin, advance, following = ring.sources, ring.begin, ring.advance, ring.following
    k_place, k_data, k_scale_place, k_scales_at, token_of = k.place, k.data, k.scale_place, k.scales, k.token_of
    v_place, v_data, v_scales_at, slot_of, dither = v.place, v.data, v.scales, v.slot_of, v.dither
    small_place, factor_place, sums_of, reduce = k.small_place, k.factor_place, k.sums, k.reduce
    no_scores, no_state, no_out, accumulate = k.zeros, v.start, v.zeros, v.accumulate
    seen, update, rescale = online.seen, online.update, online.rescale
    state_of, weights_of, shrinks_of = online.state_of, online.weights_of, online.shrinks_of
    mark = control.mark(marks.TILE)
    warp_base, warp_bytes = steps.shared.warps, steps.shared.warp

    def attend(
        k_words: Any,
        k_scales: Any,
        v_words: Any,
        v_scales: Any,
        x: Any,
        out: Any,
        partials: Any,
        k_stride: Any,
        k_scale_stride: Any,
        v_stride: Any,
        v_scale_stride: Any,
        tokens: Any,
        rows_all: Any,
        query_rows: Any,
        splits: Any,
        window: Any,
        factor: Any,
        cap: Any,
    ) -> None:
        head, split, first_row = block_x(), block_y(), block_z() * rows
        lane, warp, warps = lane_index(), warp_index(), warps_of_block()
        k_words += head * k_stride
        k_scales += head * k_scale_stride
        v_words += head * v_stride
        v_scales += head * v_scale_stride
        first, stop = tiles_of(tokens, query_rows, window, split, splits, warp)
        sources = sources_of(k_words, k_scales, v_words, v_scales)
        ring = begin(sources, first, stop, warps, warp, lane)
        prepare(x + 4 * head_dim * (head * rows_all + first_row), rows_all - first_row, factor, 0, count)
        block_barrier()
        bounds = seen(first_row, tokens, query_rows, window)
        key, key_scale, token, value = k_place(lane), k_scale_place(lane), token_of(lane), v_place(lane)
        small, factors, thresholds = small_place(lane), factor_place(lane), dither(lane)
        mine = warp_base + warp * warp_bytes
        slot = mine + 4 * slot_of(lane)
        state, total, number = no_state(), no_out(), 0
        for tile in range(first, stop, warps):
            mark()
            stage = advance(sources, tile, stop, warps, ring, number, lane)
            keys, key_scales = k_data(k_words, tile, stage, key), k_scales_at(k_scales, tile, stage, key_scale)
            scores = reduce(sums_of(no_scores(), keys, key_scales, small, factors), lane)
            found = update(state, scores, tile * TILE + token, bounds, cap)
            state = state_of(found)
            total = rescale(total, shrinks_of(found))
            weigh(
                weights_of(found), v_scales_at(v_scales, tile, stage, SCALE_BYTES * token), slot, mine, lane, thresholds
            )
            total = accumulate(total, v_data(v_words, tile, stage, 0), value, mine, lane)
            warp_barrier()
            number = following(number)
        finish(state, total, out, partials, head, split, splits, first_row, rows_all)

    return attend


def build_weigh(steps: Steps) -> Callable[..., None]:
    """Make the weights of a tile's tokens what the values' step reads: floats, or codes with a factor."""
    v = steps.values
    control = steps.control
    store_products, round_pair = v.store_products, v.round_pair
    warp_barrier, mark = control.warp_barrier, control.mark(marks.WEIGHTS)
    pairs = steps.rows * v.values.contraction.groups

    def integers(weights: Any, scales: Any, slot: Any, mine: Any, lane: Any, thresholds: Any) -> None:
        store_products(weights, scales, slot)
        warp_barrier()
        for first in range(0, pairs, PAIRS):
            mark()
            round_pair(first, mine, lane, thresholds)
        warp_barrier()

    def floats(weights: Any, scales: Any, slot: Any, mine: Any, lane: Any, thresholds: Any) -> None:
        store_products(weights, scales, slot)
        warp_barrier()

    return integers if v.values.contraction.integer else floats


def build_finish(steps: Steps) -> Callable[..., None]:
    """Combine the warps of a block, and write the result, or a record of it if there are more splits."""
    control = steps.control
    records = steps.records()
    head_dim = steps.problem.head_dim
    end = np.int32(head_dim)  # loops over 32-bit numbers are cheap
    base, record = steps.shared.warps, steps.shared.record
    row_bytes = 4 * (steps.problem.head_dim + RECORD_HEAD)
    store_record, block_barrier, mark = records.store, control.block_barrier, control.mark(marks.EPILOGUE)
    mark_maxima = control.mark(marks.MAXIMA)
    lane_index, warp_index, warps_of_block = control.lane, control.warp, control.warps
    thread_index, threads_of_block = control.thread, control.threads
    no_maxima, maxima, no_totals, fold = records.no_maxima, records.maxima, records.start_fold, records.fold
    write, write_record = records.write, records.write_record

    def finish(
        state: Any,
        total: Any,
        out: Any,
        partials: Any,
        head: Any,
        split: Any,
        splits: Any,
        first_row: Any,
        rows_all: Any,
    ) -> None:
        lane, warp, warps = lane_index(), warp_index(), warps_of_block()
        block_barrier()
        store_record(state, total, lane, base + warp * record)
        block_barrier()
        best = no_maxima()
        for each in range(warps):
            mark_maxima()
            best = maxima(best, base + each * record)
        row = head * rows_all + first_row
        for channel in range(thread_index(), end, threads_of_block()):
            found = no_totals()
            for each in range(warps):
                mark()
                found = fold(found, best, base + each * record, channel)
            if splits == 1:
                write(found, out + 4 * (row * head_dim + channel), rows_all - first_row)
            else:
                place = partials + (row * splits + split) * row_bytes
                write_record(found, best, place, splits, channel, rows_all - first_row)

    return finish


def build_merge(steps: Steps) -> Kernel:
    """Combine the splits of one row, a block to a row."""
    control = steps.control
    records = steps.records()
    head_dim = steps.problem.head_dim
    end = np.int32(head_dim)
    row_bytes = 4 * (steps.problem.head_dim + RECORD_HEAD)
    thread_index, threads_of_block, block_x = control.thread, control.threads, control.block(0)
    larger, nothing, load, mark = control.larger, control.nothing, control.load_global_float, control.mark(marks.MERGE)
    no_total, fold, write = records.start_merge, records.merge_fold, records.merge_write

    def merge(partials: Any, out: Any, splits: Any) -> None:
        row, thread, threads = block_x(), thread_index(), threads_of_block()
        base = partials + row * splits * row_bytes
        best = nothing()
        for split in range(splits):
            best = larger(best, load(base + split * row_bytes))
        for channel in range(thread, end, threads):
            total = no_total()
            for split in range(splits):
                mark()
                total = fold(total, best, base + split * row_bytes, channel)
            write(total, out + 4 * (row * head_dim + channel))

    return merge


def build_sv(steps: Steps) -> Kernel:
    """Values weighted by given probabilities."""
    v = steps.values
    control = steps.control
    finish = control.device(build_finish(steps))
    weigh = control.device(build_weigh(steps))
    rows = steps.rows
    lane_index, warp_index, warps_of_block, tiles_of = control.lane, control.warp, control.warps, control.tiles
    block_x, block_y, block_z = (control.block(axis) for axis in range(3))
    block_barrier, warp_barrier, no_out = control.block_barrier, control.warp_barrier, v.zeros
    v_place, v_data, v_scales_at, slot_of, dither = v.place, v.data, v.scales, v.slot_of, v.dither
    accumulate, given, no_state, mark = v.accumulate, v.given_weights, v.start, control.mark(marks.TILE)
    warp_base, warp_bytes = steps.shared.warps, steps.shared.warp

    def sv(
        v_words: Any,
        v_scales: Any,
        x: Any,
        out: Any,
        partials: Any,
        v_stride: Any,
        v_scale_stride: Any,
        tokens: Any,
        rows_all: Any,
        splits: Any,
    ) -> None:
        head, split, first_row = block_x(), block_y(), block_z() * rows
        lane, warp, warps = lane_index(), warp_index(), warps_of_block()
        block_barrier()
        first, stop = tiles_of(tokens, 1, 0, split, splits, warp)
        v_words += head * v_stride
        v_scales += head * v_scale_stride
        value = v_place(lane)
        source = x + 4 * (head * rows_all + first_row) * tokens
        mine = warp_base + warp * warp_bytes
        slot = mine + 4 * slot_of(lane)
        thresholds = dither(lane)
        state, total = no_state(), no_out()
        for tile in range(first, stop, warps):
            mark()
            token = tile * TILE + lane
            weights = given(source, token, tokens, rows_all - first_row)
            weigh(weights, v_scales_at(v_scales, tile, 0, SCALE_BYTES * lane), slot, mine, lane, thresholds)
            total = accumulate(total, v_data(v_words, tile, 0, 0), value, mine, lane)
            warp_barrier()
        finish(state, total, out, partials, head, split, splits, first_row, rows_all)

    return sv


def build_qk(steps: Steps) -> Kernel:
    """Scores of all tokens."""
    k = steps.keys
    control = steps.control
    prepare = control.device(build_prepare(steps))
    rows, head_dim, count = steps.rows, steps.problem.head_dim, k.keys.count
    lane_index, warp_index, warps_of_block, tiles_of = control.lane, control.warp, control.warps, control.tiles
    block_x, block_y, block_z = (control.block(axis) for axis in range(3))
    k_place, k_data, k_scale_place, k_scales_at, token_of = k.place, k.data, k.scale_place, k.scales, k.token_of
    small_place, factor_place, sums_of, no_scores = k.small_place, k.factor_place, k.sums, k.zeros
    reduce, store_scores, block_barrier = k.reduce, k.store_scores, control.block_barrier
    mark = control.mark(marks.TILE)

    def qk(
        k_words: Any,
        k_scales: Any,
        x: Any,
        out: Any,
        k_stride: Any,
        k_scale_stride: Any,
        tokens: Any,
        rows_all: Any,
        splits: Any,
        factor: Any,
    ) -> None:
        head, split, first_row = block_x(), block_y(), block_z() * rows
        lane, warp, warps = lane_index(), warp_index(), warps_of_block()
        prepare(x + 4 * head_dim * (head * rows_all + first_row), rows_all - first_row, factor, 0, count)
        block_barrier()
        first, stop = tiles_of(tokens, 1, 0, split, splits, warp)
        k_words += head * k_stride
        k_scales += head * k_scale_stride
        key, key_scale = k_place(lane), k_scale_place(lane)
        small, factors, offset = small_place(lane), factor_place(lane), token_of(lane)
        target = out + 4 * (head * rows_all + first_row) * tokens
        for tile in range(first, stop, warps):
            mark()
            keys, key_scales = k_data(k_words, tile, 0, key), k_scales_at(k_scales, tile, 0, key_scale)
            scores = reduce(sums_of(no_scores(), keys, key_scales, small, factors), lane)
            store_scores(scores, target, tile * TILE + offset, tokens, rows_all - first_row)

    return qk

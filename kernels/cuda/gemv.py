"""A packed matrix times vectors: rows of the matrix take the place of tokens, columns that of channels.

A block has 32 rows of the matrix, and its warps share their columns; splits are ranges of columns. Vectors are rounded
and kept in shared memory, of a split only what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import marks
from .mapping import TILE
from .operators import build_prepare
from .steps import Steps

GEMV = (
    ("k_words", "pointer"),
    ("k_scales", "pointer"),
    ("x", "pointer"),
    ("out", "pointer"),
    ("partials", "pointer"),
    ("tokens", "int32"),
    ("rows", "int32"),
    ("splits", "int32"),
    ("factor", "float32"),
)
MERGE_GEMV = (("partials", "pointer"), ("out", "pointer"), ("tokens", "int32"), ("rows", "int32"), ("splits", "int32"))


def build_gemv(steps: Steps) -> Callable[..., None]:
    """The products of 32 rows, or of a range of their columns; ``rows_all`` are the vectors."""
    k = steps.keys
    control = steps.control
    prepare = control.device(build_prepare(steps))
    keys, rows, columns = k.keys, steps.rows, steps.problem.head_dim
    count, data_bytes, step_bytes, step_factors = keys.count, keys.data_bytes, keys.step_bytes, keys.step_factors
    scale_bytes = k.scale_step
    thread_index, threads_of_block, split_of = control.thread, control.threads, control.split_of
    lane_index, warp_index, warps_of_block = control.lane, control.warp, control.warps
    block_x, block_y, block_z = (control.block(axis) for axis in range(3))
    block_barrier, key_step, no_scores, reduce = control.block_barrier, k.step, k.zeros, k.reduce
    k_place, k_data, k_scale_place, k_scales_at = k.place, k.data, k.scale_place, k.scales
    small_place, factor_place, token_of = k.small_place, k.factor_place, k.token_of
    store_rows, load, add, zero = k.store_rows, control.load_shared_float, control.add, control.zero
    store_global, results = control.store_global_float, np.int32(rows * TILE)
    mark, mark_end = control.mark(marks.K_STEP), control.mark(marks.EPILOGUE)

    def gemv(
        k_words: Any,
        k_scales: Any,
        x: Any,
        out: Any,
        partials: Any,
        tokens: Any,
        rows_all: Any,
        splits: Any,
        factor: Any,
    ) -> None:
        tile, split, first_row = block_x(), block_y(), block_z() * rows
        lane, warp, warps = lane_index(), warp_index(), warps_of_block()
        first, stop = split_of(count, split, splits, 0)
        prepare(x + 4 * columns * first_row, rows_all - first_row, factor, first, stop)
        block_barrier()
        data = k_data(k_words, tile, 0, k_place(lane))
        scales = k_scales_at(k_scales, tile, 0, k_scale_place(lane))
        small, factors = small_place(lane), factor_place(lane)
        sums = no_scores()
        start, _ = split_of(count, split, splits, warp)
        for number in range(start, stop, warps):
            mark()
            here = number - first
            sums = key_step(
                sums,
                data + number * data_bytes,
                scales + number * scale_bytes,
                small + here * step_bytes,
                factors + here * step_factors,
            )
        scores = reduce(sums, lane)
        block_barrier()
        store_rows(scores, 4 * (warp * rows * TILE + lane))
        block_barrier()
        for index in range(thread_index(), results, threads_of_block()):
            row = index // TILE
            token = tile * TILE + token_of(index - row * TILE)
            if first_row + row < rows_all and token < tokens:
                value = zero()
                for each in range(warps):
                    mark_end()
                    value = add(value, load(4 * (each * rows * TILE + index)))
                if splits == 1:
                    store_global(out + 4 * ((first_row + row) * tokens + token), value)
                else:
                    store_global(partials + 4 * ((split * rows_all + first_row + row) * tokens + token), value)

    return gemv


def build_merge_gemv(steps: Steps) -> Callable[..., None]:
    """Add the splits' products, a thread to a result."""
    control = steps.control
    thread_index, threads_of_block, block_x = control.thread, control.threads, control.block(0)
    load, store_global, add, zero = control.load_global_float, control.store_global_float, control.add, control.zero
    mark = control.mark(marks.MERGE)

    def merge(partials: Any, out: Any, tokens: Any, rows_all: Any, splits: Any) -> None:
        index = block_x() * threads_of_block() + thread_index()
        size = rows_all * tokens
        if index < size:
            value = zero()
            for split in range(splits):
                mark()
                value = add(value, load(partials + 4 * (split * size + index)))
            store_global(out + 4 * index, value)

    return merge

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
    prepare = steps.device(build_prepare(steps))
    keys, rows, columns = steps.keys, steps.rows, steps.problem.head_dim
    count, data_bytes, step_bytes, step_factors = keys.count, keys.data_bytes, keys.step_bytes, keys.step_factors
    tile_bytes, scale_tile, scale_bytes = steps.key_tile_bytes, steps.key_scale_tile, steps.key_scale_step
    thread_index, threads_of_block, split_of = steps.thread, steps.threads, steps.split_of
    lane_index, warp_index, warps_of_block = steps.lane, steps.warp, steps.warps
    block_x, block_y, block_z = (steps.block(axis) for axis in range(3))
    block_barrier, key_step, no_scores, reduce = steps.block_barrier, steps.key_step, steps.zeros_scores, steps.reduce
    k_place, k_scale_place = steps.key_place, steps.key_scale_place
    small_place, factor_place, token_of = steps.key_small_place, steps.key_factor_place, steps.token_of
    store_rows, load, add, zero = steps.store_rows, steps.load_shared_float, steps.add, steps.zero
    store_global, results = steps.store_global_float, np.int32(rows * TILE)
    mark, mark_end = steps.mark(marks.K_STEP), steps.mark(marks.EPILOGUE)

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
        data = k_place(k_words, lane) + tile * tile_bytes
        scales = k_scale_place(k_scales, lane) + tile * scale_tile
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
            row = index >> 5
            token = tile * TILE + token_of(index & 31)
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
    thread_index, threads_of_block, block_x = steps.thread, steps.threads, steps.block(0)
    load, store_global, add, zero = steps.load_global_float, steps.store_global_float, steps.add, steps.zero
    mark = steps.mark(marks.MERGE)

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

"""The operators, each written once: Numba code over packed operands of any layout.

A kernel is a C function ``void task(job, index)``. A *job* is a block of int64 fields that describes one call
(`FIELDS`); tasks are numbered (key/value head × token split) and share nothing but the job, so they may run in any
order and on any thread. Token splits are merged afterwards.

Operands are of a `PackedType`, which puts the layout's tile code into the kernel, or a `DispatchedType`, which calls
it by address: one compilation then serves every layout, and that is what makes tuning hundreds of them quick.

Rows are the small operand's: row = query head of the group × query_rows + query position. They are served ``rows`` at
a time by the tile intrinsics, each time over the block of tokens that the previous pass has just brought into the
cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cfunc, njit, types

from .plugin import (
    OPERAND_FIELDS,
    OperandType,
    accumulate_tile,
    dot_tile,
    float_from_bits,
    load_f32,
    load_i8,
    load_i32,
    operand_reader,
    peek,
    store_f32,
    store_i8,
    store_i32,
)

FIELDS = (
    "x",  # float32 rows: queries, or probabilities of ``sv``
    "x_head_stride",  # elements between key/value heads
    "x_row_stride",  # elements between rows
    "out",
    "partials",  # float32, one record a task; see `partial_floats`
    "workspace",
    "workspace_bytes",  # of one task
    "head_dim",
    "step",  # rows that one tile call serves
    "element",  # bytes of the prepared small operand's elements: 1 for the integer pipeline, 4 for float
    "factor",  # float32 in the lower half: multiplies the queries
    "tokens",
    "rows",
    "query_rows",
    "splits",
    "block",
    "order",  # int32 tables of `lowbit.kernels.cpu.keys.Preparation`
    "order_count",
    "aux_group",
    "aux_first",
    "aux_count",
    "offset",
    "k",  # `lowbit.kernels.plugin.OPERAND_FIELDS` fields of an operand each
    *("",) * (OPERAND_FIELDS - 1),
    "v",
    *("",) * (OPERAND_FIELDS - 1),
)
"""Fields of a job, in order."""

X, X_HEAD_STRIDE, X_ROW_STRIDE, OUT, PARTIALS, WORKSPACE, WORKSPACE_BYTES, HEAD_DIM, STEP, ELEMENT, FACTOR = range(11)
TOKENS, ROWS, QUERY_ROWS, SPLITS, BLOCK = range(11, 16)
ORDER, ORDER_COUNT, AUX_GROUP, AUX_FIRST, AUX_COUNT, OFFSET = range(16, 22)
K, V = FIELDS.index("k"), FIELDS.index("v")

TOKEN_BLOCK = 32
HIDDEN = np.float32(-1e30)
"""Running maximum of a row that has seen no token."""

LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)


@njit(fastmath=True, nogil=True, error_model="numpy", inline="never")
def exponential(x: Any) -> Any:
    """exp(x) for x ≤ 0 in float32: range reduction by ln 2 and a polynomial of degree 6 (Cephes), within 2 ulp."""
    x = max(x, np.float32(-87.0))
    n = np.floor(x * LOG2_E + np.float32(0.5))
    r = x - n * LN2_HIGH
    r = r - n * LN2_LOW
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * r * r + r + np.float32(1.0)
    return y * float_from_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))


@njit(fastmath=True, nogil=True, error_model="numpy")
def prepare_float(x: Any, head_dim: Any, factor: Any, order: Any, count: Any, out: Any) -> None:
    """Reorder one row of queries, times ``factor``."""
    for i in range(count):
        channel = load_i32(order, i)
        value = np.float32(0.0)
        if channel < head_dim:
            value = load_f32(x, channel) * factor
        store_f32(out, i, value)


@njit(fastmath=True, nogil=True, error_model="numpy")
def prepare_integer(
    x: Any, head_dim: Any, factor: Any, order: Any, count: Any, out: Any, job: Any, aux: Any, scratch: Any
) -> None:
    """Quantise one row of queries to 8 bits a group of 32, reorder the codes, and fill ``aux``.

    ``scratch`` holds the codes in channel order, then a sum and a scale for each group.
    """
    groups = (head_dim + 31) // 32
    facts = scratch + (head_dim + 8 + 63) // 64 * 64
    for g in range(groups):
        stop = min(32 * g + 32, head_dim)
        largest = np.float32(0.0)
        for c in range(32 * g, stop):
            largest = max(largest, abs(load_f32(x, c)))
        scale = largest / np.float32(127.0)
        inverse = np.float32(0.0)
        if scale > np.float32(0.0):
            inverse = np.float32(1.0) / scale
        total = np.int32(0)
        for c in range(32 * g, stop):
            code = np.int32(np.floor(load_f32(x, c) * inverse + np.float32(0.5)))
            total += code
            store_i8(scratch, c, np.int8(code))
        store_i32(facts, 2 * g, total)
        store_f32(facts, 2 * g + 1, scale * factor)
    store_i8(scratch, head_dim, np.int8(0))
    for i in range(count):
        store_i8(out, i, load_i8(scratch, load_i32(order, i)))
    aux_group, aux_first, aux_count = peek(job, AUX_GROUP), peek(job, AUX_FIRST), peek(job, AUX_COUNT)
    offset = np.int32(peek(job, OFFSET))
    for i in range(aux_count):
        g = load_i32(aux_group, i)
        store_i32(aux, i, -offset * load_i32(facts, 2 * g) * load_i32(aux_first, i))
        store_f32(aux, aux_count + i, load_f32(facts, 2 * g + 1))


@njit(fastmath=True, nogil=True, error_model="numpy")
def softmax_row(scores: Any, visible: Any, count: Any, state: Any, out: Any, head_dim: Any) -> None:
    """One online-softmax update of a row: scores become weights, ``out`` and the running sum are rescaled.

    ``state`` holds the running maximum and the running sum (Milakov & Gimelshein, arXiv:1805.02867).
    """
    before = load_f32(state, 0)
    best = before
    for i in range(visible):
        best = max(best, load_f32(scores, i))
    total = np.float32(0.0)
    for i in range(visible):
        weight = exponential(load_f32(scores, i) - best)
        store_f32(scores, i, weight)
        total += weight
    for i in range(visible, count):
        store_f32(scores, i, np.float32(0.0))
    shrink = np.float32(1.0)
    if best > before:
        shrink = exponential(before - best)
        for d in range(head_dim):
            store_f32(out, d, load_f32(out, d) * shrink)
        store_f32(state, 0, best)
    store_f32(state, 1, load_f32(state, 1) * shrink + total)


@njit(nogil=True, error_model="numpy")
def span(job: Any, index: Any) -> tuple[Any, Any, Any, Any]:
    """Head, split, and token range of a task: whole 32-token blocks, spread evenly."""
    splits = peek(job, SPLITS)
    blocks = (peek(job, TOKENS) + TOKEN_BLOCK - 1) // TOKEN_BLOCK
    head = index // splits
    split = index - head * splits
    first = blocks * split // splits * TOKEN_BLOCK
    stop = min(blocks * (split + 1) // splits * TOKEN_BLOCK, peek(job, TOKENS))
    return head, split, first, stop


@njit(nogil=True, error_model="numpy")
def padded(count: Any, step: Any) -> Any:
    return (count + step - 1) // step * step


@njit(nogil=True, error_model="numpy")
def clear(address: Any, count: Any) -> None:
    for i in range(count):
        store_f32(address, i, np.float32(0.0))


def partial_floats(rows: int, head_dim: int) -> int:
    """float32 numbers of a task's record: (maximum, sum) of each row, then the rows' weighted sums."""
    return rows * (2 + head_dim)


@njit(nogil=True, error_model="numpy")
def prepare(job: Any, head: Any, x: Any, aux: Any, scratch: Any, zeros: Any) -> None:
    """Prepare all rows of a task for ``dot_tile``; rows past the last one are zero."""
    rows, head_dim, element = peek(job, ROWS), peek(job, HEAD_DIM), peek(job, ELEMENT)
    order, count = peek(job, ORDER), peek(job, ORDER_COUNT)
    factor = load_f32(job, 2 * FACTOR)
    base = peek(job, X) + 4 * head * peek(job, X_HEAD_STRIDE)
    clear(zeros, head_dim)
    for row in range(padded(rows, peek(job, STEP))):
        source = base + 4 * row * peek(job, X_ROW_STRIDE)
        if row >= rows:
            source = zeros
        if element == 1:
            target = aux + row * 8 * peek(job, AUX_COUNT)
            prepare_integer(source, head_dim, factor, order, count, x + row * count, job, target, scratch)
        else:
            prepare_float(source, head_dim, factor, order, count, x + 4 * row * count)


def _task(body: Callable[..., None]) -> Any:
    return cfunc(types.void(types.intp, types.int64), nopython=True)(body)


def build_attend(k: OperandType, v: OperandType) -> Any:
    """Fused decode attention: scores, online softmax and weighted values, block by block."""
    read_k, read_v = operand_reader(k), operand_reader(v)

    def attend(job: int, index: int) -> None:
        head, _, first, stop = span(job, index)
        keys, values = read_k(job + 8 * K), read_v(job + 8 * V)
        rows, block, query_rows = peek(job, ROWS), peek(job, BLOCK), peek(job, QUERY_ROWS)
        step, head_dim, element = peek(job, STEP), peek(job, HEAD_DIM), peek(job, ELEMENT)
        all_rows = padded(rows, step)
        x = peek(job, WORKSPACE) + index * peek(job, WORKSPACE_BYTES)
        aux = x + padded(all_rows * peek(job, ORDER_COUNT) * element, 64)
        scores = aux + padded(all_rows * 8 * peek(job, AUX_COUNT), 64)
        state = scores + 4 * step * block
        out = state + padded(8 * all_rows, 64)
        scratch = out + padded(4 * all_rows * head_dim, 64)
        prepare(job, head, x, aux, scratch, out)
        clear(out, all_rows * head_dim)
        for row in range(all_rows):
            store_f32(state, 2 * row, HIDDEN)
            store_f32(state, 2 * row + 1, np.float32(0.0))
        for start in range(first, stop, block):
            count = padded(min(block, stop - start), TOKEN_BLOCK)
            for row in range(0, all_rows, step):
                row_x = x + row * peek(job, ORDER_COUNT) * element
                row_out = out + 4 * row * head_dim
                dot_tile(keys, head, start, count, row_x, aux + row * 8 * peek(job, AUX_COUNT), scores, block)
                for i in range(step):
                    limit = peek(job, TOKENS) - query_rows + 1 + (row + i) % query_rows
                    visible = min(max(max(limit, 1) - start, 0), count)
                    softmax_row(
                        scores + 4 * i * block,
                        visible,
                        count,
                        state + 8 * (row + i),
                        row_out + 4 * i * head_dim,
                        head_dim,
                    )
                accumulate_tile(values, head, start, count, scores, block, scratch, row_out, head_dim)
        record = peek(job, PARTIALS) + 4 * index * rows * (2 + head_dim)
        for i in range(2 * rows):
            store_f32(record, i, load_f32(state, i))
        for i in range(rows * head_dim):
            store_f32(record, 2 * rows + i, load_f32(out, i))

    return _task(attend)


def build_qk(k: OperandType) -> Any:
    """Scores of all tokens."""
    read_k = operand_reader(k)

    def qk(job: int, index: int) -> None:
        head, _, first, stop = span(job, index)
        keys = read_k(job + 8 * K)
        rows, block, tokens = peek(job, ROWS), peek(job, BLOCK), peek(job, TOKENS)
        step, element = peek(job, STEP), peek(job, ELEMENT)
        all_rows = padded(rows, step)
        x = peek(job, WORKSPACE) + index * peek(job, WORKSPACE_BYTES)
        aux = x + padded(all_rows * peek(job, ORDER_COUNT) * element, 64)
        scores = aux + padded(all_rows * 8 * peek(job, AUX_COUNT), 64)
        prepare(job, head, x, aux, scores, scores + 4096)
        out = peek(job, OUT) + 4 * head * rows * tokens
        for start in range(first, stop, block):
            used = min(block, stop - start)
            count = padded(used, TOKEN_BLOCK)
            for row in range(0, all_rows, step):
                row_x = x + row * peek(job, ORDER_COUNT) * element
                row_aux = aux + row * 8 * peek(job, AUX_COUNT)
                target = out + 4 * (row * tokens + start)
                if used == count and row + step <= rows:
                    dot_tile(keys, head, start, count, row_x, row_aux, target, tokens)
                else:
                    dot_tile(keys, head, start, count, row_x, row_aux, scores, block)
                    for i in range(min(step, rows - row)):
                        for t in range(used):
                            store_f32(target, i * tokens + t, load_f32(scores, i * block + t))

    return _task(qk)


def build_sv(v: OperandType) -> Any:
    """Values weighted by given probabilities; the record's maxima are 0 and its sums 1."""
    read_v = operand_reader(v)

    def sv(job: int, index: int) -> None:
        head, _, first, stop = span(job, index)
        values = read_v(job + 8 * V)
        rows, block, tokens = peek(job, ROWS), peek(job, BLOCK), peek(job, TOKENS)
        step, head_dim = peek(job, STEP), peek(job, HEAD_DIM)
        all_rows = padded(rows, step)
        p = peek(job, WORKSPACE) + index * peek(job, WORKSPACE_BYTES)
        out = p + 4 * step * block
        scratch = out + padded(4 * all_rows * head_dim, 64)
        source = peek(job, X) + 4 * head * rows * tokens
        clear(out, all_rows * head_dim)
        for start in range(first, stop, block):
            used = min(block, stop - start)
            count = padded(used, TOKEN_BLOCK)
            for row in range(0, all_rows, step):
                for i in range(step):
                    given = used if row + i < rows else 0
                    weights = source + 4 * ((row + i) * tokens + start)
                    for t in range(given):
                        store_f32(p, i * block + t, load_f32(weights, t))
                    clear(p + 4 * (i * block + given), count - given)
                accumulate_tile(values, head, start, count, p, block, scratch, out + 4 * row * head_dim, head_dim)
        record = peek(job, PARTIALS) + 4 * index * rows * (2 + head_dim)
        for row in range(rows):
            store_f32(record, 2 * row, np.float32(0.0))
            store_f32(record, 2 * row + 1, np.float32(1.0))
        for i in range(rows * head_dim):
            store_f32(record, 2 * rows + i, load_f32(out, i))

    return _task(sv)


def _merge(normalise: bool) -> Callable[[int, int, int, int], None]:
    @njit(fastmath=True, nogil=True, error_model="numpy")
    def merge(job: int, heads: int, head_dim: int, out: int) -> None:
        rows, splits = peek(job, ROWS), peek(job, SPLITS)
        size = rows * (2 + head_dim)
        for head in range(heads):
            base = peek(job, PARTIALS) + 4 * head * splits * size
            for row in range(rows):
                best = load_f32(base, 2 * row)
                for split in range(1, splits):
                    best = max(best, load_f32(base + 4 * split * size, 2 * row))
                target = out + 4 * (head * rows + row) * head_dim
                clear(target, head_dim)
                total = np.float32(0.0)
                for split in range(splits):
                    record = base + 4 * split * size
                    weight = exponential(load_f32(record, 2 * row) - best)
                    total += weight * load_f32(record, 2 * row + 1)
                    partial = record + 4 * (2 * rows + row * head_dim)
                    for d in range(head_dim):
                        store_f32(target, d, load_f32(target, d) + weight * load_f32(partial, d))
                if normalise:
                    for d in range(head_dim):
                        store_f32(target, d, load_f32(target, d) / total)

    return merge  # type: ignore[no-any-return]


def build_merge(operator: str) -> Callable[[int, int, int, int], None]:
    """Combine the splits' records: ``attend`` normalises by the softmax sum, ``sv`` adds."""
    return _merge(operator == "attend")

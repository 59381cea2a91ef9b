"""The operators, each written once: Numba code over packed operands of any layout.

A kernel is a C function ``void task(job, index)``. A *job* is a block of int64 fields that describes one call
(`lowbit.kernels.fields`); tasks are numbered (key/value head × token split) and share nothing but the job, so they may
run in any order and on any thread. Token splits are merged afterwards. ``attend`` reads a context that lies in several
*segments*, each in layouts of its own (`lowbit.kernels.segment_fields`); its tasks share all segments' tokens evenly,
whatever their bounds.

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
from numba.extending import intrinsic

from .cpu import softmax
from .fields import (
    CAP,
    FACTOR,
    HEAD_DIM,
    OUT,
    OUT_HEAD_STRIDE,
    OUT_ROW_STRIDE,
    PARTIALS,
    QUERY_ROWS,
    ROOM,
    ROWS,
    SEGMENT,
    SEGMENT_COUNT,
    SEGMENTS,
    SOFTMAX,
    SPLITS,
    TOKENS,
    WINDOW,
    WORKSPACE,
    WORKSPACE_BYTES,
    X_HEAD_STRIDE,
    X_ROW_STRIDE,
    X,
)
from .plugin import (
    OperandType,
    accumulate_tile,
    call_task,
    dot_tile,
    float_from_bits,
    load_f32,
    operand_reader,
    peek,
    poke,
    softmax_tile,
    store_f32,
)
from .segment_fields import (
    AUX_COUNT,
    BLOCK,
    ELEMENT,
    ORDER_COUNT,
    PREPARE,
    SEGMENT_FIELDS,
    START,
    STEP,
    K,
    V,
)
from .segment_fields import TOKENS as SEEN

TOKEN_BLOCK = 32
HIDDEN = np.float32(softmax.HIDDEN)
_EXP2 = tuple(np.float32(each) for each in softmax.EXP2)


_INNER = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Options of functions that only operators call. Each one costs 30 to 100 ms to compile, wrappers for Python aside."""


@intrinsic
def padded(typingctx: Any, count: Any, step: Any) -> Any:
    """The next multiple of ``step``; neither is negative."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        last = builder.sub(builder.add(args[0], args[1]), args[1].type(1))
        return builder.sub(last, builder.urem(last, args[1]))

    return types.int64(types.int64, types.int64), codegen


@njit(fastmath=True, inline="never", **_INNER)
def exp2(x: Any) -> Any:
    """2^x for x ≤ 0 in float32, not below 2^-126: the polynomial of the softmax, for one number."""
    x = max(x, np.float32(-126.0))
    n = np.floor(x + np.float32(0.5))
    f = x - n
    y = _EXP2[6]
    for i in range(5, -1, -1):
        y = y * f + _EXP2[i]
    return y * float_from_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))


@njit(**_INNER)
def clear(address: Any, count: Any) -> None:
    for i in range(count):
        store_f32(address, i, np.float32(0.0))


@njit(**_INNER)
def unseen_blocks(job: Any, segment: Any) -> Any:
    """Whole blocks of a segment that no query position sees, for they lie before every window."""
    window = peek(job, WINDOW)
    if window == 0:
        return 0
    first = peek(job, TOKENS) - peek(job, QUERY_ROWS) + 1 - window - peek(segment, START)
    return min(max(first, 0), peek(segment, SEEN)) // TOKEN_BLOCK


@njit(**_INNER)
def seen_blocks(job: Any, segment: Any) -> Any:
    """Blocks of a segment that some query position sees."""
    return (peek(segment, SEEN) + TOKEN_BLOCK - 1) // TOKEN_BLOCK - unseen_blocks(job, segment)


@njit(**_INNER)
def span(job: Any, index: Any, blocks: Any) -> tuple[Any, Any, Any]:
    """Head of a task, and its share of ``blocks`` blocks: first and last + 1."""
    splits = peek(job, SPLITS)
    head = index // splits
    split = index - head * splits
    return head, blocks * split // splits, blocks * (split + 1) // splits


@njit(**_INNER)
def weigh(
    job: Any,
    row: Any,
    start: Any,
    stop: Any,
    count: Any,
    scores: Any,
    stride: Any,
    state: Any,
    out: Any,
    step: Any,
    head_dim: Any,
) -> None:
    """Turn ``step`` rows of scores of ``count`` tokens from position ``start`` on into weights.

    Tokens that a query does not see count for nothing, nor does what lies from ``stop`` on, where the segment ends.
    """
    tokens, query_rows, window = peek(job, TOKENS), peek(job, QUERY_ROWS), peek(job, WINDOW)
    function, cap = peek(job, SOFTMAX), load_f32(job, 2 * CAP)
    least = max(tokens - query_rows + 1, 1)
    if start + count <= min(least, stop) and (window == 0 or tokens - window <= start):
        softmax_tile(function, scores, stride, step, 0, count, count, state, out, head_dim, cap)
        return
    for i in range(step):
        limit = max(tokens - query_rows + 1 + (row + i) % query_rows, 1)
        last = min(min(limit, stop) - start, count)
        first = 0
        if window > 0:
            first = max(limit - window - start, 0)
        mine = scores + 4 * i * stride
        if first < last:
            softmax_tile(
                function, mine, stride, 1, first, last, count, state + 8 * i, out + 4 * i * head_dim, head_dim, cap
            )
        else:
            clear(mine, count)


@njit(**_INNER)
def prepare(job: Any, segment: Any, head: Any, x: Any, aux: Any, all_rows: Any, scratch: Any) -> None:
    """Prepare a task's rows for a segment's ``dot_tile``, times the factor; rows past the last one are zero.

    The work is done by the function of `lowbit.kernels.cpu.activations` at `PREPARE`. Where there is none, rows are
    floats in channel order. ``scratch`` has room for its job.
    """
    rows, count, lanes = peek(job, ROWS), peek(segment, ORDER_COUNT), peek(segment, AUX_COUNT)
    row_bytes, aux_bytes, stride = count * peek(segment, ELEMENT), 8 * lanes, peek(job, X_ROW_STRIDE)
    source = peek(job, X) + 4 * head * peek(job, X_HEAD_STRIDE)
    function, factor = peek(segment, PREPARE), load_f32(job, 2 * FACTOR)
    poke(scratch, 0, source)
    poke(scratch, 1, x)
    poke(scratch, 2, aux)
    poke(scratch, 3, 4 * stride)
    poke(scratch, 4, row_bytes)
    poke(scratch, 5, aux_bytes)
    for row in range(rows):
        # What is multiplied by the factor: scales of codes, or the floats themselves.
        target, numbers = x + row * row_bytes, count
        if function != 0:
            call_task(function, scratch, row)
        else:
            for i in range(count):
                store_f32(target, i, load_f32(source, row * stride + i))
        if row_bytes == count:
            target, numbers = aux + row * aux_bytes + 4 * lanes, lanes
        for i in range(numbers):
            store_f32(target, i, load_f32(target, i) * factor)
    clear(x + rows * row_bytes, (all_rows - rows) * row_bytes // 4)
    clear(aux + rows * aux_bytes, (all_rows - rows) * 2 * lanes)


def _task(body: Callable[..., None], fastmath: bool = False) -> Any:
    return cfunc(types.void(types.intp, types.int64), nopython=True, error_model="numpy", fastmath=fastmath)(body)


def build_attend(k: OperandType, v: OperandType) -> Any:
    """Fused decode attention: scores, online softmax and weighted values, block by block and segment by segment."""
    read_k, read_v = operand_reader(k), operand_reader(v)

    def attend(job: int, index: int) -> None:
        rows, room, head_dim, segments = peek(job, ROWS), peek(job, ROOM), peek(job, HEAD_DIM), peek(job, SEGMENTS)
        total = 0
        for i in range(peek(job, SEGMENT_COUNT)):
            total += seen_blocks(job, segments + 8 * SEGMENT_FIELDS * i)
        head, first, stop = span(job, index, total)
        state = peek(job, WORKSPACE) + index * peek(job, WORKSPACE_BYTES)
        out = state + padded(8 * room, 64)
        x = out + padded(4 * room * head_dim, 64)
        clear(out, room * head_dim)
        for row in range(room):
            store_f32(state, 2 * row, HIDDEN)
            store_f32(state, 2 * row + 1, np.float32(0.0))
        before = 0
        form, form_rows, form_count = -1, 0, 0
        for i in range(peek(job, SEGMENT_COUNT)):
            segment = segments + 8 * SEGMENT_FIELDS * i
            blocks = seen_blocks(job, segment)
            low, high = max(first - before, 0), min(stop - before, blocks)
            before += blocks
            if low >= high:
                continue
            keys, values = read_k(segment + 8 * K), read_v(segment + 8 * V)
            step, block, element = peek(segment, STEP), peek(segment, BLOCK), peek(segment, ELEMENT)
            order_count, aux_count, position = (
                peek(segment, ORDER_COUNT),
                peek(segment, AUX_COUNT),
                peek(segment, START),
            )
            all_rows = padded(rows, step)
            aux = x + padded(all_rows * order_count * element, 64)
            scores = aux + padded(all_rows * 8 * aux_count, 64)
            scratch = scores + padded(4 * step * block, 64)
            # Neighbours of the same layouts want the same form of the queries.
            if peek(segment, PREPARE) != form or all_rows != form_rows or order_count != form_count:
                prepare(job, segment, head, x, aux, all_rows, scratch)
                form, form_rows, form_count = peek(segment, PREPARE), all_rows, order_count
            skipped, seen = unseen_blocks(job, segment), position + peek(segment, SEEN)
            end = min((skipped + high) * TOKEN_BLOCK, peek(segment, SEEN))
            for start in range((skipped + low) * TOKEN_BLOCK, end, block):
                count = padded(min(block, end - start), TOKEN_BLOCK)
                for row in range(0, all_rows, step):
                    row_x, row_aux = x + row * order_count * element, aux + row * 8 * aux_count
                    row_out = out + 4 * row * head_dim
                    dot_tile(keys, head, start, count, row_x, row_aux, scores, block)
                    weigh(
                        job, row, position + start, seen, count, scores, block, state + 8 * row, row_out, step, head_dim
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
        segment = job + 8 * SEGMENT
        rows, tokens = peek(job, ROWS), peek(job, TOKENS)
        head, low, high = span(job, index, (tokens + TOKEN_BLOCK - 1) // TOKEN_BLOCK)
        first, stop = low * TOKEN_BLOCK, min(high * TOKEN_BLOCK, tokens)
        keys = read_k(segment + 8 * K)
        block, step, element = peek(segment, BLOCK), peek(segment, STEP), peek(segment, ELEMENT)
        all_rows = peek(job, ROOM)
        x = peek(job, WORKSPACE) + index * peek(job, WORKSPACE_BYTES)
        aux = x + padded(all_rows * peek(segment, ORDER_COUNT) * element, 64)
        scores = aux + padded(all_rows * 8 * peek(segment, AUX_COUNT), 64)
        prepare(job, segment, head, x, aux, all_rows, scores)
        out = peek(job, OUT) + 4 * head * rows * tokens
        for start in range(first, stop, block):
            used = min(block, stop - start)
            count = padded(used, TOKEN_BLOCK)
            for row in range(0, all_rows, step):
                row_x = x + row * peek(segment, ORDER_COUNT) * element
                row_aux = aux + row * 8 * peek(segment, AUX_COUNT)
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
        segment = job + 8 * SEGMENT
        rows, tokens, head_dim = peek(job, ROWS), peek(job, TOKENS), peek(job, HEAD_DIM)
        head, low, high = span(job, index, (tokens + TOKEN_BLOCK - 1) // TOKEN_BLOCK)
        first, stop = low * TOKEN_BLOCK, min(high * TOKEN_BLOCK, tokens)
        values = read_v(segment + 8 * V)
        block, step, all_rows = peek(segment, BLOCK), peek(segment, STEP), peek(job, ROOM)
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


def build_merge(operator: str) -> Any:
    """Combine the splits' records of a head: ``attend`` normalises by the softmax sum, ``sv`` adds."""
    normalise = operator == "attend"

    def merge(job: int, head: int) -> None:
        rows, splits, head_dim = peek(job, ROWS), peek(job, SPLITS), peek(job, HEAD_DIM)
        query_rows = peek(job, QUERY_ROWS)
        size = rows * (2 + head_dim)
        base = peek(job, PARTIALS) + 4 * head * splits * size
        for row in range(rows):
            best = load_f32(base, 2 * row)
            for split in range(1, splits):
                best = max(best, load_f32(base + 4 * split * size, 2 * row))
            query_head = (head * rows + row) // query_rows
            place = query_head * peek(job, OUT_HEAD_STRIDE) + row % query_rows * peek(job, OUT_ROW_STRIDE)
            target = peek(job, OUT) + 4 * place
            clear(target, head_dim)
            total = np.float32(0.0)
            for split in range(splits):
                record = base + 4 * split * size
                weight = exp2(load_f32(record, 2 * row) - best)
                total += weight * load_f32(record, 2 * row + 1)
                partial = record + 4 * (2 * rows + row * head_dim)
                for d in range(head_dim):
                    store_f32(target, d, load_f32(target, d) + weight * load_f32(partial, d))
            if normalise:
                for d in range(head_dim):
                    store_f32(target, d, load_f32(target, d) / total)

    return _task(merge, fastmath=True)

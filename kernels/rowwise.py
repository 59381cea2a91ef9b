"""What a decoder computes row by row between its matrices, as stages of a native program.

A stage is a task ``void stage(job, index)`` like an operator's; the index is a position of the block being decoded.
Jobs are blocks of int64 fields, see `lowbit.kernels.rowwise_fields`. Everything is float32 in memory; sums are too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit, types

from . import gemv_fields
from .operators import exp2
from .plugin import call_task, float_from_bits, load_f32, load_i8, load_i32, peek, store_f32
from .rowwise_fields import Center, Embed, Gate, Multiply, Normalise, Ready, Rotate, Turn

GROUP = 32
LOG2_E = np.float32(1.4426950408889634)
_TWO_TO_112 = np.float32(2.0**112)
"""Between the biases of the exponents of float32 and float16."""

_INNER = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "fastmath": True}


def _stage(body: Any) -> Any:
    return cfunc(types.void(types.intp, types.int64), nopython=True, error_model="numpy", fastmath=True)(body)


def _numbers(fields: Any) -> tuple[int, ...]:
    """Fields as plain numbers, which is what Numba can freeze."""
    return tuple(int(field) for field in fields)


@njit(**_INNER)
def load_f16(address: Any, index: Any) -> Any:
    """A float16 as float32, the same on instruction sets that have no such number."""
    low, high = np.int32(load_i8(address, 2 * index)) & 255, np.int32(load_i8(address, 2 * index + 1)) & 255
    magnitude = float_from_bits(((high & 127) << 8 | low) << 13) * _TWO_TO_112
    return -magnitude if high & 128 else magnitude


def build_embed() -> Any:
    """Dequantised rows of a matrix of any layout."""
    (ids, out_, width_, format_, words_, scales_, minima_, places_, period_, pitch_, offset_, factor_) = _numbers(Embed)

    def embed(job: int, index: int) -> None:
        row = np.int64(load_i32(peek(job, ids), index))
        width, bits, words, factor = (
            peek(job, width_),
            peek(job, format_),
            peek(job, words_),
            load_f32(job, 2 * factor_),
        )
        out = peek(job, out_) + 4 * index * width
        if bits == 32:
            for d in range(width):
                store_f32(out, d, load_f32(words, row * width + d) * factor)
            return
        period, groups = peek(job, period_), (width + GROUP - 1) // GROUP
        tile = words + row // period * peek(job, pitch_)
        places = peek(job, places_) + 4 * (row % period) * width
        for d in range(width):
            place = load_i32(places, d)
            at = tile + (place >> 3)
            if bits == 16:
                store_f32(out, d, load_f16(at, 0) * factor)
                continue
            scale_at = (row // GROUP * groups + d // GROUP) * GROUP + row % GROUP
            code = np.int32(load_i8(at, 0))
            if bits == 4:
                code = (code >> (place & 7)) & 15
                if peek(job, offset_) == 0:
                    code = (code ^ 8) - 8
            elif peek(job, offset_) != 0:
                code &= 255
            code -= np.int32(peek(job, offset_))
            scale = load_f16(peek(job, scales_), scale_at)
            value = scale * np.float32(code)
            if peek(job, minima_) != 0:
                value += np.float32(8.0) * scale + load_f16(peek(job, minima_), scale_at)
            store_f32(out, d, value * factor)

    return _stage(embed)


@njit(**_INNER)
def _normalised(x: Any, weight: Any, out: Any, width: Any, eps: Any) -> None:
    """``out = x · weight / √(mean x² + eps)``; ``out`` may be ``x``."""
    total = np.float32(0.0)
    for i in range(width):
        total += load_f32(x, i) * load_f32(x, i)
    factor = np.float32(1.0) / np.sqrt(total / np.float32(width) + eps)
    for i in range(width):
        store_f32(out, i, load_f32(x, i) * factor * load_f32(weight, i))


@njit(**_INNER)
def _add(x: Any, y: Any, width: Any) -> None:
    for i in range(width):
        store_f32(x, i, load_f32(x, i) + load_f32(y, i))


def build_normalise() -> Any:
    """Zhang & Sennrich, arXiv:1910.07467."""
    x_, add_, weight_, eps_, out_, width_ = _numbers(Normalise)

    def normalise(job: int, index: int) -> None:
        width = peek(job, width_)
        x = peek(job, x_) + 4 * index * width
        if peek(job, add_) != 0:
            _add(x, peek(job, add_) + 4 * index * width, width)
        _normalised(x, peek(job, weight_), peek(job, out_) + 4 * index * width, width, load_f32(job, 2 * eps_))

    return _stage(normalise)


def build_ready() -> Any:
    """Sums of groups for minima, then codes."""
    job_, prepare_ = _numbers(Ready)
    x_, x_bytes, sums_, groups_ = gemv_fields.X, gemv_fields.X_BYTES, gemv_fields.SUMS, gemv_fields.GROUPS

    def ready(job: int, index: int) -> None:
        matrix, prepare = peek(job, job_), peek(job, prepare_)
        if peek(matrix, sums_) != 0:
            groups, columns = peek(matrix, groups_), peek(matrix, x_bytes) // 4
            x = peek(matrix, x_) + 4 * index * columns
            for g in range(groups):
                total = np.float32(0.0)
                for i in range(GROUP * g, min(GROUP * g + GROUP, columns)):
                    total += load_f32(x, i)
                store_f32(peek(matrix, sums_), index * groups + g, total)
        if prepare != 0:
            call_task(prepare, matrix, index)

    return _stage(ready)


@njit(**_INNER)
def _head(source: Any, bias: Any, norm: Any, eps: Any, cos: Any, sin: Any, half: Any, head_dim: Any, out: Any) -> None:
    """One head of a query or key: bias, normalisation, rotation."""
    for i in range(head_dim):
        value = load_f32(source, i)
        if bias != 0:
            value += load_f32(bias, i)
        store_f32(out, i, value)
    if norm != 0:
        _normalised(out, norm, out, head_dim, eps)
    for i in range(half):
        a, b = load_f32(out, i), load_f32(out, half + i)
        c, s = load_f32(cos, i), load_f32(sin, i)
        store_f32(out, i, a * c - b * s)
        store_f32(out, half + i, b * c + a * s)


@njit(**_INNER)
def _shifted(address: Any, count: Any) -> Any:
    """The address ``count`` numbers on, or 0 if there is none."""
    if address == 0:
        return 0
    return address + 4 * count


@njit(**_INNER)
def _turn(x: Any, width: Any, block: Any) -> None:
    """Orthonormal Hadamard transform of each block of numbers, its own inverse; a block is a power of two."""
    scale = np.float32(1.0) / np.sqrt(np.float32(block))
    for i in range(width):
        store_f32(x, i, load_f32(x, i) * scale)
    half = 1
    while half < block:
        for start in range(0, width, 2 * half):
            for i in range(start, start + half):
                a, b = load_f32(x, i), load_f32(x, i + half)
                store_f32(x, i, a + b)
                store_f32(x, i + half, a - b)
        half *= 2


def build_rotate() -> Any:
    """Su et al., arXiv:2104.09864; pairs are half the rotated channels apart."""
    (
        q_, k_, v_, q_stride, k_stride, v_stride, q_bias, k_bias, v_bias, q_norm, k_norm, eps_, cos_, sin_, dims_,
        heads_, kv_heads_, head_dim_, positions_, k_turn, v_turn, queries_, keys_, values_,
    ) = _numbers(Rotate)  # fmt: skip

    def rotate(job: int, index: int) -> None:
        head_dim, positions, half = peek(job, head_dim_), peek(job, positions_), peek(job, dims_) // 2
        eps = load_f32(job, 2 * eps_)
        cos, sin = peek(job, cos_) + 4 * index * half, peek(job, sin_) + 4 * index * half
        for head in range(peek(job, heads_)):
            source = peek(job, q_) + 4 * (index * peek(job, q_stride) + head * head_dim)
            out = peek(job, queries_) + 4 * (head * positions + index) * head_dim
            bias = _shifted(peek(job, q_bias), head * head_dim)
            _head(source, bias, peek(job, q_norm), eps, cos, sin, half, head_dim, out)
            if peek(job, k_turn) != 0:
                _turn(out, head_dim, peek(job, k_turn))
        for head in range(peek(job, kv_heads_)):
            place = 4 * (head * positions + index) * head_dim
            source = peek(job, k_) + 4 * (index * peek(job, k_stride) + head * head_dim)
            bias = _shifted(peek(job, k_bias), head * head_dim)
            out = peek(job, keys_) + place
            _head(source, bias, peek(job, k_norm), eps, cos, sin, half, head_dim, out)
            if peek(job, k_turn) != 0:
                _turn(out, head_dim, peek(job, k_turn))
            source = peek(job, v_) + 4 * (index * peek(job, v_stride) + head * head_dim)
            bias = _shifted(peek(job, v_bias), head * head_dim)
            out = peek(job, values_) + place
            _head(source, bias, 0, eps, cos, sin, 0, head_dim, out)
            if peek(job, v_turn) != 0:
                _turn(out, head_dim, peek(job, v_turn))

    return _stage(rotate)


def build_center() -> Any:
    """A vector that all keys of a head share moves all scores of a query alike, which a softmax does not notice."""
    keys_, mean_, positions_, head_dim_, learn_ = _numbers(Center)

    def center(job: int, index: int) -> None:
        positions, head_dim = peek(job, positions_), peek(job, head_dim_)
        keys, mean = peek(job, keys_) + 4 * index * positions * head_dim, peek(job, mean_) + 4 * index * head_dim
        if peek(job, learn_) != 0:
            for d in range(head_dim):
                store_f32(mean, d, np.float32(0.0))
            for position in range(positions):
                _add(mean, keys + 4 * position * head_dim, head_dim)
            for d in range(head_dim):
                store_f32(mean, d, load_f32(mean, d) / np.float32(positions))
        for position in range(positions):
            key = keys + 4 * position * head_dim
            for d in range(head_dim):
                store_f32(key, d, load_f32(key, d) - load_f32(mean, d))

    return _stage(center)


def build_turn() -> Any:
    """What turns the weighted sums of turned values back."""
    x_, width_, block_ = _numbers(Turn)

    def turn(job: int, index: int) -> None:
        width = peek(job, width_)
        _turn(peek(job, x_) + 4 * index * width, width, peek(job, block_))

    return _stage(turn)


def build_gate() -> Any:
    """SwiGLU: Shazeer, arXiv:2002.05202."""
    gate_, up_, stride_, out_, width_ = _numbers(Gate)

    def gate(job: int, index: int) -> None:
        width, stride = peek(job, width_), peek(job, stride_)
        gates, ups = peek(job, gate_) + 4 * index * stride, peek(job, up_) + 4 * index * stride
        out = peek(job, out_) + 4 * index * width
        for i in range(width):
            x = load_f32(gates, i)
            small = exp2(-abs(x) * LOG2_E)
            share = np.float32(1.0) if x >= np.float32(0.0) else small
            store_f32(out, i, x * share / (np.float32(1.0) + small) * load_f32(ups, i))

    return _stage(gate)


def build_multiply() -> Any:
    """Products with a matrix whose rows lie as float32, one after another."""
    x_, out_, matrix_, rows_, columns_, vectors_, splits_ = _numbers(Multiply)

    def multiply(job: int, index: int) -> None:
        rows, columns, splits = peek(job, rows_), peek(job, columns_), peek(job, splits_)
        for row in range(rows * index // splits, rows * (index + 1) // splits):
            weights = peek(job, matrix_) + 4 * row * columns
            for vector in range(peek(job, vectors_)):
                x = peek(job, x_) + 4 * vector * columns
                total = np.float32(0.0)
                for i in range(columns):
                    total += load_f32(weights, i) * load_f32(x, i)
                store_f32(peek(job, out_), vector * rows + row, total)

    return _stage(multiply)


BUILDERS = {
    "embed": build_embed,
    "normalise": build_normalise,
    "ready": build_ready,
    "rotate": build_rotate,
    "center": build_center,
    "turn": build_turn,
    "gate": build_gate,
    "multiply": build_multiply,
}
"""By the names that `lowbit.kernels.cpu.compiled.operator` takes."""

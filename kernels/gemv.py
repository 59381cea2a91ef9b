"""A packed matrix times one to sixteen vectors.

y[v, o] = Σ_r W[o, r]·x[v, r]: rows of the matrix take the place of tokens, columns that of channels. A task is a range
of rows; tasks write disjoint parts of the result, so nothing is merged. The vectors come prepared (see
`lowbit.kernels.cpu.activations`): once a call, before the tasks start.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit, types

from .gemv_fields import (
    ADD_MINIMA,
    AUX,
    AUX_BYTES,
    BLOCK,
    GROUPS,
    MATRIX,
    MINIMA,
    MINIMA_STEP,
    OUT,
    PREPARED,
    PREPARED_BYTES,
    ROWS,
    SCRATCH,
    SPLITS,
    STEP,
    SUMS,
    VECTORS,
)
from .packed import OPERAND
from .plugin import OperandType, add_minima, dot_tile, load_f32, operand_reader, peek, store_f32

ROW_BLOCK = 32
_SCALES = MATRIX + OPERAND.index("scales")


@njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
def multiply(job: Any, operand: Any, vector: Any, start: Any, count: Any, out: Any, stride: Any) -> None:
    """A step's vectors times ``count`` rows, to ``out[v·stride + i]``."""
    x = peek(job, PREPARED) + vector * peek(job, PREPARED_BYTES)
    aux = peek(job, AUX) + vector * peek(job, AUX_BYTES)
    dot_tile(operand, 0, start, count, x, aux, out, stride)
    minima = peek(job, MINIMA)
    if minima != 0:
        groups = peek(job, GROUPS)
        for i in range(0, peek(job, STEP), peek(job, MINIMA_STEP)):
            sums = peek(job, SUMS) + 4 * groups * (vector + i)
            add_minima(
                peek(job, ADD_MINIMA),
                peek(job, _SCALES),
                minima,
                start,
                count,
                groups,
                sums,
                out + 4 * i * stride,
                stride,
            )


def build_gemv(matrix: OperandType) -> Any:
    """The task; ``step`` must not exceed ``vectors``."""
    read = operand_reader(matrix)

    def gemv(job: int, index: int) -> None:
        operand = read(job + 8 * MATRIX)
        rows, vectors, step, splits = peek(job, ROWS), peek(job, VECTORS), peek(job, STEP), peek(job, SPLITS)
        blocks = (rows + ROW_BLOCK - 1) // ROW_BLOCK
        first = blocks * index // splits * ROW_BLOCK
        stop = min(blocks * (index + 1) // splits * ROW_BLOCK, rows)
        whole = first + (stop - first) // ROW_BLOCK * ROW_BLOCK
        block = peek(job, BLOCK)
        if vectors == step:
            block = max(whole - first, ROW_BLOCK)
        for start in range(first, whole, block):
            count = min(block, whole - start)
            for each in range(0, vectors, step):
                # The last pass begins early enough to be a whole one, and computes a few vectors again.
                vector = min(each, vectors - step)
                multiply(job, operand, vector, start, count, peek(job, OUT) + 4 * (vector * rows + start), rows)
        if whole < stop:
            scratch = peek(job, SCRATCH)
            for each in range(0, vectors, step):
                vector = min(each, vectors - step)
                multiply(job, operand, vector, whole, ROW_BLOCK, scratch, ROW_BLOCK)
                for i in range(step):
                    for row in range(whole, stop):
                        value = load_f32(scratch, i * ROW_BLOCK + row - whole)
                        store_f32(peek(job, OUT), (vector + i) * rows + row, np.float32(value))

    return cfunc(types.void(types.intp, types.int64), nopython=True)(gemv)

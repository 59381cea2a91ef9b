"""Fields of a job of ``gemv``: what `lowbit.kernels.gemv` reads of a call.

Apart from the operator, so that a call can be described without the compiler.
"""

from __future__ import annotations

from .packed import OPERAND_FIELDS

FIELDS = (
    "x",  # float32 vectors
    "prepared",  # vectors as the tile reads them
    "aux",
    "x_bytes",  # from one vector to the next, of each of the three
    "prepared_bytes",
    "aux_bytes",
    "out",  # float32 (vectors, rows)
    "rows",
    "vectors",
    "step",  # vectors that one tile call serves
    "block",  # rows over which all vectors pass before the next ones are read
    "splits",
    "scratch",  # step × 32 floats: the last block's result where rows are no multiple of 32
    "minima",  # float16 minima in the order of the scales, see `lowbit.kernels.cpu.minima`; 0 for none
    "add_minima",  # address of the function that adds them
    "minima_step",  # vectors that one call of it serves; divides ``step``
    "groups",  # of columns that share a minimum
    "sums",  # float32 (vectors, groups): each vector's sum over each group
    "matrix",  # `lowbit.kernels.packed.OPERAND_FIELDS` fields
    *("",) * (OPERAND_FIELDS - 1),
)
"""int64 each, in order."""

X, PREPARED, AUX, X_BYTES, PREPARED_BYTES, AUX_BYTES, OUT, ROWS, VECTORS, STEP, BLOCK, SPLITS, SCRATCH = range(13)
MINIMA, ADD_MINIMA, MINIMA_STEP, GROUPS, SUMS, MATRIX = range(13, 19)

"""Fields of the jobs of ``attend``, ``qk`` and ``sv``: what `lowbit.kernels.operators` reads of a call.

Apart from the operators, so that a call can be described without the compiler.
"""

from __future__ import annotations

from .packed import OPERAND_FIELDS

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
    "prepare",  # address of `lowbit.kernels.cpu.activations`'s function; 0 if queries lie as the tile reads them
    "order_count",  # slots of a prepared row; see `lowbit.kernels.cpu.keys.Preparation`
    "aux_count",  # groups of a prepared row's lanes
    "softmax",  # address of `lowbit.kernels.cpu.softmax`'s function
    "window",  # latest tokens that a query position sees; 0 for all
    "cap",  # float32 in the lower half: soft-cap of the scores
    "k",  # `lowbit.kernels.packed.OPERAND_FIELDS` fields of an operand each
    *("",) * (OPERAND_FIELDS - 1),
    "v",
    *("",) * (OPERAND_FIELDS - 1),
)
"""int64 each, in order."""

X, X_HEAD_STRIDE, X_ROW_STRIDE, OUT, PARTIALS, WORKSPACE, WORKSPACE_BYTES, HEAD_DIM, STEP, ELEMENT, FACTOR = range(11)
TOKENS, ROWS, QUERY_ROWS, SPLITS, BLOCK = range(11, 16)
PREPARE, ORDER_COUNT, AUX_COUNT, SOFTMAX, WINDOW, CAP = range(16, 22)
K, V = FIELDS.index("k"), FIELDS.index("v")


def partial_floats(rows: int, head_dim: int) -> int:
    """float32 numbers of a task's record: (maximum, sum) of each row, then the rows' weighted sums."""
    return rows * (2 + head_dim)

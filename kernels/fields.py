"""Fields of the jobs of ``attend``, ``qk`` and ``sv``: what `lowbit.kernels.operators` reads of a call.

Apart from the operators, so that a call can be described without the compiler.
"""

from __future__ import annotations

from . import segment_fields

FIELDS = (
    "x",  # float32 rows: queries, or probabilities of ``sv``
    "x_head_stride",  # elements between key/value heads
    "x_row_stride",  # elements between rows
    "out",
    "out_head_stride",  # elements between query heads of a merged result
    "out_row_stride",  # elements between query positions of one
    "partials",  # float32, one record a task; see `partial_floats`
    "workspace",
    "workspace_bytes",  # of one task
    "head_dim",
    "factor",  # float32 in the lower half: multiplies the queries
    "tokens",  # of the context: the position after the last query's
    "rows",
    "query_rows",
    "room",  # rows that the workspace has room for: whole steps of every segment
    "splits",
    "softmax",  # address of `lowbit.kernels.cpu.softmax`'s function
    "window",  # latest tokens that a query position sees; 0 for all
    "cap",  # float32 in the lower half: soft-cap of the scores
    "segments",  # address of the first segment's fields, see `lowbit.kernels.segment_fields`
    "segment_count",
    "segment",  # the fields of a call's only segment
    *("",) * (segment_fields.SEGMENT_FIELDS - 1),
)
"""int64 each, in order."""

X, X_HEAD_STRIDE, X_ROW_STRIDE, OUT, OUT_HEAD_STRIDE, OUT_ROW_STRIDE, PARTIALS, WORKSPACE, WORKSPACE_BYTES = range(9)
HEAD_DIM, FACTOR, TOKENS, ROWS, QUERY_ROWS, ROOM, SPLITS, SOFTMAX, WINDOW, CAP, SEGMENTS, SEGMENT_COUNT = range(9, 21)
SEGMENT = FIELDS.index("segment")


def partial_floats(rows: int, head_dim: int) -> int:
    """float32 numbers of a task's record: (maximum, sum) of each row, then the rows' weighted sums."""
    return rows * (2 + head_dim)

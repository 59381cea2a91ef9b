"""Fields of a job of ``append``, and where a layout puts the codes of one token.

Apart from the operator, so that a call can be described without the compiler.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from .errors import LayoutError
from .layout import TOKEN, Layout

ROLE = (
    "bits",  # of a code: 16, 8 or 4
    "largest",  # code; 0 for fp16
    "offset",  # added to codes: `lowbit.kernels.packing.Packing.offset`
    "words",
    "words_stride",  # bytes between heads
    "scales",
    "scales_stride",  # bytes between heads
    "table",  # see `places`
    "period",  # tokens that the table covers
    "period_bytes",  # from one period's words to the next one's
)
"""int64 each, in order: what is told of keys, and of values."""

FIELDS = (
    "source_k",  # float32: first token to store, head 0
    "source_v",
    "source_token_bytes",  # between tokens of a source
    "source_head_bytes",  # between heads of a source
    "count",  # tokens to store
    "position",  # of the first one, within the operands
    "heads",  # key/value heads: the task's index is role · heads + head, role 0 being keys
    "head_dim",
    *(f"k_{name}" for name in ROLE),
    *(f"v_{name}" for name in ROLE),
)
"""int64 each, in order."""

SOURCE_K, SOURCE_V, SOURCE_TOKEN_BYTES, SOURCE_HEAD_BYTES, COUNT, POSITION, HEADS, HEAD_DIM = range(8)
K, V = FIELDS.index("k_bits"), FIELDS.index("v_bits")
BITS, LARGEST, OFFSET, WORDS, WORDS_STRIDE, SCALES, SCALES_STRIDE, TABLE, PERIOD, PERIOD_BYTES = range(len(ROLE))
"""Of a role, counted from `K` or `V`."""

MOST_TOKENS_OF_A_ROW = 1 << 12
MOST_ROW_BYTES = 1 << 28


def check_appendable(layout: Layout, head_dim: int) -> None:
    """Raise unless tokens can be appended to storage of ``layout`` without knowing how many will come.

    Raises
    ------
    LayoutError
        If tokens are not outermost, storage folds, or rows are no whole packing blocks or too long.
    """
    outermost = layout.factors[0]
    if outermost.axis != TOKEN or outermost.block or layout.fold_rows:
        raise LayoutError(f"{layout.name}: a cache grows along tokens, which must be outermost and not folded")
    if layout.unit(TOKEN) > MOST_TOKENS_OF_A_ROW or layout.pitch_bytes(layout.unit(TOKEN), head_dim) > MOST_ROW_BYTES:
        raise LayoutError(
            f"{layout.name}: a row of a cache's storage holds at most {MOST_TOKENS_OF_A_ROW} tokens and "
            f"{MOST_ROW_BYTES} bytes"
        )


@functools.lru_cache(maxsize=256)
def places(layout: Layout, head_dim: int) -> NDArray[np.int32]:
    """Where the codes of each token of one storage row go: 2 · byte + 1 for the upper half of a byte.

    Rows are alike, and follow each other at the layout's pitch.

    Returns
    -------
    ndarray of int32, shape (layout.unit("T"), head_dim)
        Read-only, and the same array for equal arguments.

    Raises
    ------
    LayoutError
        See `check_appendable`.
    """
    check_appendable(layout, head_dim)
    period = layout.unit(TOKEN)
    byte, shift = layout.address(np.arange(period)[:, None], np.arange(head_dim)[None, :], period, head_dim)
    table = np.ascontiguousarray(2 * byte + shift // 4, np.int32)
    table.flags.writeable = False
    return table

"""Fields that describe a segment to ``attend``: keys and values of a run of tokens, and how tiles read them.

A job names where its segments are and how many; each has its own layouts, and so its own tile functions and its own
form of prepared queries.
"""

from __future__ import annotations

from .packed import OPERAND, OPERAND_FIELDS

FIELDS = (
    "k",  # `lowbit.kernels.packed.OPERAND_FIELDS` fields of an operand each; ``tokens`` are those to be seen
    *("",) * (OPERAND_FIELDS - 1),
    "v",
    *("",) * (OPERAND_FIELDS - 1),
    "start",  # position of the first token in the context
    "prepare",  # address of `lowbit.kernels.cpu.activations`'s function; 0 if queries lie as the tile reads them
    "order_count",  # slots of a prepared row; see `lowbit.kernels.cpu.keys.Preparation`
    "aux_count",  # groups of a prepared row's lanes
    "element",  # bytes of the prepared small operand's elements: 1 for the integer pipeline, 4 for float
    "step",  # rows that one tile call serves
    "block",  # tokens between two updates of the softmax
)
"""int64 each, in order."""

K, V = FIELDS.index("k"), FIELDS.index("v")
START, PREPARE, ORDER_COUNT, AUX_COUNT, ELEMENT, STEP, BLOCK = range(2 * OPERAND_FIELDS, 2 * OPERAND_FIELDS + 7)
TOKENS = OPERAND.index("tokens")
SEGMENT_FIELDS = len(FIELDS)

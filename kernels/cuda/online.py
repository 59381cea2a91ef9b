"""Steps of the online softmax between keys and values."""

from __future__ import annotations

from collections.abc import Sequence

from . import softmax
from .ops import Ops, Type, Value, step


class Online:
    """Functions for kernels.

    Parameters
    ----------
    rows : int
    outputs_each : int
        Outputs that a lane has of each row.
    has_cap : bool
    """

    def __init__(self, rows: int, outputs_each: int, has_cap: bool) -> None:
        bounds: Type = ("i32", 2 * rows)
        found: Type = ("f32", 4 * rows)
        each: Type = ("f32", rows)
        outputs: Type = ("f32", rows * outputs_each)

        def rescale(ops: Ops, total: Sequence[Value], shrinks: Sequence[Value]) -> tuple[Value, ...]:
            return tuple(ops.fmul(value, shrinks[i // outputs_each]) for i, value in enumerate(total))

        self.seen = step(
            lambda ops, first, tokens, query_rows, window: softmax.seen(ops, rows, first, tokens, query_rows, window),
            ["i32"] * 4,
            bounds,
        )
        self.update = step(
            lambda ops, state, scores, token, limits, cap: softmax.update(
                ops, state, scores, token, limits, cap, has_cap
            ),
            [("f32", 2 * rows), each, "i32", bounds, "f32"],
            found,
        )
        self.state_of = step(lambda ops, given: given[: 2 * rows], [found], ("f32", 2 * rows))
        self.weights_of = step(lambda ops, given: given[2 * rows : 3 * rows], [found], each)
        self.shrinks_of = step(lambda ops, given: given[3 * rows :], [found], each)
        self.rescale = step(rescale, [outputs, each], outputs)

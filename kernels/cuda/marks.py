"""Marks of loops: how the static analyzer knows in SASS which loop is which.

A build for counting has ``pmevent`` in its loops, which becomes ``PMTRIG`` with one bit set. Where a compiler unrolls a
loop its mark appears as often in one iteration. Kernels that run have no marks.
"""

from __future__ import annotations

TILE = 1
"""32 tokens of a warp."""
K_STEP = 2
"""A step along the channels of a dot product."""
SUB = 3
"""Some of a tile's tokens, when several lanes share one."""
WEIGHTS = 4
"""Rounding weights of one group of channels."""
V_STEP = 5
"""A step along the tokens of weighted values."""
PROLOGUE, EPILOGUE, MERGE = 6, 7, 8
"""Preparing the small operand, folding one warp's record of one channel, one split's."""
MAXIMA = 9
"""Maxima of one warp's record."""

NAMES = {TILE: "tile", K_STEP: "k step", SUB: "sub-tile", WEIGHTS: "weights", V_STEP: "v step"} | {
    PROLOGUE: "prologue",
    EPILOGUE: "epilogue",
    MERGE: "merge",
    MAXIMA: "maxima",
}

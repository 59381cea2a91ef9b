"""Marks of loops: how the static analyzer knows in SASS which loop is which.

A build for counting has ``pmevent`` in its loops, which becomes ``PMTRIG`` with one bit set. Where a compiler unrolls a
loop its mark appears as often in one iteration. Kernels that run have no marks.
"""

from __future__ import annotations

TILE = 1
"""32 tokens of a warp."""
K_STEP = 2
"""A step along the channels of a dot product."""
WEIGHTS = 4
"""Rounding weights of one group of channels."""
PROLOGUE, EPILOGUE, MERGE = 6, 7, 8
"""Preparing the small operand, folding one warp's record of one channel, one split's."""
MAXIMA = 9
"""Maxima of one warp's record."""

NAMES = {TILE: "tile", K_STEP: "k step", WEIGHTS: "weights"} | {
    PROLOGUE: "prologue",
    EPILOGUE: "epilogue",
    MERGE: "merge",
    MAXIMA: "maxima",
}

"""Hypothesis strategies for everything that a layout can be."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from lowbit.kernels.layout import Factor, Layout
from lowbit.kernels.packing import packings

FORMATS = ("fp16", "int8", "int4")


def chain(axis, extents):
    """Factors of one axis whose inner ones have these extents, outermost first."""
    unit = math.prod(extents)
    factors = [Factor(axis, 0, unit)]
    for extent in extents:
        factors.append(Factor(axis, unit, unit // extent))
        unit //= extent
    return factors


_EXTENTS = st.lists(st.sampled_from([2, 3, 4, 8, 16]), max_size=3).filter(lambda e: math.prod(e) <= 64)


@st.composite
def factorisations(draw):
    """Factors that cover both axes, in any order."""
    return tuple(draw(st.permutations(chain("T", draw(_EXTENTS)) + chain("D", draw(_EXTENTS)))))


@st.composite
def layouts(draw, formats=FORMATS, folds=True):
    packing = draw(st.sampled_from([p for f in formats for p in packings(f)]))
    step = 2 if packing.format == "fp16" else 1
    pad = step * draw(st.sampled_from([0, 0, 1, 8, 32, 64]))
    fold = draw(st.sampled_from([0, 0, 1, 2, 3, 7])) if folds else 0
    return Layout(draw(factorisations()), packing, pad, fold)


@st.composite
def stored(draw, formats=FORMATS, folds=True):
    """A layout, and a (capacity, channels) that it can hold."""
    layout = draw(layouts(formats, folds))
    tokens = draw(st.integers(1, 70))
    channels = draw(st.integers(1, 70))
    # A row must be whole packing blocks: lengthen an axis that the row holds blocks of, or take one-code blocks.
    missing = layout.packing.block_codes // math.gcd(layout.row_codes(tokens, channels), layout.packing.block_codes)
    outer = next((f for f in layout.factors[1:] if f.block == 0), None)
    if missing > 1 and outer is not None:
        length = -(-outer.extent(tokens if outer.axis == "T" else channels) // missing) * missing * outer.unit
        tokens, channels = (length, channels) if outer.axis == "T" else (tokens, length)
    if layout.row_codes(tokens, channels) % layout.packing.block_codes:
        layout = layout.with_packing(packings("int8")[0])
    return layout, tokens, channels


@st.composite
def growing(draw, head_dim, formats=FORMATS):
    """A layout of ``head_dim`` channels whose storage grows along tokens."""
    tokens, *rest = chain("T", draw(_EXTENTS))
    factors = (tokens, *draw(st.permutations(rest + chain("D", draw(_EXTENTS)))))
    # A packing block of 64 codes fits few rows.
    fitting = [
        p for f in formats for p in packings(f) if Layout(factors, p).row_codes(32, head_dim) % p.block_codes == 0
    ]
    if not fitting:
        return draw(growing(head_dim, formats))
    packing = draw(st.sampled_from(fitting))
    step = 2 if packing.format == "fp16" else 1
    return Layout(factors, packing, step * draw(st.sampled_from([0, 0, 1, 32])))

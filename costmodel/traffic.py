"""Bytes: the cache lines that one decode step touches, counted from the layout's factors alone.

The elements [0, tokens) × [0, channels) of a layout are turned into a nested pattern of byte runs in address order
(`Run`, `Repeat`, `Sequence`), whose lines are then counted with the line phase as the only state. A prefix of an axis
is a union of boxes in its digits: the digits above some place equal the limit's, the digit there is smaller, the ones
below are free. Which boxes an element can still lie in is all that has to be remembered while descending through the
factors, in whatever order they come. The work grows with the number of factors and with line_bytes / gcd(stride,
line_bytes), not with the number of elements.

Kernels read blocks of 32 tokens, and whole blocks of the layout's outermost channel factor. Scales are fp16 in the
fixed order ``T/32 D/32 t32`` per head, heads aligned to 64 bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np

from ..kernels.candidate import Candidate
from ..kernels.errors import LayoutError
from ..kernels.layout import CHANNEL, HEAD_ALIGNMENT_BYTES, TOKEN, Layout
from ..kernels.packing import Int
from ..kernels.problem import GROUP, Problem, check_tokens

TOKEN_BLOCK = 32
SCALE_BYTES = 2

Box = tuple[tuple[int, int], ...]
"""Half-open range of every factor's coordinate; full where the factor belongs to the other axis."""


@dataclass(frozen=True, eq=False)
class Run:
    """Adjacent touched bytes."""

    length: int

    @property
    def first(self) -> int:
        return 0

    @property
    def last(self) -> int:
        return self.length - 1


@dataclass(frozen=True, eq=False)
class Repeat:
    """The same pattern ``count`` times, ``stride`` bytes apart and at most that long."""

    count: int
    stride: int
    part: Pattern

    @property
    def first(self) -> int:
        return self.part.first

    @property
    def last(self) -> int:
        return (self.count - 1) * self.stride + self.part.last


@dataclass(frozen=True, eq=False)
class Sequence:
    """Patterns at ascending offsets, none reaching into the next."""

    parts: tuple[tuple[int, Pattern], ...]

    @property
    def first(self) -> int:
        return self.parts[0][0] + self.parts[0][1].first

    @property
    def last(self) -> int:
        return self.parts[-1][0] + self.parts[-1][1].last


Pattern = Run | Repeat | Sequence


def operand_bytes(layout: Layout, tokens: int, capacity: int, channels: int, line_bytes: int) -> int:
    """Bytes of the distinct cache lines of one head's packed operand that reading tokens [0, tokens) touches.

    Parameters
    ----------
    layout : Layout
    tokens : int
        Context length, rounded up to 32 here.
    capacity : int
        Tokens that the storage holds, a multiple of 32.
    channels : int
        Channels read; the head's dimension.
    line_bytes : int
        Line (or sector) size. The head begins on such a boundary.

    Raises
    ------
    LayoutError
        If the tokens exceed the capacity, or the shape does not fit the layout.
    """
    return _lines(layout, tokens, capacity, channels, 1, line_bytes) * line_bytes


def scale_bytes(tokens: int, channels: int, line_bytes: int, kv_heads: int = 1, capacity: int | None = None) -> int:
    """Bytes of the distinct cache lines of ``kv_heads`` heads' scales that reading tokens [0, tokens) touches.

    ``capacity`` defaults to the tokens rounded up to 32.
    """
    block_bytes = -(-channels // GROUP) * TOKEN_BLOCK * SCALE_BYTES
    blocks = _blocks(tokens)
    stride = _align((blocks if capacity is None else _blocks(capacity)) * block_bytes)
    return count_lines(_repeat(kv_heads, stride, Run(blocks * block_bytes)), line_bytes) * line_bytes


def call_bytes(problem: Problem, candidate: Candidate, tokens: int, line_bytes: int) -> int:
    """Bytes of the distinct cache lines of all packed operands and scales that one call reads, over all heads.

    Storage is taken to hold just the tokens, rounded up to 32, and each array to begin on a line boundary. A window's
    tokens are counted as if they came first: blocks of 32 are laid out alike.

    Raises
    ------
    LayoutError
        If the candidate lacks a layout that the operator needs.
    ProblemError
        If ``tokens`` is no context length.
    """
    capacity = _blocks(check_tokens(tokens)) * TOKEN_BLOCK
    read = walked_tokens(problem, tokens)
    total = 0
    for role in problem.roles:
        layout = layout_of(candidate, role)
        channels = stored_channels(layout, problem.head_dim)
        total += _lines(layout, read, capacity, channels, problem.kv_heads, line_bytes) * line_bytes
        if problem.scale_groups(role):
            total += scale_bytes(read, problem.head_dim, line_bytes, problem.kv_heads, capacity)
    return total


def layout_of(candidate: Candidate, role: str) -> Layout:
    """The candidate's layout of ``k`` or ``v``.

    Raises
    ------
    LayoutError
        If it has none.
    """
    layout = candidate.k if role == "k" else candidate.v
    if layout is None:
        raise LayoutError(f"candidate {candidate.name!r} has no layout for operand {role!r}")
    return layout


def stored_channels(layout: Layout, head_dim: int) -> int:
    """Channels that kernels walk over: whole blocks of the layout's outermost channel factor."""
    unit = layout.unit(CHANNEL)
    return -(-head_dim // unit) * unit


def stored_tokens(tokens: int) -> int:
    """Tokens that kernels walk over: whole blocks of 32."""
    return _blocks(tokens) * TOKEN_BLOCK


def walked_tokens(problem: Problem, tokens: int) -> int:
    """Tokens that a call walks over: whole blocks of 32, from the first that the earliest query position sees."""
    first = max(tokens - problem.query_rows + 1 - problem.window, 0) if problem.window else 0
    return stored_tokens(tokens) - first // TOKEN_BLOCK * TOKEN_BLOCK


def visible_tokens(problem: Problem, tokens: int) -> int:
    """Most tokens that one query position sees."""
    return min(tokens, problem.window or tokens)


def count_lines(pattern: Pattern, line_bytes: int) -> int:
    """Distinct lines that a pattern touches if its offset 0 begins a line."""
    seen: dict[tuple[int, int], int] = {}

    def lines(part: Pattern, phase: int) -> int:
        if isinstance(part, Run):
            return (phase + part.length - 1) // line_bytes + 1
        key = (id(part), phase)
        if key not in seen:
            seen[key] = repeated(part, phase) if isinstance(part, Repeat) else joined(part, phase)
        return seen[key]

    def repeated(part: Repeat, phase: int) -> int:
        # In address order two neighbours share at most the line between them, and phases recur after `period` repeats.
        period = line_bytes // gcd(line_bytes, part.stride)
        starts = [phase + i * part.stride for i in range(min(part.count, period))]
        own = [lines(part.part, start % line_bytes) for start in starts]
        gap = part.stride + part.part.first
        shared = [(start + part.part.last) // line_bytes == (start + gap) // line_bytes for start in starts]
        return _periodic(own, part.count) - _periodic(shared, part.count - 1)

    def joined(part: Sequence, phase: int) -> int:
        total, before = 0, -1
        for offset, child in part.parts:
            start = phase + offset
            total += lines(child, start % line_bytes) - (before == (start + child.first) // line_bytes)
            before = (start + child.last) // line_bytes
        return total

    return lines(pattern, 0)


def _periodic(values: list[int] | list[bool], count: int) -> int:
    """Sum of the first ``count`` terms of the sequence that repeats ``values``."""
    cycles, rest = divmod(count, len(values))
    return cycles * sum(values) + sum(values[:rest])


def _blocks(tokens: int) -> int:
    return -(-tokens // TOKEN_BLOCK)


def _align(size: int) -> int:
    return -(-size // HEAD_ALIGNMENT_BYTES) * HEAD_ALIGNMENT_BYTES


@lru_cache(maxsize=1 << 16)
def _lines(layout: Layout, tokens: int, capacity: int, channels: int, heads: int, line_bytes: int) -> int:
    if stored_tokens(tokens) > capacity:
        raise LayoutError(f"{tokens} tokens do not fit a capacity of {capacity}")
    head = _Descent(layout, stored_tokens(tokens), capacity, channels).head()
    return count_lines(_repeat(heads, layout.head_bytes(capacity, channels), head), line_bytes)


def _repeat(count: int, stride: int, part: Pattern) -> Pattern:
    if count == 1:
        return part
    if isinstance(part, Run) and part.length == stride:
        return Run(count * stride)
    return Repeat(count, stride, part)


def _sequence(parts: list[tuple[int, Pattern]]) -> Pattern:
    joined: list[tuple[int, Pattern]] = []
    for offset, part in parts:
        if joined and isinstance(part, Run) and isinstance(joined[-1][1], Run):
            start, before = joined[-1][0], joined[-1][1]
            if start + before.length == offset:
                joined[-1] = (start, Run(before.length + part.length))
                continue
        joined.append((offset, part))
    return joined[0][1] if len(joined) == 1 and joined[0][0] == 0 else Sequence(tuple(joined))


class _Descent:
    """Builds the touched pattern of one head, factor by factor from the outermost."""

    def __init__(self, layout: Layout, tokens: int, capacity: int, channels: int) -> None:
        self._layout = layout
        self._packing = layout.packing
        lengths = {TOKEN: capacity, CHANNEL: channels}
        self._extents = [f.extent(lengths[f.axis]) for f in layout.factors]
        self._strides = layout.strides(capacity, channels)
        self._pitch = layout.pitch_bytes(capacity, channels)
        # The product of the two axes' boxes: an element lies in exactly one.
        self._boxes = [
            tuple(t if f.axis == TOKEN else d for f, t, d in zip(layout.factors, token_box, channel_box, strict=True))
            for token_box in self._prefix(TOKEN, tokens)
            for channel_box in self._prefix(CHANNEL, channels)
        ]
        self._patterns: dict[tuple[int, frozenset[int]], Pattern] = {}

    def _prefix(self, axis: str, limit: int) -> list[Box]:
        """[0, limit) of ``axis`` as disjoint boxes."""
        factors, full = self._layout.factors, [(0, extent) for extent in self._extents]
        places = sorted((i for i, f in enumerate(factors) if f.axis == axis), key=lambda i: -factors[i].unit)
        boxes = []
        for place in places:
            digit = limit // factors[place].unit % (self._extents[place] if factors[place].block else limit + 1)
            box = list(full)
            box[place] = (0, digit)
            if digit:
                boxes.append(tuple(box))
            full[place] = (digit, digit + 1)
        return boxes

    def _groups(self, level: int, alive: frozenset[int]) -> Iterator[tuple[int, int, frozenset[int]]]:
        """Maximal ranges of a factor's coordinate in which the same boxes stay alive; those without any left out."""
        ranges = {box: self._boxes[box][level] for box in alive}
        cuts = sorted({0, self._extents[level], *(edge for pair in ranges.values() for edge in pair)})
        for low, high in itertools.pairwise(cuts):
            left = frozenset(box for box, (start, stop) in ranges.items() if start <= low and high <= stop)
            if left:
                yield low, high, left

    def head(self) -> Pattern:
        groups = [
            (low, high, self._inner(1, left)) for low, high, left in self._groups(0, frozenset(range(len(self._boxes))))
        ]
        pitch, fold, rows = self._pitch, self._layout.fold_rows, self._extents[0]
        if not fold or rows <= fold:
            return _sequence([(low * pitch, _repeat(high - low, pitch, row)) for low, high, row in groups])
        # Row p·fold + r lies in panel p at height r: for each height, the panels side by side.
        cuts = sorted({0, fold, *(edge % fold for low, high, _ in groups for edge in (low, high))})
        step = pitch * -(-rows // fold)
        parts = []
        for r, end in itertools.pairwise(cuts):
            spans = [(max(0, -((r - low) // fold)), max(0, -((r - high) // fold)), row) for low, high, row in groups]
            panels = [(start * pitch, _repeat(stop - start, pitch, row)) for start, stop, row in spans if start < stop]
            if panels:
                parts.append((r * step, _repeat(end - r, step, _sequence(panels))))
        return _sequence(parts)

    def _inner(self, level: int, alive: frozenset[int]) -> Pattern:
        key = (level, alive)
        if key not in self._patterns:
            self._patterns[key] = self._build(level, alive)
        return self._patterns[key]

    def _build(self, level: int, alive: frozenset[int]) -> Pattern:
        packing = self._packing
        if level == len(self._extents):
            return Run(packing.block_bytes)
        codes = self._strides[level]
        if codes % packing.block_codes:
            return self._within_blocks(level, alive)
        step = codes // packing.block_codes * packing.block_bytes
        return _sequence(
            [
                (low * step, _repeat(high - low, step, self._inner(level + 1, left)))
                for low, high, left in self._groups(level, alive)
            ]
        )

    def _within_blocks(self, level: int, alive: frozenset[int]) -> Pattern:
        """A factor whose steps are no whole packing blocks: enumerate one stretch of whole blocks for each kind."""
        codes, block = self._strides[level], self._packing.block_codes
        digits = block // gcd(block, codes)
        groups = list(self._groups(level, alive))
        edges = [edge for low, high, _ in groups for edge in (low, high)]
        cuts = sorted(
            {0, self._extents[level] // digits, *(e // digits for e in edges), *(-(-e // digits) for e in edges)}
        )
        step = digits * codes // block * self._packing.block_bytes
        parts = []
        for start, stop in itertools.pairwise(cuts):
            low, high = start * digits, (start + 1) * digits
            touched = self._codes_between(level, groups, low, high)
            if touched.size:
                parts.append((start * step, _repeat(stop - start, step, self._enumerate(touched))))
        return _sequence(parts)

    def _codes_between(self, level: int, groups: list[tuple[int, int, frozenset[int]]], low: int, high: int) -> Int:
        """Touched codes of the coordinates [low, high), counted from the first of them."""
        found = [np.empty(0, np.int64)]
        for start, stop, left in groups:
            digits = np.arange(max(start, low), min(stop, high)) - low
            if digits.size:
                found.append(np.add.outer(digits * self._strides[level], self._codes(level + 1, left)).ravel())
        return np.concatenate(found)

    def _codes(self, level: int, alive: frozenset[int]) -> Int:
        if level == len(self._extents):
            return np.zeros(1, np.int64)
        return self._codes_between(level, list(self._groups(level, alive)), 0, self._extents[level])

    def _enumerate(self, codes: Int) -> Pattern:
        touched = np.unique(self._packing.address(codes)[0])
        runs = np.split(touched, np.flatnonzero(np.diff(touched) > 1) + 1)
        return _sequence([(int(run[0]), Run(run.size)) for run in runs])

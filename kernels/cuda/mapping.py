"""How a warp reads one tile of a packed operand: which lane loads which vector, and what lies in it.

A tile is 32 tokens of one head. Keys are summed over channels and values over tokens; both are one contraction, with
outputs o (tokens of keys, channels of values) and a reduced axis r. A lane owns some outputs and loads vectors of 4, 8
or 16 bytes along r; with ``lanes_r`` lanes to an output each takes every ``lanes_r``-th vector, and their sums are
added at the end.

Everything here is found by looking every code's address up in the layout, so that any layout works whose tiles look
alike to each lane, and any other is refused with its reason.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CompileError
from ..layout import CHANNEL, TOKEN, Layout
from ..problem import GROUP

TILE = 32
"""Tokens of a tile."""
LANES = 32
WIDTHS = (16, 8, 4)
"""Bytes of one load, whole 32-bit words."""
SECTOR_BYTES = 32
"""What memory transfers at once."""

Ints = NDArray[np.int64]


class Infeasible(CompileError):
    """A layout that a warp cannot read this way."""


@dataclass(frozen=True)
class Vectors:
    """The vectors of ``width`` bytes that a tile consists of.

    Code number p of the vector (a, b) is at output ``outputs[a] + code_o[p]``, reduced index
    ``reduced[b] + code_r[p]``; codes are numbered by byte, then by shift.

    Attributes
    ----------
    width : int
    offsets : ndarray of int64, shape (n_o, n_r)
        Bytes from the tile's first one.
    outputs, reduced : ndarray of int64
        First output, and first reduced index, of each vector.
    code_o, code_r : tuple of int
    """

    width: int
    offsets: Ints
    outputs: Ints
    reduced: Ints
    code_o: tuple[int, ...]
    code_r: tuple[int, ...]

    @property
    def outputs_each(self) -> tuple[int, ...]:
        """Distinct output offsets of one vector, ascending."""
        return tuple(sorted(set(self.code_o)))

    @property
    def reduced_each(self) -> tuple[int, ...]:
        """Distinct reduced offsets of one vector, in order of appearance."""
        return tuple(dict.fromkeys(self.code_r))


@dataclass(frozen=True)
class Tiling:
    """Vectors dealt out to the lanes of a warp.

    Lane = o_lane · lanes_r + r_lane. Its vectors are a = i · lanes_o + o_lane for i < ``iters_o``, and
    b = j · lanes_r + r_lane for j < ``iters_r``; that of (i, j) starts at
    ``offsets[i, j] + o_lane · o_stride + r_lane · r_stride``.

    Attributes
    ----------
    role : str
    vectors : Vectors
    lanes_o, lanes_r, iters_o, iters_r : int
    last_o : int
        Lanes with a vector in the last of ``iters_o``; the others repeat lane 0's and their result is nobody's.
    offsets : ndarray of int64, shape (iters_o, iters_r)
    o_stride, r_stride : int
    tile_bytes : int
        From one tile to the next.
    contiguous : bool
        Whether a tile is one run of ``tile_bytes`` bytes that ends where the next begins.
    """

    role: str
    vectors: Vectors
    lanes_o: int
    lanes_r: int
    iters_o: int
    iters_r: int
    last_o: int
    offsets: Ints
    o_stride: int
    r_stride: int
    tile_bytes: int
    contiguous: bool

    @property
    def outputs_per_lane(self) -> int:
        return self.iters_o * len(self.vectors.outputs_each)

    def output(self, i: int, o_lane: int) -> tuple[int, ...]:
        """Outputs of a lane's i-th vector."""
        first = int(self.vectors.outputs[i * self.lanes_o + o_lane])
        return tuple(first + each for each in self.vectors.outputs_each)

    def lane_offsets(self, i: int, j: int) -> tuple[int, ...]:
        """Byte of each lane's vector (i, j)."""
        return tuple(self._lane_offset(i, j, lane) for lane in range(LANES))

    @property
    def sector_share(self) -> float:
        """Share of the sectors that one load of a warp touches which it uses."""
        starts, width = set(self.lane_offsets(0, 0)), self.vectors.width
        sectors = {(start + i) // SECTOR_BYTES for start in starts for i in range(0, width, 4)}
        return len(starts) * width / (SECTOR_BYTES * len(sectors))

    def _lane_offset(self, i: int, j: int, lane: int) -> int:
        o_lane, r_lane = divmod(lane, self.lanes_r)
        if o_lane >= (self.last_o if i == self.iters_o - 1 else self.lanes_o):
            o_lane = 0
        return int(self.offsets[i, j]) + o_lane * self.o_stride + r_lane * self.r_stride


@functools.lru_cache(256)
def tile_vectors(layout: Layout, role: str, head_dim: int) -> tuple[tuple[Vectors, ...], int, bool]:
    """The vectors of a tile in each width that fits, widest first; bytes from tile to tile; whether tiles adjoin.

    Raises
    ------
    Infeasible
        If later tiles lie differently.
    """
    if layout.factors[0].axis != TOKEN or TILE % layout.unit(TOKEN):
        raise Infeasible(f"{layout.order!r}: 32 tokens are no run of storage rows")
    if layout.fold_rows:
        raise Infeasible(f"{layout.order!r}: GPU kernels read storage that is not folded")
    unit = layout.unit(CHANNEL)
    channels = -(-head_dim // unit) * unit
    t, d = np.arange(TILE)[:, None], np.arange(channels)[None, :]
    byte, shift = layout.address(t, d, 2 * TILE, head_dim)
    next_tile, _ = layout.address(np.array(TILE), np.array(0), 2 * TILE, head_dim)
    tile_bytes = int(next_tile - byte[0, 0])
    bits = layout.packing.bits
    place = (byte * 8 + shift).ravel()
    order = np.argsort(place)
    token, channel = np.divmod(order, channels)
    outputs, reduced = (token, channel) if role == "k" else (channel, token)
    found = [each for width in WIDTHS if (each := _in_width(width, bits, place[order], outputs, reduced)) is not None]
    contiguous = tile_bytes % 16 == 0 and int(place.max()) < 8 * tile_bytes
    return tuple(found), tile_bytes, contiguous


def _in_width(width: int, bits: int, place: Ints, outputs: Ints, reduced: Ints) -> Vectors | None:
    """Codes, in the order of their places, as vectors; None unless all vectors are whole and look alike."""
    codes = 8 * width // bits
    if codes == 0 or len(place) % codes:
        return None
    first = place[::codes]
    if (first % (8 * width)).any() or (place.reshape(-1, codes) != first[:, None] + bits * np.arange(codes)).any():
        return None
    o, r = outputs.reshape(-1, codes), reduced.reshape(-1, codes)
    code_o, code_r = o[0] - o[0].min(), r[0] - r[0].min()
    base_o, base_r = o[:, 0] - code_o[0], r[:, 0] - code_r[0]
    if (o != base_o[:, None] + code_o).any() or (r != base_r[:, None] + code_r).any():
        return None
    if len(set(code_o)) * len(set(code_r)) != codes:
        return None
    starts_o, a = np.unique(base_o, return_inverse=True)
    starts_r, b = np.unique(base_r, return_inverse=True)
    if len(starts_o) * len(starts_r) != len(first):
        return None
    offsets = np.full((len(starts_o), len(starts_r)), -1, np.int64)
    offsets[a, b] = first // 8
    if (offsets < 0).any():
        return None
    return Vectors(width, offsets, starts_o, starts_r, tuple(map(int, code_o)), tuple(map(int, code_r)))


def key_tilings(layout: Layout, head_dim: int, lanes: int) -> Iterator[Tiling]:
    """Ways to read keys with ``lanes`` lanes to a token, widest loads first.

    Raises
    ------
    Infeasible
        If there is none.
    """
    found, tile_bytes, contiguous = tile_vectors(layout, "k", head_dim)
    reason = f"{layout.order!r}: neighbouring codes are of different tokens or channels in no regular way"
    count = 0
    for vectors in found:
        each, (n_o, n_r) = len(vectors.outputs_each), vectors.offsets.shape
        if each > lanes:
            reason = f"{layout.order!r}: {each} tokens share a vector, {lanes} lanes a token"
            continue
        if n_r % lanes:
            reason = f"{layout.order!r}: {n_r} vectors of a token do not divide among {lanes} lanes"
            continue
        tiling = _deal("k", vectors, LANES // lanes, lanes, n_o, n_r, tile_bytes, contiguous)
        if tiling is not None:
            count += 1
            yield tiling
    if not count:
        raise Infeasible(reason)


def value_tilings(layout: Layout, head_dim: int) -> Iterator[Tiling]:
    """Ways to read values: as many lanes as there are vectors across the channels, the rest share tokens.

    Raises
    ------
    Infeasible
        If there is none.
    """
    found, tile_bytes, contiguous = tile_vectors(layout, "v", head_dim)
    count = 0
    for vectors in found:
        n_o, n_r = vectors.offsets.shape
        lanes_o = min(LANES, 1 << (n_o - 1).bit_length())
        lanes_r = min(LANES // lanes_o, n_r)
        if lanes_o * lanes_r < LANES or n_r % lanes_r:
            continue
        tiling = _deal("v", vectors, lanes_o, lanes_r, n_o, n_r, tile_bytes, contiguous)
        if tiling is not None:
            count += 1
            yield tiling
    if not count:
        raise Infeasible(f"{layout.order!r}: its vectors of values do not deal out among the lanes of a warp")


def _deal(
    role: str, vectors: Vectors, lanes_o: int, lanes_r: int, n_o: int, n_r: int, tile_bytes: int, contiguous: bool
) -> Tiling | None:
    """None unless every lane's vectors lie at the same distance from lane 0's."""
    iters_o, iters_r = -(-n_o // lanes_o), n_r // lanes_r
    offsets = vectors.offsets
    o_stride = int(offsets[1, 0] - offsets[0, 0]) if lanes_o > 1 and n_o > 1 else 0
    r_stride = int(offsets[0, 1] - offsets[0, 0]) if lanes_r > 1 else 0
    a, b = np.arange(n_o), np.arange(n_r)
    base = offsets[a // lanes_o * lanes_o][:, b // lanes_r * lanes_r]
    if (offsets != base + (a % lanes_o * o_stride)[:, None] + b % lanes_r * r_stride).any():
        return None
    starts = offsets[::lanes_o, ::lanes_r]
    last_o = n_o - (iters_o - 1) * lanes_o
    return Tiling(
        role, vectors, lanes_o, lanes_r, iters_o, iters_r, last_o, starts, o_stride, r_stride, tile_bytes, contiguous
    )


def lane_part(values: Any, what: str) -> tuple[int, int]:
    """(m, s) with ``values[lane] - values[0] == lane * m >> s``: a per-lane number as arithmetic.

    Raises
    ------
    Infeasible
        If there is no such pair.
    """
    deltas = np.asarray(values, np.int64) - values[0]
    lanes = np.arange(len(deltas))
    for shift in (0, *range(5, 6)):
        for factor in (0, *(1 << k for k in range(6))):
            if (lanes * factor >> shift == deltas).all():
                return factor, shift
    raise Infeasible(f"{what} differs from lane to lane in no regular way: {deltas.tolist()}")


def group_of(channel: int) -> int:
    """Scale group of a channel."""
    return channel // GROUP

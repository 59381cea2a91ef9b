"""Cutting a head's packed operand into regions, and the loops over them.

`plan` looks for the smallest region that a target's registers can be fed from, lets it grow until the hot loop has the
accumulators that a schedule asks for, and proves that repetitions of it lie a constant number of bytes apart.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ..errors import LayoutError
from ..layout import Layout
from ..problem import GROUP
from .mapping import TOKENS, Infeasible, Region, is_row_major, no_two_orders, region


@dataclass(frozen=True)
class Plan:
    """A head's operand cut into regions: the trip counts and byte steps of the loops over them.

    Attributes
    ----------
    main, tail : Region or None
        The repeated region and the remainder: of channels when keys are reduced over channels, of output channels for
        values.
    trips : int
        Repetitions of ``main`` along channels.
    channel_step_bytes : int
        From one repetition to the next.
    token_step_bytes : int
        From one output block to the next within a tile (keys); 0 if a block is one or more whole tiles.
    tile : int
        Tokens of a storage row.
    pitch_bytes : int
    """

    main: Region | None
    tail: Region | None
    trips: int
    channel_step_bytes: int
    token_step_bytes: int
    tile: int
    pitch_bytes: int

    @property
    def any(self) -> Region:
        region = self.main or self.tail
        assert region is not None
        return region


def plan(
    layout: Layout, head_dim: int, vector_bytes: int, role: str, integer: bool, registers: int, lanes: int = 0
) -> Plan:
    """Choose regions for one role.

    Parameters
    ----------
    vector_bytes : int
        Bytes of packed words that are loaded at once.
    lanes : int, optional
        32-bit lanes of an accumulator, if not ``vector_bytes`` / 4: the float pipeline widens, and may load less.
    registers : int
        Accumulator registers per row wanted in the hot loop; the region grows until it has them or cannot grow.

    Raises
    ------
    Infeasible
        With the reason, if no region fits.
    """
    if layout.fold_rows:
        raise Infeasible("linear memory has no height limit: folds are for textures")
    if layout.factors[0].axis != "T":
        raise Infeasible("channels outermost: every appended token would move the rest of the cache")
    tile = layout.unit("T")
    if TOKENS % tile:
        raise Infeasible(f"a tile of {tile} tokens does not divide the kernels' {TOKENS}-token blocks")
    for axis in (f for f in layout.factors if f.axis == "D" and f.block == 0):
        if head_dim % axis.unit:
            raise Infeasible(f"{head_dim} channels are no whole number of {axis.unit}-channel tiles")
    try:
        pitch = layout.pitch_bytes(TOKENS, head_dim)
    except Infeasible:
        raise
    except LayoutError as error:
        raise Infeasible(str(error).partition(": ")[2]) from None

    operand = _Operand(layout, head_dim, vector_bytes, role, integer, lanes, tile, pitch)
    return _grown_keys(operand, registers) if role == "k" else _grown_values(operand, registers)


@dataclass(frozen=True)
class _Operand:
    """What regions are cut from, whatever their size."""

    layout: Layout
    head_dim: int
    vector_bytes: int
    role: str
    integer: bool
    lanes: int
    tile: int
    pitch_bytes: int

    def cut(self, outputs: int, reductions: int, overrun: bool = False) -> Region:
        found = _cut(self, outputs, reductions, overrun and is_row_major(self.layout))
        if isinstance(found, str):
            raise Infeasible(found)
        return found


@functools.lru_cache(8)
def _cut(operand: _Operand, outputs: int, reductions: int, overrun: bool) -> Region | str:
    """A region, or why there is none; the largest one is asked for twice when nothing fits."""
    o = operand
    try:
        return region(o.layout, o.head_dim, o.vector_bytes, o.role, o.integer, outputs, reductions, overrun, o.lanes)
    except Infeasible as error:
        return str(error)


def _grown_keys(operand: _Operand, registers: int) -> Plan:
    reason = ""
    for channels in (c for c in (GROUP, 2 * GROUP, 4 * GROUP) if c == GROUP or c < 2 * operand.head_dim):
        best: Plan | None = None
        for tokens in (1, 2, 4, 8, 16, 32):
            found = _keys(operand, tokens, channels)
            if isinstance(found, str):
                reason = found
                continue
            if best is not None and len(found.any.lanes) > registers:
                break
            best = found
        if best is not None:
            return best
    raise Infeasible(reason)


def _grown_values(operand: _Operand, registers: int) -> Plan:
    reason = ""
    best: Plan | None = None
    lanes = operand.lanes or operand.vector_bytes // 4
    for size in (1 << i for i in range(operand.head_dim.bit_length())):
        if best is not None and size > registers * lanes:
            break  # so many outputs have more accumulators for certain
        found = _values(operand, size)
        if isinstance(found, str):
            reason = found
            continue
        if best is not None and len(found.any.lanes) > registers:
            break
        best = found
    if best is None:
        try:
            whole = operand.cut(operand.head_dim, TOKENS, True)
        except Infeasible:
            raise Infeasible(reason) from None
        return Plan(None, whole, 0, 0, 0, operand.tile, operand.pitch_bytes)
    return best


@functools.lru_cache(64)
def _keys(operand: _Operand, tokens: int, channels: int) -> Plan | str:
    """A plan for keys whose regions have this size, or why there is none; remembered for other counts of registers."""
    layout, head_dim, tile = operand.layout, operand.head_dim, operand.tile
    trips, rest = divmod(head_dim, channels)
    try:
        found = Plan(
            operand.cut(tokens, channels) if trips else None,
            operand.cut(tokens, rest, True) if rest else None,
            trips,
            _step(layout, head_dim, 0, channels) if trips > 1 or (trips and rest) else 0,
            _step(layout, head_dim, tokens, 0) if tokens < tile else 0,
            tile,
            operand.pitch_bytes,
        )
        _check_affine(layout, head_dim, found, tokens, channels)
    except Infeasible as error:
        return str(error)
    return found


@functools.lru_cache(64)
def _values(operand: _Operand, channels: int) -> Plan | str:
    """A plan for values whose regions have so many channels, or why there is none; remembered as that of keys is."""
    layout, head_dim = operand.layout, operand.head_dim
    trips, rest = divmod(head_dim, channels)
    try:
        main = operand.cut(channels, TOKENS)
        tail = operand.cut(rest, TOKENS, True) if rest else None
        if main.reductions != TOKENS or (tail is not None and tail.slots != main.slots):
            raise no_two_orders(layout)
        step = _step(layout, head_dim, 0, channels) if trips > 1 or rest else 0
        found = Plan(main, tail, trips, step, 0, operand.tile, operand.pitch_bytes)
        _check_affine(layout, head_dim, found, TOKENS, channels)
    except Infeasible as error:
        return str(error)
    return found


def _step(layout: Layout, head_dim: int, t: int, d: int) -> int:
    byte, _ = layout.address(np.array([0, t]), np.array([0, d]), TOKENS, head_dim)
    return int(byte[1] - byte[0])


def _check_affine(layout: Layout, head_dim: int, plan: Plan, tokens: int, channels: int) -> None:
    """Repetitions of the region must be the first one moved by a constant number of bytes."""
    t, d = np.arange(TOKENS)[:, None], np.arange(head_dim)[None, :]
    byte, shift = layout.address(t, d, TOKENS, head_dim)
    tile, block = plan.tile, min(tokens, TOKENS)
    inner = t % tile
    base = t // tile * plan.pitch_bytes + d // channels * plan.channel_step_bytes
    if plan.token_step_bytes:
        base = base + inner // block * plan.token_step_bytes
        inner = inner % block
    first_byte, first_shift = layout.address(inner, d % channels, TOKENS, head_dim)
    if not (
        np.array_equal(byte, base + first_byte) and np.array_equal(shift, np.broadcast_to(first_shift, shift.shape))
    ):
        raise Infeasible(
            f"{layout.order} {layout.packing.arrangement}: blocks of {channels} channels do not repeat evenly"
        )

"""From a layout to vector registers: which (output, reduction) pair each lane of each loaded register holds.

The contraction is y[o] = Σ_r W[o, r]·x[r]. For keys (role ``k``) o is the token and r the channel; for values (``v``)
the other way round. A *region* is a block of outputs × reductions that the hot loop handles in one iteration. It is
loaded in *chunks* of one vector register; a chunk's packing splits into code registers; and those become accumulator
lanes in one of two ways:

- ``direct``: each 32-bit lane's four codes belong to one output, as a dot instruction wants them;
- ``transpose``: four registers that agree in their outputs are interleaved byte by byte into such lanes.

The float pipeline widens every code to its own lane, so any register serves.

The small operand is stored in the order in which registers meet it (`Region.slots`), which is how a packing avoids
restoring the order of its nibbles. Nothing here knows an instruction; the maps are plain integers and can be checked by
carrying out the contraction in NumPy.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import LayoutError
from ..layout import Layout
from ..problem import GROUP

TOKENS = 32
"""Tokens of one iteration over values, and the most that one iteration over keys produces."""

Code = tuple[int, int]
"""(output, reduction) of one code, relative to the region."""


Registers = dict[tuple[int, int], tuple[Code, ...]]
"""Codes of each register, by (chunk, register)."""

_flat = itertools.chain.from_iterable


class Infeasible(LayoutError):
    """The layout cannot feed this target's registers; the message is the reason recorded for the pruned candidate."""


@dataclass(frozen=True)
class Lanes:
    """What one accumulator register means: output of each lane, and the reductions multiplied into it."""

    o: tuple[int, ...]
    r: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Unit:
    """Code registers, named (chunk, register), that become accumulator operands together."""

    kind: str
    sources: tuple[tuple[int, int], ...]
    outputs: tuple[Lanes, ...]


@dataclass(frozen=True)
class Region:
    """A block of the packed operand that is loaded and contracted together.

    Attributes
    ----------
    outputs, reductions : int
        Extent; ``reductions`` counts slots of the small operand, including those past the end of a short row.
    chunks : tuple of (row, byte)
        Vector loads, relative to the region's start.
    units : tuple of Unit
        In the order in which a kernel should visit them.
    slots : dict
        Position in the reordered small operand of each tuple of reductions (four for integers, one for floats).
    """

    outputs: int
    reductions: int
    chunks: tuple[tuple[int, int], ...]
    units: tuple[Unit, ...]
    slots: dict[tuple[int, ...], int]

    @functools.cached_property
    def lanes(self) -> list[Lanes]:
        """Distinct accumulators by the outputs of their lanes, in order of appearance."""
        found: dict[tuple[int, ...], Lanes] = {}
        for unit in self.units:
            for output in unit.outputs:
                found.setdefault(output.o, output)
        return list(found.values())

    @property
    def order(self) -> list[int]:
        """Reduction index stored at each position of the reordered small operand."""
        return [r for reductions in sorted(self.slots, key=self.slots.__getitem__) for r in reductions]


def coordinates(role: str, o: int, r: int) -> tuple[int, int]:
    """(token, channel) of an (output, reduction) pair."""
    return (o, r) if role == "k" else (r, o)


def is_row_major(layout: Layout) -> bool:
    return layout.order == "T D"


def region(
    layout: Layout,
    head_dim: int,
    vector_bytes: int,
    role: str,
    integer: bool,
    outputs: int,
    reductions: int,
    overrun: bool = False,
    lanes: int = 0,
) -> Region:
    """Map one region at the start of a head; with ``overrun``, one that may read past the end of a row-major row.

    Raises
    ------
    Infeasible
        If a vector load would straddle the region, or lanes would mix outputs.
    """
    tokens, channels = coordinates(role, outputs, reductions)
    codes = _codes_by_slot(layout, head_dim, vector_bytes, tokens, channels, overrun)
    places = {(row, byte) for row, byte, _ in codes}
    first: dict[int, int] = {}
    for row, byte in places:
        first[row] = min(byte, first.get(row, byte))
    chunks = sorted({(row, (byte - first[row]) // vector_bytes * vector_bytes + first[row]) for row, byte in places})
    start = first[0]
    registers: Registers = {}
    for number, (row, byte) in enumerate(chunks):
        for index, register in enumerate(_code_registers(layout, codes, row, byte, vector_bytes)):
            found = [code for code in register if code is not None]
            if len(found) < len(register):
                raise Infeasible(
                    f"{layout.order} {layout.packing.arrangement}: a {vector_bytes}-byte load would straddle a block "
                    f"of {tokens} tokens × {channels} channels"
                )
            registers[number, index] = tuple(found if role == "k" else [(r, o) for o, r in found])
    units = _integer_units(registers, layout) if integer else _float_units(registers, lanes or vector_bytes // 4)
    if (
        integer
        and role == "k"
        and any(len({i // GROUP for i in r}) > 1 for u in units for out in u.outputs for r in out.r)
    ):
        raise Infeasible(f"{layout.order} {layout.packing.arrangement}: a 32-bit lane would mix scales")
    units.sort(key=lambda unit: (min(_flat(_flat(out.r for out in unit.outputs))), min(unit.outputs[0].o)))
    slots = _slots(units, layout)
    return Region(
        outputs, sum(map(len, slots)), tuple((row, byte - start) for row, byte in chunks), tuple(units), slots
    )


def _codes_by_slot(
    layout: Layout, head_dim: int, vector_bytes: int, tokens: int, channels: int, overrun: bool
) -> dict[tuple[int, int, int], Code]:
    """(row, byte in row, shift) → (token, channel), for a region at the origin.

    A row of a row-major operand may end inside a vector; the load then runs on, and channels past the end get numbers
    past the end. Their products are multiplied by zero (keys) or land in padding (values).
    """
    tile = layout.unit("T")
    bits = layout.packing.bits
    if overrun and is_row_major(layout):
        per_vector = max(vector_bytes * 8 // bits, layout.packing.block_codes)
        channels = -(-channels // per_vector) * per_vector
        places = zip(*(each.tolist() for each in layout.packing.address(np.arange(channels))), strict=True)
        return {(t, *place): (t, d) for d, place in enumerate(places) for t in range(tokens)}
    t, d = np.meshgrid(np.arange(tokens), np.arange(channels), indexing="ij")
    capacity = -(-tokens // tile) * tile
    byte, shift = layout.address(t, d, capacity, head_dim)
    row = t // tile
    byte = byte - row * layout.pitch_bytes(capacity, head_dim)
    slots = (each.ravel().tolist() for each in np.broadcast_arrays(row, byte, shift))
    return dict(zip(zip(*slots, strict=True), itertools.product(range(tokens), range(channels)), strict=True))


def _code_registers(
    layout: Layout, codes: dict[tuple[int, int, int], Code], row: int, byte: int, vector_bytes: int
) -> list[list[Code | None]]:
    bits = layout.packing.bits
    step = max(bits // 8, 1)
    split = (
        [
            [codes.get((row, byte + j, shift)) for j in range(0, vector_bytes, step)]
            for shift in range(0, min(8, 8 * step), bits)
        ]
        if bits < 8
        else [[codes.get((row, byte + j, 0)) for j in range(0, vector_bytes, step)]]
    )
    if not layout.packing.in_order:
        return split
    return [[split[source][lane] for source, lane in half] for half in interleaved(vector_bytes)]


def _no_two_orders(layout: Layout) -> Infeasible:
    return Infeasible(f"{layout.order} {layout.packing.arrangement}: the small operand would be needed in two orders")


def interleaved(vector_bytes: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Byte sources (register, byte) of the two registers that interleave two nibble registers within 128-bit lanes."""
    halves = []
    for half in range(2):
        halves.append(
            [
                (which, 16 * lane + 8 * half + i)
                for lane in range(vector_bytes // 16)
                for i in range(8)
                for which in range(2)
            ]
        )
    return halves[0], halves[1]


def transposed(vector_bytes: int) -> list[list[tuple[int, int]]]:
    """Byte sources of the four registers of quads that four registers interleave into, within 128-bit lanes."""
    return [
        [
            (source, 16 * lane + 4 * quarter + i)
            for lane in range(vector_bytes // 16)
            for i in range(4)
            for source in range(4)
        ]
        for quarter in range(4)
    ]


def _integer_units(registers: Registers, layout: Layout) -> list[Unit]:
    units = []
    pending: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for name, register in registers.items():
        lanes = [register[i : i + 4] for i in range(0, len(register), 4)]
        if all(len({o for o, _ in lane}) == 1 for lane in lanes):
            output = Lanes(tuple(lane[0][0] for lane in lanes), tuple(tuple(r for _, r in lane) for lane in lanes))
            units.append(Unit("direct", (name,), (output,)))
        else:
            pending.setdefault(tuple(o for o, _ in register), []).append(name)
    for outputs, names in pending.items():
        if len(names) % 4:
            raise Infeasible(_mixed(layout))
        for i in range(0, len(names), 4):
            four = names[i : i + 4]
            quads = []
            for sources in transposed(len(outputs)):
                quad_lanes = [sources[j : j + 4] for j in range(0, len(sources), 4)]
                o = tuple(outputs[lane[0][1]] for lane in quad_lanes)
                r = tuple(tuple(registers[four[source]][byte][1] for source, byte in lane) for lane in quad_lanes)
                quads.append(Lanes(o, r))
            units.append(Unit("transpose", tuple(four), tuple(quads)))
    for unit in units:
        for output in unit.outputs:
            if any(len(set(r)) != 4 for r in output.r):
                raise Infeasible(_mixed(layout))
    return units


def _mixed(layout: Layout) -> str:
    return f"{layout.order} {layout.packing.arrangement}: a 32-bit lane would mix outputs of the contraction"


def _float_units(registers: Registers, lanes: int) -> list[Unit]:
    units = []
    for name, register in registers.items():
        outputs = []
        for start in range(0, len(register), lanes):
            o, r = zip(*register[start : start + lanes], strict=True)
            outputs.append(Lanes(o, tuple(zip(r, strict=True))))
        units.append(Unit("direct", (name,), tuple(outputs)))
    return units


def _slots(units: Sequence[Unit], layout: Layout) -> dict[tuple[int, ...], int]:
    slots: dict[tuple[int, ...], int] = {}
    seen: set[int] = set()
    for unit in units:
        for output in unit.outputs:
            for reductions in output.r:
                if reductions in slots:
                    continue
                if seen & set(reductions):
                    raise _no_two_orders(layout)
                seen |= set(reductions)
                slots[reductions] = len(slots)
    return slots


def broadcast(positions: Sequence[int]) -> tuple[int, int] | None:
    """(first, period) if ``positions`` repeat a run of consecutive slots, else None."""
    period = next(
        p for p in range(1, len(positions) + 1)
        if len(positions) % p == 0 and all(position == positions[i % p] for i, position in enumerate(positions))
    )  # fmt: skip
    run = all(positions[i] == positions[0] + i for i in range(period))
    return (positions[0], period) if run else None


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
            raise _no_two_orders(layout)
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

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


def no_two_orders(layout: Layout) -> Infeasible:
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
                    raise no_two_orders(layout)
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

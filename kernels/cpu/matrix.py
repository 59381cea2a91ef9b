"""Contraction of one region by the matrix unit of AMX: 16 rows at a time.

One instruction multiplies a tile of the small operand, rows × 32 reductions, with a tile of codes, 32 reductions × 16
outputs, whose rows are the very registers that four-way dots want: four reductions of each of 16 outputs. Sums leave
the unit through memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from .mapping import Infeasible, Region, Unit
from .multiply import IntegerForm, Unpacker, arranged
from .spec import TileSpec
from .vector import BYTES, I8, I32, I64, VOID, Emitter, Value

QUADS = 8
"""Rows of a whole tile of codes: 32 reductions, four in each 32-bit lane."""

ROW_BYTES = 64
MOST_ROWS = 16
"""Rows of a tile; keys also take two tiles of them."""

MOST_REGIONS = 8
"""Regions of a row of keys whose sums are held at once, and scaled when all of them are there."""

_SUMS = 4  # tile registers 0 … 3 hold sums in turn
_INSTRUCTIONS = {"ss": "tdpbssd", "wx": "tdpbsud", "xw": "tdpbusd"}
"""By the form of `lowbit.kernels.cpu.multiply.IntegerForm`; the small operand is the first factor."""

Key = tuple[tuple[int, ...], int]
"""Outputs of 16 lanes, and the group of channels that they or their reductions are in."""


@dataclass(frozen=True)
class Tile:
    """One tile of codes: the unit and the register of it that each row is, and the first row's place in the slots."""

    rows: tuple[tuple[Unit, int], ...]
    first_slot: int


def tiles(region: Region, role: str) -> dict[Key, Tile]:
    """The tiles that a region's registers form.

    Raises
    ------
    Infeasible
        If lanes do not belong to 16 different outputs, or the small operand would have to be rearranged.
    """
    found: dict[Key, list[tuple[int, Unit, int]]] = {}
    for unit in region.units:
        for index, output in enumerate(unit.outputs):
            if len(set(output.o)) < len(output.o) or len(set(output.r)) > 1:
                raise Infeasible("the matrix unit wants four reductions of each of 16 outputs in a register")
            group = (output.o[0] if role == "v" else output.r[0][0]) // 32
            found.setdefault((output.o, group), []).append((region.slots[output.r[0]], unit, index))
    result = {}
    for key, rows in found.items():
        rows.sort(key=lambda row: row[0])
        first = rows[0][0]
        if len(rows) > QUADS or [slot for slot, _, _ in rows] != list(range(first, first + len(rows))):
            raise Infeasible("the matrix unit wants reductions in order")
        result[key] = Tile(tuple((unit, index) for _, unit, index in rows), first)
    return result


def check_tiles(spec: TileSpec) -> None:
    """Raise `Infeasible` if the unit cannot contract the regions of ``spec``."""
    if spec.rows > MOST_ROWS and not (spec.rows == 2 * MOST_ROWS and held_at_once(spec)):
        raise Infeasible(f"the matrix unit takes {MOST_ROWS} rows at most, or {2 * MOST_ROWS} of few channels")
    sizes = {len(tile.rows) for region in _regions(spec) for tile in tiles(region, spec.role).values()}
    if len(sizes) > 2:
        raise Infeasible("the matrix unit has registers for two sizes of tiles")


def held_at_once(spec: TileSpec) -> bool:
    """Whether sums of all channels are held before they are scaled."""
    return spec.role == "k" and spec.plan.trips + (spec.plan.tail is not None) <= MOST_REGIONS


def _regions(spec: TileSpec) -> list[Region]:
    return [region for region in (spec.plan.main, spec.plan.tail) if region is not None]


class MatrixUnit:
    """Tile registers of one function: configured on entry, released on exit.

    Parameters
    ----------
    emit : Emitter
        At the function's entry.
    spec : TileSpec
    """

    def __init__(self, emit: Emitter, spec: TileSpec, form: IntegerForm):
        self.emit, self.spec, self.form = emit, spec, form
        check_tiles(spec)
        found = [tiles(region, spec.role) for region in _regions(spec)]
        self.counts = sorted({len(tile.rows) for each in found for tile in each.values()}, reverse=True)
        self.most = max(map(len, found))
        self.tile_rows = min(spec.rows, MOST_ROWS)
        self.passes = -(-spec.rows // MOST_ROWS)
        held = self.most * (spec.plan.trips + (spec.plan.tail is not None) if held_at_once(spec) else 1)
        self.sums_bytes = held * self.passes * MOST_ROWS * ROW_BYTES
        self.sums = aligned_room(emit, self.sums_bytes * (2 if held_at_once(spec) else 1))
        self.codes = aligned_room(emit, self.most * QUADS * ROW_BYTES)
        self._configure()

    def _configure(self) -> None:
        row_bytes, rows = [0] * 16, [0] * 16
        for register in range(_SUMS):
            row_bytes[register], rows[register] = ROW_BYTES, self.tile_rows
        for size, quads in enumerate(self.counts):
            a, b = self._registers(size)
            row_bytes[a], rows[a] = 4 * quads, self.tile_rows
            row_bytes[b], rows[b] = ROW_BYTES, quads
        configure(self.emit, rows, row_bytes)

    @staticmethod
    def _registers(size: int) -> tuple[int, int]:
        """Tile registers of the small operand and of codes, for whole tiles (0) and those of a tail (1)."""
        return _SUMS + 2 * size, _SUMS + 2 * size + 1

    def release(self) -> None:
        self._call("tilerelease")

    def contract(
        self,
        region: Region,
        unpacker: Unpacker,
        small: Callable[[int], tuple[Value, int]],
        start: Callable[[Key], tuple[Value, int] | None],
        room: Value,
        number: int = 0,
    ) -> None:
        """Put the sums of a region where `places` says.

        Parameters
        ----------
        region : Region
        unpacker : Unpacker
            Of the region.
        small : callable
            Where the first row of the small operand of a group starts, and the bytes between its rows.
        start : callable
            The same for the start values of the sums; None for zeros.
        room : Value
            Memory for sums, or the half of it that is used in turn.
        number : int
            Number of the region among those whose sums are held at once.
        """
        places = self.places(region, number)
        for order, (key, tile) in enumerate(tiles(region, self.spec.role).items()):
            a, b = self._registers(self.counts.index(len(tile.rows)))
            begun, (rows, stride) = start(key), small(key[1])
            self._call("tileloadd64", b, *self._codes(tile, order, unpacker))
            for part in range(self.passes):
                sums, first = (order * self.passes + part) % _SUMS, part * MOST_ROWS
                if begun is None:
                    self._call("tilezero", sums)
                else:
                    self._call("tileloadd64", sums, self.emit.at(begun[0], first * begun[1]), begun[1])
                self._call("tileloadd64", a, self.emit.at(rows, 4 * tile.first_slot + first * stride), stride)
                self._call(_INSTRUCTIONS[self.form.form], sums, a, b)
                self._call("tilestored64", sums, self.emit.at(room, places[key] + first * ROW_BYTES), ROW_BYTES)

    def places(self, region: Region, number: int = 0) -> dict[Key, int]:
        """Where in memory for sums the first row's 16 are, in bytes; rows lie `ROW_BYTES` apart."""
        size = self.passes * MOST_ROWS * ROW_BYTES
        return {key: (number * self.most + i) * size for i, key in enumerate(tiles(region, self.spec.role))}

    def _codes(self, tile: Tile, number: int, unpacker: Unpacker) -> tuple[Value, int]:
        """Where a tile's codes are, and the bytes between its rows: in the operand itself if they need no unpacking."""
        direct = unpacker.tile([unit.sources[0] for unit, _ in tile.rows]) if self._stored_as_used(tile) else None
        if direct is not None:
            return direct
        codes = self.emit.at(self.codes, number * QUADS * ROW_BYTES)
        for row, (unit, index) in enumerate(tile.rows):
            self.emit.store(arranged(self.emit, unit, unpacker)[index], codes, row * ROW_BYTES)
        return codes, ROW_BYTES

    def _stored_as_used(self, tile: Tile) -> bool:
        packing = self.spec.layout.packing
        plain = packing.bits == 8 and packing.lower is None and not self.form.flip
        return plain and all(unit.kind == "direct" for unit, _ in tile.rows)

    def _call(self, name: str, *arguments: Value | int) -> None:
        tile_instruction(self.emit, name, *arguments)


def configure(emit: Emitter, rows: Sequence[int], row_bytes: Sequence[int]) -> None:
    """Give the tile registers their shapes, at a function's entry.

    Parameters
    ----------
    emit : Emitter
    rows, row_bytes : sequences of up to 16 int
        Rows of each register and bytes of a row.
    """
    count = len(rows)
    widths = [*row_bytes, *[0] * (16 - count)]
    # Palette 1; bytes 16 … 47 are the bytes of a row, 48 … 63 the rows of each.
    pairs = (byte for width in widths for byte in (width & 255, width >> 8))
    values = [1, *[0] * 15, *pairs, *rows, *[0] * (16 - count)]
    room = aligned_room(emit, 64)
    emit.store(emit.constant(I8, 64, values), room)
    tile_instruction(emit, "ldtilecfg", room)


def aligned_room(emit: Emitter, size: int) -> Value:
    """Memory of the function's own, at the start of a cache line."""
    room = emit.builder.alloca(ir.ArrayType(I8, size))
    room.align = ROW_BYTES
    return emit.builder.bitcast(room, BYTES)


def tile_instruction(emit: Emitter, name: str, *arguments: Value | int) -> None:
    """An AMX instruction: tile registers are immediates, strides 64-bit numbers."""
    loads_or_stores = name in ("tileloadd64", "tilestored64")
    values = [
        argument
        if not isinstance(argument, int)
        else ir.Constant(I64 if loads_or_stores and position == 2 else I8, argument)
        for position, argument in enumerate(arguments)
    ]
    function = emit.intrinsic(f"llvm.x86.{name}", VOID, [value.type for value in values])
    emit.builder.call(function, values)


def sums_of(emit: Emitter, sums: Value, row: Value | int) -> Value:
    """A row's 16 sums."""
    offset = row * ROW_BYTES if isinstance(row, int) else emit.mul(row, ROW_BYTES)
    return emit.load(sums, ir.VectorType(I32, emit.isa.lanes), offset)

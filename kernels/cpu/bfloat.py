"""Values weighted by the matrix unit in bfloat16: the tile function of `lowbit.kernels.cpu.values` for many rows.

One instruction adds to a tile of float32 sums, 16 rows × 16 channels, the product of a tile of weights, 16 rows × 32
tokens, with a tile of codes, 16 pairs of tokens × 16 channels. Codes are exact in bfloat16, so a value's scale goes
into its weight alone, which is rounded to 8 significant bits with no maximum to be found first. Sums of a group of
channels stay in the unit for all tokens of a call; they are read from ``out`` before and written to it after.

A code becomes a bfloat16 by way of fp16, whose conversion from 16-bit integers is one instruction for 32 codes. Moving
its exponent into the place of the wider one divides by 2^112, which the weights make up for.
"""

from __future__ import annotations

from dataclasses import replace

from llvmlite import ir

from .mapping import TOKENS, Infeasible, Region
from .matrix import MOST_ROWS, QUADS, ROW_BYTES, Tile, aligned_room, configure, tile_instruction, tiles
from .multiply import Unpacker, arranged, integer_form
from .share import Share
from .spec import MOST_VECTOR_ROWS, TileSpec
from .vector import F32, HALF, I16, Emitter, Value

MOST_UNIT_ROWS = 2 * MOST_ROWS
"""Rows of one call: two tiles of weights share the converted codes."""

CHANNELS = 16
"""Channels of a tile of codes."""

CODE_TILES = 2
"""Tiles of codes that share a tile of weights: those of a group of 32 channels."""

TILE_BYTES = MOST_ROWS * ROW_BYTES
CODE_SCALE = 2.0**-104
"""What a code is multiplied by: 2^8 at the top of its 16 bits, and 2^-112 by its exponent's new place."""

_SUMS = ((0, 1), (2, 3))  # tile registers by rows and channels
_WEIGHTS, _CODES = (4, 5), (6, 7)


def check_unit(spec: TileSpec) -> None:
    """Raise `Infeasible` if values of ``spec`` cannot be weighted by the unit."""
    if not spec.isa.matrix:
        raise Infeasible(f"{spec.isa.name} has no matrix unit")
    if not MOST_VECTOR_ROWS < spec.rows <= MOST_UNIT_ROWS:
        raise Infeasible(f"bfloat takes {MOST_VECTOR_ROWS + 1} to {MOST_UNIT_ROWS} rows")
    if not spec.groups:
        raise Infeasible("bfloat wants codes")
    for region in (spec.plan.main, spec.plan.tail):
        if region is not None:
            _tiles(region)


def _tiles(region: Region) -> list[Tile]:
    """The tiles of codes of a region, by their channels."""
    found = tiles(region, "v")
    channels = sorted(key[0] for key in found)
    runs = [tuple(range(start, start + CHANNELS)) for start in range(0, region.outputs, CHANNELS)]
    if channels != runs or len(runs) > CODE_TILES or any(len(tile.rows) != QUADS for tile in found.values()):
        raise Infeasible("bfloat wants one or two tiles of 32 tokens × 16 channels")
    return [found[key] for key in sorted(found)]


class WeightedByUnit:
    """Builds the function.

    Parameters
    ----------
    emit : Emitter
        At the function's entry.
    spec : TileSpec
    """

    def __init__(self, emit: Emitter, spec: TileSpec):
        check_unit(spec)
        self.emit, self.spec, self.plan = emit, spec, spec.plan
        self.form = integer_form(spec.layout.packing, "v", spec.isa, matrix=True)
        self.row_tiles = [range(start, min(start + MOST_ROWS, spec.rows)) for start in range(0, spec.rows, MOST_ROWS)]

    def build(self) -> None:
        emit, spec, plan = self.emit, self.spec, self.plan
        words, scales, first, count, self.p, self.stride, _, self.out, self.out_stride = emit.builder.function.args
        self._configure()
        self.room_bytes = 2 * TILE_BYTES + spec.rows * ROW_BYTES
        self.rooms = aligned_room(emit, 2 * self.room_bytes)
        self.step_bytes = TOKENS // plan.tile * plan.pitch_bytes
        self.words = emit.at(words, emit.mul(emit.div(first, TOKENS), self.step_bytes))
        self.scales = emit.at(scales, emit.mul(first, 2 * spec.groups))
        self.steps = emit.div(count, TOKENS)
        self.row_bytes = emit.mul(self.out_stride, 4)
        with emit.builder.if_then(emit.builder.icmp_signed(">", self.steps, emit.i64(0))):
            if plan.main is not None and plan.trips:
                loop = emit.begin(emit.opaque(plan.trips))
                self._channels(plan.main, loop.index)
                emit.end(loop)
            if plan.tail is not None:
                self._channels(plan.tail, emit.i64(plan.trips))
        tile_instruction(emit, "tilerelease")
        emit.builder.ret_void()

    def _configure(self) -> None:
        rows = [MOST_ROWS] * 8
        for number, own in enumerate(self.row_tiles):
            for register in (*_SUMS[number], _WEIGHTS[number]):
                rows[register] = len(own)
        configure(self.emit, rows, [ROW_BYTES] * 8)

    def _channels(self, region: Region, trip: Value) -> None:
        """Add the ``trip``-th block of channels of all tokens to ``out``."""
        emit, plan = self.emit, self.plan
        width = plan.main.outputs if plan.main is not None else region.outputs
        channel = emit.mul(trip, width)
        group = emit.div(channel, TOKENS)
        found = _tiles(region)
        self._sums(len(found), channel, "tileloadd64")
        words = emit.at(self.words, emit.mul(trip, plan.channel_step_bytes))

        def prepare(step: Value, room: Value) -> None:
            lines = self._lines_ahead(region, emit.plus(emit.builder.mul(trip, self.steps), step), group, step)
            self._convert(region, found, emit.at(words, emit.mul(step, self.step_bytes)), room)
            self._weigh(region, group, step, emit.at(room, 2 * TILE_BYTES), lines)

        # The unit reads what was stored a step ago: of what was stored just now it would have to wait for each line.
        prepare(emit.i64(0), self._room(emit.i64(0)))
        loop = emit.begin(emit.builder.sub(self.steps, emit.i64(1)), share=Share(TOKENS * region.outputs))
        following = emit.plus(loop.index, emit.i64(1))
        prepare(following, self._room(following))
        self._contract(len(found), self._room(loop.index))
        emit.end(loop)
        self._contract(len(found), self._room(emit.builder.sub(self.steps, emit.i64(1))))
        self._sums(len(found), channel, "tilestored64")

    def _room(self, step: Value) -> Value:
        """Where the codes and weights of a step are: in one of two places in turn."""
        emit = self.emit
        return emit.at(self.rooms, emit.mul(emit.builder.and_(step, emit.i64(1)), self.room_bytes))

    def _contract(self, count: int, room: Value) -> None:
        """Add the products of the ``count`` tiles of codes and the weights in ``room``."""
        emit = self.emit
        for number in range(count):
            tile_instruction(emit, "tileloadd64", _CODES[number], emit.at(room, number * TILE_BYTES), ROW_BYTES)
        for number, rows in enumerate(self.row_tiles):
            place = emit.at(room, 2 * TILE_BYTES + rows[0] * ROW_BYTES)
            tile_instruction(emit, "tileloadd64", _WEIGHTS[number], place, ROW_BYTES)
            for sums, codes in zip(_SUMS[number][:count], _CODES, strict=False):
                tile_instruction(emit, "tdpbf16ps", sums, _WEIGHTS[number], codes)

    def _sums(self, count: int, channel: Value, instruction: str) -> None:
        """Move the sums of ``count`` tiles of channels from or to ``out``."""
        emit = self.emit
        for number, rows in enumerate(self.row_tiles):
            row = emit.at(self.out, emit.mul(self.row_bytes, rows[0]))
            for tile in range(count):
                place = emit.at(row, emit.plus(emit.mul(channel, 4), emit.i64(ROW_BYTES * tile)))
                tile_instruction(emit, instruction, _SUMS[number][tile], place, self.row_bytes)

    def _lines_ahead(self, region: Region, iteration: Value, group: Value, step: Value) -> list[tuple[Value, int]]:
        """An iteration's share of the lines that follow the call's tokens, in the order in which they are stored.

        Channels outermost, a call meets its tokens in another order than memory holds them: lines a fixed distance
        ahead of it would come too late or never be used.
        """
        emit, spec = self.emit, self.spec
        if not spec.prefetch:
            return []
        share = TOKENS * region.outputs * spec.layout.packing.bits // 8
        following = emit.at(self.words, emit.mul(self.steps, self.step_bytes))
        here = emit.at(following, emit.mul(iteration, share))
        block = emit.mul(emit.plus(self.steps, step), spec.groups)
        scales = emit.at(self.scales, emit.mul(emit.plus(block, group), 2 * TOKENS))
        return [(scales, 0), *((here, offset) for offset in range(0, share, ROW_BYTES))]

    def _convert(self, region: Region, found: list[Tile], base: Value, room: Value) -> None:
        """Codes of 32 tokens as tiles of bfloat16, times `CODE_SCALE`: a row is a pair of tokens."""
        emit = self.emit
        unpacker = Unpacker(emit, replace(self.spec, prefetch=0), base, region)
        for number, tile in enumerate(found):
            for row, (unit, index) in enumerate(tile.rows):
                quads = arranged(emit, unit, unpacker)[index]
                for half, pairs in enumerate(self._pairs(quads)):
                    emit.store(pairs, room, number * TILE_BYTES + (2 * row + half) * ROW_BYTES)

    def _pairs(self, quads: Value) -> tuple[Value, Value]:
        """Four tokens' codes in each lane as bfloat16: the first two, and the last two."""
        emit = self.emit
        width = quads.type.count
        words = ir.VectorType(I16, width // 2)
        crossed = emit.shuffle(quads, [lane + byte for lane in range(0, width, 4) for byte in (0, 2, 1, 3)])
        crossed = emit.builder.bitcast(crossed, words)
        first = emit.builder.shl(crossed, emit.constant(I16, words.count, 8))
        last = emit.builder.and_(crossed, emit.constant(I16, words.count, 0xFF00))
        return self._bfloat(first), self._bfloat(last)

    def _bfloat(self, words: Value) -> Value:
        """Integers, up to 8 significant bits of 16, as bfloat16 divided by 2^112."""
        emit = self.emit
        count = words.type.count
        half = emit.builder.bitcast(emit.builder.sitofp(words, ir.VectorType(HALF, count)), words.type)
        # The shift copies the sign into the three bits that the wider exponent has above.
        return emit.builder.and_(
            emit.builder.ashr(half, emit.constant(I16, count, 3)), emit.constant(I16, count, 0x8FFF)
        )

    def _weigh(self, region: Region, group: Value, step: Value, room: Value, lines: list[tuple[Value, int]]) -> None:
        """Each row's products of probability and scale of 32 tokens, as bfloat16; ``lines`` are fetched in between."""
        emit, spec = self.emit, self.spec
        lanes = emit.isa.lanes
        halves = emit.at(self.scales, emit.mul(emit.plus(emit.mul(step, spec.groups), group), 2 * TOKENS))
        factor = emit.constant(F32, lanes, 1 / (CODE_SCALE * self.form.multiple))
        scales = [
            emit.builder.fmul(emit.widen_half(emit.load(halves, ir.VectorType(HALF, lanes), 2 * part)), factor)
            for part in range(0, TOKENS, lanes)
        ]
        p = emit.at(self.p, emit.mul(step, 4 * TOKENS))
        rounded = ir.VectorType(I16, 2 * lanes)
        vector = ir.VectorType(F32, lanes)
        convert = emit.intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", rounded, [vector, vector])
        for row in range(spec.rows):
            base = emit.at(p, emit.mul(self.stride, 4 * row))
            low, high = (
                emit.builder.fmul(emit.load(base, vector, 4 * lanes * part), scale) for part, scale in enumerate(scales)
            )
            whole = emit.builder.call(convert, [high, low])
            emit.store(emit.shuffle(whole, region.order), room, row * ROW_BYTES)
            for base, offset in lines[len(lines) * row // spec.rows : len(lines) * (row + 1) // spec.rows]:
                emit.prefetch(base, offset)

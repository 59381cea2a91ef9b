"""Weighted sums of one tile's values."""

from __future__ import annotations

from collections.abc import Sequence

from .contraction import FACTOR_BYTES, Contraction, SmallReader, Sum, factor, load, unpacked
from .mapping import TILE, Infeasible, group_of, lane_part
from .ops import Ops, Value


class ValueTile:
    """Weighted sums over the 32 tokens of a tile, for every channel of a lane.

    Attributes
    ----------
    group_part : pair of int
        How a lane's scale group differs from lane 0's.
    channels : list of int
        The lane's channels less o_lane · ``channel_part``.
    """

    def __init__(self, contraction: Contraction, loads: int) -> None:
        self.contraction = c = contraction
        tiling = c.tiling
        self.loads = loads
        lanes = tiling.lanes_o if tiling.iters_o > 1 else tiling.last_o
        first = [tiling.output(0, o_lane)[0] for o_lane in range(lanes)]
        self.channel_part = lane_part(first, "a lane's channel")
        self.first_channel = first[0]
        self.channels = [channel - first[0] for i in range(tiling.iters_o) for channel in tiling.output(i, 0)]
        self.group_part = self._group_part()
        self.groups = [group_of(first[0] + channel) if c.scaled else 0 for channel in self.channels]
        factor_, shift = self.group_part
        if tiling.iters_o > 1 and max(self.groups) + ((tiling.lanes_o - 1) * factor_ >> shift) >= c.groups:
            raise Infeasible(f"{c.packing.name}: lanes without a vector have no scale group to read")

    def _group_part(self) -> tuple[int, int]:
        """The one that fits all lanes that have a vector, for each of the lane's channels."""
        c, tiling = self.contraction, self.contraction.tiling
        if not c.scaled:
            return 0, 0
        known: list[tuple[list[int], int]] = []
        for i in range(tiling.iters_o):
            lanes = tiling.last_o if i == tiling.iters_o - 1 else tiling.lanes_o
            outputs = [tiling.output(i, o_lane) for o_lane in range(lanes)]
            known += [([group_of(each[place]) for each in outputs], lanes) for place in range(len(outputs[0]))]
        part = lane_part(max(known, key=lambda each: each[1])[0], "a lane's scale group")
        for groups, lanes in known:
            if any(groups[lane] - groups[0] != (lane * part[0] >> part[1]) for lane in range(lanes)):
                raise Infeasible(f"{c.packing.name}: lanes differ in their scale groups in several ways")
        return part

    @property
    def outputs(self) -> int:
        return len(self.channels)

    def body(
        self,
        ops: Ops,
        sums: Sequence[Value],
        data: Sequence[Value],
        small: Value,
        factors: Value,
        staged: bool,
        stream: bool,
    ) -> tuple[Value, ...]:
        """Add a tile's weighted values to ``sums``, [row][channel of the lane].

        Parameters
        ----------
        data : pair of Value
            The lane's place in the tile, and the same for the last of its vectors across the channels, which some
            lanes do not have: global addresses, or bytes of shared memory.
        small, factors : Value
            Bytes of shared memory: the lane's place among weights [row][group][slot], and in their factors.
        """
        c = self.contraction
        tiling = c.tiling
        found = list(sums)
        totals: dict[tuple[int, int], Sum] = {}
        reader = SmallReader(ops, c, small, TILE * c.slot_bytes)
        bundles, last = tiling.iters_r // c.bundle, tiling.iters_o - 1
        ahead = max(self.loads // (tiling.iters_o * c.bundle), 1)
        each = len(tiling.vectors.outputs_each)
        for start in range(0, bundles, ahead):
            some = range(start, min(start + ahead, bundles))
            loaded = {
                (i, q): [
                    load(ops, data[i == last], int(tiling.offsets[i, q * c.bundle + v]), c.words, staged, stream)
                    for v in range(c.bundle)
                ]
                for q in some
                for i in range(tiling.iters_o)
            }
            for q in some:
                for i in range(tiling.iters_o):
                    bundle = unpacked(ops, c, loaded[i, q])
                    for group in dict.fromkeys(self.groups[i * each : (i + 1) * each]):
                        for row in range(c.rows):
                            words = reader.words((row * c.groups + group) * TILE * c.slot_bytes, q)
                            for output, slot, value in bundle:
                                channel = i * each + output
                                if self.groups[channel] == group:
                                    total = totals.setdefault((row, channel), Sum())
                                    value.accumulate(ops, words, slot, total)
        for (row, channel), total in totals.items():
            place = row * self.outputs + channel
            if not c.integer:
                found[place] = ops.fadd(found[place], total.floating)
                continue
            step, correction = factor(ops, factors, (row * c.groups + self.groups[channel]) * FACTOR_BYTES)
            found[place] = ops.ffma(total.as_float(ops, c.scale), step, found[place])
            if c.offset:
                found[place] = ops.fadd(found[place], correction)
        return tuple(found)

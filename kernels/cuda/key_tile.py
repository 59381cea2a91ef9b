"""Dot products of one tile's keys with rows of queries, in steps along the channels."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from ..problem import GROUP
from .contraction import FACTOR_BYTES, SCALE_BYTES, Contraction, SmallReader, Sum, factor, load, unpacked
from .mapping import TILE, Infeasible, lane_part
from .ops import Ops, Value


class KeyTile:
    """Dot products of a tile, in steps of ``vectors`` vectors along the channels, for every token of a lane.

    Parameters
    ----------
    contraction : Contraction
    loads : int
        Vectors that a lane should have in flight.

    Attributes
    ----------
    count : int
        Steps of a tile.
    data_bytes, group_step : int
        From one step to the next: bytes of the packed operand, scale groups.
    slots : int
        Of one row of the small operand in one step; the small operand is stored [step][row][slot].
    slot_of_channel : list of int
        Slot of each channel of a step, whose channels are a run.
    row_bytes : int
        Of one row of one step, a multiple of 16.
    group_part, token_part : pair of int
        How a lane's scale group, and its first token, differ from lane 0's; see `mapping.lane_part`.
    """

    def __init__(self, contraction: Contraction, loads: int) -> None:
        self.contraction = c = contraction
        tiling = c.tiling
        self._groups = self._group_table()
        self.vectors = self._step_vectors(loads)
        self.count = tiling.iters_r // self.vectors
        offsets = tiling.offsets
        last = (self.count - 1) * self.vectors
        self.data_bytes = int(offsets[0, self.vectors] - offsets[0, 0]) if self.count > 1 else 0
        self.group_step = self._groups[self.vectors // c.bundle][0] - self._groups[0][0] if self.count > 1 else 0
        self.slots = c.small_offset(self.vectors // c.bundle) // c.slot_bytes
        self.row_bytes = -(-self.slots * c.slot_bytes // 16) * 16
        self.slot_of_channel = self._slot_table()
        for step in range(self.count):
            first = step * self.vectors
            regular = offsets[:, first : first + self.vectors] == offsets[:, : self.vectors] + step * self.data_bytes
            bundles = range(self.vectors // c.bundle)
            groups = all(
                self._groups[first // c.bundle + q][k] == self._groups[q][k] + step * self.group_step
                for q in bundles
                for k in range(len(self._groups[q]))
            )
            if not regular.all() or not groups:
                raise Infeasible(f"{c.packing.name}: steps along the channels differ, the last at vector {last}")
        first_tokens = [tiling.output(0, o_lane)[0] for o_lane in range(tiling.lanes_o)]
        self.token_part = lane_part(first_tokens, "a lane's token")
        self.tokens = [token - first_tokens[0] for i in range(tiling.iters_o) for token in tiling.output(i, 0)]

    def _group_table(self) -> list[list[int]]:
        """Scale group of each small word of each bundle, for r_lane 0."""
        c = self.contraction
        size = 4 if c.integer else 1
        words = c.bundle_bytes // c.slot_bytes // size
        order = np.array(c.order).reshape(-1, c.tiling.lanes_r, words, size)
        groups = order // GROUP if c.scaled else np.zeros_like(order)
        if (groups != groups[..., :1]).any():
            raise Infeasible(f"{c.packing.name}: four codes of a word have different scales")
        by_lane = groups[..., 0].swapaxes(1, 2)  # bundle, word, lane
        deltas = np.unique((by_lane - by_lane[..., :1]).reshape(-1, c.tiling.lanes_r), axis=0)
        parts = {lane_part(delta, "a lane's scale group") for delta in deltas}
        if len(parts) > 1:
            raise Infeasible(f"{c.packing.name}: lanes differ in their scale groups in several ways")
        self.group_part = parts.pop()
        table: list[list[int]] = by_lane[..., 0].tolist()
        return table

    def _slot_table(self) -> list[int]:
        order = np.array(self.contraction.order).reshape(self.count, self.slots)
        if (order != order[0] + self.slots * np.arange(self.count)[:, None]).any():
            raise Infeasible(f"{self.contraction.packing.name}: the channels of a step are no run")
        return [int(slot) for slot in np.argsort(order[0])]

    @property
    def step_bytes(self) -> int:
        """Of the small operand's rows in one step."""
        return self.contraction.rows * self.row_bytes

    @property
    def step_factors(self) -> int:
        """Bytes of factors of one step, which are stored [group][row]."""
        return self.group_step * self.contraction.rows * FACTOR_BYTES

    def steps_of_split(self, splits: int) -> int:
        """Steps of the longest of ``splits`` ranges of steps."""
        return -(-self.count // splits)

    def _step_vectors(self, loads: int) -> int:
        """The longest step of about ``loads`` vectors that holds whole bundles, and whole groups unless it is all."""
        c = self.contraction
        total, outputs = c.tiling.iters_r, c.tiling.iters_o
        per_group = max(GROUP // (c.tiling.lanes_r * len(c.tiling.vectors.reduced_each)), 1) if c.scaled else 1
        fits = [n for n in range(1, total + 1) if total % n == 0 and n % c.bundle == 0 and n % per_group == 0]
        small = [n for n in fits if n * outputs <= max(loads, per_group, c.bundle)]
        return max(small) if small else min(fits, default=total)

    @property
    def loads(self) -> int:
        """Vectors of a lane that one step loads."""
        return self.vectors * self.contraction.tiling.iters_o

    @property
    def groups_of_step(self) -> tuple[int, ...]:
        """Scale groups that one lane meets in one step."""
        bundles = self.vectors // self.contraction.bundle
        return tuple(sorted({group for q in range(bundles) for group in self._groups[q]}))

    @functools.cached_property
    def shares(self) -> list[int]:
        """How many (lane, step, word-run) sums of one token each scale group is spread over, by group."""
        c = self.contraction
        lanes = c.tiling.lanes_r
        shares = [0] * c.groups
        for step in range(self.count):
            keys = {self._groups[q][k] for q in range(self.vectors // c.bundle) for k in range(len(self._groups[q]))}
            for r_lane in range(lanes):
                part = r_lane * self.group_part[0] >> self.group_part[1]
                for key in keys:
                    shares[key + part + step * self.group_step] += 1
        return shares

    def _loaded(self, ops: Ops, data: Value, staged: bool, stream: bool) -> list[list[list[Value]]]:
        """Words of [i][vector], from a 64-bit global address or from a byte of shared memory."""
        tiling = self.contraction.tiling
        return [
            [
                load(ops, data, int(tiling.offsets[i, j]), self.contraction.words, staged, stream)
                for j in range(self.vectors)
            ]
            for i in range(tiling.iters_o)
        ]

    def body(
        self,
        ops: Ops,
        sums: Sequence[Value],
        data: Value,
        scales: Value,
        small: Value,
        factors: Value,
        staged: bool,
        stream: bool,
    ) -> tuple[Value, ...]:
        """Add one step's products to ``sums``, [row][token of the lane].

        Parameters
        ----------
        data, scales : Value
            The lane's place in the step's vectors and in its first scale: global addresses, or bytes of shared memory.
        small, factors : Value
            Bytes of shared memory: the lane's place in a row of the small operand, and in its factors.
        """
        c = self.contraction
        loaded = self._loaded(ops, data, staged, stream)
        keys = self.groups_of_step
        scale = self._scales(ops, scales, keys, staged) if c.scaled else {}
        totals: dict[tuple[int, int, int], Sum] = {}
        reader = SmallReader(ops, c, small, self.row_bytes)
        for q in range(self.vectors // c.bundle):
            bundles = [
                unpacked(ops, c, [loaded[i][q * c.bundle + v] for v in range(c.bundle)]) for i in range(len(loaded))
            ]
            for row in range(c.rows):
                words = reader.words(row * self.row_bytes, q)
                for i, bundle in enumerate(bundles):
                    for output, slot, value in bundle:
                        token = i * len(c.tiling.vectors.outputs_each) + output
                        key = row, token, self._groups[q][slot]
                        value.accumulate(ops, words, slot, totals.setdefault(key, Sum()))
        found = list(sums)
        tokens = len(self.tokens)
        for (row, token, group), total in totals.items():
            place = row * tokens + token
            if not c.integer:
                value = total.floating
                found[place] = (
                    ops.ffma(value, scale[group, token], found[place]) if c.scaled else ops.fadd(value, found[place])
                )
                continue
            multiplier, correction = factor(ops, factors, (group * c.rows + row) * FACTOR_BYTES)
            exact = (
                ops.ffma(total.as_float(ops, c.scale), multiplier, correction)
                if c.unpacking and c.unpacking.offset
                else (ops.fmul(total.as_float(ops, c.scale), multiplier))
            )
            found[place] = ops.ffma(exact, scale[group, token], found[place])
        return tuple(found)

    def _scales(self, ops: Ops, scales: Value, keys: Sequence[int], staged: bool) -> dict[tuple[int, int], Value]:
        found = {}
        for group in keys:
            for token, offset in enumerate(self.tokens):
                place = (group * TILE + offset) * SCALE_BYTES
                found[group, token] = (
                    ops.load_shared_half(scales, place) if staged else ops.load_global_half(scales, place)
                )
        return found

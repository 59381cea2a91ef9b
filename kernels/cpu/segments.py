"""Tile functions for one pair of layouts of a cache, as a segment's fields name them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .. import segment_fields as fields
from ..candidate import Candidate
from ..packed import OPERAND_FIELDS, PackedTensor
from ..problem import Problem
from .activations import in_place
from .backend import prepare_address, tile_address
from .isa import Isa
from .keys import preparation
from .space import tile_specs
from .values import scratch_bytes


@dataclass(frozen=True)
class SegmentKernel:
    """Compiled tiles of a candidate, and what their callers have to know.

    Attributes
    ----------
    k_tile, v_tile, prepare : int
        Addresses; ``prepare`` is 0 where queries lie as the tile reads them.
    slots, aux : int
        Slots of a prepared row, and groups of its lanes.
    element : int
        Bytes of a slot.
    step, block : int
        Rows and tokens of a block of scores.
    scratch : int
        Bytes that the values' tile asks for.
    """

    k_tile: int
    v_tile: int
    prepare: int
    slots: int
    aux: int
    element: int
    step: int
    block: int
    scratch: int

    def describe(self, row: NDArray[np.int64], k: PackedTensor, v: PackedTensor, start: int, tokens: int) -> None:
        """Write a segment's fields.

        Parameters
        ----------
        row : ndarray of int64, shape (SEGMENT_FIELDS,)
        k, v : PackedTensor
        start, tokens : int
            Position of the first token, and how many are to be seen.
        """
        row[fields.K : fields.K + OPERAND_FIELDS] = (*k.addresses, self.k_tile)
        row[fields.V : fields.V + OPERAND_FIELDS] = (*v.addresses, self.v_tile)
        row[fields.K + fields.TOKENS] = row[fields.V + fields.TOKENS] = tokens
        row[fields.START], row[fields.PREPARE] = start, self.prepare
        row[fields.ORDER_COUNT], row[fields.AUX_COUNT], row[fields.ELEMENT] = self.slots, self.aux, self.element
        row[fields.STEP], row[fields.BLOCK] = self.step, self.block


@functools.lru_cache(256)
def segment_kernel(problem: Problem, candidate: Candidate, isa: Isa) -> SegmentKernel:
    """Compile the tiles of ``candidate``.

    Raises
    ------
    Infeasible
        If a layout does not fit the instruction set; `lowbit.kernels.cpu.space.rejection` tells why beforehand.
    """
    k, v = (spec.canonical for spec in tile_specs(problem, candidate, isa))
    tables, schedule = preparation(k), candidate.schedule
    return SegmentKernel(
        k_tile=tile_address(k),
        v_tile=tile_address(v),
        prepare=0 if in_place(k, tables) else prepare_address(k),
        slots=len(tables.order),
        aux=len(tables.aux_group),
        element=1 if k.integer else 4,
        step=schedule.rows,
        block=schedule.block,
        scratch=scratch_bytes(v),
    )

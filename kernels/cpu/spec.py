"""What one tile function is specialised to."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from ..layout import Layout
from ..packing import Packing, packings
from ..problem import GROUP
from .isa import Isa
from .machine import triple_of
from .mapping import TOKENS, Infeasible
from .plan import Plan, plan

MOST_VECTOR_ROWS = 8
"""Rows of the small operand up to which vectors contract, even where there is a matrix unit."""


@dataclass(frozen=True)
class TileSpec:
    """Everything that the code of a tile function depends on.

    Parameters
    ----------
    role : str
        ``k``: dot a tile of keys with rows of queries. ``v``: accumulate a tile of values under rows of probabilities.
    layout : Layout
    head_dim : int
    isa : Isa
    pipeline : str
        ``integer``, ``float``, or for values ``bfloat``.
    rows : int
        Rows of the small operand in one call.
    registers : int
        Accumulator registers per row wanted in the hot loop.
    prefetch : int
        Cache lines ahead; 0 emits no prefetch.
    """

    role: str
    layout: Layout
    head_dim: int
    isa: Isa
    pipeline: str
    rows: int
    registers: int
    prefetch: int

    @property
    def integer(self) -> bool:
        """Whether codes are unpacked into 32-bit lanes of four, as dots of integers want them."""
        return self.pipeline != "float"

    @property
    def bfloat(self) -> bool:
        """Whether the matrix unit contracts floats of 16 bits; see `lowbit.kernels.cpu.bfloat`."""
        return self.pipeline == "bfloat"

    @property
    def matrix(self) -> bool:
        """Whether the matrix unit contracts: for more rows than vectors of four-way dots serve well."""
        return self.isa.matrix and self.integer and self.rows > MOST_VECTOR_ROWS

    @property
    def groups(self) -> int:
        """Scales of a token; 0 for fp16."""
        return 0 if self.layout.packing.format == "fp16" else -(-self.head_dim // GROUP)

    @property
    def plan(self) -> Plan:
        """The loop plan; raises `Infeasible` with the reason if there is none."""
        return _plan(
            self.layout, self.head_dim, self.chunk_bytes, self.role, self.integer, self.registers, self.isa.lanes
        )

    @property
    def chunk_bytes(self) -> int:
        """Bytes of words loaded at once: a register, or half of one where codes widen to four or eight registers."""
        if self.integer or self.layout.packing.bits == 16:
            return self.isa.vector_bytes
        return max(self.isa.vector_bytes // 2, 16)

    @property
    def prefetched_scale_blocks(self) -> int:
        """Blocks of 32 tokens that scales are prefetched ahead: no less than words are, and a whole one at least."""
        words = TOKENS // self.plan.tile * self.plan.pitch_bytes
        return 1 + -(-64 * self.prefetch // words) if self.prefetch and self.groups else 0

    @property
    def canonical(self) -> TileSpec:
        """The spec with the accumulators it really gets, so that equal code is compiled once."""
        return replace(self, registers=len(self.plan.any.lanes))

    @property
    def symbol(self) -> str:
        """The function's name, which no other code has, on whatever machine it is generated."""
        schedule = f"{self.pipeline} {self.rows} {self.registers} {self.prefetch}"
        target = f"{self.isa.name} {triple_of(self.isa)}"
        text = f"{self.layout.name} {_unpacking(self.layout.packing)} {self.head_dim} {target} {schedule}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return f"lowbit_{'dot' if self.role == 'k' else 'accumulate'}_tile_{digest}"


@functools.lru_cache(256)
def _unpacking(packing: Packing) -> str:
    """Digest of what a packing's name leaves open: where codes lie, and the module of instructions of its own."""
    places = np.asarray(packing.place(np.arange(packing.block_codes)), np.int64)
    digest = hashlib.sha256(places.tobytes())
    if packing.lower is not None:
        # Without a source, as in an interactive session, the name has to do.
        with suppress(OSError, TypeError):
            digest.update(inspect.getsource(sys.modules[packing.lower.__module__]).encode())
    return f"{packing.in_order} {digest.hexdigest()}"


def _plan(
    layout: Layout, head_dim: int, chunk_bytes: int, role: str, integer: bool, registers: int, lanes: int
) -> Plan:
    found = _planned(_as_placed(layout), head_dim, chunk_bytes, role, integer, registers, lanes)
    if isinstance(found, str):
        raise Infeasible(found)
    return found


@functools.lru_cache(4096)
def _as_placed(layout: Layout) -> Layout:
    """One layout for all codings that place codes alike: a plan depends on nothing else."""
    packing = layout.packing
    for twin in packings(packing.format):
        if (twin.arrangement, twin.place, twin.block_codes, twin.in_order) == (
            packing.arrangement,
            packing.place,
            packing.block_codes,
            packing.in_order,
        ):
            return layout.with_packing(twin)
    return layout


@functools.lru_cache(8192)
def _planned(
    layout: Layout, head_dim: int, chunk_bytes: int, role: str, integer: bool, registers: int, lanes: int
) -> Plan | str:
    """The plan, or why there is none."""
    try:
        return plan(layout, head_dim, chunk_bytes, role, integer, registers, lanes)
    except Infeasible as error:
        return str(error)

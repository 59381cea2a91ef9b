"""What one tile function is specialised to."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace

from ..layout import Layout
from ..problem import GROUP
from .isa import Isa
from .mapping import Plan, plan


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
        ``integer`` or ``float``.
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
        return self.pipeline == "integer"

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
    def canonical(self) -> TileSpec:
        """The spec with the accumulators it really gets, so that equal code is compiled once."""
        return replace(self, registers=len(self.plan.any.lanes))

    @property
    def symbol(self) -> str:
        schedule = f"{self.pipeline} {self.rows} {self.registers} {self.prefetch}"
        text = f"{self.layout.name} {self.head_dim} {self.isa.name} {schedule}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        return f"lowbit_{'dot' if self.role == 'k' else 'accumulate'}_tile_{digest}"


_plan = functools.lru_cache(8192)(plan)

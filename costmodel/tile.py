"""What counting one tile function's code yields, for whatever calls it later.

Generating and counting code is the slow part of a prediction and depends on the tile function alone. Heads, context
lengths, blocks and threads are arithmetic on top, so counts are kept by the function's symbol and serve every problem
that uses it.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ..kernels.backend import Code
from ..kernels.cpu.share import Share
from .unpack import analysed

Counts = dict[str, int]

SOURCES = ("assembly.py", "loops.py", "reachability.py", "tile.py", "unpack.py")
"""Everything here that counting depends on."""


@dataclass(frozen=True)
class TileCounts:
    """Instructions of one tile function.

    Attributes
    ----------
    symbol : str
        The function's name, unique to its code.
    role : str
        ``k`` or ``v``: the packed operand that it reads.
    rows : int
        Rows of the small operand that one call serves.
    packing : str
        Name of the packing that it unpacks.
    values_per_iteration : int
        Values of the packed operand that one iteration of the hot loop consumes.
    unpacking : dict of str to int
        Unpacking instructions of one iteration, by mnemonic.
    parts : tuple of (Share or None, dict of str to int)
        Instructions by class of every part that runs equally often; see `lowbit.costmodel.unpack.HotLoop`.
    """

    symbol: str
    role: str
    rows: int
    packing: str
    values_per_iteration: int
    unpacking: Counts
    parts: tuple[tuple[Share | None, Counts], ...]

    @property
    def unpack_ops_per_32(self) -> float:
        """Unpacking instructions of the hot loop for each 32 values of the packed operand."""
        return sum(self.unpacking.values()) * 32 / self.values_per_iteration

    def executed(self, values: float, channels: int, block: int) -> dict[str, float]:
        """Instructions that all calls together execute, by class; classes without any may be absent.

        Parameters
        ----------
        values : float
            Values of the packed operand that the calls walk.
        channels : int
            Head dimension.
        block : int
            Tokens of one call.
        """
        total: dict[str, float] = {}
        for share, counts in self.parts:
            times = (share or Share(channels, per_block=True)).iterations(values, block)
            for kind, count in counts.items():
                total[kind] = total.get(kind, 0.0) + count * times
        return total

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` is the inverse."""
        parts = [{"share": None if share is None else asdict(share), "counts": counts} for share, counts in self.parts]
        return {**vars(self), "parts": parts, "counter": counter()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self | None:
        """None if another release made ``values`` and may have counted otherwise: the code has to be counted anew."""
        if values.get("counter") != counter():
            return None
        shares = (part["share"] for part in values["parts"])
        counts = (part["counts"] for part in values["parts"])
        parts = zip((share and Share(**share) for share in shares), counts, strict=True)
        rest = {name: value for name, value in values.items() if name not in ("parts", "counter")}
        return cls(**rest, parts=tuple(parts))


def count(code: Code) -> TileCounts:
    """Count a tile function.

    Raises
    ------
    CompileError
        If the assembly lacks the symbol, its control flow is irreducible, or it reads nothing through its first
        argument, which has to be the pointer to the packed words.
    """
    found = analysed(code.assembly, code.symbol)
    return TileCounts(
        code.symbol,
        code.role,
        code.rows,
        code.packing,
        code.values_per_iteration,
        dict(found.unpacking),
        tuple((share, dict(counts)) for share, counts in found.parts),
    )


@functools.cache
def counter() -> str:
    """Digest of the sources that count: a change makes stored counts stale, though the code they count is the same."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:12]

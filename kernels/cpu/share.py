"""How often a loop runs: what code generation knows and assembly text cannot show.

The basic blocks of a tile function are named after the share of the innermost loop around them: for how many values
of the packed operand it runs once. LLVM prints the names as comments, and the cost model multiplies what it counts in
a loop's body by its share.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(
    r"%once\.per\.(\d+)\.(values|channels)(?!\S*(preheader|crit_edge|\.ph\b))"
)  # those lie outside the loop


@dataclass(frozen=True)
class Share:
    """One iteration for each ``values`` values of the operand; times the block's tokens if ``per_block``.

    ``values`` is then the number of channels: such a loop runs once per block of tokens, however long that is.
    """

    values: int
    per_block: bool = False

    @property
    def name(self) -> str:
        """What blocks are called, followed by whatever LLVM adds to keep names apart."""
        return f"once.per.{self.values}.{'channels' if self.per_block else 'values'}."

    def iterations(self, values: float, block: int) -> float:
        """Iterations over ``values`` values of the operand, ``block`` tokens at a time."""
        return values / (self.values * (block if self.per_block else 1))


def parse_share(line: str) -> Share | None:
    """The share that the name of a block in a line of assembly states, if it does."""
    match = _NAME.search(line)
    return Share(int(match[1]), match[2] == "channels") if match else None

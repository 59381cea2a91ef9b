"""Counting generated code of either kind: a CPU's tile functions or a GPU's kernels. What is counted can be stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ..kernels.backend import Code
from ..kernels.cuda.code import KernelCode
from .tile import TileCounts
from .tile import count as count_tile

_KERNEL = "kernel"
"""The ``kind`` of a stored kernel's counts; those of a tile function have none."""


class Counts(Protocol):
    """`lowbit.costmodel.tile.TileCounts` or `lowbit.costmodel.kernel_counts.KernelCounts`."""

    @property
    def symbol(self) -> str:
        """The function's name, unique to its code."""

    @property
    def rows(self) -> int:
        """Rows of the small operand that one pass serves."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""


def count(code: Code) -> Counts:
    """Count a tile function or a kernel.

    Raises
    ------
    CompileError
        If it cannot be counted.
    """
    if isinstance(code, KernelCode):
        from .kernel_counts import count_kernel

        return count_kernel(code)
    return count_tile(code)


def stored(counts: Counts) -> dict[str, Any]:
    """Plain values for JSON that `restored` reads."""
    values = counts.as_dict()
    return values if isinstance(counts, TileCounts) else {**values, "kind": _KERNEL}


def restored(values: Mapping[str, Any]) -> Counts | None:
    """What `stored` made ``values`` of; None if another release may have counted otherwise."""
    if "kind" not in values:
        return TileCounts.from_dict(dict(values))
    from .kernel_counts import KernelCounts

    return KernelCounts.from_dict({name: value for name, value in values.items() if name != "kind"})

"""How often a launch passes each of its loops, and what its warps ask of memory: arithmetic, apart from the code."""

from __future__ import annotations

from dataclasses import dataclass

from .program import Geometry

INACTIVE = -1
"""Address of a lane that takes no part in an access."""


@dataclass(frozen=True)
class WarpAccess:
    """One memory instruction of a warp, with addresses that stand for all its executions.

    Attributes
    ----------
    name : str
        What is accessed: ``k``, ``v``, ``scales``, ``x``, ``weights``, ``partials`` or ``out``.
    space : str
        ``global`` or ``shared``.
    kind : str
        ``load``, ``store``, or ``async`` for a copy from global into shared memory.
    width_bytes : int
        Of one lane.
    addresses : tuple of int
        Of 32 lanes, from some aligned base; `INACTIVE` for a lane that sits out.
    mark : int
        The loop that it is in; see `lowbit.kernels.cuda.marks`.
    count : float
        Executions in one pass of the loop.
    """

    name: str
    space: str
    kind: str
    width_bytes: int
    addresses: tuple[int, ...]
    mark: int
    count: float


@dataclass(frozen=True)
class Work:
    """One launch of a candidate's main kernel.

    Attributes
    ----------
    geometry : Geometry
    iterations : dict of int to float
        Passes of each marked loop, all warps together.
    longest : dict of int to float
        The same of the busiest warp.
    accesses : tuple of WarpAccess
    """

    geometry: Geometry
    iterations: dict[int, float]
    longest: dict[int, float]
    accesses: tuple[WarpAccess, ...]

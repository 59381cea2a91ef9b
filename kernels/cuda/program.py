"""A candidate as kernels: their Numba source, what they take, and how they are launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..candidate import Candidate
from ..problem import Problem


@dataclass(frozen=True)
class Parameter:
    """One argument of a kernel.

    Attributes
    ----------
    name : str
    type : str
        ``pointer`` (a device address), ``int64``, ``int32`` or ``float32``.
    """

    name: str
    type: str


@dataclass(frozen=True)
class Entry:
    """One ``__global__`` function.

    Attributes
    ----------
    symbol : str
        Its name in PTX; unique to its code.
    function : callable
        Numba source.
    parameters : tuple of Parameter
        In order.
    """

    symbol: str
    function: Callable[..., None]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Geometry:
    """A launch.

    Attributes
    ----------
    grid : tuple of int
        Blocks along x, y and z.
    threads : int
        Of a block, along x.
    shared_bytes : int
        Dynamic shared memory of a block.
    """

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Program:
    """A candidate's kernels.

    Attributes
    ----------
    problem : Problem
    candidate : Candidate
    arch : str
    main : Entry
    merge : Entry or None
        Combines the splits' partial results; None where there are none.
    """

    problem: Problem
    candidate: Candidate
    arch: str
    main: Entry
    merge: Entry | None

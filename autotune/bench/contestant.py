"""The seam between the bench and whoever computes: one small class for each implementation."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...kernels.errors import ProblemError
from .case import Case
from .inputs import Stored

NAMES = ("lowbit", "ik_llama_cpp", "llama_cpp", "torch", "numpy")
"""Everyone who attends."""
GEMV_NAMES = ("lowbit", "ik_llama_cpp", "llama_cpp", "llama_cpp_repack", "llama_cpp_amx", "torch", "numpy")
"""Everyone who multiplies. llama.cpp does it in three ways: with rows of blocks as a file holds them, and with the two
arrangements that it may make of them while it loads them."""
LIMIT = "limit"
"""The contestant that only reads: the yardstick of everyone's share of the limit."""

_MADE_BY = {
    "lowbit": "lowbit_kernels:LowbitKernels",
    "ik_llama_cpp": "ggml_peers:IkLlamaCpp",
    "llama_cpp": "ggml_peers:LlamaCpp",
    "llama_cpp_repack": "ggml_peers:LlamaCppRepacked",
    "llama_cpp_amx": "ggml_peers:LlamaCppAmx",
    "torch": "torch_peer:Torch",
    "numpy": "numpy_peer:NumPy",
    LIMIT: "limit:Limit",
}


class Absent(Exception):
    """A contestant that is not installed, or cannot run here, and why."""


class Unsupported(Exception):
    """A case that a contestant has no operator for."""


@dataclass
class Entry:
    """A contestant's operands of one case in place, and the call that is timed.

    Attributes
    ----------
    run : callable
        One call of the operator.
    wake : callable
        The operator on a few rows that are not the case's: brings the contestant's threads out of their sleep. False if
        that failed, because something else holds a core.
    regions : tuple of (int, int)
        Address and bytes of the packed operands: what a cold call finds evicted.
    storage : str
        How the operands are stored, in the contestant's own words.
    result : callable
        What the last `run` computed, (heads, query_rows, head_dim) or (1, vectors, rows). None: nothing to check.
    stored : callable
        See `lowbit.autotune.bench.inputs.Stored`.
    keep : object
        What must live as long as the entry.
    """

    run: Callable[[], object]
    wake: Callable[[], object]
    regions: tuple[tuple[int, int], ...]
    storage: str
    result: Callable[[], NDArray[np.floating]] | None = None
    stored: Stored | None = None
    keep: object = None

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.regions)


class Contestant(ABC):
    """One implementation, living in a worker process of its own.

    Made and used by one thread. Nothing is imported or loaded before `open`.
    """

    @abstractmethod
    def open(self, threads: int) -> str:
        """Load the implementation and return its version.

        Raises
        ------
        Absent
            If it is not installed or cannot be used.
        """

    @abstractmethod
    def enter(self, case: Case, candidate: str) -> Iterator[Entry]:
        """Store the case's inputs in each way that this implementation has for it; the fastest correct one is timed.

        Parameters
        ----------
        case : Case
        candidate : str
            Name of the kernel to use; only ``lowbit`` looks at it.

        Raises
        ------
        Unsupported
            If it has no operator for the case.
        """


def contestant_named(name: str) -> Contestant:
    """The contestant called ``name``, or what ``module:callable`` makes.

    Raises
    ------
    ProblemError
        If there is none.
    """
    made_by = _MADE_BY.get(name)
    if made_by is None and ":" not in name:
        raise ProblemError(f"unknown implementation {name!r}: choose from {', '.join(GEMV_NAMES)}")
    module, _, attribute = (made_by or name).partition(":")
    made = getattr(importlib.import_module(f".{module}" if made_by else module, __package__), attribute)()
    assert isinstance(made, Contestant)
    return made

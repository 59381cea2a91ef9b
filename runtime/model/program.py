"""A native program under construction: stages, and the memory that they refer to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.cpu.compiled import operator
from ...kernels.cpu.isa import Isa
from ...kernels.cpu.pool import pool
from ...kernels.packed import aligned_zeros


class Program:
    """Stages in the order in which they run; see `lowbit.kernels.cpu.pool.Pool.sequence`.

    Parameters
    ----------
    isa : Isa
    threads : int
        Most threads of a stage.
    """

    def __init__(self, isa: Isa, threads: int) -> None:
        self.isa, self.threads = isa, threads
        self._stages: list[tuple[int, int, int, int]] = []
        self._memory: list[NDArray[Any]] = []
        self._shared: dict[str, NDArray[np.uint8]] = {}

    def add(self, function: int | str, job: NDArray[np.int64], tasks: int, threads: int = 1) -> int:
        """Append a stage; returns its number.

        Parameters
        ----------
        function : int or str
            Address of a task function, or the name of an operator or row-wise stage.
        job : ndarray of int64
            Its fields; kept alive.
        tasks, threads : int
        """
        address = operator(function, self.isa) if isinstance(function, str) else function
        self.keep(job)
        self._stages.append((address, job.ctypes.data, tasks, min(threads, self.threads)))
        return len(self._stages) - 1

    def keep(self, memory: NDArray[Any]) -> None:
        """Hold on to what a job refers to."""
        self._memory.append(memory)

    def floats(self, *shape: int) -> NDArray[np.float32]:
        """Zeroed memory of the program's own."""
        memory = aligned_zeros(int(np.prod(shape)), np.float32).reshape(shape)
        self.keep(memory)
        return memory

    def shared(self, name: str, nbytes: int) -> NDArray[np.uint8]:
        """Memory that stages use one after another, by name: as large as the largest asked for so far, or larger.

        What was given out before stays valid, and may be another piece.
        """
        known = self._shared.get(name)
        if known is None or known.nbytes < nbytes:
            known = self._shared[name] = aligned_zeros(max(nbytes, 64), np.uint8)
            self.keep(known)
        return known

    def reused(self, name: str, *shape: int) -> NDArray[np.float32]:
        """float32 memory that every layer's stages of this name write anew; `shared` for arrays."""
        count = int(np.prod(shape))
        return self.shared(name, 4 * count)[: 4 * count].view(np.float32).reshape(shape)

    def finished(self) -> tuple[NDArray[np.int64], Callable[[], None]]:
        """The stages, whose tasks may be changed between runs, and what runs them."""
        stages = np.array(self._stages, np.int64).reshape(-1, 4)
        self.keep(stages)
        run = pool(self.threads).sequence(stages)
        memory = self._memory

        def program(held: object = memory) -> None:
            run()

        return stages, program


def fields_of(names: Any, **values: Any) -> NDArray[np.int64]:
    """A job: int64 fields by lower-case name. Of arrays the address is stored, and floats are stored as float32.

    Parameters
    ----------
    names : type of IntEnum
        One of `lowbit.kernels.rowwise_fields`.
    """
    job = np.zeros(len(names), np.int64)
    for name, value in values.items():
        position = names[name.upper()]
        if isinstance(value, np.ndarray):
            job[position] = value.ctypes.data
        elif isinstance(value, float):
            job[position : position + 1].view(np.float32)[0] = value
        else:
            job[position] = value
    return job

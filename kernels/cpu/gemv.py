"""One compiled candidate for a matrix and its vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import gemv_fields as fields
from ..calls import checked_call
from ..candidate import Candidate
from ..packed import OPERAND_FIELDS, TOKEN_BLOCK, aligned_zeros
from ..problem import Problem
from .kernel import Bound, CpuKernel
from .keys import Preparation
from .pool import pool

Float32 = NDArray[np.float32]

SHARED_ACTIVATIONS = 16384
"""From this many on vectors are prepared by all threads: it takes longer than a fork and a join."""


class GemvKernel(CpuKernel):
    """See `lowbit.kernels.backend.Kernel`; the operand ``w`` is packed for role ``k``, one head, rows as tokens.

    Parameters
    ----------
    task : int
        Address of the function of `lowbit.kernels.gemv.build_gemv`.
    tile : int
        Address of the tile function.
    tables : Preparation
    prepare : int
        Address of the function of `lowbit.kernels.cpu.activations`; 0 if vectors are read where they lie.
    """

    def __init__(
        self, problem: Problem, candidate: Candidate, task: int, tile: int, tables: Preparation, prepare: int
    ) -> None:
        self.problem, self.candidate = problem, candidate
        self._task, self._prepare, self._tile = task, prepare, tile
        schedule, vectors = candidate.schedule, problem.query_rows
        self._pool = pool(schedule.threads)
        self._tasks = schedule.splits
        shared = vectors > 1 and vectors * problem.head_dim >= SHARED_ACTIVATIONS
        self._preparing_threads = schedule.threads if shared else 1
        element = 1 if problem.integer("k", candidate.pipeline) else 4
        row, aux = len(tables.order) * element, 8 * len(tables.aux_group)
        step = min(schedule.rows, vectors)
        self._memory = [
            aligned_zeros(size, np.uint8) for size in (vectors * row, vectors * aux, 4 * step * TOKEN_BLOCK)
        ]
        self._job = np.zeros(len(fields.FIELDS), np.int64)
        job = self._job
        job[fields.PREPARED], job[fields.AUX], job[fields.SCRATCH] = (each.ctypes.data for each in self._memory)
        job[fields.X_BYTES], job[fields.PREPARED_BYTES], job[fields.AUX_BYTES] = 4 * problem.head_dim, row, aux
        job[fields.VECTORS], job[fields.STEP] = vectors, step
        job[fields.BLOCK], job[fields.SPLITS] = schedule.block, schedule.splits

    def bind(self, *operands: Any, tokens: int | None = None, out: Float32 | None = None) -> Bound:
        job = self._job.copy()
        call = checked_call(self.problem, self.candidate, operands, tokens, out)
        x, matrix, out = call.x, call.packed["k"], call.out
        job[fields.X], job[fields.OUT], job[fields.ROWS] = x.ctypes.data, out.ctypes.data, call.tokens
        if not self._prepare:
            job[fields.PREPARED] = x.ctypes.data
        job[fields.MATRIX : fields.MATRIX + OPERAND_FIELDS] = (*matrix.addresses, self._tile)
        return _BoundGemv(self, job, out, (x, matrix))

    def run(self, job: int) -> None:
        """Prepare the vectors of the job at address ``job``, then run its tasks."""
        self.bound(job)()

    def bound(self, job: int) -> Callable[[], None]:
        """The same, to be repeated."""
        vectors = self.problem.query_rows if self._prepare else 0
        if not vectors or self._preparing_threads == 1:
            return self._pool.bind(self._task, job, self._tasks, self._prepare, vectors)
        prepare = self._pool.bind(self._prepare, job, vectors)
        multiply = self._pool.bind(self._task, job, self._tasks)

        def both() -> None:
            prepare()
            multiply()

        return both


class _BoundGemv(Bound):
    __slots__ = ("_run",)

    def __init__(self, kernel: GemvKernel, job: NDArray[np.int64], out: Float32, operands: tuple[Any, ...]):
        super().__init__(kernel, job, out, operands)
        self._run = kernel.bound(job.ctypes.data)

    def __call__(self) -> Float32:
        self._run()
        return self.out

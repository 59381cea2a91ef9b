"""One compiled candidate on the CPU: task function, merge, workspace, threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import fields, segment_fields
from ..backend import Kernel
from ..calls import checked_call, packed_operand
from ..candidate import Candidate
from ..packed import OPERAND_FIELDS, PackedTensor, aligned_zeros
from ..problem import Problem
from ..quantize import Quantized
from ..reference import softmax_scale
from .keys import Preparation
from .pool import pool
from .softmax import LOG2_E

Float32 = NDArray[np.float32]

MOST_TOKENS = 1 << 15
"""Tokens of a task that weighs values. Every 32 are added to running sums in float32: over a million equal tokens these
drift by 4e-4, more than fp16 costs, and over this many by 1e-5. Sums of tasks are merged, so that they start anew."""


def task_bytes(room: int, head_dim: int, slots: int, aux: int, step: int, block: int, scratch: int) -> int:
    """Workspace of a task.

    Parameters
    ----------
    room : int
        Rows of the small operand, rounded up to whole steps.
    head_dim : int
    slots, aux : int
        Slots of a prepared row, four bytes at most each, and groups of its lanes.
    step, block : int
        Rows and tokens of a block of scores.
    scratch : int
        Bytes that the values' tile function asks for.
    """
    parts = (4 * room * slots, 8 * room * aux, 4 * step * block, 8 * room, 4 * room * head_dim)
    size = sum(-(-part // 64) * 64 for part in parts) + max(scratch, 64)
    return -(-size // 4096) * 4096 + 128  # neighbouring tasks start in different cache sets


class CpuKernel(Kernel):
    """See `lowbit.kernels.backend.Kernel`. Holds workspace that grows with the number of tasks."""

    def __init__(
        self,
        problem: Problem,
        candidate: Candidate,
        task: int,
        merge: int,
        tiles: dict[str, int],
        prepared: Preparation | None,
        scratch: int,
    ):
        self.problem, self.candidate = problem, candidate
        self._task, self._merge, self._tiles, self._prepared = task, merge, tiles, prepared
        self._parts = task, merge, tiles, prepared, scratch
        self._finer: dict[int, CpuKernel] = {}
        self._kv_heads = problem.kv_heads
        self._job = np.zeros(len(fields.FIELDS), np.int64)
        schedule = candidate.schedule
        self._tasks = problem.kv_heads * schedule.splits
        self._pool = pool(schedule.threads)
        self._room = -(-problem.rows // schedule.rows) * schedule.rows
        self._workspace_bytes = self._size_of_workspace(scratch)
        self._workspace = aligned_zeros(self._tasks * self._workspace_bytes, np.uint8)
        size = fields.partial_floats(problem.rows, problem.head_dim)
        self._partials = aligned_zeros(self._tasks * size, np.float32)
        self._fill_constants()

    def run(self, job: int) -> None:
        """Run the tasks of the job at address ``job``, and merge their records."""
        self._pool.run(self._task, job, self._tasks)
        if self._merge:
            self._pool.run(self._merge, job, self._kv_heads, 1)

    def _size_of_workspace(self, scratch: int) -> int:
        problem, schedule = self.problem, self.candidate.schedule
        slots = len(self._prepared.order) if self._prepared else 0
        aux = len(self._prepared.aux_group) if self._prepared else 0
        return task_bytes(self._room, problem.head_dim, slots, aux, schedule.rows, schedule.block, scratch)

    def _fill_constants(self) -> None:
        problem, job, schedule = self.problem, self._job, self.candidate.schedule
        job[fields.WORKSPACE] = self._workspace.ctypes.data
        job[fields.WORKSPACE_BYTES] = self._workspace_bytes
        job[fields.PARTIALS] = self._partials.ctypes.data
        job[fields.HEAD_DIM] = self.problem.head_dim
        factor = 1.0
        if problem.operator == "attend":
            factor = softmax_scale(problem.head_dim) * (1.0 if problem.softcap else LOG2_E)
            job[fields.SOFTMAX] = self._tiles["softmax"]
        job[fields.FACTOR : fields.FACTOR + 1].view(np.float32)[0] = factor
        job[fields.CAP : fields.CAP + 1].view(np.float32)[0] = problem.softcap
        job[fields.WINDOW] = problem.window
        job[fields.ROWS] = self.problem.rows
        job[fields.QUERY_ROWS] = self.problem.query_rows
        job[fields.ROOM] = self._room
        job[fields.SPLITS] = schedule.splits
        job[fields.OUT_HEAD_STRIDE] = problem.query_rows * problem.head_dim
        job[fields.OUT_ROW_STRIDE] = problem.head_dim
        job[fields.SEGMENT_COUNT] = 1
        segment = job[fields.SEGMENT :]
        segment[segment_fields.STEP], segment[segment_fields.BLOCK] = schedule.rows, schedule.block
        segment[segment_fields.ELEMENT] = 1 if problem.integer("k", self.candidate.pipeline) else 4
        if self._prepared is not None:
            segment[segment_fields.PREPARE] = self._tiles["prepare"]
            segment[segment_fields.ORDER_COUNT] = len(self._prepared.order)
            segment[segment_fields.AUX_COUNT] = len(self._prepared.aux_group)

    def pack(self, role: str, values: NDArray[np.floating] | Quantized, capacity: int | None = None) -> PackedTensor:
        return packed_operand(self.problem, self.candidate, role, values, capacity)

    def __call__(self, *operands: Any, tokens: int | None = None, out: Float32 | None = None) -> Float32:
        return self.bind(*operands, tokens=tokens, out=out)()

    def bind(self, *operands: Any, tokens: int | None = None, out: Float32 | None = None) -> Bound:
        problem, job = self.problem, self._job.copy()
        call = checked_call(problem, self.candidate, operands, tokens, out)
        if (splits := self._splits(call.tokens)) > self.candidate.schedule.splits:
            return self._with_splits(splits).bind(*operands, tokens=tokens, out=out)
        job[fields.SEGMENTS] = job.ctypes.data + 8 * fields.SEGMENT
        for role, operand in call.packed.items():
            start = fields.SEGMENT + (segment_fields.K if role == "k" else segment_fields.V)
            job[start : start + OPERAND_FIELDS] = (*operand.addresses, self._tiles[role])
            job[start + segment_fields.TOKENS] = call.tokens
        columns = call.x.shape[2]
        job[fields.X] = call.x.ctypes.data
        job[fields.X_HEAD_STRIDE] = problem.rows * columns
        job[fields.X_ROW_STRIDE] = columns
        job[fields.OUT] = call.out.ctypes.data
        job[fields.TOKENS] = call.tokens
        return Bound(self, job, call.out, (call.x, *call.packed.values()))

    def _splits(self, tokens: int) -> int:
        """Splits of a context of ``tokens``: the schedule's, or a multiple that leaves each task `MOST_TOKENS`."""
        problem, splits = self.problem, self.candidate.schedule.splits
        if problem.operator == "qk":
            return splits
        seen = min(tokens, problem.window + problem.query_rows) if problem.window else tokens
        return splits * -(-seen // (splits * MOST_TOKENS))

    def _with_splits(self, splits: int) -> CpuKernel:
        """This kernel for longer contexts: the same code, and workspace for more tasks."""
        if splits not in self._finer:
            schedule = replace(self.candidate.schedule, splits=splits)
            candidate = replace(self.candidate, plan=schedule)
            self._finer[splits] = CpuKernel(self.problem, candidate, *self._parts)
        return self._finer[splits]


class Bound:
    """One call with its operands in place; shares the kernel's workspace, so calls must not overlap."""

    __slots__ = ("_address", "_job", "_kernel", "_operands", "out")

    def __init__(self, kernel: CpuKernel, job: NDArray[np.int64], out: Float32, operands: tuple[Any, ...]):
        self._kernel, self._job, self._operands, self.out = kernel, job, operands, out
        self._address = job.ctypes.data

    def __call__(self) -> Float32:
        self._kernel.run(self._address)
        return self.out

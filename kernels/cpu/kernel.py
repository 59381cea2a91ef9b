"""One compiled candidate on the CPU: task function, merge, workspace, threads."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import operators
from ..backend import Kernel
from ..candidate import Candidate
from ..errors import LayoutError, ProblemError
from ..packed import PackedTensor, aligned_zeros, pack
from ..plugin import OPERAND_FIELDS, require_packed
from ..problem import Problem, check_tokens
from ..quantize import quantize
from ..reference import softmax_scale
from .keys import Preparation
from .pool import pool


class CpuKernel(Kernel):
    """See `lowbit.kernels.backend.Kernel`. Holds workspace that grows with the number of tasks."""

    def __init__(
        self,
        problem: Problem,
        candidate: Candidate,
        task: Any,
        merge: Any,
        tiles: dict[str, int],
        prepared: Preparation | None,
        scratch: int,
    ):
        self.problem, self.candidate = problem, candidate
        self._task, self._merge, self._tiles, self._prepared = task, merge, tiles, prepared
        self._job = np.zeros(len(operators.FIELDS), np.int64)
        schedule = candidate.schedule
        self._tasks = problem.kv_heads * schedule.splits
        self._pool = pool(schedule.threads)
        self._workspace_bytes = self._size_of_workspace(scratch)
        self._workspace = aligned_zeros(self._tasks * self._workspace_bytes, np.uint8)
        size = operators.partial_floats(problem.rows, problem.head_dim)
        self._partials = aligned_zeros(self._tasks * size, np.float32)
        self._fill_constants()

    def _size_of_workspace(self, scratch: int) -> int:
        problem, schedule = self.problem, self.candidate.schedule
        rows = -(-problem.rows // schedule.rows) * schedule.rows
        slots = len(self._prepared.order) if self._prepared else 0
        aux = len(self._prepared.aux_group) if self._prepared else 0
        parts = (4 * rows * slots, 8 * rows * aux, 4 * schedule.rows * schedule.block, 8 * rows, 4 * rows * problem.head_dim)
        # Preparing rows needs codes, sums and a row of zeros where scores and scratch will be.
        size = sum(-(-part // 64) * 64 for part in parts) + scratch + 8192 + 8 * problem.head_dim
        return -(-size // 4096) * 4096 + 128  # neighbouring tasks start in different cache sets

    def _fill_constants(self) -> None:
        job, schedule = self._job, self.candidate.schedule
        job[operators.WORKSPACE] = self._workspace.ctypes.data
        job[operators.WORKSPACE_BYTES] = self._workspace_bytes
        job[operators.PARTIALS] = self._partials.ctypes.data
        job[operators.HEAD_DIM] = self.problem.head_dim
        job[operators.STEP] = schedule.rows
        job[operators.ELEMENT] = 1 if self.candidate.pipeline == "integer" else 4
        factor = softmax_scale(self.problem.head_dim) if self.problem.operator == "attend" else 1.0
        job[operators.FACTOR : operators.FACTOR + 1].view(np.float32)[0] = factor
        job[operators.ROWS] = self.problem.rows
        job[operators.QUERY_ROWS] = self.problem.query_rows
        job[operators.SPLITS] = schedule.splits
        job[operators.BLOCK] = schedule.block
        if self._prepared is not None:
            job[operators.ORDER] = self._prepared.order.ctypes.data
            job[operators.ORDER_COUNT] = len(self._prepared.order)
            job[operators.AUX_GROUP] = self._prepared.aux_group.ctypes.data
            job[operators.AUX_FIRST] = self._prepared.aux_first.ctypes.data
            job[operators.AUX_COUNT] = len(self._prepared.aux_group)
            job[operators.OFFSET] = self._prepared.offset

    def pack(self, role: str, values: NDArray[np.floating], capacity: int | None = None) -> PackedTensor:
        layout = {"k": self.candidate.k, "v": self.candidate.v}.get(role)
        if layout is None:
            raise LayoutError(f"{self.problem.operator} has no packed operand {role!r}")
        return pack(quantize(values, self.problem.storage, role), layout, capacity)

    def __call__(
        self, *operands: Any, tokens: int | None = None, out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        problem = self.problem
        x, packed = np.ascontiguousarray(operands[0], np.float32), operands[1:]
        roles = {"attend": ("k", "v"), "qk": ("k",), "sv": ("v",)}[problem.operator]
        if len(packed) != len(roles):
            raise ProblemError(f"{problem.operator} takes {1 + len(roles)} operands, not {len(operands)}")
        for role, operand in zip(roles, packed, strict=True):
            self._bind(role, require_packed(operand, role))
        count = check_tokens(packed[0].tokens if tokens is None else tokens)
        if any(count > operand.capacity for operand in packed):
            raise ProblemError(f"{count} tokens asked of an operand that holds {packed[0].capacity}")
        columns = count if problem.operator == "sv" else problem.head_dim
        if x.shape != (problem.heads, problem.query_rows, columns):
            raise ProblemError(f"x must have shape {(problem.heads, problem.query_rows, columns)}, not {x.shape}")
        shape = (problem.heads, problem.query_rows, count if problem.operator == "qk" else problem.head_dim)
        if out is None:
            out = np.empty(shape, np.float32)
        elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ProblemError(f"out must be contiguous float32 of shape {shape}")
        self._run(x, out, count, columns)
        return out

    def _bind(self, role: str, operand: PackedTensor) -> None:
        layout = self.candidate.k if role == "k" else self.candidate.v
        if layout is None or operand.layout != layout:
            raise LayoutError(f"operand {role} is packed as {operand.layout}, the kernel reads {layout}")
        if (operand.heads, operand.head_dim) != (self.problem.kv_heads, self.problem.head_dim):
            raise ProblemError(
                f"operand {role} has {operand.heads} heads of {operand.head_dim}, the problem has "
                f"{self.problem.kv_heads} of {self.problem.head_dim}"
            )
        start = operators.K if role == "k" else operators.V
        self._job[start : start + OPERAND_FIELDS] = (*operand.addresses, self._tiles[role])

    def _run(self, x: NDArray[np.float32], out: NDArray[np.float32], tokens: int, columns: int) -> None:
        job = self._job
        job[operators.X] = x.ctypes.data
        job[operators.X_HEAD_STRIDE] = self.problem.rows * columns
        job[operators.X_ROW_STRIDE] = columns
        job[operators.OUT] = out.ctypes.data
        job[operators.TOKENS] = tokens
        address = job.ctypes.data
        self._pool.run(self._task.address, address, self._tasks)
        if self._merge is not None:
            self._merge(address, self.problem.kv_heads, self.problem.head_dim, out.ctypes.data)

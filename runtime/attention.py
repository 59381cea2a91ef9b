"""Attention of a block of query positions over a segmented cache, for all layers of a model.

A decode step calls compiled code alone. What that code reads, jobs and segments' fields, is kept current here: the
visible lengths before every call, everything else when the cache's segments have changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..kernels import fields, segment_fields
from ..kernels.candidate import Candidate
from ..kernels.cpu.backend import tile_address
from ..kernels.cpu.blocks import for_block
from ..kernels.cpu.compiled import operator
from ..kernels.cpu.isa import Isa
from ..kernels.cpu.kernel import MOST_TOKENS, task_bytes
from ..kernels.cpu.segments import SegmentKernel, segment_kernel
from ..kernels.cpu.softmax import LOG2_E, SoftmaxSpec
from ..kernels.packed import aligned_zeros
from ..kernels.problem import Problem
from ..kernels.reference import softmax_scale
from .kvcache import KVCache
from .segment import KVLayout

Float32 = NDArray[np.float32]

_K_TOKENS = segment_fields.K + segment_fields.TOKENS
_V_TOKENS = segment_fields.V + segment_fields.TOKENS


class SegmentedAttention:
    """One task function for all segments of a layer; partial results are merged afterwards.

    Parameters
    ----------
    cache : KVCache
    problem : Problem
        ``attend`` with one query position. Its precision is not read: segments have their own.
    positions : int
        Query positions, the last tokens of the cache.
    candidate_of : callable
        The candidate to read a pair of layouts with, for one position.
    isa : Isa

    Attributes
    ----------
    queries : ndarray of float32, shape (heads, positions, head_dim)
        Read; written by the caller.
    out : ndarray of float32, shape (positions, heads · head_dim)
        Written.
    attend, merge : int
        Addresses of the task functions; their jobs are ``jobs[layer]``.
    jobs : ndarray of int64, shape (layers, fields)
    """

    def __init__(
        self,
        cache: KVCache,
        problem: Problem,
        positions: int,
        candidate_of: Callable[[KVLayout], Candidate],
        isa: Isa,
    ) -> None:
        self._cache, self._problem, self._positions = cache, problem, positions
        self._candidate_of, self._isa = candidate_of, isa
        self.queries: Float32 = aligned_zeros(problem.heads * positions * problem.head_dim, np.float32).reshape(
            problem.heads, positions, problem.head_dim
        )
        self.out: Float32 = aligned_zeros(positions * problem.heads * problem.head_dim, np.float32).reshape(
            positions, -1
        )
        self.attend, self.merge = operator("attend", isa), operator("merge_attend", isa)
        self.jobs: NDArray[np.int64] = np.zeros((cache.layers, len(fields.FIELDS)), np.int64)
        self._segments: NDArray[np.int64] = np.zeros((cache.layers, 0, segment_fields.SEGMENT_FIELDS), np.int64)
        self._generation = -1
        self._splits = 1
        self._memory: list[NDArray[np.uint8]] = []
        self._fill()

    def _fill(self) -> None:
        problem, jobs, positions = self._problem, self.jobs, self._positions
        head_dim = problem.head_dim
        jobs[:, fields.X], jobs[:, fields.OUT] = self.queries.ctypes.data, self.out.ctypes.data
        jobs[:, fields.X_HEAD_STRIDE] = problem.group * positions * head_dim
        jobs[:, fields.X_ROW_STRIDE] = head_dim
        jobs[:, fields.OUT_HEAD_STRIDE], jobs[:, fields.OUT_ROW_STRIDE] = head_dim, problem.heads * head_dim
        jobs[:, fields.HEAD_DIM] = head_dim
        jobs[:, fields.ROWS], jobs[:, fields.QUERY_ROWS] = problem.group * positions, positions
        jobs[:, fields.WINDOW] = problem.window
        factor = softmax_scale(head_dim) * (1.0 if problem.softcap else LOG2_E)
        low = 2 * fields.FACTOR, 2 * fields.CAP
        jobs.view(np.float32)[:, low[0]], jobs.view(np.float32)[:, low[1]] = factor, problem.softcap
        jobs[:, fields.SOFTMAX] = tile_address(SoftmaxSpec(self._isa, problem.softcap > 0))

    @property
    def tasks(self) -> int:
        """Of ``attend``; those of ``merge`` are as many as key/value heads."""
        return self._problem.kv_heads * self._splits

    def prepare(self, splits: int) -> bool:
        """Make the jobs current; to be called before they run, after the cache has counted the positions.

        Parameters
        ----------
        splits : int
            Shares of the context that are decoded in parallel; more are taken where one would be too long.

        Returns
        -------
        bool
            Whether the number of tasks has changed.
        """
        cache, before = self._cache, self._splits
        splits = splits * -(-cache.length // (splits * MOST_TOKENS))
        if cache.generation != self._generation or splits != before:
            self._splits = splits
            self._describe()
        last = cache.segments[-1]
        self._segments[:, -1, _K_TOKENS] = last.tokens
        self._segments[:, -1, _V_TOKENS] = last.tokens
        self.jobs[:, fields.TOKENS] = cache.length
        return self._splits != before

    def _describe(self) -> None:
        """Write all segments' fields, and size the workspace for them."""
        cache, problem = self._cache, self._problem
        segments = cache.segments
        kernels = [self._kernel(segment.storage.layout) for segment in segments]
        self._segments = np.zeros((cache.layers, len(segments), segment_fields.SEGMENT_FIELDS), np.int64)
        for position, (segment, kernel) in enumerate(zip(segments, kernels, strict=True)):
            for layer in range(cache.layers):
                row = self._segments[layer, position]
                k, v = segment.storage.k[layer], segment.storage.v[layer]
                kernel.describe(row, k, v, segment.start, segment.tokens)
        rows = problem.group * self._positions
        room = max(-(-rows // kernel.step) * kernel.step for kernel in kernels)
        size = max(
            task_bytes(room, problem.head_dim, each.slots, each.aux, each.step, each.block, each.scratch)
            for each in kernels
        )
        records = self.tasks * fields.partial_floats(rows, problem.head_dim)
        workspace, partials = aligned_zeros(self.tasks * size, np.uint8), aligned_zeros(4 * records, np.uint8)
        self._memory = [workspace, partials]
        jobs = self.jobs
        jobs[:, fields.WORKSPACE], jobs[:, fields.WORKSPACE_BYTES] = workspace.ctypes.data, size
        jobs[:, fields.PARTIALS] = partials.ctypes.data
        jobs[:, fields.ROOM], jobs[:, fields.SPLITS] = room, self._splits
        jobs[:, fields.SEGMENT_COUNT] = len(segments)
        start, stride = self._segments.ctypes.data, self._segments.strides[0]
        jobs[:, fields.SEGMENTS] = start + stride * np.arange(cache.layers)
        self._generation = cache.generation

    def _kernel(self, layout: KVLayout) -> SegmentKernel:
        problem = replace(self._problem, precision=precision_of(layout))
        candidate = self._candidate_of(layout)
        if self._positions > 1:
            candidate = for_block(problem, candidate, self._positions, self._isa)
        return segment_kernel(problem, candidate, self._isa)


def precision_of(layout: KVLayout) -> str:
    """The precision of a problem whose operands are stored so."""
    names = {"fp16": "fp16", "int8": "w8a8", "int4": "w4a8"}
    return "+".join(dict.fromkeys(names[each.packing.format] for each in (layout.k, layout.v)))

"""Storing from Python: the task of ``append`` over all heads, run by the calling thread."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..kernels import append_fields as fields
from ..kernels.cpu.compiled import operator
from ..kernels.cpu.isa import detect
from ..kernels.cpu.pool import pool

Float32 = NDArray[np.float32]


class Storer:
    """Stores tokens of one layer at a time; holds a job of its own.

    Parameters
    ----------
    kv_heads : int
    """

    def __init__(self, kv_heads: int) -> None:
        self._job: NDArray[np.int64] = np.zeros(len(fields.FIELDS), np.int64)
        self._run = pool(1).bind(operator("append", detect()), self._job.ctypes.data, 2 * kv_heads)

    def store(self, job: NDArray[np.int64], k: Float32, v: Float32) -> None:
        """Store ``k`` and ``v``, (kv_heads, tokens, head_dim) each, where ``job`` says."""
        if k.strides != v.strides or k.dtype != np.float32 or v.dtype != np.float32 or k.strides[2] != 4:
            k, v = (np.array(each, np.float32, order="C") for each in (k, v))
        own = self._job
        own[:] = job
        own[fields.SOURCE_K], own[fields.SOURCE_V] = k.ctypes.data, v.ctypes.data
        own[fields.SOURCE_HEAD_BYTES], own[fields.SOURCE_TOKEN_BYTES] = k.strides[0], k.strides[1]
        self._run()

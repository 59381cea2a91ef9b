"""Matrices of a model as stages of its program: packed in a tuned layout, or plain float32.

A packed matrix is one copy of the weights in the layout that won for one vector; blocks of vectors read the same words
with wider tiles.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels import gemv_fields as fields
from ...kernels.candidate import Candidate
from ...kernels.cpu.activations import in_place
from ...kernels.cpu.backend import prepare_address, tile_address
from ...kernels.cpu.blocks import for_block
from ...kernels.cpu.isa import Isa
from ...kernels.cpu.keys import Preparation, preparation
from ...kernels.cpu.minima import MinimaSpec
from ...kernels.cpu.space import tile_specs
from ...kernels.packed import OPERAND_FIELDS, TOKEN_BLOCK, PackedTensor, pack
from ...kernels.problem import MAX_QUERY_ROWS, Problem
from ...kernels.rowwise_fields import Embed, Multiply, Ready
from .program import Program, fields_of
from .weights import Weight

Float32 = NDArray[np.float32]

PRECISION = {"int8": "w8a8", "int4": "w4a8"}
PLAIN_SPLITS = 4
"""Ranges of rows for each thread that share a plain matrix's products."""


class Matrix(ABC):
    """A matrix of ``rows`` × ``columns`` that programs multiply vectors with.

    Immutable, and shared by the programs of all sessions.
    """

    rows: int
    columns: int

    @abstractmethod
    def multiply(self, program: Program, x: Float32, out: Float32) -> None:
        """Add the stages of ``out = x · matrixᵀ``.

        Parameters
        ----------
        program : Program
        x : ndarray of float32, shape (vectors, columns)
        out : ndarray of float32, shape (vectors, rows)
        """

    @abstractmethod
    def embed(self, program: Program, ids: NDArray[np.int32], out: Float32) -> None:
        """Add the stage of ``out[i] = matrix[ids[i]]``.

        Parameters
        ----------
        program : Program
        ids : ndarray of int32, shape (vectors,)
        out : ndarray of float32, shape (vectors, columns)
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that one multiplication reads."""


class PlainMatrix(Matrix):
    """float32 rows one after another: what a file's tensors stand for, exactly.

    Parameters
    ----------
    values : ndarray of float32, shape (rows, columns)
    """

    def __init__(self, values: Float32) -> None:
        self._values = np.ascontiguousarray(values, np.float32)
        self.rows, self.columns = self._values.shape

    def multiply(self, program: Program, x: Float32, out: Float32) -> None:
        splits = PLAIN_SPLITS * program.threads
        job = fields_of(
            Multiply, x=x, out=out, matrix=self._values, rows=self.rows, columns=self.columns, vectors=len(x),
            splits=splits,
        )  # fmt: skip
        program.add("multiply", job, splits, program.threads)

    def embed(self, program: Program, ids: NDArray[np.int32], out: Float32) -> None:
        job = fields_of(Embed, ids=ids, out=out, width=self.columns, format=32, words=self._values, factor=1.0)
        program.add("embed", job, len(ids))

    @property
    def nbytes(self) -> int:
        return self._values.nbytes


@dataclass(frozen=True)
class _Form:
    """How a number of vectors is prepared and multiplied in one pass."""

    tile: int
    prepare: int
    tables: Preparation
    element: int
    step: int
    block: int

    @property
    def row_bytes(self) -> int:
        """Of a prepared vector."""
        return len(self.tables.order) * self.element

    @property
    def aux_bytes(self) -> int:
        return 8 * len(self.tables.aux_group)


class PackedMatrix(Matrix):
    """Codes in a tuned layout.

    Parameters
    ----------
    weight : Weight
    candidate : Candidate
        For one vector; see `lowbit.runtime.model.tuned`.
    isa : Isa
    """

    def __init__(self, weight: Weight, candidate: Candidate, isa: Isa) -> None:
        assert candidate.k is not None
        self.rows, self.columns, self.name = weight.rows, weight.columns, weight.name
        self.candidate, self._isa, self._layout = candidate, isa, candidate.k
        self.problem = Problem("gemv", 1, 1, weight.columns, PRECISION[weight.format])
        self._packed = pack(weight.quantized, self._layout)
        self._minima = _as_scales(weight, self._packed) if weight.minima is not None else None
        self._groups = weight.quantized.scales.shape[2]

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes + (0 if self._minima is None else self._minima.nbytes)

    def multiply(self, program: Program, x: Float32, out: Float32) -> None:
        vectors = len(x)
        form = _form(self.problem, self.candidate, vectors, self._isa)
        schedule = self.candidate.schedule
        prepared = x if not form.prepare else program.shared("prepared", vectors * form.row_bytes)
        job = np.zeros(len(fields.FIELDS), np.int64)
        job[fields.X], job[fields.OUT], job[fields.PREPARED] = x.ctypes.data, out.ctypes.data, prepared.ctypes.data
        job[fields.AUX] = program.shared("aux", vectors * form.aux_bytes).ctypes.data
        job[fields.X_BYTES], job[fields.PREPARED_BYTES] = 4 * self.columns, form.row_bytes
        job[fields.AUX_BYTES] = form.aux_bytes
        job[fields.ROWS], job[fields.VECTORS], job[fields.STEP] = self.rows, vectors, form.step
        splits = schedule.splits if vectors == 1 else max(schedule.splits, PLAIN_SPLITS * program.threads)
        job[fields.BLOCK], job[fields.SPLITS] = form.block, splits
        job[fields.SCRATCH] = program.shared("scratch", 4 * form.step * TOKEN_BLOCK).ctypes.data
        job[fields.GROUPS] = self._groups
        if self._minima is not None:
            step = 8 if self._isa.registers > 16 else 2
            step = min(step, form.step)
            job[fields.MINIMA], job[fields.MINIMA_STEP] = self._minima.ctypes.data, step
            job[fields.ADD_MINIMA] = tile_address(MinimaSpec(self._isa, step))
            job[fields.SUMS] = program.shared("sums", 4 * vectors * self._groups).ctypes.data
        job[fields.MATRIX : fields.MATRIX + OPERAND_FIELDS] = (*self._packed.addresses, form.tile)
        threads = schedule.threads if vectors == 1 else program.threads
        if form.prepare or self._minima is not None:
            program.add("ready", fields_of(Ready, job=job, prepare=form.prepare), vectors, min(vectors, threads))
        program.add("gemv", job, splits, threads)

    def embed(self, program: Program, ids: NDArray[np.int32], out: Float32) -> None:
        layout, packed = self._layout, self._packed
        period = layout.unit("T")
        t, d = np.arange(period)[:, None], np.arange(self.columns)[None, :]
        byte, shift = layout.address(t, d, packed.capacity, self.columns)
        places = np.ascontiguousarray(np.broadcast_to(8 * byte + shift, (period, self.columns)), np.int32)
        program.keep(places)
        job = fields_of(
            Embed, ids=ids, out=out, width=self.columns, format=layout.packing.bits, words=packed.words,
            scales=packed.scales, minima=0 if self._minima is None else self._minima, places=places, period=period,
            pitch=layout.pitch_bytes(packed.capacity, self.columns), offset=layout.packing.offset, factor=1.0,
        )  # fmt: skip
        program.add("embed", job, len(ids))


@functools.lru_cache(256)
def _form(problem: Problem, candidate: Candidate, vectors: int, isa: Isa) -> _Form:
    """How matrices of one shape and layout are multiplied; compiled once for all of them."""
    if vectors > 1:
        candidate = for_block(problem, candidate, vectors, isa)
    step = min(candidate.schedule.rows, vectors)
    many = replace(problem, query_rows=min(vectors, MAX_QUERY_ROWS))
    (spec,) = (spec.canonical for spec in tile_specs(many, candidate, isa))
    tables = preparation(spec)
    prepare = 0 if in_place(spec, tables) else prepare_address(spec)
    return _Form(tile_address(spec), prepare, tables, 1 if spec.integer else 4, step, candidate.schedule.block)


def _as_scales(weight: Weight, packed: PackedTensor) -> Any:
    """Minima in the order in which scales are stored."""
    assert weight.minima is not None
    scales = packed.scales
    ordered = np.zeros_like(scales)
    groups = weight.minima.shape[1]
    blocks = -(-weight.rows // TOKEN_BLOCK)
    padded = np.zeros((blocks * TOKEN_BLOCK, groups), np.float16)
    padded[: weight.rows] = weight.minima
    flat = padded.reshape(blocks, TOKEN_BLOCK, groups).transpose(0, 2, 1).ravel()
    ordered[0, : flat.size] = flat
    return ordered

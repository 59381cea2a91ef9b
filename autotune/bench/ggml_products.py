"""Matrix times vectors with ggml, the matrix in plain memory or in a buffer that arranges it for the machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import ggml
from .blocks import BLOCK, row_bytes
from .case import Case, Part
from .contestant import Entry, Unsupported
from .ggml_rows import KIND, WAKE_ROWS, fill, read
from .inputs import small_operand


class _Matrix(ggml.Graph):
    """A matrix of ``rows`` rows in plain memory."""

    def __init__(self, library: ggml.Ggml, case: Case, rows: int) -> None:
        self.kind = KIND[case.format("k")]
        super().__init__(library, rows * row_bytes(self.kind, case.problem.head_dim))
        self.matrix = self.tensor(ggml.TYPES[self.kind], case.problem.head_dim, rows)


class _Product(ggml.Graph):
    """A matrix, wherever it is, times the case's vectors."""

    def __init__(self, library: ggml.Ggml, case: Case, matrix: int, rows: int) -> None:
        vectors = case.problem.query_rows
        super().__init__(library, 4 * vectors * (case.problem.head_dim + rows))
        self.vectors = self.tensor(ggml.F32, case.problem.head_dim, vectors)
        self.out = library.mul_mat(self.context, matrix, self.vectors)


def product(library: ggml.Ggml, threads: int, case: Case, buffer: str) -> Entry:
    """The case's matrix times its vectors.

    Parameters
    ----------
    buffer : str
        Name of the CPU backend's buffer for weights to keep the matrix in; empty for plain memory.

    Raises
    ------
    Unsupported
        If the library has no such buffer, or it does not take the matrix.
    """
    plain = _Matrix(library, case, case.tokens)
    if case.problem.head_dim % BLOCK and plain.kind != "f16":
        raise Unsupported(f"{plain.kind} rows are a multiple of {BLOCK} columns, not {case.problem.head_dim}")
    fill(plain, plain.matrix, case, "k", plain.kind)
    few = _Matrix(library, case, WAKE_ROWS)
    wake = _Product(library, case, few.matrix, WAKE_ROWS)
    wake.compile(wake.out, threads)
    held = _in_buffer(library, plain, case, buffer) if buffer else None
    graph = _Product(library, case, held.tensor if held else plain.matrix, case.tokens)
    graph.compile(graph.out, threads)
    graph.bytes_of(graph.vectors).view(np.float32)[:] = small_operand(case).ravel()

    def result() -> NDArray[np.floating]:
        shape = 1, case.problem.query_rows, case.tokens
        return graph.bytes_of(graph.out).view(np.float32).reshape(shape).copy()

    def stored(role: str, part: Part) -> NDArray[np.float64]:
        return read(plain, plain.matrix, case, plain.kind, part)

    region = held.region if held else plain.region(plain.matrix)
    storage = f"{plain.kind} in {buffer}" if buffer else plain.kind
    return Entry(graph.run, wake.run, (region,), storage, result, stored, (few, held))


def _in_buffer(library: ggml.Ggml, plain: _Matrix, case: Case, name: str) -> ggml.WeightBuffer:
    kinds = ggml.weight_buffers(library)
    if name not in kinds:
        raise Unsupported(f"this build has no {name} buffer")
    held = ggml.WeightBuffer(library, kinds[name], ggml.TYPES[plain.kind], case.problem.head_dim, case.tokens)
    trial = _Product(library, case, held.tensor, case.tokens)
    if not ggml.supports(library, trial.out):
        raise Unsupported(f"its {name} buffer takes no {plain.kind} matrix of this shape")
    held.fill(plain.bytes_of(plain.matrix))
    return held

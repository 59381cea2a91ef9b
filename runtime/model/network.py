"""A decoder's weights, loaded: what the programs of all its sessions read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...kernels.cpu.isa import Isa
from ..select import Database
from .config import EMBEDDING, HEAD, LAST_NORM, Config
from .gguf_file import GgufFile
from .matrix import PRECISION, Matrix, PackedMatrix, PlainMatrix
from .tuned import matrix_candidate
from .weights import Weight, exact, stacks, vector, weight

Float32 = NDArray[np.float32]
MakeMatrix = Callable[[Sequence[str]], Matrix]


@dataclass(frozen=True)
class Stack:
    """Matrices of the same vectors, one below the other where they have one format.

    Attributes
    ----------
    matrices : tuple of Matrix
    rows : tuple of (int, int, int)
        For each of the stacked tensors: which matrix holds it, from which row on, and how many.
    """

    matrices: tuple[Matrix, ...]
    rows: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Layer:
    """One block of the decoder.

    Attributes
    ----------
    attention_norm, hidden_norm : ndarray of float32, shape (width,)
    qkv : Stack
        Queries, keys and values.
    biases : tuple of ndarray of float32, or None
        Of each of them.
    head_norms : tuple of ndarray of float32, or None
        Of query heads and key heads, head_dim weights each.
    output : Matrix
    gate_up : Stack
    down : Matrix
    """

    attention_norm: Float32
    qkv: Stack
    biases: tuple[Float32, ...] | None
    head_norms: tuple[Float32, Float32] | None
    output: Matrix
    hidden_norm: Float32
    gate_up: Stack
    down: Matrix


@dataclass(frozen=True)
class Network:
    """All of a decoder's weights.

    Attributes
    ----------
    embedding, head : Matrix
        The same one if they are tied.
    layers : tuple of Layer
    last_norm : ndarray of float32, shape (width,)
    """

    embedding: Matrix
    layers: tuple[Layer, ...]
    last_norm: Float32
    head: Matrix

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        found = {id(self.embedding): self.embedding, id(self.head): self.head}
        for layer in self.layers:
            for each in (*layer.qkv.matrices, layer.output, *layer.gate_up.matrices, layer.down):
                found[id(each)] = each
        return sum(matrix.nbytes for matrix in found.values())


def load(file: GgufFile, config: Config, database: Database, isa: Isa, weights: str) -> Network:
    """Read and repack all matrices of a file.

    Parameters
    ----------
    file : GgufFile
    config : Config
        Of the same file.
    database : Database
        Says which layout a matrix is packed in.
    isa : Isa
    weights : str
        ``tuned``: 8-bit and 4-bit codes in tuned layouts. ``exact``: plain float32, as the file's codes stand for.

    Raises
    ------
    ModelError
        If a tensor is damaged.
    """

    def plain(names: Sequence[str]) -> Matrix:
        return PlainMatrix(exact(file, names, config.row_order(names)))

    def packed(names: Sequence[str]) -> Matrix:
        return _packed(weight(file, names, config.row_order(names)), database, isa)

    make = plain if weights == "exact" else packed
    embedding = make([EMBEDDING])
    return Network(
        embedding=embedding,
        layers=tuple(_layer(file, config, index, make) for index in range(config.layers)),
        last_norm=vector(file, LAST_NORM),
        head=embedding if config.tied else make([HEAD]),
    )


def _packed(given: Weight, database: Database, isa: Isa) -> PackedMatrix:
    candidate = matrix_candidate(database, given.rows, given.columns, PRECISION[given.format])
    return PackedMatrix(given, candidate, isa)


def _layer(file: GgufFile, config: Config, index: int, make: MakeMatrix) -> Layer:
    block = f"blk.{index}."
    qkv = [f"{block}attn_{role}.weight" for role in "qkv"]
    biases, norms = None, None
    if config.qkv_bias:
        names = [f"{block}attn_{role}.bias" for role in "qkv"]
        biases = tuple(vector(file, name, config.row_order(name)) for name in names)
    if config.qk_norm:
        norms = (vector(file, f"{block}attn_q_norm.weight"), vector(file, f"{block}attn_k_norm.weight"))
    return Layer(
        attention_norm=vector(file, f"{block}attn_norm.weight"),
        qkv=_stack(file, qkv, make),
        biases=biases,
        head_norms=norms,
        output=make([f"{block}attn_output.weight"]),
        hidden_norm=vector(file, f"{block}ffn_norm.weight"),
        gate_up=_stack(file, [f"{block}ffn_gate.weight", f"{block}ffn_up.weight"], make),
        down=make([f"{block}ffn_down.weight"]),
    )


def _stack(file: GgufFile, names: Sequence[str], make: MakeMatrix) -> Stack:
    matrices, rows = [], []
    for position, run in enumerate(stacks(file, names)):
        first = 0
        for name in run:
            count = file.tensor(name).rows
            rows.append((position, first, count))
            first += count
        matrices.append(make(run))
    return Stack(tuple(matrices), tuple(rows))

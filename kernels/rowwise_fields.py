"""Fields of the jobs of row-wise stages: what `lowbit.kernels.rowwise` reads of a call.

Apart from the stages, so that a program can be described without the compiler. All strides count float32 numbers.
"""

from __future__ import annotations

from enum import IntEnum, auto


class _Field(IntEnum):
    """Positions in a job of int64, from 0."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return count


class Embed(_Field):
    """Rows of a matrix, one for each token."""

    IDS = auto()  # int32 tokens
    OUT = auto()
    WIDTH = auto()
    FORMAT = auto()  # bits of a code: 4, 8, 16, or 32 for plain float32 rows
    WORDS = auto()
    SCALES = auto()  # float16 in the order ``T/32 D/32 t32``; 0 for floats
    MINIMA = auto()  # float16 in the same order; 0 for none
    PLACES = auto()  # int32 (period, width): byte · 8 + bit of each code within a tile of rows
    PERIOD = auto()  # rows of a tile
    PITCH = auto()  # bytes from tile to tile
    OFFSET = auto()  # what codes exceed their values by
    FACTOR = auto()  # float32 in the lower half: multiplies the rows


class Normalise(_Field):
    """Root mean square normalisation, after an addition to the stream that it reads."""

    X = auto()
    ADD = auto()  # rows that X grows by first; 0 for none
    WEIGHT = auto()
    EPS = auto()  # float32 in the lower half
    OUT = auto()
    WIDTH = auto()


class Ready(_Field):
    """Rows made ready for a matrix: its job's groups' sums, and prepared codes."""

    JOB = auto()  # address of the matrix's job, see `lowbit.kernels.gemv_fields`
    PREPARE = auto()  # address of `lowbit.kernels.cpu.activations`'s function; 0 for none


class Rotate(_Field):
    """Queries, keys and values of a position: biases, normalisation of heads, rotary positions."""

    Q = auto()
    K = auto()
    V = auto()
    Q_STRIDE = auto()  # between positions
    K_STRIDE = auto()
    V_STRIDE = auto()
    Q_BIAS = auto()  # 0 for none
    K_BIAS = auto()
    V_BIAS = auto()
    Q_NORM = auto()  # head_dim weights; 0 for none
    K_NORM = auto()
    EPS = auto()  # float32 in the lower half
    COS = auto()  # (positions, dims / 2)
    SIN = auto()
    DIMS = auto()  # channels that are rotated: i with i + dims / 2
    HEADS = auto()
    KV_HEADS = auto()
    HEAD_DIM = auto()
    POSITIONS = auto()
    K_TURN = auto()  # channels of a block whose Hadamard transform queries and keys go through; 0 for none
    V_TURN = auto()  # the same of values
    QUERIES = auto()  # out: (heads, positions, head_dim)
    KEYS = auto()  # out: (kv_heads, positions, head_dim)
    VALUES = auto()


class Center(_Field):
    """Keys relative to a mean; the index is a key/value head."""

    KEYS = auto()  # (kv_heads, positions, head_dim)
    MEAN = auto()  # (kv_heads, head_dim)
    POSITIONS = auto()
    HEAD_DIM = auto()
    LEARN = auto()  # whether the mean is that of these very keys


class Turn(_Field):
    """Hadamard transforms of all blocks of a row, in place."""

    X = auto()
    WIDTH = auto()  # a multiple of the block
    BLOCK = auto()


class Gate(_Field):
    """silu(gate) · up."""

    GATE = auto()
    UP = auto()
    STRIDE = auto()  # between positions, of both
    OUT = auto()
    WIDTH = auto()


class Multiply(_Field):
    """A plain float32 matrix times vectors; the index is a range of rows."""

    X = auto()  # (vectors, columns)
    OUT = auto()  # (vectors, rows)
    MATRIX = auto()  # (rows, columns)
    ROWS = auto()
    COLUMNS = auto()
    VECTORS = auto()
    SPLITS = auto()

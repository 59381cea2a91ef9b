"""Tensors of a GGUF file as operands: quantised in groups of 32, or exactly.

A tensor is read and repacked a few megabytes at a time, so loading takes little more memory than the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...kernels.errors import QuantizationError
from ...kernels.problem import GROUP
from ...kernels.quantize import Quantized
from .blocks import dequantized, parts
from .gguf_file import GgufFile

FOUR_BITS = {"Q4_0": False, "Q4_1": True, "Q4_K": True}
"""Tensor types that become int4, and whether they have minima. All others become int8."""

RowOrder = NDArray[np.int64]
"""For each row of the result, the row of the stacked tensors that it is."""


@dataclass(frozen=True)
class Weight:
    """A matrix that decoding multiplies vectors with.

    Attributes
    ----------
    name : str
        The tensor's name, or several joined by ``+``.
    rows, columns : int
    quantized : Quantized
        ``int4`` or ``int8`` codes of shape (1, rows, columns) and their scales, which may be negative. Codes of int4
        are −8 … 7.
    minima : ndarray of float16, shape (rows, groups), or None
        With them (int4 only) a value is scale · (code + 8) + minimum, without scale · code.
    """

    name: str
    rows: int
    columns: int
    quantized: Quantized
    minima: NDArray[np.float16] | None

    @property
    def format(self) -> str:
        return self.quantized.format

    def dequantize(self) -> NDArray[np.float64]:
        """The values that codes, scales and minima stand for, exactly, shape (rows, columns)."""
        values: NDArray[np.float64] = self.quantized.dequantize()[0]
        if self.minima is None:
            return values
        scales, minima = (
            np.repeat(each.astype(np.float64), GROUP, axis=1)[:, : self.columns]
            for each in (self.quantized.scales[0], self.minima)
        )
        values = scales * (self.quantized.codes[0].astype(np.float64) + 8) + minima
        return values


def weight_format(file: GgufFile, name: str) -> str:
    """What `weight` makes of a tensor: ``int4`` or ``int8``. Tensors of one format can be stacked."""
    return "int4" if file.tensor(name).type.name in FOUR_BITS else "int8"


def stacks(file: GgufFile, names: Sequence[str]) -> list[tuple[str, ...]]:
    """``names`` in runs of neighbours that have one format, and so can be stacked."""
    runs: list[tuple[str, ...]] = []
    for name in names:
        if runs and weight_format(file, runs[-1][0]) == weight_format(file, name):
            runs[-1] = (*runs[-1], name)
        else:
            runs.append((name,))
    return runs


def weight(file: GgufFile, names: str | Sequence[str], row_order: RowOrder | None = None) -> Weight:
    """A tensor, or several of one format stacked by rows, quantised.

    Raises
    ------
    ModelError
        If one is missing, damaged, or cut off.
    ValueError
        If they differ in their columns or formats.
    """
    names = [names] if isinstance(names, str) else list(names)
    rows, columns = _shape(file, names)
    format = weight_format(file, names[0])
    if any(weight_format(file, name) != format for name in names):
        raise ValueError(f"{', '.join(names)} cannot be stacked: their formats differ")
    types = {file.tensor(name).type.name for name in names}
    groups = -(-columns // GROUP)
    codes = np.empty((1, rows, columns), np.int8)
    scales = np.empty((1, rows, groups), np.float16)
    minima = np.empty((rows, groups), np.float16) if any(FOUR_BITS.get(kind) for kind in types) else None

    def store(name: str, raw: NDArray[np.uint8], target: slice | NDArray[np.int64]) -> None:
        try:
            found = parts(raw, file.tensor(name).type, minima is not None)
        except QuantizationError as error:
            raise file.error(f"tensor {name!r} cannot be used: {error}") from None
        codes[0, target], scales[0, target] = found.codes, found.scales
        if minima is not None:
            minima[target] = found.minima

    _each_chunk(file, names, row_order, store)
    return Weight("+".join(names), rows, columns, Quantized(format, codes, scales), minima)


def exact(file: GgufFile, names: str | Sequence[str], row_order: RowOrder | None = None) -> NDArray[np.float32]:
    """A tensor, or several stacked by rows, dequantised exactly: float32 (rows, columns).

    Raises
    ------
    ModelError
        If one is missing, cut off, or holds what is not finite.
    """
    names = [names] if isinstance(names, str) else list(names)
    values = np.empty(_shape(file, names), np.float32)

    def store(name: str, raw: NDArray[np.uint8], target: slice | NDArray[np.int64]) -> None:
        found = dequantized(raw, file.tensor(name).type)
        if not np.isfinite(found).all():
            raise file.error(f"tensor {name!r} cannot be used: it holds values that are not finite")
        values[target] = found

    _each_chunk(file, names, row_order, store)
    return values


def vector(file: GgufFile, name: str, row_order: RowOrder | None = None) -> NDArray[np.float32]:
    """A tensor of one row, such as a norm's weights or a bias: float32 (columns,). ``row_order`` is of its elements."""
    if file.tensor(name).rows != 1:
        raise file.error(f"tensor {name!r} must be a vector")
    values: NDArray[np.float32] = exact(file, name)[0]
    return values if row_order is None else values[row_order]


def _shape(file: GgufFile, names: Sequence[str]) -> tuple[int, int]:
    """Rows and columns of a stack."""
    columns = {file.tensor(name).columns for name in names}
    if len(columns) > 1:
        raise ValueError(f"{', '.join(names)} cannot be stacked: their columns differ")
    return sum(file.tensor(name).rows for name in names), columns.pop()


def _each_chunk(
    file: GgufFile,
    names: Sequence[str],
    row_order: RowOrder | None,
    store: Callable[[str, NDArray[np.uint8], slice | NDArray[np.int64]], None],
) -> None:
    """Call ``store`` with the bytes of some rows at a time and the rows of the result that they become."""
    targets = None if row_order is None else np.argsort(row_order)
    start = 0
    for name in names:
        for first, raw in file.chunks(name):
            place = slice(start + first, start + first + len(raw))
            store(name, raw, place if targets is None else targets[place])
        start += file.tensor(name).rows

"""The contraction as a kernel of one's own calls it: arrays and rows instead of addresses.

Called within ``@njit`` functions, on operands of any layout. The tile intrinsics of `lowbit.kernels.plugin` do the
work; these functions prepare the small operand for them, serve any number of rows, and refuse what would read or write
outside an array.

    small = prepare_rows(keys, queries)  # once
    dot_rows(keys, head, first, count, small, scores)  # scores[row, i] = queries[row] · keys[head, first + i]
    accumulate_rows(values, head, first, count, weights, out)  # out[row] += Σ weights[row, i] · values[head, first + i]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.core.errors import TypingError
from numba.extending import overload

from .linked import LinkedType, require_role
from .plugin import PackedType, accumulate_tile, call_task, dot_tile, tile_spec

ALIGNMENT = 64


def prepare_rows(operand: Any, x: Any) -> Any:
    """Rows of a small operand made ready for `dot_rows` on ``operand``.

    The integer pipeline rounds them to 8 bits, with a scale for each 32 channels.

    Parameters
    ----------
    operand : packed operand of role ``k``
    x : ndarray of float32, shape (rows, channels)

    Returns
    -------
    small : tuple
        For `dot_rows` on this very operand.

    Raises
    ------
    ValueError
        If ``x`` has other channels than the operand, or rows that its tiles do not divide.
    """
    raise TypeError("prepare_rows is for use within an @njit function")


def dot_rows(operand: Any, head: Any, first: Any, count: Any, small: Any, scores: Any) -> None:
    """``scores[row, i] = x[row] · operand[head, first + i]`` for ``count`` tokens.

    Parameters
    ----------
    operand : packed operand of role ``k``
    head, first, count : int
        ``head`` is one of the operand's heads, from 0; ``first`` and ``count`` are multiples of 32 within its
        capacity; tokens past its end give 0.
    small : tuple
        From `prepare_rows`.
    scores : ndarray of float32, shape (rows or more, count or more)
        In C order.

    Raises
    ------
    ValueError
        If the operand has no such head, if the tokens are not whole blocks of it, or if ``scores`` is too small.
    """
    raise TypeError("dot_rows is for use within an @njit function")


def accumulate_rows(operand: Any, head: Any, first: Any, count: Any, weights: Any, out: Any) -> None:
    """``out[row] += Σ_i weights[row, i] · operand[head, first + i]`` over ``count`` tokens.

    Parameters
    ----------
    operand : packed operand of role ``v``
    head, first, count : int
        As in `dot_rows`.
    weights : ndarray of float32, shape (rows, count or more)
        In C order, none negative. Weights of tokens past the operand's end count for nothing, but must be finite.
    out : ndarray of float32, shape (rows, channels)
        In C order.

    Raises
    ------
    ValueError
        As `dot_rows`, and for rows that the operand's tiles do not divide.
    """
    raise TypeError("accumulate_rows is for use within an @njit function")


def _require_operand(name: str, operand: Any, role: str) -> PackedType | LinkedType:
    if not isinstance(operand, PackedType | LinkedType):
        raise TypingError(f"{name} reads a packed operand, not {operand}")
    require_role(operand, role, name)
    return operand


def _require_array(name: str, argument: str, array: Any, orders: str) -> None:
    if isinstance(array, types.Array) and array.ndim == 2 and array.dtype == types.float32 and array.layout in orders:
        return
    order = "a 2-dimensional float32 array" + (" in C order" if orders == "C" else "")
    raise TypingError(f"{name}: {argument} must be {order}, not {array}")


@overload(prepare_rows)
def _prepare_rows(operand: Any, x: Any) -> Callable[..., Any]:
    from .cpu.keys import preparation

    typ = _require_operand("prepare_rows", operand, "k")
    _require_array("prepare_rows", "x", x, "CFA")
    if not isinstance(typ, PackedType):
        return _prepare_linked
    spec = tile_spec("k", typ)
    tables = preparation(spec)
    order, group, leads = tables.order, tables.aux_group, tables.aux_first
    slots, lanes, offset = len(order), len(group), np.int32(tables.offset)
    channels, groups = typ.head_dim, max(spec.groups, 1)

    def floats(operand: Any, x: Any) -> Any:
        _check_x(operand, x)
        prepared = np.zeros((x.shape[0], slots), np.float32)
        for row in range(x.shape[0]):
            for slot in range(slots):
                if order[slot] < channels:
                    prepared[row, slot] = x[row, order[slot]]
        return prepared, np.zeros((x.shape[0], 1), np.int32)

    def integers(operand: Any, x: Any) -> Any:
        _check_x(operand, x)
        prepared = np.zeros((x.shape[0], slots), np.int8)
        aux = np.zeros((x.shape[0], 2 * lanes), np.int32)
        codes = np.zeros(channels + 1, np.int8)  # the last one fills slots past a short row
        sums, scales = np.zeros(groups, np.int32), np.zeros(groups, np.float32)
        for row in range(x.shape[0]):
            for g in range(groups):
                stop = min(32 * g + 32, channels)
                largest = 0.0
                for channel in range(32 * g, stop):
                    largest = max(largest, abs(np.float64(x[row, channel])))
                inverse = 0.0
                if largest > 0.0:
                    inverse = 127.0 / largest
                total = np.int32(0)
                for channel in range(32 * g, stop):
                    code = np.int32(np.floor(np.float64(x[row, channel]) * inverse + 0.5))
                    total += code
                    codes[channel] = np.int8(code)
                sums[g], scales[g] = total, np.float32(largest / 127.0)
            for slot in range(slots):
                prepared[row, slot] = codes[order[slot]]
            facts = aux[row].view(np.float32)
            for lane in range(lanes):
                aux[row, lane] = -offset * sums[group[lane]] * leads[lane]
                facts[lanes + lane] = scales[group[lane]]
        return prepared, aux

    return integers if spec.integer else floats


def _prepare_linked(operand: Any, x: Any) -> Any:
    _check_x(operand, x)
    rows = np.ascontiguousarray(x)
    prepared = np.empty((x.shape[0], operand.slot_bytes), np.uint8)
    aux = np.zeros((x.shape[0], operand.aux_bytes // 4), np.int32)
    job = np.empty(6, np.int64)  # `lowbit.kernels.cpu.activations` names the fields
    job[0], job[1], job[2] = rows.ctypes.data, prepared.ctypes.data, aux.ctypes.data
    job[3], job[4], job[5] = rows.strides[0], prepared.strides[0], aux.strides[0]
    for row in range(x.shape[0]):
        call_task(operand.prepare, job.ctypes.data, row)
    job[0] = rows.size  # their last uses, so that they are not freed before
    return prepared, aux


@overload(dot_rows)
def _dot_rows(operand: Any, head: Any, first: Any, count: Any, small: Any, scores: Any) -> Callable[..., None]:
    _require_operand("dot_rows", operand, "k")
    _require_array("dot_rows", "scores", scores, "C")
    if not isinstance(small, types.BaseTuple) or len(small) != 2:
        raise TypingError(f"dot_rows: small must come from prepare_rows, not {small}")

    def implementation(operand: Any, head: Any, first: Any, count: Any, small: Any, scores: Any) -> None:
        prepared, aux = small
        rows, step = prepared.shape[0], _step(operand)
        _check_place(operand, head, first, count)
        if scores.shape[0] < rows or scores.shape[1] < count:
            raise ValueError("dot_rows: scores needs a row for each row of x, and a column for each token of the block")
        for row in range(0, rows, step):
            dot_tile(
                operand,
                head,
                first,
                count,
                prepared.ctypes.data + row * prepared.strides[0],
                aux.ctypes.data + row * aux.strides[0],
                scores.ctypes.data + row * scores.strides[0],
                scores.shape[1],
            )

    return implementation


@overload(accumulate_rows)
def _accumulate_rows(operand: Any, head: Any, first: Any, count: Any, weights: Any, out: Any) -> Callable[..., None]:
    _require_operand("accumulate_rows", operand, "v")
    _require_array("accumulate_rows", "weights", weights, "C")
    _require_array("accumulate_rows", "out", out, "C")

    def implementation(operand: Any, head: Any, first: Any, count: Any, weights: Any, out: Any) -> None:
        rows, step, channels = weights.shape[0], _step(operand), _channels(operand)
        _check_place(operand, head, first, count)
        if rows % step:
            raise ValueError("accumulate_rows: the rows of weights are no multiple of the rows of a tile")
        if weights.shape[1] < count or out.shape[0] < rows or out.shape[1] != channels:
            raise ValueError("accumulate_rows: weights must be (rows, count or more) and out (rows, channels)")
        scratch = np.empty(_scratch_bytes(operand) + 2 * ALIGNMENT, np.uint8)
        start = scratch.ctypes.data
        start += -start % ALIGNMENT
        for row in range(0, rows, step):
            accumulate_tile(
                operand,
                head,
                first,
                count,
                weights.ctypes.data + row * weights.strides[0],
                weights.shape[1],
                start,
                out.ctypes.data + row * out.strides[0],
                channels,
            )
        scratch[0] = 0  # its last use, so that it is not freed while the tiles write to it

    return implementation


def _step(operand: Any) -> int:
    raise TypeError("for use within an @njit function")


@overload(_step)
def _step_here(operand: Any) -> Callable[[Any], Any]:
    return _known(operand.tile.rows) if isinstance(operand, PackedType) else _step_field


def _channels(operand: Any) -> int:
    raise TypeError("for use within an @njit function")


@overload(_channels)
def _channels_here(operand: Any) -> Callable[[Any], Any]:
    return _known(operand.head_dim) if isinstance(operand, PackedType) else _channels_field


def _scratch_bytes(operand: Any) -> int:
    raise TypeError("for use within an @njit function")


@overload(_scratch_bytes)
def _scratch_bytes_here(operand: Any) -> Callable[[Any], Any]:
    from .cpu.values import scratch_bytes

    if isinstance(operand, PackedType):
        return _known(scratch_bytes(tile_spec("v", operand)))
    return _scratch_bytes_field


def _known(value: int) -> Callable[[Any], Any]:
    def known(operand: Any) -> Any:
        return value

    return known


def _step_field(operand: Any) -> Any:
    return operand.step


def _channels_field(operand: Any) -> Any:
    return operand.channels


def _scratch_bytes_field(operand: Any) -> Any:
    return operand.scratch_bytes


def _check_x(operand: Any, x: Any) -> None:
    raise TypeError("for use within an @njit function")


@overload(_check_x)
def _check_x_here(operand: Any, x: Any) -> Callable[..., None]:
    def implementation(operand: Any, x: Any) -> None:
        if x.shape[1] != _channels(operand):
            raise ValueError("prepare_rows: x has other channels than the packed operand")
        if x.shape[0] % _step(operand):
            raise ValueError("prepare_rows: the rows of x are no multiple of the rows of a tile")

    return implementation


def _check_place(operand: Any, head: Any, first: Any, count: Any) -> None:
    raise TypeError("for use within an @njit function")


@overload(_check_place)
def _check_place_here(operand: Any, head: Any, first: Any, count: Any) -> Callable[..., None]:
    def implementation(operand: Any, head: Any, first: Any, count: Any) -> None:
        if head < 0 or head >= operand.heads:
            raise ValueError("head is none of the operand's heads, which count from 0")
        if first < 0 or count < 0 or first % 32 or count % 32:
            raise ValueError("first and count must be multiples of 32")
        if first + count > operand.capacity:
            raise ValueError("first + count exceeds the tokens that the operand has room for")

    return implementation

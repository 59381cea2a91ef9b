"""The operands of one call of a kernel, checked: shapes, layouts, finite activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .candidate import Candidate
from .errors import LayoutError, ProblemError, QuantizationError
from .packed import PackedTensor, pack, require_packed
from .problem import Problem, check_tokens
from .quantize import Quantized, quantize

Float32 = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Call:
    """What a kernel is to compute.

    Attributes
    ----------
    x : ndarray of float32
        Contiguous, of the operator's shape, finite.
    packed : dict of str to PackedTensor
        By role.
    tokens : int
        Those of the packed operands that take part.
    out : ndarray of float32
    """

    x: Float32
    packed: dict[str, PackedTensor]
    tokens: int
    out: Float32


def checked_call(
    problem: Problem, candidate: Candidate, operands: tuple[Any, ...], tokens: int | None, out: Float32 | None
) -> Call:
    """The call that `lowbit.kernels.backend.Kernel` was asked for.

    Raises
    ------
    ProblemError
        If the operands or ``out`` do not have the problem's shape, or do not hold so many tokens.
    LayoutError
        If a packed operand is no such thing, or in another layout than the kernel reads.
    QuantizationError
        If ``x`` has a value that is not finite.
    """
    roles = problem.roles
    if len(operands) != 1 + len(roles):
        raise ProblemError(f"{problem.operator} takes {1 + len(roles)} operands, not {len(operands)}")
    x = np.ascontiguousarray(operands[0], np.float32)
    packed = {
        role: _checked_operand(problem, candidate, role, value) for role, value in zip(roles, operands[1:], strict=True)
    }
    first = packed[roles[0]]
    count = check_tokens(first.tokens if tokens is None else tokens, problem.length_name)
    most = min(operand.capacity for operand in packed.values())
    matrix = problem.operator == "gemv"
    if count > most:
        raise ProblemError(
            f"{count} {problem.length_name} asked of {'a matrix' if matrix else 'an operand'} that holds {most}"
        )
    columns = count if problem.operator == "sv" else problem.head_dim
    if x.shape != (problem.heads, problem.query_rows, columns):
        raise ProblemError(f"x must have shape {(problem.heads, problem.query_rows, columns)}, not {x.shape}")
    if not np.isfinite(x).all():
        head, row, column = (int(i) for i in np.argwhere(~np.isfinite(x))[0])
        place = f"vector {row}, column {column}" if matrix else f"head {head}, row {row}, column {column}"
        raise QuantizationError(f"x[{place}] = {x[head, row, column]} is not finite")
    shape = (problem.heads, problem.query_rows, count if problem.operator in ("qk", "gemv") else problem.head_dim)
    if out is None:
        out = np.empty(shape, np.float32)
    elif not _fits(out, shape):
        raise ProblemError(f"out must be a writable, contiguous float32 array of shape {shape}")
    return Call(x, packed, count, out)


def packed_operand(
    problem: Problem, candidate: Candidate, role: str, values: NDArray[np.floating] | Quantized, capacity: int | None
) -> PackedTensor:
    """See `lowbit.kernels.backend.Kernel.pack`."""
    layout = {"k": candidate.k, "v": candidate.v}.get(role)
    if layout is None:
        raise LayoutError(f"{problem.operator} has no packed operand {role!r}")
    quantized = values if isinstance(values, Quantized) else quantize(values, problem.stored(role), role)
    return pack(quantized, layout, capacity)


def _checked_operand(problem: Problem, candidate: Candidate, role: str, value: object) -> PackedTensor:
    """``value`` if it is an operand that the kernel reads; another layout would give silently wrong numbers."""
    operand = require_packed(value, role)
    layout = candidate.k if role == "k" else candidate.v
    if operand.layout != layout:
        raise LayoutError(f"operand {role} is packed as {operand.layout}, the kernel reads {layout}")
    if (operand.heads, operand.head_dim) != (problem.kv_heads, problem.head_dim):
        raise ProblemError(
            f"operand {role} has {operand.heads} heads of {operand.head_dim}, the problem has "
            f"{problem.kv_heads} of {problem.head_dim}"
        )
    return operand


def _fits(out: object, shape: tuple[int, ...]) -> bool:
    return (
        isinstance(out, np.ndarray)
        and out.shape == shape
        and out.dtype == np.float32
        and bool(out.flags.c_contiguous and out.flags.writeable)
    )

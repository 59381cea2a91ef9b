"""NumPy: float32 operands, matrix products through whatever BLAS it was built with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.cpu.memory import huge_zeros
from ...kernels.reference import visible
from .case import Case, Part
from .contestant import Contestant, Entry, Unsupported
from .inputs import small_operand, values

Float32 = NDArray[np.float32]
WAKE_ROWS = 256


class NumPy(Contestant):
    def open(self, threads: int) -> str:
        build: Any = np.show_config(mode="dicts")
        blas = build.get("Build Dependencies", {}).get("blas", {})
        return f"{np.__version__} ({blas.get('name', 'unknown BLAS')} {blas.get('version', '')})".replace(" )", ")")

    def enter(self, case: Case, candidate: str) -> Iterator[Entry]:
        problem = case.problem
        if any(case.format(role) != "fp16" for role in problem.roles):
            raise Unsupported("NumPy multiplies no quantised operands; its float32 row is under fp16")
        operands = {role: _filled(case, role) for role in problem.roles}
        x = small_operand(case)
        out: dict[str, Float32] = {}
        if problem.operator == "gemv":
            matrix = operands["k"][0]
            vectors = np.ascontiguousarray(x[0].T)
            few = np.ones((WAKE_ROWS, matrix.shape[1]), np.float32)

            def run() -> None:
                out["y"] = matrix @ vectors

            def result() -> Float32:
                return out["y"].T[None]
        else:
            rows = x.reshape(problem.kv_heads, problem.rows, problem.head_dim) / np.float32(math.sqrt(problem.head_dim))
            mask = None if problem.query_rows == 1 else _mask(case)
            few = np.ones((problem.kv_heads, WAKE_ROWS, problem.head_dim), np.float32)

            def run() -> None:
                out["y"] = _attention(rows, operands["k"], operands["v"], mask)

            def result() -> Float32:
                return out["y"].reshape(x.shape)

        def wake() -> None:
            few @ few.swapaxes(-1, -2)

        def stored(role: str, part: Part) -> NDArray[np.float64]:
            return operands[role][part.head, part.start : part.stop].astype(np.float64)

        regions = tuple((each.ctypes.data, each.nbytes) for each in operands.values())
        yield Entry(run, wake, regions, "float32", result, stored, operands)


def _attention(rows: Float32, keys: Float32, held: Float32, mask: NDArray[np.bool_] | None) -> Float32:
    scores = rows @ keys.swapaxes(1, 2)
    if mask is not None:
        scores[:, ~mask] = -np.inf
    scores -= scores.max(axis=2, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=2, keepdims=True)
    return np.asarray(scores @ held, np.float32)


def _mask(case: Case) -> NDArray[np.bool_]:
    """What each folded row, query position within query head, sees: (rows, tokens)."""
    return np.tile(visible(case.problem, case.tokens), (case.problem.group, 1))


def _filled(case: Case, role: str) -> Float32:
    shape = (case.problem.kv_heads, case.tokens, case.problem.head_dim)
    array = huge_zeros(4 * math.prod(shape)).view(np.float32).reshape(shape)
    for part in case.parts():
        array[part.head, part.start : part.stop] = values(case, role, part)
    return array

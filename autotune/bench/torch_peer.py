"""PyTorch: scaled dot-product attention with the query heads of a group folded into rows, and linear layers.

Folding lets it read each key/value head once for all its query heads.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.cpu.memory import huge_zeros
from ...kernels.reference import visible
from .case import Case, Part
from .contestant import Absent, Contestant, Entry, Unsupported
from .inputs import small_operand, values

WAKE_ROWS = 64


class Torch(Contestant):
    def __init__(self) -> None:
        self._torch: Any = None

    def open(self, threads: int) -> str:
        try:
            self._torch = importlib.import_module("torch")
        except (ImportError, OSError) as error:
            raise Absent(str(error)) from None
        self._torch.set_num_threads(threads)
        self._torch.set_grad_enabled(False)
        return str(self._torch.__version__)

    def enter(self, case: Case, candidate: str) -> Iterator[Entry]:
        if any(case.format(role) != "fp16" for role in case.problem.roles):
            raise Unsupported("PyTorch attends to no quantised keys and values; its bfloat16 row is under fp16")
        for dtype in (self._torch.bfloat16, self._torch.float16):
            yield self._entry(case, dtype)

    def _entry(self, case: Case, dtype: Any) -> Entry:
        torch, problem = self._torch, case.problem
        operands = {role: self._filled(case, role, dtype) for role in problem.roles}
        x = torch.from_numpy(small_operand(case)).to(dtype)
        out: dict[str, Any] = {}
        few = torch.ones((1, problem.kv_heads, WAKE_ROWS, problem.head_dim), dtype=dtype)
        if problem.operator == "gemv":
            matrix, vectors, linear = operands["k"][0], x[0], torch.nn.functional.linear

            def run() -> None:
                out["y"] = linear(vectors, matrix)

            def wake() -> None:
                linear(vectors, few[0, 0])
        else:
            attention = torch.nn.functional.scaled_dot_product_attention
            rows = x.reshape(1, problem.kv_heads, problem.rows, problem.head_dim)
            keys, held = operands["k"][None], operands["v"][None]
            mask = None
            if problem.query_rows > 1:
                seen = np.tile(visible(problem, case.tokens), (problem.group, 1))
                mask = torch.from_numpy(np.where(seen, 0, -np.inf).astype(np.float32)).to(dtype)

            def run() -> None:
                out["y"] = attention(rows, keys, held, attn_mask=mask)

            def wake() -> None:
                attention(rows, few, few)

        def result() -> NDArray[np.floating]:
            y: NDArray[np.floating] = out["y"].float().numpy()
            return y[None] if problem.operator == "gemv" else y.reshape(tuple(x.shape))

        def stored(role: str, part: Part) -> NDArray[np.float64]:
            held: NDArray[np.float64] = operands[role][part.head, part.start : part.stop].double().numpy()
            return held

        regions = tuple((each.data_ptr(), each.nbytes) for each in operands.values())
        return Entry(run, wake, regions, str(dtype).removeprefix("torch."), result, stored, operands)

    def _filled(self, case: Case, role: str, dtype: Any) -> Any:
        shape = (case.problem.kv_heads, case.tokens, case.problem.head_dim)
        memory = huge_zeros(2 * math.prod(shape)).view(np.int16).reshape(shape)
        tensor = self._torch.from_numpy(memory).view(dtype)
        for part in case.parts():
            tensor[part.head, part.start : part.stop] = self._torch.from_numpy(values(case, role, part)).to(dtype)
        return tensor

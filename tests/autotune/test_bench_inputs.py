"""What contestants are held to: float64 on what they stored, and ggml's blocks read back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lowbit.autotune.bench.blocks import dequantise, row_bytes
from lowbit.autotune.bench.case import PART_VALUES, Case, Part, precision_for
from lowbit.autotune.bench.inputs import small_operand, truth, values
from lowbit.kernels.errors import ProblemError
from lowbit.kernels.problem import Problem
from lowbit.kernels.quantize import Quantized, quantize
from lowbit.kernels.reference import Operands, reference

CASES = [
    Case(Problem("attend", 6, 2, 40, "w8a8"), 37),
    Case(Problem("attend", 6, 2, 40, "fp16", 5), 37),
    Case(Problem("attend", 4, 4, 64, "w8a8+w4a8", 16), 100),
    Case(Problem("gemv", 1, 1, 96, "w4a8", 3), 70),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_the_truth_is_the_reference_operator(case: Case) -> None:
    problem = case.problem
    quantized: dict[str, Quantized] = {}
    for role in problem.roles:
        rows = np.stack([values(case, role, Part(head, 0, case.tokens)) for head in range(problem.kv_heads)])
        quantized[role] = quantize(rows, problem.stored(role))

    def stored(role: str, part: Part) -> Any:
        return quantized[role].dequantize()[part.head, part.start : part.stop]

    x = small_operand(case)
    expected = reference(problem, Operands(x, quantized["k"], quantized.get("v")))
    np.testing.assert_allclose(truth(case, x, stored), expected, rtol=1e-9, atol=1e-12)


def test_a_matrix_in_several_parts_gives_the_same_rows() -> None:
    case = Case(Problem("gemv", 1, 1, 8192, "fp16", 2), 2 * PART_VALUES // 8192 + 40)
    parts = list(case.parts())
    assert len(parts) == 3
    whole = np.concatenate([values(case, "k", part) for part in parts]).astype(np.float64)

    def stored(role: str, part: Part) -> Any:
        return whole[part.start : part.stop]

    x = small_operand(case)
    np.testing.assert_allclose(truth(case, x, stored), (x[0].astype(np.float64) @ whole.T)[None], rtol=1e-9)


def test_inputs_repeat_and_differ_between_operands_heads_and_parts() -> None:
    case = CASES[0]
    some = [values(case, role, Part(head, start, 32)) for role in ("k", "v") for head in (0, 1) for start in (0, 16)]
    again = values(case, "k", Part(0, 0, 32))
    np.testing.assert_array_equal(some[0], again)
    sums = {float(each[:16].sum()) for each in some}
    assert len(sums) == len(some)


@pytest.mark.parametrize(("kind", "name"), [("q8_0", "Q8_0"), ("q4_0", "Q4_0"), ("f16", "F16"), ("bf16", "BF16")])
def test_blocks_mean_what_the_gguf_package_says(kind: str, name: str) -> None:
    gguf = pytest.importorskip("gguf")
    rows = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)
    rows[2] = 0
    rows[3, :32] *= 1e-3
    raw = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[name]).view(np.uint8).reshape(5, -1)
    assert raw.shape[1] == row_bytes(kind, 96)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name]).reshape(5, 96)
    np.testing.assert_array_equal(dequantise(kind, raw, 96).astype(np.float32), expected)
    largest = {"q8_0": 0.01, "q4_0": 0.2, "f16": 1e-3, "bf16": 1e-2}[kind]
    assert np.abs(expected - rows).max() < largest * np.abs(rows).max()


def test_block_values_by_hand() -> None:
    half = np.array([0.5], np.float16).view(np.uint8)
    eight = np.concatenate([half, np.arange(-16, 16, dtype=np.int8).view(np.uint8)])[None]
    np.testing.assert_array_equal(dequantise("q8_0", eight, 32)[0], np.arange(-16, 16) / 2)
    # The low nibbles come first: byte i holds values i and i + 16.
    four = np.concatenate([half, np.arange(16, dtype=np.uint8) | (15 - np.arange(16, dtype=np.uint8)) << 4])[None]
    np.testing.assert_array_equal(
        dequantise("q4_0", four, 32)[0], np.concatenate([np.arange(-8, 8), np.arange(7, -9, -1)]) / 2
    )


@pytest.mark.parametrize(("formats", "precision"), [("fp16", "fp16"), ("int8", "w8a8"), ("int8+int4", "w8a8+w4a8")])
def test_formats_name_precisions(formats: str, precision: str) -> None:
    assert precision_for(formats) == precision


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ProblemError, match="unknown format 'q8_0': choose from fp16, int8, int4"):
        precision_for("q8_0")

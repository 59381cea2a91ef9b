"""Inputs chosen to break kernels: finite results within the stated bounds, and the claims of docs/accuracy.md."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from kernel_check import candidate, packed_operands, problem
from lowbit.kernels.cpu.backend import CpuBackend
from lowbit.kernels.cpu.isa import ISAS, detect, runs_here
from lowbit.kernels.cpu.kernel import MOST_TOKENS
from lowbit.kernels.problem import GROUP, PRECISIONS, Problem
from lowbit.kernels.quantize import LARGEST_CODE, Quantized, quantize
from lowbit.kernels.reference import Operands, error, reference

ROOT = Path(__file__).resolve().parents[2]


def _benchmark():
    """benchmarks/accuracy.py, whose inputs and measurements these are."""
    spec = importlib.util.spec_from_file_location("accuracy", ROOT / "benchmarks" / "accuracy.py")
    module = sys.modules["accuracy"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


accuracy = _benchmark()
FORMATS = tuple(accuracy.PRECISIONS)
SETS = list(dict.fromkeys([detect().name, *(name for name in ("avx2", "generic") if runs_here(ISAS[name]))]))
LONG = {name for name in accuracy.CASES if name.startswith("100,000")}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("isa", SETS)
def test_results_are_finite_and_within_the_bounds(monkeypatch, isa, format):
    monkeypatch.setenv("LOWBIT_ISA", isa)
    for name in accuracy.CASES:
        if name in LONG and isa != SETS[0]:
            continue
        known = accuracy.truth(name, format)
        for pipeline in accuracy.pipelines(format):
            found = accuracy.measure(name, format, pipeline)
            assert found
            for chosen, each in found.items():
                what = f"{name}, {format}, {isa}: {chosen}"
                assert np.isfinite(each.result).all(), what
                assert each.held <= each.allowed / 3, f"{what}: {each.held:.1e} is near {each.allowed:.1e}"
                if pipeline == "integer":
                    most = known.rounding_limit + known.pipelines["float"][1]
                    assert each.added <= most, f"{what}: {each.added:.1e} exceeds {most:.1e}"


@pytest.mark.parametrize("format", FORMATS)
def test_stored_values_are_within_half_a_step(format):
    """Half a step of the group's largest value; where fp16 is subnormal, what its absolute rounding costs."""
    precision = next(p for p in PRECISIONS.values() if p.format == format)
    for name in accuracy.CASES:
        if name in LONG:
            continue
        inputs = accuracy.inputs_of(name, format)
        for values in (inputs.k, inputs.v):
            if values is None:
                continue
            values = values.astype(np.float64)
            lost = np.abs(quantize(values, precision).dequantize() - values)
            if format == "fp16":
                allowed = np.maximum(np.abs(values) * 2.0**-11, 2.0**-25)
            else:
                largest, heads, tokens = LARGEST_CODE[format], *values.shape[:2]
                peaks = np.abs(values).reshape(heads, tokens, -1, GROUP).max(axis=3)
                step = peaks / (2 * largest) * (1 + 2.0**-11) + (largest + 0.5) * 2.0**-25
                allowed = np.repeat(step, GROUP, axis=2)
            assert (lost <= allowed * (1 + 1e-6)).all(), name


STORED_EXACTLY = {"all-zero values", "weights against the dither"}
TIES = {"scores of 10⁴, near ties", "scores of 10⁴, near ties that fp16 keeps"}
CANCELLING = {"values that cancel", "matrix: columns that cancel"}
ROUNDED_BADLY = {
    "weights against the dither",
    "scores of 10⁴, near ties that fp16 keeps",
    "matrix: one huge activation",
}


@pytest.fixture(scope="module")
def costs():
    """What storing costs and pipelines add: {(case, format): (storing, float, integer or None)}."""
    return {
        (name, format): (
            accuracy.truth(name, format).storage,
            *(accuracy.adds(name, format, each) for each in reversed(accuracy.pipelines(format))),
        )
        for name in accuracy.CASES
        for format in FORMATS
    }


def test_float_kernels_add_less_than_storing(costs):
    for (name, format), (storing, added, *_) in costs.items():
        if name in STORED_EXACTLY or (format == "fp16" and name == "scores of 10⁴, near ties that fp16 keeps"):
            continue
        assert added <= storing * (1 if format == "fp16" else 0.2), (name, format)


def test_float_kernels_are_exact_to_float32(costs):
    for (name, format), (_, added, *_) in costs.items():
        assert added <= (5e-3 if name in TIES else 2e-3 if name in CANCELLING else 2e-5), (name, format)


def test_integer_kernels_add_less_than_int4_storing_and_four_times_that_of_int8(costs):
    for (name, format), (storing, _, *integer) in costs.items():
        if integer and name not in STORED_EXACTLY | ROUNDED_BADLY:
            assert integer[0] <= storing * {"int8": 4, "int4": 0.5}[format], (name, format)


def test_the_inputs_that_integer_kernels_round_badly_do_exist(costs):
    for name in ROUNDED_BADLY:
        storing, _, integer = costs[name, "int8"]
        assert 4 * storing < integer < 1


def test_the_document_has_a_row_for_each_input():
    text = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    rows = [
        line.split("|")[1].strip() for line in text.splitlines() if line.count("|") == accuracy.HEAD.count("|") // 2
    ]
    assert rows[2:] == list(accuracy.CASES)


@pytest.mark.parametrize("pipeline", ["integer", "float"])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_groups_of_zeros_give_zeros(format, pipeline):
    """Values of zero, and zero rows of a matrix, give exact zeros, whatever offset the codes have."""
    for found in accuracy.measure("all-zero values", format, pipeline).values():
        assert not found.result.any()
    for found in accuracy.measure("matrix: zero rows", format, pipeline).values():
        assert not found.result[:, :, 1::2].any()
        assert found.result[:, :, ::2].all()


@pytest.mark.parametrize("pipeline", ["integer", "float"])
def test_tokens_that_are_not_seen_weigh_next_to_nothing(pipeline):
    """The one token in the window has values of zero, all others the largest."""
    p = problem("attend h2/1 d64 q1 w8a8 window 1")
    rng = np.random.default_rng(7)
    k, v = rng.standard_normal((2, 1, 70, 64)).astype(np.float32)
    v *= 1e6
    v[:, -1] = 0
    operands = Operands(rng.standard_normal((2, 1, 64), np.float32), *(quantize(x, p.stored("k")) for x in (k, v)))
    chosen = candidate(p, *accuracy.LAYOUTS["int8"][0], pipeline=pipeline)
    result = CpuBackend().compile(p, chosen)(*packed_operands(p, chosen, operands))
    assert np.abs(result).max() <= 70 * 2.0**-100 * np.abs(v).max()


@pytest.mark.parametrize(
    ("operator", "precision", "splits"), [("attend", "w8a8", 3), ("attend", "fp16", 1), ("sv", "w8a8", 1)]
)
def test_sums_over_a_million_tokens_do_not_drift(operator, precision, splits):
    """Adding equal numbers in float32 rounds the same way each time: sums start anew every `MOST_TOKENS`."""
    tokens = 1_000_000
    p = Problem(operator, 1, 1, 8, precision)
    rng = np.random.default_rng(3)
    one = np.abs(rng.standard_normal((1, 1, 8), np.float32)) + 0.5
    stored = quantize(one, p.stored("v"))
    many = Quantized(stored.format, np.repeat(stored.codes, tokens, axis=1), np.repeat(stored.scales, tokens, axis=1))
    x = np.zeros((1, 1, 8), np.float32) if operator == "attend" else np.full((1, 1, tokens), 1e-6, np.float32)
    operands = Operands(x, many if operator == "attend" else None, many)
    layouts = accuracy.LAYOUTS["fp16"][0] if precision == "fp16" else accuracy.LAYOUTS["int8"][1]
    chosen = candidate(p, *layouts, pipeline="float", block=256, splits=splits, threads=2)
    result = CpuBackend().compile(p, chosen)(*packed_operands(p, chosen, operands))
    assert error(result, reference(p, operands)) <= 2e-5


def test_a_long_context_leaves_the_kernel_as_it_was():
    """More splits for one call change neither the candidate nor the results of a short one."""
    p = problem("attend h1/1 d8 q1 w8a8")
    chosen = candidate(p, *accuracy.LAYOUTS["int8"][1], splits=2)
    kernel = CpuBackend().compile(p, chosen)
    rng = np.random.default_rng(3)
    k, v = rng.standard_normal((2, 1, 2 * MOST_TOKENS + 1, 8)).astype(np.float32)
    operands = Operands(rng.standard_normal((1, 1, 8), np.float32), *(quantize(x, p.stored("k")) for x in (k, v)))
    arguments = packed_operands(p, chosen, operands)
    before = kernel(*arguments, tokens=100)
    long = kernel(*arguments)
    assert kernel.candidate == chosen
    np.testing.assert_array_equal(kernel(*arguments, tokens=100), before)
    np.testing.assert_allclose(kernel(*arguments, tokens=2 * MOST_TOKENS), long, rtol=0.1, atol=1e-3)
    assert error(long, reference(p, operands, "integer")) < 1e-3

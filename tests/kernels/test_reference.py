"""The reference against plain loops, and a tolerance that accepts rounding and nothing else."""

import math

import numpy as np
import pytest
from kernel_check import problem
from lowbit.kernels.problem import GROUP
from lowbit.kernels.quantize import Quantized
from lowbit.kernels.reference import Operands, causal_limit, error, make_operands, reference, tolerance

PRECISIONS = ("fp16", "w8a8", "w4a8")


def value(quantized, head, t, d):
    code = float(quantized.codes[head, t, d])
    return code if quantized.format == "fp16" else code * float(quantized.scales[head, t, d // 32])


def bits_reversed(i):
    return sum((i >> bit & 1) << (4 - bit) for bit in range(5))


def naive(p, operands, pipeline):
    """Each operator with nothing but loops over heads, rows, tokens and channels."""
    x = operands.x.astype(np.float64)
    integer = pipeline == "integer"
    if integer and p.operator != "sv":
        for head, row, group in np.ndindex(p.heads, p.query_rows, -(-p.head_dim // 32)):
            channels = range(32 * group, min(32 * group + 32, p.head_dim))
            step = max(abs(x[head, row, d]) for d in channels) / 127
            for d in channels:
                x[head, row, d] = math.floor(x[head, row, d] / step + 0.5) * step if step else 0.0
    packed = operands.k or operands.v
    tokens = packed.codes.shape[1]
    out = np.zeros((p.heads, p.query_rows, tokens if p.operator == "qk" else p.head_dim))
    for head, row in np.ndindex(p.heads, p.query_rows):
        kv = head // (p.heads // p.kv_heads)
        if operands.k is not None:
            s = [sum(x[head, row, d] * value(operands.k, kv, t, d) for d in range(p.head_dim)) for t in range(tokens)]
        if p.operator == "qk":
            out[head, row] = s
            continue
        if p.operator == "sv":
            weights = list(x[head, row])
        else:
            seen = max(tokens - p.query_rows + row + 1, 1)
            powers = [math.exp(s[t] / math.sqrt(p.head_dim)) for t in range(seen)]
            weights = [power / sum(powers) for power in powers] + [0.0] * (tokens - seen)
        for d in range(p.head_dim):
            products = [
                w * (float(operands.v.scales[kv, t, d // 32]) if p.precision != "fp16" else 1.0)
                for t, w in enumerate(weights)
            ]
            if integer:
                for start in range(0, tokens, 32):
                    step = max(products[start : start + 32]) / 127
                    for t in range(start, min(start + 32, tokens)):
                        threshold = (bits_reversed(t % 32) + 0.5) / 32
                        products[t] = math.floor(products[t] / step + threshold) * step if step else 0.0
            out[head, row, d] = sum(products[t] * float(operands.v.codes[kv, t, d]) for t in range(tokens))
    return out


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        ("attend h2/1 d8 q1", 5),
        ("attend h4/2 d40 q3", 35),
        ("attend h1/1 d16 q5", 3),
        ("qk h3/1 d40 q2", 7),
        ("sv h2/2 d40 q2", 37),
    ],
)
def test_reference_is_the_plain_loop(precision, shape, tokens):
    p = problem(f"{shape} {precision}")
    operands = make_operands(p, tokens, seed=1)
    for pipeline in ("float",) if precision == "fp16" else ("float", "integer"):
        np.testing.assert_allclose(
            reference(p, operands, pipeline), naive(p, operands, pipeline), rtol=1e-9, atol=1e-12
        )


def test_query_rows_are_the_last_positions():
    assert causal_limit(10, 4).tolist() == [7, 8, 9, 10]
    assert causal_limit(2, 4).tolist() == [1, 1, 1, 2]


def test_integer_pipeline_keeps_the_sum_of_many_small_weights():
    """One heavy token and 31 of 0.3 steps: rounding to nearest would lose the 31, a third of the output."""
    p = problem("sv h1/1 d32 q1 w8a8")
    codes = np.ones((1, 32, 32), np.int8)
    v = Quantized("int8", codes, np.ones((1, 32, 1), np.float16))
    x = np.full((1, 1, 32), 0.3 / 127, np.float32)
    x[0, 0, 0] = 1.0
    exact, rounded = (reference(p, Operands(x, None, v), pipeline)[0, 0, 0] for pipeline in ("float", "integer"))
    assert abs(rounded - exact) <= 1.5 / 127


CASES = [
    (f"{operator} {shape} {precision}", tokens)
    for operator in ("attend", "qk", "sv")
    for shape in ("h8/2 d64 q1", "h4/4 d128 q1", "h6/2 d80 q5", "h2/1 d256 q16")
    for precision in PRECISIONS
    for tokens in (2, 33, 300)
] + [(f"{operator} h2/1 d64 q1 {precision}", 3000) for operator in ("attend", "sv") for precision in PRECISIONS]


def pipelines(p):
    return ("float",) if p.precision == "fp16" else ("float", "integer")


def swapped(quantized, a, b):
    order = np.arange(quantized.codes.shape[1])
    order[[a, b]] = b, a
    return Quantized(quantized.format, quantized.codes[:, order], quantized.scales[:, order])


def pairs(p, operands, tokens):
    """Tokens to exchange: the first two and two far apart; in long contexts one that counts, and its neighbour."""
    if tokens < 1000:
        return {(0, 1), (tokens // 2, tokens - 1 if tokens > 2 else 0)}
    weights = operands.x
    if p.operator == "attend":
        weights = np.einsum("hqd,htd->hqt", operands.x, np.repeat(operands.k.dequantize(), p.group, axis=0))
    heaviest = int(weights[0, 0].argmax())
    return {(heaviest, heaviest - 1 if heaviest else 1)}


@pytest.mark.parametrize(("key", "tokens"), CASES)
def test_wrong_results_exceed_the_tolerance(key, tokens):
    """Zeros, another head's result, two tokens of an operand exchanged, one token left out."""
    p = problem(key)
    operands = make_operands(p, tokens)
    for pipeline in pipelines(p):
        expected = reference(p, operands, pipeline)
        allowed = tolerance(p, operands, pipeline)
        assert 0 < allowed < 0.1
        wrong = {"zeros": np.zeros_like(expected), "doubled": 2 * expected, "negated": -expected}
        wrong["a head"] = expected.copy()
        wrong["a head"][-1] = expected[0]
        wrong["a row of zeros"] = expected.copy()
        wrong["a row of zeros"][-1, -1] = 0
        for name in ("k", "v"):
            codes = getattr(operands, name)
            if codes is None:
                continue
            for a, b in pairs(p, operands, tokens):
                exchanged = Operands(
                    operands.x, *(swapped(codes, a, b) if n == name else getattr(operands, n) for n in "kv")
                )
                wrong[f"{name} tokens {a} and {b}"] = reference(p, exchanged, pipeline)
        for what, result in wrong.items():
            assert error(result, expected) > allowed, (
                f"{what} pass in {pipeline}: {error(result, expected)} <= {allowed}"
            )


@pytest.mark.parametrize(("key", "tokens"), CASES[::5])
def test_right_results_in_float32_do_not(key, tokens):
    """A float32 evaluation in another order of summation, and the float64 one."""
    p = problem(key)
    operands = make_operands(p, tokens, seed=3)
    expected = reference(p, operands)
    assert error(expected, expected) == 0
    shuffled = expected.astype(np.float32)
    if p.operator != "attend":
        k = np.repeat((operands.k or operands.v).dequantize(), p.group, axis=0).astype(np.float32)
        order = np.random.default_rng(0).permutation(p.head_dim if p.operator == "qk" else tokens)
        x = operands.x[:, :, order]
        shuffled = np.zeros(expected.shape, np.float32)
        for i, r in enumerate(order):
            w = k[:, None, :, r] if p.operator == "qk" else k[:, None, r, :]
            shuffled += x[:, :, i, None] * w
    assert error(shuffled, expected) <= tolerance(p, operands)


def test_a_query_on_a_rounding_threshold_may_go_either_way():
    """Half a step above a code, float32 decides; a quarter of a step above it, there is nothing to decide."""
    p = problem("qk h1/1 d16 q1 w8a8")
    operands = make_operands(p, 40)
    k = operands.k.dequantize()
    for above, in_doubt in ((0.5, True), (0.25, False)):
        x = np.arange(-8, 8, dtype=np.float64)[None, None]
        x[0, 0, 0], x[0, 0, 9] = 127, 40 + above
        queries = Operands(x.astype(np.float32), operands.k, None)
        expected = reference(p, queries, "integer")
        other = expected + (-1 if in_doubt else 1) * k[:, None, :, 9]
        assert (error(other, expected) <= tolerance(p, queries, "integer")) == in_doubt


def test_not_a_number_and_infinity_are_infinite_errors():
    expected = np.ones((2, 3, 4))
    for bad in (np.nan, np.inf, -np.inf):
        result = np.ones((2, 3, 4), np.float32)
        result[1, 2, 3] = bad
        assert error(result, expected) == math.inf
    assert error(np.ones((2, 3, 5)), expected) == math.inf
    assert error(np.ones((2, 3, 4)) * 1.5, expected) == pytest.approx(0.5)


def test_error_is_that_of_the_worst_row():
    expected = np.ones((2, 2, 4))
    result = expected.copy()
    result[1, 0] *= 1.25
    assert error(result, expected) == pytest.approx(0.25)
    assert error(np.zeros((2, 2, 4)), np.zeros((2, 2, 4))) == 0


def test_first_tokens_of_operands():
    p = problem("sv h2/1 d32 q1 w8a8")
    operands = make_operands(p, 40)
    cut = operands.first(7)
    assert cut.x.shape == (2, 1, 7)
    assert cut.v.codes.shape == (1, 7, 32)
    q = make_operands(problem("qk h2/1 d32 q1 w8a8"), 40)
    assert q.first(7).x.shape == (2, 1, 32)
    np.testing.assert_array_equal(q.first(7).k.scales, q.k.scales[:, :7])


def test_operands_have_what_breaks_kernels():
    operands = make_operands(problem("attend h4/2 d64 q1 w4a8"), 90)
    k = operands.k.dequantize()
    assert not k[:, 0, :GROUP].any()
    assert not operands.k.scales[:, 0, 0].any()
    norms = np.abs(k).mean(axis=(0, 1))
    assert norms.max() > 3 * np.median(norms)
    again = make_operands(problem("attend h4/2 d64 q1 w4a8"), 90)
    np.testing.assert_array_equal(operands.k.codes, again.k.codes)

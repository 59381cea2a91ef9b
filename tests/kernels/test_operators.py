"""Compiled operators against the float64 reference, over shapes, layouts, pipelines and schedules that are awkward."""

import itertools
import random

import numpy as np
import pytest
from kernel_check import agree, candidate, check, packed_operands, problem
from lowbit.kernels.backend import backend_named
from lowbit.kernels.candidate import Candidate, Schedule
from lowbit.kernels.cpu.backend import CpuBackend
from lowbit.kernels.cpu.space import layouts, rejection
from lowbit.kernels.errors import CompileError, LayoutError, ProblemError, QuantizationError
from lowbit.kernels.packed import pack
from lowbit.kernels.packing import packings
from lowbit.kernels.problem import Problem
from lowbit.kernels.quantize import quantize
from lowbit.kernels.reference import Operands, make_operands, reference, softmax_scale

HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 3, 4, 7)
QUERY_ROWS = (1, 2, 5, 16)
TOKENS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257)
CASES = 16


def cycle(choose, values):
    """Each value once in a random order, then again in another."""
    while True:
        yield from choose.sample(values, len(values))


def cases(operator, precision):
    """Problems, candidates and context lengths: each value of each axis occurs, in random company."""
    choose = random.Random(f"{operator} {precision}")
    axes = [cycle(choose, axis) for axis in (HEAD_DIMS, GROUPS, QUERY_ROWS, TOKENS, (1, 2, 3), (1, 2))]
    isa = CpuBackend().isa()
    pipelines = ("float",) if precision == "fp16" else ("integer", "float")
    packing = cycle(choose, packings({"fp16": "fp16", "w8a8": "int8", "w4a8": "int4"}[precision]))
    for pipeline in itertools.islice(itertools.cycle(pipelines), CASES):
        head_dim, group, query_rows, tokens, kv_heads, threads = map(next, axes)
        p = Problem(operator, group * kv_heads, kv_heads, head_dim, precision, query_rows)
        pairs = [pair for pair in layouts(*[next(packing)] * 2) if operator != "qk" or pair[0] == pair[1]]
        while True:
            k, v = choose.choice(pairs)
            rows, registers, block = choose.choice((1, 2, 3, 4)), choose.choice((1, 2, 4)), choose.choice((32, 64, 256))
            schedule = Schedule(rows, registers, block, choose.choice((1, 2, 5)), choose.choice((0, 8)), threads)
            chosen = Candidate(k if operator != "sv" else None, v if operator != "qk" else None, pipeline, schedule)
            if rejection(p, chosen, isa) is None:
                break
        yield p, chosen, tokens


@pytest.mark.parametrize("precision", ["fp16", "w8a8", "w4a8"])
@pytest.mark.parametrize("operator", ["attend", "qk", "sv"])
def test_a_covering_sample_of_problems_and_candidates(operator, precision):
    for number, (p, chosen, tokens) in enumerate(cases(operator, precision)):
        check(p, chosen, tokens, seed=number)


def test_the_sample_covers_each_value_of_each_axis():
    sample = [case for o in ("attend", "qk", "sv") for p in ("fp16", "w8a8", "w4a8") for case in cases(o, p)]
    for seen, axis in (
        ([p.head_dim for p, _, _ in sample], HEAD_DIMS),
        ([p.group for p, _, _ in sample], GROUPS),
        ([p.query_rows for p, _, _ in sample], QUERY_ROWS),
        ([tokens for _, _, tokens in sample], TOKENS),
        ([c.schedule.threads for _, c, _ in sample], (1, 2)),
    ):
        assert set(seen) == set(axis)
    assert {bool(c.schedule.prefetch) for _, c, _ in sample} == {False, True}
    assert max(c.schedule.splits for _, c, _ in sample) > 1


LAYOUTS = {
    "w8a8": ("T/16 D/4 t16 d4 | int8/bytes/offset", "T/32 D/16 t32/4 d16 t4 | int8/bytes/signed"),
    "w4a8": ("T D | int4/planes/offset", "T/32 D t32 | int4/lane_interleaved/signed"),
}


@pytest.mark.parametrize("precision", ["w8a8", "w4a8"])
@pytest.mark.parametrize("tokens", [1, 31, 33, 129])
def test_splits_blocks_and_threads_change_nothing(precision, tokens):
    """More splits than blocks of tokens, more threads than tasks, blocks longer than the context: the same numbers."""
    p = problem(f"attend h6/2 d128 q2 {precision}")
    k, v = LAYOUTS[precision]
    results = [
        check(p, candidate(p, k, v, rows=3, block=block, splits=splits, threads=threads), tokens)
        for block, splits, threads in ((32, 1, 1), (32, 9, 2), (256, 3, 3), (64, 2, 4))
    ]
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("key", ["attend h7/1 d80 q5 w8a8", "qk h7/1 d80 q5 w8a8", "sv h7/1 d80 q5 w8a8"])
def test_rows_that_do_not_fill_the_last_pass(key):
    p = problem(key)
    for rows in (2, 3, 4):
        check(p, candidate(p, *LAYOUTS["w8a8"], rows=rows, registers=1, block=32), 70)


@pytest.mark.parametrize("key", ["attend h4/2 d96 q3 w4a8", "qk h4/2 d96 q3 w4a8", "sv h4/2 d96 q3 w4a8"])
@pytest.mark.parametrize("pipeline", ["integer", "float"])
def test_fewer_tokens_than_are_stored(key, pipeline):
    """A context may end inside what was packed, and storage may have room to spare: later tokens are not looked at."""
    p = problem(key)
    order = "T/32 D/16 t32 d16 | int4/contiguous_permuted/signed"
    chosen = candidate(p, order, pipeline=pipeline, rows=2, splits=2)
    kernel = CpuBackend().compile(p, chosen)
    operands = make_operands(p, 150)
    x, *packed = packed_operands(p, chosen, operands, capacity=500)
    assert {each.capacity for each in packed} == {512}
    for tokens in (150, 149, 97, 32, 1):
        first = operands.first(tokens)
        agree(p, first, pipeline, kernel(first.x, *packed, tokens=tokens), f"{tokens} tokens")
    assert kernel(x, *packed).shape == kernel(x, *packed, tokens=150).shape


def test_tokens_appended_in_place_are_seen():
    """Storage packed with room to spare: more tokens than were packed are zeros, which scores of 0 show."""
    p = problem("qk h2/1 d64 q1 w8a8")
    chosen = candidate(p, "T/16 D/4 t16 d4 | int8/bytes/offset")
    kernel = CpuBackend().compile(p, chosen)
    operands = make_operands(p, 20)
    scores = kernel(*packed_operands(p, chosen, operands, capacity=64), tokens=50)
    agree(p, operands, "integer", scores[:, :, :20])
    np.testing.assert_array_equal(scores[:, :, 20:], 0)


def test_results_go_where_they_are_wanted():
    p = problem("attend h3/1 d64 q2 w8a8")
    chosen = candidate(p, *LAYOUTS["w8a8"])
    kernel = CpuBackend().compile(p, chosen)
    operands = make_operands(p, 40)
    arguments = packed_operands(p, chosen, operands)
    out = np.full((3, 2, 64), np.nan, np.float32)
    assert kernel(*arguments, out=out) is out
    agree(p, operands, "integer", out)
    np.testing.assert_array_equal(kernel(*arguments), out)
    strided = arguments[0].transpose(1, 0, 2).copy().transpose(1, 0, 2)
    assert not strided.flags.c_contiguous
    np.testing.assert_array_equal(kernel(strided, *arguments[1:]), out)
    for bad in (np.zeros((3, 2, 63), np.float32), np.zeros((3, 2, 64)), np.zeros((3, 4, 64), np.float32)[:, ::2]):
        with pytest.raises(
            ProblemError, match=r"out must be a writable, contiguous float32 array of shape \(3, 2, 64\)"
        ):
            kernel(*arguments, out=bad)


def test_kernel_packs_what_it_reads():
    p = problem("attend h4/2 d80 q1 w8a8")
    chosen = candidate(p, *LAYOUTS["w8a8"])
    kernel = CpuBackend().compile(p, chosen)
    rng = np.random.default_rng(5)
    k, v = rng.standard_normal((2, 2, 45, 80)).astype(np.float32)
    q = rng.standard_normal((4, 1, 80)).astype(np.float32)
    packed = kernel.pack("k", k), kernel.pack("v", v, capacity=100)
    assert (packed[0].layout, packed[1].layout) == (chosen.k, chosen.v)
    assert (packed[0].capacity, packed[1].capacity) == (64, 128)
    operands = Operands(q, *(quantize(x, p.stored("k")) for x in (k, v)))
    agree(p, operands, "integer", kernel(q, *packed))
    with pytest.raises(QuantizationError, match=r"v\[head 1, token 2, channel 3\]"):
        v[1, 2, 3] = np.nan
        kernel.pack("v", v)


@pytest.mark.parametrize("pipeline", ["integer", "float"])
@pytest.mark.parametrize("splits", [1, 3])
def test_huge_scores_pick_one_token(pipeline, splits):
    """Scores of ±10⁵: the softmax is one-hot, with no overflow, wherever the winner lies."""
    p = problem("attend h2/1 d64 q1 w8a8")
    rng = np.random.default_rng(1)
    v = quantize(rng.standard_normal((1, 100, 64)).astype(np.float32), p.stored("k"))
    chosen = candidate(p, *LAYOUTS["w8a8"], pipeline=pipeline, block=32, splits=splits)
    kernel = CpuBackend().compile(p, chosen)
    for winner in (0, 31, 32, 99):
        keys = -100 * np.ones((1, 100, 64), np.float32)
        keys[0, winner] *= -1
        operands = Operands(np.full((2, 1, 64), 100, np.float32), quantize(keys, p.stored("k")), v)
        result = kernel(*packed_operands(p, chosen, operands))
        agree(p, operands, pipeline, result)
        step = float(v.scales.max())
        np.testing.assert_allclose(result, np.repeat(v.dequantize()[:, winner : winner + 1], 2, axis=0), atol=step)


@pytest.mark.parametrize("pipeline", ["integer", "float"])
def test_equal_scores_average(pipeline):
    """A query of zeros sees all tokens alike; so do keys of zeros."""
    p = problem("attend h2/1 d128 q1 w4a8")
    chosen = candidate(p, *LAYOUTS["w4a8"], pipeline=pipeline, block=32, splits=2)
    kernel = CpuBackend().compile(p, chosen)
    operands = make_operands(p, 77)
    for other in (Operands(0 * operands.x, operands.k, operands.v),):
        result = kernel(*packed_operands(p, chosen, other))
        agree(p, other, pipeline, result)
        if pipeline == "float":
            np.testing.assert_allclose(result[0, 0], operands.v.dequantize()[0].mean(axis=0), atol=1e-6)


def test_one_token_is_its_own_answer():
    p = problem("attend h6/2 d64 q1 w8a8")
    chosen = candidate(p, *LAYOUTS["w8a8"], pipeline="float", splits=4)
    operands = make_operands(p, 1)
    result = CpuBackend().compile(p, chosen)(*packed_operands(p, chosen, operands))
    np.testing.assert_allclose(result[:, 0], np.repeat(operands.v.dequantize()[:, 0], 3, axis=0), rtol=1e-6, atol=1e-7)


def test_query_rows_see_no_later_token():
    """Changing the last token changes the last query row and no other."""
    p = problem("attend h2/1 d64 q4 w8a8")
    chosen = candidate(p, *LAYOUTS["w8a8"], rows=3)
    kernel = CpuBackend().compile(p, chosen)
    operands = make_operands(p, 34)
    x, k, v = packed_operands(p, chosen, operands)
    before = kernel(x, k, v)
    operands.k.codes[:, -1] *= -1
    operands.v.codes[:, -1] *= -1
    _, k, v = packed_operands(p, chosen, operands)
    after = kernel(x, k, v)
    changed = (before != after).any(axis=(0, 2))
    assert changed.tolist() == [False, False, False, True]


def test_attention_is_scores_softmax_and_weighted_values():
    """The fused operator and the two plain ones agree with each other, on the same packed operands."""
    fused, qk, sv = (problem(f"{operator} h4/2 d128 q1 w8a8") for operator in ("attend", "qk", "sv"))
    k, v = LAYOUTS["w8a8"]
    operands = make_operands(fused, 50)
    kernels = [CpuBackend().compile(p, candidate(p, k, v, "float", block=64)) for p in (fused, qk, sv)]
    x, keys, values = packed_operands(fused, kernels[0].candidate, operands)
    scores = kernels[1](x, keys).astype(np.float64) * softmax_scale(128)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(kernels[2](weights, values), kernels[0](x, keys, values), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def attention():
    p = problem("attend h4/2 d64 q1 w8a8")
    chosen = candidate(p, *LAYOUTS["w8a8"])
    return CpuBackend().compile(p, chosen), packed_operands(p, chosen, make_operands(p, 40))


def test_wrong_operands_are_refused(attention):
    kernel, (x, k, v) = attention
    for bad in (x[:3], x[:, :, :63], x[0], np.zeros((4, 2, 64), np.float32)):
        with pytest.raises(ProblemError, match=r"x must have shape \(4, 1, 64\), not"):
            kernel(bad, k, v)
    with pytest.raises(ProblemError, match="attend takes 3 operands, not 2"):
        kernel(x, k)
    with pytest.raises(LayoutError, match=r"operand v is packed as T/16 D/4 t16 d4 .*, the kernel reads T/32"):
        kernel(x, k, k)
    with pytest.raises(LayoutError, match="operand k must be a PackedTensor, not ndarray"):
        kernel(x, x, v)
    with pytest.raises(LayoutError, match="attend has no packed operand 'q'"):
        kernel.pack("q", np.zeros((2, 4, 64), np.float32))
    other = make_operands(problem("attend h4/4 d64 q1 w8a8"), 40)
    with pytest.raises(ProblemError, match="operand k has 4 heads of 64, the problem has 2 of 64"):
        kernel(x, pack(other.k, k.layout), v)
    other = make_operands(problem("attend h4/2 d96 q1 w8a8"), 40)
    with pytest.raises(ProblemError, match="operand v has 2 heads of 96"):
        kernel(x, k, pack(other.v, v.layout))


def test_queries_that_are_not_finite_are_named(attention):
    kernel, (x, k, v) = attention
    for value in (np.nan, np.inf):
        bad = x.copy()
        bad[2, 0, 7] = value
        with pytest.raises(QuantizationError, match=r"x\[head 2, row 0, column 7\] = (nan|inf) is not finite"):
            kernel(bad, k, v)


def test_results_only_go_where_they_may(attention):
    kernel, (x, k, v) = attention
    locked = np.zeros((4, 1, 64), np.float32)
    locked.flags.writeable = False
    for out in (locked, [1.0], np.zeros((4, 1, 64)), np.zeros((4, 64, 1), np.float32).transpose(0, 2, 1)[:, :, ::-1]):
        with pytest.raises(ProblemError, match="out must be a writable, contiguous float32 array"):
            kernel(x, k, v, out=out)
    assert not locked.any()


def test_tokens_beyond_the_storage_are_refused(attention):
    kernel, (x, k, v) = attention
    for tokens in (0, -1):
        with pytest.raises(ProblemError, match="tokens must be"):
            kernel(x, k, v, tokens=tokens)
    with pytest.raises(ProblemError, match="65 tokens asked of an operand that holds 64"):
        kernel(x, k, v, tokens=65)
    longer = pack(make_operands(kernel.problem, 90).k, k.layout)
    with pytest.raises(ProblemError, match="90 tokens asked of an operand that holds 64"):
        kernel(x, longer, v)
    assert kernel(x, longer, v, tokens=64).shape == x.shape


def test_integers_of_halves_are_refused():
    p = problem("qk h4/2 d64 q1 fp16")
    with pytest.raises(CompileError, match="fp16 has no integer codes to contract"):
        CpuBackend().compile(p, candidate(p, "T D | fp16"))


def test_a_layout_of_another_format_is_refused():
    p = problem("qk h4/2 d64 q1 w8a8")
    for name in ("T D | fp16", "T D | int4/planes/signed"):
        with pytest.raises(CompileError, match=r"holds (fp16|int4), w8a8 stores int8"):
            CpuBackend().compile(p, candidate(p, name, pipeline="float"))


def test_a_candidate_for_another_operator_is_refused():
    attend, qk = problem("attend h4/2 d64 q1 w8a8"), problem("qk h4/2 d64 q1 w8a8")
    for p, other in ((attend, qk), (qk, attend)):
        with pytest.raises(CompileError, match="needs other operands than"):
            CpuBackend().compile(p, candidate(other, *LAYOUTS["w8a8"]))


def test_reference_shapes_are_the_kernels():
    for key, shape in (
        ("attend h4/2 d64 q3 fp16", (4, 3, 64)),
        ("qk h4/2 d64 q3 fp16", (4, 3, 20)),
        ("sv h4/2 d64 q3 fp16", (4, 3, 64)),
    ):
        p = problem(key)
        chosen = backend_named("cpu").baseline(p, 1)
        operands = make_operands(p, 20)
        assert reference(p, operands).shape == shape
        assert check(p, chosen, 20).shape == shape


@pytest.mark.parametrize("window", [1, 31, 32, 33, 64, 100, 1000])
@pytest.mark.parametrize("precision, pipeline", [("w8a8", "integer"), ("w8a8", "float"), ("fp16", "float")])
def test_windows_hide_all_but_the_latest_tokens(window, precision, pipeline):
    shape = f"attend h6/2 d128 q3 {precision} window {window}"
    layouts = LAYOUTS.get(precision, ("T/16 D t16 | fp16", "T/16 D t16 | fp16"))
    for tokens, splits in ((1, 1), (33, 2), (129, 1), (129, 3)):
        check(problem(shape), candidate(problem(shape), *layouts, pipeline=pipeline, block=32, splits=splits), tokens)


@pytest.mark.parametrize("softcap", [1e-3, 0.5, 20.0, 5000.0, 1e6, 1e10, 1e30])
@pytest.mark.parametrize("pipeline", ["integer", "float"])
def test_soft_caps_bound_the_scores(softcap, pipeline):
    for shape in (f"attend h6/2 d64 q1 w8a8 softcap {softcap}", f"attend h6/2 d64 q4 w8a8 window 40 softcap {softcap}"):
        p = problem(shape)
        check(p, candidate(p, *LAYOUTS["w8a8"], pipeline=pipeline, block=64, splits=2), 130)


@pytest.mark.parametrize("precision", ["w8a8+w4a8", "w4a8+w8a8", "fp16+w8a8", "w4a8+fp16"])
@pytest.mark.parametrize("pipeline", ["integer", "float"])
def test_keys_and_values_of_different_formats(precision, pipeline):
    p = problem(f"attend h6/2 d128 q2 {precision}")
    names = {"fp16": "fp16", "int8": "int8/bytes/{}", "int4": "int4/contiguous_permuted/{}"}
    k = "T/16 D/8 t16 d8 | " + names[p.stored("k").format].format("offset")
    v = "T/32 D/16 t32/8 d16 t8 | " + names[p.stored("v").format].format("signed")
    for tokens in (1, 31, 65):
        check(p, candidate(p, k, v, pipeline=pipeline, splits=2), tokens)


@pytest.mark.parametrize("precision", ["fp16", "w8a8"])
@pytest.mark.parametrize("head_dim", [8, 16, 32])
def test_hidden_tokens_weigh_nothing_at_all(head_dim, precision):
    """One visible token with values of zero beside stored tokens that are not: the result is zero, not almost."""
    p = problem(f"attend h2/2 d{head_dim} q1 {precision}")
    name = "fp16" if precision == "fp16" else "int8/bytes/signed"
    chosen = candidate(p, f"T/32 D t32 | {name}", f"T/32 D t32 | {name}", pipeline="float")
    operands = make_operands(p, 64)
    kernel = CpuBackend().compile(p, chosen)
    assert not operands.v.codes[:, 0].any()
    np.testing.assert_array_equal(kernel(*packed_operands(p, chosen, operands), tokens=1), 0)

"""A `CudaKernel`'s calls, with a program of two plain kernels in place of a candidate's."""

from dataclasses import dataclass

import numpy as np
import pytest
from kernel_check import problem
from lowbit.kernels.candidate import Candidate, Launch
from lowbit.kernels.cuda import memory, simulator
from lowbit.kernels.cuda.kernel import CudaKernel
from lowbit.kernels.cuda.program import Entry, Geometry, Parameter
from lowbit.kernels.errors import LayoutError, ProblemError, QuantizationError
from lowbit.kernels.layout import Layout
from lowbit.kernels.quantize import quantize

HEADS, HEAD_DIM = 2, 16
POINTERS = ("x", "out", "partials", "k_words")


def halves_of_dots(x, out, partials, k_words, k_stride, tokens):
    """Block (head, half of the channels): each thread's token against one half of the query."""
    lane = simulator.thread()
    head, half, _ = lane.block
    for token in range(lane.x, tokens, 32):
        total = 0.0
        for d in range(half * HEAD_DIM // 2, (half + 1) * HEAD_DIM // 2):
            value = memory.load_f16(k_words + head * k_stride + 2 * (token * HEAD_DIM + d))
            total += value * memory.load_f32(x + 4 * (head * HEAD_DIM + d))
        memory.store_f32(partials + 4 * ((head * 2 + half) * tokens + token), total)


def sum_of_halves(x, out, partials, k_words, k_stride, tokens):
    lane = simulator.thread()
    head = lane.block[0]
    for token in range(lane.x, tokens, 32):
        first = memory.load_f32(partials + 4 * (2 * head * tokens + token))
        second = memory.load_f32(partials + 4 * ((2 * head + 1) * tokens + token))
        memory.store_f32(out + 4 * (head * tokens + token), first + second)


def past_the_end(x, out, partials, k_words, k_stride, tokens):
    memory.store_f32(out + 4 * HEADS * tokens, 1.0)


def forgetful(x, out, partials, k_words, k_stride, tokens):
    memory.store_f32(out, memory.load_f32(partials))


PARAMETERS = (*(Parameter(name, "pointer") for name in POINTERS), Parameter("k_stride", "int64"))
PARAMETERS += (Parameter("tokens", "int32"),)


@dataclass(frozen=True)
class Program:
    """Scores of fp16 keys, in the form of `lowbit.kernels.cuda.program.Program`."""

    problem: object
    candidate: Candidate
    arch: str
    main: Entry
    merge: Entry | None

    def geometry(self, tokens):
        return Geometry((HEADS, 2, 1), 32, 0)

    def merge_geometry(self, tokens):
        return Geometry((HEADS, 1, 1), 32, 0)

    def workspace_bytes(self, tokens):
        return 4 * HEADS * 2 * tokens

    def constants(self, tokens):
        return {"tokens": tokens}


def kernel(main=halves_of_dots, merge=sum_of_halves):
    candidate = Candidate(Layout.parse("T D | fp16"), None, "float", Launch(1, 1, 1, 0, 1, 1))
    entries = [function and Entry(function.__name__, function, PARAMETERS) for function in (main, merge)]
    return CudaKernel(Program(problem("qk h2/2 d16 q1 fp16"), candidate, "sm_86", *entries), ())


def operands(tokens, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((HEADS, 1, HEAD_DIM), np.float32)
    keys = rng.standard_normal((HEADS, tokens, HEAD_DIM), np.float32).astype(np.float16)
    return x, keys


@pytest.mark.parametrize("tokens", [1, 31, 33, 64])
def test_calls_run_both_kernels_on_the_operands(tokens):
    x, keys = operands(tokens)
    called = kernel()
    packed = called.pack("k", keys.astype(np.float32), capacity=100)
    expected = np.einsum("hqd,htd->hqt", x.astype(np.float64), keys.astype(np.float64))
    np.testing.assert_allclose(called(x, packed), expected, rtol=1e-5, atol=1e-5)
    shorter = called(x, packed, tokens=max(tokens // 2, 1))
    np.testing.assert_allclose(shorter, expected[:, :, : max(tokens // 2, 1)], rtol=1e-5, atol=1e-5)


def test_a_bound_call_reads_and_writes_anew():
    x, keys = operands(5)
    called = kernel()
    out = np.empty((HEADS, 1, 5), np.float32)
    bound = called.bind(x, called.pack("k", keys.astype(np.float32)), out=out)
    assert bound() is out
    first = out.copy()
    x *= 2
    np.testing.assert_allclose(bound(), 2 * first, rtol=1e-6)


def test_operands_of_other_shapes_and_layouts_are_refused():
    x, keys = operands(5)
    called = kernel()
    packed = called.pack("k", keys.astype(np.float32))
    other = quantize(keys.astype(np.float32), called.problem.stored("k"))
    with pytest.raises(ProblemError, match="qk takes 2 operands, not 1"):
        called(x)
    with pytest.raises(ProblemError, match=r"x must have shape \(2, 1, 16\), not \(2, 16\)"):
        called(x[:, 0], packed)
    with pytest.raises(ProblemError, match="33 tokens asked of an operand that holds 32"):
        called(x, packed, tokens=33)
    with pytest.raises(ProblemError, match="out must be a writable"):
        called(x, packed, out=np.empty((HEADS, 1, 5), np.float64))
    with pytest.raises(LayoutError, match="must be a PackedTensor, not Quantized"):
        called(x, other)
    with pytest.raises(LayoutError, match=r"packed as T/32 D t32 \| fp16, the kernel reads T D \| fp16"):
        called(x, packed.converted(Layout.parse("T/32 D t32 | fp16")))
    with pytest.raises(LayoutError, match="qk has no packed operand 'v'"):
        called.pack("v", keys)
    x[1, 0, 3] = np.nan
    with pytest.raises(QuantizationError, match=r"x\[head 1, row 0, column 3\] = nan is not finite"):
        called(x, packed)


def test_kernels_that_leave_their_operands_are_found():
    x, keys = operands(8)
    wrong = kernel(past_the_end, None)
    with pytest.raises(memory.IllegalAccessError, match="at byte 64 of out of 64 bytes"):
        wrong(x, wrong.pack("k", keys.astype(np.float32)))


def test_what_a_kernel_reads_too_early_or_leaves_out_is_no_number():
    x, keys = operands(8)
    wrong = kernel(forgetful, None)
    out = np.zeros((HEADS, 1, 8), np.float32)
    assert np.isnan(wrong(x, wrong.pack("k", keys.astype(np.float32)), out=out)).all()

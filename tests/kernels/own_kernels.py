"""Kernels as their authors write them, right ones and wrong ones, for tests of `lowbit.kernel`."""

from __future__ import annotations

import lowbit
import numpy as np
from lowbit.kernels.plugin import load_element
from lowbit.kernels.rows import accumulate_rows, dot_rows, prepare_rows
from numba import njit

HEADS, ROWS, CHANNELS = 2, 3, 40


def make_scored(tokens, rng):
    return {
        "q": rng.standard_normal((HEADS, ROWS, CHANNELS), np.float32),
        "k": rng.standard_normal((HEADS, tokens, CHANNELS), np.float32),
        "scale": 0.5,
    }


def scores_of(q, k, scale):
    return scale * np.einsum("hrd,htd->hrt", q, k)


SCORED = {
    "operands": {"k": lowbit.Packed(("int8", "int4", "fp16"))},
    "reference": scores_of,
    "make_operands": make_scored,
    "rows": ROWS,
}


@lowbit.kernel(**SCORED)
@njit
def scored(q, k, scale, out, first, last, block):
    """Every tile feature: ranges of tokens, blocks, rows, heads."""
    rows = q.shape[1]
    buffer = np.empty((rows, block), np.float32)
    for head in range(q.shape[0]):
        small = prepare_rows(k, q[head])
        for start in range(first, last, block):
            count = min(block, last - start)
            dot_rows(k, head, start, count, small, buffer)
            for row in range(rows):
                for i in range(min(count, out.shape[2] - start)):
                    out[head, row, start + i] = scale * buffer[row, i]


@lowbit.kernel(**SCORED)
@njit
def one_by_one(q, k, scale, out):
    """No tile, no threads: elements."""
    for head in range(q.shape[0]):
        for row in range(q.shape[1]):
            for t in range(k.tokens):
                total = np.float32(0)
                for d in range(q.shape[2]):
                    total += q[head, row, d] * load_element(k, head, t, d)
                out[head, row, t] = scale * total


@lowbit.kernel(**SCORED)
@njit
def forgets_the_tail(q, k, scale, out, first, last, block):
    """Wrong where tokens fill no whole block of 32."""
    buffer = np.empty((q.shape[1], 32), np.float32)
    for head in range(q.shape[0]):
        small = prepare_rows(k, q[head])
        for start in range(first, min(last, out.shape[2] // 32 * 32), 32):
            dot_rows(k, head, start, 32, small, buffer)
            for row in range(q.shape[1]):
                for i in range(32):
                    out[head, row, start + i] = scale * buffer[row, i]


@lowbit.kernel(**{**SCORED, "tolerance": 1e-4})
@njit
def exact(q, k, scale, out):
    """Right in floats; in integers no kernel is as exact as this."""
    buffer = np.empty((q.shape[1], 32), np.float32)
    for head in range(q.shape[0]):
        small = prepare_rows(k, q[head])
        for start in range(0, k.tokens, 32):
            dot_rows(k, head, start, 32, small, buffer)
            for row in range(q.shape[1]):
                for i in range(min(32, k.tokens - start)):
                    out[head, row, start + i] = scale * buffer[row, i]


@lowbit.kernel(**SCORED)
@njit
def reads_too_far(q, k, scale, out):
    """Raises in the middle."""
    buffer = np.empty((q.shape[1], 32), np.float32)
    small = prepare_rows(k, q[0])
    for start in range(0, k.tokens + 64, 32):
        dot_rows(k, 0, start, 32, small, buffer)


@lowbit.kernel(**SCORED)
@njit
def mistyped(q, k, scale, out):
    """Does not compile."""
    dot_rows(k, 0, 0, 32, prepare_rows(k, q[0]), "scores")


@lowbit.kernel(**SCORED)
@njit
def takes_keys_for_values(q, k, scale, out):
    """Does not compile: the operand's tiles sum over channels."""
    accumulate_rows(k, 0, 0, 32, np.ones((ROWS, 32), np.float32), out[0])


def make_weighted(tokens, rng):
    weights = rng.random((ROWS, tokens), np.float32)
    return {"p": weights, "v": rng.standard_normal((tokens, CHANNELS), np.float32)}


@lowbit.kernel(
    operands={"v": lowbit.Packed(("int8", "fp16"), role="v")},
    reference=lambda p, v: p @ v,
    make_operands=make_weighted,
    tolerance=0.05,
    rows=ROWS,
)
@njit
def weighted(p, v, out):
    """Sums of values, without a head axis."""
    whole = np.zeros((p.shape[0], v.capacity), np.float32)
    whole[:, : p.shape[1]] = p
    out[:] = 0
    accumulate_rows(v, 0, 0, v.capacity, whole, out)


def make_both(tokens, rng):
    shape = (1, tokens, 64)
    return {
        "q": rng.standard_normal((1, 64), np.float32),
        "k": rng.standard_normal(shape, np.float32),
        "v": rng.standard_normal(shape, np.float32),
    }


def squares_weighted(q, k, v):
    return (q @ k[0].T) ** 2 @ v[0]


@lowbit.kernel(
    "both",
    operands={"v": lowbit.Packed(("int8", "int4"), role="v"), "k": lowbit.Packed(("int8",))},
    reference=squares_weighted,
    make_operands=make_both,
    tolerance=0.05,
)
@njit
def of_both_roles(q, k, v, out):
    """Values weighted by squared scores."""
    buffer = np.empty((1, k.capacity), np.float32)
    dot_rows(k, 0, 0, k.capacity, prepare_rows(k, q), buffer)
    out[:] = 0
    accumulate_rows(v, 0, 0, v.capacity, buffer * buffer, out)


def make_placed(tokens, rng):
    return {"head": 0, "k": rng.standard_normal((1, tokens, 64), np.float32)}


@lowbit.kernel(operands={"k": lowbit.Packed("int8")}, reference=lambda k: k[0, 0, :1], make_operands=make_placed)
@njit
def reads_a_stranger(head, k, out):
    """Dots of whichever head it is told, there or not."""
    scores = np.empty((1, 32), np.float32)
    dot_rows(k, head, 0, 32, prepare_rows(k, np.ones((1, 64), np.float32)), scores)
    out[0] = scores[0, 0]


@lowbit.kernel(operands={"k": lowbit.Packed("int8", role="v")}, reference=lambda k: k[0, :1], make_operands=make_placed)
@njit
def weighs_a_stranger(head, k, out):
    """Sums of whichever head it is told, there or not."""
    out[:] = 0
    accumulate_rows(k, head, 0, 32, np.ones((1, 32), np.float32), out)


@lowbit.kernel(
    operands={"k": lowbit.Packed("int8")}, reference=lambda k: np.nan * k[0, 0, :1], make_operands=make_placed
)
@njit
def has_no_truth(head, k, out):
    """Its reference returns NaN."""
    out[0] = 0


def make_nothing(tokens, rng):
    raise SystemExit(3)


@lowbit.kernel(operands={"k": lowbit.Packed("int8")}, reference=lambda k: k, make_operands=make_nothing)
@njit
def exits_in_make_operands(k, out):
    """Its author's code ends the process."""


def leave(k):
    raise GeneratorExit


@lowbit.kernel(operands={"k": lowbit.Packed("int8")}, reference=leave, make_operands=make_placed)
@njit
def leaves_in_reference(head, k, out):
    """Its reference raises what is no `Exception`."""

"""What storage formats and kernels cost in accuracy, on inputs chosen to break them.

    python benchmarks/accuracy.py [--isa avx2]

Prints the table of docs/accuracy.md. Errors are the largest ‖error‖ / ‖exact result‖ over (head, query row); exact is
float64 on the float32 operands before they were stored. "Storing" is how far float64 on what the codes stand for is
from that. "Float" and "integer" are what kernels of that pipeline add: how far they are from float64 on what the codes
stand for.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from lowbit.kernels.backend import backend_named
from lowbit.kernels.candidate import PIPELINES, Candidate
from lowbit.kernels.cpu.isa import ISA_VARIABLE, detect
from lowbit.kernels.cpu.space import rejection, schedules
from lowbit.kernels.layout import Layout
from lowbit.kernels.problem import GROUP, Problem
from lowbit.kernels.quantize import ACTIVATION_LARGEST_CODE, DITHER, LARGEST_CODE, LARGEST_WEIGHT, quantize
from lowbit.kernels.reference import (
    Operands,
    error,
    probabilities,
    reference,
    rounded_queries,
    scores,
    softmax_scale,
    tolerance,
    visible,
    weight_steps,
)

HEADS, KV_HEADS, HEAD_DIM, TOKENS = 4, 2, 64, 203
COLUMNS, ROWS, VECTORS = 320, 203, 3
LARGEST_HALF = 65504.0
PRECISIONS = {"fp16": "fp16", "int8": "w8a8", "int4": "w4a8"}
LAYOUTS = {
    "fp16": (("T D | fp16", "T D | fp16"), ("T/16 D t16 | fp16", "T/32 D/16 t32 d16 | fp16")),
    "int8": (
        ("T/16 D/4 t16 d4 | int8/bytes/signed", "T/32 D/16 t32/4 d16 t4 | int8/bytes/signed"),
        ("T D | int8/bytes/offset", "T/32 D t32 | int8/bytes/offset"),
    ),
    "int4": (
        (
            "T/16 D/8 t16 d8 | int4/lane_interleaved/signed",
            "T/32 D/16 t32/8 d16 t8 | int4/lane_interleaved/signed",
        ),
        ("T D | int4/planes/offset", "T/32 D t32 | int4/planes/offset"),
    ),
}
"""Layouts of keys and values that every instruction set reads: the first ones do without a horizontal sum, and suit the
matrix unit. A matrix of weights takes the keys'."""


@dataclass(frozen=True)
class Inputs:
    """Float32 operands before they are stored.

    Attributes
    ----------
    x : ndarray
        Queries (heads, query_rows, head_dim), or vectors (1, vectors, columns).
    k : ndarray
        Keys (kv_heads, tokens, head_dim), or a matrix (1, rows, columns).
    v : ndarray or None
    window, softcap
        As of `Problem`.
    """

    x: np.ndarray
    k: np.ndarray
    v: np.ndarray | None = None
    window: int = 0
    softcap: float = 0.0

    def problem(self, format: str) -> Problem:
        heads, rows, columns = self.x.shape
        operator = "gemv" if self.v is None else "attend"
        precision = PRECISIONS[format]
        return Problem(operator, heads, self.k.shape[0], columns, precision, rows, self.window, self.softcap)


Case = Callable[[np.random.Generator, str], Inputs]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    return lambda make: CASES.setdefault(name, make)


def normal(rng: np.random.Generator, tokens: int = TOKENS, rows: int = 1) -> Inputs:
    shape = (KV_HEADS, tokens, HEAD_DIM)
    x = rng.standard_normal((HEADS, rows, HEAD_DIM), np.float32)
    return Inputs(x, rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32))


def aligned(inputs: Inputs, wanted: np.ndarray) -> Inputs:
    """Queries and keys replaced by constant vectors, so that ``wanted``, one number a token, are the scaled scores."""
    x = np.ones_like(inputs.x)
    k = np.broadcast_to((wanted / np.sqrt(HEAD_DIM))[None, :, None], inputs.k.shape)
    return replace(inputs, x=x, k=k.astype(np.float32))


@case("ordinary values")
def _ordinary(rng: np.random.Generator, format: str) -> Inputs:
    return normal(rng)


@case("one huge channel")
def _channel(rng: np.random.Generator, format: str) -> Inputs:
    inputs = normal(rng)
    inputs.k[:, :, 5] *= 1000
    inputs.v[:, :, 37] *= 1000
    inputs.x[:, :, 5] /= 1000
    return inputs


@case("all-equal scores")
def _equal(rng: np.random.Generator, format: str) -> Inputs:
    inputs = normal(rng)
    inputs.k[:] = inputs.k[:, :1]
    return inputs


@case("all-zero keys")
def _zero_keys(rng: np.random.Generator, format: str) -> Inputs:
    inputs = normal(rng)
    inputs.k[:] = 0
    return inputs


@case("all-zero values")
def _zero_values(rng: np.random.Generator, format: str) -> Inputs:
    inputs = normal(rng)
    inputs.v[:] = 0
    return inputs


@case("one dominating token")
def _dominating(rng: np.random.Generator, format: str) -> Inputs:
    wanted = np.zeros(TOKENS)
    wanted[131] = np.log(10.0 * TOKENS)
    return aligned(normal(rng), wanted)


@case("one token in 32 dominates")
def _in_each_block(rng: np.random.Generator, format: str) -> Inputs:
    wanted = rng.normal(0, 0.5, TOKENS)
    wanted[::32] += np.log(300.0)
    return aligned(normal(rng), wanted)


@case("weights against the dither")
def _dithered(rng: np.random.Generator, format: str) -> Inputs:
    """Every weight but one in 32 lies just above its rounding threshold, and all values are equal: errors add up."""
    codes = np.resize(1 - np.array(DITHER) + 0.02, 192)
    codes[::32] = LARGEST_WEIGHT
    inputs = aligned(normal(rng, 192), np.log(codes))
    inputs.v[:] = 1
    return inputs


@case("subnormal scales")
def _subnormal(rng: np.random.Generator, format: str) -> Inputs:
    inputs = normal(rng)
    size = np.float32(2e-7 * LARGEST_CODE.get(format, 1))
    return replace(inputs, k=size * inputs.k, v=size * inputs.v)


@case("values that underflow")
def _underflow(rng: np.random.Generator, format: str) -> Inputs:
    inputs = normal(rng)
    size = np.exp(rng.uniform(np.log(1e-12), np.log(1e-2), (KV_HEADS, TOKENS, 1))).astype(np.float32)
    return replace(inputs, k=size * inputs.k, v=size * inputs.v)


@case("denormal queries")
def _denormal_queries(rng: np.random.Generator, format: str) -> Inputs:
    inputs = normal(rng)
    return replace(inputs, x=inputs.x * np.float32(1e-41))


@case("scores of ±10⁴, ties")
def _huge_ties(rng: np.random.Generator, format: str) -> Inputs:
    inputs = normal(rng)
    first = np.repeat(inputs.k[:, 0], HEADS // KV_HEADS, axis=0)[:, None]
    x = inputs.x + first
    x *= 1e4 * np.sqrt(HEAD_DIM) / (x * first).sum(axis=2, keepdims=True)
    signs = np.where(np.arange(TOKENS) % 2, -1, 1).astype(np.float32)
    return replace(inputs, x=x.astype(np.float32), k=inputs.k[:, :1] * signs[None, :, None])


@case("scores of 10⁴, near ties")
def _near_ties(rng: np.random.Generator, format: str) -> Inputs:
    inputs = _huge_ties(rng, format)
    noise = rng.standard_normal(inputs.k.shape) * 3e-4
    return replace(inputs, k=(inputs.k + noise).astype(np.float32))


@case("scores of 10⁴, near ties that fp16 keeps")
def _kept_ties(rng: np.random.Generator, format: str) -> Inputs:
    """Keys of whole numbers with 9 bits: what is wrong with fp16 is the kernel's float32."""
    inputs = normal(rng)
    k = rng.integers(-255, 256, inputs.k.shape).astype(np.float32)
    k[:, :, 0] = 1000
    x = rng.standard_normal(inputs.x.shape) * 8 / 255 / 8
    x[:, :, 0] = 1e4 * np.sqrt(HEAD_DIM) / 1000
    return replace(inputs, k=k, x=x.astype(np.float32))


@case("scores of 10⁴ under a soft-cap of 30")
def _capped(rng: np.random.Generator, format: str) -> Inputs:
    inputs = normal(rng)
    return replace(inputs, x=inputs.x * np.float32(1e4), softcap=30.0)


@case("values that cancel")
def _cancelling(rng: np.random.Generator, format: str) -> Inputs:
    inputs = normal(rng, 192)
    inputs.k[:, 1::2] = inputs.k[:, ::2]
    inputs.v[:, 1::2] = np.float32(0.01) - inputs.v[:, ::2]
    return inputs


@case("largest values that the format holds")
def _largest(rng: np.random.Generator, format: str) -> Inputs:
    inputs = normal(rng)
    size = LARGEST_HALF * LARGEST_CODE.get(format, 1)
    k, v = (np.clip(each / 2, -1, 1) * np.float32(size) for each in (inputs.k, inputs.v))
    return replace(inputs, x=inputs.x / np.float32(size), k=k, v=v)


@case("context of one token")
def _one_token(rng: np.random.Generator, format: str) -> Inputs:
    return normal(rng, 1)


@case("window of one token")
def _window(rng: np.random.Generator, format: str) -> Inputs:
    return replace(normal(rng), window=1)


@case("16 rows that see one token each")
def _rows(rng: np.random.Generator, format: str) -> Inputs:
    return replace(normal(rng, rows=16), window=1)


@case("16 rows over 7 tokens")
def _few_tokens(rng: np.random.Generator, format: str) -> Inputs:
    return normal(rng, 7, rows=16)


@case("100,000 equal tokens")
def _long_equal(rng: np.random.Generator, format: str) -> Inputs:
    one = normal(rng, 1, rows=2)
    k, v = (np.repeat(np.abs(each[:1]), 100_000, axis=1) for each in (one.k, one.v))
    return Inputs(one.x[:1], k, v)


@case("100,000 tokens of equal weight")
def _long(rng: np.random.Generator, format: str) -> Inputs:
    k, v = rng.standard_normal((2, 1, 100_000, HEAD_DIM), np.float32)
    return Inputs(np.zeros((1, 2, HEAD_DIM), np.float32), k, v + 1)


def matrix(rng: np.random.Generator) -> Inputs:
    shape = (1, ROWS, COLUMNS)
    return Inputs(rng.standard_normal((1, VECTORS, COLUMNS), np.float32), rng.standard_normal(shape, np.float32))


@case("matrix: ordinary values")
def _matrix(rng: np.random.Generator, format: str) -> Inputs:
    return matrix(rng)


@case("matrix: one huge column")
def _column(rng: np.random.Generator, format: str) -> Inputs:
    inputs = matrix(rng)
    inputs.k[:, :, 100] *= 1000
    inputs.x[:, :, 100] = 1e-3
    return inputs


@case("matrix: one huge activation")
def _activation(rng: np.random.Generator, format: str) -> Inputs:
    inputs = matrix(rng)
    inputs.x[:, :, 100] *= 1000
    inputs.k[:, :, 100] *= 1e-3
    return inputs


@case("matrix: zero rows")
def _zero_rows(rng: np.random.Generator, format: str) -> Inputs:
    inputs = matrix(rng)
    inputs.k[:, 1::2] = 0
    return inputs


@case("matrix: subnormal scales")
def _subnormal_matrix(rng: np.random.Generator, format: str) -> Inputs:
    inputs = matrix(rng)
    return replace(inputs, k=np.float32(2e-7 * LARGEST_CODE.get(format, 1)) * inputs.k)


@case("matrix: largest values that the format holds")
def _largest_matrix(rng: np.random.Generator, format: str) -> Inputs:
    inputs = matrix(rng)
    return replace(inputs, k=np.clip(inputs.k / 2, -1, 1) * np.float32(LARGEST_HALF * LARGEST_CODE.get(format, 1)))


@case("matrix: columns that cancel")
def _cancelling_matrix(rng: np.random.Generator, format: str) -> Inputs:
    inputs = matrix(rng)
    inputs.x[:, :, 1::2] = inputs.x[:, :, ::2]
    inputs.k[:, :, 1::2] = np.float32(0.01) - inputs.k[:, :, ::2]
    return inputs


def inputs_of(name: str, format: str) -> Inputs:
    """The operands of a case; the same on every call."""
    return CASES[name](np.random.default_rng(list(name.encode())), format)


def exact(problem: Problem, inputs: Inputs) -> np.ndarray:
    """The operator in float64 on operands as they were before they were stored."""
    s = scores(inputs.x, inputs.k.astype(np.float64), problem.group)
    if inputs.v is None:
        return s
    p = probabilities(problem, s * softmax_scale(problem.head_dim))
    return np.einsum("hqt,htd->hqd", p, np.repeat(inputs.v.astype(np.float64), problem.group, axis=0), optimize=True)


def share(difference: np.ndarray, whole: np.ndarray) -> float:
    """Largest ‖difference‖ / ‖whole‖ over rows; nothing is no share of nothing."""
    lost, size = (np.linalg.norm(each.astype(np.float64), axis=2) for each in (difference, whole))
    return float(np.max(np.divide(lost, size, out=np.where(lost > 0, np.inf, 0.0), where=size > 0)))


@dataclass(frozen=True)
class Accuracy:
    """Errors of one kernel on one case, relative to the exact result.

    Attributes
    ----------
    added : float
        Distance from float64 on the stored operands.
    held, allowed : float
        Distance from the float64 reference of the kernel's pipeline, relative to that, and its bound `tolerance`.
    result : ndarray
    """

    added: float
    held: float
    allowed: float
    result: np.ndarray


@dataclass(frozen=True)
class Truth:
    """Float64 results for one case in one format.

    Attributes
    ----------
    exact, stored : ndarray
        On operands as they were before they were stored, and on what the codes stand for.
    pipelines : dict
        Reference of each pipeline and the bound around it.
    rounding : ndarray
        What rounding activations may do at most: a norm for each (head, query row), see `largest_rounding`.
    """

    problem: Problem
    operands: Operands
    exact: np.ndarray
    stored: np.ndarray
    pipelines: dict[str, tuple[np.ndarray, float]]
    rounding: np.ndarray

    @property
    def storage(self) -> float:
        """Cost of the format."""
        return share(self.stored - self.exact, self.exact)

    @property
    def rounding_limit(self) -> float:
        """Most that rounded activations may add."""
        return share(self.rounding[:, :, None], self.exact)


def largest_rounding(problem: Problem, operands: Operands) -> np.ndarray:
    """Most that the integer pipeline's rounding may move a row of results: (heads, query_rows).

    Half a step for each rounded query channel moves the score of token t by at most e(t) = Σ_g step_g/2·‖K[t, g]‖₁.
    Weights then move by a factor of at most exp(2·max e), and the result by exp(2·max e) − 1 times Σ p·‖V[t]‖, or from
    one value to another. A rounded product of probability and scale is less than a step from the product.
    """
    x = operands.x.astype(np.float64)
    k = np.repeat(operands.k.dequantize(), problem.group, axis=0)
    moved = np.zeros((*x.shape[:2], k.shape[1]))
    for start in range(0, problem.head_dim, GROUP):
        part = slice(start, start + GROUP)
        step = np.abs(x[:, :, part]).max(axis=2) / ACTIVATION_LARGEST_CODE
        moved += step[:, :, None] / 2 * np.abs(k[:, :, part]).sum(axis=2)[:, None, :]
    if problem.operator == "gemv":
        return np.linalg.norm(moved, axis=2)
    factor = softmax_scale(problem.head_dim)
    v = np.repeat(operands.v.dequantize(), problem.group, axis=0)
    size = np.linalg.norm(v, axis=2)
    seen = visible(problem, k.shape[1])[None]
    e = np.where(seen, moved * factor, 0).max(axis=2)
    p, rounded = (probabilities(problem, scores(each, k, 1) * factor) for each in (x, rounded_queries(x)))
    by_scores = np.minimum(np.expm1(np.minimum(2 * e, 50)) * np.einsum("hqt,ht->hq", p, size),
                           2 * np.where(seen, size[:, None, :], 0).max(axis=2))  # fmt: skip
    codes = np.repeat(operands.v.codes.astype(np.float64), problem.group, axis=0)
    scales = np.repeat(operands.v.scales.astype(np.float64), problem.group, axis=0)
    by_weights = np.zeros_like(e)
    for g in range(scales.shape[2]):
        _, step = weight_steps(rounded, scales[:, :, g])
        most = np.einsum("hqt,htd->hqd", step, np.abs(codes[:, :, g * GROUP : (g + 1) * GROUP]), optimize=True)
        by_weights += np.linalg.norm(most, axis=2)
    return by_scores + by_weights


def candidates(problem: Problem, format: str, pipeline: str) -> list[Candidate]:
    """The first of `LAYOUTS` with the middle schedule, token splits and most rows in a pass; the second with few."""
    isa, attend = detect(), problem.operator == "attend"
    tried = schedules(problem, isa, 1)
    few = replace(tried[0], rows=min(tried[0].rows, 2), registers=1)
    middle = tried[0] if pipeline == "integer" else few
    most = max(tried, key=lambda schedule: schedule.rows) if pipeline == "integer" else few
    first, second = (tuple(map(Layout.parse, pair)) for pair in LAYOUTS[format])
    pairs = [(first, middle), (first, replace(middle, splits=3, block=64)), (first, most), (second, few)]
    chosen = [Candidate(k, v if attend else None, pipeline, schedule) for (k, v), schedule in pairs]
    return list(dict.fromkeys(each for each in chosen if rejection(problem, each, isa) is None))


def pipelines(format: str) -> tuple[str, ...]:
    return ("float",) if format == "fp16" else PIPELINES


@functools.lru_cache(None)
def truth(name: str, format: str) -> Truth:
    """What a case's kernels are compared with."""
    inputs = inputs_of(name, format)
    problem = inputs.problem(format)
    k, v = (x if x is None else quantize(x, problem.stored("k")) for x in (inputs.k, inputs.v))
    operands = Operands(inputs.x, k, v)
    return Truth(
        problem,
        operands,
        exact(problem, inputs),
        reference(problem, operands),
        {each: (reference(problem, operands, each), tolerance(problem, operands, each)) for each in pipelines(format)},
        largest_rounding(problem, operands) if format != "fp16" else np.zeros(inputs.x.shape[:2]),
    )


def measure(name: str, format: str, pipeline: str) -> dict[Candidate, Accuracy]:
    """One case through the kernels of one pipeline on the instruction set in use; see `candidates`."""
    return _measured(name, format, pipeline, detect().name)


@functools.lru_cache(None)
def _measured(name: str, format: str, pipeline: str, isa: str) -> dict[Candidate, Accuracy]:
    backend = backend_named("cpu")
    known = truth(name, format)
    expected, allowed = known.pipelines[pipeline]
    found = {}
    for candidate in candidates(known.problem, format, pipeline):
        kernel = backend.compile(known.problem, candidate)
        packed = [kernel.pack(role, getattr(known.operands, role)) for role in known.problem.roles]
        result = kernel(known.operands.x, *packed)
        added = share(result - known.stored, known.exact)
        found[candidate] = Accuracy(added, error(result, expected), allowed, result)
    return found


def adds(name: str, format: str, pipeline: str) -> float:
    """What the worst kernel of a pipeline adds."""
    return max(each.added for each in measure(name, format, pipeline).values())


HEAD = """\
| input | fp16: storing | float | int8: storing | float | integer | int4: storing | float | integer |
|---|--:|--:|--:|--:|--:|--:|--:|--:|"""


def lines() -> Iterator[str]:
    """The table, a line at a time."""
    yield HEAD
    for name in CASES:
        cells = []
        for format in PRECISIONS:
            cells.append(truth(name, format).storage)
            cells += [adds(name, format, pipeline) for pipeline in reversed(pipelines(format))]
        yield f"| {name} | {' | '.join(f'{cell:.1e}' if cell else '0' for cell in cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", help="a smaller instruction set than this machine's")
    options = parser.parse_args()
    if options.isa:
        os.environ[ISA_VARIABLE] = options.isa
    print(f"{detect().name}\n")
    for line in lines():
        print(line, flush=True)
    for pipeline in PIPELINES:
        found = [
            each
            for format in PRECISIONS
            if pipeline in pipelines(format)
            for name in CASES
            for each in measure(name, format, pipeline).values()
            if each.held
        ]
        share_of_bound = max(each.held / each.allowed for each in found)
        print(f"\nLargest share of the bound that {pipeline} kernels are held to: {100 * share_of_bound:.2g} %")


if __name__ == "__main__":
    main()

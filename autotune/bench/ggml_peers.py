"""llama.cpp and ik_llama.cpp: flash attention and matrix products of the ggml libraries in their Python wheels.

Both compute with OpenMP, whose threads stay between calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from ...kernels.reference import visible
from . import ggml
from .blocks import row_bytes
from .case import Case, Part
from .contestant import Contestant, Entry, Unsupported
from .ggml_products import product
from .ggml_rows import KIND, WAKE_ROWS, fill, read
from .inputs import small_operand

TOKEN_STEP = 32
"""Both pad their caches to a multiple of this; what is past the end is masked."""


class _GgmlPeer(Contestant):
    """What the two have in common; a subclass says where its library is."""

    module: str
    distribution: str
    libraries: tuple[str, ...]
    pools: bool
    halves: tuple[str, ...]
    """Types that 16-bit keys and values may have."""
    buffer = ""
    """The CPU backend's buffer that a matrix lives in, one that arranges it for the machine; empty for plain memory."""

    def open(self, threads: int) -> str:
        self._threads = threads
        self._ggml = ggml.Ggml(self.module, self.distribution, self.libraries, self.pools)
        return self._ggml.version_text

    def enter(self, case: Case, candidate: str) -> Iterator[Entry]:
        if case.problem.operator == "gemv":
            yield product(self._ggml, self._threads, case, self.buffer)
            return
        if self.buffer:
            raise Unsupported("buffers for weights hold no keys and values")
        for fp16 in self.halves:
            if fp16 == "f16" or "fp16" in case.kv:
                yield attention(self._ggml, self._threads, case, {**KIND, "fp16": fp16})


class LlamaCpp(_GgmlPeer):
    module, distribution = "llama_cpp", "llama-cpp-python"
    libraries, pools = ("ggml-base", "ggml-cpu"), True
    halves = ("f16", "bf16")  # it sums f16 values in 16 bits, which a long context drowns


class LlamaCppRepacked(LlamaCpp):
    """Matrices in interleaved rows, as llama.cpp keeps those that it loads on a CPU without AMX."""

    buffer = "CPU_REPACK"


class LlamaCppAmx(LlamaCpp):
    """Matrices in AMX tiles, as llama.cpp keeps those that it loads on a CPU with AMX."""

    buffer = "AMX"


class IkLlamaCpp(_GgmlPeer):
    module, distribution = "ik_llama_cpp", "ik-llama-cpp-python"
    libraries, pools = ("ggml",), False
    halves = ("f16",)


class _Attention(ggml.Graph):
    """Flash attention over ``capacity`` tokens.

    Keys and values lie as one run of tokens for each head, which both libraries read faster than their own caches'
    order, in which the heads of a token are neighbours. The mask is there because ik_llama.cpp's fast path needs one.
    """

    def __init__(self, library: ggml.Ggml, threads: int, case: Case, capacity: int, names: Mapping[str, str]) -> None:
        problem, kinds = case.problem, [names[case.format(role)] for role in ("k", "v")]
        self.kinds = dict(zip(("k", "v"), kinds, strict=True))
        self.mask_shape = (-(-problem.query_rows // ggml.MASK_ROWS) * ggml.MASK_ROWS, capacity)
        nbytes = sum(problem.kv_heads * capacity * row_bytes(kind, problem.head_dim) for kind in kinds)
        nbytes += 2 * math.prod(self.mask_shape) + 8 * problem.heads * problem.query_rows * problem.head_dim
        super().__init__(library, nbytes)
        self.q = self.tensor(ggml.F32, problem.head_dim, problem.query_rows, problem.heads)
        self.k, self.v = (self.tensor(ggml.TYPES[kind], problem.head_dim, capacity, problem.kv_heads) for kind in kinds)
        self.mask = self.tensor(ggml.F16, *reversed(self.mask_shape))
        scale = 1 / math.sqrt(problem.head_dim)
        self.out = library.flash_attn_ext(self.context, self.q, self.k, self.v, self.mask, scale, 0.0, 0.0)
        self.compile(self.out, threads)


def attention(library: ggml.Ggml, threads: int, case: Case, names: Mapping[str, str]) -> Entry:
    """The case's inputs in the types called ``names`` of their formats, and flash attention on them."""
    problem = case.problem
    few = _Attention(library, threads, case, WAKE_ROWS, names)
    graph = _Attention(library, threads, case, -(-case.tokens // TOKEN_STEP) * TOKEN_STEP, names)
    graph.bytes_of(graph.q).view(np.float32)[:] = small_operand(case).ravel()
    for role, tensor in (("k", graph.k), ("v", graph.v)):
        fill(graph, tensor, case, role, graph.kinds[role])
    mask = graph.bytes_of(graph.mask).view(np.float16).reshape(graph.mask_shape)
    mask[:] = -np.inf
    mask[: problem.query_rows, : case.tokens][visible(problem, case.tokens)] = 0

    def result() -> NDArray[np.floating]:
        shape = problem.query_rows, problem.heads, problem.head_dim
        return graph.bytes_of(graph.out).view(np.float32).reshape(shape).transpose(1, 0, 2).copy()

    def stored(role: str, part: Part) -> NDArray[np.float64]:
        return read(graph, graph.k if role == "k" else graph.v, case, graph.kinds[role], part)

    regions = (graph.region(graph.k), graph.region(graph.v))
    storage = "+".join(dict.fromkeys(graph.kinds.values()))
    return Entry(graph.run, few.run, regions, storage, result, stored, (graph, few))

"""Run a candidate and compare it with the float64 reference."""

from __future__ import annotations

import numpy as np
from lowbit.kernels.backend import Rejected
from lowbit.kernels.candidate import Candidate, Schedule
from lowbit.kernels.cpu.backend import CpuBackend
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import pack
from lowbit.kernels.problem import Problem
from lowbit.kernels.reference import error, make_operands, reference, tolerance


def candidate(problem, k, v=None, pipeline="integer", rows=1, registers=2, block=64, splits=1, prefetch=0, threads=1):
    """A candidate from layout names; ``v`` is the keys' layout unless given."""
    layouts = Layout.parse(k), Layout.parse(v or k)
    k_layout, v_layout = (
        layout if problem.operator in ("attend", operator) else None
        for layout, operator in zip(layouts, ("qk", "sv"), strict=True)
    )
    return Candidate(k_layout, v_layout, pipeline, Schedule(rows, registers, block, splits, prefetch, threads))


def packed_operands(problem, chosen, operands, capacity=None):
    """The arguments of a kernel for ``chosen``."""
    pairs = ((operands.k, chosen.k), (operands.v, chosen.v))
    return [operands.x, *(pack(codes, layout, capacity) for codes, layout in pairs if layout is not None)]


def check(problem, chosen, tokens, backend=None, seed=0):
    """Assert that the compiled candidate is within tolerance of the reference, and return its result."""
    kernel = (backend or CpuBackend()).compile(problem, chosen)
    operands = make_operands(problem, tokens, seed)
    result = kernel(*packed_operands(problem, chosen, operands))
    agree(problem, operands, chosen.pipeline, result, f"{problem.key}, {tokens} tokens: {chosen.name}")
    return result


def agree(problem, operands, pipeline, result, what=""):
    assert result.dtype == np.float32
    found = error(result, reference(problem, operands, pipeline))
    allowed = tolerance(problem, operands, pipeline)
    assert found <= allowed, f"{what}: error {found:.2e} exceeds {allowed:.2e}"


def legal(problem, threads=1, backend=None):
    """Candidates of a problem that are not rejected."""
    return [c for c in (backend or CpuBackend()).space(problem, threads) if not isinstance(c, Rejected)]


def problem(key):
    return Problem.parse(key)

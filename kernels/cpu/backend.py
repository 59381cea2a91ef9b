"""The CPU backend: LLVM tiles inside Numba operators."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llvmlite import ir

from .. import operators
from ..backend import Backend, Code, Rejected
from ..candidate import Candidate
from ..errors import CompileError, LowbitError
from ..plugin import DispatchedType
from ..problem import Problem
from . import space as candidates
from .isa import Isa, detect, isa_named
from .kernel import CpuKernel
from .keys import emit_dot_tile, preparation
from .machine import assembly, load
from .spec import TileSpec
from .values import emit_accumulate_tile, scratch_bytes


class CpuBackend(Backend):
    """See `lowbit.kernels.backend.Backend`.

    Parameters
    ----------
    isa : str, optional
        Show code for another instruction set; kernels are compiled for the detected one.
    """

    name = "cpu"

    def __init__(self, isa: str | None = None):
        self._isa = isa

    def isa(self) -> Isa:
        return isa_named(self._isa) if self._isa else detect()

    def target(self) -> str:
        return self.isa().name

    def toolchain(self) -> str:
        import llvmlite
        import numba

        return f"numba {numba.__version__}, llvmlite {llvmlite.__version__}, kernels {_source_digest()}"

    def space(self, problem: Problem, threads: int) -> Iterator[Candidate | Rejected]:
        return candidates.space(problem, self.isa(), threads)

    def baseline(self, problem: Problem, threads: int) -> Candidate:
        return candidates.baseline(problem, self.isa(), threads)

    def compile(self, problem: Problem, candidate: Candidate) -> CpuKernel:
        isa = self.isa()
        reason = candidates.rejection(problem, candidate, isa)
        if reason is not None:
            raise CompileError(f"{candidate.layout}: {reason}")
        try:
            return _compiled(problem, candidate, isa)
        except LowbitError:
            raise
        except Exception as error:
            raise CompileError(f"{candidate.layout}: {str(error).strip().splitlines()[0]}") from error

    def tiles(self, problem: Problem, candidate: Candidate) -> tuple[str, ...]:
        return tuple(spec.symbol for spec in self._specs(problem, candidate))

    def tile(self, problem: Problem, candidate: Candidate, symbol: str) -> Code:
        return next(_code(spec) for spec in self._specs(problem, candidate) if spec.symbol == symbol)

    def code(self, problem: Problem, candidate: Candidate) -> list[Code]:
        return [_code(spec) for spec in self._specs(problem, candidate)]

    def _specs(self, problem: Problem, candidate: Candidate) -> list[TileSpec]:
        isa = self.isa()
        reason = candidates.rejection(problem, candidate, isa)
        if reason is not None:
            raise CompileError(f"{candidate.layout}: {reason}")
        return [spec.canonical for spec in candidates.tile_specs(problem, candidate, isa)]


def _compiled(problem: Problem, candidate: Candidate, isa: Isa) -> CpuKernel:
    specs = {spec.role: spec.canonical for spec in candidates.tile_specs(problem, candidate, isa)}
    tiles = {role: _loaded(spec).get_function_address(spec.symbol) for role, spec in specs.items()}
    prepared = preparation(specs["k"]) if "k" in specs else None
    scratch = scratch_bytes(specs["v"], candidate.schedule.block) if "v" in specs else 0
    task, merge = _operator(problem.operator)
    return CpuKernel(problem, candidate, task, merge, tiles, prepared, scratch)


@functools.cache
def _operator(name: str) -> tuple[Any, Any]:
    """The operator's task and merge functions, compiled once for all layouts."""
    operand = DispatchedType()
    if name in ("qk", "gemv"):
        return operators.build_qk(operand), None
    if name == "sv":
        return operators.build_sv(operand), operators.build_merge(name)
    return operators.build_attend(operand, operand), operators.build_merge(name)


def _text(spec: TileSpec) -> str:
    module = ir.Module(name="lowbit")
    emit = emit_dot_tile if spec.role == "k" else emit_accumulate_tile
    emit(module, spec)
    return str(module)


@functools.lru_cache(None)
def _loaded(spec: TileSpec) -> Any:
    """Engines stay for the life of the process: kernels hold addresses into them."""
    return load(_text(spec), spec.isa)


@functools.lru_cache(64)
def _code(spec: TileSpec) -> Code:
    text = _text(spec)
    plan = spec.plan
    region = plan.any
    channels = region.reductions if spec.role == "k" else region.outputs
    if spec.role == "k" and plan.trips <= 1:
        channels = spec.head_dim  # no inner loop: one iteration of the block loop sees whole rows
    tokens = region.outputs if spec.role == "k" else region.reductions
    return Code(
        role=spec.role,
        symbol=spec.symbol,
        ir=text,
        assembly=assembly(text, spec.isa),
        values_per_iteration=min(channels, spec.head_dim) * tokens,
        rows=spec.rows,
        packing=spec.layout.packing.name,
    )


@functools.cache
def _source_digest() -> str:
    """Digest of the code that generates kernels: a change makes stored measurements stale."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted([*root.glob("*.py"), *root.glob("cpu/*.py")]):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]

"""The CPU backend: LLVM tiles inside Numba operators."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from llvmlite import ir

from ..backend import Backend, Code, Rejected
from ..candidate import Candidate
from ..errors import CompileError, LowbitError
from ..problem import Problem
from . import space as candidates
from .activations import in_place, prepare_symbol, prepare_text
from .compiled import emitted, named, operator
from .gemv import GemvKernel
from .isa import Isa, detect, isa_named
from .kernel import CpuKernel
from .keys import Preparation, dotted_per_iteration, emit_dot_tile, preparation
from .machine import assembly
from .minima import MinimaSpec, emit_add_minima
from .objects import toolchain
from .softmax import SoftmaxSpec, emit_softmax_tile
from .spec import TileSpec
from .untuned import untuned
from .values import accumulated_per_iteration, emit_accumulate_tile, scratch_bytes


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
        return toolchain()

    def space(self, problem: Problem, threads: int) -> Iterator[Candidate | Rejected]:
        return candidates.space(problem, self.isa(), threads)

    def baseline(self, problem: Problem, threads: int) -> Candidate:
        return candidates.baseline(problem, self.isa(), threads)

    def untuned(self, problem: Problem, threads: int) -> Iterator[Candidate]:
        return untuned(problem, self.isa(), threads)

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
        return tuple(spec.symbol for spec in self._counted(problem, candidate))

    def tile(self, problem: Problem, candidate: Candidate, symbol: str) -> Code:
        return next(_code(spec) for spec in self._counted(problem, candidate) if spec.symbol == symbol)

    def _counted(self, problem: Problem, candidate: Candidate) -> list[TileSpec]:
        """Prefetches are not counted: they take no part in the computation, and four distances would be four tiles."""
        return [replace(spec, prefetch=0) for spec in self._specs(problem, candidate)]

    def code(self, problem: Problem, candidate: Candidate) -> list[Code]:
        return [_code(spec) for spec in self._specs(problem, candidate)]

    def _specs(self, problem: Problem, candidate: Candidate) -> list[TileSpec]:
        isa = self.isa()
        reason = candidates.rejection(problem, candidate, isa)
        if reason is not None:
            raise CompileError(f"{candidate.layout}: {reason}")
        return [spec.canonical for spec in candidates.tile_specs(problem, candidate, isa)]


def _compiled(problem: Problem, candidate: Candidate, isa: Isa) -> CpuKernel:
    if problem.operator == "gemv":
        return _compiled_gemv(problem, candidate, isa)
    specs = {spec.role: spec.canonical for spec in candidates.tile_specs(problem, candidate, isa)}
    tiles = {role: _loaded(spec) for role, spec in specs.items()}
    if problem.operator == "attend":
        tiles["softmax"] = _loaded(SoftmaxSpec(isa, problem.softcap > 0))
    prepared = preparation(specs["k"]) if "k" in specs else None
    if prepared is not None:
        tiles["prepare"] = _preparer(specs["k"], prepared)
    scratch = scratch_bytes(specs["v"]) if "v" in specs else 0
    task = operator(problem.operator, isa)
    merge = 0 if problem.operator == "qk" else operator(f"merge_{problem.operator}", isa)
    return CpuKernel(problem, candidate, task, merge, tiles, prepared, scratch)


def _compiled_gemv(problem: Problem, candidate: Candidate, isa: Isa) -> GemvKernel:
    (spec,) = (spec.canonical for spec in candidates.tile_specs(problem, candidate, isa))
    tables = preparation(spec)
    return GemvKernel(problem, candidate, operator("gemv", isa), _loaded(spec), tables, _preparer(spec, tables))


def _preparer(spec: TileSpec, tables: Preparation) -> int:
    """Address of the function that prepares rows, or 0 if they already lie as the tile reads them."""
    if in_place(spec, tables):
        return 0
    return named(prepare_symbol(spec, tables), spec.isa, lambda: prepare_text(spec, tables))


def _text(spec: TileSpec | SoftmaxSpec | MinimaSpec) -> str:
    module = ir.Module(name="lowbit")
    if isinstance(spec, MinimaSpec):
        emit_add_minima(module, spec)
    elif isinstance(spec, SoftmaxSpec):
        emit_softmax_tile(module, spec)
    elif spec.role == "k":
        emit_dot_tile(module, spec)
    else:
        emit_accumulate_tile(module, spec)
    return str(module)


@functools.lru_cache(None)
def _loaded(spec: TileSpec | SoftmaxSpec | MinimaSpec) -> int:
    """Address of the function, which stays for the life of the process."""
    return emitted(spec, lambda: _text(spec))


def tile_address(spec: TileSpec | SoftmaxSpec | MinimaSpec) -> int:
    """Address of an emitted function, valid for the life of the process."""
    return _loaded(spec)


def prepare_address(spec: TileSpec) -> int:
    """Address of the function that prepares rows for a dot tile; see `lowbit.kernels.cpu.activations`."""
    tables = preparation(spec)
    return named(prepare_symbol(spec, tables), spec.isa, lambda: prepare_text(spec, tables))


@functools.lru_cache(64)
def _code(spec: TileSpec) -> Code:
    text = _text(spec)
    values = dotted_per_iteration(spec) if spec.role == "k" else accumulated_per_iteration(spec)
    return Code(
        role=spec.role,
        symbol=spec.symbol,
        ir=text,
        assembly=assembly(text, spec.isa),
        values_per_iteration=values,
        rows=spec.rows,
        packing=spec.layout.packing.name,
    )

"""A candidate as kernels: their Numba source, what they take, and how they are launched."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..candidate import PIPELINES, RAW, Candidate
from ..errors import CompileError, LayoutError
from ..problem import Problem
from ..reference import softmax_scale
from .arch import limits
from .contraction import contraction
from .gemv import GEMV, MERGE_GEMV, build_gemv, build_merge_gemv
from .key_tile import KeyTile
from .mapping import LANES, TILE, Infeasible, key_tilings, value_tilings
from .operators import ATTEND, MERGE, QK, SV, build_attend, build_merge, build_qk, build_sv
from .records import RECORD_HEAD
from .shared import Shared, shared
from .staging import stage_of
from .steps import steps as make_steps
from .value_tile import ValueTile


@dataclass(frozen=True)
class Parameter:
    """One argument of a kernel.

    Attributes
    ----------
    name : str
    type : str
        ``pointer`` (a device address), ``int64``, ``int32`` or ``float32``.
    """

    name: str
    type: str


@dataclass(frozen=True)
class Entry:
    """One ``__global__`` function.

    Attributes
    ----------
    symbol : str
        Its name in PTX; unique to its code.
    function : callable
        Numba source.
    parameters : tuple of Parameter
        In order.
    """

    symbol: str
    function: Callable[..., None]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Geometry:
    """A launch.

    Attributes
    ----------
    grid : tuple of int
        Blocks along x, y and z.
    threads : int
        Of a block, along x.
    shared_bytes : int
        Dynamic shared memory of a block.
    """

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Program:
    """A candidate's kernels.

    Attributes
    ----------
    problem : Problem
    candidate : Candidate
    arch : str
    marked : bool
        Whether loops carry marks.
    shared : Shared
    keys : KeyTile or None
    values : ValueTile or None
    """

    problem: Problem
    candidate: Candidate
    arch: str
    marked: bool
    shared: Shared
    keys: KeyTile | None
    values: ValueTile | None

    @property
    def symbol(self) -> str:
        """Name of the main kernel, unique to its code but for marks."""
        return _symbol(_code_of(self.problem), self.candidate, self.arch)

    @property
    def main(self) -> Entry:
        return _entries(_code_of(self.problem), _code_of_candidate(self.candidate), self.arch, self.marked)[0]

    @property
    def merge(self) -> Entry | None:
        """Combines the splits' partial results; None where there are none."""
        if not self.merges:
            return None
        return _entries(_code_of(self.problem), _code_of_candidate(self.candidate), self.arch, self.marked)[1]

    @property
    def merges(self) -> bool:
        """Whether splits' results have to be combined: one split writes the result itself, and scores need no sum."""
        return self.candidate.launch.splits > 1 and self.problem.operator != "qk"

    def geometry(self, tokens: int) -> Geometry:
        """Launch of the main kernel."""
        problem, launch = self.problem, self.candidate.launch
        passes, threads = -(-problem.rows // launch.rows), LANES * launch.warps
        if problem.operator == "gemv":
            assert self.keys is not None
            shared_bytes = self.shared.gemv_total(self.keys, launch.warps, launch.splits)
            return Geometry((-(-tokens // TILE), launch.splits, passes), threads, shared_bytes)
        return Geometry((problem.kv_heads, launch.splits, passes), threads, self.shared.total(launch.warps))

    def merge_geometry(self, tokens: int) -> Geometry:
        """Launch of the merge kernel: a block to a row, or a thread to a product of gemv."""
        problem = self.problem
        if problem.operator == "gemv":
            return Geometry((-(-problem.rows * tokens // MERGE_THREADS), 1, 1), MERGE_THREADS, 0)
        threads = min(-(-problem.head_dim // LANES) * LANES, MERGE_THREADS)
        return Geometry((problem.kv_heads * problem.rows, 1, 1), threads, 0)

    def workspace_bytes(self, tokens: int) -> int:
        """Size of ``partials``; 0 with one split."""
        problem, splits = self.problem, self.candidate.launch.splits
        if not self.merges:
            return 0
        results = problem.kv_heads * problem.rows * splits
        return 4 * results * (tokens if problem.operator == "gemv" else RECORD_HEAD + problem.head_dim)

    def constants(self, tokens: int) -> dict[str, int | float]:
        """Values of the parameters that do not depend on the operands' addresses."""
        problem = self.problem
        factor = 1.0
        if problem.operator == "attend":
            # Scores are in units of log2; a soft-cap comes before that.
            factor = softmax_scale(problem.head_dim) * (1.0 if problem.softcap else math.log2(math.e))
        return {
            "tokens": tokens,
            "rows": problem.rows,
            "query_rows": problem.query_rows,
            "splits": self.candidate.launch.splits,
            "window": problem.window,
            "factor": factor,
            "cap": problem.softcap,
        }


BUILDERS = {
    "attend": (build_attend, ATTEND),
    "qk": (build_qk, QK),
    "sv": (build_sv, SV),
    "gemv": (build_gemv, GEMV),
}

MERGE_THREADS = 256

MOST_OUTPUTS = 64
"""Sums of values that a lane keeps in registers."""


def rejection(problem: Problem, candidate: Candidate, arch: str) -> str | None:
    """Why the candidate cannot be built for ``arch``, or None."""
    try:
        build(problem, candidate, arch)
    except CompileError as error:
        return str(error)
    return None


def build(problem: Problem, candidate: Candidate, arch: str, marks: bool = False) -> Program:
    """The kernels of a candidate.

    Parameters
    ----------
    arch : str
        ``sm_86``.
    marks : bool
        Whether loops carry marks, for counting.

    Raises
    ------
    CompileError
        If its layouts, pipeline or launch do not go together.
    """
    launch = candidate.launch
    made = _built(_code_of(problem), _code_of_candidate(candidate), arch)
    if isinstance(made, str):
        raise CompileError(made)
    program = replace(made, problem=problem, candidate=candidate, marked=marks)
    if problem.operator == "gemv" and program.keys is not None and launch.splits > program.keys.count:
        raise CompileError(f"{launch.splits} splits of {program.keys.count} steps along the columns")
    need, most = program.geometry(1).shared_bytes, limits(arch).shared_bytes
    if need > most:
        raise CompileError(f"{launch.warps} warps need {need} bytes of shared memory, a block of {arch} has {most}")
    return program


def _code_of(problem: Problem) -> Problem:
    """The problem but for what kernels are told at run time."""
    return replace(problem, heads=1, kv_heads=1, query_rows=1, window=0, softcap=1.0 if problem.softcap else 0.0)


def _code_of_candidate(candidate: Candidate) -> Candidate:
    return replace(candidate, plan=replace(candidate.launch, splits=1, warps=1))


@functools.lru_cache(1024)
def _built(problem: Problem, candidate: Candidate, arch: str) -> Program | str:
    """A program, or why there is none: problems that differ at run time share it."""
    try:
        return _build(problem, candidate, arch)
    except (CompileError, LayoutError) as error:
        return str(error)


def _build(problem: Problem, candidate: Candidate, arch: str) -> Program:
    launch, rows = candidate.launch, candidate.launch.rows
    if launch.stages and not limits(arch).async_copies:
        raise CompileError(f"{arch} cannot copy into shared memory on the side: stages must be 0")
    roles = tuple(role for role, layout in (("k", candidate.k), ("v", candidate.v)) if layout is not None)
    if roles != problem.roles:
        raise CompileError(f"{problem.operator} needs other operands than {' and '.join(roles) or 'none'}")
    for role, layout in (("k", candidate.k), ("v", candidate.v)):
        if layout is not None and layout.packing.format != problem.stored(role).format:
            raise CompileError(f"{role.upper()}: holds {layout.packing.format}, not {problem.stored(role).format}")
    if candidate.pipeline not in (*PIPELINES, RAW):
        raise CompileError(f"GPUs have no pipeline {candidate.pipeline!r}")
    if candidate.pipeline == RAW and all(problem.stored(role).bits != 4 for role in roles):
        raise CompileError("the raw pipeline is for 4-bit codes")
    keys = _keys(problem, candidate) if candidate.k is not None else None
    values = _values(problem, candidate) if candidate.v is not None else None
    stage = None
    if launch.stages:
        if keys is None or values is None:
            raise CompileError(f"{problem.operator} reads one packed operand: stages must be 0")
        stage = stage_of(keys.contraction, values.contraction)
    read = None if values is None else values.contraction
    lay_out = shared(keys, read, rows, problem.head_dim, stage, launch.stages)
    return Program(problem, candidate, arch, False, lay_out, keys, values)


@functools.lru_cache(512)
def _entries(problem: Problem, candidate: Candidate, arch: str, marked: bool) -> tuple[Entry, Entry | None]:
    """The main kernel and the one that merges, made when they are asked for: a space needs neither."""
    program = _built(problem, candidate, arch)
    assert isinstance(program, Program)
    keys, values, lay_out = program.keys, program.values, program.shared
    streams = (
        keys is not None and keys.contraction.tiling.sector_share == 1,
        values is not None and values.contraction.tiling.sector_share == 1,
    )
    steps = make_steps(problem, candidate.launch.rows, keys, values, lay_out, marked, streams)
    make, parameters = BUILDERS[problem.operator]
    main = Entry(program.symbol, make(steps), tuple(Parameter(*each) for each in parameters))
    if problem.operator == "gemv":
        return main, Entry("merge_gemv", build_merge_gemv(steps), tuple(Parameter(*each) for each in MERGE_GEMV))
    if values is None:
        return main, None
    name = f"merge_{problem.operator}_d{problem.head_dim}"
    return main, Entry(name, build_merge(steps), tuple(Parameter(*each) for each in MERGE))


def _keys(problem: Problem, candidate: Candidate) -> KeyTile:
    layout, launch = candidate.k, candidate.launch
    assert layout is not None
    pipeline = candidate.pipeline if problem.stored("k").bits == 4 or candidate.pipeline != RAW else "integer"
    reason: CompileError | None = None
    for tiling in key_tilings(layout, problem.head_dim, launch.lanes):
        try:
            found = contraction(tiling, layout.packing, pipeline, problem.head_dim, launch.rows)
            return KeyTile(found, launch.loads)
        except Infeasible as error:
            reason = reason or error
    raise CompileError(f"K: {reason}")


def _values(problem: Problem, candidate: Candidate) -> ValueTile:
    """The reading of values with fewest loads among those whose sums fit in registers."""
    layout, launch = candidate.v, candidate.launch
    assert layout is not None
    pipeline = candidate.pipeline if problem.stored("v").bits == 4 or candidate.pipeline != RAW else "integer"
    found: list[tuple[int, ValueTile]] = []
    reason: CompileError | None = None
    for tiling in value_tilings(layout, problem.head_dim):
        if launch.rows * tiling.outputs_per_lane > MOST_OUTPUTS:
            reason = reason or CompileError(
                f"{launch.rows} rows of {tiling.outputs_per_lane} channels a lane do not fit in registers"
            )
            continue
        try:
            made = contraction(tiling, layout.packing, pipeline, problem.head_dim, launch.rows)
            found.append((tiling.iters_o * tiling.iters_r, ValueTile(made, launch.loads)))
        except Infeasible as error:
            reason = reason or error
    if not found:
        raise CompileError(f"V: {reason}")
    return min(found, key=lambda each: each[0])[1]


def _symbol(problem: Problem, candidate: Candidate, arch: str) -> str:
    launch = candidate.launch
    text = f"{problem.key} {candidate.layout} {candidate.pipeline} {launch.code} {arch}"
    return f"{problem.operator}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"

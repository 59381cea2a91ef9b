"""How often a launch passes each of its loops, and what its warps ask of memory: arithmetic, apart from the code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ..candidate import Candidate
from ..problem import Problem
from . import marks
from .contraction import FACTOR_BYTES, SCALE_BYTES, Contraction, small_width, swizzled
from .key_tile import KeyTile
from .mapping import LANES, TILE
from .program import Geometry, Program, build
from .python_ops import PythonOps
from .shared import Stage
from .softmax import PAIRS
from .staging import CHUNK
from .value_tile import ValueTile

LINE = 128
"""Bytes of a cache line, and of all banks of shared memory."""

INACTIVE = -1
"""Address of a lane that takes no part in an access."""


@dataclass(frozen=True)
class WarpAccess:
    """One memory instruction of a warp, with addresses that stand for all its executions.

    Attributes
    ----------
    name : str
        What is accessed: ``k``, ``v``, ``scales``, ``x`` or ``weights``. Results and partial results are too few to be
        told.
    space : str
        ``global`` or ``shared``.
    kind : str
        ``load``, ``store``, or ``async`` for a copy from global into shared memory.
    width_bytes : int
        Of one lane.
    addresses : tuple of int
        Of 32 lanes, from some aligned base; `INACTIVE` for a lane that sits out.
    mark : int
        The loop that it is in; see `lowbit.kernels.cuda.marks`.
    count : float
        Executions in one pass of the loop.
    """

    name: str
    space: str
    kind: str
    width_bytes: int
    addresses: tuple[int, ...]
    mark: int
    count: float


@dataclass(frozen=True)
class Work:
    """One launch of a candidate's main kernel.

    Attributes
    ----------
    geometry : Geometry
    iterations : dict of int to float
        Passes of each marked loop, all warps together.
    longest : dict of int to float
        The same of the busiest warp.
    accesses : tuple of WarpAccess
    """

    geometry: Geometry
    iterations: dict[int, float]
    longest: dict[int, float]
    accesses: tuple[WarpAccess, ...]


def work(problem: Problem, candidate: Candidate, tokens: int, arch: str) -> Work:
    """What one call of a candidate's main kernel does on an architecture.

    Raises
    ------
    CompileError
        If the candidate cannot be built.
    """
    program = build(problem, candidate, arch)
    geometry = program.geometry(tokens)
    if problem.operator == "gemv":
        return _matrix_work(program, geometry)
    return _cache_work(program, geometry, tokens)


def _cache_work(program: Program, geometry: Geometry, tokens: int) -> Work:
    problem, launch = program.problem, program.candidate.launch
    heads, splits, passes = geometry.grid
    blocks = heads * splits * passes
    tiles = -(-tokens // TILE)
    if problem.operator == "attend" and problem.window:
        tiles -= max(tokens - problem.query_rows + 1 - problem.window, 0) // TILE
    total = {marks.TILE: float(heads * passes * tiles)}
    of_split = -(-tiles // splits)
    longest = {marks.TILE: float(-(-of_split // launch.warps))}
    stage = program.shared.stage
    staged = stage is not None
    accesses = [] if stage is None else _copies(stage)
    keys, values = program.keys, program.values
    if keys is not None:
        if keys.count > 1:
            total[marks.K_STEP] = total[marks.TILE] * keys.count
            longest[marks.K_STEP] = longest[marks.TILE] * keys.count
        accesses += _key_accesses(keys, marks.K_STEP if keys.count > 1 else marks.TILE, staged)
        each = keys.contraction.groups if keys.contraction.integer else -(-len(keys.contraction.order) // LANES)
        _block_loop(marks.PROLOGUE, each * launch.rows, blocks, launch.warps, total, longest)
    if values is not None:
        accesses += _value_accesses(values, staged)
        if values.contraction.integer:
            pairs = -(-launch.rows * values.contraction.groups // PAIRS)
            total[marks.WEIGHTS] = total[marks.TILE] * pairs
            longest[marks.WEIGHTS] = longest[marks.TILE] * pairs
        folds = -(-problem.head_dim // geometry.threads) * launch.warps
        _warp_loop(marks.EPILOGUE, folds, blocks * launch.warps, total, longest)
        _warp_loop(marks.MAXIMA, launch.warps, blocks * launch.warps, total, longest)
    return Work(geometry, total, longest, tuple(accesses))


def _matrix_work(program: Program, geometry: Geometry) -> Work:
    keys, launch = program.keys, program.candidate.launch
    assert keys is not None
    tiles, splits, passes = geometry.grid
    blocks = tiles * splits * passes
    total = {marks.K_STEP: float(tiles * passes * keys.count)}
    longest = {marks.K_STEP: float(-(-keys.steps_of_split(splits) // launch.warps))}
    each = keys.contraction.groups if keys.contraction.integer else -(-len(keys.contraction.order) // LANES)
    _block_loop(marks.PROLOGUE, each * launch.rows / splits, blocks, launch.warps, total, longest)
    sums = -(-launch.rows // launch.warps) * launch.warps
    _warp_loop(marks.EPILOGUE, sums, blocks * launch.warps, total, longest)
    return Work(geometry, total, longest, tuple(_key_accesses(keys, marks.K_STEP, False)))


def _block_loop(
    mark: int, units: float, blocks: int, warps: int, total: dict[int, float], longest: dict[int, float]
) -> None:
    """Passes of a loop whose units the warps of a block share."""
    each = max(-(-units // warps), 1.0)
    total[mark], longest[mark] = float(blocks * each * warps), float(each)


def _warp_loop(mark: int, passes: int, warps: int, total: dict[int, float], longest: dict[int, float]) -> None:
    """Passes of a loop that every warp makes as often."""
    total[mark], longest[mark] = float(passes * warps), float(passes)


def _copies(stage: Stage) -> list[WarpAccess]:
    """Copies of one tile into shared memory, whole warps of 16-byte chunks and a rest."""
    found = []
    for name, size in zip(("k", "scales", "v", "scales"), stage.sizes, strict=True):
        whole, rest = divmod(size // CHUNK, LANES)
        for lanes, count in ((LANES, whole), (rest, min(rest, 1))):
            if count:
                places = tuple(CHUNK * lane if lane < lanes else INACTIVE for lane in range(LANES))
                found.append(WarpAccess(name, "global", "async", CHUNK, places, marks.TILE, count))
    return found


def _vectors(name: str, width: int, patterns: Iterable[tuple[int, ...]], mark: int, staged: bool) -> list[WarpAccess]:
    """Loads of vectors from global memory, or from a stage whose chunks are swizzled."""
    if not staged:
        return _grouped(name, "global", "load", width, patterns, mark)
    moved = (tuple(swizzled(PythonOps(), place) for place in pattern) for pattern in patterns)
    return _grouped(name, "shared", "load", width, moved, mark)


def _key_accesses(keys: KeyTile, mark: int, staged: bool) -> list[WarpAccess]:
    c, tiling = keys.contraction, keys.contraction.tiling
    width = tiling.vectors.width
    vectors = [tiling.lane_offsets(i, j) for j in range(keys.vectors) for i in range(tiling.iters_o)]
    found = _vectors("k", width, vectors, mark, staged)
    lanes = [divmod(lane, tiling.lanes_r) for lane in range(LANES)]
    part = [_part(r_lane, keys.group_part) for _, r_lane in lanes]
    groups = len(keys.groups_of_step)
    if c.scaled:
        token = [_part(o_lane, keys.token_part) for o_lane, _ in lanes]
        places = tuple(SCALE_BYTES * (TILE * g + t) for g, t in zip(part, token, strict=True))
        space = "shared" if staged else "global"
        found.append(WarpAccess("scales", space, "load", SCALE_BYTES, places, mark, groups * len(keys.tokens)))
    size, count = _small_reads(keys.row_bytes, c, keys.vectors // c.bundle)
    places = tuple(r_lane * c.bundle_bytes for _, r_lane in lanes)
    found.append(WarpAccess("x", "shared", "load", size, places, mark, count * c.rows))
    if c.integer:
        places = tuple(g * c.rows * FACTOR_BYTES for g in part)
        found.append(WarpAccess("x", "shared", "load", FACTOR_BYTES, places, mark, groups * c.rows))
    return found


def _value_accesses(values: ValueTile, staged: bool) -> list[WarpAccess]:
    c, tiling = values.contraction, values.contraction.tiling
    vectors = [tiling.lane_offsets(i, j) for j in range(tiling.iters_r) for i in range(tiling.iters_o)]
    found = _vectors("v", tiling.vectors.width, vectors, marks.TILE, staged)
    lanes = [divmod(lane, tiling.lanes_r) for lane in range(LANES)]
    part = [_part(min(o_lane, tiling.last_o - 1), values.group_part) for o_lane, _ in lanes]
    groups = len(set(values.groups))
    size, count = _small_reads(TILE * c.slot_bytes, c, tiling.iters_r // c.bundle)
    places = tuple(
        g * TILE * c.slot_bytes + r_lane * c.bundle_bytes for g, (_, r_lane) in zip(part, lanes, strict=True)
    )
    found.append(WarpAccess("weights", "shared", "load", size, places, marks.TILE, count * groups * c.rows))
    if c.scaled:
        tokens = tuple(SCALE_BYTES * lane for lane in range(LANES))
        space = "shared" if staged else "global"
        found.append(WarpAccess("scales", space, "load", SCALE_BYTES, tokens, marks.TILE, c.groups))
    slots = tuple(4 * lane for lane in range(LANES))
    found.append(WarpAccess("weights", "shared", "store", 4, slots, marks.TILE, c.groups * c.rows))
    if c.integer:
        four = tuple(16 * lane for lane in range(LANES))
        pair = tuple(FACTOR_BYTES * (lane // 8) for lane in range(LANES))
        found.append(WarpAccess("weights", "shared", "load", 16, four, marks.WEIGHTS, 1))
        found.append(WarpAccess("weights", "shared", "store", 4, slots, marks.WEIGHTS, 1))
        found.append(WarpAccess("weights", "shared", "store", FACTOR_BYTES, pair, marks.WEIGHTS, 1))
        places = tuple(g * FACTOR_BYTES for g in part)
        count = values.outputs * c.rows
        found.append(WarpAccess("weights", "shared", "load", FACTOR_BYTES, places, marks.TILE, count))
    return found


def _grouped(
    name: str, space: str, kind: str, width: int, patterns: Iterable[tuple[int, ...]], mark: int
) -> list[WarpAccess]:
    """Accesses that differ by whole lines are one, so many times."""
    seen: Counter[tuple[int, ...]] = Counter()
    for pattern in patterns:
        base = min(pattern) // LINE * LINE
        seen[tuple(place - base for place in pattern)] += 1
    return [WarpAccess(name, space, kind, width, pattern, mark, count) for pattern, count in seen.items()]


def _small_reads(row_bytes: int, c: Contraction, bundles: int) -> tuple[int, int]:
    """Width and number of the loads of one row of the small operand; see `contraction.SmallReader`."""
    size = small_width(c, row_bytes)
    return size, -(-bundles * c.bundle_bytes // size)


def _part(lane: int, part: tuple[int, int]) -> int:
    return lane * part[0] >> part[1]

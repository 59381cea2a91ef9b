"""The candidates of a problem on an architecture, and why the others are impossible.

A *shape* is what has machine code of its own: layouts, pipeline, and the parts of a launch that are compiled in. Each
costs about a second to compile and to count, so that a space has at most some hundred of them: every layout in the
packings that suit it, every packing in the layouts that matter most, and one change at a time from a middle launch.
Splits and warps are numbers of a launch and cost nothing to try.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..backend import Rejected
from ..candidate import RAW, Candidate, Launch
from ..errors import CompileError, LowbitError
from ..layout import Factor, Layout
from ..packing import Packing, packing_named, packings
from ..problem import Problem
from . import program
from .arch import limits
from .mapping import key_tilings

KEY_ORDERS = ("T D", "T/32 D/16 t32 d16", "T/32 D/8 t32 d8", "T/32 D/4 t32 d4", "T/32 D t32", "T/32 D/32 t32 d32")
"""Row-major; a lane's token in vectors of 4 to 32 channels, so that a warp reads one run; tokens innermost."""

VALUE_ORDERS = ("T D", "T/16 D t16", "T/32 D t32", "T/4 D t4", "T/32 D/32 t32/4 d32 t4", "T/8 D t8")
"""Row-major; a channel's tokens side by side, as a dot over tokens wants them, in runs of 4 to 32."""

PAD_BYTES = 16
"""Padding of rows, so that rows of a power of two do not share banks and sectors."""

BEST = {"int8": ("T/32 D/16 t32 d16", "T/4 D t4"), "int4": ("T/32 D/32 t32 d32", "T/8 D t8")}
BEST |= {"fp16": ("T/32 D/8 t32 d8", "T D")}
"""Keys and values of which a lane's 16 bytes are whole dots and a warp's loads are one run, by format."""

PREFERRED = {"fp16": ("fp16",), "int8": ("int8/bytes/signed", "int8/bytes/offset")}
PREFERRED |= {"int4": ("int4/lane_interleaved/offset", "int4/contiguous_permuted/offset")}
"""Packings that every layout is tried in."""

MOST_ROWS = 8
"""Rows of the small operand that one pass holds in registers."""
ALL_LANES = (1, 2, 4, 8, 16, 32)
"""Lanes to a token."""
MOST_BLOCKS = 1024
"""Blocks that fill a large GPU several times over."""
MIDDLE_BLOCKS = 128
MOST_COLUMN_SPLITS = 8
WARPS = (4, 2, 8, 16)
"""Warps of a block, the middle launch's first."""
STAGES = (2, 3)
LOADS = (4, 1, 2, 8)
"""Vectors in flight, the middle launch's first."""


@dataclass(frozen=True)
class Shape:
    """What has machine code of its own. ``launch`` has the middle splits and warps."""

    k: Layout | None
    v: Layout | None
    pipeline: str
    launch: Launch


def space(problem: Problem, arch: str) -> Iterator[Candidate | Rejected]:
    """See `lowbit.kernels.backend.Backend.space`."""
    seen: set[Candidate] = set()
    for shape, thorough in _shapes(problem, arch):
        first, reason = _fitting(problem, Candidate(shape.k, shape.v, shape.pipeline, shape.launch), arch)
        if first in seen:
            continue
        if reason is not None:
            seen.add(first)
            yield Rejected(first, reason)
            continue
        for launch in _run_time(problem, first.launch, thorough):
            candidate = replace(first, plan=launch)
            if candidate not in seen:
                seen.add(candidate)
                reason = rejection(problem, candidate, arch)
                yield candidate if reason is None else Rejected(candidate, reason)


def _fitting(problem: Problem, candidate: Candidate, arch: str) -> tuple[Candidate, str | None]:
    """The candidate, or one of fewer rows or warps that fits in registers or shared memory; else why there is none."""
    reason, launch = rejection(problem, candidate, arch), candidate.launch
    if reason is None:
        return candidate, None
    smaller = [replace(launch, warps=warps) for warps in (2, 1)] if launch.stages else []
    smaller += [_with_rows(problem, launch, rows) for rows in ((launch.rows + 1) // 2, 1) if rows < launch.rows]
    for other in smaller:
        fewer = replace(candidate, plan=other)
        if rejection(problem, fewer, arch) is None:
            return fewer, None
    return candidate, reason


def rejection(problem: Problem, candidate: Candidate, arch: str) -> str | None:
    """Why the candidate cannot be compiled for ``arch``, or None."""
    if not isinstance(candidate.plan, Launch):
        return "a GPU's kernel needs a launch, not a CPU's schedule"
    roles = "".join(role for role, layout in (("k", candidate.k), ("v", candidate.v)) if layout is not None)
    if roles != "".join(problem.roles):
        return f"{problem.operator} needs other operands than {roles or 'none'}"
    for role, layout in (("k", candidate.k), ("v", candidate.v)):
        if layout is not None and layout.packing.format != (stored := problem.stored(role).format):
            return f"{layout.name} holds {layout.packing.format}, {problem.precision} stores {stored}"
    return program.rejection(problem, candidate, arch)


# -- shapes ------------------------------------------------------------------------------------------------------------


def _shapes(problem: Problem, arch: str) -> Iterator[tuple[Shape, bool]]:
    """Shapes, possible or not, and whether splits and warps are tried thoroughly with each; some come twice."""
    pairs = _pairs(problem)
    main = _main_pairs(problem)
    for pipeline in _pipelines(problem):
        for pair in dict.fromkeys((*main, *(pairs if pipeline == "integer" or _all_float(problem) else ()))):
            thorough = pair in main
            for k, v in _packed(problem, pair, every=False):
                yield _shape(problem, k, v, pipeline), thorough
        for pair in _packing_pairs(problem):
            for k, v in _packed(problem, pair, every=True):
                yield _shape(problem, k, v, pipeline), False
    for pipeline in _pipelines(problem):
        if pipeline == "float" and not _all_float(problem):
            continue
        for pair in main:
            for k, v in itertools.islice(_packed(problem, pair, every=False), 2 if pipeline == "integer" else 1):
                shape = _shape(problem, k, v, pipeline)
                for launch in _compiled_changes(problem, shape, arch):
                    yield replace(shape, launch=launch), False


def _all_float(problem: Problem) -> bool:
    return not any(problem.integer(role, "integer") for role in problem.roles)


def _pipelines(problem: Problem) -> tuple[str, ...]:
    if _all_float(problem):
        return ("float",)
    raw = any(problem.stored(role).format == "int4" for role in problem.roles)
    return ("integer", RAW, "float") if raw else ("integer", "float")


Pair = tuple[str, str, int]
"""Orders of keys and of values, and the pad of both."""


def _pairs(problem: Problem) -> list[Pair]:
    """Orders that are tried: each of keys' with the best of values' and the other way round, and one order for both."""
    best_k, best_v = (BEST[problem.stored(role).format][i] for i, role in ((0, "k"), (1, "v")))
    pairs = [*_main_pairs(problem), ("T D", "T D", PAD_BYTES)]
    pairs += [(order, best_v, 0) for order in KEY_ORDERS]
    pairs += [(best_k, order, 0) for order in VALUE_ORDERS]
    pairs += [("T/32 D t32", "T/32 D t32", 0)]
    return list(dict.fromkeys(pairs))


def _main_pairs(problem: Problem) -> list[Pair]:
    """Row-major, as caches usually are, and the best of either operand."""
    best_k, best_v = (BEST[problem.stored(role).format][i] for i, role in ((0, "k"), (1, "v")))
    return [("T D", "T D", 0), (best_k, best_v, 0)]


def _packing_pairs(problem: Problem) -> list[Pair]:
    """Those in which every packing is tried; values in planes of nibbles need runs of 32 tokens."""
    best_k = BEST[problem.stored(problem.roles[0]).format][0]
    planes = [(best_k, "T/32 D t32", 0)] if problem.stored(problem.roles[-1]).format == "int4" else []
    return list(dict.fromkeys([*_main_pairs(problem), *planes]))


def _packed(problem: Problem, pair: Pair, every: bool) -> Iterator[tuple[Layout | None, Layout | None]]:
    """Layouts of a pair of orders in the preferred packings, or in every one.

    Keys and values of one format are packed alike. Of two formats' packings one changes at a time.
    """
    k_order, v_order, pad = pair
    offered = [_offered(problem, role, every) for role in problem.roles]
    if len({problem.stored(role) for role in problem.roles}) == 1:
        choices = list(zip(*offered, strict=True))
    else:
        choices = [(k, offered[1][0]) for k in offered[0]] + [(offered[0][0], v) for v in offered[1][1:]]
    for chosen in choices:
        by_role = dict(zip(problem.roles, chosen, strict=True))
        yield (
            _layout(k_order, by_role["k"], pad) if "k" in by_role else None,
            _layout(v_order, by_role["v"], pad) if "v" in by_role else None,
        )


def _offered(problem: Problem, role: str, every: bool) -> tuple[Packing, ...]:
    format = problem.stored(role).format
    preferred = tuple(packing_named(name) for name in PREFERRED[format])
    return tuple(dict.fromkeys((*preferred, *packings(format)))) if every else preferred


@functools.lru_cache(None)
def _layout(order: str, packing: Packing, pad: int) -> Layout:
    return Layout(tuple(map(Factor.parse, order.split())), packing, pad)


def _shape(problem: Problem, k: Layout | None, v: Layout | None, pipeline: str) -> Shape:
    return Shape(k, v, pipeline, middle_launch(problem, k, v))


# -- launches ----------------------------------------------------------------------------------------------------------


def middle_launch(problem: Problem, k: Layout | None, v: Layout | None) -> Launch:
    """A launch that suits the layouts: rows that share what is read, and lanes that read one run of a token."""
    rows = middle_rows(problem)
    lanes = natural_lanes(k, problem.head_dim) if k is not None else 1
    return Launch(rows, lanes, LOADS[0], 0, _middle_splits(problem, rows), WARPS[0])


def middle_rows(problem: Problem) -> int:
    """Rows of one pass: all of them, or passes of equal size."""
    passes = -(-problem.rows // MOST_ROWS)
    return -(-problem.rows // passes)


@functools.lru_cache(None)
def natural_lanes(layout: Layout, head_dim: int) -> int:
    """Fewest lanes to a token with which a warp's loads use whole sectors, or as much of them as any number does."""
    found = []
    for lanes in ALL_LANES:
        try:
            tilings = list(key_tilings(layout, head_dim, lanes))
        except LowbitError:
            continue
        found += [(-tiling.sector_share, lanes) for tiling in tilings[:1]]
    return min(found, default=(0.0, 1))[1]


def _compiled_changes(problem: Problem, shape: Shape, arch: str) -> Iterator[Launch]:
    """One change at a time of what is compiled in."""
    middle = shape.launch
    yield from (_with_rows(problem, middle, rows) for rows in dict.fromkeys(((middle.rows + 1) // 2, 1)))
    if shape.k is not None:
        yield from (replace(middle, lanes=lanes) for lanes in ALL_LANES[:4])
    yield from (replace(middle, loads=loads) for loads in LOADS)
    if limits(arch).async_copies:
        yield from (replace(middle, stages=stages) for stages in STAGES)


def _with_rows(problem: Problem, launch: Launch, rows: int) -> Launch:
    return replace(launch, rows=rows, splits=_middle_splits(problem, rows))


def _splits(problem: Problem, rows: int) -> tuple[int, ...]:
    """Powers of two, fewest first, from one block for all of a head to as many as a large GPU can use."""
    if problem.operator == "gemv":
        return tuple(1 << i for i in range(MOST_COLUMN_SPLITS.bit_length()))
    blocks = problem.kv_heads * -(-problem.rows // rows)
    return tuple(1 << i for i in range(max(MOST_BLOCKS // blocks, 1).bit_length()))


def _middle_splits(problem: Problem, rows: int) -> int:
    if problem.operator == "gemv":
        return 1
    blocks = problem.kv_heads * -(-problem.rows // rows)
    return max(splits for splits in _splits(problem, rows) if splits == 1 or splits * blocks <= MIDDLE_BLOCKS)


def _run_time(problem: Problem, middle: Launch, thorough: bool) -> Iterator[Launch]:
    """The middle launch, few and many splits, and if asked all splits and, with three of them, all warps."""
    offered = _splits(problem, middle.rows)
    some = tuple(dict.fromkeys((middle.splits, offered[-1], max(middle.splits // 8, 1))))
    yield from (replace(middle, splits=splits) for splits in (*some, *(offered if thorough else ())))
    if thorough:
        for warps, splits in itertools.product(WARPS[1:], some):
            yield replace(middle, splits=splits, warps=warps)


def baseline(problem: Problem, arch: str) -> Candidate:
    """Row-major storage, dequantised to float in the loop, packed as common runtimes do.

    Raises
    ------
    CompileError
        If no launch of it can be built.
    """
    names = {"fp16": "fp16", "int8": "int8/bytes/signed", "int4": "int4/contiguous/offset"}
    k, v = (
        Layout.parse(f"T D | {names[problem.stored(role).format]}") if role in problem.roles else None
        for role in ("k", "v")
    )
    middle = middle_launch(problem, k, v)
    reason: str | None = None
    for rows, lanes, loads in itertools.product(
        dict.fromkeys((middle.rows, (middle.rows + 1) // 2, 1)), dict.fromkeys((middle.lanes, 8, 4, 2, 1)), LOADS
    ):
        launch = replace(middle, rows=rows, lanes=lanes, loads=loads, splits=_middle_splits(problem, rows))
        candidate = Candidate(k, v, "float", launch)
        reason = rejection(problem, candidate, arch)
        if reason is None:
            return candidate
    raise CompileError(f"no row-major kernel of {problem.key} can be built for {arch}: {reason}")

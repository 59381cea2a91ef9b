"""The candidates of a problem on a CPU, and why the others are impossible."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from ..backend import Rejected
from ..candidate import BFLOAT, PIPELINES, Candidate, Schedule
from ..layout import Factor, Layout
from ..packing import Packing, packing_named, packings
from ..problem import Problem
from . import matrices
from .bfloat import CODE_TILES, MOST_UNIT_ROWS, check_unit
from .isa import Isa
from .mapping import Infeasible
from .matrix import MOST_ROWS, check_tiles
from .multiply import float_flip, integer_form
from .spec import MOST_VECTOR_ROWS, TileSpec

TOKEN_TILES = (16, 32)
WORKING_REGISTERS = 2
"""Registers that a hot loop needs besides its accumulators: a code register and a small operand."""

BLOCKS = (64, 512, 2048)
"""Tokens between two softmax updates that are tried besides the middle schedule's."""

UNIT_BLOCKS = (288, 992, 480)
"""The same for the bfloat pipeline, the middle schedule's last: sums of a block stay in the unit, which has to wake up
after the softmax. Rows of scores that lie a power of two apart would share few sets of the nearest cache."""

PREFETCHES = (0, 104, 72)
"""Cache lines that are prefetched ahead, the middle schedule's last. Distances of whole pages did worse than any."""

CHANNEL_TILES = (4, 8, 16, 32, 64)
PADS = (0, 64)


def orders() -> list[str]:
    """π and ρ that are tried for a cache: row-major, tokens innermost, and tiles of tokens × channels."""
    names = ["T D"]
    names += [f"T/{tokens} D t{tokens}" for tokens in TOKEN_TILES]
    names += [f"T/{t} D/{c} t{t} d{c}" for t, c in itertools.product(TOKEN_TILES, CHANNEL_TILES)]
    return names


def mirrored(order: str) -> str | None:
    """The order that gives values the register pattern that ``order`` gives keys.

    Keys are reduced over channels and values over tokens, so the two axes change places; tokens then get an outer
    block of 32 again, so that storage grows at its end. None where the block would have to be longer.
    """
    factors = [Factor.parse(part) for part in order.split()]
    if order == "T D":
        return "T/32 D t32"
    tokens = next(f for f in factors if f.axis == "T" and f.block == 0).unit
    run = next((f.unit for f in factors if f.axis == "D" and f.block == 0), 1)
    if run > 32:
        return None
    if run == 1:
        return f"T/32 D/{tokens} t32 d{tokens}"
    if run == 32:
        return f"T/32 D/{tokens} d{tokens} t32"
    return f"T/32 D/{tokens} t32/{run} d{tokens} t{run}"


def layouts(k_packing: Packing, v_packing: Packing) -> list[tuple[Layout, Layout]]:
    """(K, V) pairs: values in the keys' own order, and in its mirror image."""
    pairs = []
    for order, pad in itertools.product(orders(), PADS):
        if pad and order not in ("T D", "T/16 D/4 t16 d4"):
            continue
        factors = tuple(map(Factor.parse, order.split()))
        k = Layout(factors, k_packing, pad)
        pairs.append((k, k.with_packing(v_packing)))
        mirror = mirrored(order)
        if mirror is not None:
            pairs.append((k, Layout(tuple(map(Factor.parse, mirror.split())), v_packing, pad)))
    return pairs


def schedules(problem: Problem, isa: Isa, threads: int) -> list[Schedule]:
    """A middle schedule, and one change at a time from it, so that a space is searched in minutes."""
    if problem.operator == "gemv":
        return matrices.schedules(problem, isa, threads)
    # With 32 registers eight rows share what is loaded and unpacked once.
    whole = min(problem.rows, 4 if isa.registers <= 16 else 8)
    splits = 1 if problem.kv_heads % threads == 0 else threads
    # With 16 registers one accumulator a row leaves room for running totals; with 32 two share each small operand.
    registers = 1 if isa.registers <= 16 or whole > 4 else 2
    middle = Schedule(
        rows=whole, registers=registers, block=256, splits=splits, prefetch=PREFETCHES[-1], threads=threads
    )
    changes = [
        middle,
        *(replace(middle, registers=count) for count in (1, 2, 4)),
        replace(middle, rows=(whole + 1) // 2, registers=2),
        *(replace(middle, block=block) for block in BLOCKS),
        *(replace(middle, prefetch=lines) for lines in PREFETCHES[:-1]),
        replace(middle, splits=2 * splits),
        replace(middle, splits=1, threads=1),
    ]
    if isa.matrix and problem.rows > MOST_VECTOR_ROWS:
        changes += [replace(middle, rows=MOST_ROWS, registers=count) for count in (1, 2)]
    return list(dict.fromkeys(changes))


def unit_schedules(problem: Problem, isa: Isa, threads: int) -> list[Schedule]:
    """Schedules of the bfloat pipeline: for many rows of a cache, where there is a matrix unit."""
    unfit = not isa.matrix or "v" not in problem.roles or problem.rows <= MOST_VECTOR_ROWS
    if unfit or problem.stored("v").format == "fp16":
        return []
    splits = 1 if problem.kv_heads % threads == 0 else threads
    rows = MOST_UNIT_ROWS if problem.rows > MOST_ROWS else MOST_ROWS
    middle = Schedule(rows, 1, UNIT_BLOCKS[-1], splits, PREFETCHES[-1], threads)
    changes = [
        middle,
        *(replace(middle, block=block) for block in UNIT_BLOCKS[:-1]),
        replace(middle, registers=2),
        replace(middle, rows=MOST_ROWS),
        replace(middle, prefetch=0),
        replace(middle, splits=1, threads=1),
    ]
    return list(dict.fromkeys(changes))


def space(problem: Problem, isa: Isa, threads: int) -> Iterator[Candidate | Rejected]:
    """See `lowbit.kernels.backend.Backend.space`."""
    seen: set[Candidate] = set()
    for k_packing, v_packing in _packing_pairs(problem):
        for pipeline in (*PIPELINES, BFLOAT):
            offered = unit_schedules(problem, isa, threads) if pipeline == BFLOAT else schedules(problem, isa, threads)
            for k, v in layouts(k_packing, v_packing):
                for schedule in offered:
                    candidate = _for_operator(problem, k, v, pipeline, schedule)
                    if candidate is None or candidate in seen:
                        continue
                    seen.add(candidate)
                    impossible = rejection(problem, candidate, isa)
                    if impossible and pipeline == BFLOAT:
                        continue  # few layouts suit the unit, and the integer pipeline says why the others do not
                    reason = impossible or unpromising(problem, candidate, isa) or dearer(problem, candidate, isa)
                    yield candidate if reason is None else Rejected(candidate, reason, impossible is None)


def _packing_pairs(problem: Problem) -> Iterator[tuple[Packing, Packing]]:
    """Packings of keys and values: the same one where both have one format."""
    k, v = problem.stored(problem.roles[0]).format, problem.stored(problem.roles[-1]).format
    for first, second in itertools.product(packings(k), packings(v)):
        if k != v or first == second:
            yield first, second


def _for_operator(problem: Problem, k: Layout, v: Layout, pipeline: str, schedule: Schedule) -> Candidate | None:
    """The candidate with the operands that the operator has; None for a repetition."""
    if problem.operator == "attend":
        return Candidate(k, v, pipeline, schedule)
    if problem.operator == "sv":
        return Candidate(None, v, pipeline, schedule)
    return Candidate(k, None, pipeline, schedule) if k == v else None


def tile_specs(problem: Problem, candidate: Candidate, isa: Isa) -> list[TileSpec]:
    """The tile functions that a candidate is made of."""
    schedule = candidate.schedule
    # A winner for more vectors also serves fewer.
    rows = min(schedule.rows, problem.rows) if problem.operator == "gemv" else schedule.rows
    specs = []
    for role, layout in (("k", candidate.k), ("v", candidate.v)):
        if layout is not None:
            pipeline = _pipeline(problem, role, candidate.pipeline)
            registers = CODE_TILES if pipeline == BFLOAT else schedule.registers
            specs.append(TileSpec(role, layout, problem.head_dim, isa, pipeline, rows, registers, schedule.prefetch))
    return specs


def _pipeline(problem: Problem, role: str, pipeline: str) -> str:
    """The pipeline of one role's tiles."""
    if problem.integer(role, pipeline):
        return "integer"
    return pipeline if role == "v" and pipeline == BFLOAT else "float"


def rejection(problem: Problem, candidate: Candidate, isa: Isa) -> str | None:
    """Why the candidate cannot be compiled for ``isa``, or None."""
    roles = "".join(role for role, layout in (("k", candidate.k), ("v", candidate.v)) if layout is not None)
    if roles != "".join(problem.roles):
        return f"{problem.operator} needs other operands than {roles or 'none'}"
    for role, layout in (("k", candidate.k), ("v", candidate.v)):
        if layout is not None and layout.packing.format != problem.stored(role).format:
            return (
                f"{layout.name} holds {layout.packing.format}, {problem.precision} stores {problem.stored(role).format}"
            )
    if candidate.pipeline == "integer" and not any(problem.integer(role, "integer") for role in problem.roles):
        return "fp16 has no integer codes to contract"
    if candidate.pipeline == BFLOAT and candidate.v is None:
        return "bfloat weights values, and there are none"
    for spec in tile_specs(problem, candidate, isa):
        try:
            accumulators(spec)
            if spec.bfloat:
                check_unit(spec)
            elif spec.matrix:
                check_tiles(spec)
        except Infeasible as error:
            return f"{spec.role.upper()}: {error}"
    return None


def unpromising(problem: Problem, candidate: Candidate, isa: Isa) -> str | None:
    """Why a candidate that compiles is not worth trying, or None."""
    if problem.operator == "gemv" and (reason := matrices.unpromising(problem, candidate, isa)):
        return reason
    for spec in tile_specs(problem, candidate, isa):
        if spec.matrix:
            continue  # sums are in the unit and in memory
        if accumulators(spec) > isa.registers - WORKING_REGISTERS:
            return f"{spec.role.upper()}: {accumulators(spec)} accumulators would spill from {isa.registers} registers"
        if _totals_spill(spec) and accumulators(replace(spec, registers=1)) < accumulators(spec):
            return f"{spec.role.upper()}: running totals would spill, and fewer accumulators do the same work"
    return None


def dearer(problem: Problem, candidate: Candidate, isa: Isa) -> str | None:
    """Why another coding of the same packing is tried instead where keys and values differ in format, or None.

    All pairs of their packings would be a space many times that of one format. Most of it differs by an instruction.
    """
    if problem.stored(problem.roles[0]) == problem.stored(problem.roles[-1]):
        return None
    for role, layout in (("k", candidate.k), ("v", candidate.v)):
        if layout is None:
            continue
        integer, packing = _pipeline(problem, role, candidate.pipeline) != "float", layout.packing
        if _flip(packing, role, integer, isa) and any(
            twin.arrangement == packing.arrangement and not _flip(twin, role, integer, isa)
            for twin in packings(packing.format)
        ):
            return f"{role.upper()}: {packing.coding} codes take an exclusive-or that those of the other coding do not"
    return None


def _flip(packing: Packing, role: str, integer: bool, isa: Isa) -> int:
    if packing.bits == 16:
        return 0
    return integer_form(packing, role, isa).flip if integer else float_flip(packing)


def _totals_spill(spec: TileSpec) -> bool:
    """Whether the float32 totals of integer dots, one beside each accumulator, do not stay in registers."""
    return spec.role == "k" and spec.integer and 2 * accumulators(spec) > spec.isa.registers - WORKING_REGISTERS


def accumulators(spec: TileSpec) -> int:
    """Vector registers that the hot loop accumulates in; raises `Infeasible` if the layout does not fit the target."""
    return len(spec.plan.any.lanes) * spec.rows


def baseline(problem: Problem, isa: Isa, threads: int) -> Candidate:
    """Row-major storage, dequantised to float in the hot loop, packed as common runtimes do, with no register spilt.

    Where rows are shorter than a load, tokens lie side by side instead.
    """
    names = {"fp16": "fp16", "int8": "int8/bytes/signed", "int4": "int4/contiguous/offset"}
    middle = schedules(problem, isa, threads)[0]
    tried = []
    for order in ("T D", "T/16 D t16", "T/32 D t32"):
        k, v = (
            Layout.parse(f"{order} | {packing_named(names[problem.stored(role).format]).name}")
            for role in (problem.roles[0], problem.roles[-1])
        )
        for rows in dict.fromkeys((middle.rows, (middle.rows + 1) // 2, 1)):
            tried.append(_for_operator(problem, k, v, "float", replace(middle, rows=rows)))
    return next(
        candidate
        for candidate in tried
        if candidate and (rejection(problem, candidate, isa) or unpromising(problem, candidate, isa)) is None
    )

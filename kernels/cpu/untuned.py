"""What to run where nothing was tuned: the layouts that usually win, and then every other one.

Each comes with one schedule, the middle one. What usually wins was read from tuned machines: tiles of as many tokens as
two registers have 32-bit lanes (one register's, where there are few registers) and as many channels as a word holds
codes, values in the mirror image, so that a loop reads registers that are neighbours in memory; 4-bit codes arranged so
that whole registers unpack with a mask or a shift.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..candidate import Candidate, Schedule
from ..layout import Factor, Layout
from ..packing import packing_named, packings
from ..problem import Problem
from .isa import Isa
from .space import baseline, mirrored, orders, rejection, schedules, unpromising

_PACKINGS = {
    "fp16": ("fp16",),
    "int8": ("int8/bytes/signed", "int8/bytes/offset"),
    "int4": ("int4/lane_interleaved/signed", "int4/planes/offset", "int4/contiguous_permuted/offset"),
}
_MATRIX_PACKINGS = {
    **_PACKINGS,
    "int8": ("int8/bytes/offset", "int8/bytes/signed"),
    "int4": ("int4/contiguous_permuted/offset", "int4/planes/offset", "int4/lane_interleaved/signed"),
}
_FEW_REGISTERS = {**_PACKINGS, "int4": ("int4/planes/offset", "int4/lane_interleaved/signed")}


def untuned(problem: Problem, isa: Isa, threads: int) -> Iterator[Candidate]:
    """Candidates that compile, the most promising first: one of each layout and pipeline, then the baseline."""
    middle = schedules(problem, isa, threads)[0]
    last, seen = baseline(problem, isa, threads), set()
    for candidate in itertools.chain(_usual(problem, isa, middle), _others(problem, middle)):
        if candidate in seen:
            continue
        seen.add(candidate)
        # Where accumulators would spill, fewer registers or rows do the same work.
        for registers, rows in ((middle.registers, middle.rows), (1, middle.rows), (1, (middle.rows + 1) // 2)):
            fewer = replace(candidate, plan=replace(middle, registers=registers, rows=rows))
            if (rejection(problem, fewer, isa) or unpromising(problem, fewer, isa)) is None:
                if fewer != last:
                    yield fewer
                break
    yield last


def _usual(problem: Problem, isa: Isa, middle: Schedule) -> Iterator[Candidate]:
    wide = isa.vector_bytes == 64
    preferred = _MATRIX_PACKINGS if problem.operator == "gemv" else _PACKINGS if wide else _FEW_REGISTERS
    formats = problem.stored(problem.roles[0]).format, problem.stored(problem.roles[-1]).format
    for tokens in (32, 16) if wide else (16, 32):
        for k, v in _pairs(preferred[formats[0]], preferred[formats[1]]):
            yield from _candidates(problem, middle, _tiled(tokens, k), mirrored(_tiled(tokens, v)), k, v)


def _tiled(tokens: int, packing: str) -> str:
    channels = 8 if packing.startswith("int4") else 4
    return f"T/{tokens} D/{channels} t{tokens} d{channels}"


def _others(problem: Problem, middle: Schedule) -> Iterator[Candidate]:
    """Every order, with values in the keys' own and in its mirror image."""
    k_names, v_names = (
        [packing.name for packing in packings(problem.stored(role).format)]
        for role in (problem.roles[0], problem.roles[-1])
    )
    for order in orders():
        for k, v in _pairs(k_names, v_names):
            yield from _candidates(problem, middle, order, mirrored(order), k, v)
            yield from _candidates(problem, middle, order, order, k, v)


def _pairs(k_names: Sequence[str], v_names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Both in their order; the shorter one's last goes with the rest of the other."""
    for turn in range(max(len(k_names), len(v_names))):
        yield k_names[min(turn, len(k_names) - 1)], v_names[min(turn, len(v_names) - 1)]


def _candidates(
    problem: Problem, middle: Schedule, k_order: str, v_order: str | None, k_packing: str, v_packing: str
) -> Iterator[Candidate]:
    layouts: dict[str, Layout] = {}
    for role, order, packing in (("k", k_order, k_packing), ("v", v_order, v_packing)):
        if role in problem.roles:
            if order is None:
                return
            layouts[role] = Layout(tuple(map(Factor.parse, order.split())), packing_named(packing))
    integer = any(problem.integer(role, "integer") for role in problem.roles)
    yield Candidate(layouts.get("k"), layouts.get("v"), "integer" if integer else "float", middle)

"""What a tile's code yields: once counted it stands for every call, and survives the database."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from lowbit.costmodel import tile
from lowbit.costmodel.tile import TileCounts, count
from lowbit.kernels.backend import Code
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.cpu import spec as spec_module
from lowbit.kernels.cpu.backend import CpuBackend
from lowbit.kernels.cpu.isa import isa_named
from lowbit.kernels.cpu.share import Share
from lowbit.kernels.cpu.spec import TileSpec
from lowbit.kernels.errors import CompileError
from lowbit.kernels.layout import Layout
from lowbit.kernels.problem import Problem

# Outside any loop an add; once for each row of 128 channels a zeroing store; 64 values an iteration of the hot loop.
TEXT = (
    "f:\n\taddq $8, %rsi\n"
    ".LA: # %once.per.128.channels.\n\tvmovdqu %ymm6, (%rcx)\n"
    ".LB: # %once.per.64.values.\n\tvmovdqu (%rdi,%rax), %ymm0\n\tvpand %ymm7, %ymm0, %ymm1\n"
    "\tvpsrlw $4, %ymm1, %ymm1\n\tvpdpbusd %ymm2, %ymm1, %ymm6\n"
    "\taddq $32, %rax\n\tjne .LB\n\tdecq %rdx\n\tjne .LA\n\tretq\n.Lfunc_end0:\n"
)
CODE = Code("k", "f", "", TEXT, 64, 4, "int4/planes/offset")


def test_counts_say_what_the_code_is_and_unpacks() -> None:
    found = count(CODE)
    assert (found.symbol, found.role, found.rows, found.packing) == ("f", "k", 4, "int4/planes/offset")
    assert found.unpacking == {"vpand": 1, "vpsrlw": 1}
    assert found.unpack_ops_per_32 == 1.0
    assert dict(found.parts)[Share(64)] == {
        "load": 1, "mask": 1, "shift": 1, "dot": 1, "address": 1, "branch": 1
    }  # fmt: skip


def test_each_part_runs_as_often_as_its_share_says() -> None:
    found = count(CODE).executed(values=64 * 128.0, channels=128, block=32)
    # 64 tokens of 128 channels in blocks of 32: 128 iterations of the hot loop, and 2 calls.
    assert found["dot"] == found["mask"] == found["shift"] == found["load"] == 128
    assert found["store"] == 2
    assert found["branch"] == 128 + 2 + 2
    # The hot loop's add, the outer loop's counter, and the add that stands outside.
    assert found["address"] == 128 + 2 + 2


def test_counts_survive_json() -> None:
    found = count(CODE)
    assert TileCounts.from_dict(json.loads(json.dumps(found.as_dict()))) == found


def test_counts_of_another_release_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = count(CODE).as_dict()
    monkeypatch.setattr(tile, "counter", lambda: "another")
    assert TileCounts.from_dict(stored) is None


def test_code_that_cannot_be_counted_says_why() -> None:
    with pytest.raises(CompileError, match="no function 'g'"):
        count(replace(CODE, symbol="g"))


def tiles(problem: str, isa: str = "avx2", nth: int = 0) -> tuple[str, ...]:
    backend, parsed = CpuBackend(isa), Problem.parse(problem)
    legal = (each for each in backend.space(parsed, 2) if isinstance(each, Candidate))
    return backend.tiles(parsed, next(itertools.islice(legal, nth, None)))


def test_symbols_are_those_of_the_code_and_shared_by_problems() -> None:
    backend, problem = CpuBackend("avx2"), Problem.parse("attend h8/2 d64 q1 w8a8")
    candidate = next(each for each in backend.space(problem, 2) if isinstance(each, Candidate))
    plain = replace(candidate, plan=replace(candidate.schedule, prefetch=0))
    codes = backend.code(problem, plain)
    symbols = backend.tiles(problem, candidate)
    assert backend.tiles(problem, plain) == symbols  # prefetches are not counted
    assert symbols == tuple(code.symbol for code in codes) and len(set(symbols)) == 2
    assert [backend.tile(problem, candidate, symbol) for symbol in symbols] == codes
    # Heads, splits, blocks and threads are no part of the code; rows are.
    assert tiles("attend h16/4 d64 q1 w8a8") == symbols
    other = replace(candidate, plan=replace(candidate.schedule, block=64, splits=7, threads=1))
    assert backend.tiles(problem, other) == symbols
    fewer = replace(candidate, plan=replace(candidate.schedule, rows=3))
    assert not set(symbols) & set(backend.tiles(problem, fewer))


def test_symbols_differ_with_whatever_the_code_depends_on() -> None:
    names = {
        tiles("qk h8/2 d64 q1 w4a8", *more)[0]
        for more in (("avx2",), ("avx512_vnni",), ("neon_dot",), ("generic",), ("avx2", 1))
    } | {tiles("qk h8/2 d96 q1 w4a8")[0], tiles("qk h8/2 d64 q1 w8a8")[0]}
    assert len(names) == 7


def test_a_packing_of_the_same_name_that_places_or_lowers_otherwise_has_other_symbols() -> None:
    def spec(**changes: Any) -> str:
        layout = Layout.parse("T D | int4/planes/offset")
        layout = replace(layout, packing=replace(layout.packing, arrangement="mine", **changes))
        # Packings are equal by name, so what one process has remembered of the first must not answer for the second.
        spec_module._unpacking.cache_clear()
        return TileSpec("k", layout, 64, isa_named("avx2"), "integer", 4, 1, 0).symbol

    symbols = {spec(), spec(place=lambda i: (31 - i % 32, i // 32 * 4)), spec(lower=lower), spec(in_order=True)}
    assert len(symbols) == 4
    assert spec(lower=lower) in symbols


def lower(emit: Any, word: Any) -> list[Any]:
    raise AssertionError("naming a tile generates nothing")

"""The table that `select` looks up, against the order that it has to follow."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.db import Winner
from lowbit.kernels.candidate import Candidate, Schedule
from lowbit.kernels.errors import CompileError, ProblemError
from lowbit.kernels.layout import Layout
from lowbit.kernels.problem import Problem
from lowbit.runtime.choice import Choice, Entry, Pools, ranked, untuned_length
from lowbit.runtime.table import SelectTable

PROBLEM = Problem("attend", 32, 8, 128, "w8a8")
LAYOUT = Layout.parse("T D | int8/bytes/signed")


def candidate(registers: int) -> Candidate:
    return Candidate(LAYOUT, LAYOUT, "integer", Schedule(4, registers, 64, 1, 0, 2))


DEFAULT = Choice(None, candidate(64), "default")


def entry(tokens: int, below: int, above: int | None, registers: int, stale: bool, predicted: bool) -> Entry:
    winner = Winner(
        device="here",
        problem=PROBLEM.key,
        tokens=tokens,
        tokens_from=max(tokens - below, 1),
        tokens_to=None if above is None else tokens + above,
        candidate=candidate(registers).name,
        provenance="predicted" if predicted else "measured",
        median_us=1.0,
        protocol="warm",
        toolchain="t",
    )
    from math import log2

    return Entry(winner, candidate(registers), stale, registers % 3, log2(tokens))


entries = st.builds(
    entry,
    st.integers(1, 1 << 14) | st.sampled_from([1 << i for i in range(15)]),
    st.integers(0, 3000),
    st.none() | st.integers(0, 3000),
    st.integers(1, 60),
    st.booleans(),
    st.booleans(),
)
some = st.lists(entries, max_size=5).map(tuple)


def table(pools: Pools, faulty: frozenset[str] = frozenset(), told: list[Any] | None = None) -> SelectTable:
    def choices(tokens: int) -> Iterator[Choice]:
        yield from ranked(pools, tokens)
        yield DEFAULT

    def kernel(candidate: Candidate) -> Any:
        if candidate.name in faulty:
            raise CompileError("faulty")
        return candidate

    def tell(tokens: int, choice: Choice, skipped: Mapping[str, str]) -> None:
        if told is not None:
            told.append((tokens, choice, dict(skipped)))

    return SelectTable(PROBLEM, pools.starts, choices, kernel, tell)


@settings(max_examples=300)
@given(some, some, some, st.lists(st.integers(1, 1 << 15), min_size=1, max_size=20), st.data())
def test_rows_follow_the_order_at_every_length(
    same: tuple[Entry, ...],
    family: tuple[Entry, ...],
    others: tuple[Entry, ...],
    lengths: list[int],
    data: st.DataObject,
) -> None:
    pools = Pools(same, family, others)
    known = sorted({each.candidate.name for each in (*same, *family, *others)})
    faulty = data.draw(st.frozensets(st.sampled_from(known))) if known else frozenset()
    edges = [start + step for start in pools.starts for step in (-1, 0) if start + step >= 1]
    ours = table(pools, faulty)
    for tokens in (*lengths, *edges):
        choices = [*ranked(pools, tokens), DEFAULT]
        expected = next(choice for choice in choices if choice.candidate.name not in faulty)
        assert ours.select(tokens) == expected.candidate
        assert ours.choose(tokens) == expected


def test_breaks_are_where_the_first_choice_changes() -> None:
    pools = Pools((entry(100, 99, 200, 1, False, False), entry(1000, 699, None, 2, False, False)), (), ())
    assert [(start, choice.candidate) for start, choice in table(pools).breaks()] == [
        (1, candidate(1)),
        (301, candidate(2)),
    ]


def test_a_length_that_is_none_is_refused_before_and_after_its_row_is_compiled() -> None:
    ours = table(Pools((), (), ()))
    for _ in range(2):
        for bad in (0, -1, (1 << 24) + 1, 2.0, True, "3"):
            with pytest.raises(ProblemError):
                ours.select(bad)  # type: ignore[arg-type]
            with pytest.raises(ProblemError):
                ours.choose(bad)  # type: ignore[arg-type]
        for good in (1, 2, 3, 1 << 24):
            assert ours.select(good) == DEFAULT.candidate


def test_a_fault_of_the_last_choice_is_raised_each_time() -> None:
    ours = table(Pools((entry(100, 99, None, 64, False, False),), (), ()), frozenset({DEFAULT.candidate.name}))
    for _ in range(2):
        with pytest.raises(CompileError, match="faulty"):
            ours.select(5)


def test_what_was_skipped_is_told_once_a_row() -> None:
    told: list[Any] = []
    pools = Pools((entry(100, 99, None, 1, False, False),), (), ())
    ours = table(pools, frozenset({candidate(1).name}), told)
    for _ in range(3):
        ours.select(50)
    assert told == [(50, DEFAULT, {candidate(1).name: "faulty"})]
    assert ours.choose(50) == DEFAULT


def test_a_look_up_allocates_nothing() -> None:
    pools = Pools(tuple(entry(100 * i, 0, 0, i, False, False) for i in range(1, 9)), (), ())
    ours = table(pools)
    lengths = list(range(1000, 3000, 7))
    select = ours.select

    def look_up() -> None:
        for tokens in lengths:
            select(tokens)

    look_up()
    before = sys.getallocatedblocks()
    look_up()
    assert sys.getallocatedblocks() - before <= 1


def test_threads_that_ask_at_once_get_one_answer() -> None:
    pools = Pools(tuple(entry(100 * i, 50, 50, i, False, False) for i in range(1, 9)), (), ())
    ours, found = table(pools), []
    start = threading.Barrier(4)

    def ask() -> None:
        start.wait()
        found.append([ours.select(tokens) for tokens in range(1, 1000, 3)])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all(each == found[0] for each in found[1:])


@given(st.integers(1, 1 << 24))
def test_an_untuned_length_is_the_same_within_a_row(tokens: int) -> None:
    starts = Pools((), (), ()).starts
    row = max(start for start in starts if start <= tokens)
    assert untuned_length(row) == untuned_length(tokens)

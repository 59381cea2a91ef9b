from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from fake_backend import (
    COMPILER_DIES,
    COMPILER_HANGS,
    LAYOUTS,
    PROBLEM,
    REFUSES,
    SEGV,
    TILE_LOG,
    FakeBackend,
    candidate,
)
from lowbit.autotune.cpu_target import CpuTarget
from lowbit.costmodel import tile
from lowbit.db.store import Store
from lowbit.kernels.backend import Backend
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.cuda.backend import CudaBackend
from lowbit.kernels.problem import Problem
from lowbit.search.crew import Crew
from lowbit.search.features import extract
from lowbit.search.messages import Count, Setup
from lowbit.search.tiles import OUT_OF_TIME, TileCounter

GOOD = [candidate(10 * n, SEGV if n == 3 else 0, layout) for n in (1, 2, 3) for layout in LAYOUTS]
CPU = CpuTarget("fake", FakeBackend(), 1)
SETUP = Setup("fake_backend:FakeBackend", search_path=tuple(sys.path))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that gets a line for each tile function that any worker generates."""
    path = tmp_path / "tiles.log"
    path.touch()
    monkeypatch.setenv(TILE_LOG, str(path))
    return path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "t.db") as store:
        yield store


def named(*candidates: Candidate) -> dict[str, Candidate]:
    return {each.name: each for each in candidates}


def quiet(done: int, total: int) -> None:
    pass


def counter(crew: Crew, store: Store) -> TileCounter:
    return TileCounter(FakeBackend(), crew, store, "fake 1")


def generated(log: Path) -> list[str]:
    return sorted(log.read_text().split())


def test_each_tile_is_generated_once_and_never_again(store: Store, log: Path) -> None:
    seen: list[tuple[int, int]] = []
    with Crew(SETUP, 2) as crew:
        tiles, failed = counter(crew, store).count(PROBLEM, named(*GOOD), lambda *each: seen.append(each))
    # Three layouts, two operands; schedules share them.
    expected = [f"{role}_{n}_0" for role in "kv" for n in range(len(LAYOUTS))]
    assert generated(log) == expected
    assert sorted(store.tiles("fake 1")) == expected
    assert (seen[0], seen[-1]) == ((0, 6), (6, 6))
    assert failed == {}
    for each in GOOD:
        assert [tile.role for tile in tiles[each.name]] == ["k", "v"]
        shifts = LAYOUTS.index(each.k.name) if each.k else None
        assert all(tile.unpacking == ({"vpsrlw": shifts} if shifts else {}) for tile in tiles[each.name])
    with Crew(SETUP, 2) as crew:
        again = counter(crew, store).count(PROBLEM, named(*GOOD), quiet)
        assert crew._workers == [None, None]
    assert again == (tiles, failed)
    assert generated(log) == expected


def test_another_problem_and_other_lengths_need_no_worker(store: Store) -> None:
    wider = Problem("attend", 8, 4, 32, "fp16")
    with Crew(SETUP, 1) as crew:
        first = extract(PROBLEM, [40], named(*GOOD), counter(crew, store), CPU, quiet)
    with Crew(SETUP, 1) as crew:
        second = extract(wider, [40, 80], named(*GOOD), counter(crew, store), CPU, quiet)
        assert crew._workers == [None]
    name = GOOD[0].name
    one, four = first.features[40][name], second.features[40][name]
    # Four times as many key/value heads, each with two query heads as before.
    assert four.instructions == {kind: 4 * count for kind, count in one.instructions.items()}
    assert one.instructions["load"] > 0
    assert (four.bytes, four.exponentials) == (4 * one.bytes, 4 * one.exponentials)
    assert second.features[80][name].exponentials == 2 * four.exponentials


def test_faults_of_one_tile_cost_only_those_who_need_it(store: Store) -> None:
    bad = [candidate(10, behaviour, LAYOUTS[1]) for behaviour in (COMPILER_DIES, REFUSES, COMPILER_HANGS)]
    with Crew(SETUP, 2, {"compile": 1.0}) as crew:
        found = extract(PROBLEM, [40], named(*bad, *GOOD), counter(crew, store), CPU, quiet)
    assert {name: reason.partition(":")[0] for name, reason in found.failed.items()} == {
        bad[0].name: "crashed",
        bad[1].name: "no such instruction",
        bad[2].name: "hung",
    }
    assert set(found.features[40]) == set(found.tiles) == set(named(*GOOD))
    assert len(store.tiles("fake 1")) == 6


def test_what_is_out_of_time_is_left_and_what_is_known_is_used(store: Store) -> None:
    slow = candidate(10, COMPILER_HANGS)
    everything: Mapping[str, Candidate] = named(*GOOD, slow)
    with Crew(SETUP, 1) as crew:
        tiles, failed = counter(crew, store).count(PROBLEM, everything, quiet, time.monotonic())
        assert (tiles, failed) == ({}, dict.fromkeys(everything, OUT_OF_TIME))
        assert crew._workers == [None]
        counter(crew, store).count(PROBLEM, named(*GOOD), quiet)
        # The compiler would hang for a minute before it were killed.
        started = time.monotonic()
        tiles, failed = counter(crew, store).count(PROBLEM, everything, quiet, started + 0.5)
        assert time.monotonic() - started < 30
    assert set(tiles) == set(named(*GOOD))
    assert failed == {slow.name: OUT_OF_TIME}


def test_all_layouts_come_before_the_second_schedule_of_any(
    store: Store, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeBackend, "counted_at_once", 1)
    space = [candidate(10), candidate(20, REFUSES), candidate(10, layout=LAYOUTS[1])]
    with Crew(SETUP, 1) as crew:
        counter(crew, store).count(PROBLEM, named(*space), quiet)
    refused = f"0_{REFUSES}"
    assert log.read_text().split() == ["k_0_0", "v_0_0", "k_1_0", "v_1_0", f"k_{refused}", f"v_{refused}"]


def test_an_interrupt_keeps_the_chunks_before_it(store: Store, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeBackend, "counted_at_once", 1)

    def interrupt(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with Crew(SETUP, 1) as crew:
        with pytest.raises(KeyboardInterrupt):
            counter(crew, store).count(PROBLEM, named(*GOOD), interrupt)
        kept = set(store.tiles("fake 1"))
        assert len(kept) == 3
        log.write_text("")
        tiles, _ = counter(crew, store).count(PROBLEM, named(*GOOD), quiet)
    assert len(tiles) == len(GOOD)
    assert kept.isdisjoint(generated(log))


@pytest.mark.parametrize(("at_once", "kept"), [(1, 4), (8, 0)])
def test_what_is_finished_when_the_time_is_up_is_kept_by_requests(
    store: Store, log: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, kept: int
) -> None:
    monkeypatch.setattr(FakeBackend, "counted_at_once", at_once)
    space = named(candidate(10), candidate(10, layout=LAYOUTS[1]), candidate(10, COMPILER_HANGS, LAYOUTS[2]))
    with Crew(SETUP, 1) as crew:
        crew.ask(Count(PROBLEM.key, ()))  # starting takes a second or two
        tiles, failed = counter(crew, store).count(PROBLEM, space, quiet, time.monotonic() + 2.0)
    assert len(generated(log)) == 5  # the last one hangs
    assert len(store.tiles("fake 1")) == kept
    assert (len(tiles), set(failed.values())) == (kept // 2, {OUT_OF_TIME})


def test_kernels_of_gpus_are_counted_one_by_one() -> None:
    assert (CudaBackend("sm_86").counted_at_once, Backend.counted_at_once) == (1, 8)


def test_counts_of_another_release_or_toolchain_are_made_anew(
    store: Store, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Crew(SETUP, 1) as crew:
        counter(crew, store).count(PROBLEM, named(GOOD[0]), quiet)
        TileCounter(FakeBackend(), crew, store, "fake 2").count(PROBLEM, named(GOOD[0]), quiet)
        assert generated(log) == ["k_0_0", "k_0_0", "v_0_0", "v_0_0"]
        monkeypatch.setattr(tile, "counter", lambda: "the next release")
        tiles, _ = counter(crew, store).count(PROBLEM, named(GOOD[0]), quiet)
        assert len(generated(log)) == 6
        assert counter(crew, store).count(PROBLEM, named(GOOD[0]), quiet)[0] == tiles
    assert len(generated(log)) == 6

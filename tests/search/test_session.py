from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fake_backend import HANG, LAYOUTS, PROBLEM, REFUSES, SEGV, WRONG, FakeBackend, candidate
from lowbit.db.store import Store
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.errors import NoiseError
from lowbit.search.crew import Crew
from lowbit.search.messages import Setup
from lowbit.search.rounds import Effort
from lowbit.search.session import Bench, DeviceSession
from lowbit.search.strategy import Parameters, strategy_named

TOKENS = 40
EFFORT = Effort(min_rounds=2, max_rounds=4, target_spread=0.5)
PARAMETERS = Parameters(top_k=3, trials=6, screen=EFFORT, final=EFFORT)
SPACE = [
    candidate(300),
    candidate(100, layout=LAYOUTS[1]),
    candidate(10, WRONG),
    candidate(200, layout=LAYOUTS[2]),
    candidate(10, SEGV),
    candidate(10, REFUSES),
    candidate(10, HANG),
]
BASELINE = candidate(400)


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not fail a test: nothing counts as contention, unless a test says so."""
    monkeypatch.setattr("lowbit.search.rounds.tainted", lambda slot, contention: False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "t.db") as store:
        yield store


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    setup = Setup("fake_backend:FakeBackend", cache_bytes=1 << 20, search_path=tuple(sys.path))
    with Crew(setup, 2, {"run": 2.0}) as crew:
        yield crew


def bench(crew: Crew, store: Store, protocol: str = "warm") -> Bench:
    return Bench(crew, store, "device", FakeBackend().toolchain(), protocol, cache_bytes=1 << 20)


def session(
    crew: Crew, store: Store, space: list[Candidate] = SPACE, protocol: str = "warm", deadline: float | None = None
) -> DeviceSession:
    candidates = {c.name: c for c in space}
    predicted = {name: float(i + 1) for i, name in enumerate(candidates)}
    return DeviceSession(bench(crew, store, protocol), PROBLEM, TOKENS, candidates, predicted, BASELINE, deadline)


@pytest.mark.parametrize("name", ["verify", "optuna", "oracle"])
def test_planted_faults_are_classified_and_the_fastest_correct_candidate_wins(
    crew: Crew, store: Store, name: str
) -> None:
    here = session(crew, store)
    choice = strategy_named(name).choose(here, PARAMETERS)
    assert choice.candidate == SPACE[1]
    assert choice.measurement is not None and (choice.measurement.median_us or 0) >= 1000
    assert choice.baseline is not None and (choice.baseline.median_us or 0) >= 4000
    statuses = {m.candidate: m.status for m in store.measurements("device", PROBLEM.key, TOKENS, "fake 1")}
    assert statuses == {n: m.status for n, m in here.measured.items()}
    expected = {c.name: status for c, status in zip(SPACE, _expected(), strict=True)}
    for candidate_name, status in statuses.items():
        assert status in expected.get(candidate_name, ("ok",))
    if name == "oracle":
        assert set(statuses) == {*expected, BASELINE.name}
        wrong = here.measured[SPACE[2].name]
        assert wrong.max_error == pytest.approx(0.5, abs=1e-3) and wrong.median_us is None


def _expected() -> list[tuple[str, ...]]:
    timed = ("ok", "slow")
    return [timed, ("ok",), ("wrong",), timed, ("crashed",), ("compile_failed",), ("hung",)]


def test_an_interrupted_session_resumes_and_measures_nothing_twice(crew: Crew, store: Store) -> None:
    first = session(crew, store)
    names = list(first.candidates)
    first.measure(names[:3], EFFORT)
    before = store.measurements("device", PROBLEM.key, TOKENS, "fake 1")
    assert {m.candidate for m in before} == {*names[:3]}
    second = session(crew, store)
    results = second.measure(names[:5], EFFORT)
    assert [m.candidate for m in results] == names[:5]
    assert results[:3] == [first.measured[name] for name in names[:3]]
    rows = store.info()["counts"]["measurements"]
    assert rows == 5
    third = session(crew, store)
    assert third.measure(names[:5], EFFORT) == results
    assert store.info()["counts"]["measurements"] == rows


def test_protocols_and_context_lengths_are_measured_apart(crew: Crew, store: Store) -> None:
    name = SPACE[1].name
    warm = session(crew, store).measure([name], EFFORT)
    cold = session(crew, store, protocol="cold").measure([name], EFFORT)
    assert [warm[0].protocol, cold[0].protocol] == ["warm", "cold"]
    assert warm[0] != cold[0]


def test_a_final_measures_anew_unless_an_earlier_run_was_concluded(crew: Crew, store: Store) -> None:
    from lowbit.db.records import Winner

    here = session(crew, store)
    names = [SPACE[1].name, SPACE[3].name]
    screened = here.measure(names, EFFORT)
    final = here.measure(names, EFFORT, final=True)
    assert [m.created for m in final] != [m.created for m in screened]
    winner = Winner(
        device="device", problem=PROBLEM.key, tokens=TOKENS, tokens_from=1, tokens_to=None, candidate=names[0],
        provenance="verified", median_us=1.0, protocol="warm", toolchain="fake 1",
    )  # fmt: skip
    store.put_winner(winner)
    again = session(crew, store)
    assert again.measure(names, EFFORT, final=True) == final


def test_a_candidate_given_up_as_slow_is_timed_properly_when_it_matters(crew: Crew, store: Store) -> None:
    here = session(crew, store, [candidate(20), candidate(600)])
    fast, slow = here.candidates
    given_up = here.measure([fast, slow], Effort(2, 4, 0.5, slow_factor=2.0))
    assert [m.status for m in given_up] == ["ok", "slow"]
    assert here.measure([slow], Effort(2, 4, 0.5, slow_factor=2.0))[0] == given_up[1]
    assert here.measure([slow], EFFORT)[0].status == "ok"


def test_without_time_nothing_is_measured(crew: Crew, store: Store) -> None:
    here = session(crew, store, deadline=0.0)
    assert here.exhausted
    assert here.measure(list(here.candidates), EFFORT) == []
    assert here.settled == set()


def test_a_crash_does_not_lose_what_its_worker_had_compiled(store: Store) -> None:
    """All in one worker: it dies between preparing the good ones and timing them."""
    setup = Setup("fake_backend:FakeBackend", cache_bytes=1 << 20, search_path=tuple(sys.path))
    space = [candidate(20), candidate(30), candidate(10, SEGV)]
    with Crew(setup, 1) as alone:
        here = session(alone, store, space)
        statuses = [m.status for m in here.measure(list(here.candidates), EFFORT)]
    assert statuses == ["ok", "ok", "crashed"]


def test_noise_costs_a_chunk_and_ends_the_session_only_if_it_spoils_everything(
    crew: Crew, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = session(crew, store, [candidate(20), candidate(30)])
    names = list(here.candidates)
    monkeypatch.setattr("lowbit.search.session.MAX_CHUNK", 2)
    monkeypatch.setattr("lowbit.search.rounds.tainted", lambda slot, contention: True)
    with pytest.raises(NoiseError, match="undisturbed"):
        here.measure(names, EFFORT)
    assert store.info()["counts"]["measurements"] == 0
    # The first chunk is disturbed the first time, and comes again after the second one.
    more = session(crew, store, [candidate(each) for each in (20, 30, 40, 50)])
    undisturbed = DeviceSession._measure_chunk
    chunks: list[Sequence[str]] = []

    def first_disturbed(self: DeviceSession, chunk: Sequence[str], effort: Effort) -> None:
        chunks.append(chunk)
        if len(chunks) == 1:
            raise NoiseError("disturbed")
        undisturbed(self, chunk, effort)

    monkeypatch.setattr("lowbit.search.rounds.tainted", lambda slot, contention: False)
    monkeypatch.setattr(DeviceSession, "_measure_chunk", first_disturbed)
    measured = more.measure(list(more.candidates), EFFORT)
    assert [m.candidate for m in measured] == list(more.candidates)
    assert chunks == [list(more.candidates)[:2], list(more.candidates)[2:], list(more.candidates)[:2]]

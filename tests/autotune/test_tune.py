from __future__ import annotations

import functools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lowbit.autotune.outcome import Options, TuneInterrupted, TuneReport
from lowbit.autotune.ranges import store_winner, with_ranges
from lowbit.autotune.ranking import Ranked, Ranker
from lowbit.autotune.tune import tune
from lowbit.costmodel.assembly import CLASSES
from lowbit.costmodel.bandwidth import Bandwidth, BandwidthPoint
from lowbit.costmodel.calibrate import Calibration
from lowbit.costmodel.device import detect
from lowbit.costmodel.lep import EXTENDED, TWO_TERM, Coefficients
from lowbit.costmodel.tile import count
from lowbit.db.records import Winner
from lowbit.db.store import Store
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.errors import DatabaseError, DeviceError, LowbitError, NoiseError, ProblemError
from lowbit.kernels.problem import Problem

FAKES = str(Path(__file__).parents[1] / "search")
sys.path.insert(0, FAKES)

from fake_backend import PROBLEM, REFUSES, SEGV, WRONG, FakeBackend  # noqa: E402

TOKENS = [40, 90]
FAKE = "fake_backend:FakeBackend"


@pytest.fixture(autouse=True)
def fakes_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FAKES)
    # A busy machine must not fail a test: nothing counts as contention here.
    monkeypatch.setattr("lowbit.search.rounds.tainted", lambda slot, contention: False)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A database that knows this machine's coefficients, so that no test calibrates."""
    path = tmp_path / "t.db"
    device = detect()
    bandwidth = Bandwidth((BandwidthPoint(1, 1 << 12, 100.0, "L1"), BandwidthPoint(1, 1 << 30, 10.0, "DRAM")))
    extended = {f"{name}_ns": 0.0 for name in CLASSES} | {
        "exponential_ns": 0.0,
        "task_us": 0.0,
        "fork_us": 0.0,
        "gamma": 0.0,
    }
    calibration = Calibration(
        device, 1, bandwidth, Coefficients(TWO_TERM, {"alpha1": 1.0, "alpha2_ns": 0.0}, bandwidth, 1),
        Coefficients(EXTENDED, extended, bandwidth, 1), (), 0.0, 1.0, "t",
    )  # fmt: skip
    with Store.open(path) as store:
        store.put_calibration(device.fingerprint, 1, calibration.as_dict(), "t")
    return path


def options(db: Path, strategy: str = "oracle", **more: Any) -> Options:
    return Options(db, FAKE, strategy, threads=1, quick=True, deadlines_s={"run": 5.0}, **{"protocol": "warm", **more})


def winners(db: Path) -> list[Winner]:
    with Store.open(db, mode="read") as store:
        return store.winners()


def measurement_rows(db: Path) -> int:
    with Store.open(db, mode="read") as store:
        return int(store.info()["counts"]["measurements"])


def fake_space() -> tuple[list[Candidate], int]:
    every = list(FakeBackend().space(PROBLEM, 1))
    candidates = [each for each in every if isinstance(each, Candidate)]
    return candidates, len(every) - len(candidates)


class Recorder:
    def __init__(self, at: Callable[[str, int], None] = lambda phase, done: None) -> None:
        self.updates: list[tuple[str, int, int | None, str]] = []
        self.at = at

    def update(self, phase: str, done: int, total: int | None, message: str) -> None:
        self.updates.append((phase, done, total, message))
        self.at(phase, done)


def test_the_oracle_measures_the_space_and_stores_winners(db: Path) -> None:
    progress = Recorder()
    report = tune([PROBLEM], TOKENS, options(db, protocol="cold"), progress)
    data = json.loads(json.dumps(report.as_dict()))
    candidates, pruned = fake_space()
    assert data["space"]["candidates"] == len(candidates)
    assert (data["space"]["pruned"], data["space"]["reasons"]) == (pruned, {"takes too long": pruned})
    assert data["space"]["unpredicted"] == {"no such instruction": 1}
    # Two context lengths: each plants a crash, a wrong result and a candidate that does not compile.
    statuses = data["statuses"]
    assert [statuses[each] for each in ("crashed", "wrong", "compile_failed")] == [2, 2, 2]
    assert statuses["ok"] + statuses.get("slow", 0) == 2 * (len(candidates) - 3 + 1)
    assert [entry["tokens"] for entry in data["problems"]] == TOKENS
    for entry in data["problems"]:
        assert entry["winner"]["schedule"]["block"] == 32 * 20  # the fastest correct ones take 200 µs
        assert entry["winner"]["schedule"]["prefetch"] == 0
        assert entry["median_us"] >= 200 and entry["provenance"] == "measured"
        assert entry["speedup"] == pytest.approx(entry["baseline_us"] / entry["median_us"])
        assert entry["bandwidth_share"] > 0
    stored = winners(db)
    assert [(w.tokens, w.tokens_from, w.tokens_to) for w in stored] == [(40, 1, 60), (90, 61, None)]
    assert [Candidate.parse(w.candidate).layout for w in stored] == [p["winner"]["layout"] for p in data["problems"]]
    phases = [phase for phase, *_ in progress.updates]
    assert phases == sorted(phases, key=("counting instructions", "measuring").index)
    measuring = [(done, total) for phase, done, total, _ in progress.updates if phase == "measuring"]
    planned = 2 * (len(candidates) + 1)
    assert measuring[-1] == (planned, planned)
    assert [done for done, _ in measuring] == sorted(done for done, _ in measuring)


def test_a_finished_run_measures_nothing_when_repeated(db: Path) -> None:
    first = tune([PROBLEM], [40], options(db))
    rows = measurement_rows(db)
    again = tune([PROBLEM], [40], options(db))
    assert measurement_rows(db) == rows
    assert [d.choice.candidate for d in again.decisions] == [d.choice.candidate for d in first.decisions]


def test_each_problem_has_lengths_of_its_own_and_the_run_says_so(db: Path) -> None:
    other = replace(PROBLEM, query_rows=2)
    report = tune([PROBLEM, other], {PROBLEM: [90, 40, 90], other: [64]}, options(db, "lep"))
    assert [(d.problem, d.tokens) for d in report.decisions] == [(PROBLEM.key, 40), (PROBLEM.key, 90), (other.key, 64)]
    tune([PROBLEM], [40], options(db, "lep", asked="--model phi-2 --precision w8a8 --tokens 40"))
    with Store.open(db, mode="read") as store:
        commands = [run["command"] for run in store.info()["runs"]]
    assert f"{PROBLEM.key} at 40,90; {other.key} at 64" in commands[0]
    assert commands[1] == f"autotune --device {FAKE} --model phi-2 --precision w8a8 --tokens 40 --strategy lep --quick"


@pytest.mark.parametrize("tokens", [100.5, "40", True, 0])
def test_lengths_are_whole_numbers(db: Path, tokens: Any) -> None:
    with pytest.raises(ProblemError, match="tokens must be"):
        tune([PROBLEM], [tokens], options(db, "lep"))


def test_lep_ranks_without_measuring(db: Path) -> None:
    report = tune([PROBLEM], TOKENS, options(db, "lep"))
    data = report.as_dict()
    assert data["statuses"] == {} and measurement_rows(db) == 0
    assert 0 < data["select_ms"] < 1000
    assert {w.provenance for w in winners(db)} == {"predicted"}
    for entry in data["problems"]:
        assert entry["median_us"] is None and entry["predicted_us"] > 0


@pytest.mark.parametrize("strategy", ["verify", "optuna"])
def test_the_other_strategies_choose_among_what_they_measured(db: Path, strategy: str) -> None:
    report = tune([PROBLEM], TOKENS[:1], options(db, strategy, trials=5, top_k=3))
    (decision,) = report.decisions
    assert decision.choice.measurement is not None
    assert decision.choice.candidate.schedule.prefetch not in (SEGV, WRONG, REFUSES)
    # The fake space has one layout: its every schedule is looked at, the baseline included.
    assert len(report.measurements) == (7 if strategy == "verify" else 6)
    assert (db.with_name("t.optuna.db").exists()) == (strategy == "optuna")


def test_a_winner_that_could_not_be_checked_is_told(db: Path) -> None:
    wrong = replace(options(db, "optuna", trials=2, top_k=1), device="fake_backend:AllWrong")
    report = tune([PROBLEM], TOKENS[:1], wrong)
    assert {m.status for m in report.measurements.values()} == {"wrong"}
    assert [w.provenance for w in winners(db)] == ["predicted"]
    assert report.unchecked == [f"{PROBLEM.key}, {TOKENS[0]} tokens ({len(report.measurements)} wrong)"]
    assert tune([PROBLEM], TOKENS[:1], options(db)).unchecked == []


def test_a_prediction_leaves_a_measured_winner_alone(db: Path) -> None:
    tune([PROBLEM], [40], options(db))
    (measured,) = winners(db)
    tune([PROBLEM], [40, 90], options(db, "lep"))
    first, second = winners(db)
    assert first == replace(measured, tokens_to=60)
    assert second.provenance == "predicted"


def test_what_was_neither_predicted_nor_measured_has_no_winner(db: Path) -> None:
    report = tune([PROBLEM], TOKENS, options(db, budget_s=1e-9))
    assert report.decisions == [] and winners(db) == []
    late = "not counted within the budget"
    assert report.undecided == {f"{PROBLEM.key}, {tokens} tokens": late for tokens in TOKENS}
    assert report.as_dict()["rounds"]["undecided"] == report.undecided
    assert report.without_winner == (
        f"{late} ({PROBLEM.key}, 40 tokens; {PROBLEM.key}, 90 tokens); "
        "the same command goes on, further with a longer budget"
    )
    assert measurement_rows(db) == 0
    candidates, _ = fake_space()
    assert report.as_dict()["space"]["unpredicted"] == {"not counted within the budget": len(candidates)}


def test_each_problem_without_a_winner_has_its_own_reason(db: Path) -> None:
    other = replace(PROBLEM, query_rows=2)
    report = tune([PROBLEM, other], [40], replace(options(db, "lep"), device="fake_backend:Particular"))
    assert [decision.problem for decision in report.decisions] == [PROBLEM.key]
    # Four candidates are too wide, and three lack an instruction.
    assert report.undecided == {f"{other.key}, 40 tokens": "too wide"}
    assert report.without_winner == f"too wide ({other.key}, 40 tokens)"


def test_a_strategy_that_does_not_measure_decides_each_problem_at_once(db: Path) -> None:
    other = replace(PROBLEM, query_rows=2)

    def interrupt(phase: str, done: int, message: str) -> None:
        if message == other.key:
            raise KeyboardInterrupt

    recorder = Recorder()
    recorder.update = lambda phase, done, total, message: interrupt(phase, done, message)  # type: ignore[method-assign]
    with pytest.raises(TuneInterrupted) as caught:
        tune([PROBLEM, other], TOKENS, options(db, "lep"), recorder)
    assert [(each.problem, each.tokens) for each in caught.value.report.decisions] == [(PROBLEM.key, n) for n in TOKENS]
    stored = [(w.problem, w.tokens, w.tokens_from, w.tokens_to) for w in winners(db)]
    assert stored == [(PROBLEM.key, 40, 1, 60), (PROBLEM.key, 90, 61, None)]


@pytest.mark.parametrize(
    ("strategy", "first_count_s", "shares"),
    [
        # Six tenths of 30 seconds are for counting, or all of them if nothing is measured.
        ("verify", 0.0, [6, 9, 18]),
        ("verify", 10.0, [10, 10, 18]),
        ("verify", 60.0, [18, 18, 18]),
        ("lep", 0.0, [10, 15, 30]),
    ],
)
def test_no_problem_gets_too_little_of_the_budget_to_count_anything(
    db: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, first_count_s: float, shares: list[float]
) -> None:
    found: list[float] = []

    def rank(self: Ranker, problem: Problem, tokens: Sequence[int]) -> list[Ranked]:
        assert self.until is not None
        found.append(self.until - time.monotonic())
        return []

    monkeypatch.setattr(Ranker, "rank", rank)
    monkeypatch.setattr(FakeBackend, "first_count_s", first_count_s)
    problems = [replace(PROBLEM, query_rows=rows) for rows in (1, 2, 3)]
    tune(problems, [40], options(db, strategy, budget_s=30.0))
    assert found == pytest.approx(shares, abs=2.0)


def test_what_is_counted_is_ranked_before_what_the_budget_left_out(db: Path) -> None:
    first, *rest = fake_space()[0]
    device, toolchain = detect().fingerprint, FakeBackend().toolchain()
    with Store.open(db) as store:
        store.put_tiles(
            toolchain, {code.symbol: count(code).as_dict() for code in FakeBackend().code(PROBLEM, rest[1])}
        )
    report = tune([PROBLEM], [40], options(db, "lep", budget_s=1e-9))
    (decision,) = report.decisions
    assert decision.choice.candidate.layout == rest[1].layout != first.layout
    assert decision.choice.predicted_us is not None
    with Store.open(db, mode="read") as store:
        known = set(store.features(device, PROBLEM.key, 40, toolchain))
    assert known == {each.name for each in rest if each.layout == rest[1].layout}
    assert report.unpredicted.total() == 1 + len(rest) - len(known)


def test_features_are_stored_for_whoever_asks_the_database(db: Path) -> None:
    tune([PROBLEM], TOKENS, options(db, "lep"))
    device, toolchain = detect().fingerprint, FakeBackend().toolchain()
    candidates, _ = fake_space()
    with Store.open(db, mode="read") as store:
        short, long = (store.features(device, PROBLEM.key, each, toolchain) for each in TOKENS)
        tiles = store.tiles(toolchain)
    assert set(short) == set(long) == {each.name for each in candidates if each.schedule.prefetch != REFUSES}
    assert [short[candidates[0].name]["exponentials"], long[candidates[0].name]["exponentials"]] == [2 * 40, 2 * 90]
    assert sorted(tiles) == ["k_0_0", "k_1_0", "v_0_0", "v_1_0"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_is_finished_and_the_next_run_resumes(
    db: Path, number: int, request: pytest.FixtureRequest
) -> None:
    # A process in a shell's background ignores SIGINT from the start.
    request.addfinalizer(functools.partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt(phase: str, done: int) -> None:
        if phase == "measuring" and done >= 5:
            signal.raise_signal(number)

    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TuneInterrupted) as caught:
        tune([PROBLEM], [40], options(db), Recorder(interrupt))
    assert signal.getsignal(signal.SIGTERM) is handler
    assert isinstance(caught.value.report, TuneReport)
    before = measurement_rows(db)
    assert before >= 5
    with Store.open(db, mode="read") as store:
        assert [run["status"] for run in store.info()["runs"]] == ["interrupted"]
    tune([PROBLEM], [40], options(db))
    with sqlite3.connect(db) as connection:
        twice = connection.execute(
            "select count(*) from (select 1 from measurements where id <= ? group by candidate_id, tokens having "
            "count(*) > 1)",
            (before,),
        ).fetchone()
    assert twice == (0,)
    candidates, _ = fake_space()
    # Each candidate and the baseline once, and then nothing but finals.
    assert measurement_rows(db) <= len(candidates) + 1 + 8


def test_a_killed_run_loses_nothing_that_was_committed(db: Path) -> None:
    program = (
        "import sys, pathlib\nfrom lowbit.autotune.outcome import Options\nfrom lowbit.autotune.tune import tune\n"
        "from lowbit.kernels.problem import Problem\n"
        f"tune([Problem.parse({PROBLEM.key!r})], [40], Options(pathlib.Path({str(db)!r}), {FAKE!r}, 'oracle', "
        "threads=1, quick=True, protocol='warm'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": FAKES}
    deadline = time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as process:
        while measurement_rows(db) < 3 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        process.kill()
    before = measurement_rows(db)
    assert before >= 3
    report = tune([PROBLEM], [40], options(db))
    assert measurement_rows(db) > before
    assert len(report.decisions) == 1


def test_two_processes_may_tune_into_one_database(db: Path) -> None:
    reports: list[TuneReport] = []
    # Threads of one process: each has its own connection and crew, as two processes would.
    jobs = [threading.Thread(target=lambda: reports.append(tune([PROBLEM], [40], options(db)))) for _ in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(120)
    assert len(reports) == 2
    assert len(winners(db)) == 1


def test_noise_leaves_predictions_and_is_an_error_only_if_it_spoilt_everything(
    db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noisy(self: Any, *_: Any, **__: Any) -> Any:
        raise NoiseError("busy")

    monkeypatch.setattr("lowbit.search.oracle.Oracle.choose", noisy)
    with pytest.raises(NoiseError, match="tune again"):
        tune([PROBLEM], TOKENS, options(db))
    assert [w.provenance for w in winners(db)] == ["predicted", "predicted"]


def test_mistakes_have_typed_errors_and_leave_no_trace(db: Path, tmp_path: Path) -> None:
    missing = tmp_path / "none.db"
    with pytest.raises(DeviceError, match="abacus"):
        tune([PROBLEM], TOKENS, replace(options(missing), device="abacus"))
    with pytest.raises(LowbitError, match="genetic"):
        tune([PROBLEM], TOKENS, options(missing, "genetic"))
    with pytest.raises(LowbitError, match="tepid"):
        tune([PROBLEM], TOKENS, options(missing, protocol="tepid"))
    assert not missing.exists()
    text = tmp_path / "text.db"
    text.write_text("not a database, but long enough to be taken for one\n" * 100)
    before = text.read_bytes()
    with pytest.raises(DatabaseError):
        tune([PROBLEM], TOKENS, options(text))
    assert text.read_bytes() == before


def winner(tokens: int, provenance: str = "measured") -> Winner:
    return Winner(
        device="d", problem=PROBLEM.key, tokens=tokens, tokens_from=1, tokens_to=None, candidate=f"for {tokens}",
        provenance=provenance, median_us=1.0, protocol="warm", toolchain="t",
    )  # fmt: skip


def test_ranges_cover_every_length_once_and_meet_halfway_in_log_space() -> None:
    lengths = [1, 2, 3, 128, 512, 2048, 32768]
    ranged = with_ranges([winner(each) for each in reversed(lengths)])
    assert [w.tokens for w in ranged] == lengths
    for tokens in np.unique(np.geomspace(1, 1 << 20, 500).astype(int)):
        (only,) = [w for w in ranged if w.covers(int(tokens))]
        distances = {each: abs(np.log(tokens) - np.log(each)) for each in lengths}
        assert distances[only.tokens] == pytest.approx(min(distances.values()), abs=1e-9)


def test_a_new_length_makes_room_among_stored_ones(tmp_path: Path) -> None:
    with Store.open(tmp_path / "t.db") as store:
        for tokens in (100, 10_000, 1_000):
            store_winner(store, winner(tokens))
        assert [(w.tokens_from, w.tokens_to) for w in store.winners()] == [(1, 316), (317, 3162), (3163, None)]
        store_winner(store, replace(winner(1_000, "predicted"), median_us=None, protocol=None))
        assert [w.provenance for w in store.winners()] == ["measured"] * 3

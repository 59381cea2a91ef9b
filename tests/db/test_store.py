from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lowbit.db import Measurement, Store, Winner
from lowbit.db.owner import is_gone, this_process
from lowbit.kernels.errors import DatabaseError, ProblemError

PROBLEM = "attend h8/2 d128 q1 w8a8"
LAYOUTS = "K: T D | int8/bytes/signed; V: T D | int8/bytes/signed"
SCHEDULE = "rows 4, registers 2, block 64, splits 1, prefetch 0, threads 2"
NAME = f"{LAYOUTS}; integer; {SCHEDULE}"


def measurement(candidate: str = NAME, median_us: float = 10.0, protocol: str = "warm") -> Measurement:
    return Measurement(
        device="d",
        problem=PROBLEM,
        tokens=512,
        candidate=candidate,
        protocol=protocol,
        status="ok",
        median_us=median_us,
        spread=0.01,
        samples=7,
        max_error=1e-3,
        toolchain="t1",
    )


def winner(provenance: str = "measured", candidate: str = NAME, toolchain: str = "t1") -> Winner:
    return Winner(
        device="d",
        problem=PROBLEM,
        tokens=512,
        tokens_from=1,
        tokens_to=None,
        candidate=candidate,
        provenance=provenance,
        predicted_us=9.0,
        median_us=10.0,
        spread=0.02,
        samples=21,
        protocol="warm",
        tied=("b", "a"),
        baseline_us=30.0,
        bandwidth_share=0.5,
        toolchain=toolchain,
    )


def test_measurements_are_the_newest_of_each_candidate_and_protocol(store: Store) -> None:
    first, cold = measurement("a", 5.0), measurement("a", 8.0, "cold")
    again, other = measurement("a", 6.0), measurement("b", 7.0)
    ids = [store.put_measurement(m) for m in (first, cold, other, again)]
    assert ids == sorted(set(ids))
    assert store.measurements("d", PROBLEM, 512, "t1") == [cold, other, again]
    assert store.measurements("d", PROBLEM, 512, "t1", protocol="warm") == [other, again]
    assert store.info()["counts"]["measurements"] == 4


def test_conditions_come_back_as_they_went(store: Store) -> None:
    kept = replace(measurement(), conditions={"sm_mhz": 1695.0, "reasons": ["power cap"]})
    store.put_measurement(kept)
    plain = measurement("b")
    store.put_measurement(plain)
    assert store.measurements("d", PROBLEM, 512, "t1") == [kept, plain]
    with pytest.raises(DatabaseError, match="JSON"):
        store.put_measurement(replace(kept, conditions={"sm_mhz": math.inf}))


def test_measurements_of_other_keys_do_not_mix(store: Store) -> None:
    kept = measurement()
    store.put_measurement(kept)
    changes: tuple[dict[str, Any], ...] = (
        {"device": "e"},
        {"problem": "qk h8/2 d128 q1 w8a8"},
        {"tokens": 513},
        {"toolchain": "t2"},
    )
    for change in changes:
        store.put_measurement(replace(kept, **change, median_us=1.0))
    assert store.measurements("d", PROBLEM, 512, "t1") == [kept]
    assert store.measurements("unknown", PROBLEM, 512, "t1") == []


def test_infinite_error_survives(store: Store) -> None:
    wrong = Measurement(
        device="d",
        problem=PROBLEM,
        tokens=512,
        candidate="a",
        protocol="warm",
        status="wrong",
        max_error=math.nan,
        message="off by inf",
        toolchain="t1",
    )
    store.put_measurement(wrong)
    assert store.measurements("d", PROBLEM, 512, "t1") == [wrong]


def test_everything_is_there_after_reopening(path: Path) -> None:
    rejected = [("c", "too wide"), ("b", "no rows"), ("e", "too wide")]
    with Store.open(path) as store:
        store.put_device("d", {"description": "A chip", "isa": "avx2", "cores": 2, "caches": [1, 2]})
        store.put_space(PROBLEM, "d", ["a", NAME], rejected)
        store.put_tiles("t1", {"f": {"rows": 4}})
        store.put_features("d", PROBLEM, 512, {"a": {"bytes": 64, "instructions": {"dot": 2.5}}}, "t1")
        store.put_calibration("d", 2, {"alpha": 0.5}, "t1")
        store.put_winner(winner())
    with Store.open(path, "read") as store:
        assert store.devices() == {"d": {"description": "A chip", "isa": "avx2", "cores": 2, "caches": [1, 2]}}
        assert store.space(PROBLEM, "d") == (["a", NAME], rejected)
        assert store.features("d", PROBLEM, 512, "t1") == {"a": {"bytes": 64, "instructions": {"dot": 2.5}}}
        assert store.tiles("t1") == {"f": {"rows": 4}}
        assert store.calibration("d", 2) == {"alpha": 0.5}
        assert [replace(w, created="") for w in store.winners()] == [replace(winner(), created="")]


def test_put_space_replaces_the_space(store: Store) -> None:
    store.put_space(PROBLEM, "d", ["a", "b"], [("c", "x"), ("e", "y")])
    store.put_space(PROBLEM, "other", ["a"], [])
    store.put_space(PROBLEM, "d", ["b"], [("a", "z")])
    assert store.space(PROBLEM, "d") == (["b"], [("a", "z")])
    assert store.space(PROBLEM, "other") == (["a"], [])
    assert store.space(PROBLEM, "unknown") == ([], [])


def test_put_features_replaces_candidates_and_keeps_the_rest(store: Store) -> None:
    many = {f"c{n}": {"bytes": n} for n in range(1500)}
    store.put_features("d", PROBLEM, 512, many, "t1")
    store.put_features("d", PROBLEM, 512, {"c7": {"bytes": -1}, "new": {"bytes": 1}}, "t1")
    store.put_features("d", PROBLEM, 1024, {"c7": {"bytes": -2}}, "t1")
    assert store.features("d", PROBLEM, 512, "t1") == {**many, "c7": {"bytes": -1}, "new": {"bytes": 1}}
    assert store.features("d", PROBLEM, 512, "t2") == {}


def test_tiles_are_kept_by_symbol_and_toolchain(store: Store) -> None:
    many = {f"tile_{n}": {"rows": n, "parts": [{"share": None, "counts": {"dot": n}}]} for n in range(1200)}
    store.put_tiles("t1", many)
    store.put_tiles("t2", {"tile_7": {"rows": -2}})
    store.put_tiles("t1", {"tile_7": {"rows": -1}, "new": {"rows": 1}})
    assert store.tiles("t1") == {**many, "tile_7": {"rows": -1}, "new": {"rows": 1}}
    assert store.tiles("t1", [*many, "unknown"]) == {**many, "tile_7": {"rows": -1}}
    assert store.tiles("t1", ["tile_7", "new"]) == {"tile_7": {"rows": -1}, "new": {"rows": 1}}
    assert store.tiles("t1", []) == store.tiles("t3") == {}
    assert store.tiles("t2") == {"tile_7": {"rows": -2}}
    assert store.info()["counts"]["tiles"] == 1202


def test_calibration_is_the_newest_of_its_threads(store: Store) -> None:
    for threads, alpha in ((2, 1.0), (1, 9.0), (2, 3.0)):
        store.put_calibration("d", threads, {"alpha": alpha}, "t1")
    assert store.calibration("d", 2) == {"alpha": 3.0}
    assert store.calibration("d", 1) == {"alpha": 9.0}
    assert store.calibration("d", 4) is None


@pytest.mark.parametrize("stored", ["verified", "measured"])
def test_prediction_does_not_overwrite_what_was_timed(store: Store, stored: str) -> None:
    assert store.put_winner(winner(stored, "a"))
    assert not store.put_winner(winner("predicted", "b"))
    assert [(w.candidate, w.provenance) for w in store.winners()] == [("a", stored)]


def test_prediction_of_another_toolchain_stands_beside(store: Store) -> None:
    store.put_winner(winner("measured", "a"))
    assert store.put_winner(winner("predicted", "b", toolchain="t2"))
    assert {(w.candidate, w.toolchain) for w in store.winners()} == {("a", "t1"), ("b", "t2")}


def test_what_was_timed_replaces_all_and_takes_its_ties_along(store: Store) -> None:
    for provenance in ("predicted", "verified", "measured", "verified"):
        assert store.put_winner(replace(winner(provenance, "a"), tied=(provenance,)))
        assert [(w.provenance, w.tied) for w in store.winners("d", PROBLEM)] == [(provenance, (provenance,))]
    assert store.winners("e") == store.winners(problem="qk h8/2 d128 q1 w8a8") == []


def test_runs(store: Store) -> None:
    run = store.put_run("autotune --device cpu")
    store.put_measurement(measurement(), run)
    assert [(r["id"], r["status"], r["finished"]) for r in store.info()["runs"]] == [(run, "running", None)]
    store.finish_run(run)
    assert [(r["status"], r["finished"] is None) for r in store.info()["runs"]] == [("finished", False)]
    with pytest.raises(DatabaseError, match="has no run 99"):
        store.finish_run(99)
    with pytest.raises(DatabaseError, match="unknown run status"):
        store.finish_run(run, "paused")


def test_runs_of_killed_processes_are_interrupted_once_another_starts(store: Store) -> None:
    script = (
        "import sys; from lowbit.db import Store; s = Store.open(sys.argv[1]); print(s.put_run('killed'), flush=True)"
    )
    script += "; sys.stdin.readline()"
    killed = subprocess.Popen(
        [sys.executable, "-c", script, str(store.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    other = int(killed.stdout.readline())
    mine = store.put_run("alive")
    assert [(r["id"], r["status"]) for r in store.info()["runs"]] == [(other, "running"), (mine, "running")]
    killed.kill()
    killed.communicate()
    last = store.put_run("next")
    found = [(r["id"], r["status"]) for r in store.info()["runs"]]
    assert found == [(other, "interrupted"), (mine, "running"), (last, "running")]


def test_who_is_gone() -> None:
    me = this_process()
    machine, pid, started = me.rsplit("/", 2)
    assert not is_gone(me)
    assert is_gone(f"{machine}/{pid}/{int(started) - 100}")  # the id of an ended process, given to another
    assert is_gone(f"{machine}/{1 << 22}/{started}")
    for unknown in (None, "", "elsewhere/1/2", f"{machine}/x/{started}", machine):
        assert not is_gone(unknown)


def test_failed_put_leaves_nothing_behind(store: Store) -> None:
    with pytest.raises(DatabaseError, match="FOREIGN KEY"):
        store.put_measurement(measurement("never"), run=99)
    assert store.info()["counts"] == dict.fromkeys(store.info()["counts"], 0)
    store.put_measurement(measurement("never"))
    assert [m.candidate for m in store.measurements("d", PROBLEM, 512, "t1")] == ["never"]


def test_malformed_problem_and_payload_are_refused(store: Store) -> None:
    with pytest.raises(ProblemError):
        store.put_space("attend h8/3 d128 q1 w8a8", "d", [], [])
    with pytest.raises(DatabaseError, match="JSON"):
        store.put_calibration("d", 1, {"alpha": math.nan}, "t1")
    assert store.info()["counts"]["problems"] == store.info()["counts"]["calibrations"] == 0


def test_reader_refuses_to_write(path: Path) -> None:
    Store.open(path).close()
    with Store.open(path, "read") as store, pytest.raises(DatabaseError, match="for reading only"):
        store.put_winner(winner())


def test_constraints_hold_against_other_writers(store: Store, path: Path) -> None:
    store.put_measurement(measurement())
    store.put_winner(winner())
    connection = sqlite3.connect(path)
    for statement in (
        "UPDATE measurements SET status = 'fine'",
        "UPDATE measurements SET protocol = 'hot'",
        "UPDATE measurements SET median_us = NULL",
        "UPDATE measurements SET median_us = 9e999",
        "UPDATE winners SET provenance = 'guessed'",
        "UPDATE winners SET tokens_to = 3",
    ):
        with pytest.raises(sqlite3.IntegrityError):
            connection.execute(statement)
    connection.close()


def test_views_and_parsed_columns_read_like_the_table_of_winners(store: Store, path: Path) -> None:
    store.put_device("d", {"description": "A chip", "isa": "avx2", "cores": 2})
    store.put_space(PROBLEM, "d", [], [("a", "too wide"), ("b", "too wide"), ("c", "odd")])
    store.put_measurement(measurement("a", 5.0))
    store.put_measurement(measurement("a", 6.0))
    store.put_winner(winner())
    connection = sqlite3.connect(path)
    best = connection.execute(
        "SELECT device, problem, tokens, layout, pipeline, schedule, provenance, speedup, tied FROM best"
    )
    assert best.fetchall() == [("A chip", PROBLEM, 512, LAYOUTS, "integer", SCHEDULE, "measured", 3.0, 2)]
    assert connection.execute("SELECT median_us FROM timings").fetchall() == [(6.0,)]
    assert connection.execute("SELECT reason, candidates FROM pruned").fetchall() == [("too wide", 2), ("odd", 1)]
    columns = "operator, heads, kv_heads, head_dim, query_rows, precision"
    assert connection.execute(f"SELECT {columns} FROM problems").fetchall() == [("attend", 8, 2, 128, 1, "w8a8")]
    assert connection.execute("SELECT name, isa, cores FROM devices").fetchall() == [("A chip", "avx2", 2)]
    connection.close()


def test_names_are_stored_once(store: Store, path: Path) -> None:
    for n in range(5):
        store.put_measurement(measurement("a long name", 1.0 + n))
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name FROM candidates").fetchall() == [("a long name",)]
    connection.close()


def test_threads_take_turns(store: Store) -> None:
    def work(name: str) -> None:
        for n in range(40):
            store.put_measurement(measurement(f"{name}{n}"))
            store.measurements("d", PROBLEM, 512, "t1")

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.measurements("d", PROBLEM, 512, "t1")) == 120

"""Files whose pages are whole and whose stored values are not: every method names the file in one line."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from lowbit.db import Store
from lowbit.db.owner import is_gone
from lowbit.db.records import Measurement, Winner
from lowbit.kernels.errors import DatabaseError

PROBLEM = "qk h8/2 d128 q1 w8a8"


@pytest.fixture
def full(path: Path) -> Path:
    with Store.open(path) as store:
        store.put_run("autotune")
        store.put_device("d", {"description": "a machine"})
        store.put_calibration("d", 2, {"a": 1}, "t")
        store.put_tiles("t", {"s": {"a": 1}})
        store.put_features("d", PROBLEM, 512, {"c": {"a": 1}}, "t")
        store.put_space(PROBLEM, "d", ["c"], [("e", "a reason")])
        about = {"device": "d", "problem": PROBLEM, "tokens": 512, "candidate": "c", "toolchain": "t"}
        timed = {"protocol": "cold", "median_us": 2.0, "samples": 3}
        store.put_measurement(Measurement(**about, **timed, status="ok"))
        store.put_winner(Winner(**about, **timed, tokens_from=1, tokens_to=None, provenance="measured", tied=("c",)))
    return path


def damage(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    assert connection.execute(statement).rowcount > 0
    connection.commit()
    connection.close()


def features(store: Store) -> object:
    return store.features("d", PROBLEM, 512, "t")


def tiles(store: Store) -> object:
    return store.tiles("t")


def calibration(store: Store) -> object:
    return store.calibration("d", 2)


def measurements(store: Store) -> object:
    return store.measurements("d", PROBLEM, 512, "t")


READERS: tuple[tuple[str, str, Callable[[Store], object]], ...] = (
    ("features", "payload", features),
    ("tiles", "payload", tiles),
    ("calibrations", "payload", calibration),
    ("devices", "description", Store.devices),
)


@pytest.mark.parametrize("value", ["'{\"a\": 1'", "''", "'[1]'", "17", "x'7b7d'", "CAST(x'7bff7d' AS TEXT)"])
@pytest.mark.parametrize(("table", "column", "read"), READERS, ids=[table for table, _, _ in READERS])
def test_json_that_cannot_be_read(
    full: Path, table: str, column: str, read: Callable[[Store], object], value: str
) -> None:
    damage(full, f"UPDATE {table} SET {column} = {value}")
    with Store.open(full, "read") as store, pytest.raises(DatabaseError) as caught:
        read(store)
    assert str(full) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("statement", "read"),
    [
        ("UPDATE measurements SET status = 'fine'", measurements),
        ("UPDATE measurements SET median_us = 'soon'", measurements),
        ("UPDATE measurements SET tokens = tokens, message = x'00'", measurements),
        ("UPDATE measurements SET created = CAST(x'ff' AS TEXT)", measurements),
        ("UPDATE measurements SET conditions = '[1'", measurements),
        ("UPDATE measurements SET conditions = x'00'", measurements),
        ("UPDATE winners SET provenance = 'told'", Store.winners),
        ("UPDATE winners SET tokens_from = 'one'", Store.winners),
        ("UPDATE winners SET median_us = -1", Store.winners),
        ("UPDATE candidates SET name = CAST(x'ff' AS TEXT) || id", Store.winners),
        ("UPDATE candidates SET name = x'ff' WHERE name = 'c'", Store.winners),
        ("UPDATE devices SET name = CAST(x'ff' AS TEXT)", Store.info),
        ("UPDATE devices SET name = x'ff'", Store.info),
        ("UPDATE runs SET command = CAST(x'ff' AS TEXT)", Store.info),
        ("UPDATE candidates SET name = x'ff' WHERE name = 'c'", lambda store: store.space(PROBLEM, "d")),
    ],
)
def test_values_that_make_no_record(full: Path, statement: str, read: Callable[[Store], object]) -> None:
    damage(full, statement)
    with Store.open(full, "read") as store, pytest.raises(DatabaseError) as caught:
        read(store)
    assert str(full) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_whose_process_cannot_be_read(full: Path) -> None:
    damage(full, "UPDATE runs SET process = CAST(x'ff' AS TEXT)")
    with Store.open(full) as store, pytest.raises(DatabaseError, match=full.name):
        store.put_run("autotune")


@pytest.mark.parametrize("process", [None, 17, b"host/1/2"])
def test_a_process_that_is_no_text_may_be_there(process: object) -> None:
    assert not is_gone(process)  # type: ignore[arg-type]

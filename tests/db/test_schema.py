from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from lowbit.db import KernelImage, KernelLaunch, Rule, ShippedWinner, Store, opening, schema
from lowbit.db.schema import MIGRATIONS, SCHEMA_VERSION, migrate, pragma
from lowbit.kernels.errors import DatabaseError
from sqlite_utils import Database


@pytest.fixture
def db(path: Path) -> Iterator[Database]:
    db = Database(sqlite3.connect(path, isolation_level=None))
    yield db
    db.close()


def one(db: Database) -> None:
    db.execute("CREATE TABLE parents (id INTEGER PRIMARY KEY)")
    db.execute("CREATE TABLE children (parent_id REFERENCES parents (id))")
    db.execute("INSERT INTO parents VALUES (1)")
    db.execute("INSERT INTO children VALUES (1)")


def two(db: Database) -> None:
    db.execute("CREATE TABLE rebuilt (id INTEGER PRIMARY KEY, name TEXT DEFAULT 'x')")
    db.execute("INSERT INTO rebuilt (id) SELECT id FROM parents")
    db.execute("DROP TABLE parents")
    db.execute("ALTER TABLE rebuilt RENAME TO parents")


def breaks(db: Database) -> None:
    db.execute("CREATE TABLE half_done (id)")
    db.execute("INSERT INTO absent VALUES (1)")


def orphans(db: Database) -> None:
    db.execute("DELETE FROM parents")


def test_missing_migrations_are_applied_once_each(db: Database) -> None:
    migrate(db, [one])
    assert (pragma(db, "user_version"), pragma(db, "application_id")) == (1, schema.APPLICATION_ID)
    migrate(db, [one, two])
    migrate(db, [one, two])
    assert pragma(db, "user_version") == 2
    assert db.execute("SELECT id, name FROM parents").fetchall() == [(1, "x")]


@pytest.mark.parametrize(("bad", "said"), [(breaks, "no such table"), (orphans, "refer to nothing")])
def test_failed_migration_leaves_the_version_before(db: Database, bad: schema.Migration, said: str) -> None:
    migrate(db, [one])
    with pytest.raises(DatabaseError, match=f"cannot migrate from schema 1 to 2: .*{said}"):
        migrate(db, [one, bad, two])
    assert pragma(db, "user_version") == 1
    assert db.table_names() == ["parents", "children"]
    assert db.execute("SELECT count(*) FROM parents").fetchone() == (1,)


def add_note(db: Database) -> None:
    db.execute("ALTER TABLE runs ADD COLUMN note TEXT DEFAULT 'none'")


@pytest.fixture
def next_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release with one more migration than this one."""
    migrations = (*MIGRATIONS, add_note)
    monkeypatch.setattr(opening, "SCHEMA_VERSION", len(migrations))
    monkeypatch.setattr(opening, "migrate", lambda db: migrate(db, migrations))


def test_file_of_this_release_is_migrated_by_the_next_with_its_rows(path: Path, request: pytest.FixtureRequest) -> None:
    with Store.open(path) as store:
        store.put_run("autotune")
        assert store.info()["schema_version"] == SCHEMA_VERSION
    request.getfixturevalue("next_release")
    with Store.open(path) as store:
        assert store.info()["schema_version"] == SCHEMA_VERSION + 1
        assert store.info()["runs"][0]["command"] == "autotune"
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT note FROM runs").fetchall() == [("none",)]
    connection.close()


def test_reader_of_the_next_release_leaves_the_file_at_its_schema(path: Path, request: pytest.FixtureRequest) -> None:
    with Store.open(path) as store:
        store.put_run("autotune")
    before = path.read_bytes()
    request.getfixturevalue("next_release")
    with Store.open(path, "read") as store:
        assert store.info()["schema_version"] == SCHEMA_VERSION + 1
        assert store.info()["runs"][0]["command"] == "autotune"
    assert path.read_bytes() == before


def test_every_foreign_key_leads_somewhere_and_is_indexed(path: Path) -> None:
    Store.open(path).close()
    db = Database(path)
    keys = {(table.name, key.column, key.other_table) for table in db.tables for key in table.foreign_keys}
    assert {other for _, _, other in keys} <= set(db.table_names())
    assert {table for table, _, _ in keys} >= {
        "spaces",
        "rejections",
        "tiles",
        "features",
        "measurements",
        "winners",
        "ties",
        "kernels",
        "launches",
    }
    assert set(db.view_names()) == {"best", "timings", "pruned", "shipped"}
    for view in db.views:
        assert view.count == 0
    db.close()


def test_files_of_the_first_schema_keep_their_rows_and_learn_of_eviction(path: Path, db: Database) -> None:
    migrate(db, MIGRATIONS[:1])
    for statement in (
        "INSERT INTO devices VALUES (1, 'd', NULL, NULL, NULL, '{}', 'then')",
        "INSERT INTO toolchains VALUES (1, 't')",
        "INSERT INTO problems VALUES (1, 'p', 'attend', 1, 1, 32, 1, 'fp16')",
        "INSERT INTO candidates VALUES (1, 'c', 'l', NULL, NULL)",
        "INSERT INTO measurements VALUES (7, NULL, 1, 1, 512, 1, 1, 'cold', 'ok', 2.5, 0.1, 9, 0.0, '', 'then')",
        "INSERT INTO winners VALUES (3, 1, 1, 512, 1, 1, NULL, 1, 'measured', NULL, 2.5, 0.1, 9, 'cold', 5.0, 0.5, '')",
        "INSERT INTO ties VALUES (3, 0, 1)",
    ):
        db.execute(statement)
    before = {table: db.execute(f"SELECT * FROM {table}").fetchall() for table in ("measurements", "winners", "ties")}
    rebuilt = (
        "SELECT name FROM sqlite_master WHERE type = 'index' AND tbl_name IN ('measurements', 'winners') ORDER BY 1"
    )
    indices = db.execute(rebuilt).fetchall()
    with pytest.raises(sqlite3.IntegrityError):
        db.execute("UPDATE winners SET protocol = 'evicted'")
    migrate(db)
    for table, rows in before.items():
        after = db.execute(f"SELECT * FROM {table}").fetchall()
        assert [row[: len(rows[0])] for row in after] == rows
        assert all(set(row[len(rows[0]) :]) <= {None} for row in after)
    assert db.execute(rebuilt).fetchall() == indices
    assert db.execute("SELECT speedup, tied FROM best").fetchall() == [(2.0, 1)]
    for table in ("measurements", "winners"):
        db.execute(f"UPDATE {table} SET protocol = 'evicted'")
        with pytest.raises(sqlite3.IntegrityError):
            db.execute(f"UPDATE {table} SET protocol = 'hot'")
    db.execute(
        "INSERT INTO measurements SELECT NULL, run_id, device_id, problem_id, tokens, toolchain_id, candidate_id, "
        "protocol, status, median_us, spread, samples, max_error, message, created, conditions FROM measurements"
    )
    assert db.execute("SELECT max(id) FROM measurements").fetchone() == (8,)


def test_files_of_the_third_schema_keep_their_winners_and_can_be_given_code(path: Path, db: Database) -> None:
    migrate(db, MIGRATIONS[:3])
    for statement in (
        "INSERT INTO devices VALUES (1, 'd', NULL, NULL, NULL, '{}', 'then')",
        "INSERT INTO toolchains VALUES (1, 't')",
        "INSERT INTO problems VALUES (1, 'qk h8/2 d128 q1 w8a8', 'qk', 8, 2, 128, 1, 'w8a8')",
        "INSERT INTO candidates VALUES (1, 'c', 'l', NULL, NULL)",
        "INSERT INTO winners VALUES (3, 1, 1, 512, 1, 1, NULL, 1, 'measured', NULL, 2.5, 0.1, 9, 'cold', 5.0, 0.5, '')",
    ):
        db.execute(statement)
    db.close()
    with Store.open(path, "read") as store:
        (winner,) = store.winners()
        assert store.shipped(winner) is None
    with Store.open(path) as store:
        image = KernelImage(toolchain="t", symbol="s", arch="sm_86", ptx=".entry s()", arguments=())
        launch = KernelLaunch("s", (Rule(1), Rule(1), Rule(1)), 32, Rule(0), {})
        store.put_shipped(winner, ShippedWinner((launch,), Rule(0)), [image])
        assert store.info()["counts"]["kernels"] == 1
        assert store.winners() == [winner]

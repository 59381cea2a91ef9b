from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lowbit.db import Store
from lowbit.db.schema import APPLICATION_ID, SCHEMA_VERSION
from lowbit.kernels.errors import DatabaseError


def tuned(path: Path) -> Path:
    with Store.open(path) as store:
        store.put_features("d", "qk h8/2 d128 q1 w8a8", 512, {f"c{n}": {"bytes": n} for n in range(500)}, "t")
    return path


def foreign(path: Path) -> Path:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE notes (text)")
    connection.close()
    return path


def text(path: Path) -> None:
    path.write_text("SQLite is not what this is\n" * 100)


def short(path: Path) -> None:
    path.write_bytes(tuned(path).read_bytes()[:50])


def truncated(path: Path) -> None:
    size = tuned(path).stat().st_size
    os.truncate(path, size // 2 // 4096 * 4096)


def torn(path: Path) -> None:
    content = bytearray(tuned(path).read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    os.truncate(path, tuned(path).stat().st_size - 100)


def no_utf8_in_schema(path: Path) -> None:
    content = tuned(path).read_bytes()
    assert b"CREATE TABLE devices" in content
    path.write_bytes(content.replace(b"CREATE TABLE devices", b"CREATE TABLE\xff\xfedevices"))


def other_application(path: Path) -> None:
    foreign(path)


def other_application_id(path: Path) -> None:
    connection = sqlite3.connect(foreign(path))
    connection.execute("PRAGMA application_id = 252006673")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.close()


def newer(path: Path) -> None:
    connection = sqlite3.connect(tuned(path))
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()


def negative_version(path: Path) -> None:
    connection = sqlite3.connect(tuned(path))
    connection.execute("PRAGMA user_version = -5")
    connection.close()


def directory(path: Path) -> None:
    path.mkdir()


def pipe(path: Path) -> None:
    os.mkfifo(path)


REFUSED: list[tuple[Callable[[Path], None], str]] = [
    (text, "is not a SQLite database"),
    (short, "is corrupt"),
    (truncated, "is corrupt"),
    (torn, "is corrupt"),
    (cut_off, "is corrupt: its last page is cut off"),
    (no_utf8_in_schema, "is corrupt"),
    (other_application, "is another application's SQLite database"),
    (other_application_id, "is another application's SQLite database"),
    (newer, f"has schema {SCHEMA_VERSION + 1}, newer than the {SCHEMA_VERSION}"),
    (negative_version, "is corrupt: its schema version is -5"),
    (directory, "is a directory"),
    (pipe, "is not a regular file"),
]


def contents(folder: Path) -> dict[str, bytes | int]:
    """Every file below ``folder``: its bytes, or its kind where it has none."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else stat.S_IFMT(p.stat().st_mode)
        for p in folder.rglob("*")
    }


@pytest.mark.parametrize("mode", ["tune", "read"])
@pytest.mark.parametrize(("make", "said"), REFUSED, ids=[make.__name__ for make, _ in REFUSED])
def test_refused_file_stays_as_it_was(path: Path, make: Callable[[Path], None], said: str, mode: str) -> None:
    make(path)
    before = contents(path.parent)
    with pytest.raises(DatabaseError, match=said) as caught:
        Store.open(path, mode)
    assert "\n" not in str(caught.value)
    assert contents(path.parent) == before


@pytest.mark.parametrize("mode", ["tune", "read"])
def test_place_that_cannot_hold_a_file(tmp_path: Path, mode: str) -> None:
    (tmp_path / "file").touch()
    for path, said in (
        (tmp_path / "none" / "t.db", "there is no directory"),
        (tmp_path / "file" / "t.db", "there is no directory"),
        (tmp_path / ("x" * 300), "cannot be reached"),
        (tmp_path / "a\0b", "cannot be reached"),
    ):
        with pytest.raises(DatabaseError, match=said):
            Store.open(path, mode)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_foreign_database_in_use_is_left_alone(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE notes (text)")
    connection.commit()
    before = {p.name: p.read_bytes() for p in path.parent.iterdir() if not p.name.endswith("-shm")}
    assert f"{path.name}-wal" in before
    with pytest.raises(DatabaseError, match="another application"):
        Store.open(path)
    assert {p.name: p.read_bytes() for p in path.parent.iterdir() if not p.name.endswith("-shm")} == before
    connection.close()


def test_empty_file_is_filled_and_a_reader_refuses_it(path: Path) -> None:
    path.touch()
    with pytest.raises(DatabaseError, match="is empty"):
        Store.open(path, "read")
    with Store.open(path) as store:
        assert store.info()["schema_version"] == SCHEMA_VERSION
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_reader_creates_nothing(path: Path) -> None:
    with pytest.raises(DatabaseError, match="does not exist"):
        Store.open(path, "read")
    assert list(path.parent.iterdir()) == []


def test_unknown_mode_is_refused(path: Path) -> None:
    with pytest.raises(DatabaseError, match="unknown mode 'write'"):
        Store.open(path, "write")


def test_file_says_whose_it_is_and_log_is_used_while_tuning(path: Path) -> None:
    with Store.open(path):
        connection = sqlite3.connect(path)
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        connection.close()
        assert path.with_name(path.name + "-wal").exists()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_reader_sees_what_a_tuner_has_committed(path: Path) -> None:
    with Store.open(path) as tuner, Store.open(path, "read") as reader:
        tuner.put_device("d", {})
        assert reader.devices() == {"d": {}}


def test_awkward_file_name(tmp_path: Path) -> None:
    path = tmp_path / "a b?mode=memory#%41.db"
    Store.open(path).close()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    Store.open(path, "read").close()


def test_link_to_a_database(tmp_path: Path) -> None:
    tuned(tmp_path / "real.db")
    (tmp_path / "link.db").symlink_to(tmp_path / "real.db")
    with Store.open(tmp_path / "link.db") as store:
        store.put_device("e", {})
    with Store.open(tmp_path / "real.db", "read") as store:
        assert "e" in store.devices()


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that other users may enter, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def unprivileged(action: Callable[[], object]) -> str:
    """The error that ``action`` raises for a user who is not root, or nothing."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        answer = ""
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            action()
        except DatabaseError as error:
            answer = str(error)
        except BaseException as error:
            answer = repr(error)
        os.write(send, answer.encode())
        os._exit(0)
    os.close(send)
    os.waitpid(child, 0)
    with os.fdopen(receive) as answer_file:
        return answer_file.read()


def test_permissions(shared_folder: Path) -> None:
    path = tuned(shared_folder / "t.db")
    before = contents(shared_folder)
    path.chmod(0o444)
    assert "t.db cannot be written" in unprivileged(lambda: Store.open(path))
    path.chmod(0o000)
    assert "t.db cannot be read" in unprivileged(lambda: Store.open(path))
    assert "t.db cannot be read" in unprivileged(lambda: Store.open(path, "read"))
    path.chmod(0o666)
    shared_folder.chmod(0o555)
    assert f"{shared_folder} cannot be written" in unprivileged(lambda: Store.open(path))
    assert f"{shared_folder} cannot be written" in unprivileged(lambda: Store.open(shared_folder / "new.db"))
    assert contents(shared_folder) == before


def test_reading_where_nothing_can_be_written(shared_folder: Path) -> None:
    path = tuned(shared_folder / "t.db")
    path.chmod(0o444)
    shared_folder.chmod(0o555)
    before = contents(shared_folder)

    def read() -> None:
        with Store.open(path, "read") as store:
            if len(store.features("d", "qk h8/2 d128 q1 w8a8", 512, "t")) != 500:
                raise DatabaseError("rows are missing")

    assert unprivileged(read) == ""
    assert contents(shared_folder) == before


def test_unmerged_log_in_a_folder_that_cannot_be_written(shared_folder: Path) -> None:
    path = shared_folder / "t.db"
    with Store.open(path) as store:
        store.put_device("d", {})
        copy = shared_folder / "copy.db"
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    shared_folder.chmod(0o555)
    assert "has writes in copy.db-wal" in unprivileged(lambda: Store.open(copy, "read"))

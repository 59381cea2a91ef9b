"""Opening a file: what is refused, before anything is touched.

A path is judged by its header bytes and through a connection that cannot write. Only a file that is ours, empty or
missing is then opened for tuning, so that a refused one stays as it was, with no journal beside it.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from pathlib import Path
from urllib.parse import quote

from sqlite_utils import Database

from ..kernels.errors import DatabaseError, EmptyDatabaseError
from .schema import APPLICATION_ID, SCHEMA_VERSION, migrate, pragma
from .transaction import LOCK_TIMEOUT_S, patiently

_MAGIC = b"SQLite format 3\0"
_ATTEMPTS = 5
_NO_SHARED_MEMORY = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)


def open_for_tuning(path: Path) -> Database:
    """Open or create ``path`` for writing, in WAL mode and at the newest schema.

    Raises
    ------
    DatabaseError
        If the path is refused; the file stays byte for byte as it was.
    """
    path = _resolved(path)
    _require_place(path)
    if _exists(path):
        _require_file(path)
        if not os.access(path, os.W_OK):
            raise DatabaseError(f"{path} cannot be written: tune into another --db")
        _inspect(path)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise DatabaseError(f"{path.parent} cannot be written: tune into another --db")
    try:
        db = _wrap(_connect(path, "mode=rwc"))
    except sqlite3.Error as error:
        raise DatabaseError(f"{path} cannot be opened: {error}") from error
    try:
        patiently(lambda: db.conn.execute("PRAGMA journal_mode = WAL").fetchone())
        db.conn.execute("PRAGMA synchronous = NORMAL")
        migrate(db)
        db.conn.execute("PRAGMA foreign_keys = ON")
    except (sqlite3.Error, UnicodeError) as error:
        db.close()
        raise DatabaseError(f"{path} cannot be opened: {error}") from error
    except DatabaseError as error:
        db.close()
        raise DatabaseError(f"{path}: {error}") from error
    return db


def open_for_reading(path: Path) -> Database:
    """Open ``path`` without ever writing to it, also where its directory cannot be written.

    A file of an earlier schema is copied into memory and migrated there.

    Raises
    ------
    DatabaseError
        If the path is missing or refused.
    """
    path = _resolved(path)
    _require_place(path)
    if not _exists(path):
        raise DatabaseError(f"{path} does not exist")
    _require_file(path)
    if path.stat().st_size == 0:
        raise EmptyDatabaseError(f"{path} is empty: tune into it first")
    version = _inspect(path)
    if version == 0:
        raise EmptyDatabaseError(f"{path} holds no tuning results: tune into it first")
    try:
        return _readable(path, version)
    except (sqlite3.Error, UnicodeError) as error:
        raise DatabaseError(f"{path} cannot be opened: {error}") from error
    except DatabaseError as error:
        raise DatabaseError(f"{path}: {error}") from error


def _readable(path: Path, version: int) -> Database:
    db = _wrap(_reader(path))
    try:
        if version < SCHEMA_VERSION:
            copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            db.conn.backup(copy)
            db.close()
            db = _wrap(copy)
            migrate(db)
        db.conn.execute("PRAGMA query_only = ON")
    except BaseException:
        db.close()
        raise
    return db


def _inspect(path: Path) -> int:
    """Schema version of a file that is ours, 0 if it holds nothing yet; raise `DatabaseError` for any other file.

    Without a log beside it the file is read as immutable, which leaves no trace but takes no lock either: if another
    process wrote meanwhile, what was seen means nothing and the file is looked at again.
    """
    for attempt in range(_ATTEMPTS):
        before = _state(path)
        try:
            return _judge(path)
        except DatabaseError:
            if _state(path) == before or attempt + 1 == _ATTEMPTS:
                raise
            time.sleep(0.05 * (attempt + 1))
    raise AssertionError("unreachable")


def _judge(path: Path) -> int:
    try:
        with path.open("rb") as file:
            header = file.read(len(_MAGIC))
    except OSError as error:
        raise DatabaseError(f"{path} cannot be read: {error.strerror}") from error
    if not header:
        return 0
    if header != _MAGIC:
        raise DatabaseError(f"{path} is not a SQLite database")
    try:
        db = _wrap(_reader(path))
    except sqlite3.Error as error:
        raise DatabaseError(f"{path} cannot be read: {error}") from error
    try:
        application, version = pragma(db, "application_id"), pragma(db, "user_version")
        tables = db.conn.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if application != APPLICATION_ID and (application or version or tables):
            raise DatabaseError(f"{path} is another application's SQLite database")
        if version < 0:
            raise DatabaseError(f"{path} is corrupt: its schema version is {version}")
        if version > SCHEMA_VERSION:
            raise DatabaseError(
                f"{path} has schema {version}, newer than the {SCHEMA_VERSION} this release knows: upgrade lowbit"
            )
        if not _is_logged(path) and path.stat().st_size % pragma(db, "page_size"):
            raise DatabaseError(f"{path} is corrupt: its last page is cut off")
        found = db.conn.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise DatabaseError(f"{path} is corrupt: {found.splitlines()[-1]}")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF in _NO_SHARED_MEMORY:
            raise DatabaseError(
                f"{path} has writes in {_log(path).name} that its read-only directory keeps from being read: "
                "open it once where it can be written"
            ) from error
        raise DatabaseError(f"{path} cannot be read: {error}") from error
    except (sqlite3.Error, UnicodeError) as error:
        raise DatabaseError(f"{path} is corrupt: {error}") from error
    finally:
        db.close()
    return version


def _reader(path: Path) -> sqlite3.Connection:
    # Without `immutable`, reading a WAL file creates a log beside it, and fails where that is not allowed.
    return _connect(path, "mode=ro" if _is_logged(path) else "mode=ro&immutable=1")


def _is_logged(path: Path) -> bool:
    log = _log(path)
    return log.exists() and log.stat().st_size > 0


def _connect(path: Path, parameters: str) -> sqlite3.Connection:
    """Autocommit unless a transaction is begun; the store serialises its threads itself."""
    uri = f"file:{quote(str(path.absolute()))}?{parameters}"
    return sqlite3.connect(uri, uri=True, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)


def _wrap(connection: sqlite3.Connection) -> Database:
    return Database(connection, recursive_triggers=False, execute_plugins=False)


def _log(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _state(path: Path) -> tuple[int, int, bool]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, _log(path).exists()


def _resolved(path: Path) -> Path:
    """The file behind symbolic links: SQLite keeps the log beside that one."""
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise DatabaseError(f"{str(path)!r} cannot be reached: {error}") from error


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise DatabaseError(f"{path} cannot be reached: {error.strerror}") from error
    return True


def _require_place(path: Path) -> None:
    if not path.name:
        raise DatabaseError(f"{str(path)!r} names no file")
    if _exists(path.parent) and path.parent.is_dir():
        return
    raise DatabaseError(f"{path}: there is no directory {path.parent}")


def _require_file(path: Path) -> None:
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise DatabaseError(f"{path} is a directory, not a database file")
    if not stat.S_ISREG(mode):
        raise DatabaseError(f"{path} is not a regular file")
    if not os.access(path, os.R_OK):
        raise DatabaseError(f"{path} cannot be read: permission denied")

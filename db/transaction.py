"""Write transactions among processes that share a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from sqlite3 import SQLITE_BUSY, SQLITE_LOCKED, OperationalError

from sqlite_utils import Database

from ..kernels.errors import DatabaseError

LOCK_TIMEOUT_S = 30.0


@contextmanager
def write(db: Database, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """One transaction that holds the write lock from its start; it commits on leaving, or rolls back on an exception.

    Taking the lock first leaves nothing that could fail half-way for another writer's sake.

    Raises
    ------
    DatabaseError
        If another process holds the lock for longer than ``timeout_s``.
    """
    patiently(lambda: db.conn.execute("BEGIN IMMEDIATE"), timeout_s)
    try:
        yield
        db.conn.execute("COMMIT")
    except BaseException:
        if db.conn.in_transaction:
            db.conn.execute("ROLLBACK")
        raise


def patiently(action: Callable[[], object], timeout_s: float = LOCK_TIMEOUT_S) -> None:
    """Run ``action`` until no other process is in the way.

    SQLite's busy timeout does not cover every lock: changing the journal mode and recovering a log fail at once.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            action()
            return
        except OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in (SQLITE_BUSY, SQLITE_LOCKED):
                raise
            if time.monotonic() > deadline:
                raise DatabaseError(f"another process has kept the database locked for {timeout_s:g} s") from error
            time.sleep(0.02)

"""A connection that threads share and that speaks in typed errors."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlite_utils import Database

from ..kernels.errors import DatabaseError
from .names import Names
from .opening import open_for_reading, open_for_tuning
from .transaction import write


class Session:
    """An open file: its lock, its transactions and its names. `Store` says how it may be used."""

    def __init__(self, path: Path, mode: str, db: Database) -> None:
        self.path = path
        self.mode = mode
        self._db = db
        self._names = Names(db)
        self._lock = threading.RLock()

    @classmethod
    def open(cls, path: str | Path, mode: str = "tune") -> Self:
        """Open ``path``.

        Parameters
        ----------
        path : str or Path
        mode : str
            ``tune`` reads and writes, and creates the file if it is missing or empty. ``read`` never writes, also
            works in a directory that cannot be written, and needs an existing file.

        Raises
        ------
        DatabaseError
            If the file is no SQLite database, another application's, corrupt, of a newer schema, or out of reach; it
            stays byte for byte as it was.
        """
        path = Path(path)
        if mode == "tune":
            return cls(path, mode, open_for_tuning(path))
        if mode == "read":
            return cls(path, mode, open_for_reading(path))
        raise DatabaseError(f"unknown mode {mode!r}: open for 'tune' or 'read'")

    def close(self) -> None:
        """Move the log into the file, as far as other processes allow, and close. Closing twice is harmless."""
        with self._lock:
            if self.mode == "tune":
                # If it fails, what is committed stays in the log, and the next opener reads it there.
                with suppress(sqlite3.Error):
                    self._db.conn.execute("PRAGMA wal_checkpoint(PASSIVE)")
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _writing(self) -> Iterator[Database]:
        if self.mode != "tune":
            raise DatabaseError(f"{self.path} is open for reading only")
        with self._lock:
            try:
                with write(self._db):
                    yield self._db
            except (sqlite3.Error, UnicodeError) as error:
                self._names.forget()
                raise DatabaseError(f"{self.path} cannot be written: {error}") from error
            except BaseException:
                self._names.forget()
                raise

    def _rows(
        self, sql: str, parameters: Mapping[str, Any] | Sequence[Any] = (), blobs: Collection[str] = ()
    ) -> list[dict[str, Any]]:
        """Rows by column; only those of ``blobs`` may hold bytes."""
        with self._lock:
            try:
                cursor = self._db.conn.execute(sql, parameters)
                columns = [column[0] for column in cursor.description]
                rows = [dict(zip(columns, row, strict=True)) for row in cursor]
            except (sqlite3.Error, UnicodeError) as error:
                raise DatabaseError(f"{self.path} cannot be read: {error}") from error
        for row in rows:
            for column, value in row.items():
                if isinstance(value, bytes) and column not in blobs:
                    raise DatabaseError(f"{self.path} is corrupt: a {column} is no text")
        return rows

    def _parsed(self, text: Any) -> dict[str, Any]:
        """A stored JSON object."""
        try:
            found = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise DatabaseError(f"{self.path} is corrupt: stored JSON cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise DatabaseError(f"{self.path} is corrupt: stored JSON is no object")
        return found

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Name the file where what is stored in it makes no record."""
        try:
            yield
        except (DatabaseError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise DatabaseError(f"{self.path} is corrupt: {error}") from error

    def _ids(self, **names: str) -> dict[str, int] | None:
        """Ids by the singular of their table; None if one of the names is unknown, so that nothing can match."""
        with self._lock:
            try:
                found = {key: self._names.find(f"{key}s", name) for key, name in names.items()}
            except (sqlite3.Error, UnicodeError, TypeError, ValueError) as error:
                raise DatabaseError(f"{self.path} cannot be read: {error}") from error
        known = {key: id_ for key, id_ in found.items() if id_ is not None}
        return known if len(known) == len(names) else None

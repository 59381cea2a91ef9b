"""Names and their ids: each text is stored once, with the columns that people query by."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from sqlite_utils import Database

from ..kernels.problem import Problem
from .records import utc_now

_KEY_COLUMN = {
    "devices": "fingerprint",
    "toolchains": "name",
    "problems": "key",
    "candidates": "name",
    "reasons": "text",
}


class Names:
    """Ids of names in one connection. Not thread-safe by itself; call within a write transaction to add names.

    Ids are remembered, because nothing ever deletes a name; after a rollback `forget` them.
    """

    def __init__(self, db: Database) -> None:
        self._db = db
        self._known: dict[tuple[str, str], int] = {}

    def forget(self) -> None:
        self._known.clear()

    def find(self, table: str, name: str) -> int | None:
        """Id of ``name``, or None if ``table`` lacks it."""
        known = self._known.get((table, name))
        if known is not None:
            return known
        row = self._db.conn.execute(f"SELECT id FROM {table} WHERE {_KEY_COLUMN[table]} = ?", (name,)).fetchone()
        if row is None:
            return None
        self._known[table, name] = int(row[0])
        return int(row[0])

    def put(self, table: str, name: str) -> int:
        """Id of ``name``, added if ``table`` lacks it.

        Raises
        ------
        ProblemError
            If ``table`` is ``problems`` and ``name`` is no problem's key.
        """
        known = self.find(table, name)
        if known is None:
            self._db.table(table).insert({_KEY_COLUMN[table]: name, **_columns(table, name)})
            known = self.find(table, name)
            assert known is not None
        return known

    def put_all(self, table: str, names: Iterable[str]) -> list[int]:
        """Ids of many names, in their order; the missing ones are added together."""
        names = list(names)
        missing = [name for name in dict.fromkeys(names) if self.find(table, name) is None]
        if missing:
            self._db.table(table).insert_all({_KEY_COLUMN[table]: name, **_columns(table, name)} for name in missing)
        return [self.put(table, name) for name in names]


def device_columns(description: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of a device's row, from the description a device gives of itself."""
    isa = description.get("isa")
    return {
        "name": description.get("description"),
        "isa": isa if isa is None or isinstance(isa, str) else json.dumps(isa),
        "cores": description.get("cores"),
    }


def _columns(table: str, name: str) -> dict[str, Any]:
    match table:
        case "devices":
            return {"created": utc_now()}
        case "problems":
            problem = Problem.parse(name)
            return {
                column: getattr(problem, column)
                for column in ("operator", "heads", "kv_heads", "head_dim", "query_rows", "precision")
            }
        case "candidates":
            # Split as text: a plugin's packing, unknown to this process, has a name all the same.
            layout, pipeline, schedule = ([*name.rsplit("; ", 2), None, None])[:3]
            return {"layout": layout, "pipeline": pipeline, "schedule": schedule}
        case _:
            return {}

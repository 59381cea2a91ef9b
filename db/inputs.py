"""What a search reads: devices, calibrations, spaces, tiles and features."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..kernels.errors import DatabaseError
from .names import device_columns
from .records import utc_now
from .session import Session


class SearchInputs(Session):
    """The part of `Store` that is known of a device and a problem before anything is timed."""

    def put_device(self, fingerprint: str, description: Mapping[str, Any]) -> None:
        """Describe a device; replaces an earlier description. ``description``, ``isa`` and ``cores`` become columns."""
        text = as_json(description)
        with self._writing() as db:
            id_ = self._names.put("devices", fingerprint)
            db.table("devices").update(id_, {"description": text, **device_columns(description)})

    def devices(self) -> dict[str, dict[str, Any]]:
        """Descriptions by fingerprint; empty for a device that was measured but never described."""
        rows = self._rows("SELECT fingerprint, description FROM devices ORDER BY id")
        return {row["fingerprint"]: self._parsed(row["description"]) for row in rows}

    def put_calibration(self, device: str, threads: int, payload: Mapping[str, Any], toolchain: str) -> None:
        """Keep a calibration beside earlier ones."""
        text = as_json(payload)
        with self._writing() as db:
            db.table("calibrations").insert(
                {
                    "device_id": self._names.put("devices", device),
                    "threads": threads,
                    "toolchain_id": self._names.put("toolchains", toolchain),
                    "payload": text,
                    "created": utc_now(),
                }
            )

    def calibration(self, device: str, threads: int) -> dict[str, Any] | None:
        """The newest calibration of a device with this many threads."""
        rows = self._rows(
            """SELECT payload FROM calibrations JOIN devices d ON d.id = device_id
               WHERE d.fingerprint = ? AND threads = ? ORDER BY calibrations.id DESC LIMIT 1""",
            (device, threads),
        )
        return self._parsed(rows[0]["payload"]) if rows else None

    def put_space(
        self, problem: str, device: str, candidates: Sequence[str], rejected: Sequence[tuple[str, str]]
    ) -> None:
        """Keep a problem's candidates and its ``(name, reason)`` rejections in order, instead of those kept before."""
        with self._writing() as db:
            key = {"problem_id": self._names.put("problems", problem), "device_id": self._names.put("devices", device)}
            for table in ("spaces", "rejections"):
                db.table(table).delete_where("problem_id = :problem_id AND device_id = :device_id", key)
            ids = dict.fromkeys(self._names.put_all("candidates", candidates))
            db.table("spaces").insert_all({**key, "position": n, "candidate_id": id_} for n, id_ in enumerate(ids))
            refused = self._names.put_all("candidates", [name for name, _ in rejected])
            reasons = self._names.put_all("reasons", [reason for _, reason in rejected])
            db.table("rejections").insert_all(
                {**key, "position": n, "candidate_id": id_, "reason_id": reason}
                for n, (id_, reason) in enumerate(zip(refused, reasons, strict=True))
            )

    def space(self, problem: str, device: str) -> tuple[list[str], list[tuple[str, str]]]:
        """Candidates, and rejections as ``(name, reason)``, in the order in which they were put."""
        ids = self._ids(problem=problem, device=device)
        if ids is None:
            return [], []
        where = "WHERE problem_id = :problem AND device_id = :device ORDER BY position"
        candidates = self._rows(f"SELECT c.name FROM spaces JOIN candidates c ON c.id = candidate_id {where}", ids)
        rejected = self._rows(
            f"""SELECT c.name, r.text FROM rejections
                JOIN candidates c ON c.id = candidate_id JOIN reasons r ON r.id = reason_id {where}""",
            ids,
        )
        return [row["name"] for row in candidates], [(row["name"], row["text"]) for row in rejected]

    def put_tiles(self, toolchain: str, tiles: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep what was counted in tile functions, by symbol; replaces what the same symbols had."""
        texts = {symbol: as_json(payload) for symbol, payload in tiles.items()}
        with self._writing() as db:
            id_ = self._names.put("toolchains", toolchain)
            db.conn.executemany(
                """INSERT INTO tiles (toolchain_id, symbol, payload)
                   VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET payload = excluded.payload""",
                [(id_, symbol, text) for symbol, text in texts.items()],
            )

    def tiles(self, toolchain: str, symbols: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
        """What was counted in tile functions, by symbol: in those of ``symbols``, or in all."""
        rows = self._rows(
            """SELECT symbol, payload FROM tiles JOIN toolchains t ON t.id = toolchain_id
               WHERE t.name = :toolchain
                 AND (:symbols IS NULL OR symbol IN (SELECT value FROM json_each(:symbols)))
               ORDER BY tiles.id""",
            {"toolchain": toolchain, "symbols": None if symbols is None else json.dumps(list(symbols))},
        )
        return {row["symbol"]: self._parsed(row["payload"]) for row in rows}

    def put_features(
        self,
        device: str,
        problem: str,
        tokens: int,
        features: Mapping[str, Mapping[str, Any]],
        toolchain: str,
    ) -> None:
        """Keep features by candidate name; replaces those of the same candidates."""
        texts = [as_json(payload) for payload in features.values()]
        with self._writing() as db:
            key = (
                self._names.put("devices", device),
                self._names.put("problems", problem),
                tokens,
                self._names.put("toolchains", toolchain),
            )
            candidates = self._names.put_all("candidates", features)
            db.conn.executemany(
                """INSERT INTO features (device_id, problem_id, tokens, toolchain_id, candidate_id, payload)
                   VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET payload = excluded.payload""",
                [(*key, candidate, text) for candidate, text in zip(candidates, texts, strict=True)],
            )

    def features(self, device: str, problem: str, tokens: int, toolchain: str) -> dict[str, dict[str, Any]]:
        """Features by candidate name."""
        ids = self._ids(device=device, problem=problem, toolchain=toolchain)
        if ids is None:
            return {}
        rows = self._rows(
            """SELECT c.name, payload FROM features JOIN candidates c ON c.id = candidate_id
               WHERE device_id = :device AND problem_id = :problem AND tokens = :tokens AND toolchain_id = :toolchain
               ORDER BY features.id""",
            {**ids, "tokens": tokens},
        )
        return {row["name"]: self._parsed(row["payload"]) for row in rows}


def as_json(payload: Mapping[str, Any]) -> str:
    """``payload`` as it is stored; raises `DatabaseError` if it cannot be."""
    try:
        return json.dumps(payload, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise DatabaseError(f"cannot be stored as JSON: {error}") from error

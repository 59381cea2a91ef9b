"""The store: one database file, spoken to in names."""

from __future__ import annotations

import json
from typing import Any

from ..kernels.errors import DatabaseError
from .images import KernelImages
from .inputs import SearchInputs, as_json
from .owner import is_gone, this_process
from .records import RUN_STATUSES, Measurement, Winner, may_replace, utc_now

_COUNTED = (
    "devices",
    "problems",
    "candidates",
    "rejections",
    "tiles",
    "features",
    "calibrations",
    "measurements",
    "winners",
    "kernels",
    "runs",
)

_MEASUREMENTS = """
    SELECT d.fingerprint AS device, p.key AS problem, m.tokens, c.name AS candidate, m.protocol, m.status, m.median_us,
           m.spread, m.samples, m.max_error, m.message, m.conditions, t.name AS toolchain, m.created
    FROM measurements m
    JOIN devices d ON d.id = m.device_id
    JOIN problems p ON p.id = m.problem_id
    JOIN candidates c ON c.id = m.candidate_id
    JOIN toolchains t ON t.id = m.toolchain_id
    WHERE m.id IN (SELECT max(id) FROM measurements
                   WHERE device_id = :device AND problem_id = :problem
                     AND tokens = :tokens AND toolchain_id = :toolchain
                   GROUP BY candidate_id, protocol)
      AND (:protocol IS NULL OR m.protocol = :protocol)
    ORDER BY m.id
"""

_WINNERS = """
    SELECT d.fingerprint AS device, p.key AS problem, w.tokens, w.tokens_from, w.tokens_to, c.name AS candidate,
           w.provenance, w.predicted_us, w.median_us, w.spread, w.samples, w.protocol, w.baseline_us, w.bandwidth_share,
           t.name AS toolchain, w.created,
           (SELECT json_group_array(name) FROM (
                SELECT n.name FROM ties JOIN candidates n ON n.id = ties.candidate_id
                WHERE ties.winner_id = w.id ORDER BY ties.position)) AS tied
    FROM winners w
    JOIN devices d ON d.id = w.device_id
    JOIN problems p ON p.id = w.problem_id
    JOIN candidates c ON c.id = w.candidate_id
    JOIN toolchains t ON t.id = w.toolchain_id
    WHERE (:device IS NULL OR d.fingerprint = :device) AND (:problem IS NULL OR p.key = :problem)
    ORDER BY p.key, w.tokens, w.id
"""


class Store(SearchInputs, KernelImages):
    """One database file.

    Everything is keyed by names: device fingerprints, `Problem.key`, `Candidate.name`, context lengths in tokens and
    `Backend.toolchain`. Each ``put_…`` commits by itself, all or nothing, and what is committed survives a killed
    process. Any number of processes may write to one file at once. A store is safe to use from several threads, which
    take turns; it must not cross a fork. The opener closes it, best as a context manager.

    Raises
    ------
    DatabaseError
        From every method: if the file turns out to be damaged, cannot be written, or stays locked by another process.
    ProblemError
        From every ``put_…`` that is given a text that is no problem's key.
    """

    def put_measurement(self, measurement: Measurement, run: int | None = None) -> int:
        """Keep a measurement beside earlier ones; returns its row's id. ``run`` is an id from `put_run`."""
        m = measurement
        with self._writing() as db:
            row = {
                "run_id": run,
                **self._place(m),
                "protocol": m.protocol,
                "status": m.status,
                "median_us": m.median_us,
                "spread": m.spread,
                "samples": m.samples,
                "max_error": m.max_error,
                "message": m.message,
                "conditions": as_json(m.conditions) if m.conditions else None,
                "created": m.created,
            }
            return int(db.table("measurements").insert(row).last_rowid or 0)

    def measurements(
        self, device: str, problem: str, tokens: int, toolchain: str, protocol: str | None = None
    ) -> list[Measurement]:
        """The newest measurement of each candidate and protocol, oldest first."""
        ids = self._ids(device=device, problem=problem, toolchain=toolchain)
        if ids is None:
            return []
        rows = self._rows(_MEASUREMENTS, {**ids, "tokens": tokens, "protocol": protocol})
        with self._decoding():
            return [Measurement(**{**row, "conditions": self._conditions(row["conditions"])}) for row in rows]

    def _conditions(self, text: Any) -> dict[str, Any]:
        return {} if text is None else self._parsed(text)

    def put_winner(self, winner: Winner) -> bool:
        """Keep a winner; returns False, and changes nothing, if `may_replace` says that the stored one stands.

        There is one winner to a device, problem, context length and toolchain.
        """
        w = winner
        with self._writing() as db:
            place = self._place(w)
            candidate = place.pop("candidate_id")
            stored = next(
                db.table("winners").rows_where(" AND ".join(f"{column} = :{column}" for column in place), place), None
            )
            if stored is not None:
                if not may_replace(w.provenance, stored["provenance"]):
                    return False
                db.table("winners").delete(stored["id"])
            row = {
                **place,
                "tokens_from": w.tokens_from,
                "tokens_to": w.tokens_to,
                "candidate_id": candidate,
                "provenance": w.provenance,
                "predicted_us": w.predicted_us,
                "median_us": w.median_us,
                "spread": w.spread,
                "samples": w.samples,
                "protocol": w.protocol,
                "baseline_us": w.baseline_us,
                "bandwidth_share": w.bandwidth_share,
                "created": w.created,
            }
            id_ = db.table("winners").insert(row).last_rowid
            tied = self._names.put_all("candidates", w.tied)
            db.table("ties").insert_all(
                {"winner_id": id_, "position": n, "candidate_id": candidate} for n, candidate in enumerate(tied)
            )
        return True

    def winners(self, device: str | None = None, problem: str | None = None) -> list[Winner]:
        """Winners of every toolchain, by problem and context length."""
        rows = self._rows(_WINNERS, {"device": device, "problem": problem})
        with self._decoding():
            return [Winner(**{**row, "tied": tuple(json.loads(row["tied"]))}) for row in rows]

    def _place(self, record: Measurement | Winner) -> dict[str, int]:
        return {
            "device_id": self._names.put("devices", record.device),
            "problem_id": self._names.put("problems", record.problem),
            "tokens": record.tokens,
            "toolchain_id": self._names.put("toolchains", record.toolchain),
            "candidate_id": self._names.put("candidates", record.candidate),
        }

    def put_run(self, command: str) -> int:
        """Note that this process has started a tuning run; returns its id.

        Earlier runs whose process is gone become ``interrupted``: they were killed.
        """
        with self._writing() as db:
            for run, process in db.execute("SELECT id, process FROM runs WHERE status = 'running'").fetchall():
                if is_gone(process):
                    db.execute("UPDATE runs SET status = 'interrupted' WHERE id = ?", (run,))
            row = {"command": command, "started": utc_now(), "status": "running", "process": this_process()}
            return int(db.table("runs").insert(row).last_rowid or 0)

    def finish_run(self, run: int, status: str = "finished") -> None:
        """Note how a run ended: ``finished``, ``interrupted`` or ``failed``. A killed one cannot; see `put_run`."""
        if status not in RUN_STATUSES:
            raise DatabaseError(f"unknown run status {status!r}: known are {', '.join(RUN_STATUSES)}")
        with self._writing() as db:
            changed = db.conn.execute(
                "UPDATE runs SET finished = ?, status = ? WHERE id = ?", (utc_now(), status, run)
            ).rowcount
            if not changed:
                raise DatabaseError(f"{self.path} has no run {run}")

    def info(self) -> dict[str, Any]:
        """What the file holds: schema version, size, row counts, devices, toolchains, statuses, provenances, runs."""
        counts = {table: self._rows(f"SELECT count(*) AS n FROM {table}")[0]["n"] for table in _COUNTED}
        statuses = self._rows("SELECT status, count(*) AS n FROM measurements GROUP BY status ORDER BY 1")
        provenances = self._rows("SELECT provenance, count(*) AS n FROM winners GROUP BY provenance ORDER BY 1")
        return {
            "path": str(self.path),
            "size_bytes": self.path.stat().st_size,
            "schema_version": self._rows("PRAGMA user_version")[0]["user_version"],
            "counts": counts,
            "devices": self._rows("SELECT fingerprint, name, isa, cores FROM devices ORDER BY id"),
            "toolchains": [row["name"] for row in self._rows("SELECT name FROM toolchains ORDER BY id")],
            "statuses": {row["status"]: row["n"] for row in statuses},
            "provenances": {row["provenance"]: row["n"] for row in provenances},
            "runs": self._rows("SELECT id, command, started, finished, status FROM runs ORDER BY id"),
        }

"""The schema: its version, and the migrations that lead to it.

``PRAGMA application_id`` says that a file is ours and ``PRAGMA user_version`` counts the migrations it has had. Names
(fingerprints, problem keys, candidate names, toolchains, reasons) are stored once each and referred to by id; the views
put them back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sqlite3 import Error

from sqlite_utils import Database

from ..kernels.errors import DatabaseError
from .records import PROTOCOLS, PROVENANCES, RUN_STATUSES, STATUSES
from .transaction import write

APPLICATION_ID = int.from_bytes(b"lowb", "big")

Migration = Callable[[Database], None]

_FIRST_PROTOCOLS = ("warm", "cold")


def _quoted(values: Sequence[str]) -> str:
    return ", ".join(f"'{value}'" for value in values)


def _tables(db: Database) -> None:
    db.executescript(f"""
        CREATE TABLE devices (
            id INTEGER PRIMARY KEY,
            fingerprint TEXT NOT NULL UNIQUE,
            name TEXT,
            isa TEXT,
            cores INTEGER,
            description TEXT NOT NULL DEFAULT '{{}}' CHECK (json_valid(description)),
            created TEXT NOT NULL
        );
        CREATE TABLE toolchains (
            id INTEGER PRIMARY KEY,
            name TEXT NOT NULL UNIQUE
        );
        CREATE TABLE problems (
            id INTEGER PRIMARY KEY,
            key TEXT NOT NULL UNIQUE,
            operator TEXT NOT NULL,
            heads INTEGER NOT NULL CHECK (heads > 0),
            kv_heads INTEGER NOT NULL CHECK (kv_heads > 0),
            head_dim INTEGER NOT NULL CHECK (head_dim > 0),
            query_rows INTEGER NOT NULL CHECK (query_rows > 0),
            precision TEXT NOT NULL
        );
        CREATE INDEX problems_family ON problems (operator, precision, head_dim);
        CREATE TABLE candidates (
            id INTEGER PRIMARY KEY,
            name TEXT NOT NULL UNIQUE,
            layout TEXT NOT NULL,
            pipeline TEXT,
            schedule TEXT
        );
        CREATE TABLE spaces (
            problem_id INTEGER NOT NULL REFERENCES problems (id),
            device_id INTEGER NOT NULL REFERENCES devices (id),
            position INTEGER NOT NULL,
            candidate_id INTEGER NOT NULL REFERENCES candidates (id),
            PRIMARY KEY (problem_id, device_id, position),
            UNIQUE (problem_id, device_id, candidate_id)
        ) WITHOUT ROWID;
        CREATE INDEX spaces_candidate ON spaces (candidate_id);
        CREATE TABLE reasons (
            id INTEGER PRIMARY KEY,
            text TEXT NOT NULL UNIQUE
        );
        CREATE TABLE rejections (
            problem_id INTEGER NOT NULL REFERENCES problems (id),
            device_id INTEGER NOT NULL REFERENCES devices (id),
            position INTEGER NOT NULL,
            candidate_id INTEGER NOT NULL REFERENCES candidates (id),
            reason_id INTEGER NOT NULL REFERENCES reasons (id),
            PRIMARY KEY (problem_id, device_id, position)
        ) WITHOUT ROWID;
        CREATE INDEX rejections_reason ON rejections (reason_id);
        CREATE TABLE tiles (
            id INTEGER PRIMARY KEY,
            toolchain_id INTEGER NOT NULL REFERENCES toolchains (id),
            symbol TEXT NOT NULL,
            payload TEXT NOT NULL CHECK (json_valid(payload)),
            UNIQUE (toolchain_id, symbol)
        );
        CREATE TABLE features (
            id INTEGER PRIMARY KEY,
            device_id INTEGER NOT NULL REFERENCES devices (id),
            problem_id INTEGER NOT NULL REFERENCES problems (id),
            tokens INTEGER NOT NULL CHECK (tokens > 0),
            toolchain_id INTEGER NOT NULL REFERENCES toolchains (id),
            candidate_id INTEGER NOT NULL REFERENCES candidates (id),
            payload TEXT NOT NULL CHECK (json_valid(payload)),
            UNIQUE (device_id, problem_id, tokens, toolchain_id, candidate_id)
        );
        CREATE TABLE calibrations (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            device_id INTEGER NOT NULL REFERENCES devices (id),
            threads INTEGER NOT NULL CHECK (threads > 0),
            toolchain_id INTEGER NOT NULL REFERENCES toolchains (id),
            payload TEXT NOT NULL CHECK (json_valid(payload)),
            created TEXT NOT NULL
        );
        CREATE INDEX calibrations_device ON calibrations (device_id, threads, id);
        CREATE TABLE runs (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            command TEXT NOT NULL,
            started TEXT NOT NULL,
            finished TEXT,
            status TEXT NOT NULL CHECK (status IN ({_quoted(RUN_STATUSES)}))
        );
        CREATE TABLE measurements (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            run_id INTEGER REFERENCES runs (id),
            device_id INTEGER NOT NULL REFERENCES devices (id),
            problem_id INTEGER NOT NULL REFERENCES problems (id),
            tokens INTEGER NOT NULL CHECK (tokens > 0),
            toolchain_id INTEGER NOT NULL REFERENCES toolchains (id),
            candidate_id INTEGER NOT NULL REFERENCES candidates (id),
            protocol TEXT NOT NULL CHECK (protocol IN ({_quoted(_FIRST_PROTOCOLS)})),
            status TEXT NOT NULL CHECK (status IN ({_quoted(STATUSES)})),
            median_us REAL CHECK (median_us > 0 AND median_us < 1e300),
            spread REAL,
            samples INTEGER NOT NULL,
            max_error REAL,
            message TEXT NOT NULL,
            created TEXT NOT NULL,
            CHECK (status NOT IN ('ok', 'slow') OR median_us IS NOT NULL)
        );
        CREATE INDEX measurements_newest
            ON measurements (device_id, problem_id, tokens, toolchain_id, candidate_id, protocol, id);
        CREATE INDEX measurements_run ON measurements (run_id);
        CREATE TABLE winners (
            id INTEGER PRIMARY KEY,
            device_id INTEGER NOT NULL REFERENCES devices (id),
            problem_id INTEGER NOT NULL REFERENCES problems (id),
            tokens INTEGER NOT NULL CHECK (tokens > 0),
            toolchain_id INTEGER NOT NULL REFERENCES toolchains (id),
            tokens_from INTEGER NOT NULL CHECK (tokens_from BETWEEN 1 AND tokens),
            tokens_to INTEGER CHECK (tokens_to >= tokens),
            candidate_id INTEGER NOT NULL REFERENCES candidates (id),
            provenance TEXT NOT NULL CHECK (provenance IN ({_quoted(PROVENANCES)})),
            predicted_us REAL CHECK (predicted_us > 0 AND predicted_us < 1e300),
            median_us REAL CHECK (median_us > 0 AND median_us < 1e300),
            spread REAL,
            samples INTEGER NOT NULL,
            protocol TEXT CHECK (protocol IN ({_quoted(_FIRST_PROTOCOLS)})),
            baseline_us REAL CHECK (baseline_us > 0 AND baseline_us < 1e300),
            bandwidth_share REAL,
            created TEXT NOT NULL,
            UNIQUE (device_id, problem_id, tokens, toolchain_id),
            CHECK (provenance = 'predicted' OR median_us IS NOT NULL)
        );
        CREATE TABLE ties (
            winner_id INTEGER NOT NULL REFERENCES winners (id) ON DELETE CASCADE,
            position INTEGER NOT NULL,
            candidate_id INTEGER NOT NULL REFERENCES candidates (id),
            PRIMARY KEY (winner_id, position)
        ) WITHOUT ROWID;
    """)


def _views(db: Database) -> None:
    db.create_view(
        "best",
        """
        SELECT d.name AS device, p.key AS problem, w.tokens, w.tokens_from, w.tokens_to,
               c.layout, c.pipeline, c.schedule,
               w.provenance, w.predicted_us, w.median_us, w.spread, w.samples, w.protocol,
               w.baseline_us / w.median_us AS speedup, w.bandwidth_share,
               (SELECT count(*) FROM ties WHERE ties.winner_id = w.id) AS tied,
               d.fingerprint, t.name AS toolchain, w.created
        FROM winners w
        JOIN devices d ON d.id = w.device_id
        JOIN problems p ON p.id = w.problem_id
        JOIN candidates c ON c.id = w.candidate_id
        JOIN toolchains t ON t.id = w.toolchain_id
        ORDER BY d.name, p.key, w.tokens
        """,
    )
    db.create_view(
        "timings",
        """
        SELECT m.id, d.name AS device, p.key AS problem, m.tokens, m.protocol, m.status, m.median_us, m.spread,
               m.samples, m.max_error, m.message, c.layout, c.pipeline, c.schedule, d.fingerprint,
               t.name AS toolchain, m.run_id, m.created
        FROM measurements m
        JOIN devices d ON d.id = m.device_id
        JOIN problems p ON p.id = m.problem_id
        JOIN candidates c ON c.id = m.candidate_id
        JOIN toolchains t ON t.id = m.toolchain_id
        WHERE m.id = (SELECT max(n.id) FROM measurements n
                      WHERE n.device_id = m.device_id AND n.problem_id = m.problem_id AND n.tokens = m.tokens
                        AND n.toolchain_id = m.toolchain_id AND n.candidate_id = m.candidate_id
                        AND n.protocol = m.protocol)
        """,
    )
    db.create_view(
        "pruned",
        """
        SELECT p.key AS problem, d.name AS device, r.text AS reason, count(*) AS candidates
        FROM rejections j
        JOIN problems p ON p.id = j.problem_id
        JOIN devices d ON d.id = j.device_id
        JOIN reasons r ON r.id = j.reason_id
        GROUP BY j.problem_id, j.device_id, j.reason_id
        ORDER BY p.key, candidates DESC
        """,
    )


def _first(db: Database) -> None:
    _tables(db)
    _views(db)


def _evicted(db: Database) -> None:
    """Measurements and winners may be of the protocol ``evicted``. A check cannot be altered, so both are rebuilt."""
    for view in ("best", "timings", "pruned"):
        db.execute(f"DROP VIEW {view}")
    for table in ("measurements", "winners"):
        old, new = (f"(protocol IN ({_quoted(known)}))" for known in (_FIRST_PROTOCOLS, PROTOCOLS))
        declared = [
            row[0]
            for row in db.execute("SELECT sql FROM sqlite_master WHERE tbl_name = ? AND sql IS NOT NULL", (table,))
        ]
        (create, *others) = sorted(declared, key=lambda sql: not sql.startswith("CREATE TABLE"))
        db.execute(create.replace(f"CREATE TABLE {table}", "CREATE TABLE rebuilt", 1).replace(old, new))
        db.execute(f"INSERT INTO rebuilt SELECT * FROM {table}")
        db.execute(f"DROP TABLE {table}")
        db.execute(f"ALTER TABLE rebuilt RENAME TO {table}")
        for index in others:
            db.execute(index)
    _views(db)


def _owned(db: Database) -> None:
    """Runs name their process, so that one that was killed can be told from one that is at work."""
    db.execute("ALTER TABLE runs ADD COLUMN process TEXT")


def _shipped(db: Database) -> None:
    """Winners may come with their machine code, for deployments that compile nothing."""
    for statement in (
        """
        CREATE TABLE kernels (
            id INTEGER PRIMARY KEY,
            toolchain_id INTEGER NOT NULL REFERENCES toolchains (id),
            symbol TEXT NOT NULL,
            arch TEXT NOT NULL,
            ptx BLOB NOT NULL,
            cubin BLOB,
            arguments TEXT NOT NULL CHECK (json_valid(arguments)),
            registers INTEGER NOT NULL,
            spill_bytes INTEGER NOT NULL,
            shared_bytes INTEGER NOT NULL,
            digest TEXT NOT NULL,
            created TEXT NOT NULL,
            UNIQUE (toolchain_id, symbol, arch)
        )
        """,
        """
        CREATE TABLE launches (
            winner_id INTEGER NOT NULL REFERENCES winners (id) ON DELETE CASCADE,
            position INTEGER NOT NULL,
            kernel_id INTEGER NOT NULL REFERENCES kernels (id),
            payload TEXT NOT NULL CHECK (json_valid(payload)),
            PRIMARY KEY (winner_id, position)
        ) WITHOUT ROWID
        """,
        "CREATE INDEX launches_kernel ON launches (kernel_id)",
    ):
        db.execute(statement)
    db.create_view(
        "shipped",
        """
        SELECT d.name AS device, p.key AS problem, w.tokens, l.position, k.symbol, k.arch, k.registers, k.spill_bytes,
               k.shared_bytes, json_extract(l.payload, '$.threads') AS threads,
               json_extract(l.payload, '$.grid') AS grid, json_extract(l.payload, '$.shared_bytes') AS dynamic_bytes,
               length(k.ptx) AS ptx_stored_bytes, length(k.cubin) AS cubin_stored_bytes, k.digest,
               d.fingerprint, t.name AS toolchain
        FROM launches l
        JOIN winners w ON w.id = l.winner_id
        JOIN kernels k ON k.id = l.kernel_id
        JOIN devices d ON d.id = w.device_id
        JOIN problems p ON p.id = w.problem_id
        JOIN toolchains t ON t.id = k.toolchain_id
        ORDER BY d.name, p.key, w.tokens, l.position
        """,
    )


def _conditions(db: Database) -> None:
    """Measurements say what the device said of itself: clocks, temperature, why it was slowed down."""
    db.execute(
        "ALTER TABLE measurements ADD COLUMN conditions TEXT CHECK (conditions IS NULL OR json_valid(conditions))"
    )


MIGRATIONS: tuple[Migration, ...] = (_first, _evicted, _owned, _shipped, _conditions)
"""The n-th leads from schema version n to n + 1. Append only: files of every earlier version exist."""

SCHEMA_VERSION = len(MIGRATIONS)


def pragma(db: Database, name: str) -> int:
    """Value of an integer ``PRAGMA``."""
    return int(db.conn.execute(f"PRAGMA {name}").fetchone()[0])


def migrate(db: Database, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring ``db`` to the newest schema, one transaction a version.

    Foreign keys are left switched off, so that a migration can rebuild tables, and are checked before each commit.

    Raises
    ------
    DatabaseError
        If a migration fails; the file then stays at the version before it.
    """
    db.conn.execute("PRAGMA foreign_keys = OFF")
    while (version := pragma(db, "user_version")) < len(migrations):
        try:
            with write(db):
                # Another process may have migrated while this one waited for the lock.
                if pragma(db, "user_version") == version:
                    migrations[version](db)
                    if db.conn.execute("PRAGMA foreign_key_check").fetchone() is not None:
                        raise DatabaseError("rows would refer to nothing")
                    db.conn.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    db.conn.execute(f"PRAGMA user_version = {version + 1}")
        except (Error, UnicodeError, ValueError, DatabaseError) as error:
            raise DatabaseError(f"cannot migrate from schema {version} to {version + 1}: {error}") from error

"""What a bench found: one row for each case and contestant, and the limit beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .case import Case

ABSENT = "absent"


@dataclass(frozen=True)
class Row:
    """One contestant's result in one case.

    Attributes
    ----------
    case : Case
    impl : str
    status : str
        ``ok``, or why there is no time: ``absent`` (not installed), ``unsupported``, ``wrong``, ``crashed``, ``hung``,
        ``noisy``.
    message : str
        The reason in words.
    storage : str
        How it stores its operands.
    nbytes : int
        Bytes of its packed operands.
    median_us, spread : float or None
        Of one call; the spread is the interquartile range over the median.
    samples : int
    max_rel_error : float or None
        Against float64 on its own stored operands.
    limit_share : float or None
        Time that reading its operands takes at the measured bandwidth, over the median.
    candidate : str
        The kernel that ``lowbit`` used.
    """

    case: Case
    impl: str
    status: str
    message: str = ""
    storage: str = ""
    nbytes: int = 0
    median_us: float | None = None
    spread: float | None = None
    samples: int = 0
    max_rel_error: float | None = None
    limit_share: float | None = None
    candidate: str = ""

    @property
    def gbps(self) -> float | None:
        return None if self.median_us is None else self.nbytes / self.median_us / 1e3

    def as_dict(self) -> dict[str, Any]:
        numbers = {
            "storage": self.storage,
            "bytes": self.nbytes,
            "median_us": self.median_us,
            "spread": self.spread,
            "samples": self.samples,
            "gbps": self.gbps,
            "limit_share": self.limit_share,
            "max_rel_error": self.max_rel_error,
        }
        chosen = {"candidate": self.candidate} if self.candidate else {}
        reason = {"message": self.message} if self.message else {}
        return {"impl": self.impl, **place(self.case), "status": self.status, **numbers, **chosen, **reason}


@dataclass(frozen=True)
class LimitPoint:
    """How fast a case's bytes could be read, measured in the same rounds."""

    case: Case
    nbytes: int
    median_us: float
    spread: float

    @property
    def gbps(self) -> float:
        return self.nbytes / self.median_us / 1e3

    def as_dict(self) -> dict[str, Any]:
        return {
            **place(self.case),
            "bytes": self.nbytes,
            "median_us": self.median_us,
            "spread": self.spread,
            "gbps": self.gbps,
        }


@dataclass
class Outcome:
    """A whole bench.

    Attributes
    ----------
    device : dict
        `lowbit.costmodel.device.Device.as_dict`.
    threads : int
    protocol : str
    peers : dict of str to str
        Version of each contestant, or ``absent: `` and the reason.
    rows : list of Row
    limits : list of LimitPoint
    tainted, rounds : int
        Timing rounds, and how many of them contention spoilt.
    """

    device: dict[str, Any]
    threads: int
    protocol: str
    peers: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    limits: list[LimitPoint] = field(default_factory=list)
    rounds: int = 0
    tainted: int = 0

    def ratios(self) -> Iterator[dict[str, Any]]:
        """How many times longer each peer takes than ``lowbit`` in the same case.

        Peers without quantised operands (PyTorch, NumPy) are compared with every format by their 16- and 32-bit time at
        the same length.
        """
        for own in self._timed("lowbit"):
            for peer in dict.fromkeys(row.impl for row in self.rows if row.impl != "lowbit"):
                other = self._rival(own.case, peer)
                if other is not None and other.median_us is not None and own.median_us is not None:
                    ratio = other.median_us / own.median_us
                    yield {"peer": peer, **place(own.case), "peer_storage": other.storage, "ratio": ratio}

    def _rival(self, case: Case, peer: str) -> Row | None:
        rows = {row.case: row for row in self._timed(peer)}
        if case in rows:
            return rows[case]
        if any(row.case == case and row.status != "unsupported" for row in self.rows if row.impl == peer):
            return None  # it has the format, but no time
        return next((row for other, row in rows.items() if _same_size(case, other)), None)

    def _timed(self, impl: str) -> list[Row]:
        return [row for row in self.rows if row.impl == impl and row.median_us is not None]

    def as_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "rows": [row.as_dict() for row in self.rows],
            "limit": {
                "gbps": max((point.gbps for point in self.limits), default=None),
                "cases": [point.as_dict() for point in self.limits],
            },
            "peers": self.peers,
            "device": self.device,
            "threads": self.threads,
            "protocol": self.protocol,
            "ratios": list(self.ratios()),
            "rounds": {"timed": self.rounds, "tainted": self.tainted},
        }


def place(case: Case) -> dict[str, Any]:
    """What a row says about its case."""
    problem = case.problem
    if problem.operator == "gemv":
        shape = {"rows": case.tokens, "columns": problem.head_dim, "vectors": problem.query_rows}
        return {"name": case.name, **shape, "precision": problem.precision, "kv": case.kv}
    shape = {"heads": problem.heads, "kv_heads": problem.kv_heads, "head_dim": problem.head_dim}
    return {"kv": case.kv, "tokens": case.tokens, "query_rows": problem.query_rows, **shape}


def _same_size(one: Case, other: Case) -> bool:
    def size(case: Case) -> tuple[object, ...]:
        p = case.problem
        return p.operator, p.heads, p.kv_heads, p.head_dim, p.query_rows, case.tokens, case.name

    return size(one) == size(other)

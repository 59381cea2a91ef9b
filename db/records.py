"""What a database keeps: measurements and winners, and which of two winners stands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..kernels.errors import DatabaseError

STATUSES = ("ok", "wrong", "crashed", "hung", "illegal_instruction", "compile_failed", "slow")
"""What became of a candidate. ``slow`` was dropped early as clearly slower: its median is of the few samples taken."""

TIMED = ("ok", "slow")
"""Statuses that carry a median."""

PROTOCOLS = ("warm", "cold", "evicted")
"""``warm`` repeats on one set of operands; ``cold`` rotates over more copies than the last cache level holds, as far as
bounds on memory allow; ``evicted`` evicts the packed operands from every cache before each timed sample."""

PROVENANCES = ("predicted", "verified", "measured")
"""``predicted``: nothing was timed. ``verified``: a predicted shortlist was timed. ``measured``: the space was."""

RUN_STATUSES = ("running", "finished", "interrupted", "failed")


def utc_now() -> str:
    """The time as ISO 8601 in UTC, to the millisecond; such texts sort by time."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def may_replace(new: str, stored: str) -> bool:
    """Whether a winner of provenance ``new`` may overwrite a ``stored`` one of the same device, problem and toolchain.

    Whatever was timed on the device replaces what is there; a prediction replaces only predictions.
    """
    return new != "predicted" or stored == "predicted"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One candidate timed, or found faulty, on one device at one context length.

    Parameters
    ----------
    device : str
        Fingerprint.
    problem : str
        `Problem.key`.
    tokens : int
        Context length.
    candidate : str
        `Candidate.name`.
    protocol : str
        One of `PROTOCOLS`.
    status : str
        One of `STATUSES`.
    median_us : float or None
        Microseconds of one call; required by the statuses in `TIMED`.
    spread : float or None
        (p75 - p25) / median of the samples.
    samples : int
        Timed calls behind the median.
    max_error : float or None
        Largest error against the reference; NaN is kept as infinity, so that it compares as worse than any number.
    message : str
        What went wrong, in one line; empty for ``ok``.
    conditions : dict
        What the device said of itself meanwhile, for JSON: a GPU's clocks and what held them down.
    toolchain : str
        `Backend.toolchain` of the kernel.
    created : str
        ISO 8601, UTC.

    Raises
    ------
    DatabaseError
        For a status or protocol that does not exist, a missing median, or a number that is not finite.
    """

    device: str
    problem: str
    tokens: int
    candidate: str
    protocol: str
    status: str
    median_us: float | None = None
    spread: float | None = None
    samples: int = 0
    max_error: float | None = None
    message: str = ""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    toolchain: str
    created: str = field(default_factory=utc_now)

    def __post_init__(self) -> None:
        _one_of("status", self.status, STATUSES)
        _one_of("protocol", self.protocol, PROTOCOLS)
        _positive("tokens", self.tokens)
        _positive("median_us", self.median_us)
        _finite("spread", self.spread)
        if self.status in TIMED and self.median_us is None:
            raise DatabaseError(f"a measurement with status {self.status!r} needs a median_us")
        if self.max_error is not None and math.isnan(self.max_error):
            object.__setattr__(self, "max_error", math.inf)


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The candidate to use for a problem in a range of context lengths.

    Parameters
    ----------
    device, problem, candidate, toolchain, created : str
        As in `Measurement`.
    tokens : int
        Context length it was chosen at.
    tokens_from, tokens_to : int, int or None
        Inclusive range in which the choice applies; None leaves the end open. Holds ``tokens``.
    provenance : str
        One of `PROVENANCES`.
    predicted_us, median_us : float or None
        Cost model's and measured time of one call at ``tokens``; all but predictions need the measured one.
    spread : float or None
        (p75 - p25) / median.
    samples : int
        Timed calls behind the median.
    protocol : str or None
        One of `PROTOCOLS`; predictions may leave it out.
    tied : tuple of str
        Names of the other candidates that the measurement cannot tell from this one.
    baseline_us : float or None
        Measured time of `Backend.baseline` at ``tokens``.
    bandwidth_share : float or None
        Time that memory bandwidth alone would take, as a fraction of ``median_us``.

    Raises
    ------
    DatabaseError
        For a provenance or protocol that does not exist, a range without ``tokens``, a missing median, or a number that
        is not finite.
    """

    device: str
    problem: str
    tokens: int
    tokens_from: int
    tokens_to: int | None
    candidate: str
    provenance: str
    predicted_us: float | None = None
    median_us: float | None = None
    spread: float | None = None
    samples: int = 0
    protocol: str | None = None
    tied: tuple[str, ...] = ()
    baseline_us: float | None = None
    bandwidth_share: float | None = None
    toolchain: str
    created: str = field(default_factory=utc_now)

    def __post_init__(self) -> None:
        _one_of("provenance", self.provenance, PROVENANCES)
        if self.protocol is not None:
            _one_of("protocol", self.protocol, PROTOCOLS)
        if not 1 <= self.tokens_from <= self.tokens or (self.tokens_to is not None and self.tokens_to < self.tokens):
            raise DatabaseError(
                f"a winner's range must hold its tokens: {self.tokens} is not in {self.tokens_from} to {self.tokens_to}"
            )
        for name in ("predicted_us", "median_us", "baseline_us"):
            _positive(name, getattr(self, name))
        for name in ("spread", "bandwidth_share"):
            _finite(name, getattr(self, name))
        if self.provenance != "predicted" and (self.median_us is None or self.protocol is None):
            raise DatabaseError(f"a {self.provenance} winner needs a median_us and a protocol")

    @property
    def speedup(self) -> float | None:
        """Baseline's time over this one's."""
        if self.baseline_us is None or self.median_us is None:
            return None
        return self.baseline_us / self.median_us

    def covers(self, tokens: int) -> bool:
        """Whether ``tokens`` lies in the range."""
        return self.tokens_from <= tokens and (self.tokens_to is None or tokens <= self.tokens_to)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise DatabaseError(f"unknown {name} {value!r}: known are {', '.join(known)}")


def _finite(name: str, value: float | None) -> None:
    if value is not None and not math.isfinite(value):
        raise DatabaseError(f"{name} must be a finite number, not {value}")


def _positive(name: str, value: float | None) -> None:
    _finite(name, value)
    if value is not None and value <= 0:
        raise DatabaseError(f"{name} must be positive, not {value}")

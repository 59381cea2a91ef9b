"""What the bench and its workers say to each other; all of it pickles."""

from __future__ import annotations

from dataclasses import dataclass

from .case import Case


@dataclass(frozen=True)
class Setup:
    """The first message: which contestant to be, and how."""

    contestant: str
    threads: int
    search_path: tuple[str, ...]


@dataclass(frozen=True)
class Opened:
    """The contestant can be used. Or not: then ``absent`` says why."""

    version: str = ""
    absent: str = ""


@dataclass(frozen=True)
class Enter:
    """Store the case's operands, compute once and check. Answer: `Entered` or `Refused`.

    If there are several ways to store them, ``protocol`` decides which is the fastest.
    """

    case: Case
    candidate: str = ""
    protocol: str = "cold"


@dataclass(frozen=True)
class Time:
    """Time one slot of the case entered last. Answer: `Taken` or `Refused`."""

    protocol: str


@dataclass(frozen=True)
class Leave:
    """Forget the case's operands. Answer: `Opened`."""


@dataclass(frozen=True)
class Entered:
    """A correct contestant."""

    storage: str
    nbytes: int
    max_rel_error: float | None


@dataclass(frozen=True)
class Refused:
    """Why there is no time: ``unsupported``, ``wrong`` or ``crashed``."""

    status: str
    message: str
    max_rel_error: float | None = None


@dataclass(frozen=True)
class Taken:
    """One slot's samples, and whether the system disturbed all of them."""

    samples_us: tuple[float, ...]
    preempted: bool


Request = Enter | Time | Leave
Reply = Opened | Entered | Refused | Taken

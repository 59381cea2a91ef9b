"""What the tuning process and its workers say to each other. All of it pickles, and names candidates by their names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .rounds import Fault
from .timing import Slot

if TYPE_CHECKING:
    from ..costmodel.counts import Counts


@dataclass(frozen=True)
class Setup:
    """What a worker needs to begin.

    Parameters
    ----------
    backend : str
        A name for `backend_named`, or ``module:callable`` that makes a `Backend`.
    plugins : tuple of str
        Modules to import first; they may register packings.
    threads : int
        Most threads that a candidate uses.
    cache_bytes : int
        Size of the last cache level.
    memory_bytes : int
        Bound on the packed operands that the worker keeps.
    search_path : tuple of str
        The tuning process's ``sys.path``.
    seed : int
        Of the operands.
    isa : str
        Instruction set to generate code for, on the CPU backend, if not the machine's. Nothing is run then.
    """

    backend: str
    plugins: tuple[str, ...] = ()
    threads: int = 1
    cache_bytes: int = 32 << 20
    memory_bytes: int = 1 << 30
    search_path: tuple[str, ...] = ()
    seed: int = 0
    isa: str = ""


@dataclass(frozen=True)
class Prepare:
    """Compile ``candidate``, and check it at ``tokens`` and at awkward lengths. Answer: `Prepared` or `Fault`.

    Candidates with the same ``code`` may share machine code and should go to one worker; empty means none do.
    """

    problem: str
    tokens: int
    candidate: str
    code: str = ""


@dataclass(frozen=True)
class TimeSlot:
    """Time one slot of ``candidate``. Answer: `Slot` or `Fault`."""

    problem: str
    tokens: int
    candidate: str
    protocol: str


@dataclass(frozen=True)
class Count:
    """Count tile functions, each given by its symbol and a candidate that has it. Answer: `Counted` or `Fault`."""

    problem: str
    tiles: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Prepared:
    """A correct candidate."""

    max_error: float
    compile_s: float


@dataclass(frozen=True)
class Counted:
    """Counts by symbol; reasons of the tile functions that cannot be generated or counted."""

    counts: dict[str, Counts]
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ready:
    """The worker's set-up is done."""


@dataclass(frozen=True)
class Refused:
    """The worker's set-up failed."""

    message: str


@dataclass(frozen=True)
class Stage:
    """What the worker is about to do: ``compile``, ``reference``, ``pack`` or ``run``. Each has its own deadline."""

    name: str


Request = Prepare | TimeSlot | Count
Reply = Prepared | Slot | Counted | Fault

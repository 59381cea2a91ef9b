"""Every error that a user can cause, one class a kind.

All of them derive from `LowbitError`; the command prints the message as one line and exits with `exit_status`.
"""

from __future__ import annotations


class LowbitError(Exception):
    """What was wrong, with which value, and what to do. The message is one line.

    Attributes
    ----------
    exit_status : int
        What the `autotune` command exits with.
    """

    exit_status = 1


class ProblemError(LowbitError, ValueError):
    """A problem that cannot exist: a head dimension of 7, zero tokens, an unknown precision."""

    exit_status = 2


class LayoutError(LowbitError, ValueError):
    """A layout or packing that is malformed or cannot hold the given shape."""

    exit_status = 2


class QuantizationError(LowbitError, ValueError):
    """Values that cannot be quantised: NaN or infinity, named with their position."""

    exit_status = 2


class DeviceError(LowbitError):
    """An unknown device, or one that this machine lacks."""

    exit_status = 3


class CompileError(LowbitError):
    """A candidate that the backend cannot lower or compile."""

    exit_status = 4


class DatabaseError(LowbitError):
    """A database that cannot be opened, is corrupt, foreign, newer than this release, or locked."""

    exit_status = 5


class EmptyDatabaseError(DatabaseError):
    """A file that may become a database, but into which nothing was tuned."""


class NoWinnerError(LowbitError, LookupError):
    """Nothing in the database answers the question that was asked, or tuning found no winner at all."""

    exit_status = 6


class ModelError(LowbitError):
    """An unknown model preset, or a model file that cannot be read."""

    exit_status = 7


class NoiseError(LowbitError):
    """The machine was too noisy to measure on."""

    exit_status = 8


class KernelError(LowbitError):
    """A kernel of somebody's own that is declared wrongly, fails, or computes something else than its reference."""

    exit_status = 9


class GpuMemoryError(DeviceError):
    """The GPU has too little memory left for what was asked."""


class GpuFaultError(DeviceError):
    """A kernel broke the GPU's context: an illegal address, a trap, a hang that the system ended.

    Every later call of the same process fails in the same way, whatever it asks: see `poisoned`.
    """


class TrustError(LowbitError):
    """Machine code that was to be loaded, and that nobody vouched for or that is not what was vouched for."""

    exit_status = 10


class LogitsError(LowbitError, ValueError):
    """Logits that no token can be drawn from: one is NaN or infinite, or none is possible."""


class CacheFullError(LowbitError):
    """More tokens than a cache, or a model's context, has room for."""

    exit_status = 11


class CacheFileError(LowbitError):
    """A saved cache that cannot be read, is altered, or is another model's."""

    exit_status = 12


class FitError(LowbitError):
    """What memory does not hold, with the arithmetic."""

    exit_status = 13


def poisoned(error: BaseException) -> bool:
    """Whether the process that met ``error``, or what caused it, must end before the GPU can be used again."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, GpuFaultError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False

"""Which process a run belongs to, and whether it is still there."""

from __future__ import annotations

import os
import platform

_CLOCK_S = 2.0
"""Process start times are read with this much uncertainty."""


def this_process() -> str:
    """``machine/pid/start``: the host's name, the process's id, and when it started in seconds since the epoch."""
    import psutil

    return f"{platform.node()}/{os.getpid()}/{psutil.Process().create_time():.0f}"


def is_gone(process: str | None) -> bool:
    """Whether ``process``, from `this_process`, has certainly ended: False for one of another machine, or unknown."""
    import psutil

    if not isinstance(process, str):
        return False
    machine, _, rest = process.rpartition("/")[0].rpartition("/")
    if not rest.isdecimal() or machine != platform.node():
        return False
    started = process.rpartition("/")[2]
    try:
        return bool(abs(psutil.Process(int(rest)).create_time() - float(started)) > _CLOCK_S)
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, ValueError):
        return False

"""What every worker process of a bench does: open its contestant, answer requests, end with its parent."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from ...search.wording import one_line
from .contestant import Absent
from .messages import Opened

_PR_SET_PDEATHSIG = 1

T = TypeVar("T")


def find_modules_like(search_path: Sequence[str]) -> None:
    """Import from where the parent does."""
    sys.path[:] = [*search_path, *(entry for entry in sys.path if entry not in search_path)]


def opened(connection: Connection, open_contestant: Callable[[], T]) -> T | None:
    """What ``open_contestant`` returns; None, and the parent is told why, if the contestant cannot take part."""
    try:
        return open_contestant()
    except Absent as error:
        connection.send(Opened(absent=" ".join(str(error).split())))
    except Exception as error:
        connection.send(Opened(absent=one_line(error)))
    return None


def answer_until_closed(connection: Connection, answer: Callable[[Any], object]) -> None:
    """Answer requests until the other side closes."""
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        connection.send(answer(request))


def run_worker(serve: Callable[[Connection], None]) -> None:
    """Serve the connection whose descriptor the command line names, and do not outlive the parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Connection(int(sys.argv[1])))

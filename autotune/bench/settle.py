"""Waiting for a process's own threads to sleep, so that they take no time from whoever comes next."""

from __future__ import annotations

import time

IDLE_S = 0.05
IDLE_SHARE = 0.2


def settle() -> None:
    """Wait until this process's other threads have stopped spinning, or for `IDLE_S` at most."""
    deadline = time.monotonic() + IDLE_S
    while time.monotonic() < deadline:
        cpu, wall = time.process_time(), time.perf_counter()
        time.sleep(0.001)
        if time.process_time() - cpu < IDLE_SHARE * (time.perf_counter() - wall):
            return

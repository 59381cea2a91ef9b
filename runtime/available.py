"""Memory that a process may still take: the system's, and what a container's limits leave of it."""

from __future__ import annotations

from pathlib import Path

LARGEST = 1 << 50
"""More than any limit: what systems write that have none."""


def available_bytes(root: Path = Path("/")) -> int:
    """What this process may still take.

    Parameters
    ----------
    root : Path
        Where ``sys`` and ``proc`` are mounted.
    """
    import psutil

    return min(int(psutil.virtual_memory().available), *_left_by_limits(root), LARGEST)


def _left_by_limits(root: Path) -> list[int]:
    """What the control groups of this process, versions 2 and 1, leave; pages that can be dropped count as free."""
    base = root / "sys/fs/cgroup"
    left = []
    for group in _groups(root):
        for folder, limit, used, droppable in (
            (base / group, "memory.max", "memory.current", "inactive_file"),
            (base / "memory" / group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, taken = _number(folder / limit), _number(folder / used)
            if most is not None and taken is not None and most < LARGEST:
                left.append(max(most - taken + _statistic(folder / "memory.stat", droppable), 0))
    return left


def _groups(root: Path) -> list[str]:
    """Paths of this process's control group and of those above it; the last is the root's."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError):
        lines = []
    found = {""}
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers in ("", "memory"):
            parts = [part for part in path.split("/") if part and part != ".."]
            found.update("/".join(parts[: count + 1]) for count in range(len(parts)))
    return sorted(found, key=len, reverse=True)


def _number(path: Path) -> int | None:
    """None where the file is missing or says ``max``."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
    except (OSError, ValueError, IndexError):
        return 0

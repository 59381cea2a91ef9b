"""The directory of object files: private to its user, bounded in size, safe to share between processes.

What lies there is executed, so a file or directory that somebody else owns or may write is refused. Files are written
under another name and renamed, so that a reader sees all of a file or none of it.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

CACHE_VARIABLE = "LOWBIT_CACHE"
OFF = "off"
LIMIT_BYTES = 256 << 20
"""What the files may take together; beyond it those are deleted that were not used for longest."""

SUFFIX = ".o"
_STEM = 40
_LARGEST_FILE = 16 << 20
_FRESH_S = 3600  # a file used within the last hour is not marked as used again; a temporary one may still be written


class UnsafeError(Exception):
    """Somebody else could have written what would be executed."""


def directory() -> Path | None:
    """Where object files are kept, whether it exists or not; None if they are not.

    ``$LOWBIT_CACHE`` if that is set and not ``off``, else in the user's cache directory.
    """
    wanted = os.environ.get(CACHE_VARIABLE)
    if wanted:
        return None if wanted.lower() == OFF else Path(wanted)
    import platformdirs

    return Path(platformdirs.user_cache_dir("lowbit", appauthor=False)) / "objects"


def file_name(digest: bytes) -> str:
    return digest.hex()[:_STEM] + SUFFIX


@contextmanager
def opened(path: Path) -> Iterator[Place]:
    """The directory at ``path``.

    Raises
    ------
    OSError
        If it is missing, or cannot be opened.
    UnsafeError
        If it belongs to another user, or others may write to it.
    """
    if os.open not in os.supports_dir_fd:
        yield Place(path, None)
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _require_private(os.fstat(handle), "it")
        yield Place(path, handle)
    finally:
        os.close(handle)


def create(path: Path) -> None:
    """Make the directory, for its user alone, unless it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)


class Place:
    """An open directory. Names are looked up in it even if its path is replaced meanwhile."""

    def __init__(self, path: Path, handle: int | None) -> None:
        self._path, self._handle = path, handle

    def read(self, name: str) -> bytes:
        """A file's content; nothing if it is too large or no file.

        Raises
        ------
        OSError
            If it is missing, or cannot be read.
        UnsafeError
            If it belongs to another user, or others may write to it.
        """
        # O_NONBLOCK: what has this name may be a pipe.
        flags = os.O_RDONLY | _flag("O_NOFOLLOW") | _flag("O_CLOEXEC") | _flag("O_NONBLOCK") | _flag("O_BINARY")
        descriptor = os.open(self._name(name), flags, dir_fd=self._handle)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            _require_private(found, f"its file {name}")
            if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST_FILE:
                return b""
            content = file.read()
        if time.time() - found.st_mtime > _FRESH_S:
            with suppress(OSError):
                os.utime(self._name(name), dir_fd=self._handle)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Put a file in place of whatever has its name."""
        temporary = f"{name}.{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _flag("O_CLOEXEC") | _flag("O_BINARY")
        descriptor = os.open(self._name(temporary), flags, 0o600, dir_fd=self._handle)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            os.replace(self._name(temporary), self._name(name), src_dir_fd=self._handle, dst_dir_fd=self._handle)
        except OSError:
            with suppress(OSError):
                os.unlink(self._name(temporary), dir_fd=self._handle)
            raise

    def _name(self, name: str) -> str:
        return name if self._handle is not None else str(self._path / name)


def _flag(name: str) -> int:
    return int(getattr(os, name, 0))


def _require_private(found: os.stat_result, what: str) -> None:
    if not hasattr(os, "geteuid"):
        return
    if found.st_uid != os.geteuid():
        raise UnsafeError(f"{what} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeError(f"{what} can be written by others")


@dataclass(frozen=True)
class Stored:
    """One object file, or what an interrupted process left of one."""

    path: Path
    size_bytes: int
    used: float
    complete: bool


def stored() -> list[Stored]:
    """All files of the cache, the one not used for longest first.

    Raises
    ------
    OSError
        If the directory is there but cannot be read.
    """
    path = directory()
    if path is None:
        return []
    with suppress(FileNotFoundError):
        return _listed(path)
    return []


def clear() -> tuple[int, list[str]]:
    """Delete all files of the cache: how many there were, and what could not be deleted, each with the reason.

    Raises
    ------
    OSError
        If the directory is there but cannot be read.
    """
    deleted, left = 0, []
    for each in stored():
        try:
            each.path.unlink(missing_ok=True)
            deleted += 1
        except OSError as error:
            reason = "it is a directory" if each.path.is_dir() and not each.path.is_symlink() else error.strerror
            left.append(f"{each.path}: {reason}")
    return deleted, left


def sweep(path: Path) -> None:
    """Delete what is beyond `LIMIT_BYTES`, and what interrupted processes left."""
    files = _listed(path)
    total = sum(each.size_bytes for each in files)
    for each in files:
        abandoned = not each.complete and time.time() - each.used > _FRESH_S
        if abandoned or total > LIMIT_BYTES:
            with suppress(OSError):
                each.path.unlink()
                total -= each.size_bytes


def _listed(path: Path) -> list[Stored]:
    files = []
    with os.scandir(path) as entries:
        for entry in entries:
            stem, suffix, rest = entry.name.partition(SUFFIX)
            if not suffix or len(stem) != _STEM or set(stem) - set("0123456789abcdef"):
                continue  # not of this cache
            with suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                files.append(Stored(path / entry.name, found.st_size, found.st_mtime, not rest))
    return sorted(files, key=lambda each: each.used)

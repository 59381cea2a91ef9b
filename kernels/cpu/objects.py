"""Object code of kernels, kept across processes.

Code is asked for by a `Key` that says everything it depends on. If it is stored it is loaded, which takes about a
millisecond; otherwise it is built, loaded and stored. A file that is truncated, altered or another key's is built anew
and replaced.
A directory that cannot be used or trusted costs time, never correctness: one `CacheWarning` a process.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite

from . import code_files
from .machine import link

_STARTED = time.time()
_MAGIC = b"lowbit object 1\n"
_SWEEP_BYTES = code_files.LIMIT_BYTES // 64


class CacheWarning(UserWarning):
    """Compiled kernels are not kept or not reused, and why."""


@dataclass(frozen=True)
class Key:
    """What object code is stored under.

    Parameters
    ----------
    symbols : tuple of str
        Functions in the object code.
    parts : tuple of str
        All that the code depends on besides this package's sources and the versions of its compilers.
    """

    symbols: tuple[str, ...]
    parts: tuple[str, ...]

    @property
    def digest(self) -> bytes:
        text = "\0".join((toolchain(), sys.implementation.cache_tag or "", *self.symbols, "", *self.parts))
        return hashlib.sha256(text.encode()).digest()


@dataclass
class Counts:
    """What this process has done: objects built, and objects loaded from files without building."""

    built: int = 0
    loaded: int = 0


counts = Counts()


@functools.cache
def toolchain() -> str:
    """The compilers' versions and a digest of the sources that generate kernels."""
    return f"numba {version('numba')}, llvmlite {llvmlite.__version__}, kernels {_source_digest()}"


def _sources() -> list[Path]:
    root = Path(__file__).parent.parent
    return sorted([*root.glob("*.py"), *root.glob("cpu/*.py")])


def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def edited() -> bool:
    """Whether a source may have changed since this process imported it; its digest then says nothing of the code."""
    return any(path.stat().st_mtime > _STARTED - 1 for path in _sources())


def addresses(key: Key, build: Callable[[], bytes]) -> tuple[int, ...]:
    """Addresses of the functions ``key.symbols``, valid for the life of the process.

    Safe to use from several threads and processes.

    Parameters
    ----------
    key : Key
    build : callable
        Makes the object code where there is none; what it raises is passed on.
    """
    return _objects.addresses(key, build)


class _Objects:
    """The objects that this process has linked, and its dealings with the stored ones."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._linked: dict[bytes, tuple[Any, tuple[int, ...]]] = {}
        self._unswept = _SWEEP_BYTES  # bytes written since the directory's size was looked at
        self._warned = False
        self._current: bool | None = None

    def addresses(self, key: Key, build: Callable[[], bytes]) -> tuple[int, ...]:
        with self._lock:
            digest = key.digest
            if digest not in self._linked:
                self._linked[digest] = self._load(key, digest) or self._build(key, digest, build)
            return self._linked[digest][1]

    def _load(self, key: Key, digest: bytes) -> tuple[Any, tuple[int, ...]] | None:
        code = self._read(digest)
        if code is None:
            return None
        try:
            linked = link(code, key.symbols)
        except RuntimeError:
            return None
        counts.loaded += 1
        return linked

    def _build(self, key: Key, digest: bytes, build: Callable[[], bytes]) -> tuple[Any, tuple[int, ...]]:
        code = build()
        linked = link(code, key.symbols)
        counts.built += 1
        self._write(digest, code)
        return linked

    def _read(self, digest: bytes) -> bytes | None:
        path = code_files.directory()
        if self._current is None:
            self._current = not edited()
        if path is None or not self._current:
            return None
        try:
            with code_files.opened(path) as place:
                found = place.read(code_files.file_name(digest))
        except FileNotFoundError:
            return None
        except (OSError, code_files.UnsafeError) as error:
            self._warn(path, error)
            return None
        start = len(_MAGIC) + len(digest)
        code = found[start:]
        return code if found[:start] == _header(digest, code) else None

    def _write(self, digest: bytes, code: bytes) -> None:
        path = code_files.directory()
        if path is None or edited():
            return
        try:
            code_files.create(path)
            with code_files.opened(path) as place:
                place.write(code_files.file_name(digest), _header(digest, code) + code)
            self._unswept += len(code)
            if self._unswept >= _SWEEP_BYTES:
                self._unswept = 0
                code_files.sweep(path)
        except (OSError, code_files.UnsafeError) as error:
            self._warn(path, error)

    def _warn(self, path: Path, error: Exception) -> None:
        if self._warned:
            return
        self._warned = True
        reason = error.strerror if isinstance(error, OSError) else str(error)
        warnings.warn(
            f"compiled kernels are not kept in {path}: {reason}; "
            f"set {code_files.CACHE_VARIABLE} to another directory, or to {code_files.OFF}",
            CacheWarning,
            stacklevel=5,
        )


def _header(digest: bytes, code: bytes) -> bytes:
    """Names the format and checks the content, which is this key's alone."""
    return _MAGIC + hashlib.sha256(digest + code).digest()


_objects = _Objects()

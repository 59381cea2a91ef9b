"""Whether machine code in a database may run here: a decision that the caller makes, in words."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from ..db.store import Store
from ..kernels.errors import DatabaseError, TrustError


class Trust(Enum):
    """What a caller may say instead of a file's digest."""

    THIS_FILE = "this file"


TRUST_THIS_FILE = Trust.THIS_FILE
"""The caller has decided that the file at this path, whatever is in it, may run code on this machine's GPU."""


@contextmanager
def vouched(path: Path, digest: str | None, trust: Trust | None) -> Iterator[Store]:
    """The database at ``path``, open for reading, if the caller vouches for it.

    Parameters
    ----------
    path : Path
    digest : str or None
        SHA-256 of the file in hexadecimal. What has been hashed is what is read, even if the path changes meanwhile.
    trust : Trust or None
        `TRUST_THIS_FILE` to read it whatever its digest.

    Raises
    ------
    TrustError
        If nobody vouches for it, or it has another digest.
    DatabaseError
        If it cannot be read.
    """
    if digest is not None:
        with tempfile.TemporaryDirectory(prefix="lowbit-") as place:
            copy = Path(place) / path.name
            copy.write_bytes(_checked(path, digest))
            with Store.open(copy, "read") as store:
                store.path = path
                yield store
        return
    if trust is not TRUST_THIS_FILE:
        raise TrustError(
            f"{path} holds machine code that nobody vouches for: pass digest=, the SHA-256 of the file that you "
            "expect, or trust=TRUST_THIS_FILE if it is your own"
        )
    with Store.open(path, "read") as store:
        yield store


def _checked(path: Path, digest: str) -> bytes:
    wanted = digest.strip().lower().removeprefix("sha256:")
    if len(wanted) != 64 or set(wanted) - set("0123456789abcdef"):
        raise TrustError(f"not a SHA-256 in hexadecimal: {digest!r}")
    log = path.with_name(f"{path.name}-wal")
    try:
        if log.exists() and log.stat().st_size:
            raise TrustError(f"{path} has a log beside it that no digest covers: close the process that tunes into it")
        content = path.read_bytes()
    except OSError as error:
        raise DatabaseError(f"{path} cannot be read: {error.strerror or error}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != wanted:
        raise TrustError(f"{path} is not the file that was vouched for: its SHA-256 is {found}, not {wanted}")
    return content

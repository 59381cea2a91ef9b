"""Address space that costs memory only where it is written."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from ..kernels.packed import aligned_zeros


class Reservation:
    """Zero bytes that are committed page by page, when they are first written; their addresses never change.

    The memory lives as long as the reservation, `bytes` or a view of it.

    Parameters
    ----------
    nbytes : int
    huge : bool
        Whether to ask for huge pages: fewer misses of address translation, but a first write commits 2 MiB and waits
        until they are cleared. Otherwise they are refused, or a system that gives them unasked would commit everything.

    Attributes
    ----------
    bytes : ndarray of uint8, shape (nbytes,)
        Starts on a page.

    Raises
    ------
    MemoryError
        If the address space cannot be had.
    """

    def __init__(self, nbytes: int, huge: bool = False) -> None:
        self._room: mmap.mmap | None = None
        if not hasattr(mmap, "MAP_ANONYMOUS"):
            self.bytes: NDArray[np.uint8] = aligned_zeros(nbytes, np.uint8)
            return
        try:
            self._room = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(f"cannot reserve {nbytes} bytes: {error}") from None
        self.bytes = np.frombuffer(self._room, np.uint8)[:nbytes]
        advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)
        if advice is not None:
            with suppress(OSError):  # a kernel without huge pages
                self._room.madvise(advice)

    def give_back(self, start: int, stop: int) -> int:
        """Release the whole pages of a byte range, which then reads as zeros; returns how many bytes they are."""
        page = mmap.PAGESIZE
        first, last = -(-start // page) * page, stop // page * page
        if last <= first or self._room is None or not hasattr(mmap, "MADV_DONTNEED"):
            return 0
        try:
            self._room.madvise(mmap.MADV_DONTNEED, first, last - first)
        except OSError:
            return 0
        return last - first

"""What comes before a cold call: operands that no cache holds, and threads that are awake."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..kernels.cpu.memory import evict
from ..kernels.cpu.wake import wake
from ..kernels.packed import PackedTensor


class Chill:
    """Evicts packed operands and wakes a pool's threads; called before each timed batch.

    Parameters
    ----------
    arguments : iterable of sequences
        Argument lists of the calls to come. Their packed operands are evicted; whatever else they hold stays.
    threads : int
        Threads of the calls' pool. Eviction outlasts their patience, and in a decode loop they would be spinning.
    """

    def __init__(self, arguments: Iterable[Sequence[object]], threads: int) -> None:
        self.threads = threads
        packed = {id(each): each for group in arguments for each in group if isinstance(each, PackedTensor)}
        self._packed = tuple(packed.values())
        arrays = [array for each in self._packed for array in (each.words, each.scales)]
        self._ranges = [(array.ctypes.data, array.nbytes) for array in arrays if array.nbytes]

    def __call__(self) -> bool:
        """Whether all threads could be had."""
        for address, nbytes in self._ranges:
            evict(address, nbytes)
        return wake(self.threads)

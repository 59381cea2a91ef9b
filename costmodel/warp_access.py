"""What one memory instruction of a warp costs: sectors and lines of global memory, wavefronts of shared memory.

Counts are exact for the addresses given. Global memory moves in sectors of 32 bytes, four to a cache line of 128.
Shared memory has 32 banks of four bytes; lanes that want different words of one bank wait for each other, lanes that
want the same word get it together. A request of 64 bits a lane is served a half-warp at a time, one of 128 bits a
quarter-warp. The same banks serve global loads that hit the L1 cache, which also looks up the tag of every line.

Sources: CUDA Programming Guide 13 (global memory, shared memory), Nsight Compute's memory tables (sectors, wavefronts);
measured cycles of strided loads, which the tests compare with: RRZE-HPC/gpu-benches, gpu-strides.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol

from ..kernels.cuda.mapping import LANES, SECTOR_BYTES

LINE_BYTES, WORD_BYTES, BANKS = 128, 4, 32
TAGS_PER_CLOCK = 4
"""Lines that the L1 cache looks up a clock after the first: 33 lines take 8.8 cycles on an A100, 5 lines 2.2."""


class Access(Protocol):
    """What is read of a `lowbit.kernels.cuda.work.WarpAccess`."""

    @property
    def space(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def width_bytes(self) -> int: ...
    @property
    def addresses(self) -> tuple[int, ...]: ...


def sectors(access: Access) -> int:
    """Distinct 32-byte sectors that the lanes touch."""
    return _units(access.width_bytes, access.addresses, SECTOR_BYTES)


def lines(access: Access) -> int:
    """Distinct 128-byte lines that the lanes touch."""
    return _units(access.width_bytes, access.addresses, LINE_BYTES)


def ideal_sectors(access: Access) -> int:
    """Sectors that would hold the distinct bytes that the lanes touch, if these lay together."""
    return -(-_units(access.width_bytes, access.addresses, 1) // SECTOR_BYTES)


def coalescing(access: Access) -> float:
    """Share of the moved sectors that would be needed at best: 1 where lanes read what lies together."""
    moved = sectors(access)
    return ideal_sectors(access) / moved if moved else 1.0


def wavefronts(access: Access) -> int:
    """Passes through the banks that the request takes, each at most one word of every bank.

    Lanes of different phases (half- or quarter-warps) never share a pass, even if they want the same words: a warp that
    reads one 8-byte value takes two cycles on an H200.
    """
    return _wavefronts(access.width_bytes, access.addresses)


def l1_cycles(access: Access) -> float:
    """Cycles of the L1 cache that a global request takes when it hits: passes through the banks, or tags looked up."""
    return max(float(wavefronts(access)), (lines(access) + TAGS_PER_CLOCK - 1) / TAGS_PER_CLOCK)


@lru_cache(maxsize=1 << 14)
def _wavefronts(width_bytes: int, addresses: tuple[int, ...]) -> int:
    phases = max(width_bytes * LANES // (BANKS * WORD_BYTES), 1)
    lanes = LANES // phases
    total = 0
    for phase in range(phases):
        starts = (start for start in addresses[phase * lanes : (phase + 1) * lanes] if start >= 0)
        total += _passes(starts, width_bytes)
    return total


def _passes(starts: Iterable[int], width_bytes: int) -> int:
    words = {
        word for start in starts for word in range(start // WORD_BYTES, (start + width_bytes - 1) // WORD_BYTES + 1)
    }
    load = [0] * BANKS
    for word in words:
        load[word % BANKS] += 1
    return max(load)


@lru_cache(maxsize=1 << 14)
def _units(width_bytes: int, addresses: tuple[int, ...], size: int) -> int:
    starts = (start for start in addresses if start >= 0)
    return len({unit for start in starts for unit in range(start // size, (start + width_bytes - 1) // size + 1)})

"""What an architecture allows a block, for those that kernels are built for.

Source: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import DeviceError

MOST_THREADS = 1024
"""Of a block."""
REGISTERS = 65536
"""Most registers of a block."""
REGISTER_UNIT = 256
"""Registers are given to a warp in this unit. All three are the same on every architecture."""


@dataclass(frozen=True)
class Limits:
    """Limits of a block.

    Attributes
    ----------
    shared_bytes : int
        Dynamic shared memory that a kernel may ask for.
    async_copies : bool
        Whether global memory can be copied into shared memory on the side (``cp.async``).
    """

    shared_bytes: int
    async_copies: bool


LIMITS = {
    "sm_75": Limits(64 << 10, False),
    "sm_80": Limits(163 << 10, True),
    "sm_86": Limits(99 << 10, True),
    "sm_87": Limits(163 << 10, True),
    "sm_89": Limits(99 << 10, True),
    "sm_90": Limits(227 << 10, True),
    "sm_100": Limits(227 << 10, True),
    "sm_120": Limits(99 << 10, True),
}
ARCHITECTURES = tuple(LIMITS)


def limits(arch: str) -> Limits:
    """Limits of ``sm_86``.

    Raises
    ------
    DeviceError
        For an architecture that kernels are not built for.
    """
    try:
        return LIMITS[arch]
    except KeyError:
        raise DeviceError(f"unknown architecture {arch!r}: choose one of {', '.join(ARCHITECTURES)}") from None

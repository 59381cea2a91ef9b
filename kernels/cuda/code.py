"""What a generated GPU kernel looks like, as text."""

from __future__ import annotations

from dataclasses import dataclass

from ..backend import Code


@dataclass(frozen=True)
class KernelCode(Code):
    """One kernel: `Code` whose ``ir`` is PTX and whose ``assembly`` is SASS, or PTX again where no tool makes SASS.

    ``role`` is ``kv`` for ``attend``, else ``k`` or ``v``; ``values_per_iteration`` are the codes that one lane
    consumes in one pass of the tile loop.

    Attributes
    ----------
    arch : str
        Architecture that it is compiled for, ``sm_86``.
    language : str
        Of ``assembly``: ``sass`` or ``ptx``.
    registers : int
        32-bit registers of a thread; 0 if unknown.
    spill_bytes : int
        Local memory that registers spill to, stores and loads of one thread.
    shared_bytes : int
        Static shared memory of a block.
    entry : str
        The kernel's name in both texts.
    """

    arch: str
    language: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    entry: str

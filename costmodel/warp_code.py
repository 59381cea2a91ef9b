"""Instructions of a GPU kernel as the analysis sees them, whether they were read from SASS or from PTX.

One instruction is executed by a warp. Each has one class of `GPU_CLASSES`, by its opcode:

``global_load``, ``global_store``
    Global, generic and local memory, and atomics on it.
``shared_load``, ``shared_store``, ``async_copy``
    Shared memory, and copies from global into shared memory that pass no register.
``dot``
    Integer dot products (``IDP``, PTX's ``dp4a``) and what tensor cores do.
``convert``
    Changes of a value's type: integer to float and back, between widths, sign extension.
``shift``, ``logic``, ``permute``
    Funnel shifts, multiplications that only shift; bitwise logic and selections; byte permutations.
``float``, ``integer``, ``special``
    Floating-point arithmetic; integer arithmetic and moves; the multi-function unit and bit counting.
``shuffle``, ``predicate``
    Between lanes; comparisons and whatever else gives a predicate.
``address``
    The uniform datapath, which works once for all lanes, and arithmetic made for addresses (``LEA``, ``IMAD.WIDE``,
    64-bit adds).
``branch``, ``barrier``, ``other``
    Control flow; synchronisation, asynchronous copies included; what only takes an issue slot.
"""

from __future__ import annotations

from dataclasses import dataclass

GPU_CLASSES = (
    "global_load",
    "global_store",
    "shared_load",
    "shared_store",
    "async_copy",
    "dot",
    "convert",
    "shift",
    "logic",
    "permute",
    "float",
    "integer",
    "special",
    "shuffle",
    "predicate",
    "address",
    "branch",
    "barrier",
    "other",
)

NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True)
class WarpInstruction:
    """One instruction.

    Attributes
    ----------
    opcode : str
        With its modifiers, ``LOP3.LUT``.
    kind : str
        Its class, one of `GPU_CLASSES`.
    known : bool
        Whether the tables have the opcode; ``kind`` is ``other`` if not.
    reads : frozenset of str
        Registers and predicates whose values it takes, without those of `address` and without its guard.
    writes : frozenset of str
        Registers and predicates that it gives values to.
    address : frozenset of str
        Registers that make up an address.
    guard : str or None
        Predicate that decides whether it has any effect.
    packed : bool
        Whether it loads 32 bits a lane or more, as packed words are loaded; narrower loads are of scales.
    multiplies : bool
        Whether it multiplies two values, constants of the instruction not being values.
    moves : bool
        Whether it only copies a value or makes a constant.
    mark : int or None
        Number of the performance event that it triggers, for a mark of a loop.
    targets : tuple of str
        Labels it may jump to.
    falls_through : bool
        Whether control can continue with the next instruction.
    """

    opcode: str
    kind: str
    known: bool = True
    reads: frozenset[str] = NOTHING
    writes: frozenset[str] = NOTHING
    address: frozenset[str] = NOTHING
    guard: str | None = None
    packed: bool = False
    multiplies: bool = False
    moves: bool = False
    mark: int | None = None
    targets: tuple[str, ...] = ()
    falls_through: bool = True


@dataclass(frozen=True)
class WarpFunction:
    """A kernel's instructions in address order, and which of them each label that is jumped to stands before."""

    symbol: str
    instructions: tuple[WarpInstruction, ...]
    labels: dict[str, int]

"""A layout as a factorisation: π, ρ, φ and fold in one value.

Each axis, tokens (T) and channels (D), is written as factors, and the factors are ordered from outermost to innermost:
``T/16 D/4 t16 d4`` are 16-token tiles in which four channels of one token share a 32-bit lane, ``T D`` is row-major. An
upper-case factor is an axis's outermost one and counts blocks; ``t16`` is the position within a block of 16, ``t32/4``
the quad within a block of 32.

π is the axis of the innermost factor. ρ is the order of the factors: the outermost one counts the rows of the
two-dimensional storage and the others lie along a row, whose pitch can be padded and whose count can fold into panels
side by side. φ is the `Packing`. Address maps, packing, conversion and the stored name are all derived from this one
value. Compare the (shape:stride) layouts of CuTe and Triton's linear layouts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np

from .errors import LayoutError
from .packing import Int, Packing, packing_named

TOKEN, CHANNEL = "T", "D"
HEAD_ALIGNMENT_BYTES = 64
LARGEST_PAD_OR_FOLD = 1 << 24

_FACTOR = re.compile(
    r"(?:(?P<outer>[TD])(?:/(?P<unit>\d{1,18}))?|(?P<inner>[td])(?P<block>\d{1,18})(?:/(?P<step>\d{1,18}))?)"
)


@dataclass(frozen=True)
class Factor:
    """The coordinate ``x % block // unit`` of an axis; ``x // unit`` for the outermost factor, whose block is 0."""

    axis: str
    block: int
    unit: int

    def __str__(self) -> str:
        if self.block == 0:
            return self.axis if self.unit == 1 else f"{self.axis}/{self.unit}"
        name = f"{self.axis.lower()}{self.block}"
        return name if self.unit == 1 else f"{name}/{self.unit}"

    @classmethod
    def parse(cls, text: str) -> Self:
        match = _FACTOR.fullmatch(text)
        if match is None:
            raise LayoutError(f"not a factor: {text!r} (write T, D/4, t16 or t32/4)")
        if match["outer"]:
            return cls(match["outer"], 0, int(match["unit"] or 1))
        return cls(match["inner"].upper(), int(match["block"]), int(match["step"] or 1))

    def extent(self, length: int) -> int:
        """Values the coordinate takes on an axis of ``length`` elements."""
        return -(-length // self.unit) if self.block == 0 else self.block // self.unit

    def coordinate(self, x: Int) -> Int:
        return (x if self.block == 0 else x % self.block) // self.unit


@dataclass(frozen=True)
class Layout:
    """Where each (token, channel) of one head's packed operand lies.

    Parameters
    ----------
    factors : tuple of Factor
        Outermost to innermost. Each axis has one outermost factor and a chain of inner ones that tile it.
    packing : Packing
        φ.
    pad_bytes : int
        Bytes added to each storage row, so that consecutive rows do not share cache sets.
    fold_rows : int
        Rows after which storage continues in the next panel to the right; 0 means no fold. Devices with a bounded
        texture height need it.

    Raises
    ------
    LayoutError
        If the factors do not cover each axis exactly once, or a pad or fold is negative or beyond
        `LARGEST_PAD_OR_FOLD`.
    """

    factors: tuple[Factor, ...]
    packing: Packing
    pad_bytes: int = 0
    fold_rows: int = 0

    def __post_init__(self) -> None:
        for axis in (TOKEN, CHANNEL):
            chain = sorted((f for f in self.factors if f.axis == axis), key=lambda f: (f.block != 0, -f.block))
            if not chain or chain[0].block != 0 or any(f.block == 0 for f in chain[1:]):
                raise LayoutError(f"{self.order!r} needs exactly one outermost factor of {axis}")
            for outer, inner in pairwise(chain):
                if outer.unit != inner.block:
                    raise LayoutError(f"{self.order!r}: {inner} does not continue {outer}")
            if chain[-1].unit != 1:
                raise LayoutError(f"{self.order!r}: nothing counts single elements below {chain[-1]}")
            for factor in chain:
                if factor.unit < 1 or (factor.block and (factor.block % factor.unit or factor.block <= factor.unit)):
                    raise LayoutError(f"{self.order!r}: {factor} has no whole number of units")
        if self.pad_bytes < 0 or self.fold_rows < 0:
            raise LayoutError("pad and fold cannot be negative")
        if self.pad_bytes > LARGEST_PAD_OR_FOLD or self.fold_rows > LARGEST_PAD_OR_FOLD:
            raise LayoutError(
                f"pad and fold must be at most {LARGEST_PAD_OR_FOLD}, not {self.pad_bytes} and {self.fold_rows}"
            )
        if self.pad_bytes * 8 % self.packing.bits:
            raise LayoutError(f"a pad of {self.pad_bytes} bytes is no whole number of {self.packing.format} codes")

    # -- the stored name ------------------------------------------------------------------------------------------

    @property
    def order(self) -> str:
        return " ".join(map(str, self.factors))

    @cached_property
    def name(self) -> str:
        """The stored name, for instance ``T/16 D/4 t16 d4 | int4/planes/offset | pad 64``."""
        parts = [self.order, self.packing.name]
        if self.pad_bytes:
            parts.append(f"pad {self.pad_bytes}")
        if self.fold_rows:
            parts.append(f"fold {self.fold_rows}")
        return " | ".join(parts)

    @classmethod
    def parse(cls, name: str) -> Self:
        """Inverse of `name`.

        Raises
        ------
        LayoutError
            If ``name`` is malformed or its packing is not registered.
        """
        order, *rest = [part.strip() for part in name.split("|")]
        if not rest:
            raise LayoutError(f"{name!r} names no packing (write 'T D | int8/bytes/signed')")
        options: dict[str, int] = {}
        for option in rest[1:]:
            key, _, value = option.partition(" ")
            if key not in ("pad", "fold") or not value.isdecimal():
                raise LayoutError(f"{name!r}: unknown option {option!r}")
            if key in options:
                raise LayoutError(f"{name!r}: {key} is given twice")
            if len(value) > 18:
                raise LayoutError(f"{key} must be at most {LARGEST_PAD_OR_FOLD}, not a number of {len(value)} digits")
            options[key] = int(value)
        factors = tuple(map(Factor.parse, order.split()))
        return cls(factors, packing_named(rest[0]), options.get("pad", 0), options.get("fold", 0))

    def __str__(self) -> str:
        return self.name

    # -- π and ρ --------------------------------------------------------------------------------------------------

    @property
    def pi(self) -> str:
        """The axis whose neighbours are adjacent in memory: ``T`` or ``D``."""
        return self.factors[-1].axis

    def unit(self, axis: str) -> int:
        """Elements of ``axis`` in one block of its outermost factor."""
        return next(f.unit for f in self.factors if f.axis == axis and f.block == 0)

    def run(self, axis: str, length: int) -> int:
        """Adjacent elements of ``axis`` innermost in memory: 1 if the other axis is innermost."""
        count = 1
        for factor in reversed(self.factors):
            if factor.axis != axis or factor.unit != count:
                break
            count *= factor.extent(length)
        return count

    def with_packing(self, packing: Packing) -> Self:
        return replace(self, packing=packing)

    # -- storage --------------------------------------------------------------------------------------------------

    def strides(self, tokens: int, channels: int) -> tuple[int, ...]:
        """Codes between neighbours along each factor, with rows counted in whole rows (stride 0 for the outermost)."""
        length = {TOKEN: tokens, CHANNEL: channels}
        strides = []
        step = 1
        for factor in reversed(self.factors[1:]):
            strides.append(step)
            step *= factor.extent(length[factor.axis])
        return (0, *reversed(strides))

    def row_codes(self, tokens: int, channels: int) -> int:
        length = {TOKEN: tokens, CHANNEL: channels}
        count = 1
        for factor in self.factors[1:]:
            count *= factor.extent(length[factor.axis])
        return count

    def rows(self, tokens: int, channels: int) -> int:
        return self.factors[0].extent(tokens if self.factors[0].axis == TOKEN else channels)

    def pitch_bytes(self, tokens: int, channels: int) -> int:
        """Bytes from one storage row to the next within a panel, padding included.

        Raises
        ------
        LayoutError
            If a row is no whole number of packing blocks.
        """
        codes = self.row_codes(tokens, channels)
        if codes % self.packing.block_codes:
            raise LayoutError(
                f"{self.name}: a row of {codes} codes is no whole number of {self.packing.block_codes}-code blocks"
            )
        return codes // self.packing.block_codes * self.packing.block_bytes + self.pad_bytes

    def head_bytes(self, tokens: int, channels: int) -> int:
        """Bytes one head takes, rounded up to `HEAD_ALIGNMENT_BYTES`."""
        rows, pitch = self.rows(tokens, channels), self.pitch_bytes(tokens, channels)
        if self.fold_rows and rows > self.fold_rows:
            rows = self.fold_rows * -(-rows // self.fold_rows)
        return -(-rows * pitch // HEAD_ALIGNMENT_BYTES) * HEAD_ALIGNMENT_BYTES

    def address(self, t: Int, d: Int, tokens: int, channels: int) -> tuple[Int, Int]:
        """Byte within the head and bit within the byte of element (t, d).

        Parameters
        ----------
        t, d : int64 arrays that broadcast together
            Token and channel.
        tokens, channels : int
            Capacity in tokens, and head dimension.

        Returns
        -------
        byte, shift : int64 arrays
        """
        x = {TOKEN: np.asarray(t, np.int64), CHANNEL: np.asarray(d, np.int64)}
        code = np.zeros(np.broadcast_shapes(x[TOKEN].shape, x[CHANNEL].shape), np.int64)
        for factor, stride in zip(self.factors[1:], self.strides(tokens, channels)[1:], strict=True):
            code = code + factor.coordinate(x[factor.axis]) * stride
        row = self.factors[0].coordinate(x[self.factors[0].axis])
        byte, shift = self.packing.address(code)
        pitch = self.pitch_bytes(tokens, channels)
        rows = self.rows(tokens, channels)
        if self.fold_rows and rows > self.fold_rows:
            panel, row = np.divmod(row, self.fold_rows)
            byte = byte + panel * pitch
            pitch *= -(-rows // self.fold_rows)
        return byte + row * pitch, shift

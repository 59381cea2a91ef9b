"""What lies where in a block's shared memory.

The small operand of the keys is the block's; each warp has products and weights of its own, and its stages of packed
tiles. When all tiles are done, the warps' results take the place of what the warps had.
"""

from __future__ import annotations

from dataclasses import dataclass

from .contraction import FACTOR_BYTES, Contraction
from .key_tile import KeyTile
from .mapping import TILE
from .records import RECORD_HEAD

LINES = 1024
"""Alignment of packed tiles: eight lines of 128 bytes, after which the swizzle repeats."""


def _aligned(size: int, to: int = 16) -> int:
    return -(-size // to) * to


@dataclass(frozen=True)
class Stage:
    """One tile on its way from global memory: its operands and scales, each a run of whole 16-byte chunks.

    Attributes
    ----------
    sizes : tuple of int
        Bytes of keys, their scales, values, theirs; 0 for what an operator does not read.
    """

    sizes: tuple[int, int, int, int]

    @property
    def places(self) -> tuple[int, int, int, int]:
        """Where each begins, packed tiles at multiples of `LINES`, so that their swizzle depends on nothing else."""
        keys, key_scales, values, _ = self.sizes
        second = _aligned(keys)
        third = _aligned(second + key_scales, LINES) if values else second + key_scales
        return 0, second, third, _aligned(third + values)

    @property
    def nbytes(self) -> int:
        return _aligned(self.places[3] + self.sizes[3], LINES)


@dataclass(frozen=True)
class Shared:
    """Places in bytes.

    Attributes
    ----------
    key_rows : int
        Of all rows of the small operand of the keys.
    key_factors : int
        Of their scales and corrections.
    products, weights, value_factors : int
        Of one warp: float32 weights of tokens, their codes, and the codes' scales and corrections.
    record : int
        Of one warp's result.
    stage : Stage or None
    stages : int
    """

    key_rows: int
    key_factors: int
    products: int
    weights: int
    value_factors: int
    record: int
    stage: Stage | None
    stages: int

    @property
    def small(self) -> int:
        """Where the keys' small operand begins, behind its factors, of which splits of gemv leave room for all."""
        return _aligned(self.key_factors)

    @property
    def warps(self) -> int:
        """Where the first warp's part begins."""
        return _aligned(self.small + self.key_rows)

    @property
    def warp(self) -> int:
        """Bytes of a warp's part without its stages."""
        return _aligned(self.products + self.weights + self.value_factors)

    def ring(self, warps: int) -> int:
        """Where the first warp's stages begin."""
        return _aligned(self.warps + warps * self.warp, LINES)

    @property
    def ring_bytes(self) -> int:
        """Of one warp's stages."""
        return 0 if self.stage is None else self.stages * self.stage.nbytes

    def total(self, warps: int) -> int:
        """Dynamic shared memory of a block, but for gemv: see `gemv_total`."""
        working = self.ring(warps) + warps * self.ring_bytes if self.stage else self.warps + warps * self.warp
        return max(working, self.warps + warps * self.record)

    def gemv_total(self, keys: KeyTile, warps: int, splits: int) -> int:
        """Dynamic shared memory of a block of gemv, which needs a split's vectors; warps' results then replace them."""
        return max(self.small + keys.steps_of_split(splits) * keys.step_bytes, warps * self.record)


def shared(
    keys: KeyTile | None, values: Contraction | None, rows: int, head_dim: int, stage: Stage | None, stages: int
) -> Shared:
    """Shared memory of a kernel that reads ``keys``, ``values`` or both."""
    pairs = rows * values.groups if values is not None else 0
    integer = values is not None and values.integer
    return Shared(
        key_rows=0 if keys is None else keys.count * keys.step_bytes,
        key_factors=0
        if keys is None or not keys.contraction.integer
        else _aligned(rows * keys.contraction.groups * FACTOR_BYTES),
        products=pairs * TILE * 4,
        weights=pairs * TILE if integer else 0,
        value_factors=_aligned(pairs * FACTOR_BYTES) if integer else 0,
        record=4 * rows * (TILE if values is None else RECORD_HEAD + head_dim),
        stage=stage,
        stages=stages,
    )

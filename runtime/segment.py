"""Segments of a cache: runs of tokens, each in storage of one layout that other caches may share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from ..kernels import append_fields as fields
from ..kernels.append_fields import check_appendable, places
from ..kernels.cpu.memory import HUGE_PAGE_BYTES
from ..kernels.layout import Layout
from ..kernels.packed import SLACK_BYTES, TOKEN_BLOCK, PackedTensor
from ..kernels.problem import GROUP
from ..kernels.quantize import LARGEST_CODE
from .reservation import Reservation

LINE_BYTES = 64
PAGE_BYTES = 4096
STAGGER_BYTES = 13 * LINE_BYTES
"""What the distance between heads exceeds whole pages by. Heads then reach the end of a page at different tokens, so
that none of these waits for a page of every head, and their first bytes lie in different sets of the nearest cache."""

HUGE_FROM_BYTES = 16 << 20
"""A head's words from which on storage asks for huge pages. The first token commits one for each head, and waits until
all of them are cleared; here that is at most an eighth of what the storage is reserved for."""

HUGE_STAGGER_BYTES = HUGE_PAGE_BYTES // 16 * 5 + STAGGER_BYTES
"""The same as `STAGGER_BYTES` where pages are huge."""


@dataclass(frozen=True)
class KVLayout:
    """Layouts of a segment's keys and values; each says its format too."""

    k: Layout
    v: Layout

    @property
    def name(self) -> str:
        return f"k: {self.k.name}, v: {self.v.name}"

    def of(self, role: str) -> Layout:
        return self.k if role == "k" else self.v


@dataclass(frozen=True)
class Shape:
    """What all of a cache's tokens have in common."""

    layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class _Part:
    """Words or scales of one role: where they lie in a layer's bytes, and how far heads lie apart."""

    start: int
    stride: int
    used: int  # bytes of a head at full capacity


class Owner(Protocol):
    """A cache, as a storage knows it."""

    def tokens_in(self, storage: Storage) -> int:
        """Tokens of ``storage`` that the cache sees."""
        ...


class Storage:
    """Memory of one segment for all layers: reserved at once, committed as tokens come, never moved.

    Rows past ``filled`` decode to finite numbers and mean nothing.

    Parameters
    ----------
    shape : Shape
    layout : KVLayout
    capacity : int
        Tokens to hold: whole tiles of both layouts, see `lowbit.kernels.packed.round_capacity`.

    Attributes
    ----------
    filled : int
        Tokens that some owner sees; the next one may be appended behind them.
    k, v : tuple of PackedTensor
        One a layer, whose ``tokens`` are the capacity.
    owners : WeakSet of Owner
        Caches that see some of it; a cache that is gone is none.

    Raises
    ------
    LayoutError
        If a layout cannot hold the shape, or not grow.
    MemoryError
        If the address space cannot be had.
    """

    def __init__(self, shape: Shape, layout: KVLayout, capacity: int) -> None:
        self.shape, self.layout, self.capacity = shape, layout, capacity
        self.filled = 0
        self.owners: WeakSet[Owner] = WeakSet()
        self._touched = 0
        self._parts = _parts(shape, layout, capacity)
        self._tables = {role: places(layout.of(role), shape.head_dim) for role in ("k", "v")}  # jobs point to them
        last = self._parts["v", "scales"]
        self._layer_bytes = -(-(last.start + shape.kv_heads * last.stride) // LINE_BYTES) * LINE_BYTES
        self._huge = all(self._parts[role, "words"].used >= HUGE_FROM_BYTES for role in ("k", "v"))
        self._memory = Reservation(shape.layers * self._layer_bytes + SLACK_BYTES, self._huge)
        self.k, self.v = self._operands("k"), self._operands("v")

    def __repr__(self) -> str:
        return f"Storage({self.layout.name}, {self.filled} of {self.capacity} tokens)"

    @property
    def reserved_bytes(self) -> int:
        """Address space."""
        return int(self._memory.bytes.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of words and scales up to the last token that was ever stored here and not given back."""
        heads = self.shape.layers * self.shape.kv_heads
        tokens = max(self._touched, self.filled)
        return heads * sum(self.used_bytes(role, part, tokens) for role, part in self._parts)

    def used_bytes(self, role: str, part: str, tokens: int) -> int:
        """Bytes that the first ``tokens`` of a head take: whole storage rows of words, whole blocks of scales."""
        layout, head_dim = self.layout.of(role), self.shape.head_dim
        if part == "words":
            return -(-tokens // layout.unit("T")) * layout.pitch_bytes(self.capacity, head_dim)
        return -(-tokens // TOKEN_BLOCK) * TOKEN_BLOCK * 2 * scale_groups(layout, head_dim)

    def heads(self, role: str, part: str) -> Iterator[NDArray[np.uint8]]:
        """Bytes of each layer's each head, in order."""
        place = self._parts[role, part]
        for layer in range(self.shape.layers):
            for head in range(self.shape.kv_heads):
                start = layer * self._layer_bytes + place.start + head * place.stride
                yield self._memory.bytes[start : start + place.used]

    def settle(self) -> int:
        """Lower ``filled`` to what some owner sees; returns it."""
        self._touched = max(self._touched, self.filled)
        self.filled = max((owner.tokens_in(self) for owner in self.owners), default=0)
        return self.filled

    def trim(self) -> int:
        """Give back what is committed past ``filled``; returns how many bytes."""
        touched, self._touched = max(self._touched, self.filled), self.filled
        if touched == self.filled and not self._huge:
            return 0
        given = 0
        base = self._memory.bytes.ctypes.data
        for role, part in self._parts:
            first, last = (self.used_bytes(role, part, tokens) for tokens in (self.filled, touched))
            last += HUGE_PAGE_BYTES if self._huge else PAGE_BYTES
            for head in self.heads(role, part):
                start = head.ctypes.data - base
                given += self._memory.give_back(start + first, start + min(last, len(head)))
        return given

    def describe(self, jobs: NDArray[np.int64]) -> None:
        """Write what `lowbit.kernels.append` has to know of each layer's operands into its job, one a row."""
        for first, role, operands in ((fields.K, "k", self.k), (fields.V, "v", self.v)):
            layout = operands[0].layout
            packing, table = layout.packing, self._tables[role]
            values = {
                fields.BITS: packing.bits,
                fields.LARGEST: LARGEST_CODE.get(packing.format, 0),
                fields.OFFSET: packing.offset,
                fields.WORDS_STRIDE: self._parts[role, "words"].stride,
                fields.SCALES_STRIDE: self._parts[role, "scales"].stride,
                fields.TABLE: table.ctypes.data,
                fields.PERIOD: table.shape[0],
                fields.PERIOD_BYTES: layout.pitch_bytes(self.capacity, self.shape.head_dim),
            }
            for name, value in values.items():
                jobs[:, first + name] = value
            layers = np.arange(self.shape.layers) * self._layer_bytes + self._memory.bytes.ctypes.data
            jobs[:, first + fields.WORDS] = layers + self._parts[role, "words"].start
            jobs[:, first + fields.SCALES] = layers + self._parts[role, "scales"].start

    def _operands(self, role: str) -> tuple[PackedTensor, ...]:
        shape, words, scales = self.shape, self._parts[role, "words"], self._parts[role, "scales"]
        result = []
        for layer in range(shape.layers):
            found = []
            for part in (words, scales):
                start = layer * self._layer_bytes + part.start
                whole = self._memory.bytes[start : start + shape.kv_heads * part.stride]
                found.append(whole.reshape(shape.kv_heads, part.stride))
            result.append(
                PackedTensor(
                    self.layout.of(role), shape.kv_heads, self.capacity, shape.head_dim, self.capacity,
                    found[0], found[1].view(np.float16),
                )
            )  # fmt: skip
        return tuple(result)


@dataclass(frozen=True)
class Segment:
    """A cache's view of a storage.

    Attributes
    ----------
    start : int
        Absolute position of its first token.
    tokens : int
        Tokens that the cache sees.
    storage : Storage
    """

    start: int
    tokens: int
    storage: Storage

    @property
    def stop(self) -> int:
        return self.start + self.tokens

    @property
    def layout(self) -> KVLayout:
        return self.storage.layout

    def operand(self, role: str, layer: int) -> PackedTensor:
        """Keys or values of one layer, no more tokens than are seen."""
        operands = self.storage.k if role == "k" else self.storage.v
        return replace(operands[layer], tokens=self.tokens)


def scale_groups(layout: Layout, head_dim: int) -> int:
    """Scales of a token."""
    return 0 if layout.packing.format == "fp16" else -(-head_dim // GROUP)


def _parts(shape: Shape, layout: KVLayout, capacity: int) -> dict[tuple[str, str], _Part]:
    parts = {}
    at = 0
    for role in ("k", "v"):
        mine = layout.of(role)
        check_appendable(mine, shape.head_dim)
        words = mine.head_bytes(capacity, shape.head_dim)
        scales = capacity * scale_groups(mine, shape.head_dim) * 2
        for part, used in (("words", words), ("scales", scales)):
            stride = -(-used // LINE_BYTES) * LINE_BYTES
            for least, page, beyond in (
                (PAGE_BYTES, PAGE_BYTES, STAGGER_BYTES),
                (HUGE_FROM_BYTES, HUGE_PAGE_BYTES, HUGE_STAGGER_BYTES),
            ):
                if used >= least:
                    stride = -(-(used - beyond) // page) * page + beyond
            parts[role, part] = _Part(at, stride, used)
            at += shape.kv_heads * stride
    return parts

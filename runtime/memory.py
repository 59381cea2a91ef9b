"""Memory of a decoder, by arithmetic: what a context takes in each format, and what fits.

Keys and values take 2 · layers · heads · channels · tokens values, of those layers that keep them: hybrids have layers
with a state of constant size instead, and a sliding window bounds the tokens of its layers. Codes of int8 and int4
share one fp16 scale for 32 channels. All sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..kernels.errors import FitError, ProblemError
from ..kernels.packed import TOKEN_BLOCK
from ..kernels.problem import GROUP, MOST_TOKENS
from .available import available_bytes
from .kvcache import LEAST_SEGMENT_TOKENS, WINDOW_SEGMENTS

CODE_BITS = {"fp16": 16, "int8": 8, "int4": 4}
"""Formats of keys and values."""

SCALE_BYTES = 2
SCRATCH_POSITIONS = 64
"""Positions of a prompt that pass through the network together."""

RING_SLOTS = 4096
"""Latest tokens whose hidden states a drafter reads."""


@dataclass(frozen=True)
class CacheShape:
    """Layers that keep keys and values of one shape.

    Parameters
    ----------
    layers, kv_heads, head_dim : int
    window : int
        Latest tokens that are kept, rounded up to whole segments; 0 for all.
    """

    layers: int
    kv_heads: int
    head_dim: int
    window: int = 0

    def held(self, context: int) -> int:
        """Tokens whose keys and values are in memory: whole blocks of all, or whole segments of a window.

        A window reaches into one segment more than it fills, and the next one is opened before the oldest is dropped.
        """
        if not self.window:
            return _whole_blocks(context)
        segment = max(-(-self.window // WINDOW_SEGMENTS), LEAST_SEGMENT_TOKENS)
        most = (-(-self.window // segment) + 2) * _whole_blocks(segment)
        return min(_whole_blocks(context), most)

    def token_bytes(self, format: str) -> tuple[int, int]:
        """Codes and scales that a token adds to keys, or to values, of all layers together."""
        heads = self.layers * self.kv_heads
        scales = 0 if format == "fp16" else -(-self.head_dim // GROUP) * SCALE_BYTES
        return heads * -(-self.head_dim * CODE_BITS[format] // 8), heads * scales


@dataclass(frozen=True)
class DecoderShape:
    """As much of a model as its memory depends on.

    Parameters
    ----------
    name : str
    caches : tuple of CacheShape
    layers : int
        All of them.
    width, hidden, vocabulary : int
        Channels of the hidden state and between the feed-forward matrices, rows of the head; 0 where unknown.
    heads : int
        Query heads of a layer.
    state_bytes : int or None
        Of layers that have a state instead of keys and values; None if they have one of unknown size.
    """

    name: str
    caches: tuple[CacheShape, ...]
    layers: int
    width: int = 0
    hidden: int = 0
    vocabulary: int = 0
    heads: int = 0
    state_bytes: int | None = 0

    @property
    def cached_layers(self) -> int:
        """Layers that keep keys and values."""
        return sum(cache.layers for cache in self.caches)

    def token_bytes(self, k: str, v: str) -> int:
        """What one more token takes while no window is full."""
        return sum(sum(cache.token_bytes(k)) + sum(cache.token_bytes(v)) for cache in self.caches)

    @property
    def scratch_bytes(self) -> int:
        """Activations of a block of a prompt and one row of logits, in float32; 0 where the shape is unknown."""
        heads = max((cache.head_dim for cache in self.caches), default=0) * self.heads
        kv_heads = 2 * max((cache.kv_heads * cache.head_dim for cache in self.caches), default=0)
        floats = SCRATCH_POSITIONS * (3 * self.width + 3 * self.hidden + 2 * heads + kv_heads) + self.vocabulary
        return 4 * floats if self.width else 0

    def ring_bytes(self, layers: int) -> int:
        """Ring buffers of hidden states of ``layers`` layers, in fp16, for a drafter."""
        return 2 * RING_SLOTS * layers * self.width


@dataclass(frozen=True)
class Need:
    """What a context takes, in bytes.

    Attributes
    ----------
    codes, scales : int
        Of keys and values.
    state, rings, scratch : int
        See `DecoderShape`. A state of unknown size counts nothing.
    weights : int
    """

    codes: int
    scales: int
    state: int
    rings: int
    scratch: int
    weights: int

    @property
    def cache(self) -> int:
        """Keys and values with their scales."""
        return self.codes + self.scales

    @property
    def total(self) -> int:
        return self.cache + self.state + self.rings + self.scratch + self.weights


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // TOKEN_BLOCK) * TOKEN_BLOCK


def need(shape: DecoderShape, context: int, k: str, v: str, weights: int = 0, draft_layers: int = 0) -> Need:
    """What a context takes.

    Parameters
    ----------
    context : int
        Tokens.
    k, v : str
        Formats, of `CODE_BITS`.
    weights : int
        Bytes of the model's weights.
    draft_layers : int
        Layers whose hidden states a drafter reads.

    Raises
    ------
    ProblemError
        For an unknown format, or a context that is none.
    """
    for format in (k, v):
        if format not in CODE_BITS:
            raise ProblemError(f"unknown format {format!r} of a cache: choose one of {', '.join(CODE_BITS)}")
    if not 1 <= context <= MOST_TOKENS:
        raise ProblemError(f"a context must be 1 to {MOST_TOKENS} tokens, not {context}")
    codes = scales = 0
    for cache in shape.caches:
        for format in (k, v):
            code, scale = cache.token_bytes(format)
            codes, scales = codes + cache.held(context) * code, scales + cache.held(context) * scale
    return Need(codes, scales, shape.state_bytes or 0, shape.ring_bytes(draft_layers), shape.scratch_bytes, weights)


def largest_context(
    shape: DecoderShape, budget: int, k: str, v: str, weights: int = 0, draft_layers: int = 0
) -> int | None:
    """The longest context that ``budget`` bytes hold; 0 if not even one token fits, None if any does.

    No context is longer than `MOST_TOKENS`.
    """

    def fits(context: int) -> bool:
        return need(shape, context, k, v, weights, draft_layers).total <= budget

    if not fits(1):
        return 0
    if fits(MOST_TOKENS):
        return None
    low, high = 1, MOST_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Config(Protocol):
    """As much of `lowbit.runtime.model.config.Config` as is needed."""

    @property
    def name(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def window(self) -> int: ...


def shape_of(config: Config) -> DecoderShape:
    """A loaded model's."""
    caches = (CacheShape(config.layers, config.kv_heads, config.head_dim, config.window),)
    return DecoderShape(
        config.name, caches, config.layers, config.width, config.hidden, config.vocabulary, config.heads
    )


def check_fits(
    shape: DecoderShape | Config, context: int, k: str, v: str, available: int | None = None, weights: int = 0
) -> None:
    """Refuse a context that memory does not hold, before any of it is allocated.

    Parameters
    ----------
    shape : DecoderShape or Config
    context : int
        Tokens.
    k, v : str
        Formats, of `CODE_BITS`.
    available : int, optional
        Bytes; what this process may still take unless given.
    weights : int
        Bytes of weights that are still to be loaded.

    Raises
    ------
    FitError
        With the arithmetic, and the longest context that fits.
    ProblemError
        For an unknown format, or a context that is none.
    """
    shape = shape if isinstance(shape, DecoderShape) else shape_of(shape)
    room = available_bytes() if available is None else available
    wanted = need(shape, context, k, v, weights)
    if wanted.total <= room:
        return
    longest = largest_context(shape, room, k, v, weights)
    advice = f"at most {longest:,} tokens fit" if longest else "not even one token fits"
    rest = wanted.total - wanted.cache
    raise FitError(
        f"a context of {context:,} tokens does not fit in memory: {arithmetic(shape, context, k, v)}"
        f"{f', and {shown_bytes(rest)} besides' if rest else ''}, but {shown_bytes(room)} are available: {advice}"
    )


def arithmetic(shape: DecoderShape, context: int, k: str, v: str) -> str:
    """How the size of keys and values comes about, in one line."""
    parts = [_product(cache, cache.held(context), k, v) for cache in shape.caches]
    return f"{' + '.join(parts)} = {shown_bytes(need(shape, context, k, v).cache)}"


def _product(cache: CacheShape, tokens: int, k: str, v: str) -> str:
    shape = f"{cache.layers} layers × {cache.kv_heads} heads × {cache.head_dim} channels × {tokens:,} tokens"
    each = [f"{_bytes_per_value(cache, format):g}" for format in (k, v)]
    return f"2 × {shape} × {each[0]} bytes" if k == v else f"{shape} × ({' + '.join(each)}) bytes"


def _bytes_per_value(cache: CacheShape, format: str) -> float:
    """Scales included."""
    return sum(cache.token_bytes(format)) / (cache.layers * cache.kv_heads * cache.head_dim)


def shown_bytes(count: int) -> str:
    """In decimal units, for people: ``13.1 GB``."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:,.0f} {unit}"
    return f"{count} bytes"

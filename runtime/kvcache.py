"""Keys and values of a context: a list of segments that only ever grow at the end.

Nothing that is stored moves. A change of layout, a fork that goes its own way and a window that slides open new
segments; rolling back shortens the last one.
"""

from __future__ import annotations

from os import PathLike

import numpy as np
from numpy.typing import NDArray

from ..kernels import append_fields as fields
from ..kernels.append_fields import check_appendable
from ..kernels.errors import CacheFullError, ProblemError
from ..kernels.packed import round_capacity
from .segment import KVLayout, Segment, Shape, Storage
from .storer import Storer

Float32 = NDArray[np.float32]

ROLLBACK_TOKENS = 64
"""Tokens that a cache with a window can be shortened by at any time: what leaves the window stays that much longer."""

WINDOW_SEGMENTS = 4
"""Segments that a window is cut into: about one more than these are held."""

LEAST_SEGMENT_TOKENS = 128
NEVER = 1 << 62


class KVCache:
    """Keys and values of all layers of one sequence of tokens.

    Not safe for use by several threads at once, nor are a cache and its forks.

    Parameters
    ----------
    layers, kv_heads, head_dim : int
    capacity : int
        Most tokens that the sequence may have, dropped ones included. Memory is reserved for them and committed as
        tokens come.
    layout : KVLayout
        Of the first segment.
    window : int
        Latest tokens that a query sees, itself included; 0 for all of them. Segments that no later query sees are
        dropped, and their memory is used again.
    segment_tokens : int, optional
        Most tokens of a segment; by default all that are left or, with a window, a quarter of it.

    Attributes
    ----------
    length : int
        Tokens so far, dropped ones included.
    generation : int
        Changes whenever anything but the number of the last segment's tokens does.
    jobs : ndarray of int64, shape (layers, fields)
        Row i is the job of `lowbit.kernels.append` for layer i: the operands of the last segment, and the tokens of the
        last `begin`. Its ``source`` fields are the caller's to write. The array is the same as long as the cache is.

    Raises
    ------
    ProblemError
        If a number is out of range.
    LayoutError
        If the layout cannot hold the shape, or not grow along tokens.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        layout: KVLayout,
        *,
        window: int = 0,
        segment_tokens: int | None = None,
    ) -> None:
        for name, value, least, most in (
            ("layers", layers, 1, 1 << 12),
            ("kv_heads", kv_heads, 1, 1 << 12),
            ("head_dim", head_dim, 1, 1 << 12),
            ("capacity", capacity, 1, 1 << 24),
            ("window", window, 0, 1 << 24),
            ("segment_tokens", 1 if segment_tokens is None else segment_tokens, 1, 1 << 24),
        ):
            if not least <= value <= most:
                raise ProblemError(f"{name} of a cache must be {least} to {most}, not {value}")
        self.layers, self.kv_heads, self.head_dim, self.capacity = layers, kv_heads, head_dim, capacity
        self.window = window
        if segment_tokens is None:
            segment_tokens = max(-(-window // WINDOW_SEGMENTS), LEAST_SEGMENT_TOKENS) if window else capacity
        self.segment_tokens = min(segment_tokens, capacity)
        self.length = 0
        self.generation = 0
        self.jobs: NDArray[np.int64] = np.zeros((layers, len(fields.FIELDS)), np.int64)
        self.jobs[:, fields.HEADS], self.jobs[:, fields.HEAD_DIM] = kv_heads, head_dim
        self._counts, self._positions = self.jobs[:, fields.COUNT], self.jobs[:, fields.POSITION]
        self._shape = Shape(layers, kv_heads, head_dim)
        self._sealed: tuple[Segment, ...] = ()
        self._tail: Storage | None = None
        self._start = 0  # of the tail
        self._room = 0  # absolute length up to which the tail may be extended in the current layout
        self._drop_at = NEVER  # length from which on the oldest segment is out of sight
        self._free: list[Storage] = []
        self._segments: tuple[Segment, ...] | None = ()
        self._described: Storage | None = None  # whose operands the jobs have; None while they change
        self._storer: Storer | None = None
        self._check(layout)
        self._layout = layout

    def __repr__(self) -> str:
        return f"KVCache({self.length} of {self.capacity} tokens in {len(self.segments)} segments)"

    @property
    def layout(self) -> KVLayout:
        """Of tokens to come."""
        return self._layout

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What is held, oldest first; each begins where the one before it ends."""
        if self._segments is None:
            last = () if self._tail is None else (Segment(self._start, self.length - self._start, self._tail),)
            self._segments = self._sealed + last
        return self._segments

    @property
    def start(self) -> int:
        """Position of the first token that is held."""
        return self._sealed[0].start if self._sealed else self._start

    @property
    def nbytes(self) -> int:
        """Bytes of words and scales that are in use, those of memory kept for the next segment included."""
        return sum(storage.nbytes for storage in self._storages())

    @property
    def reserved_bytes(self) -> int:
        """Address space that is reserved."""
        return sum(storage.reserved_bytes for storage in self._storages())

    # -- growing --------------------------------------------------------------------------------------------------

    def switch(self, layout: KVLayout) -> None:
        """Store tokens to come in ``layout``: the next one opens a segment, unless this is the current layout.

        Raises
        ------
        LayoutError
            If the layout cannot hold the cache's shape, or not grow along tokens.
        """
        if layout != self._layout:
            self._check(layout)
            self._layout = layout
            self._room = 0

    def begin(self, count: int) -> int:
        """Count up to ``count`` new tokens, whose contents have to be stored for every layer before they are read.

        Returns
        -------
        int
            How many: as many as the last segment has room for, at least one.

        Raises
        ------
        CacheFullError
            If the cache's capacity is reached.
        ProblemError
            If ``count`` is below 1.
        """
        if count < 1:
            raise ProblemError(f"cannot append {count} tokens")
        length, tail = self.length, self._tail
        if length >= self._drop_at:
            self._drop()
        if length >= self._room or tail is None or tail.filled != length - self._start:
            tail = self._make_room()
        position = length - self._start
        count = min(count, self._room - length)
        self.length = length + count
        tail.filled = position + count
        self._counts[:] = count
        self._positions[:] = position
        self._segments = None
        return count

    def store(self, layer: int, k: Float32, v: Float32) -> None:
        """Contents of the tokens of the last `begin`, in one layer.

        Parameters
        ----------
        layer : int
        k, v : ndarray of float32, shape (kv_heads, tokens, head_dim)
            Numbers that cannot be quantised become finite, see `lowbit.kernels.append`.

        Raises
        ------
        ProblemError
            If there is no such layer, or a shape is another.
        """
        shape = (self.kv_heads, int(self._counts[0]), self.head_dim)
        if not 0 <= layer < self.layers:
            raise ProblemError(f"a cache of {self.layers} layers has no layer {layer}")
        for name, value in (("k", k), ("v", v)):
            if value.shape != shape:
                raise ProblemError(f"{name} must have shape {shape}, not {value.shape}")
        if self._storer is None:
            self._storer = Storer(self.kv_heads)
        self._storer.store(self.jobs[layer], k, v)

    def append(self, k: Float32, v: Float32) -> None:
        """Append tokens whose keys and values are all known.

        Parameters
        ----------
        k, v : ndarray of float32, shape (layers, kv_heads, tokens, head_dim)

        Raises
        ------
        ProblemError
            If a shape is another.
        CacheFullError
            If there is no room for all of them; none is appended then.
        """
        count = k.shape[2] if k.ndim == 4 else -1
        shape = (self.layers, self.kv_heads, count, self.head_dim)
        for name, value in (("k", k), ("v", v)):
            if value.shape != shape:
                raise ProblemError(f"{name} must have shape (layers, kv_heads, tokens, head_dim), not {value.shape}")
        if self.length + count > self.capacity:
            raise self._full(count)
        done = 0
        while done < count:
            stop = done + self.begin(count - done)
            for layer in range(self.layers):
                self.store(layer, k[layer, :, done:stop], v[layer, :, done:stop])
            done = stop

    # -- shrinking and sharing ------------------------------------------------------------------------------------

    def truncate(self, length: int) -> None:
        """Forget all tokens from position ``length`` on.

        Raises
        ------
        ProblemError
            If there are not so many tokens, or the window of the next one begins before what is held.
        """
        if not 0 <= length <= self.length:
            raise ProblemError(f"cannot shorten a cache of {self.length} tokens to {length}")
        if self.start > self._first_seen(length):
            raise ProblemError(
                f"cannot shorten to {length} tokens: those before {self.start} have left the window of {self.window}"
            )
        if length == self.length:
            return
        left: list[Storage] = []
        while self._tail is not None and length <= self._start:
            left.append(self._tail)
            self._tail = None
            if self._sealed:
                last = self._sealed[-1]
                self._sealed, self._tail, self._start = self._sealed[:-1], last.storage, last.start
        if left:
            self._room, self._described = 0, None
        self.length = length
        self._segments = None
        self._counts[:] = 0
        for storage in left:
            self._leave(storage)
            storage.trim()
        if self._tail is not None:
            self._tail.settle()
        if left:
            if self._tail is None:
                self._start = length
                self._changed()
            else:
                self._describe(self._tail)

    def fork(self) -> KVCache:
        """A cache of the same tokens that shares their memory; each of the two then goes its own way."""
        other = type(self)(
            self.layers,
            self.kv_heads,
            self.head_dim,
            self.capacity,
            self._layout,
            window=self.window,
            segment_tokens=self.segment_tokens,
        )
        other.adopt(self.segments, self.length)
        return other

    def adopt(self, segments: tuple[Segment, ...], length: int) -> None:
        """Take over ``segments``, which end at ``length``; for a cache that is empty."""
        self.length = self._start = length
        for each in segments:
            each.storage.owners.add(self)
        if segments:
            self._sealed, tail = segments[:-1], segments[-1]
            self._tail, self._start = tail.storage, tail.start
            self._describe(tail.storage)
        self._changed()

    def tokens_in(self, storage: Storage) -> int:
        """Tokens of ``storage`` that this cache sees."""
        return next((each.tokens for each in self.segments if each.storage is storage), 0)

    # -- files ----------------------------------------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> None:
        """Write the cache to one file, in the safetensors format; replaces one that is there, at once or not at all.

        Raises
        ------
        CacheFileError
            If the file cannot be written.
        """
        from .cache_file import save

        save(self, path)

    @classmethod
    def restore(cls, path: str | PathLike[str], *, shape: Shape | None = None, capacity: int | None = None) -> KVCache:
        """The cache that a file holds; it goes on as the saved one would have.

        Parameters
        ----------
        path : path of a file
        shape : Shape, optional
            Layers, heads and channels that the cache must have.
        capacity : int, optional
            Most tokens of the sequence, if not as many as the saved cache had room for.

        Raises
        ------
        CacheFileError
            If the file cannot be read, is no saved cache or altered, or holds another shape or too many tokens.
        """
        from .cache_file import restore

        return restore(cls, path, shape, capacity)

    # -- segments -------------------------------------------------------------------------------------------------

    def _make_room(self) -> Storage:
        """The tail, able to take the next token."""
        if self.length >= self.capacity:
            raise self._full(1)
        tail = self._tail
        if tail is not None and tail.layout == self._layout and tail.capacity > self.length - self._start:
            seen = self.length - self._start
            if tail.filled == seen or tail.settle() == seen:
                if self._described is not tail:  # an interrupt has come before
                    self._describe(tail)
                self._room = min(self._start + tail.capacity, self.capacity)
                return tail
        opened = self._new_storage()
        if tail is not None:
            tail.settle()
            tail.trim()
        opened.owners.add(self)
        self._sealed = self.segments
        # An interrupt may come with any call: until the last one the tail has no room.
        self._tail, self._start, self._room, self._segments, self._described = opened, self.length, 0, None, None
        self._describe(opened)
        self._room = min(self._start + opened.capacity, self.capacity)
        return opened

    def _describe(self, tail: Storage) -> None:
        """Make the jobs those of ``tail``."""
        self._described = None
        tail.describe(self.jobs)
        self._changed()
        self._described = tail

    def _new_storage(self) -> Storage:
        layouts = (self._layout.k, self._layout.v)
        capacity = round_capacity(layouts, min(self.segment_tokens, self.capacity - self.length))
        for storage in self._free:
            if storage.layout == self._layout and storage.capacity >= capacity:
                self._free.remove(storage)
                return storage
        self._free.clear()
        return Storage(self._shape, self._layout, capacity)

    def _leave(self, storage: Storage) -> None:
        """Give up a storage, and keep it for the next segment if nobody else sees it."""
        storage.owners.discard(self)
        storage.settle()
        if not storage.owners:
            self._free = [storage]

    def _drop(self) -> None:
        """Drop the segments that no query from the next one on sees."""
        horizon = self._first_seen(self.length - ROLLBACK_TOKENS)
        gone = [each for each in self._sealed if each.stop <= horizon]
        self._sealed = self._sealed[len(gone) :]
        for each in gone:
            self._leave(each.storage)
        self._changed()

    def _first_seen(self, position: int) -> int:
        """First token that a query at ``position`` sees."""
        return max(position + 1 - self.window, 0) if self.window else 0

    def _changed(self) -> None:
        self.generation += 1
        self._segments = None
        self._drop_at = NEVER
        if self.window and self._sealed:
            self._drop_at = self._sealed[0].stop + self.window - 1 + ROLLBACK_TOKENS

    def _storages(self) -> list[Storage]:
        return [*(each.storage for each in self.segments), *self._free]

    def _check(self, layout: KVLayout) -> None:
        for each in (layout.k, layout.v):
            check_appendable(each, self.head_dim)

    def _full(self, count: int) -> CacheFullError:
        return CacheFullError(
            f"the cache holds {self.length} of at most {self.capacity} tokens: no room for {count} more; "
            "make it for a longer context"
        )

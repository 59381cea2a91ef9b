"""A cache in one file: the safetensors format, with what its tensors mean in the metadata.

The used part of every segment's words and scales is stored as it lies, rows that were rolled back blanked. A digest
covers the description and the data, so that an altered file is refused instead of decoded with. A file appears under
its name when it is whole: it is written beside it, flushed to the disk and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.append_fields import places
from ..kernels.errors import CacheFileError
from ..kernels.packed import TOKEN_BLOCK, round_capacity
from .cache_header import FORMAT, VERSION, Header, Run, Tensor
from .segment import Segment, Shape, Storage, scale_groups

if TYPE_CHECKING:
    from .kvcache import KVCache

MOST_HEADER_BYTES = 1 << 24
_NO_DIGEST = "0" * 64

Bytes = NDArray[np.uint8]


def save(cache: KVCache, path: str | PathLike[str]) -> None:
    """Write ``cache`` to the file ``path``, which only its owner may read; replaces one that is there.

    Raises
    ------
    CacheFileError
        If it cannot be written; a file that was there is then left as it was.
    """
    target = Path(path)
    header = Header(
        Shape(cache.layers, cache.kv_heads, cache.head_dim),
        cache.capacity,
        cache.window,
        cache.segment_tokens,
        cache.length,
        cache.layout,
        tuple(Run(each.start, each.tokens, each.layout) for each in cache.segments),
    )
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=".lowbit-", dir=target.parent)
        with open(handle, "wb") as file:
            file.write(_header_bytes(header, _NO_DIGEST))
            digest = _digest(header)
            for tensor in header.tensors:
                for part in _stored(cache.segments[tensor.segment], tensor):
                    digest.update(part)
                    file.write(part)
            file.seek(0)
            file.write(_header_bytes(header, digest.hexdigest()))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise CacheFileError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
    _flush_directory(target.parent)


def restore(
    cls: type[KVCache], path: str | PathLike[str], shape: Shape | None = None, capacity: int | None = None
) -> KVCache:
    """See `lowbit.runtime.kvcache.KVCache.restore`."""
    source = Path(path)
    try:
        with open(source, "rb") as file:
            return _read(cls, file, shape, capacity)
    except CacheFileError as error:
        raise CacheFileError(f"{source} is not restored: {error}") from None
    except MemoryError:
        raise CacheFileError(f"{source} is not restored: there is no memory for it") from None
    except OSError as error:
        raise CacheFileError(f"cannot read {source}: {error.strerror or error}") from None


# -- writing ----------------------------------------------------------------------------------------------------------


def _header_bytes(header: Header, digest: str) -> bytes:
    metadata = {"format": FORMAT, "version": str(VERSION), "sha256": digest, "cache": header.text}
    text = json.dumps({"__metadata__": metadata, **header.entries()}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _digest(header: Header) -> Any:
    return hashlib.sha256(f"{FORMAT} {VERSION}\n{header.text}\n".encode())


def _stored(segment: Segment, tensor: Tensor) -> Any:
    """Bytes of each layer's each head."""
    mask = _visible(segment, tensor)
    for head in segment.storage.heads(tensor.role, tensor.part):
        used = head[: tensor.head_bytes]
        whole = len(used) - len(mask)
        yield used[:whole]
        yield used[whole:] & mask


def _visible(segment: Segment, tensor: Tensor) -> Bytes:
    """Which bits of the last storage row or block are seen; nothing if all of them are."""
    layout, head_dim = segment.layout.of(tensor.role), segment.storage.shape.head_dim
    rest = segment.tokens % (TOKEN_BLOCK if tensor.part == "scales" else layout.unit("T"))
    if not rest:
        return np.zeros(0, np.uint8)
    if tensor.part == "scales":
        block = np.zeros((scale_groups(layout, head_dim), TOKEN_BLOCK), np.uint16)
        block[:, :rest] = 0xFFFF
        return block.ravel().view(np.uint8)
    mask = np.zeros(layout.pitch_bytes(segment.tokens, head_dim), np.uint8)
    seen = places(layout, head_dim)[:rest].ravel()
    if layout.packing.bits == 4:
        np.bitwise_or.at(mask, seen // 2, (15 << 4 * (seen % 2)).astype(np.uint8))
    for byte in range(layout.packing.bits // 8):
        mask[seen // 2 + byte] = 0xFF
    return mask


def _flush_directory(path: Path) -> None:
    """Make the name survive a power cut, where the system can."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# -- reading ----------------------------------------------------------------------------------------------------------


def _read(cls: type[KVCache], file: IO[bytes], shape: Shape | None, capacity: int | None) -> KVCache:
    header, wanted = _read_header(file)
    if shape is not None and shape != header.shape:
        raise CacheFileError(f"it holds {_words(header.shape)}, not {_words(shape)}")
    if capacity is not None and capacity < header.length:
        raise CacheFileError(f"it holds {header.length} tokens, and there is to be room for {capacity}")
    cache = cls(
        header.shape.layers,
        header.shape.kv_heads,
        header.shape.head_dim,
        header.capacity if capacity is None else capacity,
        header.layout,
        window=header.window,
        segment_tokens=header.segment_tokens if header.segment_tokens < header.capacity else None,
    )
    storages = []
    for run in header.runs:
        last = run is header.runs[-1] and run.layout == header.layout
        most = min(cache.segment_tokens, cache.capacity - run.start) if last else run.tokens
        tokens = round_capacity((run.layout.k, run.layout.v), max(most, run.tokens))
        storages.append(Storage(header.shape, run.layout, tokens))
    digest = _digest(header)
    for tensor in header.tensors:
        _fill(file, storages[tensor.segment], tensor, digest)
    if digest.hexdigest() != wanted:
        raise CacheFileError("it was altered: its digest is another")
    for run, storage in zip(header.runs, storages, strict=True):
        storage.filled = run.tokens
    segments = tuple(Segment(run.start, run.tokens, each) for run, each in zip(header.runs, storages, strict=True))
    cache.adopt(segments, header.length)
    return cache


def _read_header(file: IO[bytes]) -> tuple[Header, str]:
    """The header and the digest that the file states, once all but the data has been checked."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
        raise CacheFileError("it is no safetensors file, or truncated")
    try:
        listed = json.loads(file.read(length))
        metadata = listed.pop("__metadata__")
        format, version, wanted, text = (metadata[name] for name in ("format", "version", "sha256", "cache"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CacheFileError("it is no saved cache: its header cannot be read") from None
    if format != FORMAT:
        raise CacheFileError(f"it is no saved cache but {format!r}")
    if version != str(VERSION):
        raise CacheFileError(f"it is of version {version}, and this release reads version {VERSION}")
    if not isinstance(text, str):
        raise CacheFileError("it is no saved cache: its header cannot be read")
    header = Header.parse(text)
    if listed != header.entries() or len(metadata) != 4:
        raise CacheFileError("its tensors are not those that its description needs")
    if size != 8 + length + header.data_bytes:
        raise CacheFileError(f"it has {size} bytes and needs {8 + length + header.data_bytes}: truncated, or altered")
    return header, str(wanted)


def _fill(file: IO[bytes], storage: Storage, tensor: Tensor, digest: Any) -> None:
    """Read one tensor to its place."""
    halves = tensor.part == "scales" or storage.layout.of(tensor.role).packing.format == "fp16"
    for head in storage.heads(tensor.role, tensor.part):
        used = head[: tensor.head_bytes]
        if file.readinto(used.data) != len(used):  # type: ignore[attr-defined]
            raise CacheFileError("it is truncated")
        digest.update(used.data)
        if halves and (used.view(np.uint16) & 0x7C00 == 0x7C00).any():
            raise CacheFileError(f"{tensor.name} has numbers that are not finite")


def _words(shape: Shape) -> str:
    return f"{shape.layers} layers of {shape.kv_heads} heads of {shape.head_dim}"

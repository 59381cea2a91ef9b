"""The head of a GGUF file: its metadata, and which tensors lie where.

A file is not trusted. Every count is compared with what the file can hold before it is acted on, so that damage leads
to `ModelError` soon, and never to a large allocation. Arrays stay in the file until somebody asks for them: a
tokenizer's hundred thousand strings are most of a head, and few callers want them.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ...kernels.errors import ModelError
from .tensor_types import TYPES, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
LARGEST_COUNT = 1 << 24
"""Of tensors, keys, or an array's elements. Vocabularies have less than a million tokens."""
LARGEST_NAME = 1 << 16
LARGEST_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""`struct` letters of the scalar types of metadata."""
STRING, ARRAY = 8, 9

Scalar = int | float | bool | str


@dataclass(frozen=True)
class StoredArray:
    """An array of metadata that is still in the file: its elements' type, their number, and where they start."""

    type: int
    count: int
    offset: int


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file.

    Attributes
    ----------
    name : str
    type : TensorType
    rows, columns : int
        A vector is one row.
    offset : int
        Of its first byte in the file.
    """

    name: str
    type: TensorType
    rows: int
    columns: int
    offset: int

    @property
    def row_bytes(self) -> int:
        return self.columns // self.type.block * self.type.block_bytes

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Header:
    metadata: dict[str, Scalar | StoredArray]
    tensors: dict[str, TensorInfo]


def shown(text: str) -> str:
    """Text from a file as a message may have it: quoted, on one line, and not too long."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


class HeaderReader:
    """Reads a head from an open file; positions are checked against the file's size.

    Raises
    ------
    ModelError
        From every method: for what is cut off, malformed or unsupported.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._size = os.fstat(file.fileno()).st_size

    def read(self) -> Header:
        magic = self._file.read(4)
        if magic != MAGIC:
            raise self._error("not a GGUF file")
        version = self._number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in VERSIONS:
                raise self._error("a big-endian GGUF file; only little-endian ones can be read")
            raise self._error(f"GGUF version {version}; readable are {' and '.join(map(str, VERSIONS))}")
        tensor_count, key_count = self._count("tensors"), self._count("keys")
        metadata: dict[str, Scalar | StoredArray] = {}
        for _ in range(key_count):
            key = self.string("a key", LARGEST_NAME)
            if key in metadata:
                raise self._error(f"the key {shown(key)} is there twice")
            metadata[key] = self._value(key)
        tensors = [self._tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._error(f"general.alignment must be a power of two, not {alignment!r}")
        start = -(-self._file.tell() // alignment) * alignment
        return Header(metadata, self._placed(tensors, start))

    def string(self, what: str, largest: int | None = None) -> str:
        """The string at the file's position."""
        length = self._number("Q")
        if length > self._left():
            raise self._error(f"truncated or damaged: {what} of {length} bytes in a file of {self._size}")
        if largest is not None and length > largest:
            raise self._error(f"damaged: {what} is {length} bytes long")
        raw = self._file.read(length)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(f"damaged: {what} is not UTF-8") from None

    def strings(self, key: str, array: StoredArray) -> list[bytes]:
        """The elements of an array of strings, as bytes."""
        self._file.seek(array.offset)
        found = []
        for _ in range(array.count):
            length = self._number("Q")
            if length > self._left():
                raise self._error(f"truncated or damaged in {shown(key)}")
            found.append(self._file.read(length))
        return found

    def scalars(self, array: StoredArray) -> tuple[int | float, ...]:
        """The elements of an array of numbers."""
        self._file.seek(array.offset)
        layout = struct.Struct(f"<{array.count}{SCALARS[array.type]}")
        return layout.unpack(self._exactly(layout.size))

    # -- pieces -------------------------------------------------------------------------------------------------------

    def _value(self, key: str) -> Scalar | StoredArray:
        kind = self._number("I")
        if kind == STRING:
            return self.string(f"the value of {shown(key)}")
        if kind == ARRAY:
            return self._array(key)
        if kind not in SCALARS:
            raise self._error(f"damaged: {shown(key)} has a value of the unknown type {kind}")
        layout = struct.Struct("<" + SCALARS[kind])
        value: Scalar = layout.unpack(self._exactly(layout.size))[0]
        return value

    def _array(self, key: str) -> StoredArray:
        kind, count = self._number("I"), self._number("Q")
        array = StoredArray(kind, count, self._file.tell())
        if count > LARGEST_COUNT:
            raise self._error(f"damaged: {shown(key)} has {count} elements")
        if kind == STRING:
            for _ in range(count):
                self._skip(self._number("Q"), key)
        elif kind in SCALARS:
            self._skip(count * struct.calcsize("<" + SCALARS[kind]), key)
        else:
            raise self._error(f"{shown(key)} is an array of elements of type {kind}, which cannot be read")
        return array

    def _tensor(self) -> tuple[str, int, list[int], int]:
        name = self.string("a tensor's name", LARGEST_NAME)
        dimensions = self._number("I")
        if not 1 <= dimensions <= LARGEST_DIMENSIONS:
            raise self._error(f"damaged: tensor {shown(name)} has {dimensions} dimensions")
        sizes = [self._number("Q") for _ in range(dimensions)]
        return name, self._number("I"), sizes, self._number("Q")

    def _placed(self, tensors: list[tuple[str, int, list[int], int]], start: int) -> dict[str, TensorInfo]:
        found: dict[str, TensorInfo] = {}
        for name, number, sizes, offset in tensors:
            if name in found:
                raise self._error(f"tensor {shown(name)} is there twice")
            if number not in TYPES:
                raise self._error(f"tensor {shown(name)} is of the unknown type {number}")
            kept = TYPES[number]
            columns, *rest = sizes
            rows = 1
            for size in rest:
                rows *= size
            if not columns or not rows or columns % kept.block:
                shape = "×".join(map(str, sizes))
                raise self._error(f"damaged: tensor {shown(name)} of type {kept.name} has the shape {shape}")
            info = TensorInfo(name, kept, rows, columns, start + offset)
            if info.offset + info.nbytes > self._size:
                raise self._error(
                    f"truncated or damaged: tensor {shown(name)} ends at byte {info.offset + info.nbytes}, "
                    f"the file at {self._size}"
                )
            found[name] = info
        return found

    # -- bytes --------------------------------------------------------------------------------------------------------

    def _count(self, what: str) -> int:
        count = self._number("Q")
        if count > LARGEST_COUNT:
            raise self._error(f"damaged: it claims to have {count} {what}")
        return count

    def _number(self, letter: str) -> int:
        layout = _NUMBERS[letter]
        value: int = layout.unpack(self._exactly(layout.size))[0]
        return value

    def _exactly(self, count: int) -> bytes:
        raw = self._file.read(count) if count <= self._left() else b""
        if len(raw) != count:
            raise self._error(f"truncated: it ends within its head, after {self._size} bytes")
        return raw

    def _skip(self, count: int, key: str) -> None:
        if count > self._left():
            raise self._error(f"truncated or damaged: it ends within {shown(key)}, after {self._size} bytes")
        self._file.seek(count, os.SEEK_CUR)

    def _left(self) -> int:
        return self._size - self._file.tell()

    def _error(self, why: str) -> ModelError:
        return ModelError(f"{self._path}: {why}")


_NUMBERS = {"I": struct.Struct("<I"), "Q": struct.Struct("<Q")}

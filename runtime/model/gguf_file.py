"""A GGUF file: typed look-ups of its metadata, and its tensors' bytes a few rows at a time.

Bytes are read into buffers, never mapped, so that what has been read takes no memory once it is dropped, and a file
that is cut short while it is read leads to an error instead of a signal.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ...kernels.errors import ModelError
from .gguf_header import SCALARS, STRING, HeaderReader, StoredArray, TensorInfo, shown
from .tensor_types import READABLE

CHUNK_BYTES = 1 << 20
"""How much of a tensor is read at a time."""


class GgufFile:
    """An open file whose head has been read and found sound. Methods may be called from several threads.

    Parameters
    ----------
    path : path-like

    Attributes
    ----------
    path : Path
    tensors : dict
        `TensorInfo` by name, in the file's order.

    Raises
    ------
    ModelError
        If the file cannot be opened, is not GGUF, truncated or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            if self.path.exists() and not self.path.is_file():
                raise ModelError(f"{self.path}: not a file")
            self._file = self.path.open("rb")
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path}: {getattr(error, 'strerror', None) or error}") from None
        self._lock = threading.Lock()
        self._reader = HeaderReader(self._file, self.path)
        try:
            header = self._reader.read()
        except BaseException:
            self._file.close()
            raise
        self._metadata, self.tensors = header.metadata, header.tensors

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- metadata -----------------------------------------------------------------------------------------------------

    def __contains__(self, key: str) -> bool:
        return key in self._metadata

    def keys(self) -> tuple[str, ...]:
        return tuple(self._metadata)

    def value(self, key: str) -> int | float | bool | str | list[Any]:
        """What ``key`` has, whatever it is; arrays are read from the file."""
        found = self._metadata.get(key)
        if found is None:
            raise self.error(f"{key} is missing")
        if not isinstance(found, StoredArray):
            return found
        return self.strings(key) if found.type == STRING else list(self.numbers(key))

    def integer(self, key: str, default: int | None = None, *, least: int = 1, largest: int = 1 << 20) -> int:
        """A whole number from ``least`` to ``largest``; an array of equal numbers, one for each layer, counts as one.

        Raises
        ------
        ModelError
            If it is missing without a default, or something else.
        """
        value = self._metadata.get(key, default)
        if value is None:
            raise self.error(f"{key} is missing")
        if isinstance(value, StoredArray) and value.type in SCALARS and value.count:
            numbers = set(self.numbers(key))
            if len(numbers) > 1:
                raise self.error(f"{key} differs from layer to layer, which is unsupported")
            value = numbers.pop()
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= largest:
            raise self.error(f"{key} must be a number from {least} to {largest}, not {self._shown(value)}")
        return value

    def real(self, key: str, default: float | None = None, *, least: float, largest: float) -> float:
        """A finite number from ``least`` to ``largest``."""
        value = self._metadata.get(key, default)
        if value is None:
            raise self.error(f"{key} is missing")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not least <= value <= largest:  # type: ignore[arg-type, operator]
            raise self.error(f"{key} must be a number from {least:g} to {largest:g}, not {self._shown(value)}")
        return float(value)  # type: ignore[arg-type]

    def is_any(self, key: str, values: Sequence[float | bool]) -> bool:
        """Whether a key has one of ``values``; one that is not there has none."""
        value = self._metadata.get(key)
        return not isinstance(value, StoredArray | str | None) and value in values

    def text(self, key: str, default: str | None = None) -> str:
        value = self._metadata.get(key, default)
        if value is None:
            raise self.error(f"{key} is missing")
        if not isinstance(value, str):
            raise self.error(f"{key} must be text, not {self._shown(value)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, not {self._shown(value)}")
        return value

    def strings(self, key: str) -> list[bytes]:
        """An array of strings as bytes, read from the file at each call."""
        value = self._metadata.get(key)
        if value is None:
            raise self.error(f"{key} is missing")
        if not isinstance(value, StoredArray) or value.type != STRING:
            raise self.error(f"{key} must be a list of texts")
        with self._lock:
            return self._reader.strings(key, value)

    def numbers(self, key: str) -> tuple[int | float, ...]:
        """An array of numbers, read from the file at each call."""
        value = self._metadata.get(key)
        if value is None:
            raise self.error(f"{key} is missing")
        if not isinstance(value, StoredArray) or value.type not in SCALARS:
            raise self.error(f"{key} must be a list of numbers")
        with self._lock:
            return self._reader.scalars(value)

    # -- tensors ------------------------------------------------------------------------------------------------------

    def tensor(self, name: str) -> TensorInfo:
        """
        Raises
        ------
        ModelError
            If there is no such tensor, or it is of a type that weights may not have.
        """
        info = self.tensors.get(name)
        if info is None:
            raise self.error(f"tensor {name!r} is missing")
        if not info.type.readable:
            readable = ", ".join(READABLE)
            raise self.error(
                f"tensor {name!r} is of type {info.type.name}, which is unsupported (supported: {readable})"
            )
        return info

    def chunks(self, name: str) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """A tensor's bytes as (first row, array of shape (rows, bytes of a row)), in order, whole rows at a time.

        Each array is valid until the next one is asked for.
        """
        info = self.tensor(name)
        step = max(1, min(info.rows, CHUNK_BYTES // info.row_bytes))
        buffer = np.empty((step, info.row_bytes), np.uint8)
        for first in range(0, info.rows, step):
            part = buffer[: min(step, info.rows - first)]
            with self._lock:
                self._file.seek(info.offset + first * info.row_bytes)
                count = self._file.readinto(part.reshape(-1).data)
            if count != part.nbytes:
                raise self.error(f"truncated: tensor {name!r} could not be read to its end")
            yield first, part

    def error(self, why: str) -> ModelError:
        return ModelError(f"{self.path}: {why}")

    @staticmethod
    def _shown(value: object) -> str:
        if isinstance(value, StoredArray):
            return "a list"
        return shown(value) if isinstance(value, str) else str(value)

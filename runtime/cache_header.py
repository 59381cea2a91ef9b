"""What a saved cache says of itself: geometry, layouts and segments, read back with every number checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self

from ..kernels.append_fields import check_appendable
from ..kernels.errors import CacheFileError, LayoutError
from ..kernels.layout import Layout
from ..kernels.packed import TOKEN_BLOCK
from .segment import KVLayout, Shape, scale_groups

FORMAT = "lowbit kv cache"
VERSION = 1
ROLES = ("k", "v")

_SHAPE = {"layers": (1, 1 << 12), "kv_heads": (1, 1 << 12), "head_dim": (1, 1 << 12)}
_COUNTS = {"capacity": (1, 1 << 24), "window": (0, 1 << 24), "segment_tokens": (1, 1 << 24), "length": (0, 1 << 24)}


@dataclass(frozen=True)
class Run:
    """One segment: where it starts, how long it is, how it lies."""

    start: int
    tokens: int
    layout: KVLayout


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file: words or scales of one role of one segment, by layer and head."""

    segment: int
    role: str
    part: str
    head_bytes: int

    @property
    def name(self) -> str:
        return f"segment.{self.segment}.{self.role}.{self.part}"


@dataclass(frozen=True)
class Header:
    """What a file says of its cache; see `lowbit.runtime.kvcache.KVCache` for the numbers."""

    shape: Shape
    capacity: int
    window: int
    segment_tokens: int
    length: int
    layout: KVLayout
    runs: tuple[Run, ...]

    @property
    def text(self) -> str:
        """As stored under ``cache`` in the file's metadata."""
        record = {
            **{name: getattr(self.shape, name) for name in _SHAPE},
            **{name: getattr(self, name) for name in _COUNTS},
            "layout": _named(self.layout),
            "segments": [{"start": run.start, "tokens": run.tokens, **_named(run.layout)} for run in self.runs],
        }
        return json.dumps(record, separators=(",", ":"))

    @property
    def tensors(self) -> list[Tensor]:
        """In the order of their data."""
        found = []
        for number, run in enumerate(self.runs):
            for role in ROLES:
                layout = run.layout.of(role)
                rows = -(-run.tokens // layout.unit("T"))
                words = rows * layout.pitch_bytes(run.tokens, self.shape.head_dim)
                found.append(Tensor(number, role, "words", words))
                groups = scale_groups(layout, self.shape.head_dim)
                if groups:
                    scales = -(-run.tokens // TOKEN_BLOCK) * TOKEN_BLOCK * groups * 2
                    found.append(Tensor(number, role, "scales", scales))
        return found

    def entries(self) -> dict[str, dict[str, Any]]:
        """The tensors as the file's header lists them."""
        found: dict[str, dict[str, Any]] = {}
        at = 0
        layers, heads = self.shape.layers, self.shape.kv_heads
        for tensor in self.tensors:
            dtype, width = ("U8", 1) if tensor.part == "words" else ("F16", 2)
            stop = at + layers * heads * tensor.head_bytes
            shape = [layers, heads, tensor.head_bytes // width]
            found[tensor.name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, stop]}
            at = stop
        return found

    @property
    def data_bytes(self) -> int:
        heads = self.shape.layers * self.shape.kv_heads
        return heads * sum(tensor.head_bytes for tensor in self.tensors)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Inverse of `text`.

        Raises
        ------
        CacheFileError
            If it is nothing that `text` gives, with the reason.
        """
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            raise CacheFileError("its description is no JSON") from None
        numbers = {name: _number(record, name, *bounds) for name, bounds in (_SHAPE | _COUNTS).items()}
        shape = Shape(*(numbers.pop(name) for name in _SHAPE))
        listed = record.get("segments")
        if not isinstance(listed, list):
            raise CacheFileError("it lists no segments")
        runs = tuple(
            Run(_number(each, "start", 0, 1 << 24), _number(each, "tokens", 1, 1 << 24), _layout(each, shape))
            for each in listed
        )
        header = cls(shape, layout=_layout(record.get("layout"), shape), runs=runs, **numbers)
        header._check()
        if header.text != text:
            raise CacheFileError("its description holds more than a cache has")
        return header

    def _check(self) -> None:
        """Segments follow each other, from the first token that the window sees to the last one."""
        at = self.runs[0].start if self.runs else self.length
        first_seen = max(self.length + 1 - self.window, 0) if self.window else 0
        if at > first_seen:
            raise CacheFileError(f"tokens {first_seen} to {at} are missing")
        for run in self.runs:
            if run.start != at:
                raise CacheFileError(f"a segment starts at token {run.start} instead of {at}")
            at += run.tokens
        if at != self.length or self.length > self.capacity:
            raise CacheFileError(f"{at} tokens of {self.length} in a cache for {self.capacity}")


def _named(layout: KVLayout) -> dict[str, str]:
    return {"k": layout.k.name, "v": layout.v.name}


def _number(record: object, name: str, least: int, most: int) -> int:
    value = record.get(name) if isinstance(record, dict) else None
    if type(value) is not int or not least <= value <= most:
        raise CacheFileError(f"{name} is {value!r}, not {least} to {most}")
    return value


def _layout(record: object, shape: Shape) -> KVLayout:
    names = [record.get(role) if isinstance(record, dict) else None for role in ROLES]
    try:
        k, v = (Layout.parse(str(name)) for name in names)
        for layout in (k, v):
            check_appendable(layout, shape.head_dim)
    except LayoutError as error:
        raise CacheFileError(str(error)) from None
    return KVLayout(k, v)

"""Shapes of models, of attention and of weights: presets by name, or a GGUF file's own metadata."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernels.errors import ModelError

if TYPE_CHECKING:
    from ..runtime.model.gguf_file import GgufFile

_LIMIT = 1 << 20
"""Above any model's layers, heads or width; a larger number means a damaged file."""


@dataclass(frozen=True)
class Geometry:
    """Attention shape that ``layers`` layers of a model share.

    Parameters
    ----------
    heads, kv_heads : int
        Query heads and key/value heads.
    head_dim : int
        Channels of a head.
    layers : int
        Layers that keep a KV cache of this shape.
    """

    heads: int
    kv_heads: int
    head_dim: int
    layers: int


@dataclass(frozen=True)
class Matrix:
    """A weight matrix: ``rows`` outputs, ``columns`` inputs. ``name`` says what a model uses it for: ``k, v``."""

    name: str
    rows: int
    columns: int


@dataclass(frozen=True)
class Model:
    """A model's shapes.

    Parameters
    ----------
    name : str
    geometries : tuple of Geometry
        The distinct attention shapes of its layers, the most common first.
    width : int
        Channels of the hidden state; 0 where nothing says.
    feed_forward : tuple of int
        Widths that feed-forward layers have, the most common first; none where nothing says.
    vocabulary : int
        Rows of the matrix that gives the logits; 0 where nothing says.
    """

    name: str
    geometries: tuple[Geometry, ...]
    width: int = 0
    feed_forward: tuple[int, ...] = ()
    vocabulary: int = 0

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The distinct shapes of the matrices that a token is multiplied with, in the order of use.

        Raises
        ------
        ModelError
            If the model's own metadata leave one open.
        """
        for missing, value in (
            ("width (embedding_length)", self.width),
            ("feed-forward width (feed_forward_length)", self.feed_forward),
            ("vocabulary", self.vocabulary),
        ):
            if not value:
                raise ModelError(f"{self.name}: its metadata do not say its {missing}: give --rows and --columns")
        width = self.width
        shapes: list[tuple[str, int, int]] = []
        for each in self.geometries:
            heads, kv_heads = each.heads * each.head_dim, each.kv_heads * each.head_dim
            shapes += [("q", heads, width), ("k, v", kv_heads, width), ("o", width, heads)]
        for size in self.feed_forward:
            shapes += [("gate, up", size, width), ("down", width, size)]
        shapes.append(("head", self.vocabulary, width))
        names: dict[tuple[int, int], list[str]] = {}
        for name, rows, columns in shapes:
            known = names.setdefault((rows, columns), [])
            if name not in known:
                known.append(name)
        return tuple(Matrix(", ".join(found), *shape) for shape, found in names.items())


PRESETS = {
    model.name: model
    for model in (
        # From each model's published config.json.
        Model("smollm2-135m", (Geometry(9, 3, 64, layers=30),), 576, (1536,), 49152),
        Model("llama-3.2-1b", (Geometry(32, 8, 64, layers=16),), 2048, (8192,), 128256),
        Model("llama-3.2-3b", (Geometry(24, 8, 128, layers=28),), 3072, (8192,), 128256),
        Model("qwen3-1.7b", (Geometry(16, 8, 128, layers=28),), 2048, (6144,), 151936),
        Model("qwen3-8b", (Geometry(32, 8, 128, layers=36),), 4096, (12288,), 151936),
        Model("gemma-2-2b", (Geometry(8, 4, 256, layers=26),), 2304, (9216,), 256000),
        Model("phi-2", (Geometry(32, 32, 80, layers=32),), 2560, (10240,), 51200),
    )
}


def model_named(name: str) -> Model:
    """A preset, or the model in a GGUF file.

    Parameters
    ----------
    name : str
        A key of `PRESETS` in any case, or the path of a ``.gguf`` file.

    Raises
    ------
    ModelError
        If there is no such preset, or the file cannot be read or has no attention metadata.
    """
    preset = PRESETS.get(name.lower())
    if preset is not None:
        return preset
    if name.lower().endswith(".gguf") or Path(name).is_file():
        return model_from_gguf(Path(name))
    raise ModelError(f"unknown model {name!r}: choose one of {', '.join(PRESETS)}, or give a .gguf file")


def model_from_gguf(path: Path) -> Model:
    """Read a model's shapes from a GGUF file's metadata.

    Layers without key/value heads (recurrent ones in hybrid models) are left out. Sizes of weights may be missing.

    Raises
    ------
    ModelError
        If the file is unreadable, truncated or not GGUF, or lacks attention metadata.
    """
    fields, vocabulary = read_metadata(path)
    metadata = Metadata(path, fields)
    layers = metadata.number("block_count")
    heads = metadata.by_layer("attention.head_count", layers)
    kv_heads = metadata.by_layer("attention.head_count_kv", layers, default=heads)
    shapes = Counter(
        (query, shared, metadata.head_dim(query))
        for query, shared in zip(heads, kv_heads, strict=True)
        if query > 0 and shared > 0
    )
    if not shapes:
        raise ModelError(f"{path}: none of its {layers} layers has key/value heads")
    geometries = tuple(Geometry(*shape, layers=count) for shape, count in shapes.most_common())
    widths = Counter(metadata.by_layer("feed_forward_length", layers, default=[0] * layers))
    feed_forward = tuple(width for width, _ in widths.most_common() if width > 0)
    width = metadata.number("embedding_length") if metadata.key("embedding_length") in fields else 0
    return Model(fields.get("general.name") or path.stem, geometries, width, feed_forward, vocabulary)


@dataclass(frozen=True)
class Metadata:
    """Typed look-ups below the file's architecture prefix, each refusal naming the file and the key."""

    path: Path
    fields: dict[str, Any]

    @property
    def architecture(self) -> str:
        found = self.fields.get("general.architecture")
        if not isinstance(found, str):
            raise ModelError(f"{self.path}: its metadata names no general.architecture")
        return found

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def number(self, name: str, default: int | None = None) -> int:
        key = self.key(name)
        value = self.fields.get(key, default)
        if value is None:
            raise ModelError(f"{self.path}: {key} is missing")
        if not isinstance(value, int) or not 1 <= value <= _LIMIT:
            raise ModelError(f"{self.path}: {key} must be a number from 1 to {_LIMIT}, not {value!r}")
        return value

    def by_layer(self, name: str, layers: int, default: list[int] | None = None) -> list[int]:
        key = self.key(name)
        value = self.fields.get(key, default)
        if value is None:
            raise ModelError(f"{self.path}: {key} is missing")
        values = [value] * layers if isinstance(value, int) else value
        if not isinstance(values, list) or len(values) != layers or not all(isinstance(v, int) for v in values):
            raise ModelError(f"{self.path}: {key} is neither one number nor one for each of {layers} layers")
        return values

    def head_dim(self, heads: int) -> int:
        if self.key("attention.key_length") in self.fields:
            head_dim = self.number("attention.key_length")
        else:
            width = self.number("embedding_length")
            if width % heads:
                raise ModelError(f"{self.path}: an embedding of {width} does not divide into {heads} heads")
            head_dim = width // heads
        value_length = self.number("attention.value_length", default=head_dim)
        if value_length != head_dim:
            raise ModelError(f"{self.path}: keys of {head_dim} and values of {value_length} channels: must be equal")
        return head_dim


def read_metadata(path: Path) -> tuple[dict[str, Any], int]:
    """Of a GGUF file: metadata by key, arrays as lists, but only keys that say something about shapes; vocabulary."""
    from ..runtime.model.gguf_file import GgufFile

    with GgufFile(path) as file:
        return {key: file.value(key) for key in _wanted(file.keys())}, _vocabulary(file)


def _vocabulary(file: GgufFile) -> int:
    """Rows of the matrix that gives the logits, which may be more than there are tokens; 0 where nothing says."""
    for name in ("output.weight", "token_embd.weight"):
        if name in file.tensors and file.tensors[name].rows > 1:
            return file.tensors[name].rows
    return len(file.strings("tokenizer.ggml.tokens")) if "tokenizer.ggml.tokens" in file else 0


def _wanted(keys: Iterable[str]) -> list[str]:
    return [
        key
        for key in keys
        if key in ("general.architecture", "general.name")
        or ".attention." in key
        or ".ssm." in key
        or key.endswith((".block_count", ".embedding_length", ".feed_forward_length", ".full_attention_interval"))
    ]

"""What of a model its memory depends on: presets by name, hybrids among them, or a GGUF file's own metadata."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..kernels.errors import ModelError
from ..runtime.memory import CacheShape, DecoderShape
from .models import PRESETS, Metadata, Model, read_metadata
from .parameters import PARAMETERS, WEIGHT_BITS

WINDOWS = {"gemma-2-2b": (4096, 2)}
"""Of presets: tokens of the window, and of how many layers the last one sees all tokens."""

HYBRIDS = {
    "qwen3.6-27b": DecoderShape(
        "qwen3.6-27b", (CacheShape(16, 4, 256),), 64, 5120, 17408, 248320, heads=24, state_bytes=None
    ),
}
"""Presets of models most of whose layers keep no keys and values; their states' sizes are not published with them."""

FULL_LAYERS = {"gemma2": 2, "gemma3": 6, "cohere2": 4, "gpt-oss": 2, "exaone4": 4}
"""Of architectures with windows whose files do not say which layers have one: the last of so many has none."""

ATTENTION_INTERVALS = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
"""The same of hybrids, of which only the last of so many layers attends."""


@dataclass(frozen=True)
class Decoder:
    """A model, for its memory.

    Attributes
    ----------
    shape : DecoderShape
    parameters : int
    weights : int or None
        Bytes of its weights as they are decoded with; None for a preset, which is stored in no type.
    file : int or None
        Bytes of the weights in its file.
    """

    shape: DecoderShape
    parameters: int
    weights: int | None = None
    file: int | None = None

    def weight_bytes(self, type: str | None) -> int:
        """In one of `WEIGHT_BITS`; None for the file's own types, and ``q4_0`` of a preset."""
        if type is None and self.weights is not None:
            return self.weights
        return int(self.parameters * WEIGHT_BITS[type or "q4_0"] / 8)


def decoder_named(name: str) -> Decoder:
    """A preset, or the model in a GGUF file.

    Raises
    ------
    ModelError
        If there is no such preset, or the file cannot be read or does not say what is needed.
    """
    preset = PRESETS.get(name.lower())
    if preset is not None:
        return Decoder(_of_preset(preset), PARAMETERS[preset.name])
    if name.lower() in HYBRIDS:
        return Decoder(HYBRIDS[name.lower()], PARAMETERS[name.lower()])
    if name.lower().endswith(".gguf") or Path(name).is_file():
        return _of_file(Path(name))
    known = ", ".join(PARAMETERS)
    raise ModelError(f"unknown model {name!r}: choose one of {known}, or give a .gguf file")


def _of_preset(model: Model) -> DecoderShape:
    window, interval = WINDOWS.get(model.name, (0, 1))
    caches = []
    for each in model.geometries:
        full = each.layers // interval
        caches += [
            CacheShape(layers, each.kv_heads, each.head_dim, tokens)
            for layers, tokens in ((full, 0), (each.layers - full, window))
            if layers
        ]
    return DecoderShape(
        model.name,
        tuple(caches),
        sum(each.layers for each in model.geometries),
        model.width,
        max(model.feed_forward, default=0),
        model.vocabulary,
        max(each.heads for each in model.geometries),
    )


def _of_file(path: Path) -> Decoder:
    from ..runtime.model.gguf_file import GgufFile
    from ..runtime.model.weights import FOUR_BITS

    fields, vocabulary = read_metadata(path)
    metadata = Metadata(path, fields)
    layers = metadata.number("block_count")
    heads = metadata.by_layer("attention.head_count", layers)
    kv_heads = metadata.by_layer("attention.head_count_kv", layers, default=heads)
    attends = _attending(metadata, layers)
    windows = _windows(metadata, layers)
    kinds = Counter(
        (kv_heads[i], metadata.head_dim(heads[i]), windows[i])
        for i in range(layers)
        if attends[i] and heads[i] > 0 and kv_heads[i] > 0
    )
    if not kinds:
        raise ModelError(f"{path}: none of its {layers} layers has key/value heads")
    caches = tuple(
        CacheShape(count, kv, head_dim, window) for (kv, head_dim, window), count in sorted(kinds.items(), key=str)
    )
    has_width = metadata.key("embedding_length") in fields
    shape = DecoderShape(
        str(fields.get("general.name") or path.stem),
        caches,
        layers,
        metadata.number("embedding_length") if has_width else 0,
        max(metadata.by_layer("feed_forward_length", layers, default=[0] * layers)),
        vocabulary,
        max(heads),
        _state_bytes(metadata, layers - sum(cache.layers for cache in caches)),
    )
    parameters = weights = stored = 0
    with GgufFile(path) as file:
        for tensor in file.tensors.values():
            values = tensor.rows * tensor.columns
            minima = FOUR_BITS.get(tensor.type.name)
            bits = 32.0 if tensor.rows == 1 else 8.5 if minima is None else 5.0 if minima else 4.5
            parameters, weights, stored = parameters + values, weights + int(values * bits / 8), stored + tensor.nbytes
    return Decoder(shape, parameters, weights, stored)


def _attending(metadata: Metadata, layers: int) -> Sequence[bool]:
    """Of each layer, whether it attends, as far as the architecture decides that."""
    interval = ATTENTION_INTERVALS.get(metadata.architecture, 1)
    if metadata.key("full_attention_interval") in metadata.fields:
        interval = metadata.number("full_attention_interval")
    return [(layer + 1) % interval == 0 for layer in range(layers)]


def _windows(metadata: Metadata, layers: int) -> Sequence[int]:
    """Of each layer the tokens of its window, or 0. Where nothing says which layers have one, none is taken to."""
    from ..runtime.model.config import ARCHITECTURES

    if not metadata.fields.get(metadata.key("attention.sliding_window")):
        return [0] * layers
    window = metadata.number("attention.sliding_window")
    pattern = metadata.fields.get(metadata.key("attention.sliding_window_pattern"))
    if isinstance(pattern, list) and len(pattern) == layers:
        return [window if each else 0 for each in pattern]
    if metadata.architecture in ARCHITECTURES:
        return [window] * layers
    interval = pattern if isinstance(pattern, int) and pattern > 0 else FULL_LAYERS.get(metadata.architecture, 1)
    return [0 if (layer + 1) % interval == 0 else window for layer in range(layers)]


def _state_bytes(metadata: Metadata, layers: int) -> int | None:
    """Of ``layers`` state-space layers in float32: states, and what their convolutions remember."""
    if not layers:
        return 0
    if any(metadata.key(f"ssm.{name}") not in metadata.fields for name in ("state_size", "inner_size", "conv_kernel")):
        return None
    state, inner = metadata.number("ssm.state_size"), metadata.number("ssm.inner_size")
    groups = metadata.number("ssm.group_count", default=1)
    remembered = (metadata.number("ssm.conv_kernel") - 1) * (inner + 2 * groups * state)
    return 4 * layers * (state * inner + remembered)

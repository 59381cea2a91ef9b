"""Small GGUF files with random weights: every architecture, tensor type, head geometry and rotation that is supported.

Weights are scaled so that activations keep their size through the layers, and none is zero or a round number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

ARCHITECTURES = ("llama", "qwen2", "qwen3")

SCALE_BYTES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Where blocks have their fp16 scales, of types that the gguf package reads but does not write."""

MIDDLE = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""Scales of minima over those of codes with which values are zero on average."""

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *SCALE_BYTES)

SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>")
UNKNOWN, BOS, EOS = range(3)
MERGES = ("h e", "l l", "Ġ t", "Ġt he", "he ll", "hell o", "i n", "Ġ a", "o n", "e r")

VOCABULARY = 288

COMMON = ("general.", "tokenizer.", "split.")
"""What keys begin with that are not an architecture's."""


def write_model(
    path: Path,
    *,
    architecture: str = "llama",
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    hidden: int = 96,
    vocabulary: int = VOCABULARY,
    context: int = 512,
    types: str | Mapping[str, str] = "F32",
    tied: bool = True,
    biases: bool | None = None,
    rope_factors: Iterable[float] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tokenizer: bool = True,
    omit: Iterable[str] = (),
    replace: Mapping[str, NDArray[Any]] | None = None,
    seed: int = 0,
) -> Path:
    """Write a model and return ``path``.

    Parameters
    ----------
    types : str or mapping
        Tensor type of all matrices, or by a part of their names, the first that fits; ``""`` fits all. Vectors are F32.
    biases : bool, optional
        Of Q, K and V; by default qwen2 has them.
    rope_factors : iterable of float, optional
        Contents of ``rope_freqs.weight``.
    metadata : mapping, optional
        More keys, or other values: ``{"rope.freq_base": 5e5}``. Names that begin with none of `COMMON` are the
        architecture's. None leaves a key out. Whole numbers are written as uint32, or int32 if negative.
    omit : iterable of str
        Names of tensors to leave out.
    replace : mapping, optional
        Tensors to write instead of random ones, or in addition to them: arrays of float32.
    """
    rng = np.random.default_rng(seed)
    size = head_dim or width // heads
    keys: dict[str, Any] = {
        "general.name": "tiny",
        "block_count": layers,
        "context_length": context,
        "embedding_length": width,
        "feed_forward_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": size,
    }
    if head_dim is not None:
        keys |= {"attention.key_length": size, "attention.value_length": size}
    if tokenizer:
        keys |= tokenizer_keys(vocabulary)
    keys |= metadata or {}
    writer = GGUFWriter(path, architecture)
    for key, value in keys.items():
        if value is not None:
            _add(writer, key if key.startswith(COMMON) else f"{architecture}.{key}", value)
    biases = architecture == "qwen2" if biases is None else biases
    shapes = tensor_shapes(architecture, layers, width, heads, kv_heads, size, hidden, vocabulary, tied, biases)
    given = dict(replace or {})
    if rope_factors is not None:
        given["rope_freqs.weight"] = np.asarray(list(rope_factors), np.float32)
    for name, shape in shapes.items():
        if name in omit:
            continue
        if name in given:
            writer.add_tensor(name, given.pop(name))
        elif len(shape) == 1:
            offset, spread = (0.0, 0.3) if name.endswith("bias") else (1.0, 0.15)
            writer.add_tensor(name, rng.normal(offset, spread, shape).astype(np.float32))
        else:
            kind = types if isinstance(types, str) else next(kind for part, kind in types.items() if part in name)
            spread = (3 if name in ("token_embd.weight", "output.weight") else 1) * shape[1] ** -0.5
            raw = random_tensor(rng, shape, kind, spread)
            writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind])
    for name, values in given.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensor_shapes(
    architecture: str,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
    vocabulary: int,
    tied: bool,
    biases: bool,
) -> dict[str, tuple[int, ...]]:
    """Shapes as NumPy has them, by name."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, width)}
    for i in range(layers):
        block = f"blk.{i}."
        shapes[block + "attn_norm.weight"] = (width,)
        for role, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            shapes[f"{block}attn_{role}.weight"] = (count * head_dim, width)
            if biases:
                shapes[f"{block}attn_{role}.bias"] = (count * head_dim,)
            if architecture == "qwen3" and role != "v":
                shapes[f"{block}attn_{role}_norm.weight"] = (head_dim,)
        shapes[block + "attn_output.weight"] = (width, heads * head_dim)
        shapes[block + "ffn_norm.weight"] = (width,)
        shapes[block + "ffn_gate.weight"] = shapes[block + "ffn_up.weight"] = (hidden, width)
        shapes[block + "ffn_down.weight"] = (width, hidden)
    shapes["output_norm.weight"] = (width,)
    if not tied:
        shapes["output.weight"] = (vocabulary, width)
    return shapes


def random_tensor(rng: np.random.Generator, shape: tuple[int, ...], kind: str, spread: float) -> NDArray[Any]:
    """Values with a standard deviation of about ``spread``, as the type stores them."""
    if kind not in SCALE_BYTES:
        values = rng.normal(0, spread, shape).astype(np.float32)
        return quantize(values, GGMLQuantizationType[kind])
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    assert shape[1] % block == 0, f"{kind} wants columns in multiples of {block}"
    raw = rng.integers(0, 256, (shape[0], shape[1] // block, block_bytes), np.uint8)
    scales = rng.uniform(0.5, 1.5, (*raw.shape[:2], len(SCALE_BYTES[kind])))
    scales[:, :, 1:] *= MIDDLE.get(kind, 1.0)
    _set_scales(raw, kind, scales)
    unscaled = dequantize(raw.reshape(shape[0], -1), GGMLQuantizationType[kind])
    _set_scales(raw, kind, spread / float(unscaled.std()) * scales)
    return raw.reshape(shape[0], -1)


def tokenizer_keys(vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """Metadata of a byte-level BPE with `SPECIAL` tokens, all bytes and `MERGES`, filled up with unused tokens."""
    tokens = [*SPECIAL, *byte_symbols(), *(merge.replace(" ", "") for merge in MERGES)]
    kinds = [2, *[3] * (len(SPECIAL) - 1), *[1] * (len(tokens) - len(SPECIAL))]
    unused = vocabulary - len(tokens)
    assert unused >= 0, f"a vocabulary of {vocabulary} is too small"
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*tokens, *(f"<unused{i}>" for i in range(unused))],
        "tokenizer.ggml.token_type": [*kinds, *[5] * unused],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.unknown_token_id": UNKNOWN,
        "tokenizer.ggml.add_bos_token": False,
    }


def byte_symbols() -> list[str]:
    """The character that stands for each byte in a byte-level BPE, as GPT-2 chose them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _set_scales(raw: NDArray[np.uint8], kind: str, scales: NDArray[np.float64]) -> None:
    for i, at in enumerate(SCALE_BYTES[kind]):
        raw[:, :, at : at + 2] = scales[:, :, i].astype(np.float16)[..., None].view(np.uint8)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_int32 if value < 0 else writer.add_uint32)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)

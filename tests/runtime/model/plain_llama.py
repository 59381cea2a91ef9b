"""Logits of a GGUF file's model in float64, as plainly as NumPy allows.

Nothing of `lowbit` is used: the gguf package reads and dequantises, heads stay in the order of the file, and each
architecture's rotation is written out for that order. Needs memory for all weights in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Plain:
    """A model in float64.

    Parameters
    ----------
    path : path-like
        A GGUF file of the architecture llama, qwen2 or qwen3.
    """

    def __init__(self, path: str | Path) -> None:
        reader = GGUFReader(path)
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._weights: dict[str, Floats] = {}
        self.architecture = self._fields["general.architecture"].contents()
        self.heads = self._key("attention.head_count")
        self.kv_heads = self._key("attention.head_count_kv", self.heads)
        self.head_dim = self._key("attention.key_length", self._key("embedding_length") // self.heads)
        self.layers = self._key("block_count")
        self.window = self._key("attention.sliding_window", 0)
        self.eps = self._key("attention.layer_norm_rms_epsilon")
        self.dims = self._key("rope.dimension_count", self.head_dim)

    def logits(self, tokens: Sequence[int]) -> Floats:
        """Shape (n, vocabulary): after each of the ``tokens``."""
        x = self.weight("token_embd.weight")[list(tokens)]
        for i in range(self.layers):
            x = x + self._attention(f"blk.{i}.", self._normed(x, f"blk.{i}.attn_norm.weight"))
            x = x + self._feed_forward(f"blk.{i}.", self._normed(x, f"blk.{i}.ffn_norm.weight"))
        head = "output.weight" if "output.weight" in self._tensors else "token_embd.weight"
        return self._normed(x, "output_norm.weight") @ self.weight(head).T

    def weight(self, name: str) -> Floats:
        if name not in self._weights:
            tensor = self._tensors[name]
            self._weights[name] = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float64)
        return self._weights[name]

    def _key(self, name: str, default: Any = None) -> Any:
        field = self._fields.get(f"{self.architecture}.{name}")
        return default if field is None else field.contents()

    def _attention(self, block: str, x: Floats) -> Floats:
        q, k, v = (self._project(block, role, x) for role in "qkv")
        if block + "attn_q_norm.weight" in self._tensors:
            q, k = (self._normed(y, f"{block}attn_{role}_norm.weight") for y, role in ((q, "q"), (k, "k")))
        q, k = self._rotated(q), self._rotated(k)
        count = len(x)
        age = np.arange(count)[:, None] - np.arange(count)[None, :]
        visible = (age >= 0) & ((age < self.window) if self.window else True)
        out = np.empty((count, self.heads, self.head_dim))
        for head in range(self.heads):
            shared = head // (self.heads // self.kv_heads)
            scores = q[:, head] @ k[:, shared].T / np.sqrt(self.head_dim)
            scores = np.where(visible, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, shared]
        return out.reshape(count, -1) @ self.weight(block + "attn_output.weight").T

    def _project(self, block: str, role: str, x: Floats) -> Floats:
        y = x @ self.weight(f"{block}attn_{role}.weight").T
        if f"{block}attn_{role}.bias" in self._tensors:
            y = y + self.weight(f"{block}attn_{role}.bias")
        return y.reshape(len(x), -1, self.head_dim)

    def _feed_forward(self, block: str, x: Floats) -> Floats:
        gate = x @ self.weight(block + "ffn_gate.weight").T
        return (gate / (1 + np.exp(-gate)) * (x @ self.weight(block + "ffn_up.weight").T)) @ self.weight(
            block + "ffn_down.weight"
        ).T

    def _normed(self, x: Floats, name: str) -> Floats:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps) * self.weight(name)

    def _rotated(self, x: Floats) -> Floats:
        """``x`` of shape (n, heads, head_dim); llama files have pairs side by side, the others half a head apart."""
        frequencies, scale = self.frequencies()
        angles = np.arange(len(x))[:, None, None] * frequencies
        cosine, sine = scale * np.cos(angles), scale * np.sin(angles)
        if self.architecture == "llama":
            first, second = slice(0, self.dims, 2), slice(1, self.dims, 2)
        else:
            first, second = slice(0, self.dims // 2), slice(self.dims // 2, self.dims)
        out = x.copy()
        out[..., first] = x[..., first] * cosine - x[..., second] * sine
        out[..., second] = x[..., first] * sine + x[..., second] * cosine
        return out

    def frequencies(self) -> tuple[Floats, float]:
        """Radians for each position, and what rotated channels are multiplied by."""
        base, dims = self._key("rope.freq_base", 10000.0), self.dims
        wavelengths = 2 * np.pi * base ** (np.arange(0, dims, 2) / dims)
        if "rope_freqs.weight" in self._tensors:
            wavelengths = wavelengths * self.weight("rope_freqs.weight")
        kind = self._key("rope.scaling.type", "linear")
        factor = self._key("rope.scaling.factor", self._key("rope.scale_linear", 1.0)) or 1.0
        scale = self._key("rope.scaling.attn_factor", 1.0)
        if kind == "linear":
            wavelengths = wavelengths * factor
        if kind != "yarn":
            return 2 * np.pi / wavelengths, scale
        context = self._key("rope.scaling.original_context_length", self._key("context_length"))

        def channel(turns: float) -> float:
            """The channel pair that makes so many turns in the original context."""
            return dims * np.log(context / turns / (2 * np.pi)) / np.log(base) / 2

        low = max(np.floor(channel(self._key("rope.scaling.yarn_beta_fast", 32.0))), 0)
        high = min(np.ceil(channel(self._key("rope.scaling.yarn_beta_slow", 1.0))), dims - 1)
        high += 0.001 if low == high else 0
        blend = np.clip((np.arange(dims // 2) - low) / (high - low), 0, 1)
        frequencies = 2 * np.pi / wavelengths
        return frequencies * (1 - blend) + frequencies / factor * blend, scale * (0.1 * np.log(factor) + 1)


def logits(path: str | Path, tokens: Sequence[int]) -> Floats:
    """Logits after each of the ``tokens``, shape (n, vocabulary)."""
    return Plain(path).logits(tokens)

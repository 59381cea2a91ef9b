"""A model's shape: what a GGUF file's metadata and tensors say of it, checked against each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .gguf_file import GgufFile
from .gguf_header import shown
from .rope import FACTORS, Rope

EMBEDDING, HEAD, LAST_NORM = "token_embd.weight", "output.weight", "output_norm.weight"

ADJACENT_PAIRS = ("llama",)
"""Architectures whose files order rows of Q and K so that channels 2i and 2i + 1 of a head are rotated as a pair."""


@dataclass(frozen=True)
class Traits:
    """How an architecture differs from the others; None for what each file may have or not."""

    qk_norm: bool = False
    qkv_bias: bool | None = False


ARCHITECTURES = {
    "llama": Traits(qkv_bias=None),
    "qwen2": Traits(qkv_bias=None),
    "qwen3": Traits(qk_norm=True, qkv_bias=None),
}

NEUTRAL: dict[str, tuple[float | bool, ...]] = {
    "expert_count": (0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.causal": (True,),
    "attention.sliding_window_pattern": (),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Keys that would change what is computed, and the values with which they do not."""


@dataclass(frozen=True)
class Config:
    """A decoder of the Llama family.

    Attributes
    ----------
    architecture, name : str
    layers, width, heads, kv_heads, head_dim : int
    hidden : int
        Channels between the feed-forward matrices.
    vocabulary : int
        Rows of the embedding.
    context : int
        Tokens that the model was trained for.
    norm_eps : float
    rope : Rope
        Pairs are channels i and i + dims/2, for which rows of Q and K are put into `row_order`.
    tied : bool
        Whether the embedding is the head, too.
    qk_norm : bool
        Whether heads of Q and K are normalised, each by itself.
    qkv_bias : bool
        Whether Q, K and V have biases.
    window : int
        Tokens that attention reaches back, the current one included; 0 for all.
    """

    architecture: str
    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    context: int
    norm_eps: float
    rope: Rope
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    window: int

    @classmethod
    def read(cls, file: GgufFile) -> Self:
        """The model in ``file``; every tensor that it needs is there, in its shape, and no other.

        Raises
        ------
        ModelError
            Naming what is missing, contradictory or unsupported.
        """
        architecture = file.text("general.architecture")
        traits = ARCHITECTURES.get(architecture)
        if traits is None:
            known = ", ".join(ARCHITECTURES)
            raise file.error(f"the architecture {shown(architecture)} is unsupported (supported: {known})")
        parts = file.integer("split.count", 1, least=0, largest=1 << 16)
        if parts > 1:
            raise file.error(f"one of {parts} parts of a model: merge them with llama-gguf-split --merge")
        key = f"{architecture}."
        _refuse_variations(file, key)
        width, heads = file.integer(key + "embedding_length"), file.integer(key + "attention.head_count")
        kv_heads = file.integer(key + "attention.head_count_kv", heads)
        if heads % kv_heads:
            raise file.error(f"{heads} query heads do not divide into {kv_heads} key/value heads")
        head_dim = file.integer(key + "attention.key_length", width // heads, largest=1 << 12)
        if key + "attention.key_length" not in file and width % heads:
            raise file.error(f"an embedding of {width} channels does not divide into {heads} heads")
        value_length = file.integer(key + "attention.value_length", head_dim)
        if value_length != head_dim:
            raise file.error(f"keys of {head_dim} and values of {value_length} channels: must be equal")
        context = file.integer(key + "context_length", largest=1 << 31)
        config = cls(
            architecture=architecture,
            name=file.text("general.name", file.path.stem),
            layers=file.integer(key + "block_count", largest=1 << 12),
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            hidden=file.integer(key + "feed_forward_length"),
            vocabulary=file.tensor(EMBEDDING).rows,
            context=context,
            norm_eps=file.real(key + "attention.layer_norm_rms_epsilon", least=0.0, largest=0.1),
            rope=Rope.read(file, architecture, head_dim, context),
            tied=HEAD not in file.tensors,
            qk_norm=traits.qk_norm,
            qkv_bias="blk.0.attn_q.bias" in file.tensors if traits.qkv_bias is None else traits.qkv_bias,
            window=file.integer(key + "attention.sliding_window", 0, least=0, largest=1 << 31),
        )
        config._check(file)
        return config

    def shapes(self) -> Iterator[tuple[str, int, int]]:
        """Name, rows and columns of every tensor that the model has; vectors have one row."""
        query, shared = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield EMBEDDING, self.vocabulary, self.width
        for layer in range(self.layers):
            yield f"blk.{layer}.attn_norm.weight", 1, self.width
            for role, rows in (("q", query), ("k", shared), ("v", shared)):
                yield f"blk.{layer}.attn_{role}.weight", rows, self.width
                if self.qkv_bias:
                    yield f"blk.{layer}.attn_{role}.bias", 1, rows
            if self.qk_norm:
                yield f"blk.{layer}.attn_q_norm.weight", 1, self.head_dim
                yield f"blk.{layer}.attn_k_norm.weight", 1, self.head_dim
            yield f"blk.{layer}.attn_output.weight", self.width, query
            yield f"blk.{layer}.ffn_norm.weight", 1, self.width
            yield f"blk.{layer}.ffn_gate.weight", self.hidden, self.width
            yield f"blk.{layer}.ffn_up.weight", self.hidden, self.width
            yield f"blk.{layer}.ffn_down.weight", self.width, self.hidden
        yield LAST_NORM, 1, self.width
        if not self.tied:
            yield HEAD, self.vocabulary, self.width

    def row_order(self, names: str | Sequence[str]) -> NDArray[np.int64] | None:
        """Which row of the stacked tensors ``names`` each row of the result is, so that pairs of the rotation are
        channels i and i + dims/2; None if rows lie so in the file. For biases it is the order of elements.
        """
        names = [names] if isinstance(names, str) else list(names)
        if self.architecture not in ADJACENT_PAIRS or not any(_rotated(name) for name in names):
            return None
        rows = {name: count * columns if count == 1 else count for name, count, columns in self.shapes()}
        orders, start = [], 0
        for name in names:
            order = np.arange(rows[name])
            if _rotated(name):
                within = np.arange(self.head_dim)
                within[: self.rope.dims] = within[: self.rope.dims].reshape(-1, 2).T.ravel()
                order = (np.arange(rows[name] // self.head_dim)[:, None] * self.head_dim + within).ravel()
            orders.append(start + order)
            start += rows[name]
        return np.concatenate(orders)

    def _check(self, file: GgufFile) -> None:
        """Compare the file's tensors with `shapes`."""
        expected = set()
        for name, rows, columns in self.shapes():
            info = file.tensor(name)
            if (info.rows, info.columns) != (rows, columns):
                raise file.error(
                    f"tensor {name!r} has {info.rows} rows of {info.columns}, its metadata ask for {rows} of {columns}"
                )
            expected.add(name)
        for name in file.tensors:
            if name not in expected and name != FACTORS:
                raise file.error(f"tensor {shown(name)} has no place in the {self.architecture} models supported here")


def _rotated(name: str) -> bool:
    return ".attn_q." in name or ".attn_k." in name


def _refuse_variations(file: GgufFile, prefix: str) -> None:
    """Refuse keys that ask for a computation that decoding does not do."""
    for name, neutral in NEUTRAL.items():
        if prefix + name in file and not file.is_any(prefix + name, neutral):
            raise file.error(f"{prefix}{name} asks for something that is unsupported")

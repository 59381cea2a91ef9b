"""`LowbitCache`: made from a model's configuration."""

from __future__ import annotations

import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..kernels.cpu.pool import allowed_cpus
from ..kernels.errors import ModelError, ProblemError
from ..kernels.problem import Problem
from .cache_types import cache_precision
from .select import Database, FallbackWarning, open_db
from .single_layer import Choices, attention_problem
from .torch_cache import LowbitLayer

SEGMENT_TOKENS = 8192
"""Tokens of a segment where a cache may become as long as the model's context."""

LAYERS = {"full_attention": False, "sliding_attention": True}
"""Types of layers that keep keys and values, and whether they have a window."""


class LowbitCache(Cache):
    """Keys and values of a model of Hugging Face transformers on the CPU.

    With ``model.set_attn_implementation("lowbit")`` attention reads them as they lie. With every other attention they
    are turned into tensors of the model's type each time, which is as right, and slow.

    Not for several threads at once. ``copy.deepcopy`` makes a cache of the same tokens that shares their memory.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The model's.
    cache_type_k, cache_type_v : str
        Formats of keys and values: f16, q8_0 or q4_0, or this project's names fp16, int8 and int4.
    max_tokens : int, optional
        Most tokens of a sequence, as many as the model was trained for unless given. Memory is committed as tokens
        come.
    database : Database or path-like, optional
        Tuned choices; layouts are untuned without.
    threads : int, optional
        Most threads of attention; as many as torch uses unless given.

    Raises
    ------
    ModelError
        If the model has layers that the cache is not made for.
    ProblemError
        For a number out of range, or an unknown format.
    DatabaseError
        If the database is missing or refused.
    """

    def __init__(
        self,
        config: Any,
        cache_type_k: str = "f16",
        cache_type_v: str = "f16",
        *,
        max_tokens: int | None = None,
        database: Database | str | PathLike[str] | None = None,
        threads: int | None = None,
    ) -> None:
        precisions = cache_precision(cache_type_k), cache_precision(cache_type_v)
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(f"a LowbitCache is for decoders, and {config.model_type} has an encoder")
        text = config.get_text_config(decoder=True)
        windows = layer_windows(text)
        most = getattr(text, "max_position_embeddings", None) if max_tokens is None else max_tokens
        if not isinstance(most, int) or not 1 <= most <= 1 << 24:
            raise ProblemError(f"max_tokens must be 1 to {1 << 24}, not {most}")
        limit = min(torch.get_num_threads(), len(allowed_cpus())) if threads is None else threads
        if not 1 <= limit <= 256:
            raise ProblemError(f"threads must be 1 to 256, not {limit}")
        heads = text.num_attention_heads
        if not isinstance(heads, int):
            raise ModelError(f"a LowbitCache does not support {config.model_type}, whose layers differ in heads")
        opened = _database(database)
        softcap = float(getattr(text, "attn_logit_softcapping", None) or 0.0)
        known: dict[tuple[int, int, int], Choices] = {}

        def choices_of(kv_heads: int, head_dim: int, window: int) -> Choices:
            """Shared by layers of one shape, whose number of query heads is the same."""
            key = kv_heads, head_dim, window
            if key not in known:
                problem = attention_problem(heads, kv_heads, head_dim, precisions, window, softcap)
                if database is not None:
                    _tell(opened, problem, most)
                segment = SEGMENT_TOKENS if max_tokens is None and not window else None
                known[key] = Choices(problem, opened, limit, most, segment)
            return known[key]

        super().__init__(layers=[LowbitLayer(choices_of, window, most, softcap) for window in windows])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """New keys and values of a layer; see `lowbit.runtime.torch_cache.LowbitLayer.update`.

        Raises
        ------
        ProblemError
            If an earlier pass through the model ended half-way.
        """
        if layer_idx == 0 and self.layers[-1].is_initialized:
            first, last = (each.get_seq_length() for each in (self.layers[0], self.layers[-1]))
            if first != last:
                raise ProblemError(
                    f"an earlier pass ended half-way, with {first} tokens in the first layer and {last} in the last: "
                    f"call crop({last}) or reset() of the cache"
                )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values with their scales that are in use."""
        return sum(each.nbytes for each in self.layers)

    @property
    def batch_size(self) -> int:
        """Sequences; -1 before the first tokens."""
        return len(self.layers[0].sequences) if self.layers[0].is_initialized else -1


def _database(given: Database | str | PathLike[str] | None) -> Database:
    if given is None:
        return Database(Path("no database"), (), {})
    return given if isinstance(given, Database) else open_db(Path(given))


def _tell(database: Database, problem: Problem, tokens: int) -> None:
    """Warn if a database that was given has nothing for the model."""
    if database.choose(problem, tokens).how not in ("exact", "nearest"):
        warnings.warn(
            f"{database.path} has no winner for {problem.key}: using untuned layouts", FallbackWarning, stacklevel=2
        )


def layer_windows(config: Any) -> list[int]:
    """The window of each layer, 0 for none.

    Raises
    ------
    ModelError
        If a layer keeps something else than its own keys and values.
    """
    count = config.num_hidden_layers
    shared = getattr(config, "num_kv_shared_layers", None) or getattr(config, "kv_sharing_modes", None)
    if shared:
        raise ModelError(f"a LowbitCache does not support {config.model_type}, whose layers share keys and values")
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is None:
        chunked = getattr(config, "attention_chunk_size", None)
        plain = "chunked_attention" if chunked and not window else "full_attention"
        types = ["sliding_attention" if window else plain] * count
    windows = []
    for name in types:
        if name not in LAYERS:
            raise ModelError(f"a LowbitCache does not support {config.model_type}, which has layers of type {name}")
        if LAYERS[name] and not window:
            raise ModelError(f"{config.model_type} has sliding windows of unknown size")
        windows.append(int(window or 0) if LAYERS[name] else 0)
    return windows

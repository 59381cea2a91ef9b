"""The attention function and the mask function that Hugging Face transformers calls by the name ``lowbit``."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kernels.errors import ProblemError
from .torch_held import HeldTensor

NAME = "lowbit"

INSTEAD = "use the cache with another attention, such as set_attn_implementation('eager'), which is slower"

UNSUPPORTED = {
    "s_aux": "attention sinks",
    "position_bias": "position biases",
    "head_mask": "head masks",
    "output_attentions": "attention weights as an output",
    "dropout": "dropout: call model.eval()",
}
"""Arguments of attention functions that change what is computed, and what is asked for with them."""


@torch.compiler.disable
def lowbit_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over what a `lowbit.runtime.transformers_cache.LowbitCache` holds; stores the new keys and values.

    Parameters
    ----------
    module : torch.nn.Module
        The layer.
    query : tensor, shape (batch, heads, positions, head_dim)
    key, value : HeldTensor
        What the cache's ``update`` returned.
    attention_mask : bool tensor, shape (batch, tokens), optional
        What `lowbit_mask` returned.
    scaling : float, optional
        Of scores; 1/√head_dim unless given.

    Returns
    -------
    tensor, shape (batch, positions, heads, head_dim)
    None
        No weights.

    Raises
    ------
    ProblemError
        For keys and values that are no `LowbitCache`'s, and for whatever the kernels do not compute, by name.
    CacheFullError
        If the context is full.
    """
    if not isinstance(key, HeldTensor) or not isinstance(value, HeldTensor):
        raise ProblemError(
            "the attention 'lowbit' reads a LowbitCache: pass past_key_values=LowbitCache(model.config), or use "
            "another attention"
        )
    try:
        _check(module, key.held.layer, attention_mask, options)
        return key.held.attend(query, attention_mask, scaling), None
    except BaseException:
        key.held.abandon()
        raise


def _check(module: Any, layer: Any, attention_mask: torch.Tensor | None, options: dict[str, Any]) -> None:
    """Refuse what the kernels do not compute."""
    for name, meaning in UNSUPPORTED.items():
        asked = options.get(name)
        if isinstance(asked, torch.Tensor) or asked:
            raise ProblemError(f"the attention 'lowbit' does not support {meaning}; {INSTEAD}")
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ProblemError(f"the attention 'lowbit' does not support attention to later tokens; {INSTEAD}")
    if attention_mask is not None and (attention_mask.ndim != 2 or attention_mask.dtype != torch.bool):
        raise ProblemError(f"the attention 'lowbit' does not support masks of {attention_mask.ndim} axes; {INSTEAD}")
    for name, known, given in (
        ("sliding_window", layer.window, options.get("sliding_window", layer.window)),
        ("softcap", layer.softcap, options.get("softcap")),
    ):
        if (given or 0) != known:
            raise ProblemError(f"the model's attention has {name} {given}, and the cache was made for {known or None}")


def lowbit_mask(
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **others: Any,
) -> torch.Tensor | None:
    """Which tokens are hidden from all queries; that later tokens are hidden too is understood.

    Parameters
    ----------
    batch_size, kv_length, kv_offset : int
    mask_function : callable
        The pattern.
    attention_mask : bool tensor, shape (batch, tokens), optional
        False for padding.
    local_size : int, optional
        Of a window, which the cache knows.
    allow_is_causal_skip : bool
        False for any pattern that is not causal, padding and windows apart.

    Returns
    -------
    bool tensor, shape (batch, tokens), or None
        None if nothing is hidden.

    Raises
    ------
    ProblemError
        For another pattern.
    """
    if not allow_is_causal_skip or (mask_function is not causal_mask_function and local_size is None):
        raise ProblemError(
            f"the attention 'lowbit' supports causal masks, sliding windows and padding, and this model asks for more; "
            f"{INSTEAD}"
        )
    if attention_mask is None:
        return None
    missing = kv_offset + kv_length - attention_mask.shape[1]
    mask = attention_mask.bool()[:, : kv_offset + kv_length]
    if missing > 0:
        mask = torch.nn.functional.pad(mask, (0, missing), value=False)
    return None if bool(mask.all()) else mask.expand(batch_size, -1)


def register() -> None:
    """Make ``lowbit`` the name of this attention in transformers; importing the cache does it."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, lowbit_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lowbit_mask)

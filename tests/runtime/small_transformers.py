"""Small models of Hugging Face transformers, and their logits with one cache or another."""

from __future__ import annotations

import inspect
import warnings
from contextlib import contextmanager

import numpy as np
import torch
import transformers
from lowbit.kernels.problem import PRECISIONS
from lowbit.kernels.quantize import quantize

CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
"""What models call the argument, by release."""

TYPES = {"f16": "fp16", "q8_0": "w8a8", "q4_0": "w4a8"}
SHAPE = {
    "vocab_size": 200, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


@contextmanager
def decoding():
    """On one thread, without gradients."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
    torch.set_num_threads(before)


def made(family="Llama", heads=4, kv_heads=2, head_dim=64, attention="lowbit", **settings):
    """A small random model whose attention is sharp enough to matter."""
    config = getattr(transformers, f"{family}Config")(
        **SHAPE, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, **settings
    )
    torch.manual_seed(heads + head_dim)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, weight in model.named_parameters():
        if "q_proj.weight" in name or "k_proj.weight" in name:
            weight.data *= 4
    model.set_attn_implementation(attention)
    return model


class Rounded(transformers.DynamicCache):
    """The library's own cache, of values as they are stored."""

    def __init__(self, config, cache_type):
        super().__init__(config=config)
        self.precision = PRECISIONS[TYPES[cache_type]]

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        def rounded(tensor):
            flat = tensor.reshape(-1, *tensor.shape[-2:]).float().numpy()
            return torch.from_numpy(quantize(flat, self.precision).dequantize()).to(tensor.dtype).reshape(tensor.shape)

        return super().update(rounded(key_states), rounded(value_states), layer_idx, *args, **kwargs)


def logits(model, cache, ids, parts=(), mask=None):
    """Of all positions, passed in parts of these sizes and the rest one by one."""
    found, done = [], 0
    for size in [*parts, *[1] * (ids.shape[1] - sum(parts))]:
        given = {} if mask is None else {"attention_mask": mask[:, : done + size]}
        if mask is not None:
            given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, done : done + size]
        found.append(model(ids[:, done : done + size], **{CACHE: cache}, **given).logits)
        done += size
    return torch.cat(found, 1).double().numpy()


def eagerly(model, cache, *args, **kwargs):
    """The same model's logits with the library's attention."""
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")
    found = logits(model, cache, *args, **kwargs)
    model.set_attn_implementation(attention)
    return found


def ids_of(batch, tokens, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(1, 200, (batch, tokens)))


def error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def generated(model, ids, cache, **options):
    return model.generate(ids, **{CACHE: cache}, max_new_tokens=24, do_sample=False, **options)[
        :, ids.shape[1] :
    ].tolist()

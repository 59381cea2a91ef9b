"""Keys and values that a cache holds, as tensors that are only made if somebody looks into them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map


class Held(Protocol):
    """What one call added to one layer of a cache."""

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values that the added positions may see, of shape (batch, kv_heads, tokens, head_dim)."""
        ...


class HeldTensor(torch.Tensor):
    """Keys (role 0) or values (role 1) of a layer: shape and type of a tensor, and none of its memory.

    An attention function that knows them takes `held` and reads the cache itself. For every other operation they turn
    into an ordinary tensor of what the cache holds, so that any attention function may be used, at the price of that
    tensor.

    Attributes
    ----------
    held : Held
    """

    held: Any
    _role: int

    @staticmethod
    def __new__(cls, held: Held, role: int, shape: tuple[int, ...], dtype: torch.dtype) -> HeldTensor:
        tensor: HeldTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device="cpu")
        tensor.held, tensor._role = held, role
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.held.tensors()[value._role] if isinstance(value, HeldTensor) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

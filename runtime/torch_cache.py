"""A cache of Hugging Face transformers whose keys and values lie in segments of tuned layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import CacheLayerMixin

from ..kernels.errors import CacheFullError, ProblemError
from ..kernels.reference import softmax_scale
from .single_layer import Choices, SingleLayer
from .torch_held import HeldTensor

MOST_SEGMENTS = 16
"""Segments that a sequence is merged from: beams that part and end leave a few tokens in each."""

Visible = NDArray[np.bool_]


class Update:
    """New keys and values of one layer, from when the model gives them until its attention asks for the result.

    Only then is known which of them are padding, and whether somebody wants tensors; see `HeldTensor`.
    """

    def __init__(self, layer: LowbitLayer, k: torch.Tensor, v: torch.Tensor) -> None:
        self.layer, self.k, self.v = layer, k, v
        self.stop = layer.get_seq_length() + k.shape[2]
        self.stored = False
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = None

    def attend(self, query: torch.Tensor, mask: torch.Tensor | None, scaling: float | None) -> torch.Tensor:
        """Store, and attend; see `lowbit.runtime.torch_attention.lowbit_attention`."""
        if self.stored:
            raise ProblemError(
                "the attention 'lowbit' does not support keys and values that several layers read; use the cache with "
                "another attention"
            )
        return self.layer.attend(self, query, mask, scaling)

    def abandon(self) -> None:
        """Never store it, if it is not stored yet."""
        self.layer.abandon(self)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Store, and give what is held."""
        if self._tensors is None:
            self._tensors = self.layer.tensors(self)
        return self._tensors


class LowbitLayer(CacheLayerMixin):
    """One layer of a `lowbit.runtime.transformers_cache.LowbitCache`, of all sequences of a batch.

    Parameters
    ----------
    choices_of : callable
        From key/value heads, channels and window to the layer's `Choices`.
    window : int
        Latest tokens that a query sees, itself included; 0 for all of them.
    max_tokens : int
    softcap : float
        Of scores, or 0.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self, choices_of: Callable[[int, int, int], Choices], window: int, max_tokens: int, softcap: float
    ) -> None:
        super().__init__()
        self.window, self.max_tokens = window, max_tokens
        self.is_sliding = window > 0
        if window:
            self.sliding_window = window
        self._choices_of, self.softcap = choices_of, softcap
        self._choices: Choices | None = None
        self._forget()

    def _forget(self) -> None:
        self.sequences: list[SingleLayer] = []
        self._length = 0
        self._visible: Visible | None = None  # (batch, length), or None if nothing is hidden
        self._pending: Update | None = None
        self.is_initialized = False

    def __repr__(self) -> str:
        held = ", ".join(str(each.cache) for each in self.sequences)
        return f"LowbitLayer({held})"

    # -- growing --------------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make an empty cache for each sequence of the batch."""
        batch, kv_heads, _, head_dim = key_states.shape
        self._choices = self._choices_of(kv_heads, head_dim, self.window)
        self.sequences = [SingleLayer(self._choices) for _ in range(batch)]
        self.is_initialized = True

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[HeldTensor, HeldTensor]:
        """New keys and values.

        Parameters
        ----------
        key_states, value_states : tensor, shape (batch, kv_heads, tokens, head_dim)

        Returns
        -------
        keys, values : HeldTensor, shape (batch, kv_heads, tokens seen, head_dim)

        Raises
        ------
        ProblemError
            For tensors that cannot be stored.
        CacheFullError
            If there is no room for them.
        """
        self._settle()
        self._check(key_states, value_states)
        count = key_states.shape[2]
        if self._length + count > self.max_tokens:
            raise CacheFullError(
                f"the cache holds {self._length} of at most {self.max_tokens} tokens: no room for {count} more; "
                "make it with a larger max_tokens"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens, _ = self.get_mask_sizes(count)
        self._pending = update = Update(self, key_states, value_states)
        shape = (*key_states.shape[:2], tokens, key_states.shape[3])
        return HeldTensor(update, 0, shape, key_states.dtype), HeldTensor(update, 1, shape, value_states.dtype)

    def attend(
        self, update: Update, query: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
    ) -> torch.Tensor:
        """Store an update, and attend from its positions."""
        assert self._choices is not None
        problem = self._choices.problem
        batch, heads, count, head_dim = shape = (
            len(self.sequences), problem.heads, update.k.shape[2], problem.head_dim,
        )  # fmt: skip
        if query.shape != shape:
            raise ProblemError(f"queries must have shape {shape}, not {tuple(query.shape)}")
        visible = self._new_visible(mask, count)
        queries, k, v = (_array(each) for each in (query, update.k, update.v))
        usual = softmax_scale(head_dim)
        if scaling is not None and not math.isclose(scaling, usual, rel_tol=1e-6):
            queries = queries * np.float32(scaling / usual)
        out = np.zeros((batch, count, heads * head_dim), np.float32)
        for i, sequence in enumerate(self.sequences):
            if visible is None or visible[i].all():
                out[i] = sequence.attend(queries[i], k[i], v[i])
            elif visible[i].any():
                seen = visible[i]
                out[i, seen] = sequence.attend(queries[i][:, seen], k[i][:, seen], v[i][:, seen])
        self._stored(update, visible)
        return torch.from_numpy(out.reshape(batch, count, heads, head_dim)).to(query.dtype)

    def tensors(self, update: Update) -> tuple[torch.Tensor, torch.Tensor]:
        """Store an update, and give all that its positions may see; zeros where tokens are hidden."""
        count = update.k.shape[2]
        tokens, _ = self._mask_sizes(update.stop - count, count)
        if update.stored:
            if self._length != update.stop:
                raise ProblemError("keys and values were looked into after the cache had gone on")
            parts = [each.held(tokens) for each in self.sequences]
        else:
            k, v = _array(update.k), _array(update.v)
            parts = [each.append(k[i], v[i], min(tokens - count, each.length)) for i, each in enumerate(self.sequences)]
            self._stored(update, None)
        shape = (len(self.sequences), *update.k.shape[1:2], tokens, update.k.shape[3])
        both = []
        for role, like in enumerate((update.k, update.v)):
            whole = np.zeros(shape, np.float32)
            for i, held in enumerate(parts):
                if self._visible is None:
                    whole[i] = held[role]
                else:
                    shown = self._visible[i, self._length - tokens :]
                    whole[i][:, shown] = held[role][:, held[role].shape[1] - int(shown.sum()) :]
            both.append(torch.from_numpy(whole).to(like.dtype))
        return both[0], both[1]

    def abandon(self, update: Update) -> None:
        """Forget an update that is not stored yet: what failed leaves no trace."""
        if self._pending is update:
            self._pending = None

    def _new_visible(self, mask: torch.Tensor | None, count: int) -> Visible | None:
        """Which of the new tokens may be seen; None for all."""
        if mask is None:
            if self._visible is not None:
                raise ProblemError("tokens that were hidden must stay hidden: pass the whole attention_mask each time")
            return None
        given = mask.numpy()
        known, fresh = given[:, : self._length], given[:, self._length :]
        if fresh.shape != (len(self.sequences), count):
            raise ProblemError(
                f"an attention_mask of {given.shape} is for other tokens than {self._length} and {count}"
            )
        if not (known.all() if self._visible is None else np.array_equal(known, self._visible)):
            raise ProblemError("the attention_mask hides or shows tokens that it did not when they were stored")
        if self.window and (np.diff(given.astype(np.int8), axis=1) < 0).any():
            raise ProblemError("padding that is not on the left cannot be combined with a sliding window")
        return None if fresh.all() else fresh

    def _stored(self, update: Update, visible: Visible | None) -> None:
        count = update.k.shape[2]
        if visible is not None or self._visible is not None:
            shape = (len(self.sequences), self._length)
            before = np.ones(shape, np.bool_) if self._visible is None else self._visible
            fresh = np.ones((shape[0], count), np.bool_) if visible is None else visible
            self._visible = np.concatenate([before, fresh], axis=1)
        self._length += count
        update.stored, self._pending = True, None

    def _settle(self) -> None:
        """Store what nobody asked for: an update whose keys and values the model did not use."""
        if self._pending is not None:
            self._pending.tensors()

    def _check(self, k: torch.Tensor, v: torch.Tensor) -> None:
        for name, each in (("keys", k), ("values", v)):
            if each.device.type != "cpu":
                raise ProblemError(f"a LowbitCache is for models on the CPU, and {name} are on {each.device}")
            if each.requires_grad and torch.is_grad_enabled():
                raise ProblemError("a LowbitCache keeps no gradients: decode under torch.no_grad()")
        if k.ndim != 4 or k.shape != v.shape:
            raise ProblemError(f"keys {tuple(k.shape)} and values {tuple(v.shape)} must have one shape of four axes")
        if self.is_initialized:
            cache = self.sequences[0].cache
            shape = (len(self.sequences), cache.kv_heads, k.shape[2], cache.head_dim)
            if k.shape != shape:
                raise ProblemError(f"keys and values must have shape {shape}, as those before, not {tuple(k.shape)}")

    # -- shrinking and sharing ------------------------------------------------------------------------------------

    def crop(self, max_length: int) -> None:
        """Forget the latest tokens: ``-max_length`` of them or, if it is positive, those beyond so many."""
        self._settle()
        length = self._length + max_length if max_length <= 0 else min(max_length, self._length)
        if not self.is_initialized or length == self._length:
            return
        if length < 0:
            raise ProblemError(f"cannot remove {-max_length} tokens of {self._length}")
        for i, sequence in enumerate(self.sequences):
            gone = self._length - length if self._visible is None else int(self._visible[i, length:].sum())
            sequence.truncate(sequence.length - gone)
        self._length = length
        if self._visible is not None:
            self._visible = _unless_all(self._visible[:, :length])

    def reset(self) -> None:
        """Forget everything."""
        self._forget()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """For each sequence, which of the present ones it goes on from. Nothing is copied, or little."""
        self._settle()
        if not self.is_initialized:
            return
        chosen = [int(each) for each in beam_idx]
        parents, used = self.sequences, set()
        self.sequences = []
        for i in chosen:
            sequence = parents[i].fork() if i in used else parents[i]
            used.add(i)
            self.sequences.append(sequence.merged() if len(sequence.cache.segments) > MOST_SEGMENTS else sequence)
        if self._visible is not None:
            self._visible = _unless_all(self._visible[chosen])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence so many times."""
        self.reorder_cache(torch.arange(len(self.sequences)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some sequences."""
        self.reorder_cache(torch.arange(len(self.sequences))[indices])

    def __deepcopy__(self, memo: dict[int, Any]) -> LowbitLayer:
        """A layer of the same tokens that shares their memory, for prompts that several answers begin with."""
        self._settle()
        copy = LowbitLayer(self._choices_of, self.window, self.max_tokens, self.softcap)
        copy.sequences = [each.fork() for each in self.sequences]
        copy._choices, copy._length, copy._visible = self._choices, self._length, self._visible
        copy.is_initialized = self.is_initialized
        return copy

    def offload(self) -> None:
        """There is no other memory."""

    def prefetch(self) -> None:
        """There is no other memory."""

    # -- sizes ----------------------------------------------------------------------------------------------------

    def get_seq_length(self, *args: Any) -> int:
        """Tokens so far, hidden ones and those that left a window included."""
        return self._length if self._pending is None else self._pending.stop

    def get_max_length(self) -> int:
        """Most tokens."""
        return self.max_tokens

    def get_max_cache_shape(self) -> int:
        """Most tokens."""
        return self.max_tokens

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """How many tokens the next positions may see, and the first of them.

        Parameters
        ----------
        query_length : int or tensor
            Positions, or a tensor of them.
        """
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self._mask_sizes(self.get_seq_length(), count)

    def _mask_sizes(self, length: int, count: int) -> tuple[int, int]:
        first = max(length - self.window + 1, 0) if self.window else 0
        return length - first + count, first

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values with their scales that are in use."""
        return sum(each.cache.nbytes for each in self.sequences)


def _unless_all(visible: Visible) -> Visible | None:
    return None if visible.all() else visible


def _array(tensor: torch.Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().to(torch.float32).numpy()
    return array

"""One sequence being decoded: a cache, and the native programs that extend it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...kernels.errors import CacheFullError, ProblemError
from ...kernels.problem import Problem
from ..attention import SegmentedAttention
from ..kvcache import KVCache
from ..switching import PhaseSwitcher
from .forward import ForwardPass
from .program import Program
from .stored import Stored
from .tuned import Readers

if TYPE_CHECKING:
    from .model import Model

Float32 = NDArray[np.float32]

BLOCK_POSITIONS = 64
"""Positions of a prompt that pass through the network together: enough that matrices are read a small part of the
time, and few enough that what they become stays in a core's own cache."""

KEPT_PASSES = 6
"""Passes of different sizes that a session keeps."""


class Session:
    """Made by `Model.session`. Not safe to use from several threads at a time; sessions of one model take turns.

    Attributes
    ----------
    model : Model
    cache : KVCache
    context : int
        Most tokens.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        problem: Problem,
        readers: Readers,
        switcher: PhaseSwitcher | None,
        stored: Stored | None = None,
    ) -> None:
        self.model, self.cache = model, cache
        self.context = cache.capacity
        self._problem, self._readers, self._switcher = problem, readers, switcher
        if stored is None:
            k, v = (problem.stored(role).format for role in ("k", "v"))
            stored = Stored.of(k, v, cache.layers, cache.kv_heads, cache.head_dim)
        self._stored = stored
        self._compared = -1  # length at which layouts were compared last
        self._forward: dict[tuple[int, str], ForwardPass] = {}
        self._table = model.database.table(problem)

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self.cache.length

    def prefill(self, tokens: Sequence[int] | NDArray[np.integer]) -> Float32:
        """Append tokens.

        Parameters
        ----------
        tokens : sequence of int
            At least one.

        Returns
        -------
        ndarray of float32, shape (vocabulary,)
            Logits after the last one; valid until the next call.

        Raises
        ------
        CacheFullError
            If the context has no room for all of them; nothing is appended then.
        ProblemError
            If there is none, or one is not in the vocabulary.
        """
        given = self._checked(tokens)
        *_, (_, logits) = self._passes(given, "last")
        last: Float32 = logits[-1]
        return last

    def scores(self, tokens: Sequence[int] | NDArray[np.integer]) -> Iterator[tuple[int, Float32]]:
        """Append tokens, and give the logits after each of them.

        Yields
        ------
        first : int
            Index in ``tokens`` of the first of a few.
        logits : ndarray of float32, shape (few, vocabulary)
            Valid until the next ones are asked for.

        Raises
        ------
        CacheFullError, ProblemError
            As `prefill`.
        """
        yield from self._passes(self._checked(tokens), "all")

    def step(self, token: int) -> Float32:
        """Append one token: `prefill` for decoding.

        Raises
        ------
        CacheFullError, ProblemError
            As `prefill`.
        """
        if not isinstance(token, Integral) or not 0 <= token < self.model.config.vocabulary:
            raise ProblemError(f"token {token} is none of the {self.model.config.vocabulary} in the vocabulary")
        if self.cache.length >= self.context:
            raise self._full(1)
        self._follow_phase(1)
        _, logits = self._pass(np.array([token], np.int32), "last")
        last: Float32 = logits[-1]
        return last

    def truncate(self, length: int) -> None:
        """Forget all tokens from position ``length`` on.

        Raises
        ------
        ProblemError
            If there are not so many tokens.
        """
        self.cache.truncate(length)

    def fork(self) -> Session:
        """A session of the same tokens that shares their memory; each of the two then goes its own way."""
        return Session(self.model, self.cache.fork(), self._problem, self._readers, self._switcher, self._stored.fork())

    # -- passes -------------------------------------------------------------------------------------------------------

    def _passes(self, tokens: NDArray[np.int32], scores: str) -> Iterator[tuple[int, Float32]]:
        """Blocks of tokens, no larger than the cache's last segment has room for; only what is asked for is scored."""
        done = 0
        while done < len(tokens):
            self._follow_phase(len(tokens) - done)
            count, logits = self._pass(tokens[done:], scores)
            yield done, logits
            done += count

    def _pass(self, tokens: NDArray[np.int32], scores: str) -> tuple[int, Float32]:
        """Pass as many of ``tokens`` as go together; returns how many. What fails, or is interrupted, is forgotten."""
        before = self.cache.length
        try:
            count = self.cache.begin(min(BLOCK_POSITIONS, len(tokens)))
            schedule = self._table.choose(self.cache.length).candidate.schedule
            forward = self._forward_pass(count, "none" if scores == "last" and count < len(tokens) else scores)
            threads = schedule.threads if count == 1 else self.model.threads
            splits = schedule.splits if count == 1 else max(schedule.splits, self._block_splits)
            forward.run(tokens[:count], splits, min(threads, self.model.threads))
        except BaseException:
            self.cache.truncate(before)
            raise
        return count, forward.logits

    def _follow_phase(self, ahead: int) -> None:
        """Every so often, store tokens to come in the layouts that will have been worth it."""
        switcher, length = self._switcher, self.cache.length
        if switcher is None or 0 <= length - self._compared < switcher.period:
            return
        self._compared = length
        held = [(segment.layout, segment.tokens) for segment in self.cache.segments]
        self.cache.switch(self._readers.learn(switcher.layout_at(held, length, ahead)))

    @property
    def _block_splits(self) -> int:
        """Shares of the context that even out the work of heads over threads."""
        heads, threads = self.model.config.kv_heads, self.model.threads
        return 1 if heads % threads == 0 else threads

    def _forward_pass(self, positions: int, scores: str) -> ForwardPass:
        key = positions, scores
        forward = self._forward.pop(key, None)
        if forward is None:
            model = self.model
            program = Program(model.isa, model.threads)
            attention = SegmentedAttention(
                self.cache, replace(self._problem, query_rows=1), positions, self._readers, model.isa
            )
            forward = ForwardPass(model.network, model.config, self.cache, attention, program, scores, self._stored)
            while len(self._forward) >= KEPT_PASSES:
                self._forward.pop(next(iter(self._forward)))
        self._forward[key] = forward
        return forward

    # -- checks -------------------------------------------------------------------------------------------------------

    def _checked(self, tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
        given = np.asarray(tokens)
        if given.ndim != 1 or not len(given) or given.dtype.kind not in "iu":
            raise ProblemError("tokens must be a sequence of at least one whole number")
        vocabulary = self.model.config.vocabulary
        strange = (given < 0) | (given >= vocabulary)
        if strange.any():
            raise ProblemError(f"token {given[strange][0]} is none of the {vocabulary} in the vocabulary")
        if self.length + len(given) > self.context:
            raise self._full(len(given))
        return given.astype(np.int32)

    def _full(self, count: int) -> CacheFullError:
        return CacheFullError(
            f"no room in a context of {self.context} tokens for {self.length} and {count} more: make it larger"
        )

"""One layer of one sequence, for programs that compute the rest of a model themselves, layer by layer.

What `lowbit.runtime.model` does in one native program for all layers is done here a call at a time: keys and values
are stored, and queries of the same positions attend to all that the layer holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..kernels.cpu.isa import detect
from ..kernels.cpu.pool import pool
from ..kernels.errors import CacheFullError
from ..kernels.problem import Problem
from .attention import SegmentedAttention
from .kvcache import KVCache
from .model.tuned import Readers
from .segment import KVLayout, Segment
from .select import Database
from .switching import PhaseSwitcher

Float32 = NDArray[np.float32]

BLOCK_POSITIONS = 64
"""Positions that attend together."""

KEPT_POSITIONS = 16
"""Most positions of a pass that is kept for the next call: what decoding and speculation use again and again."""

KEPT_PASSES = 3


class Choices:
    """How layers of one shape are stored and read; shared by them.

    Parameters
    ----------
    problem : Problem
        ``attend`` with one query position.
    database : Database
    threads : int
        Most threads of a pass.
    capacity : int
        Most tokens of a sequence.
    segment_tokens : int, optional
        Most tokens of a segment; see `lowbit.runtime.kvcache.KVCache`.
    """

    def __init__(
        self, problem: Problem, database: Database, threads: int, capacity: int, segment_tokens: int | None = None
    ) -> None:
        self.problem, self.threads = problem, threads
        self.capacity, self.segment_tokens = capacity, segment_tokens
        self.isa = detect()
        self.readers = Readers(problem, self.isa, threads)
        self._switcher = PhaseSwitcher(database.prices(problem), horizon=capacity)
        self.period = self._switcher.period
        self._table = database.table(problem)

    def layout(self, cache: KVCache | None = None, ahead: int = 0) -> KVLayout:
        """For the tokens that follow those of ``cache``."""
        held = [] if cache is None else [(each.layout, each.tokens) for each in cache.segments]
        return self.readers.learn(self._switcher.layout_at(held, 0 if cache is None else cache.length, ahead))

    def work(self, tokens: int, positions: int) -> tuple[int, int]:
        """Shares that a context of ``tokens`` is decoded in, and on how many threads."""
        schedule = self._table.choose(tokens).candidate.schedule
        if positions == 1:
            return schedule.splits, min(schedule.threads, self.threads)
        even = self.problem.kv_heads % self.threads == 0
        return max(schedule.splits, 1 if even else self.threads), self.threads

    def empty(self) -> KVCache:
        """A cache of one layer."""
        problem = self.problem
        return KVCache(
            1, problem.kv_heads, problem.head_dim, self.capacity, self.layout(), window=problem.window,
            segment_tokens=self.segment_tokens,
        )  # fmt: skip


class _Pass:
    """Attention of so many positions, which are the last ones of a cache."""

    def __init__(self, cache: KVCache, choices: Choices, positions: int) -> None:
        self._attention = SegmentedAttention(cache, choices.problem, positions, choices.readers, choices.isa)
        job = self._attention.jobs[0].ctypes.data
        self._stages = np.array(
            [
                [self._attention.attend, job, self._attention.tasks, choices.threads],
                [self._attention.merge, job, choices.problem.kv_heads, 1],
            ],
            np.int64,
        )
        self._run = pool(choices.threads).sequence(self._stages)

    def __call__(self, queries: Float32, splits: int, threads: int) -> Float32:
        self._attention.queries[:] = queries
        if self._attention.prepare(splits):
            self._stages[0, 2] = self._attention.tasks
        self._stages[0, 3] = threads
        self._run()
        return self._attention.out


class SingleLayer:
    """Keys and values of one layer of one sequence. Not for several threads at once.

    Parameters
    ----------
    choices : Choices
    cache : KVCache, optional
        Of one layer; empty unless given.
    """

    def __init__(self, choices: Choices, cache: KVCache | None = None) -> None:
        self._choices = choices
        self.cache = choices.empty() if cache is None else cache
        self._compared = self.cache.length  # length at which layouts were compared last
        self._passes: dict[int, _Pass] = {}

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self.cache.length

    def attend(self, queries: Float32, k: Float32, v: Float32) -> Float32:
        """Append tokens, each of which attends to those before it and to itself.

        Parameters
        ----------
        queries : ndarray of float32, shape (heads, tokens, head_dim)
        k, v : ndarray of float32, shape (kv_heads, tokens, head_dim)

        Returns
        -------
        ndarray of float32, shape (tokens, heads · head_dim)

        Raises
        ------
        CacheFullError
            If there is no room for all of them; none is appended then.
        """
        count, choices = k.shape[1], self._choices
        out = np.empty((count, choices.problem.heads * choices.problem.head_dim), np.float32)
        passes = dict(self._passes)
        for first, some in self._grow(k, v, BLOCK_POSITIONS):
            attend = passes.get(some)
            if attend is None:
                attend = passes[some] = _Pass(self.cache, choices, some)
            splits, threads = choices.work(self.cache.length, some)
            out[first : first + some] = attend(queries[:, first : first + some], splits, threads)
        kept = [each for each in passes if each <= KEPT_POSITIONS]
        self._passes = {each: passes[each] for each in kept[-KEPT_PASSES:]}
        return out

    def append(self, k: Float32, v: Float32, past: int) -> tuple[Float32, Float32]:
        """Append tokens, and give what the cache then holds of them and of as many as ``past`` before them.

        Returns
        -------
        k, v : ndarray of float32, shape (kv_heads, tokens, head_dim)

        Raises
        ------
        CacheFullError
            If there is no room for all of them; none is appended then.
        """
        parts = [self._held(self.cache.segments, past)]
        for _, some in self._grow(k, v, k.shape[1]):
            parts.append(self._held(self.cache.segments[-1:], some))
        return np.concatenate([each for each, _ in parts], axis=1), np.concatenate([each for _, each in parts], axis=1)

    def held(self, tokens: int) -> tuple[Float32, Float32]:
        """The latest ``tokens`` keys and values, or as many as there are."""
        return self._held(self.cache.segments, tokens)

    def truncate(self, length: int) -> None:
        """Forget all tokens from position ``length`` on.

        Raises
        ------
        ProblemError
            If there are not so many tokens, or what the window shows then is gone.
        """
        self.cache.truncate(length)
        self._compared = min(self._compared, length)

    def fork(self) -> SingleLayer:
        """A layer of the same tokens that shares their memory; each of the two then goes its own way."""
        return SingleLayer(self._choices, self.cache.fork())

    def merged(self) -> SingleLayer:
        """A copy in one segment, for one that forks have left in many. Codes stay what they are.

        Its positions count from the first token that is still held.
        """
        copy = SingleLayer(self._choices)
        if self.length:
            k, v = self.held(self.length)
            for _ in copy._grow(k, v, k.shape[1]):
                pass
        return copy

    def _grow(self, k: Float32, v: Float32, most: int) -> Iterator[tuple[int, int]]:
        """Append tokens, no more than ``most`` at a time; gives the first of them and how many, each time."""
        cache, count, before, done = self.cache, k.shape[1], self.cache.length, 0
        if before + count > cache.capacity:
            raise CacheFullError(
                f"the cache holds {before} of at most {cache.capacity} tokens: no room for {count} more"
            )
        try:
            while done < count:
                if cache.length - self._compared >= self._choices.period:
                    self._compared = cache.length
                    cache.switch(self._choices.layout(cache, count - done))
                some = cache.begin(min(most, count - done))
                cache.store(0, k[:, done : done + some], v[:, done : done + some])
                yield done, some
                done += some
        except BaseException:  # also when whoever uses the tokens fails, and the generator is closed
            self.truncate(before)
            raise

    def _held(self, segments: Sequence[Segment], tokens: int) -> tuple[Float32, Float32]:
        """Keys and values of the latest ``tokens`` of ``segments``."""
        wanted: list[Segment] = []
        count = 0
        for segment in reversed(segments):
            if count >= tokens:
                break
            wanted.insert(0, segment)
            count += segment.tokens
        drop = max(count - tokens, 0)
        empty = np.zeros((self.cache.kv_heads, 0, self.cache.head_dim), np.float32)
        k, v = (
            np.concatenate(
                [empty, *(each.operand(role, 0).dequantize().astype(np.float32) for each in wanted)], axis=1
            )[:, drop:]
            for role in ("k", "v")
        )
        return k, v


def attention_problem(
    heads: int, kv_heads: int, head_dim: int, precisions: tuple[str, str], window: int, softcap: float
) -> Problem:
    """A decode step's attention.

    Raises
    ------
    ProblemError
        If there are no kernels for such a shape.
    """
    precision = "+".join(dict.fromkeys(precisions))
    return Problem("attend", heads, kv_heads, head_dim, precision, window=window, softcap=softcap)

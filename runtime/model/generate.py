"""A text continued token by token: prefill, then sample and step until something ends it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...kernels.errors import CacheFullError, ProblemError

Float32 = NDArray[np.float32]

PREFILL_TOKENS = 512
"""Of a prompt at a time, so that an interrupt is heeded before a long one is through."""

REASONS = ("end", "predict", "context", "interrupted")
"""Why a generation is over: the model ended the text, enough tokens were predicted, the context is full, or somebody
interrupted it."""


class Decoder(Protocol):
    """What is asked of `lowbit.runtime.model.Session`."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""

    @property
    def context(self) -> int:
        """Most tokens that the cache holds."""

    def prefill(self, tokens: Sequence[int]) -> Float32:
        """Logits (vocabulary,) after the last of ``tokens``."""

    def step(self, token: int) -> Float32:
        """Logits (vocabulary,) after ``token``."""


class Drawing(Protocol):
    """What is asked of `lowbit.runtime.model.sampling.Sampler`."""

    def sample(self, logits: Float32) -> int:
        """The next token."""


@dataclass
class Timings:
    """How long a generation took.

    Attributes
    ----------
    prompt_tokens : int
        That were computed.
    prompt_s : float
    steps : int
        Tokens computed one at a time. The first token that is generated comes from the prompt's own logits, so there is
        one step less than tokens, unless the context had room for more.
    steps_s : float
        Sampling included, what the caller does with tokens not.
    """

    prompt_tokens: int = 0
    prompt_s: float = 0.0
    steps: int = 0
    steps_s: float = 0.0

    @property
    def prompt_per_s(self) -> float | None:
        return self.prompt_tokens / self.prompt_s if self.prompt_s else None

    @property
    def steps_per_s(self) -> float | None:
        return self.steps / self.steps_s if self.steps_s else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_s": self.prompt_s,
            "prompt_tokens_per_s": self.prompt_per_s,
            "generated_steps": self.steps,
            "generated_s": self.steps_s,
            "generated_tokens_per_s": self.steps_per_s,
        }


class Generation:
    """Iterating it generates. Used by one thread, once; `interrupt` may come from anywhere.

    Parameters
    ----------
    decoder : Decoder
        May hold tokens already, which the prompt continues.
    prompt : sequence of int
        At least one token.
    sampler : Drawing
    predict : int
        Most tokens to generate; -1 for as many as the context holds.
    ends : collection of int
        Tokens that end the text; they are not given out. None go on for ever.

    Attributes
    ----------
    tokens : list of int
        Generated so far.
    timings : Timings
    reason : str
        One of `REASONS`; empty until it is over.

    Raises
    ------
    ProblemError
        If there is no prompt, or ``predict`` is less than -1.
    CacheFullError
        If the prompt leaves no room in the context.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt: Sequence[int],
        sampler: Drawing,
        predict: int = -1,
        ends: Collection[int] = (),
    ) -> None:
        if not len(prompt):
            raise ProblemError("the prompt is empty: there is nothing to continue")
        if predict < -1:
            raise ProblemError(f"tokens to predict must be 0 or more, or -1 for all that fit, not {predict}")
        if decoder.length + len(prompt) > decoder.context:
            before = f"{decoder.length:,} tokens and " if decoder.length else ""
            raise CacheFullError(
                f"no room in a context of {decoder.context:,} tokens for {before}a prompt of {len(prompt):,}: "
                "shorten it, or make the context larger"
            )
        self._decoder, self._prompt, self._sampler = decoder, list(prompt), sampler
        self._predict, self._ends = predict, frozenset(ends)
        self._interrupted = threading.Event()
        self.tokens: list[int] = []
        self.timings = Timings()
        self.reason = ""

    def interrupt(self) -> None:
        """End after the token that is being computed, or after a part of the prompt."""
        self._interrupted.set()

    def __iter__(self) -> Iterator[int]:
        """Tokens as they come. Raises what the decoder and the sampler raise."""
        logits = self._prefill()
        while True:
            if self._interrupted.is_set() or logits is None:
                self.reason = "interrupted"
                return
            if len(self.tokens) == self._predict:
                self.reason = "predict"
                return
            started = perf_counter()
            token = self._sampler.sample(logits)
            self.timings.steps_s += perf_counter() - started
            if token in self._ends:
                self.reason = "end"
                return
            self.tokens.append(token)
            yield token
            if len(self.tokens) == self._predict:
                continue  # whoever wants no more tokens should not wait for the logits of one
            if self._decoder.length == self._decoder.context:
                self.reason = "context"
                return
            started = perf_counter()
            logits = self._decoder.step(token)
            self.timings.steps_s += perf_counter() - started
            self.timings.steps += 1

    def _prefill(self) -> Float32 | None:
        """Logits after the prompt; None if it was interrupted."""
        logits = None
        for start in range(0, len(self._prompt), PREFILL_TOKENS):
            if self._interrupted.is_set():
                return None
            part = self._prompt[start : start + PREFILL_TOKENS]
            started = perf_counter()
            logits = self._decoder.prefill(part)
            self.timings.prompt_s += perf_counter() - started
            self.timings.prompt_tokens += len(part)
        return logits

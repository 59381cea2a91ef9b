"""Whole models with known speeds; workers make them as ``fake_model:Steady`` and so on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import numpy as np
from lowbit.autotune.bench.contestant import Absent, Unsupported
from lowbit.autotune.bench.model_contestant import ModelContestant
from lowbit.autotune.bench.model_messages import ModelSetup
from lowbit.runtime.cache_types import CacheTypes

VOCABULARY = 64


class Session:
    """Takes ``step_s`` for each token alone, a tenth of it for each of several; sleeps longer the more it holds."""

    def __init__(self, context: int, step_s: float) -> None:
        self.context, self.step_s = context, step_s
        self.held: list[int] = []

    def prefill(self, tokens: Sequence[int]) -> np.ndarray:
        time.sleep(len(tokens) * self.step_s / 10)
        self.held += tokens
        assert len(self.held) <= self.context
        return np.cos(np.arange(VOCABULARY) * (1 + sum(tokens))).astype(np.float32)

    def step(self, token: int) -> np.ndarray:
        time.sleep(self.step_s)
        self.held.append(token)
        assert len(self.held) <= self.context
        return np.zeros(VOCABULARY, np.float32)

    def truncate(self, length: int) -> None:
        del self.held[length:]


class Steady(ModelContestant):
    step_s = 0.002
    vocabulary = VOCABULARY

    def open(self, setup: ModelSetup) -> str:
        return f"1.0 on {setup.threads}"

    def session(self, types: CacheTypes, context: int) -> Session:
        return Session(context, self.step_s * (2 if types.k == "q4_0" else 1))


class Slow(Steady):
    step_s = 0.006


class Missing(Steady):
    def open(self, setup: ModelSetup) -> str:
        raise Absent("not installed:\npip install it")


class Picky(Steady):
    def session(self, types: CacheTypes, context: int) -> Session:
        if types.k != "f16":
            raise Unsupported("no such cache")
        return super().session(types, context)


class Liar(Steady):
    """Its logits are another model's."""

    def session(self, types: CacheTypes, context: int) -> Session:
        class Other(Session):
            def prefill(self, tokens: Sequence[int]) -> np.ndarray:
                return super().prefill(tokens) * -20

        return Other(context, self.step_s)


class Dying(Steady):
    """Dies at a depth of 8."""

    def session(self, types: CacheTypes, context: int) -> Session:
        class Fragile(Session):
            def prefill(self, tokens: Sequence[int]) -> np.ndarray:
                if len(tokens) == 8:
                    os.write(2, b"GGML_ASSERT(n < 8) failed\n")
                    os.kill(os.getpid(), signal.SIGABRT)
                return super().prefill(tokens)

        return Fragile(context, self.step_s)

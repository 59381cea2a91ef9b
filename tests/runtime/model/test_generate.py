"""Generation: which tokens come out, why it ends, and what is refused, with a decoder of known logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from lowbit.kernels.errors import CacheFullError, LogitsError, ProblemError
from lowbit.runtime.model import generate
from lowbit.runtime.model.generate import Generation
from lowbit.runtime.model.sampling import Chain, Sampler

VOCABULARY = 50
GREEDY = Sampler(Chain(temperature=0))


def successor(tokens: Sequence[int]) -> int:
    """The most probable token after ``tokens``; depends on all of them."""
    state = 1
    for token in tokens:
        state = (state * 31 + token + 7) % 10_007
    return state % VOCABULARY


def continued(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(successor(tokens))
    return tokens[len(prompt) :]


class Hashing:
    """Answers with `successor` of what it holds."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.held: list[int] = []
        self.parts: list[int] = []

    @property
    def length(self) -> int:
        return len(self.held)

    def prefill(self, tokens: Sequence[int]) -> np.ndarray:
        self.parts.append(len(tokens))
        self.held += tokens
        assert len(self.held) <= self.context
        logits = np.full(VOCABULARY, -5, np.float32)
        logits[successor(self.held)] = 5
        return logits

    def step(self, token: int) -> np.ndarray:
        return self.prefill([token])


def run(prompt: Sequence[int], context: int = 100, **options: object) -> tuple[Generation, Hashing]:
    decoder = Hashing(context)
    generation = Generation(decoder, prompt, GREEDY, **options)  # type: ignore[arg-type]
    assert list(generation) == generation.tokens
    return generation, decoder


PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("predict", [0, 1, 2, 17])
def test_as_many_tokens_as_were_asked_for(predict: int) -> None:
    generation, decoder = run(PROMPT, predict=predict)
    assert generation.tokens == continued(PROMPT, predict)
    assert generation.reason == "predict"
    # The last token's logits are nobody's business.
    assert decoder.held == PROMPT + generation.tokens[: max(predict - 1, 0)]
    assert generation.timings.prompt_tokens == 5
    assert generation.timings.steps == max(predict - 1, 0)


@pytest.mark.parametrize("predict", [-1, 1000])
def test_generation_ends_where_the_context_does(predict: int) -> None:
    generation, decoder = run(PROMPT, context=12, predict=predict)
    assert generation.reason == "context"
    assert generation.tokens == continued(PROMPT, 8)  # the eighth is known, and has no room
    assert decoder.length == 12


def test_a_prompt_that_fills_the_context_has_one_successor() -> None:
    generation, _ = run(PROMPT, context=5)
    assert (generation.tokens, generation.reason) == (continued(PROMPT, 1), "context")


def test_an_end_token_ends_the_text_and_is_not_part_of_it() -> None:
    expected = continued(PROMPT, 30)
    at = next(i for i in range(5, 30) if expected[i] not in expected[:i])
    generation, _ = run(PROMPT, ends={expected[at]}, predict=40)
    assert (generation.tokens, generation.reason) == (expected[:at], "end")
    going_on, _ = run(PROMPT, predict=40)
    assert expected[at] in going_on.tokens


def test_a_decoder_that_holds_tokens_is_continued() -> None:
    decoder = Hashing(100)
    decoder.prefill([9, 9])
    generation = Generation(decoder, PROMPT, GREEDY, predict=6)
    assert list(generation) == continued([9, 9, *PROMPT], 6)


def test_an_interrupt_ends_it_after_the_current_token() -> None:
    generation = Generation(Hashing(100), PROMPT, GREEDY)
    seen = []
    for token in generation:
        seen.append(token)
        if len(seen) == 4:
            generation.interrupt()
    assert seen == generation.tokens == continued(PROMPT, 4)
    assert generation.reason == "interrupted"


def test_a_long_prompt_is_computed_in_parts_and_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "PREFILL_TOKENS", 4)
    prompt = list(range(11))
    generation, decoder = run(prompt, predict=3)
    assert decoder.parts[:3] == [4, 4, 3]
    assert generation.tokens == continued(prompt, 3)

    class Interrupting(Hashing):
        def prefill(self, tokens: Sequence[int]) -> np.ndarray:
            stopped.interrupt()
            return super().prefill(tokens)

    stopped = Generation(Interrupting(100), prompt, GREEDY)
    assert list(stopped) == []
    assert (stopped.reason, stopped.timings.prompt_tokens) == ("interrupted", 4)


def test_a_seed_decides() -> None:
    class Flat(Hashing):
        def prefill(self, tokens: Sequence[int]) -> np.ndarray:
            return super().prefill(tokens) * 0.01

    def draw(seed: int) -> list[int]:
        return list(Generation(Flat(100), PROMPT, Sampler(Chain(), seed), predict=30))

    assert draw(7) == draw(7) != draw(8)


def test_refusals_come_before_anything_is_computed() -> None:
    decoder = Hashing(4)
    with pytest.raises(CacheFullError, match="no room in a context of 4 tokens for a prompt of 5"):
        Generation(decoder, PROMPT, GREEDY)
    with pytest.raises(ProblemError, match="the prompt is empty"):
        Generation(decoder, [], GREEDY)
    with pytest.raises(ProblemError, match="not -2"):
        Generation(decoder, [1], GREEDY, predict=-2)
    decoder.prefill([1, 2, 3])
    with pytest.raises(CacheFullError, match="no room in a context of 4 tokens for 3 tokens and a prompt of 2"):
        Generation(decoder, [1, 2], GREEDY)
    assert decoder.parts == [3]


def test_logits_that_are_no_numbers_end_it() -> None:
    class Broken(Hashing):
        def step(self, token: int) -> np.ndarray:
            return super().step(token) * np.nan

    generation = Generation(Broken(100), PROMPT, GREEDY)
    with pytest.raises(LogitsError, match="NaN"):
        list(generation)
    assert generation.tokens == continued(PROMPT, 1)

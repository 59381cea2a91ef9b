"""What a compressed cache costs a model: its distributions over the next token beside those of an fp16 cache.

Windows and scoring are those of llama.cpp's perplexity tool: the text's tokens are cut into windows, each is computed
from an empty cache, and the second half of its tokens is scored, so that every scored token has at least half a window
of context.

Where activations are rounded to 8 bits, the last bit of a sum may decide how, and every later layer amplifies that. The
fp16 cache is therefore scored once more with the first half of each window computed in other parts: what this moves is
the floor below which a divergence says nothing about the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..kernels.errors import LogitsError, ProblemError
from ..runtime.cache_types import REFERENCE, CacheTypes
from .divergence import Scores, Summary, joined, ratio, score
from .outcome import Progress

Float32 = NDArray[np.float32]

LEAST_TOKENS = 4
"""Of a window: two of context and two whose second is predicted by the first."""
FLOOR_TOKENS = 37
"""Of each part of the context when the floor is measured; no size of a block that anybody computes."""


class Decoder(Protocol):
    """What is asked of a session, ours or a peer's."""

    def prefill(self, tokens: Sequence[int]) -> Float32:
        """Compute ``tokens``."""

    def scores(self, tokens: Sequence[int]) -> Iterator[tuple[int, Float32]]:
        """First index and logits (n, vocabulary) of consecutive parts of ``tokens``, each valid until the next."""

    def truncate(self, length: int) -> None:
        """Forget all but the first tokens."""


@dataclass(frozen=True)
class Cache:
    """One contestant's model with one cache.

    Attributes
    ----------
    impl : str
    types : CacheTypes
    floor : bool
        Whether it is the fp16 cache computed in other parts.
    """

    impl: str
    types: CacheTypes
    floor: bool = False


def windows(tokens: Sequence[int], size: int, count: int, first: int | None = None) -> list[NDArray[np.int64]]:
    """Cut a text.

    Parameters
    ----------
    tokens : sequence of int
    size : int
        Tokens of a window.
    count : int
        Most windows; 0 takes all that are whole.
    first : int, optional
        Token to put in the place of each window's first, where a model expects one.

    Raises
    ------
    ProblemError
        If there is not a single whole window.
    """
    if size < LEAST_TOKENS:
        raise ProblemError(f"a window must have at least {LEAST_TOKENS} tokens, not {size}")
    whole = len(tokens) // size
    if not whole:
        raise ProblemError(f"the text has {len(tokens)} tokens, too few for one window of {size}: see --window-tokens")
    cut = [np.array(tokens[i * size : (i + 1) * size], np.int64) for i in range(min(whole, count or whole))]
    if first is not None:
        for each in cut:
            each[0] = first
    return cut


@dataclass
class Quality:
    """Scores of every cache, window by window.

    Attributes
    ----------
    scores : dict of Cache to list of Scores
        Each compared with the same contestant's fp16 cache.
    """

    scores: dict[Cache, list[Scores]] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """One object for each cache."""
        return [self._row(cache, found) for cache, found in self.scores.items()]

    def _row(self, cache: Cache, found: Sequence[Scores]) -> dict[str, Any]:
        reference = self.scores[Cache(cache.impl, REFERENCE)]
        change = ratio([each.nll for each in found], [each.nll for each in reference])
        return {
            "impl": cache.impl,
            "cache_type_k": cache.types.k,
            "cache_type_v": cache.types.v,
            "floor": cache.floor,
            **Summary.of(found).as_dict(),
            "perplexity_ratio": change.as_dict(),
        }

    def perplexity_ratios(self, impl: str, peer: str) -> dict[str, dict[str, float | None]]:
        """``impl``'s perplexity over ``peer``'s, by types that both have."""
        found = {}
        for cache, own in self.scores.items():
            other = self.scores.get(Cache(peer, cache.types))
            if cache.impl == impl and other is not None and not cache.floor:
                found[cache.types.name] = ratio([each.nll for each in own], [each.nll for each in other]).as_dict()
        return found


def measure(
    contestants: Mapping[str, Callable[[CacheTypes], Decoder]],
    types: Sequence[CacheTypes],
    texts: Sequence[NDArray[np.int64]],
    progress: Progress,
) -> Quality:
    """Score every window with every cache of every contestant.

    Caches are compared window by window, so that only one window's reference is held: vocabulary × window / 2 floats.

    Parameters
    ----------
    contestants : mapping of str to callable
        What makes a contestant's session with caches of given types.
    types : sequence of CacheTypes
        Besides the reference, which every contestant is measured with.
    texts : sequence of ndarray of int64
        From `windows`.
    progress : Progress

    Raises
    ------
    LogitsError
        Naming the cache whose logits are not finite.
    """
    wanted = [REFERENCE, *(each for each in types if each != REFERENCE)]
    decoders: dict[Cache, Decoder] = {}
    for impl, make in contestants.items():
        decoders |= {Cache(impl, each): make(each) for each in wanted}
        decoders[Cache(impl, REFERENCE, floor=True)] = decoders[Cache(impl, REFERENCE)]
    quality = Quality({cache: [] for cache in decoders})
    for number, window in enumerate(texts):
        progress.update("scoring", number, len(texts), "windows")
        reference: Float32 | None = None
        for cache, decoder in decoders.items():
            if cache.types == REFERENCE and not cache.floor:
                reference = np.concatenate([logits.copy() for _, logits in _parts(decoder, window, len(window))])
            assert reference is not None  # each contestant's reference comes first
            try:
                quality.scores[cache].append(_score(cache, decoder, window, reference))
            except LogitsError as error:
                raise LogitsError(f"{cache.impl} with {cache.types.name}, window {number + 1}: {error}") from None
    progress.update("scoring", len(texts), len(texts), "windows")
    return quality


def _parts(decoder: Decoder, window: NDArray[np.int64], step: int) -> Iterator[tuple[int, Float32]]:
    """Logits of the second half's tokens, and where in it each part begins; the first half is computed in steps."""
    half = len(window) // 2
    decoder.truncate(0)
    for start in range(0, half, step):
        decoder.prefill(window[start : min(start + step, half)].tolist())
    return decoder.scores(window[half:].tolist())


def _score(cache: Cache, decoder: Decoder, window: NDArray[np.int64], reference: Float32) -> Scores:
    targets = window[len(window) // 2 + 1 :]
    if cache.types == REFERENCE and not cache.floor:
        own = reference[: len(targets)]
        return score(own, own, targets)
    parts = []
    for first, logits in _parts(decoder, window, FLOOR_TOKENS if cache.floor else len(window)):
        known = targets[first : first + len(logits)]  # the last token's successor is in no window
        if len(known):
            parts.append(score(logits[: len(known)], reference[first : first + len(known)], known))
    return joined(parts)

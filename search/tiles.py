"""What is counted in a space's tile functions or kernels: taken from a store, or counted by all workers and kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from ..costmodel.counts import Counts, restored, stored
from ..kernels.backend import Backend
from ..kernels.candidate import Candidate
from ..kernels.errors import LowbitError
from ..kernels.problem import Problem
from .crew import Crew
from .messages import Count, Counted, Request
from .rounds import Fault

OUT_OF_TIME = "not counted within the budget"
"""Why a candidate has no counts if nothing is wrong with it."""

Report = Callable[[int, int], None]
"""Told how many tile functions are done and how many there are, now and then."""


class TileStore(Protocol):
    """What keeps counts; `lowbit.db.store.Store` does."""

    def tiles(self, toolchain: str, symbols: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
        """What `lowbit.costmodel.counts.stored` made of counts, by symbol."""

    def put_tiles(self, toolchain: str, tiles: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep the same."""


@dataclass(frozen=True)
class TileCounter:
    """Counts tile functions, each one once.

    Parameters
    ----------
    backend : Backend
        The one that the crew's workers use, to name tiles.
    crew : Crew
        Starts no worker if the store has everything.
    store : TileStore
    toolchain : str
        Key of what is stored.
    """

    backend: Backend
    crew: Crew
    store: TileStore
    toolchain: str

    def count(
        self, problem: Problem, candidates: Mapping[str, Candidate], report: Report, until: float | None = None
    ) -> tuple[dict[str, tuple[Counts, ...]], dict[str, str]]:
        """Counts of every candidate's tile functions.

        Parameters
        ----------
        until : float, optional
            `time.monotonic` value at which to stop. What is counted by then is kept.

        Returns
        -------
        tiles : dict of str to tuple of Counts
            By candidate name.
        failed : dict of str to str
            Why candidates have none; `OUT_OF_TIME` for those that ``until`` cut off.
        """
        symbols: dict[str, tuple[str, ...]] = {}
        failed: dict[str, str] = {}
        for name, candidate in candidates.items():
            try:
                symbols[name] = self.backend.tiles(problem, candidate)
            except LowbitError as error:
                failed[name] = str(error)
        makers: dict[str, str] = {}
        for name in _broadly(candidates):
            makers.update((symbol, name) for symbol in symbols.get(name, ()) if symbol not in makers)
        counts = self._known(makers)
        missing = {symbol: name for symbol, name in makers.items() if symbol not in counts}
        reasons: dict[str, str] = {}
        report(len(counts), len(makers))
        for request, reply in self._answers(problem, missing, until):
            if isinstance(reply, Fault):
                reasons.update((symbol, f"{reply.status}: {reply.message}") for symbol, _ in request.tiles)
            else:
                counts.update(reply.counts)
                reasons.update(reply.failed)
                self.store.put_tiles(self.toolchain, {name: stored(each) for name, each in reply.counts.items()})
            report(len(counts) + len(reasons), len(makers))
        tiles = {}
        for name, own in symbols.items():
            lacking = [symbol for symbol in own if symbol not in counts]
            if lacking:
                failed[name] = next((reasons[symbol] for symbol in lacking if symbol in reasons), OUT_OF_TIME)
            else:
                tiles[name] = tuple(counts[symbol] for symbol in own)
        return tiles, failed

    def _known(self, symbols: Collection[str]) -> dict[str, Counts]:
        kept = self.store.tiles(self.toolchain, symbols)
        read = {symbol: restored(values) for symbol, values in kept.items()}
        return {symbol: each for symbol, each in read.items() if each is not None}

    def _answers(
        self, problem: Problem, missing: Mapping[str, str], until: float | None
    ) -> Iterator[tuple[Count, Counted | Fault]]:
        """Replies; a chunk that costs its worker is asked for again tile by tile."""
        tiles, each = list(missing.items()), self.backend.counted_at_once
        requests = [Count(problem.key, tuple(tiles[i : i + each])) for i in range(0, len(tiles), each)]
        again: list[Count] = []
        for request, reply in self._work(requests, until):
            if isinstance(reply, Fault) and len(request.tiles) > 1:
                again += [Count(request.problem, (tile,)) for tile in request.tiles]
            else:
                yield request, reply
        yield from self._work(again, until)

    def _work(self, requests: list[Count], until: float | None) -> Iterator[tuple[Count, Counted | Fault]]:
        asked: list[Request] = list(requests)
        with closing(self.crew.work(asked, until)) as replies:
            for request, reply in replies:
                assert isinstance(request, Count) and isinstance(reply, Counted | Fault)
                yield request, reply


def _broadly(candidates: Mapping[str, Candidate]) -> list[str]:
    """Every layout's first schedule before any second one: short of time all layouts can still be compared."""
    seen: Counter[tuple[str, str]] = Counter()
    turns = {}
    for name, candidate in candidates.items():
        shape = candidate.layout, candidate.pipeline
        turns[name] = seen[shape]
        seen[shape] += 1
    return sorted(candidates, key=turns.__getitem__)

"""Spaces, and what the cost model makes of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..kernels.backend import Rejected
from ..kernels.candidate import Candidate
from ..kernels.problem import Problem
from ..search.features import Features, extract
from ..search.session import Bench
from ..search.tiles import TileCounter
from .outcome import Progress, TuneReport
from .target import Prices, Target


@dataclass(frozen=True)
class Ranked:
    """One problem at one context length, ready for a strategy.

    Attributes
    ----------
    problem : Problem
    tokens : int
    candidates : dict of str to Candidate
        The lowest prediction first.
    predicted_us : dict of str to float
        Infinite for candidates without features.
    features : dict of str to Features
    steady : str
        The layout whose predictions are best over all lengths of the problem; empty if nothing is predicted.
    """

    problem: Problem
    tokens: int
    candidates: dict[str, Candidate]
    predicted_us: dict[str, float]
    features: dict[str, Features]
    steady: str = ""

    @property
    def slowdowns(self) -> dict[str, float]:
        """Of each layout's best candidate: its prediction over the lowest of all."""
        best: dict[str, float] = {}
        for name, time_us in self.predicted_us.items():
            if math.isfinite(time_us):
                layout = self.candidates[name].layout
                best[layout] = min(best.get(layout, math.inf), time_us)
        lowest = min(best.values(), default=1.0)
        return {layout: time_us / lowest for layout, time_us in best.items()}


def steadiest(lengths: Sequence[Ranked]) -> str:
    """The layout that costs least where it costs most; empty if none is predicted at all lengths."""
    slowdowns = [each.slowdowns for each in lengths]
    common = set.intersection(*map(set, slowdowns)) if slowdowns else set()
    return min(sorted(common), key=lambda layout: max(each[layout] for each in slowdowns), default="")


@dataclass(frozen=True)
class Ranker:
    """Ranks spaces; notes in ``report`` what they hold and how long the ranking took.

    Parameters
    ----------
    target : Target
    prices : Prices
    bench : Bench
        Its crew counts code; its store keeps counts, spaces and features.
    progress : Progress
    report : TuneReport
    until : float or None
        `time.monotonic` value at which counting stops; candidates that are not counted by then are ranked last.
    """

    target: Target
    prices: Prices
    bench: Bench
    progress: Progress
    report: TuneReport
    until: float | None = None

    def rank(self, problem: Problem, tokens: Sequence[int]) -> list[Ranked]:
        """The space of ``problem`` ranked at each context length."""
        self.progress.update("counting instructions", 0, None, problem.key)
        candidates, rejected = self._space(problem)
        bench, backend = self.bench, self.target.backend
        bench.store.put_space(problem.key, bench.device, list(candidates), rejected)
        found = extract(
            problem,
            tokens,
            candidates,
            TileCounter(backend, bench.crew, bench.store, backend.tile_toolchain()),
            self.target,
            lambda done, total: self.progress.update("counting instructions", done, total, problem.key),
            self.until,
        )
        if found.unfit:
            candidates = {name: each for name, each in candidates.items() if name not in found.unfit}
            rejected += found.unfit.items()
            bench.store.put_space(problem.key, bench.device, list(candidates), rejected)
        self._note(candidates, rejected, found.failed)
        kernels = {counts[0].symbol: counts for counts in found.tiles.values()}
        for counts in kernels.values():
            self.report.unknown.update(self.target.unknown(counts).keys())
        for each in tokens:
            self._keep(problem, each, found.features[each])
        ranked = [self._order(problem, each, candidates, found.features[each]) for each in tokens]
        steady = steadiest(ranked)
        return [replace(each, steady=steady) for each in ranked]

    def _note(
        self, candidates: Mapping[str, Candidate], rejected: Sequence[tuple[str, str]], failed: Mapping[str, str]
    ) -> None:
        self.report.candidates += len(candidates)
        self.report.reasons.update(reason for _, reason in rejected)
        self.report.unpredicted.update(failed.values())

    def _keep(self, problem: Problem, tokens: int, features: dict[str, Features]) -> None:
        """Store what differs from what is stored, for people who ask the database."""
        store, device, toolchain = self.bench.store, self.bench.device, self.bench.toolchain
        stored = store.features(device, problem.key, tokens, toolchain)
        rows = {name: each.as_dict() for name, each in features.items()}
        changed = {name: row for name, row in rows.items() if stored.get(name) != row}
        if changed:
            store.put_features(device, problem.key, tokens, changed, toolchain)

    def _space(self, problem: Problem) -> tuple[dict[str, Candidate], list[tuple[str, str]]]:
        candidates: dict[str, Candidate] = {}
        rejected: list[tuple[str, str]] = []
        for each in self.target.backend.space(problem, self.target.threads):
            if isinstance(each, Rejected):
                rejected.append((each.candidate.name, each.reason))
            else:
                candidates[each.name] = each
        return candidates, rejected

    def _order(
        self, problem: Problem, tokens: int, candidates: dict[str, Candidate], features: dict[str, Features]
    ) -> Ranked:
        names = list(features)
        seen = [self.target.as_timed(features[name], self.bench.protocol) for name in names]
        started = time.perf_counter()
        predicted = self.prices.predict_us(seen)
        order = np.argsort(predicted, kind="stable")
        self.report.select_ms += (time.perf_counter() - started) * 1e3
        predicted_us = {names[i]: float(predicted[i]) for i in order}
        # Where nothing is predicted, the baseline is the safest choice.
        baseline = self.target.backend.baseline(problem, self.target.threads).name
        unknown = sorted((name for name in candidates if name not in predicted_us), key=lambda name: name != baseline)
        predicted_us |= dict.fromkeys(unknown, math.inf)
        ranked = {name: candidates[name] for name in predicted_us}
        return Ranked(problem, tokens, ranked, predicted_us, features)

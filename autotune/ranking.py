"""Spaces, and what the cost model makes of them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..costmodel.device import Device
from ..costmodel.features import Features
from ..costmodel.lep import Coefficients, predict_many
from ..kernels.backend import Backend, Rejected
from ..kernels.candidate import Candidate
from ..kernels.problem import Problem
from ..search.features import extract
from ..search.session import Bench
from ..search.tiles import TileCounter
from .outcome import Progress, TuneReport


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
    """

    problem: Problem
    tokens: int
    candidates: dict[str, Candidate]
    predicted_us: dict[str, float]
    features: dict[str, Features]


def as_timed(features: Features, protocol: str, cache_bytes: int) -> Features:
    """Features as the timing protocol has it: ``cold`` operands come from memory, however small they are."""
    if protocol == "warm":
        return features
    return replace(features, working_set_bytes=max(features.working_set_bytes, 2 * cache_bytes))


@dataclass(frozen=True)
class Ranker:
    """Ranks spaces; notes in ``report`` what they hold and how long the ranking took.

    Parameters
    ----------
    backend : Backend
    device : Device
    threads : int
    bench : Bench
        Its crew counts tile functions; its store keeps counts, spaces and features.
    coefficients : Coefficients
    progress : Progress
    report : TuneReport
    until : float or None
        `time.monotonic` value at which counting stops; candidates that are not counted by then are ranked last.
    """

    backend: Backend
    device: Device
    threads: int
    bench: Bench
    coefficients: Coefficients
    progress: Progress
    report: TuneReport
    until: float | None = None

    def rank(self, problem: Problem, tokens: Sequence[int]) -> list[Ranked]:
        """The space of ``problem`` ranked at each context length."""
        candidates = self._space(problem)
        bench = self.bench
        found = extract(
            problem,
            tokens,
            candidates,
            TileCounter(self.backend, bench.crew, bench.store, self.backend.tile_toolchain()),
            self.device.line_bytes,
            lambda done, total: self.progress.update("counting instructions", done, total, problem.key),
            self.until,
        )
        self.report.unpredicted.update(found.failed.values())
        for each in tokens:
            self._keep(problem, each, found.features[each])
        return [self._order(problem, each, candidates, found.features[each]) for each in tokens]

    def _keep(self, problem: Problem, tokens: int, features: dict[str, Features]) -> None:
        """Store what differs from what is stored, for people who ask the database."""
        store, device, toolchain = self.bench.store, self.bench.device, self.bench.toolchain
        stored = store.features(device, problem.key, tokens, toolchain)
        rows = {name: each.as_dict() for name, each in features.items()}
        changed = {name: row for name, row in rows.items() if stored.get(name) != row}
        if changed:
            store.put_features(device, problem.key, tokens, changed, toolchain)

    def _space(self, problem: Problem) -> dict[str, Candidate]:
        self.progress.update("counting instructions", 0, None, problem.key)
        candidates: dict[str, Candidate] = {}
        rejected: list[tuple[str, str]] = []
        for each in self.backend.space(problem, self.threads):
            if isinstance(each, Rejected):
                rejected.append((each.candidate.name, each.reason))
            else:
                candidates[each.name] = each
        self.bench.store.put_space(problem.key, self.bench.device, list(candidates), rejected)
        self.report.candidates += len(candidates)
        self.report.reasons.update(reason for _, reason in rejected)
        return candidates

    def _order(
        self, problem: Problem, tokens: int, candidates: dict[str, Candidate], features: dict[str, Features]
    ) -> Ranked:
        names = list(features)
        seen = [as_timed(features[name], self.bench.protocol, self.bench.cache_bytes) for name in names]
        started = time.perf_counter()
        predicted = predict_many(seen, self.coefficients)
        order = np.argsort(predicted, kind="stable")
        self.report.select_ms += (time.perf_counter() - started) * 1e3
        predicted_us = {names[i]: float(predicted[i]) for i in order}
        # Where nothing is predicted, the baseline is the safest choice.
        baseline = self.backend.baseline(problem, self.threads).name
        unknown = sorted((name for name in candidates if name not in predicted_us), key=lambda name: name != baseline)
        predicted_us |= dict.fromkeys(unknown, math.inf)
        ranked = {name: candidates[name] for name in predicted_us}
        return Ranked(problem, tokens, ranked, predicted_us, features)

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
        Its crew extracts features, its store keeps spaces and features.
    coefficients : Coefficients
    progress : Progress
    report : TuneReport
    """

    backend: Backend
    device: Device
    threads: int
    bench: Bench
    coefficients: Coefficients
    progress: Progress
    report: TuneReport

    def rank(self, problem: Problem, tokens: Sequence[int]) -> list[Ranked]:
        """The space of ``problem`` ranked at each context length."""
        candidates = self._space(problem)
        done = 0

        def report(more: int) -> None:
            nonlocal done
            done += more
            self.progress.update("features", done, len(candidates), problem.key)

        bench = self.bench
        features, failed = extract(
            problem,
            tokens,
            candidates,
            bench.crew,
            bench.store,
            bench.device,
            bench.toolchain,
            self.device.line_bytes,
            report,
        )
        self.report.unpredicted.update(failed.values())
        return [self._order(problem, each, candidates, features[each]) for each in tokens]

    def _space(self, problem: Problem) -> dict[str, Candidate]:
        self.progress.update("features", 0, None, problem.key)
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
        predicted_us |= {name: math.inf for name in candidates if name not in predicted_us}
        ranked = {name: candidates[name] for name in predicted_us}
        return Ranked(problem, tokens, ranked, predicted_us, features)

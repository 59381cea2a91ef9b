"""Why a layout: what was predicted and measured, what comes next, and what each packing costs to unpack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ..kernels.backend import Code, Rejected
from ..kernels.candidate import RAW, Candidate, Schedule
from ..kernels.errors import NoWinnerError
from ..kernels.packing import Packing, packings
from ..kernels.problem import Problem

if TYPE_CHECKING:
    from ..costmodel.counts import Counts
    from ..db.records import Measurement, Winner
    from ..search.features import Features
    from ..search.tiles import TileCounter
    from .target import Prices, Target

Report = Callable[[str, int, int | None, str], None]
"""``(phase, done, total, message)``, as `lowbit.autotune.progress` shows it."""

NATIVE = ("integer", RAW)
"""Pipelines that contract codes without making floats of them."""


@dataclass(frozen=True)
class Knowledge:
    """What a database holds about one problem at one context length on one device, for one toolchain.

    Attributes
    ----------
    prices : Prices or None
        None if nothing prices candidates: the device was never calibrated with this many threads.
    measurements : dict
        By candidate name, correct ones only.
    winner : Winner or None
        Whose token range holds the context length.
    stale : Winner or None
        The same of another toolchain, if there is no current one; its timings may no longer hold.
    """

    prices: Prices | None = None
    measurements: Mapping[str, Measurement] = field(default_factory=dict)
    winner: Winner | None = None
    stale: Winner | None = None

    @classmethod
    def read(cls, path: Path, target: Target, problem: Problem, tokens: int, protocol: str) -> Self:
        """Look everything up, without changing the file.

        Raises
        ------
        DatabaseError
            If ``path`` is missing or refused.
        """
        from ..db.store import Store

        device, toolchain = target.fingerprint, target.backend.toolchain()
        with Store.open(path, mode="read") as store:
            prices = target.known_prices(store)
            measured = store.measurements(device, problem.key, tokens, toolchain, protocol)
            winners = store.winners(device, problem.key)
        covering = sorted((w for w in winners if w.covers(tokens)), key=lambda w: w.created, reverse=True)
        current = next((w for w in covering if w.toolchain == toolchain), None)
        return cls(
            prices,
            {m.candidate: m for m in measured if m.status == "ok"},
            current,
            covering[0] if covering and current is None else None,
        )


@dataclass(frozen=True)
class Priced:
    """One candidate with everything known about its time.

    Attributes
    ----------
    counts : tuple of Counts
        What was counted in its code.
    unpacking : dict
        The unpacking instructions of its hot loops, by packed operand or loop, then by mnemonic.
    predicted_us : float or None
        None where nothing prices candidates.
    measurement : Measurement or None
    """

    candidate: Candidate
    features: Features
    counts: tuple[Counts, ...]
    unpacking: Mapping[str, Mapping[str, int]]
    predicted_us: float | None
    measurement: Measurement | None

    @property
    def median_us(self) -> float | None:
        return None if self.measurement is None else self.measurement.median_us

    def as_dict(self) -> dict[str, Any]:
        return {
            "layout": self.candidate.layout,
            "pipeline": self.candidate.pipeline,
            "schedule": self.candidate.plan.as_dict(),
            "predicted_us": self.predicted_us,
            "median_us": self.median_us,
            "spread": None if self.measurement is None else self.measurement.spread,
            "features": self.features.as_dict(),
        }


@dataclass(frozen=True)
class PackingCost:
    """Unpacking operations of one packing's best kernel.

    Attributes
    ----------
    packing : Packing
    candidate : Candidate or None
        The legal candidate with the fewest operations, then the lowest prediction; None if there is none.
    unpack_ops_per_32 : float or None
        Instructions in its assembly that only unpack, per 32 values.
    unpacking : dict
        For each packed operand (``k``, ``v``), or loop over one, the unpacking instructions of one iteration, by
        mnemonic.
    reason : str
        Why there is no candidate; empty if there is one.
    """

    packing: Packing
    candidate: Candidate | None = None
    unpack_ops_per_32: float | None = None
    unpacking: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "packing": self.packing.name,
            "arrangement": self.packing.arrangement,
            "coding": self.packing.coding,
            "unpack_ops_per_32": self.unpack_ops_per_32,
            "unpacking": self.unpacking,
            "candidate": None if self.candidate is None else self.candidate.name,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Explanation:
    """The answer to why a layout was chosen.

    Attributes
    ----------
    problem : Problem
    tokens : int
    target : Target
    winner : Winner or None
        The stored winner that made the choice; None if the prediction made it.
    choice : Priced
    runner_up : Priced or None
        The best candidate with other layouts or another pipeline.
    faster : Priced or None
        What is predicted to be clearly faster than the stored winner, if that was tuned at another length.
    terms_us : dict
        What the prediction of the choice adds up from, in microseconds; empty without one.
    packings : tuple of PackingCost
        One for each registered packing of the format.
    codes : tuple of Code
        Generated code of the choice.
    kernel : dict
        What the choice's kernel needs and executes, if it is a GPU's.
    unfit : dict
        How many candidates are pruned for what was found in their code, by reason.
    uncounted : dict
        How many candidates were left out because their code could not be counted, by reason.
    """

    problem: Problem
    tokens: int
    target: Target
    winner: Winner | None
    choice: Priced
    runner_up: Priced | None
    faster: Priced | None
    terms_us: Mapping[str, float]
    packings: tuple[PackingCost, ...]
    codes: tuple[Code, ...]
    kernel: Mapping[str, Any]
    unfit: Mapping[str, int]
    uncounted: Mapping[str, int]

    @property
    def provenance(self) -> str:
        """``measured``, ``verified`` or ``predicted``: how the choice was made."""
        return "predicted" if self.winner is None else self.winner.provenance

    @property
    def threads(self) -> int | None:
        """Threads of a decode step; None where launches have none, as a GPU's."""
        return self.target.threads if isinstance(self.choice.candidate.plan, Schedule) else None

    @property
    def unpack_ops_per_32(self) -> dict[str, float]:
        """Fewest operations of each arrangement over its codings; those without a legal candidate are left out."""
        best: dict[str, float] = {}
        for cost in self.packings:
            if cost.unpack_ops_per_32 is not None:
                known = best.get(cost.packing.arrangement, cost.unpack_ops_per_32)
                best[cost.packing.arrangement] = min(known, cost.unpack_ops_per_32)
        return best

    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` prints, without generated code."""
        kernel = {"kernel": dict(self.kernel)} if self.kernel else {}
        return {
            "problem": self.problem.key,
            "tokens": self.tokens,
            "threads": self.threads,
            "device": self.target.fingerprint,
            "isa": self.target.backend.target(),
            "provenance": self.provenance,
            "winner": None if self.winner is None else asdict(self.winner),
            "choice": {**self.choice.as_dict(), "terms_us": dict(self.terms_us), **kernel},
            "runner_up": None if self.runner_up is None else self.runner_up.as_dict(),
            "unpack_ops_per_32": self.unpack_ops_per_32,
            **({"unfit": dict(self.unfit)} if self.unfit else {}),
            "uncounted": dict(self.uncounted),
            "packings": [cost.as_dict() for cost in self.packings],
        }


def explain(
    problem: Problem,
    tokens: int,
    target: Target,
    counter: TileCounter,
    knowledge: Knowledge,
    protocol: str,
    report: Report,
) -> Explanation:
    """Gather the answer.

    Where nothing prices candidates nothing is predicted, and the choice is the candidate that unpacks with the fewest
    operations unless the database names a winner.

    Parameters
    ----------
    target : Target
        That ``knowledge`` is about.
    counter : TileCounter
        Counts the instructions of candidates.
    protocol : str
        ``cold`` or ``warm``: what predictions and measurements are of.

    Raises
    ------
    NoWinnerError
        If the problem has no legal candidate whose code can be counted.
    """
    from ..search.features import extract

    report("enumerating", 0, None, problem.key)
    space = list(target.backend.space(problem, target.threads))
    legal = {each.name: each for each in space if not isinstance(each, Rejected)}
    rejected = [each for each in space if isinstance(each, Rejected)]
    chosen = None if knowledge.winner is None else Candidate.parse(knowledge.winner.candidate)
    if chosen is not None:
        legal[chosen.name] = chosen
    found = extract(
        problem,
        [tokens],
        legal,
        counter,
        target,
        lambda done, total: report("counting instructions", done, total, problem.key),
    )
    rejected += [Rejected(legal[name], reason) for name, reason in found.unfit.items()]
    features = {name: target.as_timed(each, protocol) for name, each in found.features[tokens].items()}
    priced = _price(target, legal, features, found.tiles, knowledge)
    if not priced:
        raise NoWinnerError(f"{problem.key} has no candidate that this device can run")
    choice = priced.get("" if chosen is None else chosen.name) or min(priced.values(), key=_predicted_rank)
    shape = (choice.candidate.layout, choice.candidate.pipeline)
    others = [each for each in priced.values() if (each.candidate.layout, each.candidate.pipeline) != shape]
    timed = [each for each in others if each.median_us is not None and choice.median_us is not None]
    winner = knowledge.winner if choice.candidate == chosen else None
    return Explanation(
        problem,
        tokens,
        target,
        winner,
        choice,
        min(timed, key=_measured_rank) if timed else min(others, key=_predicted_rank, default=None),
        None if winner is None or winner.tokens == tokens else _clearly_faster(priced.values(), choice),
        {} if knowledge.prices is None else knowledge.prices.terms_us(choice.features),
        tuple(packing_costs(problem, list(priced.values()), rejected)),
        tuple(target.backend.code(problem, choice.candidate)),
        target.kernel(choice.counts, knowledge.prices, choice.features),
        dict(Counter(found.unfit.values()).most_common()),
        dict(Counter(found.failed.values()).most_common()),
    )


def _price(
    target: Target,
    candidates: Mapping[str, Candidate],
    features: Mapping[str, Features],
    counts: Mapping[str, tuple[Counts, ...]],
    knowledge: Knowledge,
) -> dict[str, Priced]:
    predicted: Iterable[float | None] = [None] * len(features)
    if knowledge.prices is not None:
        predicted = map(float, knowledge.prices.predict_us(list(features.values())))
    return {
        name: Priced(
            candidates[name],
            each,
            counts[name],
            target.unpacking(counts[name]),
            time_us,
            knowledge.measurements.get(name),
        )
        for (name, each), time_us in zip(features.items(), predicted, strict=True)
    }


def _clearly_faster(priced: Iterable[Priced], choice: Priced) -> Priced | None:
    """The lowest prediction, if that of ``choice`` is no tie with it; None where nothing is predicted."""
    from ..search.strategy import PREDICTED_TIE

    best = min(priced, key=_predicted_rank)
    if not best.predicted_us or choice.predicted_us is None:
        return None
    return best if choice.predicted_us > best.predicted_us * (1 + PREDICTED_TIE) else None


def _predicted_rank(priced: Priced) -> tuple[float, float, str]:
    """The lowest prediction first, or the fewest unpacking operations where nothing is predicted."""
    return priced.predicted_us or 0.0, priced.features.unpack_ops_per_32, priced.candidate.name


def _measured_rank(priced: Priced) -> tuple[float, str]:
    return priced.median_us or 0.0, priced.candidate.name


def packing_costs(problem: Problem, priced: Sequence[Priced], rejected: Sequence[Rejected]) -> Iterable[PackingCost]:
    """Unpacking operations of each registered packing of the problem's format.

    For each packing the best legal candidate counts: the fewest operations, then the lowest prediction. Candidates are
    those of the pipelines that stay in integers, for formats that have one.
    """
    native = [each for each in priced if each.candidate.pipeline in NATIVE] or list(priced)
    for packing in packings(problem.stored(problem.roles[0]).format):
        pool = [each for each in native if _packings_of(each.candidate) == {packing.name}]
        if not pool:
            yield PackingCost(packing, reason=_reason(packing, rejected))
            continue
        best = min(
            pool, key=lambda each: (each.features.unpack_ops_per_32, each.predicted_us or 0.0, each.candidate.name)
        )
        yield PackingCost(packing, best.candidate, best.features.unpack_ops_per_32, best.unpacking)


def _packings_of(candidate: Candidate) -> set[str]:
    return {layout.packing.name for layout in (candidate.k, candidate.v) if layout is not None}


def _reason(packing: Packing, rejected: Sequence[Rejected]) -> str:
    reasons = Counter(each.reason for each in rejected if packing.name in _packings_of(each.candidate))
    return next((reason for reason, _ in reasons.most_common(1)), "no candidate uses it")

"""Features of a whole space: counts of its code, and arithmetic for each problem and context length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..costmodel.counts import Counts
from ..kernels.candidate import Candidate
from ..kernels.errors import LowbitError
from ..kernels.problem import Problem
from .tiles import Report, TileCounter


class Features(Protocol):
    """What a cost model reads about one call of one candidate; each kind of device has its own."""

    @property
    def unpack_ops_per_32(self) -> float:
        """Unpacking instructions for each 32 values of the packed operands."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""


class Device(Protocol):
    """What turns counts into features."""

    def unfit(self, problem: Problem, candidate: Candidate, counts: Sequence[Counts]) -> str | None:
        """Why code with these counts is not worth running, or cannot run; None if it can."""

    def features(self, problem: Problem, candidate: Candidate, tokens: int, counts: Sequence[Counts]) -> Features:
        """Features of one call.

        Raises
        ------
        LowbitError
            If it has none, with the reason.
        """


@dataclass(frozen=True)
class Extraction:
    """What is known of a space before anything is timed.

    Attributes
    ----------
    features : dict of int to dict of str to Features
        By context length and candidate name.
    tiles : dict of str to tuple of Counts
        By candidate name.
    failed : dict of str to str
        Why candidates have no features.
    unfit : dict of str to str
        Why candidates whose code was counted are pruned for what was found in it.
    """

    features: dict[int, dict[str, Features]]
    tiles: dict[str, tuple[Counts, ...]]
    failed: dict[str, str]
    unfit: dict[str, str]


def extract(
    problem: Problem,
    tokens: Sequence[int],
    candidates: Mapping[str, Candidate],
    counter: TileCounter,
    device: Device,
    report: Report,
    until: float | None = None,
) -> Extraction:
    """Features of every candidate at every context length.

    Parameters
    ----------
    report : callable
        Told how many functions are counted, and how many there are.
    until : float, optional
        `time.monotonic` value at which counting stops; what is not counted by then has no features.
    """
    tiles, failed = counter.count(problem, candidates, report, until)
    found: dict[int, dict[str, Features]] = {each: {} for each in tokens}
    unfit: dict[str, str] = {}
    for name, own in tiles.items():
        reason = device.unfit(problem, candidates[name], own)
        if reason is not None:
            unfit[name] = reason
            continue
        try:
            all_lengths = [device.features(problem, candidates[name], each, own) for each in tokens]
        except LowbitError as error:
            failed[name] = str(error)
            continue
        for each, values in zip(tokens, all_lengths, strict=True):
            found[each][name] = values
    return Extraction(found, tiles, failed, unfit)

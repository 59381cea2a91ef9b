"""Features of a whole space: counts of its tile functions, and arithmetic for each problem and context length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..costmodel.features import Features, features
from ..costmodel.tile import TileCounts
from ..kernels.candidate import Candidate
from ..kernels.errors import LowbitError
from ..kernels.problem import Problem
from .tiles import Report, TileCounter


@dataclass(frozen=True)
class Extraction:
    """What is known of a space before anything is timed.

    Attributes
    ----------
    features : dict of int to dict of str to Features
        By context length and candidate name.
    tiles : dict of str to tuple of TileCounts
        By candidate name.
    failed : dict of str to str
        Why candidates have no features.
    """

    features: dict[int, dict[str, Features]]
    tiles: dict[str, tuple[TileCounts, ...]]
    failed: dict[str, str]


def extract(
    problem: Problem,
    tokens: Sequence[int],
    candidates: Mapping[str, Candidate],
    counter: TileCounter,
    line_bytes: int,
    report: Report,
    until: float | None = None,
) -> Extraction:
    """Features of every candidate at every context length.

    Parameters
    ----------
    report : callable
        Told how many tile functions are counted, and how many there are.
    until : float, optional
        `time.monotonic` value at which counting stops; what is not counted by then has no features.
    """
    tiles, failed = counter.count(problem, candidates, report, until)
    found: dict[int, dict[str, Features]] = {each: {} for each in tokens}
    for name, own in tiles.items():
        try:
            all_lengths = [features(problem, candidates[name], each, own, line_bytes) for each in tokens]
        except LowbitError as error:
            failed[name] = str(error)
            continue
        for each, values in zip(tokens, all_lengths, strict=True):
            found[each][name] = values
    return Extraction(found, tiles, failed)

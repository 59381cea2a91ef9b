"""Prices of layouts from a database: what was measured there, or else what its cost model says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..db.records import Measurement
from ..db.store import Store
from ..kernels.candidate import Candidate
from ..kernels.errors import DatabaseError, LayoutError, LowbitError
from ..kernels.problem import Problem
from .curve import Curve
from .prices import LayoutPrices, predicted_curves, prices_from

if TYPE_CHECKING:
    from .stored_model import StoredModel

MADE_UP_S = 1e-9
"""Seconds a token where nothing is known: of a single layout, so that nothing depends on it."""


def stored_prices(
    path: Path,
    problem: Problem,
    device: str,
    toolchain: str | None,
    model: StoredModel | None,
    untuned: Callable[[], Sequence[Candidate]],
    chosen: Callable[[], Iterable[Candidate]],
    usable: Callable[[Candidate], bool],
) -> LayoutPrices:
    """See `lowbit.runtime.Database.prices`.

    Parameters
    ----------
    toolchain : str or None
        Whose measurements come first, and else those of the one that was used last; None for any.
    untuned : callable
        Candidates that are priced where nothing was measured.
    chosen : callable
        What `select` uses: the last resort.

    Raises
    ------
    LowbitError
        If no candidate is usable.
    """

    def predicted(candidates: Iterable[Candidate], tokens: int) -> Mapping[Candidate, float]:
        assert model is not None
        return {each: us * 1e-6 for each, us in model.prices_us(problem, candidates, tokens).items()}

    measured, current = _measured(path, problem, device, toolchain)
    measured = {each: times for each, times in measured.items() if usable(each)}
    if measured:
        curves = prices_from(measured, None if model is None else predicted)
        return LayoutPrices(curves, provenance="measured" if current else "stale")
    rest = untuned()
    if model is not None:
        curves = predicted_curves(rest, predicted)
        if curves:
            return LayoutPrices(curves, provenance="predicted")
    for candidate in (*chosen(), *rest):
        if usable(candidate):
            return LayoutPrices({candidate: Curve({0: 0.0, 1: MADE_UP_S})}, provenance="default")
    raise LowbitError(f"no layout of {problem.key} can be used here")


def _measured(
    path: Path, problem: Problem, device: str, toolchain: str | None
) -> tuple[dict[Candidate, dict[int, float]], bool]:
    """Median seconds by candidate and tokens, under the protocol of each length's winner; none if the file has gone.

    And whether they are of ``toolchain``.
    """
    found: dict[str, dict[int, float]] = {}
    current = True
    try:
        with Store.open(path, "read") as store:
            winners = [each for each in store.winners(device, problem.key) if each.provenance != "predicted"]
            own = [each for each in winners if toolchain in (None, each.toolchain)]
            current = bool(own) or not winners
            newest = max(winners, key=lambda each: each.created, default=None)
            for winner in own or [each for each in winners if newest and each.toolchain == newest.toolchain]:
                place = device, problem.key, winner.tokens, winner.toolchain
                for each in store.measurements(*place, protocol=winner.protocol):
                    if _counts(each):
                        assert each.median_us is not None
                        found.setdefault(each.candidate, {})[winner.tokens] = each.median_us * 1e-6
                if winner.median_us is not None:
                    found.setdefault(winner.candidate, {})[winner.tokens] = winner.median_us * 1e-6
    except DatabaseError:
        return {}, True
    known = {}
    for name, times in found.items():
        try:
            known[Candidate.parse(name)] = times
        except LayoutError:
            continue  # For instance the packing of a plugin that this process has not imported.
    return known, current


def _counts(measurement: Measurement) -> bool:
    return measurement.status == "ok" and measurement.median_us is not None

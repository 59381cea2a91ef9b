"""A device's cost model as a database holds it: prices of candidates that nobody tuned, without compiling anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..costmodel.features import features
from ..costmodel.lep import Coefficients, predict_many
from ..costmodel.tile import TileCounts
from ..db.store import Store
from ..kernels.backend import Backend
from ..kernels.candidate import Candidate
from ..kernels.errors import DatabaseError, LowbitError
from ..kernels.problem import Problem


class StoredModel:
    """Fitted coefficients of one device, and counts of code that was generated while something was tuned.

    Safe to use from several threads. What is read of the file is kept, and nothing is written to it.

    Parameters
    ----------
    path : Path
        The database.
    backend : Backend
        A CPU's, to name the tile functions of candidates.
    coefficients : Coefficients
    line_bytes, cache_bytes : int
        Cache line and largest cache of the device.
    """

    def __init__(
        self, path: Path, backend: Backend, coefficients: Coefficients, line_bytes: int, cache_bytes: int
    ) -> None:
        self._path, self._backend = path, backend
        self.coefficients, self._line_bytes, self._cache_bytes = coefficients, line_bytes, cache_bytes
        self._counts: dict[str, TileCounts | None] = {}
        self._symbols: dict[tuple[Problem, Candidate], tuple[str, ...] | None] = {}

    def prices_us(
        self, problem: Problem, candidates: Iterable[Candidate], tokens: int, cold: bool = True
    ) -> dict[Candidate, float]:
        """Predicted microseconds of one call, of those candidates whose code was counted, in their order.

        Parameters
        ----------
        cold : bool
            Whether operands come from memory, as between the layers of a model, however small they are.
        """
        counted = self._counted(problem, candidates)
        known = []
        for candidate, tiles in counted.items():
            found = features(problem, candidate, tokens, tiles, self._line_bytes)
            known.append(found.from_memory(self._cache_bytes) if cold else found)
        return dict(zip(counted, map(float, predict_many(known, self.coefficients)), strict=True))

    def _counted(self, problem: Problem, candidates: Iterable[Candidate]) -> dict[Candidate, list[TileCounts]]:
        symbols: dict[Candidate, tuple[str, ...]] = {}
        for candidate in candidates:
            own = self._tiles(problem, candidate)
            if own is not None:
                symbols[candidate] = own
        self._read({symbol for own in symbols.values() for symbol in own}.difference(self._counts))
        counted = {}
        for candidate, needed in symbols.items():
            tiles = [tile for tile in map(self._counts.get, needed) if tile is not None]
            if len(tiles) == len(needed):
                counted[candidate] = tiles
        return counted

    def _tiles(self, problem: Problem, candidate: Candidate) -> tuple[str, ...] | None:
        """None for a candidate that does not compile here."""
        if (problem, candidate) not in self._symbols:
            try:
                self._symbols[problem, candidate] = self._backend.tiles(problem, candidate)
            except LowbitError:
                self._symbols[problem, candidate] = None
        return self._symbols[problem, candidate]

    def _read(self, symbols: set[str]) -> None:
        if not symbols:
            return
        try:
            with Store.open(self._path, "read") as store:
                rows = store.tiles(self._backend.tile_toolchain(), symbols)
        except DatabaseError:
            rows = {}  # The file may have gone since the winners were loaded.
        for symbol in symbols:
            row = rows.get(symbol)
            self._counts[symbol] = None if row is None else _restored(row)


def stored_model(path: Path, backend: Backend, device: str, isa: str, threads: int) -> StoredModel | None:
    """The newest model that a database holds of a CPU, or else of another one with the same instruction set.

    Parameters
    ----------
    device : str
        Fingerprint.
    isa : str
        Its instruction set.
    threads : int
        Of a decode step.

    Returns
    -------
    StoredModel or None
        None where there is no calibration for so many threads, or the file has gone.
    """
    try:
        with Store.open(path, "read") as store:
            devices = store.devices()
            alike = (each for each, description in devices.items() if description.get("isa") == isa)
            for each in dict.fromkeys((device, *alike)):
                calibration = store.calibration(each, threads)
                if calibration is None:
                    continue
                known = _known(path, backend, calibration, devices.get(each, {}))
                if known is not None:
                    return known
    except DatabaseError:
        pass
    return None


def _known(
    path: Path, backend: Backend, calibration: Mapping[str, Any], description: Mapping[str, Any]
) -> StoredModel | None:
    """None if another release wrote either in another form."""
    try:
        coefficients = Coefficients.from_dict(calibration["extended"])
        sizes = [int(cache["size_bytes"]) for cache in description["caches"]]
        return StoredModel(path, backend, coefficients, int(description["line_bytes"]), max(sizes))
    except (KeyError, TypeError, ValueError):
        return None


def _restored(row: dict[str, Any]) -> TileCounts | None:
    try:
        return TileCounts.from_dict(row)
    except (KeyError, TypeError):
        return None

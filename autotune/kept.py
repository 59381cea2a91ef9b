"""Tile counts in a database that somebody asks about: read, and added to where that is possible."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..kernels.errors import DatabaseError

if TYPE_CHECKING:
    from ..db.store import Store


class KeptTiles:
    """A `lowbit.search.tiles.TileStore` that writes only when there is something to add, and only if it may.

    Used by one thread, as a context manager. A file that cannot be written stays as it is, and nothing is kept.

    Parameters
    ----------
    path : Path or None
        A database, or where one is to be made; None keeps nothing.

    Attributes
    ----------
    lost : str
        Why something that was counted is not kept; empty if everything is, or nothing had to be counted.

    Raises
    ------
    DatabaseError
        From `tiles`, if ``path`` is refused, or its directory is missing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.lost = ""
        self._writer: Store | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def tiles(self, toolchain: str, symbols: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
        """What was counted, by symbol."""
        from ..db.store import Store

        if self._path is None or is_new(self._path):
            return {}
        with Store.open(self._path, "read") as store:
            return store.tiles(toolchain, symbols)

    def put_tiles(self, toolchain: str, tiles: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep what was counted, if the database can be written."""
        from ..db.store import Store

        if self._path is None:
            self.lost = self.lost or "name a database with --db"
            return
        try:
            if self._writer is None:
                self._writer = self._open.enter_context(Store.open(self._path))
            self._writer.put_tiles(toolchain, tiles)
        except DatabaseError as error:
            self._path, self.lost = None, str(error)


def is_new(path: Path) -> bool:
    """Whether there is nothing at ``path`` yet, but a directory for it."""
    return not path.exists() and path.parent.is_dir()

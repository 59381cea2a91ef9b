"""Decoding with tuned kernels."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .choice import Choice
    from .select import Database, FallbackWarning, open_db

__all__ = ["Choice", "Database", "FallbackWarning", "open_db"]


def __getattr__(name: str) -> Any:
    # Rooms of the runtime that need no database should not bring one in.
    if name in __all__:
        return getattr(import_module(".choice" if name == "Choice" else ".select", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

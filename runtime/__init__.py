"""Decoding with tuned kernels."""

from __future__ import annotations

from .choice import Choice
from .select import Database, FallbackWarning, open_db

__all__ = ["Choice", "Database", "FallbackWarning", "open_db"]

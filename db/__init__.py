"""The shipped artefact: one SQLite file of devices, candidates, measurements and winners."""

from __future__ import annotations

from .records import Measurement, Winner
from .store import Store

__all__ = ["Measurement", "Store", "Winner"]

"""The shipped artefact: one SQLite file of devices, candidates, measurements and winners."""

from __future__ import annotations

from .kernels import KernelImage, KernelLaunch, Rule, ShippedWinner
from .records import Measurement, Winner
from .store import Store

__all__ = ["KernelImage", "KernelLaunch", "Measurement", "Rule", "ShippedWinner", "Store", "Winner"]

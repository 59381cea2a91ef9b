from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from lowbit.kernels import packing

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)  # random_layouts and tile_driver lie here

# Crowded machines: no deadline, and the same examples on every run.
settings.register_profile(
    "kernels",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("kernels")


@pytest.fixture
def registry(monkeypatch):
    """A copy of the packing registry, so that what a test registers is gone after it."""
    copy = dict(packing._REGISTRY)
    monkeypatch.setattr(packing, "_REGISTRY", copy)
    return copy

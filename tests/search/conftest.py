from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def fake_backend_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers inherit ``sys.path``, and import the fake backend from here."""
    monkeypatch.syspath_prepend(HERE)


if HERE not in sys.path:
    sys.path.insert(0, HERE)

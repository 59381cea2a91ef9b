from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lowbit.db import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.open(path) as store:
        yield store

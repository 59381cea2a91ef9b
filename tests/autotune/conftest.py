from __future__ import annotations

import sys
from pathlib import Path

MODELS = str(Path(__file__).parent.parent / "runtime" / "model")
if MODELS not in sys.path:
    sys.path.insert(0, MODELS)  # tiny_models lies there

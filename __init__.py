"""lowbit: a layout autotuner for low-bit LLM decoding.

`open_db` reads a tuned database and selects kernels from it; `Problem` says what to select for. `Model` decodes a GGUF
file with them, and `KVCache` is what it keeps keys and values in. `kernel` and `Packed` declare a kernel of one's own.
Everything else is tuning, which the ``autotune`` command does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .kernels import errors
from .kernels.packed import PackedTensor
from .kernels.problem import Problem
from .kernels.quantize import quantize
from .kernels.user import Packed, kernel

if TYPE_CHECKING:
    from .runtime.kvcache import KVCache
    from .runtime.model.model import Model
    from .runtime.select import Database, open_db

__version__ = "0.1.0"
__all__ = [
    "Database",
    "KVCache",
    "Model",
    "Packed",
    "PackedTensor",
    "Problem",
    "__version__",
    "errors",
    "kernel",
    "open_db",
    "quantize",
]


_RUNTIME = {
    "Database": ".runtime.select",
    "KVCache": ".runtime.kvcache",
    "Model": ".runtime.model.model",
    "open_db": ".runtime.select",
}


def __getattr__(name: str) -> Any:
    # The runtime brings in the database and the device; a kernel author who wants a type should not pay for them.
    if name in _RUNTIME:
        return getattr(import_module(_RUNTIME[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

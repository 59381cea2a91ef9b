"""lowbit: a layout autotuner for low-bit LLM decoding.

`open_db` reads a tuned database and selects kernels from it; `Problem` says what to select for. `kernel` and `Packed`
declare a kernel of one's own. Everything else is tuning, which the ``autotune`` command does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .kernels import errors
from .kernels.packed import PackedTensor
from .kernels.problem import Problem
from .kernels.quantize import quantize
from .kernels.user import Packed, kernel

if TYPE_CHECKING:
    from .runtime.select import Database, open_db

__version__ = "0.1.0"
__all__ = [
    "Database",
    "Packed",
    "PackedTensor",
    "Problem",
    "__version__",
    "errors",
    "kernel",
    "open_db",
    "quantize",
]


def __getattr__(name: str) -> Any:
    # The runtime brings in the database and the device; a kernel author who wants a type should not pay for them.
    if name in ("Database", "open_db"):
        from .runtime import select

        return getattr(select, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

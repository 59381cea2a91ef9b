"""A kernel of somebody's own as a task of the pool: ``void task(job, index)`` around an ``@njit`` function.

A job begins with `HEADER_BYTES` of int64 fields, followed by one slot for each parameter of the function. Task
``index`` serves the tokens from ``index · step``, ``step`` of them, up to ``end``.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import cfunc, types

from ..plugin import peek, store_i32
from .arguments import SLOT_BYTES, reader

FAILED, END, STEP, BLOCK = range(4)
HEADER_BYTES = 64


@functools.cache
def compile_task(function: Any, parameters: tuple[str, ...], signature: tuple[Any, ...]) -> Any:
    """Compile; what Numba raises is passed on. The result has an ``address``, valid as long as it lives.

    Parameters
    ----------
    function : Numba dispatcher
    parameters : tuple of str
        Its parameters; ``first``, ``last`` and ``block`` are computed, the others are read from their slots.
    signature : tuple of Numba types
        Of all of them.
    """
    names: dict[str, Any] = {"function": function, "peek": peek, "store": store_i32}
    arguments = []
    for position, (name, typ) in enumerate(zip(parameters, signature, strict=True)):
        if name in ("first", "last", "block"):
            arguments.append(name)
            continue
        names[f"read_{position}"] = reader(typ)
        arguments.append(f"read_{position}(job + {HEADER_BYTES + SLOT_BYTES * position})")
    source = f"""
def task(job, index):
    first = index * peek(job, {STEP})
    last = min(first + peek(job, {STEP}), peek(job, {END}))
    block = peek(job, {BLOCK})
    try:
        function({", ".join(arguments)})
    except Exception:
        store(job, {2 * FAILED}, 1)
"""
    exec(source, names)
    return cfunc(types.void(types.intp, types.int64), nopython=True)(names["task"])

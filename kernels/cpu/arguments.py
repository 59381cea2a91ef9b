"""Arguments of compiled functions kept in memory: how a task that is given one address gets arrays and numbers."""

from __future__ import annotations

from typing import Any

from numba import njit, types
from numba.extending import intrinsic

SLOT_BYTES = 256
"""Room for one argument: an array of up to 13 dimensions, or a packed operand."""


@intrinsic
def _store(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        stored = args[1]
        if isinstance(value, types.Array):
            # Without an owner: the caller keeps the array alive, and whoever reads it back counts no reference.
            array = context.make_array(value)(context, builder, value=stored)
            for field in ("meminfo", "parent"):
                setattr(array, field, getattr(array, field).type(None))
            stored = array._getvalue()
        builder.store(stored, builder.inttoptr(args[0], stored.type.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.intp, value), codegen


@njit
def spill(address: Any, value: Any) -> None:
    """Write an array's description, or a number, to `SLOT_BYTES` bytes at ``address``, for a `reader` of its type."""
    _store(address, value)


def reader(typ: Any) -> Any:
    """An intrinsic ``read(address)`` of what `spill` wrote."""

    @intrinsic
    def read(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(builder.inttoptr(args[0], context.get_value_type(typ).as_pointer()))

        return typ(types.intp), codegen

    return read

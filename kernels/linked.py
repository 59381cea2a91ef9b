"""Packed operands of any layout, in one Numba type: all that depends on the layout is reached by address.

What kernels of somebody's own are tuned with. The kernel is compiled once, whatever its candidates' layouts are; the
tile functions that it calls are compiled apart, and are the very ones whose instructions are counted.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from numba.core import cgutils, types
from numba.core.errors import TypingError
from numba.extending import NativeValue, make_attribute_wrapper, models, register_model, typeof_impl, unbox

from .packed import OPERAND
from .plugin import DispatchedType

FIELDS = (
    *OPERAND,
    "prepare",  # address of ``void prepare(job, row)``, see `lowbit.kernels.cpu.activations`; 0 for role ``v``
    "slot_bytes",  # of one prepared row
    "aux_bytes",  # of what goes with one prepared row
    "step",  # rows that one tile call serves
    "channels",
    "scratch_bytes",  # of a tile call; 0 for role ``k``
)
"""int64 fields of an operand, in order."""

TILES = {"k": "dot_rows and dot_tile", "v": "accumulate_rows and accumulate_tile"}


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for name in ("linked.py", "packed.py", "plugin.py", "rows.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:8]


class LinkedType(DispatchedType):
    """Numba type of a packed operand of any layout in one role.

    Its name holds a digest of the sources that its code comes from, so that what Numba keeps on disk of a kernel with
    ``cache=True`` is not taken for another release's.

    Parameters
    ----------
    role : str
        ``k`` or ``v``.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        types.Type.__init__(self, name=f"LinkedPacked({role}, {_sources()})")


@register_model(LinkedType)
class _LinkedModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: LinkedType):
        super().__init__(dmm, fe_type, [(name, types.intp) for name in FIELDS])


for _name in FIELDS[len(OPERAND) :]:
    make_attribute_wrapper(LinkedType, _name, _name)


class LinkedOperand:
    """A packed operand as such a kernel takes it from the interpreter.

    Parameters
    ----------
    role : str
    values : tuple of int
        Of `FIELDS`. The caller keeps alive what they point to.
    """

    def __init__(self, role: str, values: tuple[int, ...]) -> None:
        self.role, self.values = role, values


@typeof_impl.register(LinkedOperand)
def _typeof_linked(value: LinkedOperand, context: Any) -> LinkedType:
    return LinkedType(value.role)


@unbox(LinkedType)
def _unbox_linked(typ: LinkedType, obj: Any, c: Any) -> NativeValue:
    values = c.pyapi.object_getattr_string(obj, "values")
    proxy = cgutils.create_struct_proxy(typ)(c.context, c.builder)
    for position, name in enumerate(FIELDS):
        setattr(proxy, name, c.unbox(types.intp, c.pyapi.tuple_getitem(values, position)).value)
    c.pyapi.decref(values)
    return NativeValue(proxy._getvalue(), is_error=cgutils.is_not_null(c.builder, c.pyapi.err_occurred()))


def require_role(typ: object, role: str, name: str) -> None:
    """Raise `TypingError` if the function ``name``, which reads ``role``, is given an operand of the other role."""
    if isinstance(typ, LinkedType) and typ.role != role:
        raise TypingError(f"{name} reads role {role!r}; an operand of role {typ.role!r} is for {TILES[typ.role]}")

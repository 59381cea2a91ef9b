"""Addresses of compiled functions: those emitted for one layout, and the operators, which serve every layout.

Both come from stored object code where there is some. Only what is built needs a compiler: LLVM for emitted functions,
Numba too for operators, which is imported then and not before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar, Protocol

from .isa import Isa, host_features, isa_named
from .machine import object_code, task_object_code, triple_of
from .objects import Key, addresses


class Spec(Protocol):
    """A frozen dataclass that says all that an emitted function depends on."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def isa(self) -> Isa: ...
    @property
    def symbol(self) -> str: ...


def emitted(spec: Spec, text: Callable[[], str]) -> int:
    """Address of the function that ``spec`` describes.

    Parameters
    ----------
    spec : Spec
    text : callable
        Emits the module that holds it.
    """
    key = Key((spec.symbol,), ("emitted", *_target(spec.isa), *_facts(spec, text)))
    return addresses(key, lambda: object_code(text(), spec.isa))[0]


def named(symbol: str, isa: Isa, text: Callable[[], str]) -> int:
    """Address of an emitted function whose ``symbol`` says all that it depends on but for the target."""
    return addresses(Key((symbol,), ("named", *_target(isa))), lambda: object_code(text(), isa))[0]


def for_any_host(symbols: tuple[str, ...], text: str) -> tuple[int, ...]:
    """Addresses of functions of a module that uses no feature of the host's."""
    isa = isa_named("generic")
    return addresses(Key(symbols, ("any host", *_target(isa), text)), lambda: object_code(text, isa))


def operator(name: str, isa: Isa) -> int:
    """Address of an operator's task, ``void task(job, index)``; see `lowbit.kernels.operators`.

    Parameters
    ----------
    name : str
        ``attend``, ``qk``, ``sv`` or ``gemv``; ``merge_attend`` or ``merge_sv``, whose indices are heads; ``append``,
        see `lowbit.kernels.append`; or a stage of `lowbit.kernels.rowwise`.
    isa : Isa
    """
    symbol = f"lowbit_{name}"

    def build() -> bytes:
        task = _task(name)
        return task_object_code(task.inspect_llvm(), task.native_name.removeprefix("cfunc."), symbol, isa)

    # Numba optimises for the host before the code is generated for the set.
    return addresses(Key((symbol,), ("operator", *_target(isa), *_host())), build)[0]


def _task(name: str) -> Any:
    from .. import append, gemv, operators, rowwise
    from ..plugin import DispatchedType

    operand = DispatchedType()
    match name:
        case "attend":
            return operators.build_attend(operand, operand)
        case "qk":
            return operators.build_qk(operand)
        case "sv":
            return operators.build_sv(operand)
        case "gemv":
            return gemv.build_gemv(operand)
        case "append":
            return append.build_append()
        case _ if name in rowwise.BUILDERS:
            return rowwise.BUILDERS[name]()
    return operators.build_merge(name.removeprefix("merge_"))


def _target(isa: Isa) -> tuple[str, ...]:
    return isa.name, isa.cpu, isa.features, triple_of(isa, jit=True)


def _host() -> tuple[str, ...]:
    import llvmlite.binding as llvm

    return str(llvm.get_host_cpu_name()), *sorted(host_features())


def _facts(spec: Spec, text: Callable[[], str]) -> tuple[str, ...]:
    """What the symbol may leave open. Only the code itself tells what a packing of somebody else's unpacks to."""
    values = {each.name: getattr(spec, each.name) for each in fields(spec)}
    facts = [f"{name}={value}" for name, value in values.items() if isinstance(value, str | int | float)]
    layout = getattr(spec, "layout", None)
    lower = layout.packing.lower if layout is not None else None
    if lower is not None and not lower.__module__.startswith(__package__.rpartition(".")[0]):
        facts.append(hashlib.sha256(text().encode()).hexdigest())
    return tuple(facts)

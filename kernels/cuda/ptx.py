"""From a kernel's Numba source to PTX that reads well and is the same every time. Needs no GPU."""

from __future__ import annotations

import functools
import importlib.util
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

from ..errors import CompileError
from .program import Entry
from .simulator import simulating

PACKAGES = ("numba-cuda", "nvidia-nvvm")
"""What PTX depends on besides the kernels' own sources."""

_pretending = threading.RLock()

_ENTRY = re.compile(r"\.visible \.entry (\w+)\(")
_ENVIRONMENT = re.compile(r"\.common \.global \.align 8 \.u64 (\w*NumbaEnv\w*);\n")
_MANGLED = re.compile(r"\b_ZN\w+")
_SHARED = re.compile(r"\b_cudapy_[sl]mem_\w+")
_INLINE = re.compile(r"^\s*// (?:begin|end) inline asm\n", re.MULTILINE)


def capability(arch: str) -> tuple[int, int]:
    """Compute capability of an architecture: (8, 6) of ``sm_86``."""
    number = arch.removeprefix("sm_")
    return int(number[:-1]), int(number[-1])


def compile_entry(entry: Entry, arch: str) -> str:
    """PTX of one kernel, called `Entry.symbol`.

    Raises
    ------
    CompileError
        If the ``cuda`` extra is missing, its NVVM has no such architecture, or the source does not compile.
    """
    return _compiled(entry, arch)


@functools.lru_cache(maxsize=512)
def _compiled(entry: Entry, arch: str) -> str:
    require_compiler()
    from numba import cuda
    from numba.cuda.cudadrv.error import CCSupportError, NvvmSupportError
    from numba.cuda.types import float32, int32, int64, void

    types: dict[str, Any] = {"pointer": int64, "int64": int64, "int32": int32, "float32": float32}
    signature = void(*(types[parameter.type] for parameter in entry.parameters))
    function = getattr(entry.function, "py_func", entry.function)
    try:
        with _pretended(arch):
            text, _ = cuda.compile_ptx(function, signature, cc=capability(arch))
    except CCSupportError:
        raise CompileError(f"the installed NVVM {_version('nvidia-nvvm')} does not compile for {arch}") from None
    except NvvmSupportError as error:
        raise CompileError(
            f"no NVVM to compile for {arch} with: install the extra, pip install 'lowbit[cuda]'"
        ) from error
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(f"{entry.symbol} does not compile for {arch}: {_first_line(error)}") from error
    return readable(text, entry.symbol)


@contextmanager
def _pretended(arch: str) -> Iterator[None]:
    """Tell Numba what to compile the functions for that a kernel calls: it would ask the GPU at hand."""
    from numba.cuda import dispatcher

    with _pretending:
        asked = dispatcher.get_current_device
        dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability(arch))
        try:
            yield
        finally:
            dispatcher.get_current_device = asked


def readable(ptx: str, symbol: str) -> str:
    """``ptx`` whose one kernel is called ``symbol``, without what Numba adds and nothing uses.

    Numba's names carry counters that depend on what was compiled before; numbers in order of appearance take their
    place.

    Raises
    ------
    CompileError
        If there is not exactly one kernel.
    """
    entries = _ENTRY.findall(ptx)
    if len(entries) != 1:
        raise CompileError(f"{symbol}: PTX of {len(entries)} kernels, expected one")
    for environment in _ENVIRONMENT.findall(ptx):
        if len(re.findall(rf"\b{environment}\b", ptx)) == 1:
            ptx = ptx.replace(f".common .global .align 8 .u64 {environment};\n", "")
    ptx = _INLINE.sub("", ptx)
    ptx = re.sub(rf"\b{entries[0]}(?=_param_|\b)", symbol, ptx)
    for pattern, name in ((_MANGLED, f"{symbol}_f"), (_SHARED, "shared_")):
        for number, found in enumerate(dict.fromkeys(pattern.findall(ptx))):
            ptx = re.sub(rf"\b{found}\b", f"{name}{number}", ptx)
    return ptx


def versions() -> dict[str, str]:
    """Version of each of `PACKAGES`; those that are missing are left out."""
    found = {name: _version(name) for name in PACKAGES}
    return {name: text for name, text in found.items() if text}


def require_compiler() -> None:
    """Refuse where this process makes no PTX at all.

    Raises
    ------
    CompileError
        If the ``cuda`` extra is missing, or numba-cuda is its simulator.
    """
    if importlib.util.find_spec("numba_cuda") is None:
        raise CompileError("kernels for NVIDIA GPUs need numba-cuda: install the extra, pip install 'lowbit[cuda]'")
    if simulating():
        raise CompileError("nothing is compiled under NUMBA_ENABLE_CUDASIM=1, where kernels run as Python")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _first_line(error: BaseException) -> str:
    """What went wrong in one line: Numba's errors begin with where they were met, and name the cause further down."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(("Failed in", "During:", "File "))]
    return told[0] if told else type(error).__name__

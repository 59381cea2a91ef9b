"""Where kernels of somebody's own come from: their files, and a digest of what they are made of."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from .errors import KernelError


def import_file(path: str) -> ModuleType:
    """The module in the file at ``path``, imported once a process. Its folder is searched for its own imports.

    Raises
    ------
    KernelError
        If there is no such file.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise KernelError(f"{path} does not exist")
    name = f"lowbit_kernels_of_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise KernelError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def digest(functions: Iterable[Any], rest: str) -> str:
    """Digest of functions, of the functions and plain values of the same program that they use, and of ``rest``.

    What this package and other installed ones define is not followed.
    """
    seen: dict[int, FunctionType] = {}
    parts: list[str] = []
    waiting = list(functions)
    while waiting:
        function = _plain(waiting.pop(0))
        if function is None or id(function) in seen:
            continue
        seen[id(function)] = function
        parts.append(_text(function))
        used = inspect.getclosurevars(function)
        for name, value in sorted({**used.globals, **used.nonlocals}.items()):
            if _followed(value, function):
                waiting.append(value)
            elif isinstance(value, int | float | complex | str | bytes | tuple | np.generic):
                parts.append(f"{name} = {value!r}")
            elif isinstance(value, np.ndarray):
                parts.append(f"{name} = {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}")
    return hashlib.sha256("\0".join([*parts, rest]).encode()).hexdigest()[:12]


def _plain(value: Any) -> FunctionType | None:
    """The Python function behind ``value``: itself, or what a Numba dispatcher compiles."""
    value = getattr(value, "py_func", value)
    return value if isinstance(value, FunctionType) else None


def _followed(value: Any, user: Callable[..., Any]) -> bool:
    """Whether ``value`` is a function that belongs to its user: it lies in the same folder."""
    function = _plain(value)
    if function is None:
        return False
    return Path(function.__code__.co_filename).parent == Path(user.__code__.co_filename).parent


def _text(function: FunctionType) -> str:
    """Source of a function, or its byte code where there is no source, as in an interactive session."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        code = function.__code__
        return f"{code.co_name} {code.co_code.hex()} {code.co_names} {code.co_consts!r}"

"""What the CUDA driver reports, as typed errors with one clear line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import CompileError, DeviceError, GpuFaultError, GpuMemoryError, LowbitError

STICKY = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ILLEGAL_ADDRESS",
        "LAUNCH_TIMEOUT",
        "CONTEXT_IS_DESTROYED",
        "ASSERT",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "ECC_UNCORRECTABLE",
    )
)
"""After these "any further CUDA work will return the same error. To continue using CUDA, the process must be terminated
and relaunched" (CUDA Driver API, CUresult)."""

_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
_ABSENT = ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_INVALID_DEVICE")
_CODE = (
    "CUDA_ERROR_INVALID_PTX",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
    "CUDA_ERROR_JIT_COMPILER_NOT_FOUND",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_INVALID_IMAGE",
    "CUDA_ERROR_INVALID_SOURCE",
    "CUDA_ERROR_NOT_FOUND",
)
_NAME = re.compile(r"CUDA_ERROR_[A-Z0-9_]+")


def typed(name: str, doing: str) -> DeviceError | CompileError:
    """The error for a `CUresult`'s ``name``; ``doing`` says what was being done."""
    if name in STICKY:
        return GpuFaultError(f"{doing}: {name}; this process can no longer use the GPU and must be started anew")
    if name == _MEMORY:
        return GpuMemoryError(f"{doing}: the GPU has too little memory left")
    if name in _ABSENT:
        return DeviceError(f"{doing}: there is no such NVIDIA GPU here")
    if name in _CODE:
        return CompileError(f"{doing}: the driver refused the code ({name})")
    return DeviceError(f"{doing}: {name}")


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn what cuda.core raises into typed errors.

    Raises
    ------
    GpuFaultError, GpuMemoryError, DeviceError, CompileError
        See `typed`. Errors that are no driver's are left as they are.
    """
    try:
        yield
    except LowbitError:
        raise
    except Exception as error:
        name = _NAME.search(str(error))
        if name is not None:
            raise typed(name[0], doing) from error
        if not isinstance(error, RuntimeError):
            raise
        # Some of cuda.core's errors do not say what the driver said. If the context is broken, it says so again.
        status = _context_status()
        raise (typed(status, doing) if status else DeviceError(f"{doing}: {error}")) from error


def _context_status() -> str:
    """The name of the error that the current context is in; empty for none."""
    from cuda.bindings import driver

    (status,) = driver.cuCtxSynchronize()
    return "" if int(status) == 0 else str(status.name)


def checked(result: tuple[Any, ...], doing: str) -> Any:
    """What a function of `cuda.bindings.driver` returned besides its status: None, one value, or several.

    Raises
    ------
    GpuFaultError, GpuMemoryError, DeviceError, CompileError
        See `typed`.
    """
    status, *values = result
    if int(status) != 0:
        raise typed(status.name, doing)
    return values[0] if len(values) == 1 else tuple(values) or None

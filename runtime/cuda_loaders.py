"""Who hands code to NVIDIA's driver: cuda.core, or PyCUDA where that is what is installed."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..kernels.cuda.device import ORDINARY_SHARED_BYTES, Driver, Geometry
from ..kernels.cuda.faults import typed
from ..kernels.errors import CompileError, DeviceError

LOADERS = ("cuda.core", "pycuda")
"""In order of preference."""


class Block(Protocol):
    """Device memory that lives as long as the object."""

    address: int
    nbytes: int


class Loaded(Protocol):
    """A kernel in the driver's hands."""

    symbol: str

    def argument_sizes(self) -> tuple[int, ...] | None:
        """Bytes of each parameter; None where nobody can tell."""


class Loader(Protocol):
    """What running shipped kernels needs of a GPU; raises the errors of `lowbit.kernels.cuda.device.Driver`."""

    @property
    def arch(self) -> str: ...

    def alloc(self, nbytes: int) -> Block: ...

    def fill(self, memory: Any, value: int = 0) -> None: ...

    def write(self, memory: Any, array: NDArray[Any], offset: int = 0) -> None: ...

    def read(self, memory: Any, out: NDArray[Any], offset: int = 0) -> NDArray[Any]: ...

    def load(self, code: bytes, symbol: str) -> Loaded: ...

    def launch(self, function: Any, geometry: Geometry, arguments: Sequence[np.generic]) -> None: ...

    def synchronize(self) -> None: ...


class CoreLoader(Driver):
    """cuda.core's: `lowbit.kernels.cuda.device.Driver` as it is."""

    @property
    def arch(self) -> str:
        return self.gpu.arch


def loader_named(name: str | None, ordinal: int = 0) -> Loader:
    """The loader called ``name``, or the first of `LOADERS` that is installed. One a thread and GPU: kernels that run
    one after the other share its stream.

    Raises
    ------
    DeviceError
        If there is none, or no GPU.
    """
    if name is not None and name not in LOADERS:
        raise DeviceError(f"unknown loader {name!r}: choose one of {', '.join(LOADERS)}")
    if name is None:
        name = "pycuda" if _installed("pycuda") and not _installed("cuda.core") else "cuda.core"
    opened: dict[tuple[str, int], Loader] = _opened.__dict__.setdefault("loaders", {})
    if (name, ordinal) not in opened:
        opened[name, ordinal] = PyCudaLoader(ordinal) if name == "pycuda" else CoreLoader(ordinal)
    return opened[name, ordinal]


_opened = threading.local()


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:
        return False


# -- PyCUDA ------------------------------------------------------------------------------------------------------------

_FAULTS = {
    "illegal memory access": "CUDA_ERROR_ILLEGAL_ADDRESS",
    "unspecified launch failure": "CUDA_ERROR_LAUNCH_FAILED",
    "misaligned address": "CUDA_ERROR_MISALIGNED_ADDRESS",
    "illegal instruction": "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "launch timed out": "CUDA_ERROR_LAUNCH_TIMEOUT",
    "invalid program counter": "CUDA_ERROR_INVALID_PC",
    "hardware stack error": "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "device-side assert": "CUDA_ERROR_ASSERT",
    "uncorrectable ECC": "CUDA_ERROR_ECC_UNCORRECTABLE",
    "context is destroyed": "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "out of memory": "CUDA_ERROR_OUT_OF_MEMORY",
    "invalid device ordinal": "CUDA_ERROR_INVALID_DEVICE",
    "no CUDA-capable device": "CUDA_ERROR_NO_DEVICE",
    "PTX JIT compilation failed": "CUDA_ERROR_INVALID_PTX",
    "PTX was compiled with an unsupported toolchain": "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
    "no kernel image is available": "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "device kernel image is invalid": "CUDA_ERROR_INVALID_IMAGE",
    "named symbol not found": "CUDA_ERROR_NOT_FOUND",
}
"""PyCUDA repeats `cuGetErrorString` instead of the error's name."""


@dataclass
class _PyCudaMemory:
    address: int
    nbytes: int
    held: Any


@dataclass
class _PyCudaFunction:
    symbol: str
    function: Any
    module: Any
    dynamic_bytes: int = ORDINARY_SHARED_BYTES

    def argument_sizes(self) -> tuple[int, ...] | None:
        return None


class PyCudaLoader:
    """PyCUDA's, on the device's primary context and its default stream. Owned by one thread.

    Raises
    ------
    DeviceError
        If PyCUDA is missing, cannot start, or there is no such GPU.
    """

    def __init__(self, ordinal: int = 0) -> None:
        try:
            import pycuda.driver as cuda
        except ImportError as error:
            raise DeviceError(
                "pycuda cannot be used: install the extra, pip install 'lowbit[pycuda]', which needs the CUDA headers "
                f"({error})"
            ) from error
        self._cuda = cuda
        with self._typed("starting CUDA"):
            cuda.init()
            device = cuda.Device(ordinal)
            major, minor = device.compute_capability()
            self._shared_bytes = device.get_attribute(cuda.device_attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
            self._context = device.retain_primary_context()
            self._context.push()
            atexit.register(self._context.pop)  # PyCUDA wants its stack of contexts empty when it ends
        self.arch = f"sm_{major}{minor}"

    def alloc(self, nbytes: int) -> _PyCudaMemory:
        with self._typed(f"allocating {nbytes} bytes on the GPU"):
            held = self._cuda.mem_alloc(max(nbytes, 1))
        return _PyCudaMemory(int(held), nbytes, held)

    def fill(self, memory: _PyCudaMemory, value: int = 0) -> None:
        if memory.nbytes:
            with self._typed("clearing GPU memory"):
                self._cuda.memset_d8(memory.address, value, memory.nbytes)

    def write(self, memory: _PyCudaMemory, array: NDArray[Any], offset: int = 0) -> None:
        _require_room(memory, array.nbytes, offset)
        if array.nbytes:
            with self._typed(f"copying {array.nbytes} bytes to the GPU"):
                self._cuda.memcpy_htod(memory.address + offset, np.ascontiguousarray(array))

    def read(self, memory: _PyCudaMemory, out: NDArray[Any], offset: int = 0) -> NDArray[Any]:
        _require_room(memory, out.nbytes, offset)
        if out.nbytes:
            with self._typed(f"copying {out.nbytes} bytes from the GPU"):
                self._cuda.memcpy_dtoh(out, memory.address + offset)
        return out

    def load(self, code: bytes, symbol: str) -> _PyCudaFunction:
        # PTX is text, and the driver looks for its end.
        code = code if code.startswith(b"\x7fELF") else code.rstrip(b"\0") + b"\0"
        with self._typed(f"loading kernel {symbol}"):
            module = self._cuda.module_from_buffer(code)
            return _PyCudaFunction(symbol, module.get_function(symbol), module)

    def launch(self, function: _PyCudaFunction, geometry: Geometry, arguments: Sequence[np.generic]) -> None:
        with self._typed(f"launching kernel {function.symbol}"):
            if geometry.shared_bytes > function.dynamic_bytes:
                if geometry.shared_bytes > self._shared_bytes:
                    raise CompileError(
                        f"kernel {function.symbol} wants {geometry.shared_bytes} bytes of shared memory, a block here "
                        f"has {self._shared_bytes}"
                    )
                attribute = self._cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
                function.function.set_attribute(attribute, geometry.shared_bytes)
                function.dynamic_bytes = geometry.shared_bytes
            function.function(
                *arguments, grid=geometry.grid, block=(geometry.threads, 1, 1), shared=geometry.shared_bytes
            )

    def synchronize(self) -> None:
        with self._typed("waiting for the GPU"):
            self._cuda.Context.synchronize()

    def _typed(self, doing: str) -> _Typed:
        return _Typed(self._cuda.Error, doing)


class _Typed:
    """Turns PyCUDA's errors into ours."""

    def __init__(self, kind: type[Exception], doing: str) -> None:
        self._kind, self._doing = kind, doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._kind):
            text = str(error)
            name = next((name for words, name in _FAULTS.items() if words in text), None)
            raise (typed(name, self._doing) if name else DeviceError(f"{self._doing}: {text}")) from error


def _require_room(memory: _PyCudaMemory, nbytes: int, offset: int) -> None:
    if offset < 0 or offset + nbytes > memory.nbytes:
        raise DeviceError(f"{nbytes} bytes at {offset} do not fit into {memory.nbytes} bytes of GPU memory")

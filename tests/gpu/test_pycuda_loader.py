"""The PyCUDA loader against a module with PyCUDA's names, signatures and messages (release 2026.1)."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lowbit.kernels.cuda.device import Blocks
from lowbit.kernels.errors import CompileError, DeviceError, GpuFaultError, GpuMemoryError
from lowbit.runtime import cuda_loaders
from lowbit.runtime.cuda_loaders import CoreLoader, PyCudaLoader, loader_named

OPTIN, DYNAMIC = object(), object()


class Error(Exception):
    """As ``pycuda._driver.Error``: no Python error's child."""


class LogicError(Error):
    pass


class CudaMemoryError(Error):
    pass


class Allocation:
    def __init__(self, size: int) -> None:
        self.data = np.zeros(size, np.uint8)

    def __int__(self) -> int:
        return self.data.ctypes.data


class Function:
    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name

    def set_attribute(self, attribute: object, value: int) -> None:
        assert attribute is DYNAMIC
        self.log.append(("set", value))

    def __call__(self, *args: np.number, grid: tuple[int, ...], block: tuple[int, int, int], shared: int) -> None:
        # `_build_arg_buf` takes NumPy's numbers as they are, by their own widths, and refuses Python's.
        assert all(isinstance(each, np.number) for each in args)
        self.log.append((self.name, grid, block, shared, [(each.dtype.char, each.item()) for each in args]))


class Module:
    def __init__(self, log: list[Any], code: bytes) -> None:
        self.log, self.code = log, code

    def get_function(self, name: str) -> Function:
        if name.encode() not in self.code:
            raise LogicError("cuModuleGetFunction failed: named symbol not found")
        return Function(self.log, name)


class Device:
    def __init__(self, ordinal: int) -> None:
        if ordinal:
            raise LogicError("cuDeviceGet failed: invalid device ordinal")

    def compute_capability(self) -> tuple[int, int]:
        return (8, 6)

    def get_attribute(self, attribute: object) -> int:
        assert attribute is OPTIN
        return 99 << 10

    def retain_primary_context(self) -> SimpleNamespace:
        return SimpleNamespace(push=lambda: None, pop=lambda: None)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    log: list[Any] = []
    driver = ModuleType("pycuda.driver")

    def mem_alloc(size: int) -> Allocation:
        if size > 1 << 30:
            raise CudaMemoryError("cuMemAlloc failed: out of memory")
        return Allocation(size)

    def module_from_buffer(buffer: bytes) -> Module:
        log.append(("code", buffer))
        if b"refuse" in buffer:
            raise LogicError("cuModuleLoadDataEx failed: a PTX JIT compilation failed - ")
        return Module(log, buffer)

    def memcpy_htod(dest: int, src: Any) -> None:
        source = np.frombuffer(src, np.uint8)
        _at(dest, source.size)[:] = source

    def memcpy_dtoh(dest: Any, src: int) -> None:
        target = np.frombuffer(dest, np.uint8)
        target[:] = _at(src, target.size)

    def memset_d8(dest: int, data: int, size: int) -> None:
        _at(dest, size)[:] = data

    def synchronize() -> None:
        if any(entry[0] == "fault" for entry in log):
            raise LogicError("cuCtxSynchronize failed: an illegal memory access was encountered")

    for function in (mem_alloc, module_from_buffer, memcpy_htod, memcpy_dtoh, memset_d8):
        setattr(driver, function.__name__, function)
    members: dict[str, Any] = {
        "Error": Error,
        "init": lambda flags=0: None,
        "Device": Device,
        "Context": SimpleNamespace(synchronize=synchronize),
        "device_attribute": SimpleNamespace(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=OPTIN),
        "function_attribute": SimpleNamespace(MAX_DYNAMIC_SHARED_SIZE_BYTES=DYNAMIC),
    }
    for name, value in members.items():
        setattr(driver, name, value)
    package = ModuleType("pycuda")
    package.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pycuda", package)
    monkeypatch.setitem(sys.modules, "pycuda.driver", driver)
    monkeypatch.setattr(atexit, "register", lambda function: None)
    return log


def _at(address: int, size: int) -> np.ndarray:
    import ctypes

    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def test_memory_code_and_launches(log: list[Any]) -> None:
    loader = PyCudaLoader()
    assert loader.arch == "sm_86"
    memory = loader.alloc(12)
    loader.fill(memory, 7)
    loader.write(memory, np.array([1, 2], np.float32), offset=4)
    assert loader.read(memory, np.empty(3, np.float32)).view(np.uint8)[:4].tolist() == [7] * 4
    assert loader.read(memory, np.empty(2, np.float32), offset=4).tolist() == [1, 2]
    with pytest.raises(DeviceError, match="do not fit"):
        loader.write(memory, np.zeros(4, np.float32))
    function = loader.load(b"\x7fELF main", "main")
    assert function.argument_sizes() is None
    arguments = (np.int64(1 << 40), np.int32(3), np.float32(0.5))
    for shared_bytes in (0, 64 << 10, 50 << 10):
        loader.launch(function, Blocks((2, 3, 1), 64, shared_bytes), arguments)
    loader.synchronize()
    values = [("l", 1 << 40), ("i", 3), ("f", 0.5)]
    launches = [entry for entry in log if entry[0] != "code"]
    assert launches == [
        ("main", (2, 3, 1), (64, 1, 1), 0, values),
        ("set", 64 << 10),
        ("main", (2, 3, 1), (64, 1, 1), 64 << 10, values),
        ("main", (2, 3, 1), (64, 1, 1), 50 << 10, values),
    ]
    with pytest.raises(CompileError, match="wants 102400 bytes"):
        loader.launch(function, Blocks((1, 1, 1), 32, 100 << 10), arguments)


def test_ptx_is_given_its_end_and_a_cubin_is_left_alone(log: list[Any]) -> None:
    loader = PyCudaLoader()
    loader.load(b".entry main", "main")
    loader.load(b"\x7fELF main", "main")
    assert [entry[1] for entry in log] == [b".entry main\0", b"\x7fELF main"]


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        (lambda loader: loader.alloc(1 << 40), GpuMemoryError),
        (lambda loader: loader.load(b"refuse", "main"), CompileError),
        (lambda loader: loader.load(b".entry main", "other"), CompileError),
        (lambda loader: PyCudaLoader(1), DeviceError),
    ],
)
def test_errors_are_typed_by_what_the_driver_says(
    log: list[Any], action: Callable[[PyCudaLoader], object], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        action(PyCudaLoader())


def test_a_fault_is_one(log: list[Any]) -> None:
    loader = PyCudaLoader()
    function = loader.load(b".entry fault", "fault")
    loader.launch(function, Blocks((1, 1, 1), 32, 0), ())
    with pytest.raises(GpuFaultError):
        loader.synchronize()


def test_pycuda_is_taken_where_cuda_core_is_missing(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_loaders, "_opened", type(cuda_loaders._opened)())
    monkeypatch.setattr(cuda_loaders, "_installed", lambda package: package == "pycuda")
    assert isinstance(loader_named(None), PyCudaLoader)
    assert loader_named(None) is loader_named("pycuda")
    monkeypatch.setattr(cuda_loaders, "_installed", lambda package: True)
    monkeypatch.setattr(CoreLoader, "__init__", lambda self, ordinal: None)
    assert isinstance(loader_named(None), CoreLoader)


def test_without_pycuda_the_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    with pytest.raises(DeviceError, match=r"pip install 'lowbit\[pycuda\]'"):
        PyCudaLoader()

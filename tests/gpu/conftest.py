"""The driver without a GPU: built once a run, and loaded only by processes that are told to."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
VARIABLE = "LOWBIT_FAKE_DRIVER"


def _header() -> Path | None:
    spec = find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for found in Path(place).glob("*/include/cuda.h"):
            return found.parent
    return None


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that finds the fake as its driver."""
    pytest.importorskip("cuda.core")
    header, compiler = _header(), shutil.which("cc")
    if header is None or compiler is None or sys.platform != "linux":
        pytest.skip("building the fake driver needs cc and cuda.h")
    place = tmp_path_factory.mktemp("driver")
    for source, library in (("fake_driver.c", "libcuda.so.1"), ("fake_nvml.c", "libnvidia-ml.so.1")):
        command = [compiler, "-shared", "-fPIC", "-O1", "-D_GNU_SOURCE", f"-Wl,-soname,{library}", f"-I{header}"]
        subprocess.run([*command, str(HERE / source), "-o", str(place / library), "-ldl"], check=True)
    return {**os.environ, "LD_LIBRARY_PATH": str(place), VARIABLE: str(place / "libcuda.so.1")}


class Launched:
    """One launch, as the driver was told of it."""

    def __init__(self, library: ctypes.CDLL, n: int) -> None:
        self.symbol = library.fake_symbol(n).decode()
        geometry = (ctypes.c_uint * 7)()
        library.fake_geometry(n, geometry)
        self.grid, self.block, self.shared_bytes = tuple(geometry[:3]), tuple(geometry[3:6]), geometry[6]
        raw = ctypes.create_string_buffer(512)
        count = library.fake_arguments(n, raw)
        self.arguments = raw.raw[:count]


class FakeDriver:
    """What a test says to the fake driver, and asks of it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.fake_symbol.restype = ctypes.c_char_p
        library.fake_allocated.restype = ctypes.c_ulonglong
        library.fake_now_us.restype = ctypes.c_double
        library.fake_cost.argtypes = [ctypes.c_char_p, ctypes.c_double, ctypes.c_double]
        library.fake_reset()

    def cost(self, symbol: str, warm_us: float, cold_us: float) -> None:
        self._library.fake_cost(symbol.encode(), warm_us, cold_us)

    def arch(self, major: int, minor: int) -> None:
        self._library.fake_arch(major, minor)

    @property
    def now_us(self) -> float:
        return float(self._library.fake_now_us())

    @property
    def allocated(self) -> int:
        return int(self._library.fake_allocated())

    @property
    def launches(self) -> list[Launched]:
        return [Launched(self._library, n) for n in range(self._library.fake_launches())]


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    path = os.environ.get(VARIABLE)
    if path is None:
        pytest.skip("runs in a process with the fake driver: see test_with_fake_driver.py")
    driver = FakeDriver(ctypes.CDLL(path, ctypes.RTLD_GLOBAL))
    yield driver
    driver._library.fake_reset()

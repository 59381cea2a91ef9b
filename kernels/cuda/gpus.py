"""Which NVIDIA GPUs this machine has."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from ..errors import DeviceError
from .faults import checked

_DRIVER_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


@dataclass(frozen=True)
class GpuHere:
    """A GPU as its driver describes it.

    Attributes
    ----------
    ordinal : int
        What `lowbit.kernels.cuda.device.Driver` takes.
    name : str
    arch : str
        ``sm_86``.
    sms : int
        Streaming multiprocessors.
    clock_mhz, memory_clock_mhz : float
        The highest of each.
    bus_bits : int
        Width of the memory bus.
    memory_bytes, l2_bytes : int
    shared_bytes, shared_bytes_sm : int
        Most shared memory of a block that asks for it, and of an SM.
    registers_sm, threads_sm : int
        Registers, and most threads, of an SM.
    ecc : bool
    driver : str
        Newest CUDA version that the driver serves: ``13.0``.
    uuid, pci : str
    """

    ordinal: int
    name: str
    arch: str
    sms: int
    clock_mhz: float
    memory_clock_mhz: float
    bus_bits: int
    memory_bytes: int
    l2_bytes: int
    shared_bytes: int
    shared_bytes_sm: int
    registers_sm: int
    threads_sm: int
    ecc: bool
    driver: str
    uuid: str
    pci: str

    @property
    def bandwidth_gbps(self) -> float:
        """Bytes a nanosecond that the memory's pins move: two transfers a clock (double data rate)."""
        return 2 * self.memory_clock_mhz * 1e6 * self.bus_bits / 8 / 1e9

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def has_driver() -> bool:
    """Whether NVIDIA's driver, and the package that speaks to it, are installed; imports neither."""
    try:
        if find_spec("cuda.bindings") is None or find_spec("cuda.core") is None:
            return False
        ctypes.CDLL(_DRIVER_LIBRARY)
    except (ImportError, OSError):
        return False
    return True


def why_no_driver() -> str:
    """What to do about a missing driver or package, in one line."""
    try:
        missing = find_spec("cuda.bindings") is None or find_spec("cuda.core") is None
    except ImportError:
        missing = True
    if missing:
        return "cuda.core is not installed: install the extra, pip install 'lowbit[cuda]'"
    return f"NVIDIA's driver ({_DRIVER_LIBRARY}) is not installed on this machine"


def gpus_here() -> list[GpuHere]:
    """The machine's NVIDIA GPUs in the driver's order; empty without a driver, or with one that does not start."""
    if not has_driver():
        return []
    from cuda.bindings import driver

    try:
        checked(driver.cuInit(0), "starting CUDA")
        count = checked(driver.cuDeviceGetCount(), "counting GPUs")
        return [describe(ordinal) for ordinal in range(count)]
    except (DeviceError, RuntimeError):
        return []


def describe(ordinal: int) -> GpuHere:
    """The GPU number ``ordinal``, once `cuInit` has been called.

    Raises
    ------
    DeviceError
        If there is none.
    """
    from cuda.bindings import driver

    doing = f"looking at GPU {ordinal}"
    device = checked(driver.cuDeviceGet(ordinal), doing)
    attributes = driver.CUdevice_attribute

    def attribute(name: str) -> int:
        return int(
            checked(driver.cuDeviceGetAttribute(getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), device), doing)
        )

    version = int(checked(driver.cuDriverGetVersion(), doing))
    name = checked(driver.cuDeviceGetName(100, device), doing)
    uuid = bytes(checked(driver.cuDeviceGetUuid(device), doing).bytes).hex()
    pci = checked(driver.cuDeviceGetPCIBusId(32, device), doing)
    return GpuHere(
        ordinal=ordinal,
        name=_text(name),
        arch=f"sm_{attribute('COMPUTE_CAPABILITY_MAJOR')}{attribute('COMPUTE_CAPABILITY_MINOR')}",
        sms=attribute("MULTIPROCESSOR_COUNT"),
        clock_mhz=attribute("CLOCK_RATE") / 1e3,
        memory_clock_mhz=attribute("MEMORY_CLOCK_RATE") / 1e3,
        bus_bits=attribute("GLOBAL_MEMORY_BUS_WIDTH"),
        memory_bytes=int(checked(driver.cuDeviceTotalMem(device), doing)),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        shared_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_bytes_sm=attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        registers_sm=attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        threads_sm=attribute("MAX_THREADS_PER_MULTIPROCESSOR"),
        ecc=bool(attribute("ECC_ENABLED")),
        driver=f"{version // 1000}.{version % 1000 // 10}",
        uuid=f"GPU-{uuid[:8]}-{uuid[8:12]}-{uuid[12:16]}-{uuid[16:20]}-{uuid[20:]}",
        pci=_text(pci),
    )


def _text(value: bytes | str) -> str:
    return value.split(b"\0", 1)[0].decode() if isinstance(value, bytes) else value

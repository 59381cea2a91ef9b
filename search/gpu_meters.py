"""What NVIDIA's management library (NVML) tells of a GPU while it is measured: clocks, throttling, energy.

Needs the package nvidia-ml-py, whose module is called ``pynvml``; without it, or on a GPU that does not tell,
everything is None and measuring goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}
"""Bits of ``nvmlDeviceGetCurrentClocksEventReasons`` (NVML API reference)."""

SLOWED = frozenset({"hardware slowdown", "thermal slowdown", "hardware thermal slowdown", "power brake"})
"""Reasons that make a measurement one of something else than the kernel. A power cap is a board's usual state."""

ENERGY_STEP_S = 0.1
"""Counters of energy move about this often."""


@dataclass(frozen=True)
class GpuState:
    """A GPU at one moment.

    Attributes
    ----------
    sm_mhz, memory_mhz : int
    reasons : tuple of str
        Why clocks are not higher; of `REASONS`.
    temperature_c : int
    power_w : float
        0 where the board does not tell.
    """

    sm_mhz: int
    memory_mhz: int
    reasons: tuple[str, ...]
    temperature_c: int
    power_w: float

    @property
    def slowed(self) -> bool:
        return not SLOWED.isdisjoint(self.reasons)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Energy:
    """What one call costs.

    Attributes
    ----------
    joules : float
        Of one call, the GPU's idle power included.
    watts : float
        Mean power while it was repeated.
    calls : int
    seconds : float
    """

    joules: float
    watts: float
    calls: int
    seconds: float


class Meter:
    """Reads one GPU. Owned by one thread.

    Parameters
    ----------
    pci : str
        `GpuHere.pci`; the order of GPUs differs between NVML and CUDA.

    Attributes
    ----------
    missing : str
        Why it reads nothing; empty if it does.
    """

    def __init__(self, pci: str) -> None:
        self.missing = ""
        self._nvml: Any = None
        if find_spec("pynvml") is None:
            self.missing = "nvidia-ml-py is not installed: no clocks, no energy"
            return
        import pynvml

        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci.encode())
            self._nvml = pynvml
        except pynvml.NVMLError as error:
            self.missing = f"NVML cannot be read: {error}"

    def state(self) -> GpuState | None:
        """The GPU now; None where NVML does not tell its clocks."""
        nvml = self._nvml
        if nvml is None:
            return None
        clock = self._asked(lambda: nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM))
        memory = self._asked(lambda: nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_MEM))
        if clock is None or memory is None:
            return None
        bits = self._asked(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)) or 0
        sensor = nvml.NVML_TEMPERATURE_GPU
        return GpuState(
            sm_mhz=int(clock),
            memory_mhz=int(memory),
            reasons=tuple(name for bit, name in REASONS.items() if bits & bit),
            temperature_c=int(self._asked(lambda: nvml.nvmlDeviceGetTemperature(self._handle, sensor)) or 0),
            power_w=(self._asked(lambda: nvml.nvmlDeviceGetPowerUsage(self._handle)) or 0) / 1e3,
        )

    def millijoules(self) -> int | None:
        """Energy since the driver was loaded (Volta and later)."""
        nvml = self._nvml
        if nvml is None:
            return None
        return self._asked(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))

    def energy(self, calls: int, run: Callable[[], object], seconds: float = 2.0) -> Energy | None:
        """Energy of one call while ``run``, which makes ``calls`` of them and waits, is repeated for ``seconds``.

        The counter moves in steps, so counting begins and ends at one. None where the GPU has no counter, or it stands.
        """
        if self.millijoules() is None:
            return None
        _, before, start = self._step(run, calls)
        done = 0
        while time.perf_counter() - start < seconds:
            run()
            done += calls
        more, after, end = self._step(run, calls)
        if after == before:
            return None
        joules, taken = (after - before) / 1e3, end - start
        return Energy(joules / (done + more), joules / taken, done + more, taken)

    def _step(self, run: Callable[[], object], calls: int) -> tuple[int, int, float]:
        """Run until the counter moves, or long enough: calls made, the counter, and the time."""
        first = self.millijoules()
        deadline, made = time.perf_counter() + 10 * ENERGY_STEP_S, 0
        while True:
            run()
            made += calls
            found, now = self.millijoules(), time.perf_counter()
            if found != first or now > deadline:
                return made, found or 0, now

    def _asked(self, ask: Callable[[], int]) -> int | None:
        try:
            return int(ask())
        except self._nvml.NVMLError:
            return None

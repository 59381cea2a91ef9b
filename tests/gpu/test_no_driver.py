from __future__ import annotations

import subprocess
import sys

import pytest
from lowbit.kernels.cuda import device, gpus
from lowbit.kernels.errors import DeviceError, GpuFaultError, poisoned


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_DRIVER_LIBRARY", "liblowbit-no-such-driver.so.1")


@pytest.mark.usefixtures("no_driver")
def test_without_a_driver_there_are_no_gpus_and_one_clear_line() -> None:
    assert gpus.gpus_here() == []
    with pytest.raises(DeviceError) as caught:
        device.Driver()
    assert "no NVIDIA GPU can be used" in str(caught.value) and "\n" not in str(caught.value)
    assert not poisoned(caught.value)


def test_without_the_package_the_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_spec", lambda name: None)
    assert gpus.gpus_here() == []
    with pytest.raises(DeviceError, match=r"pip install 'lowbit\[cuda\]'"):
        device.Driver()


def test_importing_costs_cpu_users_nothing() -> None:
    program = (
        "import sys; import lowbit.kernels.cuda.device as d; d.Memory(0, 0).free();"
        "print([name for name in sys.modules if name.startswith(('cuda.core', 'cuda.bindings', 'numba'))])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_only_a_fault_poisons_and_a_chain_of_causes_is_followed() -> None:
    assert poisoned(GpuFaultError("x"))
    assert not poisoned(DeviceError("x"))
    outer = ValueError("y")
    outer.__cause__ = GpuFaultError("x")
    assert poisoned(outer)

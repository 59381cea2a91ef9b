"""Timing on a GPU whose clock the test knows: a launch takes 4 us, 1.5 us in a graph, and kernels what is set here."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest
from lowbit.kernels.cuda.device import Blocks, Driver
from lowbit.kernels.errors import GpuFaultError
from lowbit.search import gpu_timing
from lowbit.search.control import Contention, ControlTime
from lowbit.search.gpu_meters import GpuState, Meter
from lowbit.search.gpu_timing import GpuControl, GpuStopwatch, copies_wanted, read_bandwidth_gbps
from lowbit.search.rounds import Effort, Timed, interleave, tainted
from lowbit.search.timing import Slot

CODE = b""".version 7.0
.target sm_80
.visible .entry attend(.param .u64 k) { ret; }
.visible .entry merge(.param .u64 k) { ret; }
.visible .entry other(.param .u64 k) { ret; }
.visible .entry fault(.param .u64 k) { ret; }
"""
GEOMETRY = Blocks((8, 4, 1), 128, 0)


class Call:
    """Launches symbols one after the other, on operands at an address of its own."""

    def __init__(self, driver, address, *symbols):
        self.driver, self.address = driver, address
        self.functions = [driver.load(CODE, symbol) for symbol in symbols]

    def enqueue(self):
        for function in self.functions:
            self.driver.launch(function, GEOMETRY, [np.int64(self.address)])


@pytest.fixture
def driver(fake):
    fake.cost("attend", 5.0, 30.0)
    fake.cost("merge", 2.0, 2.0)
    fake.cost("other", 8.0, 8.0)
    return Driver()


def test_warm_calls_are_timed_in_a_graph_that_lasts(fake, driver):
    stopwatch = GpuStopwatch([Call(driver, 1, "attend", "merge")], "warm")
    samples = stopwatch.samples()
    assert samples == pytest.approx([5.0 + 2.0 + 2 * 1.5] * len(samples), rel=1e-4)
    assert gpu_timing.MIN_SAMPLES <= len(samples) <= gpu_timing.MAX_SAMPLES
    replay = [each.symbol for each in fake.launches[-2:]]
    assert replay == ["attend", "merge"]
    assert stopwatch._graph.calls * samples[0] >= 0.5 * gpu_timing.BATCH_US
    assert stopwatch.launch_us() == pytest.approx(2 * 1.5, rel=1e-4)


def test_cold_calls_are_flushed_before_each_replay_and_read_each_copy_once(fake, driver):
    calls = [Call(driver, address, "attend", "merge") for address in (1, 2, 3)]
    stopwatch = GpuStopwatch(calls, "cold")
    samples = stopwatch.samples()
    assert samples == pytest.approx([30.0 + 2.0 + 3.0] * len(samples), rel=1e-4)
    symbols = [each.symbol for each in fake.launches]
    last = len(symbols) - symbols[::-1].index("lowbit_read")
    assert symbols[last:] == ["lowbit_spin", *["attend", "merge"] * 3]
    addresses = [int.from_bytes(each.arguments, "little") for each in fake.launches[-6::2]]
    assert addresses == [1, 2, 3]


def test_enqueuing_is_never_in_a_sample(driver, monkeypatch):
    """What is timed is queued behind other work: nothing waits between the cover and the second event."""
    order = []
    for name in ("spin", "event", "synchronize", "flush_l2"):
        original = getattr(driver, name)

        def noted(*args, name=name, original=original):
            order.append(name)
            return original(*args)

        monkeypatch.setattr(driver, name, noted)
    stopwatch = GpuStopwatch([Call(driver, 1, "attend")], "cold")
    stopwatch._prepare()
    order.clear()
    stopwatch._replay(stopwatch._graph)
    assert order == ["flush_l2", "spin", "event", "event"]


def test_copies_fill_a_sample_and_stay_within_bounds():
    assert copies_wanted(64 << 20, "cold") == 1
    assert copies_wanted(8 << 20, "cold") == 4
    assert copies_wanted((8 << 20) - 1, "cold") == 5
    assert copies_wanted(1 << 10, "cold") == copies_wanted(0, "cold") == gpu_timing.MAX_COPIES
    assert copies_wanted(1 << 10, "warm") == 1


def test_a_slot_has_controls_launches_and_clocks(driver):
    meter = Meter(driver.gpu.pci)
    slot = GpuStopwatch([Call(driver, 1, "attend")], "cold", meter).slot(GpuControl(driver))
    assert isinstance(slot, Slot)
    assert slot.launch_us == pytest.approx(1.5, rel=1e-4)
    assert slot.samples_us == pytest.approx([31.5] * len(slot.samples_us), rel=1e-4)
    assert slot.state == GpuState(1695, 9751, ("power cap",), 61, 0.0)
    assert not slot.preempted
    # 10,000 steps of 2 ns and a launch; 64 MiB in whole rounds at 1 TB/s and a launch.
    assert slot.before.compute_us == pytest.approx(24.0, rel=1e-3)
    rounds = (64 << 20) // (82 * 1024 * 64)
    assert slot.after.stream_us == pytest.approx(rounds * 82 * 1024 * 64 / 1e6 + 4, rel=1e-3)
    assert slot.control.arrival_us > 0


@pytest.mark.parametrize(("bits", "slowed"), [(0, False), (4, False), (0x40, True), (0x88, True), (0x20, True)])
def test_a_board_that_slows_itself_down_taints_the_slot(driver, bits, slowed):
    meter = Meter(driver.gpu.pci)
    library = ctypes.CDLL("libnvidia-ml.so.1")
    library.fake_nvml_reasons(bits)
    try:
        slot = GpuStopwatch([Call(driver, 1, "attend")], "warm", meter).slot(GpuControl(driver))
    finally:
        library.fake_nvml_reasons(4)
    assert slot.preempted == slowed
    contention = Contention(arrival_ceiling_us=1e9, arrival_floor_us=1e9)  # this machine's processors may be busy
    contention.see(slot.before)
    assert tainted(slot, contention) == slowed


def test_candidates_interleave_as_on_a_cpu(driver):
    watches = {
        name: GpuStopwatch([Call(driver, n, name)], "warm", Meter(driver.gpu.pci))
        for n, name in enumerate(("attend", "other"), start=1)
    }
    control = GpuControl(driver)
    found = {}
    interleave(
        watches,
        lambda name: watches[name].slot(control),
        Effort(min_rounds=2, max_rounds=3),
        Contention(arrival_ceiling_us=1e9, arrival_floor_us=1e9),
        found.__setitem__,
    )
    assert {name: type(result) for name, result in found.items()} == {"attend": Timed, "other": Timed}
    assert found["attend"].samples_us[0] == pytest.approx(6.5, rel=1e-3)
    assert found["other"].samples_us[0] == pytest.approx(9.5, rel=1e-3)
    conditions = found["attend"].conditions
    assert conditions.pop("launch_us") == pytest.approx(1.5, rel=1e-3)
    told = {"sm_mhz": 1695, "memory_mhz": 9751, "reasons": ["power cap"], "temperature_c": 61, "power_w": 0.0}
    assert conditions == told


def test_a_recent_control_is_not_taken_again(driver, fake):
    control = GpuControl(driver)
    first = control.time()
    before = len(fake.launches)
    assert control.recent() is first
    assert len(fake.launches) == before
    control._last = (0, first)
    assert control.recent() is not first


def test_energy_is_counted_from_step_to_step(driver):
    meter = Meter(driver.gpu.pci)
    stopwatch = GpuStopwatch([Call(driver, 1, "attend")], "warm", meter)
    energy = stopwatch.energy(seconds=0.2)
    # A call takes 6.5 us of the fake clock, at 200 W of it.
    assert energy.joules == pytest.approx(200 * 6.5e-6, rel=0.1)
    assert energy.watts == pytest.approx(energy.joules * energy.calls / energy.seconds)


def test_a_board_without_a_counter_has_no_energy(driver):
    meter = Meter(driver.gpu.pci)
    library = ctypes.CDLL("libnvidia-ml.so.1")
    library.fake_nvml_energy(0)
    try:
        assert GpuStopwatch([Call(driver, 1, "attend")], "warm", meter).energy(seconds=0.01) is None
    finally:
        library.fake_nvml_energy(1)
    assert GpuStopwatch([Call(driver, 1, "attend")], "warm").energy() is None


def test_without_nvml_there_is_a_reason_and_no_state(fake, monkeypatch):
    other = Meter("0000:99:00.0")
    assert "Not Found" in other.missing and other.state() is None and other.millijoules() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("lowbit.search.gpu_meters.find_spec", lambda name: None)
    missing = Meter("0000:3B:00.0")
    assert "nvidia-ml-py" in missing.missing and missing.state() is None


def test_bandwidth_is_bytes_over_time(driver):
    # A read takes its bytes at 1 TB/s and a launch of 4 us; a quarter of the 1 GiB of memory is read.
    nbytes = 1 << 28
    nbytes = nbytes // (82 * 1024 * 64) * (82 * 1024 * 64)
    found = read_bandwidth_gbps(driver)
    assert found == pytest.approx(nbytes / (nbytes / 1e6 + 4) / 1e3, rel=0.02)


def test_a_fault_ends_the_slot_with_the_error_that_ends_the_process(driver):
    stopwatch = GpuStopwatch([Call(driver, 1, "fault")], "cold")
    with pytest.raises(GpuFaultError):
        stopwatch.slot(GpuControl(driver))


def test_graphs_can_be_made_anew(driver):
    stopwatch = GpuStopwatch([Call(driver, 1, "attend")], "warm")
    first = stopwatch.samples()
    stopwatch.close()
    assert stopwatch.samples() == pytest.approx(first)
    assert isinstance(GpuControl(driver).time(), ControlTime)

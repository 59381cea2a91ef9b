from __future__ import annotations

import gc
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from lowbit.kernels.cuda.device import Driver, typed_arguments
from lowbit.kernels.cuda.gpus import gpus_here
from lowbit.kernels.errors import CompileError, DeviceError, GpuFaultError, GpuMemoryError, poisoned

KERNEL = b"""// registers 40
.version 7.0
.target sm_80
.visible .entry scale(.param .u64 x, .param .s32 n, .param .f32 factor, .param .u64 out) { ret; }
.visible .entry fault(.param .u64 x) { ret; }
"""


def geometry(grid=(3, 2, 1), threads=64, shared_bytes=0):
    return SimpleNamespace(grid=grid, threads=threads, shared_bytes=shared_bytes)


def parameters(**types):
    return [SimpleNamespace(name=name, type=type_) for name, type_ in types.items()]


def test_the_gpu_is_described_by_its_driver(fake):
    (gpu,) = gpus_here()
    assert (gpu.name, gpu.arch, gpu.sms, gpu.driver) == ("Fake GPU", "sm_86", 82, "13.5")
    assert gpu.uuid == "GPU-00112233-4455-6677-8899-aabbccddeeff"
    assert gpu.bandwidth_gbps == pytest.approx(936.1, abs=0.1)  # 19.5 GT/s on 384 bits
    assert Driver().gpu == gpu


def test_a_gpu_that_is_not_there_is_refused(fake):
    with pytest.raises(DeviceError, match="no such NVIDIA GPU") as caught:
        Driver(3)
    assert not poisoned(caught.value)


def test_memory_comes_back_as_it_went(fake):
    driver = Driver()
    rng = np.random.default_rng(1)
    before = fake.allocated
    array = rng.integers(0, 255, (7, 11), np.uint8)
    memory = driver.upload(array.T)
    assert (driver.read(memory, np.empty((11, 7), np.uint8)) == array.T).all()
    driver.write(memory, np.arange(3, dtype=np.uint8), offset=5)
    assert (driver.read(memory, np.empty(3, np.uint8), offset=5) == [0, 1, 2]).all()
    driver.fill(memory, 9)
    assert (driver.read(memory, np.empty(77, np.uint8)) == 9).all()
    del memory
    gc.collect()
    assert fake.allocated == before


def test_what_does_not_fit_is_refused_before_it_is_copied(fake):
    driver = Driver()
    memory = driver.alloc(8)
    with pytest.raises(GpuMemoryError):
        driver.write(memory, np.zeros(9, np.uint8))
    with pytest.raises(GpuMemoryError):
        driver.read(memory, np.zeros(1, np.uint8), offset=8)
    with pytest.raises(DeviceError, match="contiguous"):
        driver.read(memory, np.zeros((4, 4), np.uint8)[:, 1])
    memory.free()
    memory.free()
    with pytest.raises(GpuMemoryError):
        driver.write(memory, np.zeros(1, np.uint8))


def test_too_much_memory_is_an_error_of_its_own(fake):
    with pytest.raises(GpuMemoryError, match="too little memory") as caught:
        Driver().alloc(1 << 40)
    assert not poisoned(caught.value)


@pytest.mark.parametrize("code", [KERNEL, b"\x7fELF" + KERNEL], ids=["ptx", "cubin"])
def test_arguments_reach_the_driver_with_their_widths(fake, code):
    driver = Driver()
    function = driver.load(code, "scale")
    assert (function.registers, function.argument_sizes()) == (40, (8, 4, 4, 8))
    given = {"x": 1 << 40, "n": -3, "factor": 0.5, "out": 7, "other": 1}
    arguments = typed_arguments(parameters(x="pointer", n="int32", factor="float32", out="int64"), given)
    driver.launch(function, geometry(shared_bytes=1024), arguments)
    driver.synchronize()
    (launched,) = fake.launches
    assert launched.arguments == struct.pack("<qifq", 1 << 40, -3, 0.5, 7)
    assert (launched.symbol, launched.grid, launched.block) == ("scale", (3, 2, 1), (64, 1, 1))
    assert launched.shared_bytes == 1024


def test_arguments_that_do_not_fit_are_refused(fake):
    with pytest.raises(CompileError, match="n \\(int32\\) cannot be 4294967296"):
        typed_arguments(parameters(n="int32"), {"n": 1 << 32})
    with pytest.raises(CompileError, match="has no value"):
        typed_arguments(parameters(n="int32"), {})
    with pytest.raises(CompileError, match="has no value"):
        typed_arguments(parameters(n="int16"), {"n": 1})


def test_more_shared_memory_than_ordinary_is_asked_for(fake):
    driver = Driver()
    function = driver.load(KERNEL, "scale")
    arguments = [np.int64(0), np.int32(0), np.float32(0), np.int64(0)]
    driver.launch(function, geometry(shared_bytes=99 << 10), arguments)
    driver.launch(function, geometry(shared_bytes=64 << 10), arguments)
    assert [each.shared_bytes for each in fake.launches] == [99 << 10, 64 << 10]
    with pytest.raises(CompileError, match="wants 102400 bytes of shared memory, a block here has 101376"):
        driver.launch(function, geometry(shared_bytes=100 << 10), arguments)
    with pytest.raises(CompileError, match="1024 threads a block, not 2048"):
        driver.launch(function, geometry(threads=2048), arguments)


def test_code_that_the_driver_refuses_is_a_compile_error(fake):
    driver = Driver()
    for code, symbol in ((b"refuse", "x"), (KERNEL, "absent"), (KERNEL.replace(b"sm_80", b"sm_90"), "scale")):
        with pytest.raises(CompileError, match="loading kernel"):
            driver.load(code, symbol)
    driver.load(KERNEL, "scale")


def test_a_fault_poisons_everything_after_it(fake):
    driver = Driver()
    function = driver.load(KERNEL, "fault")
    driver.launch(function, geometry(), [np.int64(0)])
    for action in (
        driver.synchronize,
        lambda: driver.alloc(4),
        lambda: driver.launch(function, geometry(), [np.int64(0)]),
        lambda: driver.load(KERNEL, "scale"),
        driver.event,
    ):
        with pytest.raises(GpuFaultError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS.*must be started anew") as caught:
            action()
        assert poisoned(caught.value)
    try:
        try:
            driver.synchronize()
        except GpuFaultError as error:
            raise RuntimeError("while checking") from error
    except RuntimeError as error:
        assert poisoned(error)


def test_events_measure_what_lies_between_them(fake):
    driver = Driver()
    fake.cost("scale", 10.0, 10.0)
    function = driver.load(KERNEL, "scale")
    start = driver.event()
    for _ in range(3):
        driver.launch(function, geometry(), [np.int64(0), np.int32(0), np.float32(0), np.int64(0)])
    assert driver.event().since(start) == pytest.approx(3 * (10.0 + 4.0))


def test_a_graph_replays_what_was_captured_and_nothing_else(fake):
    driver = Driver()
    graph = driver.capture([lambda: driver.spin(1000)] * 4 + [driver.nothing])
    assert fake.launches == []
    start = driver.event()
    graph.enqueue()
    graph.enqueue()
    assert driver.event().since(start) == pytest.approx(2 * (4 * 2.0 + 5 * 1.5))
    assert [each.symbol for each in fake.launches] == (["lowbit_spin"] * 4 + ["lowbit_empty"]) * 2
    graph.close()
    driver.spin(1)
    assert fake.launches[-1].symbol == "lowbit_spin"


def test_an_empty_capture_has_as_many_launches_that_do_nothing(fake):
    driver = Driver()
    function = driver.load(KERNEL, "scale")
    fake.cost("scale", 10.0, 10.0)
    arguments = [np.int64(0), np.int32(0), np.float32(0), np.int64(0)]

    def call():
        driver.launch(function, geometry(shared_bytes=99 << 10), arguments)
        driver.spin(1000)

    graph = driver.capture_empty([call] * 3)
    start = driver.event()
    graph.enqueue()
    assert driver.event().since(start) == pytest.approx(6 * 1.5)
    assert {each.symbol for each in fake.launches} == {"lowbit_empty"}
    call()
    assert fake.launches[-1].symbol == "lowbit_spin"


def test_a_capture_that_fails_leaves_the_driver_usable(fake):
    driver = Driver()

    def refuse():
        raise ValueError("not now")

    with pytest.raises(ValueError, match="not now"):
        driver.capture([refuse])
    driver.spin(5)
    driver.synchronize()
    assert [each.symbol for each in fake.launches] == ["lowbit_spin"]


def test_a_flush_reads_twice_the_cache_in_whole_rounds(fake):
    driver = Driver()
    driver.flush_l2()
    (flush,) = fake.launches
    address, vectors, _ = struct.unpack("<qqq", flush.arguments)
    threads = flush.grid[0] * flush.block[0]
    assert address % 256 == 0
    assert vectors % (4 * threads) == 0
    assert 2 * driver.gpu.l2_bytes <= vectors * 16 <= 32 << 20
    assert threads == 82 * 1024

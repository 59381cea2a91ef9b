import gc
import mmap
import platform
import weakref

import numpy as np
import pytest
from lowbit.kernels.cpu import memory
from lowbit.kernels.cpu.memory import HUGE_FROM_BYTES, HUGE_PAGE_BYTES, can_evict, evict, huge_zeros


@pytest.mark.parametrize("nbytes", [0, 1, 4096, HUGE_FROM_BYTES - 1, HUGE_FROM_BYTES, 3 * HUGE_PAGE_BYTES + 17])
def test_huge_zeros_are_zero_writable_and_of_the_size_asked(nbytes: int) -> None:
    array = huge_zeros(nbytes)
    assert array.shape == (nbytes,) and array.dtype == np.uint8
    assert not array.any()
    array[:] = np.arange(nbytes, dtype=np.uint64).astype(np.uint8)
    assert int(array[-1:].sum()) == (nbytes - 1) % 256 * (nbytes > 0)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are asked for on Linux only")
def test_large_arrays_start_on_a_huge_page() -> None:
    for nbytes in (HUGE_FROM_BYTES, HUGE_PAGE_BYTES + 1, 9 * HUGE_PAGE_BYTES):
        assert huge_zeros(nbytes).ctypes.data % HUGE_PAGE_BYTES == 0


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="huge pages are asked for on Linux only")
def test_large_arrays_ask_for_huge_pages() -> None:
    array = huge_zeros(5 * HUGE_PAGE_BYTES)
    array[:] = 1
    start, flags, found = array.ctypes.data, "", False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                low, high = (int(end, 16) for end in first.split("-"))
                found = low <= start < high
            elif found and line.startswith("VmFlags:"):
                flags = line
                break
    assert " hg" in flags


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the mapping is made on Linux only")
def test_a_view_keeps_the_memory_and_the_last_one_releases_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Watched(mmap.mmap):
        def __new__(cls, *args: object, **named: object) -> "Watched":
            room = super().__new__(cls, *args, **named)
            made.append(weakref.ref(room))
            return room

    monkeypatch.setattr(memory.mmap, "mmap", Watched)
    view = huge_zeros(2 * HUGE_PAGE_BYTES)[HUGE_PAGE_BYTES:][::3].view(np.int8)
    gc.collect()
    view[:] = 7
    assert made[0]() is not None and (view == 7).all()
    del view
    gc.collect()
    assert made[0]() is None


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        huge_zeros(-1)
    with pytest.raises(ValueError, match="-1 bytes"):
        evict(0, -1)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 0), (0, 1), (63, 2), (1, 4095), (0, 1 << 20)])
def test_evicting_changes_no_data(offset: int, nbytes: int) -> None:
    data = np.arange(1 << 20, dtype=np.uint32)
    kept = data.copy()
    assert evict(data.ctypes.data + offset, nbytes) == can_evict()
    np.testing.assert_array_equal(data, kept)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="every x86-64 processor has clflush")
def test_x86_can_evict() -> None:
    assert can_evict()


@pytest.mark.skipif(not can_evict(), reason="needs eviction")
def test_only_the_lines_asked_for_are_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    native, seen = memory._native(), []
    assert native is not None
    monkeypatch.setattr(native, "_evict", lambda *args: seen.append(args))
    line = native._line_bytes
    evict(10 * line + 5, 2 * line)
    assert seen == [(10 * line, 12 * line + 5, line)]
    assert line in (16, 32, 64, 128, 256)


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "riscv64"), ("win32", "ARM64")])
def test_other_machines_say_that_they_cannot(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(memory.platform, "machine", lambda: machine)
    monkeypatch.setattr(memory.sys, "platform", system)
    memory._native.cache_clear()
    try:
        assert not can_evict() and not evict(0, 0)
    finally:
        monkeypatch.undo()
        memory._native.cache_clear()


@pytest.mark.parametrize(
    ("line", "flush", "fence"),
    [
        (memory._X86_LINE, "clflushopt ($0)", "mfence"),
        (memory._X86_LINE, "clflush ($0)", "mfence"),
        (memory._ARM_LINE, "dc civac, $0", "dsb sy"),
    ],
)
def test_the_loop_is_valid_and_fenced_on_both_sides(line: str, flush: str, fence: str) -> None:
    import llvmlite.binding as llvm

    module = llvm.parse_assembly(memory.source(line, flush, fence))
    module.verify()
    text = str(module.get_function("evict"))
    assert text.index(fence) < text.index(flush) < text.rindex(fence)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="assembles for this machine only")
@pytest.mark.parametrize("instruction", ["clflushopt", "clflush"])
def test_either_x86_instruction_runs(instruction: str) -> None:
    import llvmlite.binding as llvm

    if instruction == "clflushopt" and not llvm.get_host_cpu_features().get("clflushopt"):
        pytest.skip("this processor has none")
    data = np.arange(1000)
    memory._Native(memory._X86_LINE, f"{instruction} ($0)", "mfence").evict(data.ctypes.data, data.nbytes)
    assert (data == np.arange(1000)).all()

"""The GPU backend: what it is identified by, what it ships, what it refuses to launch, and its ways without tools."""

from dataclasses import replace

import pytest
from kernel_check import problem
from lowbit.kernels.backend import Rejected, backend_named
from lowbit.kernels.candidate import Candidate, Launch
from lowbit.kernels.cuda import backend as module
from lowbit.kernels.cuda import toolchain
from lowbit.kernels.cuda.backend import CudaBackend, unlaunchable
from lowbit.kernels.cuda.space import space
from lowbit.kernels.errors import CompileError, DeviceError
from lowbit.kernels.layout import Layout
from lowbit.kernels.reference import make_operands

pytest.importorskip("numba_cuda")

needs_tools = pytest.mark.skipif(not toolchain.available(), reason="needs ptxas and nvdisasm")
KEY = "attend h3/1 d128 q1 w4a8"


def candidate(**changes):
    name = "T D | int4/lane_interleaved/offset"
    launch = replace(Launch(3, 2, 4, 0, 2, 4), **changes)
    return Candidate(Layout.parse(name), Layout.parse(name), "integer", launch)


def test_an_architecture_is_its_target():
    assert backend_named("sm_90").target() == "sm_90"
    assert backend_named("sm_90").name == backend_named("sm_75").name == "cuda"
    for name in ("sm_50", "cuda", "sm_86a", ""):
        with pytest.raises(DeviceError, match="sm_75, sm_80, sm_86"):
            backend_named(name)
    with pytest.raises(DeviceError):
        CudaBackend("sm_50")


def test_the_toolchain_names_versions_and_sources(monkeypatch):
    told = CudaBackend().toolchain()
    for part in ("numba-cuda ", "ptxas ", "nvdisasm ", "kernels "):
        assert part in told
    monkeypatch.setattr(module, "_has", lambda tool: False)
    module._toolchain.cache_clear()
    try:
        assert "ptxas missing" in CudaBackend().toolchain()
    finally:
        module._toolchain.cache_clear()


@pytest.mark.parametrize(
    ("threads", "registers", "shared_bytes", "reason"),
    [
        (128, 255, 0, None),
        (256, 255, 0, None),  # 8 warps of 8192 registers
        (288, 255, 0, "288 threads of 255 registers"),
        (512, 128, 0, None),
        (512, 129, 0, "512 threads of 129 registers, of 65536"),  # 32 × 129 is rounded up to 4352, 16 warps take 69632
        (1024, 64, 0, None),
        (1024, 65, 0, "1024 threads of 65 registers"),
        (1056, 16, 0, "1056 threads a block"),
        (32, 0, 99 << 10, None),
        (32, 0, (99 << 10) + 1, "101377 bytes of shared memory a block, of 101376 on sm_86"),
    ],
)
def test_blocks_that_cannot_be_launched(threads, registers, shared_bytes, reason):
    told = unlaunchable("sm_86", threads, registers, shared_bytes)
    assert (told is None) if reason is None else reason in told


@needs_tools
def test_what_cannot_be_launched_does_not_compile():
    """The same code, with so many warps that their registers are more than there are."""
    p, backend = problem(KEY), CudaBackend("sm_86")
    (main, merge) = backend.shipped(p, candidate())
    registers = main.cubin.registers
    assert registers > 128
    assert merge.cubin.registers < registers
    with pytest.raises(CompileError, match=f"512 threads of {registers} registers") as caught:
        backend.compile(p, candidate(warps=16))
    assert "\n" not in str(caught.value)


@needs_tools
def test_what_ships_is_what_a_launch_needs():
    p, backend = problem(KEY), CudaBackend("sm_86")
    chosen = candidate()
    kernel = backend.compile(p, chosen)
    shipped = backend.shipped(p, chosen)
    assert [each.entry for each in shipped] == [kernel.program.main, kernel.program.merge]
    for each, image in zip(shipped, kernel.images, strict=True):
        assert image.code == each.cubin.image
        assert each.entry.symbol in each.ptx
        assert "pmevent" not in each.ptx
    assert len(backend.shipped(p, candidate(splits=1))) == 1
    assert backend.shipped(p, chosen)[0] is shipped[0]


def test_without_tools_the_code_is_ptx(monkeypatch):
    monkeypatch.setattr(module, "_has", lambda tool: False)
    module._machine_code.cache_clear()
    module._shipped.cache_clear()
    try:
        p, backend = problem(KEY), CudaBackend("sm_86")
        (code,) = backend.code(p, candidate())
        assert (code.language, code.assembly, code.registers, code.spill_bytes) == ("ptx", code.ir, 0, 0)
        kernel = backend.compile(p, candidate())
        assert kernel.images[0].code.startswith(b"//")
        assert backend.shipped(p, candidate())[0].cubin is None
    finally:
        module._machine_code.cache_clear()
        module._shipped.cache_clear()


def test_a_kernel_without_a_gpu_says_so(monkeypatch):
    from lowbit.kernels.cuda import gpus

    monkeypatch.setattr(gpus, "has_driver", lambda: False)
    p, backend = problem(KEY), CudaBackend("sm_86")
    kernel = backend.compile(p, candidate())
    operands = make_operands(p, 33)
    with pytest.raises(DeviceError, match="no GPU to run kernels for sm_86 on"):
        kernel(operands.x, kernel.pack("k", operands.k), kernel.pack("v", operands.v))


def test_what_is_rejected_says_why_in_every_call():
    p, backend = problem(KEY), CudaBackend("sm_86")
    entry = next(entry for entry in space(p, "sm_86") if isinstance(entry, Rejected))
    for attempt in (backend.compile, backend.code, backend.tiles, backend.shipped):
        with pytest.raises(CompileError) as caught:
            attempt(p, entry.candidate)
        assert entry.reason in str(caught.value)

"""Numba source to PTX, for every architecture, without a GPU."""

import re
import subprocess
import sys

import pytest
from lowbit.kernels.cuda import ptx, toolchain
from lowbit.kernels.cuda.program import Entry, Parameter
from lowbit.kernels.errors import CompileError

numba_cuda = pytest.importorskip("numba_cuda")
from numba import cuda, int32  # noqa: E402

ARCHES = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120")
PARAMETERS = (Parameter("out", "pointer"), Parameter("stride", "int64"), Parameter("n", "int32"))
PARAMETERS += (Parameter("factor", "float32"),)


def staged(out, stride, n, factor):
    words = cuda.shared.array(0, int32)
    words[cuda.threadIdx.x] = n
    cuda.syncthreads()
    words[cuda.threadIdx.x + 1] = words[cuda.threadIdx.x] + int32(factor) + int32(stride) + int32(out)


def entry(function=staged, symbol="staged_4"):
    return Entry(symbol, function, PARAMETERS)


@pytest.mark.parametrize("arch", ARCHES)
def test_compiles_for_every_architecture(arch):
    text = ptx.compile_entry(entry(), arch)
    assert f".target {arch}" in text
    assert ".visible .entry staged_4(" in text
    parameters = re.findall(r"\.param \.(\w+) staged_4_param_(\d)", text)
    assert parameters == [("u64", "0"), ("u64", "1"), ("u32", "2"), ("f32", "3")]
    if toolchain.available():  # without the tools the text is all there is
        cubin = toolchain.assemble(text, arch, "staged_4")
        assert cubin.spill_store_bytes == cubin.shared_bytes == 0


def test_text_has_nothing_of_numbas_and_does_not_depend_on_what_was_compiled_before():
    text = ptx.compile_entry(entry(), "sm_86")
    assert not re.search("_ZN|NumbaEnv|cudapy|inline asm", text)

    def other(out, stride, n, factor):
        cuda.shared.array(8, int32)[n] = n

    ptx.compile_entry(entry(other, "other"), "sm_86")
    ptx._compiled.cache_clear()
    assert ptx.compile_entry(entry(), "sm_86") == text


def test_an_architecture_that_is_too_old_is_one_line():
    with pytest.raises(CompileError, match=r"^the installed NVVM 1?\d[\d.]* does not compile for sm_50$"):
        ptx.compile_entry(entry(), "sm_50")


def test_source_that_does_not_compile_is_one_line():
    def wrong(out, stride, n, factor):
        undefined_name(n)  # noqa: F821

    with pytest.raises(CompileError, match=r"^wrong does not compile for sm_86: .*undefined_name") as caught:
        ptx.compile_entry(entry(wrong, "wrong"), "sm_86")
    assert "\n" not in str(caught.value)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(ptx.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CompileError, match=r"pip install 'lowbit\[cuda\]'"):
        ptx.compile_entry(entry(symbol="never"), "sm_86")


def test_names_are_numbered_in_order_of_appearance():
    text = (
        ".common .global .align 8 .u64 _ZN08NumbaEnv1k;\n.extern .shared .align 4 .b8 _cudapy_smem_7[];\n"
        ".func _ZN5innerE\n.visible .entry _ZN4mainE(\n.param .u64 _ZN4mainE_param_0\n)\n"
        "\t// begin inline asm\n\tnop;\n\t// end inline asm\ncall _ZN5innerE; mov %r1, _cudapy_smem_7;"
    )
    assert ptx.readable(text, "main") == (
        ".extern .shared .align 4 .b8 shared_0[];\n.func main_f0\n.visible .entry main(\n.param .u64 main_param_0\n)\n"
        "\tnop;\ncall main_f0; mov %r1, shared_0;"
    )
    with pytest.raises(CompileError, match="PTX of 0 kernels"):
        ptx.readable("", "main")


def test_versions_name_what_the_text_depends_on():
    assert set(ptx.versions()) <= {"numba-cuda", "nvidia-nvvm"}
    assert re.fullmatch(r"\d[\w.]*", ptx.versions()["numba-cuda"])


def test_importing_the_modules_imports_no_numba_cuda():
    code = (
        "import sys, lowbit.kernels.cuda.ptx, lowbit.kernels.cuda.simulator, lowbit.kernels.cuda.memory;"
        "sys.exit(any(name.startswith('numba.cuda') or name.startswith('cuda.') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_functions_that_a_kernel_calls_compile_without_a_gpu():
    @cuda.jit(device=True, forceinline=True)
    def doubled(n):
        return n + n

    def caller(out, stride, n, factor):
        cuda.shared.array(0, int32)[n] = doubled(n)

    for arch in ("sm_75", "sm_90"):
        assert f".target {arch}" in ptx.compile_entry(entry(caller, "caller"), arch)

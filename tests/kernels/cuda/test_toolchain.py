from __future__ import annotations

import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lowbit.kernels.cuda import toolchain
from lowbit.kernels.errors import CompileError

needs_tools = pytest.mark.skipif(not toolchain.available(), reason="needs ptxas and nvdisasm")

# Every thread stores its number to shared memory, and the next word of it to global memory.
SHARED = """
.version 7.0
.target sm_75
.address_size 64
.visible .entry shared(.param .u64 out)
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<4>;
    .shared .align 4 .b8 scratch[512];
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    mov.u32 %r2, scratch;
    st.shared.u32 [%r2], %r1;
    bar.sync 0;
    ld.shared.u32 %r1, [%r2+4];
    st.global.u32 [%rd3], %r1;
    ret;
}
"""
SECOND = """
.visible .entry empty()
{
    ret;
}
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files go; nothing may be left of them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without any tool."""
    monkeypatch.setattr(toolchain, "_folders", lambda name: iter(()))


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@needs_tools
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_a_module_becomes_machine_code_of_each_architecture(arch: str, temporary: Path) -> None:
    cubin = toolchain.assemble(SHARED, arch)
    assert cubin.image.startswith(b"\x7fELF")
    assert cubin.arch == arch
    assert 2 <= cubin.registers <= 32
    assert 512 <= cubin.shared_bytes <= 512 + 1024  # sm_90 and later keep 1 KiB for the system
    assert (cubin.spill_store_bytes, cubin.spill_load_bytes, cubin.stack_bytes) == (0, 0, 0)
    assert cubin.barriers == 1
    text = toolchain.disassemble(cubin.image, arch)
    assert "shared:" in text
    assert "EXIT" in text
    assert "STG" in text
    assert text == toolchain.disassemble(toolchain.assemble(SHARED, arch).image, arch)


@needs_tools
def test_resources_are_those_of_the_entry_named_or_the_largest(temporary: Path) -> None:
    both = toolchain.assemble(SHARED + SECOND, "sm_86")
    assert both.shared_bytes == 512
    assert toolchain.assemble(SHARED + SECOND, "sm_86", "shared").shared_bytes == 512
    alone = toolchain.assemble(SHARED + SECOND, "sm_86", "empty")
    assert (alone.shared_bytes, alone.barriers) == (0, 0)
    assert alone.registers < toolchain.assemble(SHARED, "sm_86").registers == both.registers
    with pytest.raises(CompileError, match=r"no entry 'other': it has (empty, shared|shared, empty)"):
        toolchain.assemble(SHARED + SECOND, "sm_86", "other")


@needs_tools
def test_spills_are_told(temporary: Path) -> None:
    # 300 words live at once do not fit 255 registers.
    body = ["ld.param.u64 %rd1, [out];"]
    body += [f"ld.volatile.global.u32 %r{i}, [%rd1+{4 * i}];" for i in range(300)]
    body += [f"st.volatile.global.u32 [%rd1+{4 * i}], %r{299 - i};" for i in range(300)]
    spilling = SHARED.partition("{")[0] + "{\n.reg .b32 %r<300>;\n.reg .b64 %rd<2>;\n" + "\n".join(body) + "\nret;\n}"
    cubin = toolchain.assemble(spilling, "sm_86")
    assert cubin.registers == 255
    assert cubin.spill_store_bytes >= 4 * (300 - 255)
    assert cubin.spill_load_bytes >= 4 * (300 - 255)
    assert cubin.stack_bytes >= 4 * (300 - 255)


@needs_tools
@pytest.mark.parametrize(
    ("ptx", "arch", "message"),
    [
        (SHARED.replace("ld.param.u64", "ld.param.u63"), "sm_86", r"ptxas failed .*kernel\.ptx, line 10.*u63"),
        (SHARED.replace(".version 7.0", ".version 99.0"), "sm_86", "ptxas failed .*99.0"),
        (SHARED.replace("sm_75", "sm_90"), "sm_86", "ptxas failed .*sm_90"),
        ("", "sm_86", "ptxas failed|no entry"),
        (".version 7.0\n.target sm_75\n.address_size 64\n", "sm_86", "no entry"),
        (SHARED, "sm_35", r"ptxas \d.* has no architecture 'sm_35': it has .*sm_86"),
        (SHARED, "../sm_86", "no architecture"),
    ],
)
def test_what_ptxas_refuses_is_one_line(ptx: str, arch: str, message: str, temporary: Path) -> None:
    with pytest.raises(CompileError, match=message) as caught:
        toolchain.assemble(ptx, arch)
    assert "\n" not in str(caught.value)
    assert str(temporary) not in str(caught.value)


@needs_tools
def test_what_nvdisasm_refuses_is_one_line(temporary: Path) -> None:
    image = toolchain.assemble(SHARED, "sm_86").image
    for broken in (b"", b"not an image", image[: len(image) // 2]):
        with pytest.raises(CompileError, match="nvdisasm failed") as caught:
            toolchain.disassemble(broken, "sm_86")
        assert "\n" not in str(caught.value)
        assert str(temporary) not in str(caught.value)
    with pytest.raises(CompileError, match="for sm_86, not sm_90"):
        toolchain.disassemble(image, "sm_90")


@needs_tools
def test_versions_and_architectures() -> None:
    assert set(toolchain.versions()) == {"ptxas", "nvdisasm"}
    assert all(version[0].isdigit() for version in toolchain.versions().values())
    known = toolchain.architectures()
    assert {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90"} <= set(known)
    numbers = [int("".join(filter(str.isdigit, arch))) for arch in known]
    assert numbers == sorted(numbers)


@pytest.mark.usefixtures("nowhere")
def test_a_missing_tool_is_named_with_its_package() -> None:
    assert not toolchain.available()
    for call in (lambda: toolchain.assemble(SHARED, "sm_86"), toolchain.architectures, toolchain.versions):
        with pytest.raises(CompileError, match="no ptxas: install the package nvidia-cuda-nvcc"):
            call()
    with pytest.raises(CompileError, match="no nvdisasm: install the package nvidia-cuda-nvdisasm"):
        toolchain.disassemble(b"", "sm_86")


def test_wheels_come_before_the_toolkit_and_the_toolkit_before_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = ["nvidia/cu13/bin", "nvidia/cu12/bin", "nvidia/cuda_nvcc/bin", "toolkit/bin", "path"]
    for folder in order:
        (tmp_path / folder).mkdir(parents=True)
        script(tmp_path / folder / "ptxas", "exit 0")
    package = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "nvidia")]})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: package)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    for folder in order:
        assert toolchain.find_tool("ptxas") == tmp_path / folder / "ptxas"
        (tmp_path / folder / "ptxas").chmod(0o644)  # what cannot be run is passed over


def test_a_tool_that_hangs_or_crashes_is_an_error(
    tmp_path_factory: pytest.TempPathFactory, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("tools")
    monkeypatch.setattr(toolchain, "_folders", lambda name: iter([folder]))
    monkeypatch.setattr(toolchain, "TIMEOUT_S", 0.2)
    script(folder / "nvdisasm", "exec sleep 30")
    with pytest.raises(CompileError, match=r"nvdisasm did not finish within 0\.2 s"):
        toolchain.disassemble(b"", "sm_86")
    script(folder / "nvdisasm", "kill -SEGV $$")
    with pytest.raises(CompileError, match="nvdisasm failed with status -11"):
        toolchain.disassemble(b"", "sm_86")
    script(folder / "nvdisasm", "exit 0")
    with pytest.raises(CompileError, match="for an unknown architecture"):
        toolchain.disassemble(b"", "sm_86")
    (folder / "nvdisasm").write_bytes(b"\x00not a program")
    with pytest.raises(CompileError, match="nvdisasm cannot be run"):
        toolchain.disassemble(b"", "sm_86")


def test_a_ptxas_older_than_the_compiler_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, fit, mute = (tmp_path / name / "ptxas" for name in ("old", "fit", "mute"))
    for path, says in ((old, "release 13.0, V13.0.88"), (fit, "release 13.5, V13.5.1"), (mute, "")):
        path.parent.mkdir()
        script(path, f"echo '{says}'" if says else "exit 0")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "13.5.37")
    monkeypatch.setattr(toolchain, "_folders", lambda name: iter([old.parent, fit.parent]))
    assert toolchain.find_tool("ptxas") == fit
    monkeypatch.setattr(toolchain, "_folders", lambda name: iter([old.parent]))
    with pytest.raises(CompileError, match=r"no ptxas \(ptxas 13.0.88 cannot read the PTX of NVVM 13.5.37\): install"):
        toolchain.find_tool("ptxas")
    monkeypatch.setattr(toolchain, "_folders", lambda name: iter([mute.parent]))
    assert toolchain.find_tool("ptxas") == mute  # ptxas itself says what is wrong with it

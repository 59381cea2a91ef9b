"""NVIDIA's assembler and disassembler: PTX to a cubin, and a cubin to SASS text. Neither needs a GPU.

Both come with the wheels ``nvidia-cuda-nvcc`` and ``nvidia-cuda-nvdisasm``, and with the CUDA Toolkit. The wheels are
looked at first, because the PTX that they are given comes from the NVVM of the same release.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import CompileError

TIMEOUT_S = 120
"""No kernel of this package takes ptxas more than a few seconds."""

PACKAGES = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}
"""Where `find_tool` sends people who lack one of the tools."""

_ARCHITECTURE = re.compile(r"'(sm_\d+[a-z]?)'")
_FUNCTION = re.compile(r"Compiling entry function '(?P<name>[^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Cubin:
    """Machine code of one PTX module, and what ptxas says about its entries: the largest value of any of them.

    Attributes
    ----------
    image : bytes
        The ELF file, as a driver loads it.
    arch : str
        The architecture it is for, ``sm_86``.
    registers : int
        32-bit registers of a thread.
    spill_store_bytes, spill_load_bytes : int
        What the code of a thread stores to and loads from local memory for lack of registers.
    stack_bytes : int
        Stack frame of a thread.
    shared_bytes : int
        Shared memory of a block that the module declares itself; what a launch adds is not in it.
    constant_bytes : int
        Constant memory, the parameters' bank included. 0 where ptxas does not tell (sm_100 and later).
    barriers : int
        Named barriers.
    """

    image: bytes
    arch: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int
    constant_bytes: int
    barriers: int


def assemble(ptx: str, arch: str, entry: str | None = None) -> Cubin:
    """Assemble ``ptx`` for ``arch``.

    Parameters
    ----------
    ptx : str
        A module.
    arch : str
        An architecture of `architectures`.
    entry : str, optional
        The one entry whose resources are told, instead of the largest of all.

    Raises
    ------
    CompileError
        If ptxas is missing, does not know ``arch``, refuses the PTX or does not finish, or if there is no such entry.
    """
    if arch not in architectures():
        raise CompileError(f"ptxas {versions()['ptxas']} has no architecture {arch!r}: it has {_listed()}")
    with tempfile.TemporaryDirectory(prefix="lowbit-ptx-") as folder:
        source, image = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        log = _call("ptxas", "-v", f"-arch={arch}", str(source), "-o", str(image))
        if not image.is_file():
            raise CompileError(f"ptxas for {arch} wrote no cubin")
        return Cubin(image.read_bytes(), arch, **_resources(log, entry))


def disassemble(image: bytes, arch: str) -> str:
    """SASS text of all functions of a cubin, the same for the same image and nvdisasm.

    Raises
    ------
    CompileError
        If nvdisasm is missing, refuses the image or does not finish, or if the image is not for ``arch``.
    """
    with tempfile.TemporaryDirectory(prefix="lowbit-sass-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(image)
        text = _call("nvdisasm", "-c", str(path))
    target = re.search(r"\.target\s+(sm_\w+)", text)
    if target is None or target[1] != arch:
        raise CompileError(f"the cubin is for {target[1] if target else 'an unknown architecture'}, not {arch}")
    return text


def architectures() -> tuple[str, ...]:
    """Architectures that the installed ptxas assembles for, oldest first.

    Raises
    ------
    CompileError
        If ptxas is missing.
    """
    path = find_tool("ptxas")
    found = set(_ARCHITECTURE.findall(_output(path, path.stat().st_mtime_ns, "--help")))
    return tuple(sorted(found, key=lambda arch: (int(re.sub(r"\D", "", arch)), arch)))


def versions() -> dict[str, str]:
    """Version of each tool (``13.5.37``): what the code that they make and print depends on.

    Raises
    ------
    CompileError
        If a tool is missing.
    """
    return {name: _version_of(find_tool(name)) for name in PACKAGES}


def _version_of(path: Path) -> str:
    text = _output(path, path.stat().st_mtime_ns, "--version")
    version = re.search(r"\bV(\d[\d.]*)", text)
    return version[1] if version else (text.strip().splitlines() or ["unknown"])[-1]


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number; nothing where there are none."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def _too_old(path: Path) -> str:
    """Why a ptxas cannot read what the installed NVVM writes: it is of an earlier release. Empty if it can."""
    try:
        compiler = importlib.metadata.version("nvidia-nvvm")
        version = _version_of(path)
    except (importlib.metadata.PackageNotFoundError, CompileError):
        return ""
    if not _release(version) or _release(version) >= _release(compiler):
        return ""
    return f"{path.name} {version} cannot read the PTX of NVVM {compiler}"


def available() -> bool:
    """Whether both tools are here and can be used."""
    try:
        return all(find_tool(name) for name in PACKAGES)
    except CompileError:
        return False


def find_tool(name: str) -> Path:
    """The executable ``ptxas`` or ``nvdisasm``.

    Looked for in wheels, then in ``CUDA_HOME`` and ``CUDA_PATH``, then on ``PATH``, then in ``/usr/local/cuda``. A
    ptxas that is older than the installed NVVM cannot read its PTX and is passed over.

    Raises
    ------
    CompileError
        If there is none.
    """
    reason = ""
    for path in _candidates(name):
        old = _too_old(path) if name == "ptxas" else ""
        if not old:
            return path
        reason = reason or f" ({old})"
    raise CompileError(
        f"no {name}{reason}: install the package {PACKAGES[name]}, or point CUDA_HOME at an installed CUDA Toolkit"
    )


def _candidates(name: str) -> Iterator[Path]:
    for folder in _folders(name):
        path = folder / name
        if path.is_file() and os.access(path, os.X_OK):
            yield path


def _folders(name: str) -> Iterator[Path]:
    yield from _wheel_folders()
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            yield Path(root, "bin")
    if on_path := shutil.which(name):
        yield Path(on_path).parent
    yield Path("/usr/local/cuda/bin")


def _wheel_folders() -> Iterator[Path]:
    """``bin`` of NVIDIA's wheels: ``nvidia/cu13/bin`` holds all tools, CUDA 12 has a folder for each package."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec and spec.submodule_search_locations) or ():
        joint = sorted(Path(root).glob("cu[0-9]*/bin"), key=lambda path: int(re.sub(r"\D", "", path.parent.name) or 0))
        yield from reversed(joint)
        yield from sorted(path for path in Path(root).glob("cuda_*/bin"))


@functools.lru_cache(maxsize=16)
def _output(path: Path, modified_ns: int, option: str) -> str:
    """What the tool says to ``option``; ``modified_ns`` makes the answer that of this very file."""
    return _run(path, option)


def _call(name: str, *arguments: str) -> str:
    return _run(find_tool(name), *arguments)


def _run(path: Path, *arguments: str) -> str:
    """Both outputs of a tool, of which each uses another."""
    name = path.name
    try:
        done = subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{name} did not finish within {TIMEOUT_S} s") from error
    except OSError as error:
        raise CompileError(f"{name} cannot be run: {error.strerror or error}") from error
    if done.returncode:
        raise CompileError(f"{name} {_complaint(done.stdout, done.returncode)}")
    return done.stdout


def _complaint(output: str, status: int) -> str:
    """One line: the tool's first error, else its last words."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b(error|fatal)\b", line)]
    said = (errors or lines[-1:] or ["no message"])[0]
    said = re.sub(r"^(?:ptxas|nvdisasm)\s+|\S*/(?=kernel\.)", "", said)
    return f"failed with status {status}: {' '.join(said.split()).replace(' :', ':')}"


def _resources(log: str, entry: str | None) -> dict[str, int]:
    """Largest value of each resource over the entries in ptxas's log, or those of one entry."""
    pieces = _FUNCTION.split(log)[1:]
    entries = dict(zip(pieces[::2], pieces[1::2], strict=True))
    if entry is not None and entry not in entries:
        raise CompileError(f"the PTX has no entry {entry!r}: it has {', '.join(entries) or 'none'}")
    chosen = list(entries.values()) if entry is None else [entries[entry]]
    if not chosen:
        raise CompileError("the PTX has no entry")
    found = [_resources_of(text) for text in chosen]
    return {name: max(each[name] for each in found) for name in found[0]}


def _resources_of(text: str) -> dict[str, int]:
    # A function that an entry calls has a stack frame of its own, which the entry's includes.
    stack = [tuple(map(int, match)) for match in _STACK.findall(text)] or [(0, 0, 0)]
    return {
        "registers": _first(r"Used (\d+) registers", text),
        "stack_bytes": max(frame for frame, _, _ in stack),
        "spill_store_bytes": max(stores for _, stores, _ in stack),
        "spill_load_bytes": max(loads for _, _, loads in stack),
        "shared_bytes": _first(r"(\d+) bytes smem", text),
        "constant_bytes": sum(map(int, re.findall(r"(\d+) bytes cmem", text))),
        "barriers": _first(r"used (\d+) barriers", text),
    }


def _first(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


def _listed() -> str:
    return ", ".join(architectures())

"""The backend of NVIDIA GPUs: kernels in numba-cuda, machine code from NVIDIA's tools, no GPU needed to make them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..backend import Backend, Rejected
from ..candidate import Candidate
from ..errors import CompileError, LowbitError
from ..problem import Problem
from . import code as codes
from . import program as programs
from . import ptx, simulator, toolchain
from . import space as candidates
from .arch import MOST_THREADS, REGISTER_UNIT, REGISTERS, limits
from .kernel import CudaKernel, Image
from .mapping import LANES, TILE
from .program import Entry, Geometry, Program

_NOT_CODE = (
    *("backend.py", "device.py", "faults.py", "gpus.py", "kernel.py", "memory.py", "probes.py", "python_ops.py"),
    *("simulator.py", "space.py", "work.py"),
)
"""Sources of this folder that no machine code depends on."""

TYPICAL_TOKENS = 4096


@dataclass(frozen=True)
class Shipped:
    """One kernel as it is stored for machines without a compiler.

    Attributes
    ----------
    entry : Entry
        Its symbol and parameters.
    ptx : str
    cubin : toolchain.Cubin or None
        None where there is no ptxas.
    """

    entry: Entry
    ptx: str
    cubin: toolchain.Cubin | None


class CudaBackend(Backend):
    """See `lowbit.kernels.backend.Backend`.

    Parameters
    ----------
    arch : str
        ``sm_86``; one of `lowbit.kernels.cuda.arch.ARCHITECTURES`.

    Raises
    ------
    DeviceError
        For an unknown architecture.
    """

    name = "cuda"
    counted_at_once = 1
    """One kernel takes a second or more."""
    first_count_s = 10.0
    """The first kernel of a worker takes some five seconds on a small machine, each further one two."""

    def __init__(self, arch: str = "sm_86"):
        limits(arch)
        self.arch = arch

    def target(self) -> str:
        return self.arch

    def toolchain(self) -> str:
        return _toolchain()

    def require_compiler(self) -> None:
        ptx.require_compiler()

    def space(self, problem: Problem, threads: int) -> Iterator[Candidate | Rejected]:
        """See `lowbit.kernels.backend.Backend.space`; ``threads`` are a CPU's."""
        return candidates.space(problem, self.arch)

    def baseline(self, problem: Problem, threads: int) -> Candidate:
        return candidates.baseline(problem, self.arch)

    def compile(self, problem: Problem, candidate: Candidate) -> CudaKernel:
        """See `lowbit.kernels.backend.Backend.compile`. In the simulator there is nothing to compile."""
        program = self._program(problem, candidate)
        if simulator.simulating():
            return CudaKernel(program, ())
        images = tuple(
            Image(each.entry, each.cubin.image if each.cubin else each.ptx.encode())
            for each in self.shipped(problem, candidate)
        )
        return CudaKernel(program, images)

    def tiles(self, problem: Problem, candidate: Candidate) -> tuple[str, ...]:
        return (_symbol(self._program(problem, candidate, marks=True)),)

    def code(self, problem: Problem, candidate: Candidate) -> list[codes.KernelCode]:
        """The main kernel, with marks in its loops; see `lowbit.kernels.cuda.marks`."""
        program = self._program(problem, candidate, marks=True)
        text = ptx.compile_entry(program.main, self.arch)
        cubin, assembly = _machine_code(text, program.main.symbol, self.arch)
        return [
            codes.KernelCode(
                role="".join(problem.roles),
                symbol=_symbol(program),
                ir=text,
                assembly=assembly or text,
                values_per_iteration=_values_per_pass(program),
                rows=candidate.launch.rows,
                packing=", ".join(dict.fromkeys(each.packing.name for each in (candidate.k, candidate.v) if each)),
                arch=self.arch,
                language="sass" if assembly else "ptx",
                registers=cubin.registers if cubin else 0,
                spill_bytes=cubin.spill_store_bytes + cubin.spill_load_bytes if cubin else 0,
                shared_bytes=cubin.shared_bytes if cubin else 0,
                entry=program.main.symbol,
            )
        ]

    def shipped(self, problem: Problem, candidate: Candidate) -> tuple[Shipped, ...]:
        """The candidate's kernels, without marks, in the order of their launches.

        Raises
        ------
        CompileError
            As `compile`; also if a block of the candidate cannot be launched for its registers or shared memory.
        """
        program = self._program(problem, candidate)
        found = tuple(_shipped(entry, self.arch) for entry in (program.main, program.merge) if entry is not None)
        geometries = [program.geometry(TYPICAL_TOKENS)]
        if program.merge is not None:
            geometries.append(program.merge_geometry(TYPICAL_TOKENS))
        for each, geometry in zip(found, geometries, strict=True):
            reason = _unlaunchable(self.arch, geometry, each.cubin)
            if reason is not None:
                raise CompileError(f"{candidate.layout}: {reason}")
        return found

    def _program(self, problem: Problem, candidate: Candidate, marks: bool = False) -> Program:
        reason = candidates.rejection(problem, candidate, self.arch)
        if reason is not None:
            raise CompileError(f"{candidate.layout}: {reason}")
        try:
            return programs.build(problem, candidate, self.arch, marks)
        except LowbitError:
            raise
        except Exception as error:
            raise CompileError(f"{candidate.layout}: {str(error).strip().splitlines()[0]}") from error


def _symbol(program: Program) -> str:
    """What counts of the code are stored under: a kernel of one name differs between architectures."""
    return f"{program.symbol} {program.arch}"


@functools.lru_cache(256)
def _shipped(entry: Entry, arch: str) -> Shipped:
    text = ptx.compile_entry(entry, arch)
    cubin = toolchain.assemble(text, arch, entry.symbol) if _has("ptxas") else None
    return Shipped(entry, text, cubin)


@functools.lru_cache(8)
def _machine_code(text: str, symbol: str, arch: str) -> tuple[toolchain.Cubin | None, str]:
    """Cubin and SASS, as far as the tools for them are here."""
    if not _has("ptxas"):
        return None, ""
    cubin = toolchain.assemble(text, arch, symbol)
    return cubin, toolchain.disassemble(cubin.image, arch) if _has("nvdisasm") else ""


def _values_per_pass(program: Program) -> int:
    """Codes that a lane reads in one pass of the tile loop, or of the loop over columns of a matrix."""
    if program.problem.operator == "gemv":
        assert program.keys is not None
        tiling = program.keys.contraction.tiling
        return program.keys.loads * tiling.vectors.width * 8 // program.keys.contraction.packing.bits
    return TILE * program.problem.head_dim * len(program.problem.roles) // LANES


def _unlaunchable(arch: str, geometry: Geometry, cubin: toolchain.Cubin | None) -> str | None:
    registers, static = (cubin.registers, cubin.shared_bytes) if cubin else (0, 0)
    return unlaunchable(arch, geometry.threads, registers, geometry.shared_bytes + static)


def unlaunchable(arch: str, threads: int, registers: int, shared_bytes: int) -> str | None:
    """Why a block cannot be launched, or None.

    Parameters
    ----------
    arch : str
    threads : int
        Of the block.
    registers : int
        Of a thread; 0 if unknown.
    shared_bytes : int
        Static and dynamic, of the block.
    """
    if threads > MOST_THREADS:
        return f"{threads} threads a block, of at most {MOST_THREADS}"
    most = limits(arch).shared_bytes
    if shared_bytes > most:
        return f"{shared_bytes} bytes of shared memory a block, of {most} on {arch}"
    warp_registers = -(-registers * LANES // REGISTER_UNIT) * REGISTER_UNIT
    if warp_registers * -(-threads // LANES) > REGISTERS:
        return f"{threads} threads of {registers} registers, of {REGISTERS} registers a block"
    return None


@functools.cache
def _has(tool: str) -> bool:
    try:
        toolchain.find_tool(tool)
    except CompileError:
        return False
    return True


@functools.cache
def _toolchain() -> str:
    """The compilers' versions and a digest of the sources that generate kernels."""
    found = ptx.versions()
    found |= toolchain.versions() if _has("ptxas") and _has("nvdisasm") else {"ptxas": "", "nvdisasm": ""}
    listed = ", ".join(f"{name} {text or 'missing'}" for name, text in found.items())
    return f"{listed}, kernels {_source_digest()}"


def _source_digest() -> str:
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*root.parent.glob("*.py"), *root.glob("*.py")]):
        if path.parent == root and path.name in _NOT_CODE:
            continue
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]

"""Instruction sets that CPU kernels are lowered to, and which one this machine has."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass

from ..errors import DeviceError

ISA_VARIABLE = "LOWBIT_ISA"
"""Environment variable that simulates a smaller machine, for tests and comparisons."""


@dataclass(frozen=True)
class Isa:
    """One way to lower tiles.

    Parameters
    ----------
    name : str
    triple, cpu, features : str
        What LLVM compiles for when code is only shown; running code is compiled for the host.
    vector_bytes : int
        Width of a vector register.
    registers : int
        Vector registers there are.
    dot : str
        ``vpdpbusd`` (u8×s8, four products a lane), ``maddubs`` (u8×s8 pairs, saturating at 16 bits), ``sdot`` (s8×s8)
        or ``widen`` (plain multiplication in vector IR).
    half_conversion : bool
        Whether fp16 converts in hardware.
    matrix : bool
        Whether there is a unit that multiplies matrices of 8-bit integers, and of bfloat16.
    requires : frozenset of str
        LLVM's names of the features that the host must report.
    """

    name: str
    triple: str
    cpu: str
    features: str
    vector_bytes: int
    registers: int
    dot: str
    half_conversion: bool
    requires: frozenset[str]
    matrix: bool = False

    @property
    def lanes(self) -> int:
        """32-bit lanes of a vector register."""
        return self.vector_bytes // 4


def _x86(
    name: str, cpu: str, vector_bytes: int, registers: int, dot: str, half: bool, requires: str, matrix: bool = False
) -> Isa:
    names = frozenset(requires.split())
    features = ",".join(f"+{feature}" for feature in sorted(names))
    return Isa(name, "x86_64-unknown-linux-gnu", cpu, features, vector_bytes, registers, dot, half, names, matrix)


_AVX2 = "avx2 fma f16c"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512dq avx512vl avx512vnni"
_AMX = f"{_AVX512} avx512bf16 avx512fp16 amx-tile amx-int8 amx-bf16"
ISAS = {
    isa.name: isa
    for isa in (
        _x86("amx_int8", "icelake-server", 64, 32, "vpdpbusd", True, _AMX, matrix=True),
        _x86("avx512_vnni", "cascadelake", 64, 32, "vpdpbusd", True, _AVX512),
        _x86("avx_vnni", "alderlake", 32, 16, "vpdpbusd", True, f"{_AVX2} avxvnni"),
        _x86("avx2", "haswell", 32, 16, "maddubs", True, _AVX2),
        Isa(
            "neon_dot", "aarch64-unknown-linux-gnu", "neoverse-n1", "+neon,+dotprod,+fullfp16", 16, 32, "sdot", True,
            frozenset({"neon", "dotprod"}),
        ),
        Isa("generic", "x86_64-unknown-linux-gnu", "x86-64", "", 16, 16, "widen", False, frozenset()),
    )
}  # fmt: skip
"""From most to least capable; `detect` takes the first whose features the host has."""


def isa_named(name: str) -> Isa:
    """Look an instruction set up.

    Raises
    ------
    DeviceError
        If there is none of this name.
    """
    try:
        return ISAS[name]
    except KeyError:
        raise DeviceError(f"unknown instruction set {name!r}: known are {', '.join(ISAS)}") from None


@functools.cache
def host_features() -> frozenset[str]:
    """Features that LLVM reports for this CPU."""
    import llvmlite.binding as llvm

    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)


def runs_here(isa: Isa) -> bool:
    """Whether this machine can execute code for ``isa``."""
    import platform

    arm = platform.machine().lower() in ("aarch64", "arm64")
    family = isa.triple.startswith("aarch64") == arm or isa.name == "generic"
    return family and isa.requires <= host_features() and (not isa.matrix or _matrix_unit_granted())


@functools.cache
def _matrix_unit_granted() -> bool:
    """Whether the system lets this process use the tile registers of AMX; Linux wants to be asked."""
    import ctypes

    if not sys.platform.startswith("linux"):
        return False
    request, tile_data, arch_prctl = 0x1023, 18, 158
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0)


def detect() -> Isa:
    """The best instruction set of this machine, or the one that `ISA_VARIABLE` names.

    Raises
    ------
    DeviceError
        If the variable names an unknown set or one that this machine lacks.
    """
    wanted = os.environ.get(ISA_VARIABLE)
    if wanted:
        isa = isa_named(wanted)
        if not runs_here(isa):
            raise DeviceError(
                f"{ISA_VARIABLE}={wanted}: this machine lacks {', '.join(sorted(isa.requires - host_features()))}"
            )
        return isa
    return next(isa for isa in ISAS.values() if runs_here(isa))

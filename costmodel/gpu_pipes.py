"""Which execution pipe of a multiprocessor each instruction takes.

A multiprocessor issues one warp instruction a clock from each of its four schedulers, and each pipe takes so many lanes
a clock. Additions, logic, shifts and comparisons run in one pipe (ALU), dot products and integer multiplications in the
heavy half of the float pipe, conversions and special functions in the transcendental unit, everything that addresses
memory and shuffles in the load/store unit. Instructions of the uniform datapath, branches and barriers take an issue
slot alone. Source: Nsight Compute Profiling Guide, pipelines. Packed conversions (``F2FP``, ``I2FP``) are taken to run
in the ALU, which the guide says of conversions to half precision.
"""

from __future__ import annotations

from collections.abc import Mapping

from .kernel_counts import KernelCounts
from .sass_opcodes import KINDS

ADD, LOGIC, HEAVY, FLOAT = "add", "logic", "heavy", "float"
SLOW, LOAD_STORE, SHUFFLE, ISSUE = "slow", "load_store", "shuffle", "issue"
PIPES = (ADD, LOGIC, HEAVY, FLOAT, SLOW, LOAD_STORE, SHUFFLE, ISSUE)
"""``add`` and ``logic`` are the ALU's instructions, apart because some architectures add twice as fast; ``slow`` are
conversions and special functions; ``issue`` is every instruction."""

_OF_CLASS = {
    **dict.fromkeys(("global_load", "global_store", "shared_load", "shared_store", "async_copy"), LOAD_STORE),
    **dict.fromkeys(("shift", "logic", "permute", "predicate"), LOGIC),
    **dict.fromkeys(("convert", "special"), SLOW),
    "dot": HEAVY,
    "float": FLOAT,
    "integer": ADD,
    "shuffle": SHUFFLE,
}
_OF_OPCODE = {
    **dict.fromkeys(("IMAD", "IMUL", "IMUL32I", "IDP", "IDP4A", "IDE"), HEAVY),
    **dict.fromkeys(("F2FP", "I2FP", "I2IP", "F2IP", "SGXT"), LOGIC),
    **dict.fromkeys(("FMNMX", "FMNMX3", "FSET", "HMNMX2", "HSET2", "VHMNMX"), LOGIC),
    **dict.fromkeys(("LEA", "ISCADD", "IMNMX", "VIMNMX", "VIMNMX3"), LOGIC),
    **dict.fromkeys(("VOTE", "P2R", "R2P", "PSETP", "PLOP3"), LOGIC),
}


def pipes_of(counts: KernelCounts, iterations: Mapping[int, float], warps: float) -> dict[str, float]:
    """Warp instructions executed in each pipe.

    Parameters
    ----------
    counts : KernelCounts
        Of PTX, whose instructions are not the machine's, only the classes are used.
    iterations : mapping of int to float
        Passes of each marked loop, all warps together.
    warps : float
    """
    total = dict.fromkeys(PIPES, 0.0)
    if counts.language == "sass":
        executed = [(_of_opcode(name), count) for name, count in counts.opcodes_executed(iterations, warps).items()]
    else:
        executed = [(_of_class(kind), count) for kind, count in counts.executed(iterations, warps).items()]
    for pipe, count in executed:
        if pipe != ISSUE:
            total[pipe] += count
        total[ISSUE] += count
    return total


def _of_class(kind: str) -> str:
    return _OF_CLASS.get(kind, ISSUE)


def _of_opcode(opcode: str) -> str:
    base = opcode.split(".")[0]
    if base in _OF_OPCODE:
        return _OF_OPCODE[base]
    # The uniform datapath works once for a warp.
    if base.startswith("U") or base in ("R2UR", "S2UR", "CS2UR"):
        return ISSUE
    return _of_class(KINDS.get(base, "other"))

"""SASS text of one kernel, as nvdisasm prints it for sm_75 to sm_120, turned into classified instructions.

Registers are named as in the text (``R4``, ``UR4``, ``P0``, ``UP0``); an operand of several words stands for all its
registers, ``R4.64`` for ``R4`` and ``R5``, and a word of the stack frame is a register too, ``L8``. Warps are taken to
be converged: ``BRA.DIV``, which leads to code for lanes that have come apart, is never followed and ``BRA.CONV``, which
leads past such code, always. A called function (the slow path of a division) is not looked into.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..kernels.errors import CompileError
from .sass_opcodes import (
    CONVERSIONS,
    DESTLESS,
    DOUBLES,
    GLOBAL,
    KINDS,
    MOVES,
    MULTIPLICATIONS,
    PREDICATE_THEN_REGISTER,
    SUBWORDS,
)
from .warp_code import NOTHING, WarpFunction, WarpInstruction

_INSTRUCTION_BYTES = 16
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_BODY = re.compile(r"(?:@(!?U?P[0-9T]+)\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)(?:\s+(.*))?")
_LABEL = re.compile(r"([^\s:/]+):")
_OPERAND = re.compile(r"(?:\([^()]*\)|\[[^\[\]]*\]|[^,\[(])+")
_REGISTER = re.compile(r"(?<![\w.$])(U?[RP])(\d+)(?!\w)((?:\.\w+)*)")
_PREDICATE = re.compile(r"!?U?P(\d|T)")
_PLAIN_REGISTER = re.compile(r"U?R(\d+|Z)\b")
_ZERO = re.compile(r"[-|~]*U?RZ\b")
_IMMEDIATE = re.compile(r"-?[\d+.]|[-+]?(INF|QNAN|SNAN)")
_SLOT = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]")
_MASK = re.compile(r"0x[0-9a-f]+")
_REMARK = re.compile(r"\s*\(\*\"(?!BRANCH_TARGETS).*?\*\)")
_TARGET = re.compile(r"`\(([^()]+)\)")
_TARGETS = re.compile(r'BRANCH_TARGETS ([^"]+)"')
_JUMPS = frozenset(("BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU"))
_ENDINGS = frozenset(("EXIT", "RET", "KILL", "RTT"))
_ALL_PREDICATES = {"PR": "P", "UPR": "UP"}
_MEMORY = frozenset(("global_load", "global_store", "shared_load", "shared_store", "async_copy"))


@dataclass(frozen=True)
class _Operation:
    """An instruction taken apart."""

    base: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def kind(self) -> str:
        return KINDS.get(self.base, "other")


def parse_sass(text: str, symbol: str) -> WarpFunction:
    """Read the kernel ``symbol`` out of nvdisasm's text.

    Raises
    ------
    CompileError
        If the text has no such kernel, lacks some of its instructions or labels, or holds what no instruction is.
    """
    instructions: list[WarpInstruction] = []
    labels: dict[str, int] = {}
    for line in _body(text, symbol):
        label = _LABEL.fullmatch(line)
        if label:
            labels[label[1]] = len(instructions)
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise CompileError(f"the SASS of {symbol!r} has a line that is no instruction: {line[:80]!r}")
        if int(match[1], 16) != len(instructions) * _INSTRUCTION_BYTES:
            raise CompileError(f"the SASS of {symbol!r} lacks an instruction before address 0x{match[1]}")
        instructions.append(_parse(match[2]))
    if not instructions:
        raise CompileError(f"the SASS of {symbol!r} has no instructions")
    # nvdisasm puts labels at every wait for other lanes as well; those would only cut blocks.
    targets = dict.fromkeys(target for instruction in instructions for target in instruction.targets)
    lost = [target for target in targets if target not in labels]
    if lost:
        raise CompileError(f"the SASS of {symbol!r} jumps to {lost[0]!r}, which it lacks")
    if instructions[-1].falls_through and instructions[-1].opcode != "NOP":
        raise CompileError(f"the SASS of {symbol!r} ends before its control flow does")
    return WarpFunction(symbol, tuple(instructions), {target: labels[target] for target in targets})


def _body(text: str, symbol: str) -> list[str]:
    """Lines between the section's label and the next section."""
    start = f".text.{symbol}:"
    lines: list[str] | None = None
    for raw in text.splitlines():
        line = raw.strip()
        if lines is None:
            lines = [] if line == start else None
        elif line.startswith(("//", ".section", ".size")):
            break
        elif line and not line.startswith((".align", ".type", ".global", ".weak", ".other", ".sectionflags")):
            lines.append(line)
    if lines is None:
        raise CompileError(f"no kernel {symbol!r} in the SASS that nvdisasm printed")
    return lines


@lru_cache(maxsize=1 << 16)
def _parse(line: str) -> WarpInstruction:
    match = _BODY.fullmatch(line)
    if match is None:
        raise CompileError(f"not a SASS instruction: {line[:80]!r}")
    guard, opcode, rest = match[1], match[2], _REMARK.sub("", match[3] or "")
    operands = tuple(found.strip() for found in _OPERAND.findall(rest))
    base, *modifiers = opcode.split(".")
    operation = _Operation(base, tuple(modifiers), operands)
    if guard in ("!PT", "!UPT"):
        # It does nothing, so it is not counted as what it would do either.
        return WarpInstruction(f"@{guard} {opcode}", "other", known=base in KINDS, guard=guard)
    if operation.kind == "branch":
        return _branch(opcode, operation, guard)
    count = _destinations(operation)
    reads, address = _sources(operation, operands[count:], count)
    return WarpInstruction(
        opcode,
        _kind(operation),
        known=base in KINDS,
        reads=reads,
        writes=_written(operation, operands[:count]),
        address=address,
        guard=None if guard in ("PT", "UPT") else guard,
        packed=operation.kind in ("global_load", "shared_load") and base != "LDL" and SUBWORDS.isdisjoint(modifiers),
        multiplies=_multiplies(operation, operands[count:]),
        moves=_moves(operation, operands[count:]),
        mark=_mark(operation),
    )


def _branch(opcode: str, operation: _Operation, guard: str | None) -> WarpInstruction:
    base, operands = operation.base, operation.operands
    targets = [found for operand in operands for found in _TARGET.findall(operand)]
    targets += [name for operand in operands for found in _TARGETS.findall(operand) for name in found.split(",")]
    # What calls a label within the function never returns: it leaves a loop.
    jumps = base in _JUMPS or (base == "CALL" and targets != [] and all(name.startswith(".L") for name in targets))
    if not jumps or "DIV" in operation.modifiers:
        targets = []
    conditional = guard not in (None, "PT", "UPT") or any(_PREDICATE.fullmatch(operand) for operand in operands)
    ends = (jumps and "DIV" not in operation.modifiers) or base in _ENDINGS
    return WarpInstruction(
        opcode,
        "branch",
        address=_registers(operands, 1 if base == "BRA" else 2),
        guard=guard,
        targets=tuple(targets),
        falls_through=conditional or not ends,
    )


def _kind(operation: _Operation) -> str:
    """The class: that of the opcode, unless modifiers or operands make it something else."""
    base, modifiers = operation.base, operation.modifiers
    if base in ("IMAD", "IMUL"):
        return "shift" if "SHL" in modifiers else "address" if "WIDE" in modifiers else "integer"
    if base in ("IADD", "IADD3") and "64" in modifiers:
        return "address"
    if base == "HADD2" and "F32" in modifiers and any(map(_ZERO.match, operation.operands[1:])):
        return "convert"
    return operation.kind


def _moves(operation: _Operation, sources: Sequence[str]) -> bool:
    zero = operation.base in ("IMAD", "HFMA2", "UIMAD") and any(map(_ZERO.match, sources[:2]))
    return zero or operation.base in MOVES


def _multiplies(operation: _Operation, sources: Sequence[str]) -> bool:
    base, factors = operation.base, sources[:2]
    if operation.kind == "dot":
        return True
    if base not in MULTIPLICATIONS or {"MOV", "SHL", "IADD", "X", "WIDE"} & set(operation.modifiers):
        return False
    return len(factors) == 2 and not any(_ZERO.match(factor) or _IMMEDIATE.match(factor) for factor in factors)


def _mark(operation: _Operation) -> int | None:
    if operation.base != "PMTRIG":
        return None
    try:
        events = int(operation.operands[0], 16)
    except (IndexError, ValueError):
        events = 0
    if events <= 0 or events & (events - 1):
        raise CompileError(f"PMTRIG triggers not one event: {', '.join(operation.operands) or 'none'}")
    return events.bit_length() - 1


def _destinations(operation: _Operation) -> int:
    """How many of the first operands are written."""
    base, operands = operation.base, operation.operands
    if base in DESTLESS or not operands or (base == "BMOV" and operands[0].startswith("B")):
        return 0
    predicates = [_PREDICATE.fullmatch(operand) is not None for operand in operands]
    if predicates[0]:
        if base.endswith(("SETP", "SETP2")) or base in ("PLOP3", "UPLOP3"):
            return 2
        if base not in PREDICATE_THEN_REGISTER or False not in predicates:
            return 1
        first = predicates.index(False)
        return first + (_PLAIN_REGISTER.match(operands[first]) is not None)
    if base in ("P2R", "UP2UR", "R2P", "UR2UP"):
        return 1
    if "ENL2" in operation.modifiers:
        return 2
    run = predicates.index(False, 1) - 1 if False in predicates[1:] else 0
    return 1 + (min(run, 1) if base in ("VOTE", "VOTEU") else run)


def _width(operation: _Operation, place: int, source: bool) -> int:
    """Registers that the operand at ``place`` among all operands covers."""
    base, modifiers = operation.base, operation.modifiers
    if operation.kind in _MEMORY or base in ("LDC", "LDCU", "ULDC"):
        bits = next((int(modifier) for modifier in modifiers if modifier in ("64", "128", "256")), 32)
        if base in ("LDSM", "STSM"):
            bits = 32 * next((int(modifier) for modifier in modifiers if modifier in ("2", "4")), 1)
        return bits // 32 // (2 if "ENL2" in modifiers else 1)
    if base in DOUBLES:
        return 2
    if base in CONVERSIONS:
        return _converted(operation, source)
    if base in ("CS2R", "CS2UR"):
        return 1 if "32" in modifiers else 2
    if base == "LEPC":
        return 2
    if base in ("IMAD", "UIMAD"):
        # Products have 64 bits, and so have their addends, the last operand but for a carry.
        addend = place == max(i for i, operand in enumerate(operation.operands) if not _PREDICATE.fullmatch(operand))
        return 2 if ("WIDE" in modifiers and (addend or not source)) or ("HI" in modifiers and addend) else 1
    if operation.kind == "dot" and "MMA" in base:
        return 4
    wide = {"64", "S64", "U64"} & set(modifiers)
    return 2 if wide and base not in ("SHF", "USHF") else 1


def _converted(operation: _Operation, source: bool) -> int:
    """F2F and I2I name the type of the result, then that of the operand; the others one type besides their own."""
    types = [modifier for modifier in operation.modifiers if re.fullmatch(r"(F|S|U|BF)\d+", modifier)]
    wide = [modifier in ("F64", "S64", "U64") for modifier in types]
    if operation.base == "FRND":
        return 2 if any(wide) else 1
    integers = any(modifier in ("S64", "U64") for modifier in types)
    if operation.base == "F2I":
        return 2 if (("F64" in types) if source else integers) else 1
    if operation.base == "I2F":
        return 2 if (integers if source else ("F64" in types)) else 1
    chosen = wide[1:2] if source else wide[:1]
    return 2 if any(chosen) else 1


def _written(operation: _Operation, operands: Sequence[str]) -> frozenset[str]:
    if operation.base == "R2P":
        return _masked(operation)
    if operation.base == "STL":
        return _slots(operation, operation.operands[0])
    found = (_registers([operand], _width(operation, place, source=False)) for place, operand in enumerate(operands))
    return frozenset().union(*found)


def _sources(operation: _Operation, operands: Sequence[str], first: int) -> tuple[frozenset[str], frozenset[str]]:
    """Registers of values and registers of addresses; ``first`` is the place of the first operand."""
    values: set[str] = set()
    address: set[str] = set()
    if operation.base == "P2R":
        values |= _masked(operation)
        operands = [operand for operand in operands if operand != "PR"]
    if operation.base == "LDL":
        values |= _slots(operation, operands[-1])
    for place, operand in enumerate(operands, first):
        if operand.startswith("`("):
            continue
        if "[" not in operand:
            values |= _registers([operand], _width(operation, place, source=True))
            continue
        # An asynchronous copy names its place in shared memory first, where addresses are one register.
        wide = operation.base in GLOBAL and not (operation.base == "LDGSTS" and place == first)
        address |= _addressed(operand, wide)
    return frozenset(values), frozenset(address)


def _masked(operation: _Operation) -> frozenset[str]:
    """Predicates that the last operand selects."""
    last = operation.operands[-1]
    mask = int(last, 16) if _MASK.fullmatch(last) else 0x7F
    return frozenset(f"P{bit}" for bit in range(7) if mask >> bit & 1)


def _slots(operation: _Operation, operand: str) -> frozenset[str]:
    """Words of the stack frame, which act as registers: ``L8`` for ``[R1+0x8]``."""
    match = _SLOT.fullmatch(operand)
    if match is None:
        return NOTHING
    first = int(match[1] or "0", 16)
    words = _width(operation, 0, source=False)
    return frozenset(f"L{first + 4 * i}" for i in range(words))


def _addressed(operand: str, wide: bool) -> frozenset[str]:
    """Registers of an address: pairs in descriptors and in global memory, unless they are marked as one word."""
    found: set[str] = set()
    for match in _REGISTER.finditer(operand):
        before = operand[: match.start()]
        descriptor = before.endswith(("desc[", "cx["))
        pair = descriptor or ".64" in match[3] or (wide and ".U32" not in match[3] and ".S32" not in match[3])
        found |= _span(match[1], int(match[2]), 2 if pair else 1)
    return frozenset(found)


def _registers(operands: Iterable[str], width: int) -> frozenset[str]:
    found: set[str] = set()
    for operand in operands:
        if operand in _ALL_PREDICATES:
            found.update(f"{_ALL_PREDICATES[operand]}{number}" for number in range(8))
            continue
        if operand.startswith("`("):
            continue
        for match in _REGISTER.finditer(operand):
            found |= _span(match[1], int(match[2]), width if match[1].endswith("R") else 1)
    return frozenset(found)


def _span(bank: str, first: int, count: int) -> set[str]:
    return {f"{bank}{first + i}" for i in range(count)}

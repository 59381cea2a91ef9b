"""PTX of one kernel turned into the instructions that the analysis of SASS works on.

This is what can be counted where no ptxas and nvdisasm are installed. PTX has registers without end, moves that machine
code does without and 64-bit arithmetic that takes it two instructions, so only dots, loads, stores and unpacking are
near what a GPU executes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..kernels.errors import CompileError
from .ptx_opcodes import DESTLESS, ENDING, FLOATS, KINDS, SUBWORDS
from .warp_code import WarpFunction, WarpInstruction

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LABEL = re.compile(r"\s*([\w$%]+)\s*:(?!:)")
_STATEMENT = re.compile(r"(?:@(!?)([\w$%]+)\s+)?([a-z][\w]*(?:(?:\.|::)[\w]+)*)(?:\s+(.*))?", re.DOTALL)
_OPERAND = re.compile(r"(?:\{[^{}]*\}|\[[^\[\]]*\]|\([^()]*\)|[^,{\[(])+")
_NAME = re.compile(r"(?<![\w$%.])[%$A-Za-z_][\w$]*")
_IMMEDIATE = re.compile(r"-?(\d|0[fFdDxX])")


@dataclass
class _Scope:
    """Names of registers, which a block in braces may declare anew."""

    number: int = 0
    names: list[dict[str, str]] = field(default_factory=lambda: [{}])

    def open(self) -> None:
        self.names.append({})

    def close(self) -> None:
        self.names.pop()

    def declare(self, declaration: str) -> None:
        """``.reg .b32 t, %r<9>``; a name that ends in ``<9>`` declares all of its kind."""
        for name in declaration.split(None, 2)[-1].split(","):
            self.number += 1
            self.names[-1][name.strip().partition("<")[0]] = f"{name.strip().partition('<')[0]}#{self.number}"

    def registers(self, operand: str) -> frozenset[str]:
        found = (self._known(name) for name in _NAME.findall(operand))
        return frozenset(name for name in found if name)

    def _known(self, name: str) -> str | None:
        stem = name.rstrip("0123456789")
        for names in reversed(self.names):
            if name in names:
                return names[name]
            if stem != name and stem in names:
                return names[stem] + name[len(stem) :]
        return None


def parse_ptx(text: str, symbol: str) -> WarpFunction:
    """Read the kernel ``symbol`` out of a PTX module.

    Raises
    ------
    CompileError
        If the text has no such kernel, ends within it, lacks one of its labels, or holds what no instruction is.
    """
    scope = _Scope()
    instructions: list[WarpInstruction] = []
    labels: dict[str, int] = {}
    for kind, item in _items(_body(_COMMENT.sub(" ", text), symbol)):
        if kind == "open":
            scope.open()
        elif kind == "close":
            scope.close()
        elif kind == "label":
            labels[item] = len(instructions)
        elif item.startswith(".reg"):
            scope.declare(item)
        elif not item.startswith("."):
            instructions.append(_parse(item, scope))
    if not instructions:
        raise CompileError(f"the PTX of {symbol!r} has no instructions")
    for instruction in instructions:
        lost = [target for target in instruction.targets if target not in labels]
        if lost:
            raise CompileError(f"the PTX of {symbol!r} jumps to {lost[0]!r}, which it lacks")
    return WarpFunction(symbol, tuple(instructions), labels)


def _body(text: str, symbol: str) -> str:
    """What stands between the braces of the kernel."""
    start = re.search(rf"\.entry\s+{re.escape(symbol)}(?![\w$])", text)
    if start is None:
        raise CompileError(f"no kernel {symbol!r} in the PTX")
    first = text.find("{", start.end())
    depth = 0
    for match in re.finditer(r"[{}]", text[first:] if first >= 0 else ""):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[first + 1 : first + match.start()]
    raise CompileError(f"the PTX of {symbol!r} ends within the kernel")


def _items(body: str) -> Iterator[tuple[str, str]]:
    """Labels, statements without their semicolon, and braces of blocks; braces within a statement make vectors."""
    position = 0
    while position < len(body):
        if body[position].isspace() or body[position] == ";":
            position += 1
        elif body[position] in "{}":
            yield ("open" if body[position] == "{" else "close"), ""
            position += 1
        elif label := _LABEL.match(body, position):
            yield "label", label[1]
            position = label.end()
        else:
            end = body.find(";", position)
            if end < 0:
                raise CompileError(f"the PTX ends within a statement: {body[position:].strip()[:80]!r}")
            yield "statement", body[position:end].strip()
            position = end + 1


def _parse(statement: str, scope: _Scope) -> WarpInstruction:
    match = _STATEMENT.fullmatch(statement)
    if match is None:
        raise CompileError(f"not a PTX instruction: {statement[:80]!r}")
    guard = None if match[2] is None else match[1] + "".join(scope.registers(match[2]) or {match[2]})
    root, *modifiers = re.split(r"\.|::", match[3])
    operands = [found.strip() for found in _OPERAND.findall(match[4] or "")]
    if KINDS.get(root) == "branch":
        return _branch(match[3], root, operands, guard)
    first = 0 if root in DESTLESS or not operands else 1
    sources = [operand for operand in operands[first:] if not operand.startswith("[")]
    kind = _kind(root, modifiers)
    instruction = WarpInstruction(
        match[3],
        kind,
        known=root in KINDS,
        reads=frozenset().union(*(scope.registers(operand) for operand in sources)),
        writes=frozenset().union(*(scope.registers(operand) for operand in operands[:first])),
        address=frozenset().union(*(scope.registers(operand) for operand in operands if operand.startswith("["))),
        guard=guard,
        packed=kind in ("global_load", "shared_load") and SUBWORDS.isdisjoint(modifiers),
        multiplies=kind == "dot" or (kind in ("integer", "float") and _multiplies(root, sources)),
        moves=root == "mov" or (root == "selp" and not FLOATS.isdisjoint(modifiers)),
    )
    return instruction if root != "pmevent" else replace(instruction, mark=_mark(modifiers, operands))


def _branch(opcode: str, root: str, operands: Sequence[str], guard: str | None) -> WarpInstruction:
    targets = tuple(operands[-1:]) if root == "bra" else ()
    ends = root in ENDING or root in ("bra", "brx")
    return WarpInstruction(opcode, "branch", guard=guard, targets=targets, falls_through=guard is not None or not ends)


def _kind(root: str, modifiers: Sequence[str]) -> str:
    kind = KINDS.get(root, "other")
    if kind == "memory":
        return _memory(root, modifiers)
    if "pred" in modifiers:
        return "predicate"
    if kind != "arithmetic":
        return kind
    if not FLOATS.isdisjoint(modifiers):
        return "float"
    return "address" if {"wide", "s64", "u64", "b64"} & set(modifiers) else "integer"


def _memory(root: str, modifiers: Sequence[str]) -> str:
    if root == "cp":
        return "barrier" if {"commit_group", "wait_group", "wait_all", "mbarrier"} & set(modifiers) else "async_copy"
    if root == "multimem":
        return "global_load" if "ld_reduce" in modifiers else "global_store"
    if "param" in modifiers or "const" in modifiers:
        return "other"
    space = "shared" if "shared" in modifiers or root.endswith("matrix") else "global"
    return f"{space}_store" if root in ("st", "red", "stmatrix") else f"{space}_load"


def _multiplies(root: str, sources: Sequence[str]) -> bool:
    factors = sources[:2]
    return root in ("mul", "mad", "fma", "mul24", "mad24", "vmad") and not any(map(_IMMEDIATE.match, factors))


def _mark(modifiers: Sequence[str], operands: Sequence[str]) -> int:
    try:
        number = int(operands[0], 0)
    except (IndexError, ValueError) as error:
        raise CompileError(f"pmevent without a number: {', '.join(operands) or 'none'}") from error
    if "mask" not in modifiers:
        return number
    if number <= 0 or number & (number - 1):
        raise CompileError(f"pmevent.mask triggers not one event: {number}")
    return number.bit_length() - 1

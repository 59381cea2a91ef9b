"""The text of a PTX module as instructions, for the machine that runs them."""

from __future__ import annotations

import re
from dataclasses import dataclass

_STATEMENT = re.compile(r"\s*(?:(?P<label>[$\w]+):|(?P<brace>[{}])|(?P<text>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+(?:\|[^,\s]+)?")
_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(.*)")


class PtxError(Exception):
    """What a kernel did wrong, or what the machine does not know, with the instruction."""


@dataclass
class Instruction:
    guard: str
    negated: bool
    name: str
    modifiers: tuple[str, ...]
    operands: list[str]
    text: str


@dataclass
class Kernel:
    """One ``.entry`` of a module."""

    name: str
    parameters: list[tuple[str, str]]
    registers: dict[str, str]
    instructions: list[Instruction]
    labels: dict[str, int]
    shared: dict[str, int]
    static_bytes: int
    constants: dict[str, bytes]


def parse(ptx, name=None):
    """The module's entry called ``name``, or its only one."""
    ptx = re.sub(r"/\*.*?\*/|//[^\n]*", "", ptx, flags=re.DOTALL)
    entries = re.findall(r"\.visible \.entry (\w+)\s*\((.*?)\)([^{]*)\{", ptx, flags=re.DOTALL)
    chosen = [entry for entry in entries if name in (None, entry[0])]
    if len(chosen) != 1:
        raise PtxError(f"no entry {name}: the module has {[entry[0] for entry in entries]}")
    found, parameters, _ = chosen[0]
    start = re.search(rf"\.visible \.entry {found}\s*\(.*?\)[^{{]*\{{", ptx, flags=re.DOTALL).end()
    body, depth = [], 1
    for character in ptx[start:]:
        depth += (character == "{") - (character == "}")
        if not depth:
            break
        body.append(character)
    kernel = Kernel(found, re.findall(r"\.param \.(?:align \d+ \.)?(\w+) (\w+)", parameters), {}, [], {}, {}, 0, {})
    for align, variable, size in re.findall(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d*)\];", ptx):
        place = -(-kernel.static_bytes // int(align)) * int(align)
        kernel.shared[variable] = place
        kernel.static_bytes = place + int(size or 0)
    for variable in re.findall(r"\.extern \.shared \.align \d+ \.b8 (\w+)\[\];", ptx):
        kernel.shared[variable] = -(-kernel.static_bytes // 16) * 16
    constant = r"\.(?:global|const) \.align \d+ \.[bu](\d+) ([\w$]+)(?:\[(\d+)\])? = (\{[^}]*\}|\w+);"
    for bits, variable, count, values in re.findall(constant, ptx):
        size = int(bits) // 8
        numbers = [int(value, 0) % (1 << int(bits)) for value in values.strip("{}").split(",")]
        content = b"".join(number.to_bytes(size, "little") for number in numbers)
        kernel.constants[variable] = content.ljust(size * int(count or 1), b"\0")  # the rest is zero
    _statements("".join(body), kernel)
    return kernel


def _statements(body, kernel):
    position = 0
    while body[position:].strip():
        match = _STATEMENT.match(body, position)
        if match is None:
            raise PtxError(f"cannot read {body[position : position + 80]!r}")
        position = match.end()
        if match["label"]:
            kernel.labels[match["label"]] = len(kernel.instructions)
        elif match["text"] is not None and match["text"].strip():
            _statement(match["text"].strip(), kernel)


def _statement(text, kernel):
    declared = _REGISTERS.match(text)
    if declared:
        for register in map(str.strip, declared[2].split(",")):
            many = re.fullmatch(r"([%\w]+)<(\d+)>", register)
            names = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [register]
            kernel.registers.update(dict.fromkeys(names, declared[1]))
        return
    if text.startswith((".pragma", ".loc", ".file")):
        return
    if text.startswith("."):
        raise PtxError(f"unknown directive: {text}")
    match = re.fullmatch(r"(?:@(!?)([%\w]+)\s+)?([\w.:]+)\s*(.*)", text, flags=re.DOTALL)
    name, *modifiers = match[3].split(".")
    kernel.instructions.append(
        Instruction(
            match[2] or "", bool(match[1]), name, tuple(m for m in modifiers if m), _OPERAND.findall(match[4]), text
        )
    )

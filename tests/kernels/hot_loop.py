"""The hot loop of a tile function's assembly."""

from __future__ import annotations

import re
from collections import Counter

_LABEL = re.compile(r"^(\.?L\w+):")
_BRANCH = re.compile(r"^\s+(?:j\w+|b|b\.\w+|cbn?z|tbn?z)\s(?:.*,\s*)?(\.?L\w+)\s*(?:[#/].*)?$")
_INSTRUCTION = re.compile(r"^\s+(?:\{vex\}\s+)?([a-z][\w.]*)\s*([^#]*?)\s*(?:#.*|//.*)?$")
_INTEGER_DOT = re.compile(r"vpdpbusd|vpmaddubsw|sdot")
_FLOAT_DOT = re.compile(r"vfn?madd\w+|fmla")


def hot_loop(assembly):
    """(mnemonic, operands) of the loop that contracts: innermost by LLVM's comments, with the most dot products."""
    lines = assembly.splitlines()
    loops = []
    for first, line in enumerate(lines):
        label = _LABEL.match(line)
        if label and "Inner Loop Header" in "".join(lines[first : first + 4]):
            last = max(n for n, other in enumerate(lines) if (m := _BRANCH.match(other)) and m[1] == label[1])
            body = lines[first : last + 1]
            loops.append([(match[1], match[2]) for line in body if (match := _INSTRUCTION.match(line))])

    def dots(loop):
        return [sum(bool(kind.fullmatch(mnemonic)) for mnemonic, _ in loop) for kind in (_INTEGER_DOT, _FLOAT_DOT)]

    return max(loops, key=dots)


CLASSES = {
    "mask": r"v?p?and(ps|pd|d|q)?|vpternlog[dq]|vp?xor(ps|pd|d|q)?|eor|bic|vp?or(d|q)?|orr",
    "shift": r"vps(rl|ll|ra)[wdq]|ushr|sshr|shl|ushll2?|sshll2?|usra",
    "permute": r"vpunpck\w+|vpshuf\w+|vperm\w+|vpalignr|valign[dq]|vshuf\w+|vpblend\w+|vextract\w+|vinsert\w+|zip[12]"
    r"|uzp[12]|trn[12]|tbl|ext|vpack\w+|rev\w+",
    "dot": r"vpdpbusds?|vpmaddubsw|vpmaddwd|vpabsb|vpsignb|sdot|udot|fmla|vfn?madd\w+",
    "convert": r"vpmov[sz]x\w+|vcvt\w+|scvtf|ucvtf|uxtl2?|sxtl2?|fcvtl2?",
}
_CLASS = {name: re.compile(pattern) for name, pattern in CLASSES.items()}


def unpacking(assembly):
    """How often each vector mnemonic that unpacks or multiplies occurs in the hot loop."""
    counts = Counter()
    for mnemonic, operands in hot_loop(assembly):
        if re.search(r"%[xyz]mm|\bv\d+\.|\bq\d+", operands) and any(p.fullmatch(mnemonic) for p in _CLASS.values()):
            counts[mnemonic] += 1
    return counts


def spills(assembly):
    """Vector registers that the hot loop stores on the stack; constants that it loads from there are no loss."""
    return [
        f"{mnemonic} {operands}"
        for mnemonic, operands in hot_loop(assembly)
        if re.search(r"%[xyz]mm\d+, -?\d*\(%rsp\)$", operands)
        or (mnemonic.startswith("st") and re.search(r"\b[qv]\d+\b.*\[sp\b", operands))
    ]

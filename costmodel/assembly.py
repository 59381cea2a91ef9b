"""Assembly text of one function, as LLVM prints it for ELF, turned into classified instructions.

Two syntaxes are read: x86-64 in AT&T form and AArch64. Every instruction gets one class of `CLASSES` from what it does;
one that computes *and* has a memory operand (``vpand (%rdi), %ymm0, %ymm1``) is listed under its own class and under
``load`` (or ``store``) as well, because it keeps a port of each kind busy.

The classes: ``dot`` sums products of adjacent integers (vpmaddubsw, vpmaddwd, vpdpbusd, sdot, udot, usdot, smmla; also
the bfloat16 dots). ``arithmetic`` is all other vector arithmetic, float multiplies and FMAs included. ``convert``
changes a lane's type or width. ``shift`` moves bits within a lane. ``mask`` is bitwise logic. ``permute`` moves lanes,
including transfers to and from scalar registers and broadcasts of a register; a broadcast straight from memory is a
``load``. ``address`` is scalar arithmetic and scalar moves. ``other`` is what costs a decode slot at most: compares
that fuse with their branch, vector register copies, zeroing and other constants made without an input, prefetches,
mask registers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from ..kernels.cpu.share import Share, parse_share
from ..kernels.errors import CompileError

CLASSES = ("load", "store", "dot", "convert", "shift", "mask", "permute", "arithmetic", "address", "branch", "other")

Rules = tuple[tuple[str, re.Pattern[str]], ...]


def _rules(**patterns: str) -> Rules:
    return tuple((kind, re.compile(rf"(?:{pattern})$")) for kind, pattern in patterns.items())


# Mnemonics without the VEX/EVEX "v".
_X86: Rules = _rules(
    dot=r"pmaddubsw|pmaddwd|pdp\w+|dpbf16ps|dpphps|dpp[sd]",
    convert=r"cvt\w+|pmov[sz]x\w+|pmov(s|us)?(wb|dw|db|qd|qw|qb)|pack[su]s(wb|dw)",
    shift=r"ps(ll|rl|ra)v?[wdq]|pro[lr]v?[dq]|psh[lr]dv?[wdq]|gf2p8\w+|pmultishiftqb",
    mask=r"p?(and|andn|or|xor)(d|q|ps|pd)?|pternlog[dq]",
    load=r"p?gather\w+|lddqu|p?maskmov\w+",
    permute=r"p?shuf\w+|p?unpck\w+|perm\w+|p?insr?\w+|p?extr\w+|palignr|align[dq]|ps[lr]ldq|p?blend\w+|p?broadcast\w+"
    r"|p?(compress|expand)\w+|mov(ddup|s[hl]dup|hlps|lhps|[hl]p[sd])|p?movmsk\w+",
    arithmetic=r"p?h?(add|sub|mul|div|sqrt|min|max|abs|sign|avg|cmp|test)\w*|f(n?m(add|sub)|maddsub|msubadd)\w+"
    r"|p?rcp\w+|rsqrt\w+|round\w+|rndscale\w+|psadbw|u?comis\w|pmadd52\w+|scalef\w+|pconflict\w|pl?zcnt\w|popcnt\w|phminposuw",
)
_ARM: Rules = _rules(
    dot=r"[us]dot|usdot|sudot|bfdot|[us]mmla|usmmla|bfmmla",
    convert=r"[us]xtl2?|[us]?shll2?|[us]cvtf|b?fcvt\w+|s?u?q?xtu?n2?|sqxtun2?",
    shift=r"[us]?q?r?sh[lr]u?|s[lr]i|[us]r?sra|[us]?q?r?shru?n2?|xar",
    mask=r"and|orr|orn|eor|eor3|bcax|bic|bit|bif|bsl|not|mvn",
    permute=r"zip[12]?|uzp[12]?|trn[12]|tb[lx]|ext|rev(16|32|64)?|dup|ins|[us]mov|rbit",
    arithmetic=r"f?(add|sub|mul|div|min|max|abs|neg|sqrt|ml[as]l?|mull)\w*|f?n?m(add|sub)|fn?mul\w*"
    r"|[us]r?q?h?(add|sub|mul|ml[as]|ab[ad]|min|max)\w*|[us]adalp|[us]qr?d\w*|f?(cm|ac)\w+|r?(add|sub)hn2?|fr(int|ecp|sqrt)\w*|cls|clz|cnt|addv"
    r"|pmull?2?",
)

_X86_MULTIPLY = re.compile(r"p?mul|f(n?m(add|sub)|maddsub|msubadd)|pmadd|p?dp")
_ARM_MULTIPLY = re.compile(r"\w*(mul|ml[as]|mmla|madd|msub|dot)")
_X86_KEEPS = re.compile(r"v(p?dp|fn?m|fmaddsub|fmsubadd|pternlog|perm[it]2|pmadd52|p?gather|psh[lr]dv)")
_SSE_REPLACES = re.compile(r"(mov(?![hl]p|hl|lh)|pmov|cvt|pshuf(d|hw|lw)|pabs|sqrt|r?sqrt|rcp|round|lddqu|p?extr)")
_X86_REPLACES = re.compile(r"(mov|lea|set|pop|bl|tzcnt|lzcnt|popcnt|rorx)")
_ARM_KEEPS = re.compile(
    r"([us]|us|su|bf)dot|(us|[us]|bf)mmla|f?ml[as]|[us]q?d?ml[as]l|f?cmla|tbx|ins|bsl|bit|bif|s[lr]i$|[us]r?sra"
    r"|[us]adalp|[us]aba|\w+n2$|movk|bfi|bfxil"
)
_X86_VECTOR = re.compile(r"%[xyz]mm\d")
_X86_REGISTER = re.compile(r"%(?:[xyz]mm(\d+)|(r\d+)[dwb]?\b|[re]?([abcd])[xlh]\b|[re]?(si|di|bp)l?\b)")
_ARM_REGISTER = re.compile(r"(?<![\w.:#])(?:[vzqdshb](\d+)|[xw](\d+))(?![\w:])")
_ARM_VECTOR = re.compile(r"(?<![\w.:#])[vzqdshb]\d+(?![\w:])")
_COMMENT = re.compile(r"//.*|(^|\s)#([A-Z#\s].*|$)")
_LABEL = re.compile(r'"?([^\s":]+)"?:')
NOTHING: frozenset[str] = frozenset()

ARGUMENTS = ("rdi", "rsi", "rdx", "rcx", "r8", "r9"), tuple(f"x{i}" for i in range(8))
"""Registers of the first integer and pointer arguments: System V on x86-64, AAPCS64 on AArch64."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of a function.

    Attributes
    ----------
    mnemonic : str
        Without encoding prefixes.
    operands : tuple of str
        In the order printed (AT&T: destination last; AArch64: destination first).
    kind : str
        Its class, one of `CLASSES`.
    loads, stores : bool
        Whether a memory operand is read or written.
    reads, writes : frozenset of str
        Registers whose values it takes and gives, whatever their width (``v0``, ``rax``, ``x8``), and stack slots by
        their text.
    address : frozenset of str
        Registers that make up the address of a memory operand which is no stack slot.
    vector : bool
        Whether it works on vector registers.
    multiplies : bool
        Whether it is a dot product, FMA or multiplication of vectors.
    target : str or None
        Label it may jump to.
    falls_through : bool
        Whether control can continue with the next instruction.
    """

    mnemonic: str
    operands: tuple[str, ...]
    kind: str
    loads: bool = False
    stores: bool = False
    reads: frozenset[str] = NOTHING
    writes: frozenset[str] = NOTHING
    address: frozenset[str] = NOTHING
    vector: bool = False
    multiplies: bool = False
    target: str | None = None
    falls_through: bool = True

    @property
    def classes(self) -> tuple[str, ...]:
        """Every class it counts under: its own, and ``load`` or ``store`` for a memory operand."""
        memory = [kind for kind, used in (("load", self.loads), ("store", self.stores)) if used and kind != self.kind]
        return (self.kind, *memory)

    @property
    def targets(self) -> tuple[str, ...]:
        """Labels it may jump to."""
        return () if self.target is None else (self.target,)


@dataclass(frozen=True)
class Function:
    """Instructions of one function in address order, and what each label points to.

    Attributes
    ----------
    symbol : str
    instructions : tuple of Instruction
    labels : dict of str to int
        Index of the instruction that follows the label; ``len(instructions)`` at the very end.
    notes : dict of int to Share
        What the name of the block that starts with this instruction states.
    """

    symbol: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    notes: dict[int, Share]


def parse_function(assembly: str, symbol: str) -> Function:
    """Read the function ``symbol`` out of ``assembly``.

    Raises
    ------
    CompileError
        If the text has no such function.
    """
    lines = _body(assembly, symbol)
    bare = [_COMMENT.sub("", line).strip() for line in lines]
    x86 = any("%" in line or (line.startswith("ret") and line != "ret") for line in bare)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    notes: dict[int, Share] = {}
    for line in lines:
        share = parse_share(line)
        if share is not None:
            notes[len(instructions)] = share
        line = _COMMENT.sub("", line).strip()
        label = _LABEL.fullmatch(line)
        if label:
            labels[label[1]] = len(instructions)
        elif line and not line.startswith("."):
            instructions.append(_parse_x86(line) if x86 else _parse_arm(line))
    return Function(symbol, tuple(instructions), labels, notes)


def _body(assembly: str, symbol: str) -> list[str]:
    """Lines from the symbol's label to the function's end, comments included."""
    starts = {f"{symbol}:", f'"{symbol}":'}
    lines: list[str] | None = None
    for raw in assembly.splitlines():
        line = _COMMENT.sub("", raw).strip()
        if lines is None:
            if line in starts:
                lines = []
        elif line.startswith((".Lfunc_end", ".size", ".cfi_endproc")):
            return lines
        else:
            lines.append(raw.strip())
    if lines is None:
        raise CompileError(f"no function {symbol!r} in the assembly that the compiler emitted")
    return lines


def _split(line: str) -> tuple[str, tuple[str, ...]]:
    line = re.sub(r"^(\{\w+\}|lock|rep\w*|notrack)\s+", "", line)
    mnemonic, _, rest = line.partition("\t") if "\t" in line else line.partition(" ")
    operands = re.findall(r"(?:\([^)]*\)|\[[^\]]*\]|\{[^}]*\}|[^,(\[{])+", rest)
    return mnemonic.strip(), tuple(o.strip() for o in operands)


def _match(rules: Rules, mnemonic: str) -> str:
    return next((kind for kind, pattern in rules if pattern.match(mnemonic)), "other")


def _registers(pattern: re.Pattern[str], operands: Iterable[str]) -> frozenset[str]:
    """Canonical names of the registers in ``operands``."""
    found = [match for operand in operands for match in pattern.findall(operand)]
    if pattern is _ARM_REGISTER:
        return frozenset(f"v{vector}" if vector else f"x{scalar}" for vector, scalar in found)
    return frozenset(
        f"v{vector}" if vector else numbered or (f"r{letter}x" if letter else f"r{pair}")
        for vector, numbered, letter, pair in found
    )


@lru_cache(maxsize=1 << 16)
def _parse_x86(line: str) -> Instruction:
    mnemonic, operands = _split(line)
    if mnemonic.startswith(("j", "call", "ret", "ud2")):
        jumps = mnemonic.startswith("j")
        target = operands[0] if jumps and not operands[0].startswith("*") else None
        ends = mnemonic.startswith(("jmp", "ret", "ud2"))
        return Instruction(mnemonic, operands, "branch", target=target, falls_through=not ends)
    if not operands or mnemonic.startswith(("prefetch", "nop")):
        return Instruction(mnemonic, operands, "other")
    memory = _memory(operands)
    parse = _x86_vector if any(_X86_VECTOR.search(o) for o in operands) else _x86_scalar
    return _located(parse(mnemonic, operands, memory), memory, "(%rsp", _X86_REGISTER)


def _memory(operands: tuple[str, ...]) -> str:
    """The operand in memory; empty if there is none."""
    return next((o for o in operands if not o.startswith(("%", "$", "{"))), "")


def _located(instruction: Instruction, memory: str, stack: str, pattern: re.Pattern[str]) -> Instruction:
    """Add what the memory operand refers to: a stack slot, which acts as a register, or an address."""
    if not (instruction.loads or instruction.stores):
        return instruction
    if stack not in memory:
        return replace(instruction, address=_registers(pattern, [memory]))
    slot = frozenset([memory])
    return replace(
        instruction,
        reads=instruction.reads | (slot if instruction.loads else NOTHING),
        writes=instruction.writes | (slot if instruction.stores else NOTHING),
    )


def _x86_vector(mnemonic: str, operands: tuple[str, ...], memory: str) -> Instruction:
    base, last = mnemonic.removeprefix("v"), operands[-1]
    sources = [o for o in operands[:-1] if o != memory]
    if _ignores_inputs(base, operands):
        return Instruction(mnemonic, operands, "other", writes=_registers(_X86_REGISTER, [last]), vector=True)
    if re.match(r"p?test(?!n?m)|u?comis", base):
        reads = _registers(_X86_REGISTER, [*sources, last])
        return Instruction(mnemonic, operands, "arithmetic", loads=bool(memory), reads=reads, vector=True)

    kind = _match(_X86, base)
    stores = last == memory
    loads = bool(memory) and not stores
    if base.startswith("mov") and kind == "other":
        if memory:
            kind = "store" if stores else "load"
        elif not all(_X86_VECTOR.search(o) for o in operands):
            kind = "permute"
    elif loads and ("broadcast" in base or base == "movddup"):
        kind = "load"
    elif "scatter" in base or (kind == "load" and stores):
        kind = "store"
    merges = "{%k" in last and "{z}" not in last
    keeps = _X86_KEEPS.match(mnemonic) is not None if mnemonic.startswith("v") else not _SSE_REPLACES.match(mnemonic)
    return Instruction(
        mnemonic,
        operands,
        kind,
        loads=loads,
        stores=stores,
        reads=_registers(_X86_REGISTER, [*sources, last] if (keeps or merges) and not stores else sources),
        writes=NOTHING if stores else _registers(_X86_REGISTER, [last.partition("{")[0]]),
        vector=True,
        multiplies=kind in ("dot", "arithmetic") and _X86_MULTIPLY.match(base) is not None,
    )


def _ignores_inputs(base: str, operands: tuple[str, ...]) -> bool:
    """Whether it is one of the idioms that make zeros or ones from a register combined with itself."""
    registers = [o for o in operands if o.startswith("%")]
    if len(registers) < 2 or registers[0] != registers[1] or _memory(operands):
        return False
    if base.startswith("pternlog"):
        return operands[0] in ("$0", "$-1", "$255")
    return re.match(r"p?xor|pcmpeq|p?sub[bwdlq]$", base) is not None


def _x86_scalar(mnemonic: str, operands: tuple[str, ...], memory: str) -> Instruction:
    last = operands[-1]
    sources = [o for o in operands[:-1] if o != memory]
    if mnemonic.startswith("lea"):
        return Instruction(
            mnemonic,
            operands,
            "address",
            reads=_registers(_X86_REGISTER, [memory]),
            writes=_registers(_X86_REGISTER, [last]),
        )
    if mnemonic.startswith(("v", "k", "bt")) or re.match(r"(cmp|test)[bwlq]", mnemonic):
        stores = last == memory and mnemonic.startswith("k")
        return Instruction(mnemonic, operands, "other", loads=bool(memory) and not stores, stores=stores)
    if mnemonic.startswith(("push", "pop")):
        # The stack pointer moves: not a slot that another instruction names.
        stores = mnemonic.startswith("push")
        written = NOTHING if stores else _registers(_X86_REGISTER, [last])
        return Instruction(mnemonic, operands, "store" if stores else "load", not stores, stores, writes=written)
    if _ignores_inputs(mnemonic, operands):
        return Instruction(mnemonic, operands, "address", writes=_registers(_X86_REGISTER, [last]))
    moves = mnemonic.startswith("mov")
    replaces = _X86_REPLACES.match(mnemonic) is not None or len(operands) > 2
    stores = last == memory
    reads = _registers(_X86_REGISTER, sources if replaces or stores else [*sources, last])
    writes = NOTHING if stores else _registers(_X86_REGISTER, [last])
    if len(operands) == 1 and re.match(r"i?(mul|div)", mnemonic):
        reads, writes, stores = reads | {"rax", "rdx"}, frozenset(["rax", "rdx"]), False
    kind = ("store" if stores else "load" if memory else "address") if moves else "address"
    loads = bool(memory) and not (stores and replaces)
    return Instruction(mnemonic, operands, kind, loads=loads, stores=stores, reads=reads, writes=writes)


@lru_cache(maxsize=1 << 16)
def _parse_arm(line: str) -> Instruction:
    mnemonic, operands = _split(line)
    if re.fullmatch(r"b(\.\w+)?|blr?|br|ret|brk|udf|[ct]bn?z", mnemonic):
        leaves = mnemonic in ("b", "br", "ret", "brk", "udf")
        target = operands[-1] if operands and mnemonic not in ("bl", "blr", "br", "ret", "brk", "udf") else None
        return Instruction(mnemonic, operands, "branch", target=target, falls_through=not leaves)
    if re.fullmatch(r"prf\w+|nop|hint|cmp|cmn|tst|f?ccmp|fcmpe?", mnemonic):
        return Instruction(mnemonic, operands, "other")
    at = next((i for i, o in enumerate(operands) if o.startswith("[")), len(operands))
    data = operands[:at]
    vector = any(_ARM_VECTOR.search(o) for o in data)
    used, first = _registers(_ARM_REGISTER, data), _registers(_ARM_REGISTER, data[:1])
    if mnemonic.startswith(("ld", "st")):
        loads = mnemonic.startswith("ld")
        lane = any(o.endswith("]") for o in data)
        instruction = Instruction(
            mnemonic,
            operands,
            "permute" if lane and loads else "load" if loads else "store",
            loads=loads,
            stores=not loads,
            reads=used if lane or not loads else NOTHING,
            writes=used if loads else NOTHING,
            vector=vector,
        )
        return _located(instruction, operands[at], "[sp", _ARM_REGISTER)

    keeps = _ARM_KEEPS.match(mnemonic) is not None or (mnemonic == "mov" and data[0].endswith("]"))
    reads = _registers(_ARM_REGISTER, data if keeps else data[1:])
    if not vector:
        return Instruction(mnemonic, operands, "address", reads=reads, writes=first)
    kind = _match(_ARM, mnemonic)
    if mnemonic in ("mov", "fmov") and not data[1].startswith("#"):
        copies = all(re.match(r"[vqdshbz]\d+(\.\w+)?$", o) for o in data)
        kind = "other" if copies else "permute"
    return Instruction(
        mnemonic,
        operands,
        kind,
        reads=reads,
        writes=first,
        vector=True,
        multiplies=kind in ("dot", "arithmetic") and _ARM_MULTIPLY.match(mnemonic) is not None,
    )

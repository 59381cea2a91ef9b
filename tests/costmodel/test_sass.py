from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from lowbit.costmodel.loops import control_flow
from lowbit.costmodel.sass import parse_sass
from lowbit.costmodel.sass_opcodes import KINDS
from lowbit.costmodel.warp_code import GPU_CLASSES, WarpInstruction
from lowbit.kernels.cuda import toolchain
from lowbit.kernels.errors import CompileError

LISTINGS = Path(__file__).with_name("listings")
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120")

needs_tools = pytest.mark.skipif(not toolchain.available(), reason="needs ptxas and nvdisasm")


def sass(*lines: str) -> str:
    """A section with these instructions and labels, at consecutive addresses."""
    text, address = [".section .text.f", ".text.f:"], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
            continue
        text.append(f"        /*{address:04x}*/                   {line} ;")
        address += 16
    return "\n".join(text)


def only(line: str) -> WarpInstruction:
    return parse_sass(sass(".L_x_0:", ".L_x_1:", line, "EXIT"), "f").instructions[0]


@pytest.mark.parametrize(
    ("line", "kind", "writes", "reads", "address"),
    [
        # Vectors take registers in a row; addresses in global memory are pairs, in shared memory single registers.
        ("LDG.E.128 R4, [R2.64+0x10]", "global_load", "R4 R5 R6 R7", "", "R2 R3"),
        ("LDG.E.64.SYS R4, [R2]", "global_load", "R4 R5", "", "R2 R3"),
        ("LDG.E R4, [UR6]", "global_load", "R4", "", "UR6 UR7"),
        ("LDG.E.U16.CONSTANT R4, desc[UR4][R2.64]", "global_load", "R4", "", "UR4 UR5 R2 R3"),
        ("LDG.E R4, desc[UR4][R2.U32+UR8]", "global_load", "R4", "", "UR4 UR5 R2 UR8 UR9"),
        ("LDG.E.ENL2.256 R8, R4, desc[UR4][R2.64]", "global_load", "R4 R5 R6 R7 R8 R9 R10 R11", "", "UR4 UR5 R2 R3"),
        ("STG.E.64 desc[UR4][R2.64], R8", "global_store", "", "R8 R9", "UR4 UR5 R2 R3"),
        ("LDL.64 R4, [R1+0x8]", "global_load", "R4 R5", "L8 L12", "R1"),
        ('LDL R4, [R1+0x8]   (*"SpillRefill"*)', "global_load", "R4", "L8", "R1"),
        ("LDL R4, [R7+0x8]", "global_load", "R4", "", "R7"),
        ("STL [R1], R4", "global_store", "L0", "R4", "R1"),
        ("LDS.128 R8, [R5.X4+UR4+0x10]", "shared_load", "R8 R9 R10 R11", "", "R5 UR4"),
        ("LDSM.16.M88.4 R8, [R5]", "shared_load", "R8 R9 R10 R11", "", "R5"),
        ("STS.64 [R5], R6", "shared_store", "", "R6 R7", "R5"),
        ("LDGSTS.E.BYPASS.128 [R5+0x400], [R2.64], !P0", "async_copy", "", "P0", "R5 R2 R3"),
        ("LDGSTS.E.BYPASS.128 [R5], desc[UR8][R2.64]", "async_copy", "", "", "R5 UR8 UR9 R2 R3"),
        ("ATOMG.E.ADD.STRONG.GPU PT, R4, [R2.64], R6", "global_load", "R4", "R6", "R2 R3"),
        ("RED.E.ADD.STRONG.GPU [R2.64], R5", "global_store", "", "R5", "R2 R3"),
        # Products of 64 bits and what is added to them.
        ("IMAD R4, R5, R6, R7", "integer", "R4", "R5 R6 R7", ""),
        ("IMAD.WIDE R4, R5.reuse, 0x4, R8", "address", "R4 R5", "R5 R8 R9", ""),
        ("IMAD.WIDE.U32.X R4, R5, R6, R8, P0", "address", "R4 R5", "R5 R6 R8 R9 P0", ""),
        ("IMAD.HI.U32 R4, R5, R6, R8", "integer", "R4", "R5 R6 R8 R9", ""),
        ("IMAD.SHL.U32 R4, R5, 0x100, RZ", "shift", "R4", "R5", ""),
        ("IMAD.MOV.U32 R4, RZ, RZ, c[0x0][0x160]", "integer", "R4", "", ""),
        ("IADD.64 R2, R4, UR6", "address", "R2 R3", "R4 R5 UR6 UR7", ""),
        ("DFMA R2, R4, -R6, |R8|", "float", "R2 R3", "R4 R5 R6 R7 R8 R9", ""),
        ("FFMA R2, R4, -R6.reuse, |R8|", "float", "R2", "R4 R6 R8", ""),
        ("FFMA2 R2, R4, R6, R8", "float", "R2 R3", "R4 R5 R6 R7 R8 R9", ""),
        # Conversions name the types of their operands.
        ("F2F.F64.F32 R2, R4", "convert", "R2 R3", "R4", ""),
        ("F2F.F32.F64 R2, R4", "convert", "R2", "R4 R5", ""),
        ("F2I.S64.TRUNC R2, R4", "convert", "R2 R3", "R4", ""),
        ("F2I.F64.TRUNC R2, R4", "convert", "R2", "R4 R5", ""),
        ("I2F.F64.S64 R2, R4", "convert", "R2 R3", "R4 R5", ""),
        ("I2F.F64 R2, R4", "convert", "R2 R3", "R4", ""),
        ("I2FP.F32.S32 R2, R4", "convert", "R2", "R4", ""),
        ("HADD2.F32 R2, -RZ, R4.H0_H0", "convert", "R2", "R4", ""),
        ("HADD2 R2, R4, -R5", "float", "R2", "R4 R5", ""),
        # Predicates follow the register that they belong to, or stand before it.
        ("IADD3 R2, P0, P1, R4, R5, R6", "integer", "R2 P0 P1", "R4 R5 R6", ""),
        ("IADD3.X R2, P0, PT, R4, R5, RZ, P2, !P3", "integer", "R2 P0", "R4 R5 P2 P3", ""),
        ("ISETP.GE.U32.AND.EX P0, PT, R2, UR4, PT, P1", "predicate", "P0", "R2 UR4 P1", ""),
        ("ISETP.GE.S64.AND P0, P1, R2, R4, PT", "predicate", "P0 P1", "R2 R3 R4 R5", ""),
        ("PLOP3.LUT P0, PT, P1, P2, PT, 0x80, 0x0", "predicate", "P0", "P1 P2", ""),
        ("LOP3.LUT P0, RZ, R4, 0x1, RZ, 0xc0, !PT", "logic", "P0", "R4", ""),
        ("LOP3.LUT R3, R4, 0xf0f0f0f, RZ, 0xc0, !PT", "logic", "R3", "R4", ""),
        ("SEL R2, R4, R5, !P0", "logic", "R2", "R4 R5 P0", ""),
        ("VOTE.ANY R4, PT, P2", "predicate", "R4", "P2", ""),
        ("VOTE.ANY P0, P2", "predicate", "P0", "P2", ""),
        ("P2R R4, PR, R5, 0x7f", "predicate", "R4", "P0 P1 P2 P3 P4 P5 P6 R5", ""),
        ("P2R R4, PR, RZ, 0x4", "predicate", "R4", "P2", ""),
        ("R2P PR, R4, 0x5", "predicate", "P0 P2", "R4", ""),
        ("IMNMX.S64 PT, PT, R8, R10, UR4, !PT, !PT", "integer", "R8 R9", "R10 R11 UR4 UR5", ""),
        ("SHFL.BFLY PT, R4, R5, 0x10, 0x1f", "shuffle", "R4", "R5", ""),
        # The uniform datapath.
        ("UIADD3 UR4, UP0, UPT, UR5, 0x10, URZ", "address", "UR4 UP0", "UR5", ""),
        ("UISETP.GT.AND UP0, UPT, UR6, URZ, UPT", "predicate", "UP0", "UR6", ""),
        ("ULDC.64 UR4, c[0x0][0x118]", "address", "UR4 UR5", "", ""),
        ("LDCU.128 UR4, c[0x0][0x380]", "address", "UR4 UR5 UR6 UR7", "", ""),
        ("R2UR UR4, R3", "address", "UR4", "R3", ""),
        ("S2UR UR4, SR_CTAID.X", "address", "UR4", "", ""),
        # The rest.
        ("IDP.4A.S8.U8 R2, R4, R5.reuse, R6", "dot", "R2", "R4 R5 R6", ""),
        ("PRMT R2, R4, 0x5140, R6", "permute", "R2", "R4 R6", ""),
        ("SHF.R.U64 R2, R4, 0x4, R5", "shift", "R2", "R4 R5", ""),
        ("MUFU.EX2 R2, R4", "special", "R2", "R4", ""),
        ("S2R R2, SR_TID.X", "other", "R2", "", ""),
        ("CS2R R2, SRZ", "other", "R2 R3", "", ""),
        ("CS2R.32 R2, SR_CLOCKLO", "other", "R2", "", ""),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "barrier", "", "", ""),
        ("BSSY B0, `(.L_x_0)", "branch", "", "", ""),
        ("BRX R4 -0x1b0 (*\"BRANCH_TARGETS .L_x_0,.L_x_1\"*)", "branch", "", "", "R4 R5"),
        ("@!PT LDS RZ, [RZ]", "other", "", "", ""),
    ],
)  # fmt: skip
def test_class_and_registers(line: str, kind: str, writes: str, reads: str, address: str) -> None:
    found = only(line)
    assert found.known
    assert found.kind == kind
    assert found.writes == set(writes.split())
    assert found.reads == set(reads.split())
    assert found.address == set(address.split())


@pytest.mark.parametrize(
    ("line", "multiplies", "moves"),
    [
        ("IDP.4A.S8.S8 R2, R4, R5, RZ", True, False),
        ("FFMA R2, R4, R5, R6", True, False),
        ("FFMA R2, R4, c[0x0][0x170], R6", True, False),
        ("FMUL R2, R4, 1.4426950216293334961", False, False),
        ("HFMA2 R2, R4, 0.0625, 0.0625, R5", False, False),
        ("HFMA2.MMA R2, R4, R6, R5", True, False),
        ("HFMA2.MMA R2, -RZ, RZ, 1024, 1024", False, True),
        ("IMAD R2, R4, R5, RZ", True, False),
        ("IMAD R2, R4, 0x1010101, RZ", False, False),
        ("IMAD.IADD R2, R4, 0x1, R5", False, False),
        ("IMAD.WIDE R2, R4, R5, R6", False, False),
        ("IMAD.U32 R2, RZ, RZ, UR4", False, True),
        ("MOV.64 R2, UR4", False, True),
        ("FSEL R2, R4, RZ, P0", False, True),
        ("SEL R2, R4, R5, P0", False, False),
        ("FADD R2, R4, R5", False, False),
    ],
)
def test_products_multiply_two_values(line: str, multiplies: bool, moves: bool) -> None:
    found = only(line)
    assert (found.multiplies, found.moves) == (multiplies, moves)


def test_guards_and_marks() -> None:
    assert only("@!P3 IADD3 R2, R2, 0x1, RZ").guard == "!P3"
    assert only("@!P3 IADD3 R2, R2, 0x1, RZ").reads == {"R2"}
    assert only("@PT IADD3 R2, R2, 0x1, RZ").guard is None
    assert [only(f"PMTRIG {1 << number:#x}").mark for number in range(16)] == list(range(16))
    assert only("NOP").mark is None
    for operand in ("0x3", "0x0", "R2"):
        with pytest.raises(CompileError, match="PMTRIG triggers not one event"):
            only(f"PMTRIG {operand}")


@pytest.mark.parametrize(
    ("line", "targets", "falls_through"),
    [
        ("BRA `(.L_x_0)", (".L_x_0",), False),
        ("@P0 BRA `(.L_x_0)", (".L_x_0",), True),
        ("@PT BRA `(.L_x_0)", (".L_x_0",), False),
        ("BRA.U UP0, `(.L_x_0)", (".L_x_0",), True),
        ("BRA P1, `(.L_x_0)", (".L_x_0",), True),
        ("BRA.DIV ~URZ, `(.L_x_0)", (), True),
        ("BRA.CONV ~URZ, `(.L_x_0)", (".L_x_0",), False),
        ("@!P0 CALL.REL.NOINC `(.L_x_0)", (".L_x_0",), True),
        ("CALL.REL.NOINC `(.L_x_0)", (".L_x_0",), False),
        ("WARPSYNC.COLLECTIVE R5, `(.L_x_0)", (), True),
        ('BRX R4 -0x1b0 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)', (".L_x_0", ".L_x_1"), False),
        ("EXIT", (), False),
        ("@P0 EXIT", (), True),
        ("RET.REL.NODEC R4 `(f)", (), False),
        ("CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_u64)", (), True),
        ("BSSY B0, `(.L_x_0)", (), True),
        ("BSYNC.RECONVERGENT B0", (), True),
        ("WARPSYNC 0xffffffff", (), True),
    ],
)
def test_jumps(line: str, targets: tuple[str, ...], falls_through: bool) -> None:
    found = only(line)
    assert (found.targets, found.falls_through) == (targets, falls_through)


def test_control_flow_of_a_guarded_loop() -> None:
    function = parse_sass((LISTINGS / "guarded.sm_120.sass").read_text(), "guarded")
    # Blocks by first instruction: entry 0; the loop's start 9, cut by BSSY, then 12, whose branch skips the loads at
    # 14; the label at 26, cut by BSYNC, and 28 with the loop's branch; the store 38 with EXIT. Behind it stands a
    # branch to itself, which nothing reaches. Labels that nothing jumps to cut no block.
    assert sorted(control_flow(function).edges) == [
        (0, 9), (9, 12), (12, 14), (12, 26), (14, 26), (26, 28), (28, 9), (28, 38), (41, 41),
    ]  # fmt: skip


def test_an_unknown_opcode_is_told() -> None:
    found = only("FROBNICATE.X4 R2, R4")
    assert (found.known, found.kind) == (False, "other")
    assert all(kind in GPU_CLASSES for kind in KINDS.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no kernel 'f' in the SASS"),
        (sass("EXIT").replace(".text.f", ".text.g"), "no kernel 'f' in the SASS"),
        (sass(), "no instructions"),
        (sass("MOV R1, R2", "EXIT").replace("/*0010*/", "/*0020*/"), "lacks an instruction before address 0x0020"),
        (sass("MOV R1, R2"), "ends before its control flow does"),
        (sass("BRA `(.L_x_9)", "EXIT"), "jumps to '.L_x_9', which it lacks"),
        (sass("MOV R1, R2", "EXIT").replace(" ;", ""), "a line that is no instruction"),
        (sass("mov r1, r2", "EXIT"), "not a SASS instruction: 'mov r1, r2'"),
        (sass("@P0", "EXIT"), "not a SASS instruction: '@P0'"),
    ],
)
def test_damaged_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(CompileError, match=re.escape(message)):
        parse_sass(text, "f")


def life_ranges(text: str) -> list[tuple[str, set[str], set[str]]]:
    """Instructions with the registers that nvdisasm says they define and use, from its columns of life ranges."""
    found = []
    banks: list[str] = []
    columns: list[dict[int, str]] = []
    lines = [line.partition("// |") for line in text.splitlines() if "// |" in line]
    for (_, _, above), (code, _, line) in itertools.pairwise([("", "", ""), *lines]):
        cells = line.split("|")[:-1]
        if "GPR" in line:
            names = {"GPR": "R", "PRED": "P", "UGPR": "UR", "UPRED": "UP"}
            banks = [names[cell.strip()] for cell in cells]
        elif "#" in line:
            # Units stand under their tens, which the line above has from 10 on.
            tens = above.split("|")[:-1]
            columns = [
                {
                    place: f"{bank}{int((ten[place : place + 1].strip() or '0') + digit)}"
                    for place, digit in enumerate(cell)
                    if digit.isdigit()
                }
                for bank, cell, ten in zip(banks, cells, tens, strict=True)
            ]
        elif match := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", code):
            seen = [
                (cell[place], name) for cell, names in zip(cells, columns, strict=True) for place, name in names.items()
            ]
            defined = {name for sign, name in seen if sign in "^x"}
            found.append((match[1], defined, {name for sign, name in seen if sign in "vx"}))
    return found


@needs_tools
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("path", sorted(LISTINGS.glob("*.ptx")), ids=lambda path: path.stem)
def test_registers_are_those_that_nvdisasm_tells(path: Path, arch: str, tmp_path: Path) -> None:
    if path.stem == "pipeline" and arch == "sm_75":
        pytest.skip("sm_75 has no asynchronous copies")
    image = tmp_path / "kernel.cubin"
    image.write_bytes(toolchain.assemble(path.read_text(), arch).image)
    instructions = life_ranges(toolchain._call("nvdisasm", "-c", "-plr", "-lrm", "narrow", str(image)))
    assert len(instructions) > 10
    for line, defined, used in instructions:
        x = only(re.sub(r"`\(.*\)", "`(.L_x_0)", line))
        assert x.known, line
        if x.guard == "!PT":
            continue
        guard = set() if x.guard is None else {x.guard.lstrip("!")}
        # UR2 of sm_87's preamble has no column.
        assert x.writes - {"UR2"} == defined, line
        # A descriptor that the text of sm_80 to sm_89 leaves out is told as used.
        hidden = {name for name in used if name.startswith("UR")} if "[R" in line and "desc" not in line else {"UR2"}
        assert (x.reads | x.address | guard) - hidden == used - hidden, line

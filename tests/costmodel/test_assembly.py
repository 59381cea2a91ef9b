from __future__ import annotations

import pytest
from lowbit.costmodel.assembly import CLASSES, Instruction, parse_function
from lowbit.kernels.errors import CompileError


def only(line: str, syntax: str = "x86") -> Instruction:
    leave = "retq" if syntax == "x86" else "ret"
    (instruction, *_) = parse_function(f"f:\n\t{line}\n\t{leave}\n.Lfunc_end0:\n", "f").instructions
    return instruction


X86 = {
    "vmovdqu (%rdi,%rax), %ymm0": ("load",),
    "vmovups 64(%rdi), %zmm3": ("load",),
    "vmovd (%rsi), %xmm1": ("load",),
    "vpbroadcastd (%rsi,%r8,4), %ymm7": ("load",),
    "vbroadcasti128 (%rsi), %ymm7": ("load",),
    "vmovddup (%rsi), %xmm7": ("load",),
    "movl (%rdi), %eax": ("load",),
    "movzbl (%rdi), %eax": ("load",),
    "vmovdqu %ymm0, (%rcx)": ("store",),
    "vmovntdq %zmm0, (%rcx)": ("store",),
    "movq %rax, 8(%rsp)": ("store",),
    "vpmaddubsw -64(%rsi,%r9,2), %ymm5, %ymm5": ("dot", "load"),
    "vpmaddwd %ymm2, %ymm3, %ymm3": ("dot",),
    "{vex}\tvpdpbusd\t%ymm4, %ymm2, %ymm0": ("dot",),
    "vpdpbusd (%rsi){1to16}, %zmm2, %zmm0": ("dot", "load"),
    "vpdpbssd %ymm4, %ymm2, %ymm0": ("dot",),
    "pmaddwd %xmm1, %xmm0": ("dot",),
    "vpmovsxbw (%rdi), %ymm0": ("convert", "load"),
    "vpmovzxbd %xmm0, %zmm0": ("convert",),
    "vcvtdq2ps %ymm0, %ymm0": ("convert",),
    "vcvtph2ps (%rdi), %ymm0": ("convert", "load"),
    "vpackuswb %ymm0, %ymm1, %ymm0": ("convert",),
    "vpsrlw $4, %ymm3, %ymm3": ("shift",),
    "vpslld $28, %zmm3, %zmm3": ("shift",),
    "vpsrlvd %ymm1, %ymm3, %ymm3": ("shift",),
    "vgf2p8affineqb $0, %ymm1, %ymm3, %ymm3": ("shift",),
    "vpand %ymm1, %ymm3, %ymm5": ("mask",),
    "vpandq .LCPI0_0(%rip){1to8}, %zmm3, %zmm5": ("mask", "load"),
    "vpternlogd $234, %zmm1, %zmm3, %zmm5": ("mask",),
    "vandnps %ymm1, %ymm3, %ymm5": ("mask",),
    "vpxor %ymm1, %ymm3, %ymm5": ("mask",),
    "vpxor (%rdi), %ymm3, %ymm3": ("mask", "load"),
    "vpunpcklbw %ymm1, %ymm3, %ymm5": ("permute",),
    "vpshufb %ymm1, %ymm3, %ymm5": ("permute",),
    "vpslldq $4, %ymm3, %ymm5": ("permute",),
    "vperm2i128 $49, %ymm1, %ymm3, %ymm5": ("permute",),
    "vinserti128 $1, (%rdi), %ymm3, %ymm5": ("permute", "load"),
    "vextracti128 $1, %ymm0, %xmm1": ("permute",),
    "vextracti128 $1, %ymm0, (%rdi)": ("permute", "store"),
    "vpbroadcastd %xmm0, %ymm1": ("permute",),
    "vmovd %eax, %xmm0": ("permute",),
    "vmovshdup %ymm0, %ymm1": ("permute",),
    "vpaddd %ymm0, %ymm3, %ymm0": ("arithmetic",),
    "vpmullw %ymm0, %ymm3, %ymm0": ("arithmetic",),
    "vpsignb %ymm0, %ymm3, %ymm0": ("arithmetic",),
    "vfmadd231ps (%rsi,%rdi,4), %ymm1, %ymm0": ("arithmetic", "load"),
    "vsubps %ymm0, %ymm3, %ymm0": ("arithmetic",),
    "leaq (%rdi,%rsi), %rax": ("address",),
    "addq $64, %r9": ("address",),
    "addq (%rdi), %r9": ("address", "load"),
    "incq (%rdi)": ("address", "load", "store"),
    "movq %rax, %rdx": ("address",),
    "shlq $5, %rdx": ("address",),
    "jne .LBB0_3": ("branch",),
    "callq expf@PLT": ("branch",),
    "cmpq %rax, %r8": ("other",),
    "cmpq 8(%rsp), %r8": ("other", "load"),
    "vmovdqa %ymm0, %ymm1": ("other",),
    "vpxor %xmm0, %xmm0, %xmm0": ("other",),
    "vpcmpeqd %ymm0, %ymm0, %ymm0": ("other",),
    "vpternlogd $255, %zmm0, %zmm0, %zmm0": ("other",),
    "vpternlogd $15, %zmm0, %zmm0, %zmm1": ("mask",),
    "pxor %xmm0, %xmm0": ("other",),
    "prefetcht0 512(%rdi)": ("other",),
    "vzeroupper": ("other",),
}

ARM = {
    "ldr q2, [x0], #16": ("load",),
    "ldp q4, q5, [x8, #-16]": ("load",),
    "ld1r { v0.4s }, [x1]": ("load",),
    "ldr x9, [sp, #8]": ("load",),
    "str q0, [x3]": ("store",),
    "stp q1, q0, [x3]": ("store",),
    "sdot v0.4s, v3.16b, v4.16b": ("dot",),
    "udot v0.4s, v3.16b, v4.4b[1]": ("dot",),
    "usdot v0.4s, v3.16b, v4.16b": ("dot",),
    "smmla v0.4s, v3.16b, v4.16b": ("dot",),
    "sshll v0.8h, v1.8b, #0": ("convert",),
    "ushll2 v0.8h, v1.16b, #0": ("convert",),
    "sxtl v0.8h, v1.8b": ("convert",),
    "scvtf v4.4s, v4.4s, #24": ("convert",),
    "fcvtl2 v3.4s, v2.8h": ("convert",),
    "xtn v3.4h, v2.4s": ("convert",),
    "ushr v2.16b, v2.16b, #4": ("shift",),
    "shl v2.16b, v2.16b, #4": ("shift",),
    "sshr v2.16b, v2.16b, #4": ("shift",),
    "and v3.16b, v2.16b, v1.16b": ("mask",),
    "bic v3.8h, #240": ("mask",),
    "eor v3.16b, v2.16b, v1.16b": ("mask",),
    "tbl v5.16b, { v4.16b }, v2.16b": ("permute",),
    "zip1 v5.16b, v4.16b, v2.16b": ("permute",),
    "dup v5.4s, v4.s[1]": ("permute",),
    "ext v5.16b, v4.16b, v2.16b, #8": ("permute",),
    "mov v5.s[1], v4.s[0]": ("permute",),
    "fmov s0, w8": ("permute",),
    "ld1 { v0.s }[1], [x0]": ("permute", "load"),
    "fmla v0.4s, v6.4s, v4.4s": ("arithmetic",),
    "fmul v0.4s, v6.4s, v4.s[0]": ("arithmetic",),
    "smlal v0.8h, v6.8b, v4.8b": ("arithmetic",),
    "smull2 v0.8h, v6.16b, v4.16b": ("arithmetic",),
    "sadalp v0.4s, v6.8h": ("arithmetic",),
    "add v0.4s, v6.4s, v4.4s": ("arithmetic",),
    "faddp v0.4s, v6.4s, v4.4s": ("arithmetic",),
    "add x8, x8, #32": ("address",),
    "subs x2, x2, #1": ("address",),
    "adrp x8, .LCPI0_0": ("address",),
    "b.ne .LBB0_1": ("branch",),
    "cbnz x2, .LBB0_1": ("branch",),
    "movi v1.16b, #15": ("other",),
    "mov v1.16b, v2.16b": ("other",),
    "cmp x2, x3": ("other",),
    "prfm pldl1keep, [x0, #256]": ("other",),
}


@pytest.mark.parametrize(("line", "classes"), X86.items())
def test_x86_classes(line: str, classes: tuple[str, ...]) -> None:
    assert only(line).classes == classes


@pytest.mark.parametrize(("line", "classes"), ARM.items())
def test_aarch64_classes(line: str, classes: tuple[str, ...]) -> None:
    assert only(line, "arm").classes == classes


def test_the_cases_cover_every_class() -> None:
    for cases in (X86, ARM):
        assert {kind for classes in cases.values() for kind in classes} == set(CLASSES)


@pytest.mark.parametrize(
    ("line", "reads", "writes"),
    [
        ("vpand %ymm1, %ymm3, %ymm5", {"v1", "v3"}, {"v5"}),
        ("vpmovsxbd (%rdi), %zmm5", set(), {"v5"}),
        ("vpdpbusd %zmm1, %zmm3, %zmm5", {"v1", "v3", "v5"}, {"v5"}),
        ("vfmadd231ps (%rsi), %ymm1, %ymm0", {"v0", "v1"}, {"v0"}),
        ("vmovdqu8 %zmm1, %zmm5 {%k1}", {"v1", "v5"}, {"v5"}),
        ("vmovdqu8 %zmm1, %zmm5 {%k1} {z}", {"v1"}, {"v5"}),
        ("pand %xmm1, %xmm5", {"v1", "v5"}, {"v5"}),
        ("pshufd $78, %xmm1, %xmm5", {"v1"}, {"v5"}),
        ("movdqa %xmm1, %xmm5", {"v1"}, {"v5"}),
        ("vmovdqa %ymm1, 32(%rsp)", {"v1"}, {"32(%rsp)"}),
        ("vpaddd 32(%rsp), %ymm2, %ymm1", {"v2", "32(%rsp)"}, {"v1"}),
        ("vpxor %xmm1, %xmm1, %xmm1", set(), {"v1"}),
        ("vptest %ymm1, %ymm2", {"v1", "v2"}, set()),
        ("vpand %ymm1, %ymm3, %ymm3", {"v1", "v3"}, {"v3"}),
    ],
)
def test_x86_registers(line: str, reads: set[str], writes: set[str]) -> None:
    instruction = only(line)
    assert (instruction.reads, instruction.writes) == (reads, writes)


@pytest.mark.parametrize(
    ("line", "reads", "writes"),
    [
        ("and v3.16b, v2.16b, v1.16b", {"v1", "v2"}, {"v3"}),
        ("sdot v0.4s, v3.16b, v4.4b[1]", {"v0", "v3", "v4"}, {"v0"}),
        ("fmul v0.4s, v3.4s, v4.4s", {"v3", "v4"}, {"v0"}),
        ("fmla v0.4s, v3.4s, v4.4s", {"v0", "v3", "v4"}, {"v0"}),
        ("tbl v5.16b, { v1.16b, v2.16b }, v3.16b", {"v1", "v2", "v3"}, {"v5"}),
        ("sri v5.16b, v1.16b, #4", {"v1", "v5"}, {"v5"}),
        ("mov v5.s[1], v4.s[0]", {"v4", "v5"}, {"v5"}),
        ("ldp q4, q5, [x8, #-16]", set(), {"v4", "v5"}),
        ("stp q4, q5, [sp, #32]", {"v4", "v5"}, {"[sp, #32]"}),
        ("sshll2 v5.8h, v1.16b, #0", {"v1"}, {"v5"}),
    ],
)
def test_aarch64_registers(line: str, reads: set[str], writes: set[str]) -> None:
    instruction = only(line, "arm")
    assert (instruction.reads, instruction.writes) == (reads, writes)


@pytest.mark.parametrize(
    ("line", "reads", "writes", "address"),
    [
        ("leaq 8(%rdi,%rsi,4), %rax", {"rdi", "rsi"}, {"rax"}, set()),
        ("movq %r10, %rax", {"r10"}, {"rax"}, set()),
        ("movl %r10d, %eax", {"r10"}, {"rax"}, set()),
        ("addq %rax, %r9", {"rax", "r9"}, {"r9"}, set()),
        ("incq %r9", {"r9"}, {"r9"}, set()),
        ("imulq $96, %rsi, %rax", {"rsi"}, {"rax"}, set()),
        ("shrxq %rcx, %rsi, %rax", {"rcx", "rsi"}, {"rax"}, set()),
        ("xorl %eax, %eax", set(), {"rax"}, set()),
        ("movq 24(%rsp), %rax", {"24(%rsp)"}, {"rax"}, set()),
        ("movq %rax, 24(%rsp)", {"rax"}, {"24(%rsp)"}, set()),
        ("movq (%rdi,%r8), %rax", set(), {"rax"}, {"rdi", "r8"}),
        ("vmovdqu (%rdi,%r8), %ymm1", set(), {"v1"}, {"rdi", "r8"}),
        ("vmovdqu %ymm1, (%rcx)", {"v1"}, set(), {"rcx"}),
        ("vmovd %xmm1, %eax", {"v1"}, {"rax"}, set()),
    ],
)
def test_x86_scalar_registers(line: str, reads: set[str], writes: set[str], address: set[str]) -> None:
    instruction = only(line)
    assert (instruction.reads, instruction.writes, instruction.address) == (reads, writes, address)


@pytest.mark.parametrize(
    ("line", "reads", "writes", "address"),
    [
        ("add x8, x1, #16", {"x1"}, {"x8"}, set()),
        ("madd x8, x1, x2, x3", {"x1", "x2", "x3"}, {"x8"}, set()),
        ("sxtw x8, w1", {"x1"}, {"x8"}, set()),
        ("ldr q2, [x0, x9]", set(), {"v2"}, {"x0", "x9"}),
        ("ldr q2, [x0], #16", set(), {"v2"}, {"x0"}),
        ("str x0, [sp, #8]", {"x0"}, {"[sp, #8]"}, set()),
        ("ldr x9, [sp, #8]", {"[sp, #8]"}, {"x9"}, set()),
    ],
)
def test_aarch64_scalar_registers(line: str, reads: set[str], writes: set[str], address: set[str]) -> None:
    instruction = only(line, "arm")
    assert (instruction.reads, instruction.writes, instruction.address) == (reads, writes, address)


MODULE = """
	.text
other:
	retq
.Lfunc_end0:
	.globl	"_ZN4tile<8>E"
	.type	tile,@function
"_ZN4tile<8>E":                            # @tile
	.cfi_startproc
# %bb.0:
	#APP
	#NO_APP
	testq	%rdi, %rdi                  # a comment, with (parentheses)
	je	.LBB1_2
.LBB1_1:                                # =>This Inner Loop Header: Depth=1
	decq	%rdi
	jne	.LBB1_1
.LBB1_2:
	retq
.Lfunc_end1:
	.size	tile, .Lfunc_end1-tile
third:
	nop
"""


def test_a_function_is_cut_out_of_its_module_with_its_labels() -> None:
    function = parse_function(MODULE, "_ZN4tile<8>E")
    assert [x.mnemonic for x in function.instructions] == ["testq", "je", "decq", "jne", "retq"]
    assert function.labels == {".LBB1_1": 2, ".LBB1_2": 4}
    assert [x.target for x in function.instructions] == [None, ".LBB1_2", None, ".LBB1_1", None]
    assert [x.falls_through for x in function.instructions] == [True, True, True, True, False]


def test_a_missing_symbol_is_named() -> None:
    with pytest.raises(CompileError, match="'absent'"):
        parse_function(MODULE, "absent")

"""Kernels whose instruction counts are known by construction, compiled for targets that this machine need not have."""

from __future__ import annotations

import llvmlite.binding as llvm
import pytest
from lowbit.costmodel.assembly import CLASSES
from lowbit.costmodel.unpack import instruction_counts, unpack_counts, unpack_ops_per_32
from lowbit.kernels.backend import Code
from lowbit.kernels.errors import CompileError

AVX2 = ("x86_64-unknown-linux-gnu", "haswell", "+avx2")
AVX_VNNI = ("x86_64-unknown-linux-gnu", "haswell", "+avx2,+avxvnni")
AVX512 = ("x86_64-unknown-linux-gnu", "skylake-avx512", "+avx512f,+avx512bw,+avx512vnni,-prefer-256-bit")
NEON = ("aarch64-unknown-linux-gnu", "generic", "+dotprod")

DECLARATIONS = """
declare <16 x i16> @llvm.x86.avx2.pmadd.ub.sw(<32 x i8>, <32 x i8>)
declare <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16>, <16 x i16>)
declare <32 x i8> @llvm.x86.avx2.psign.b(<32 x i8>, <32 x i8>)
declare <32 x i8> @llvm.abs.v32i8(<32 x i8>, i1)
declare <8 x i32> @llvm.x86.avx512.vpdpbusd.256(<8 x i32>, <8 x i32>, <8 x i32>)
declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <16 x i32>, <16 x i32>)
declare <4 x i32> @llvm.aarch64.neon.sdot.v4i32.v16i8(<4 x i32>, <16 x i8>, <16 x i8>)
declare <8 x float> @llvm.fmuladd.v8f32(<8 x float>, <8 x float>, <8 x float>)
"""


def compiled(body: str, accumulator: str, target: tuple[str, str, str], values: int, rows: int = 1) -> Code:
    """A loop over ``%i`` that carries ``%acc`` into ``%sum``; ``%w`` are packed words, ``%x`` the small operand."""
    declared = [line for line in DECLARATIONS.splitlines() if line and line.split("@")[1].split("(")[0] in body]
    text = (
        "\n".join(declared)
        + f"""
define void @tile(ptr noalias %w, ptr noalias %x, ptr noalias %s, i64 %n, ptr noalias %out) {{
entry:
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %loop]
  %acc = phi {accumulator} [zeroinitializer, %entry], [%sum, %loop]
{body}
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %n
  br i1 %more, label %loop, label %exit, !llvm.loop !0
exit:
  store {accumulator} %sum, ptr %out, align 1
  ret void
}}
!0 = distinct !{{!0, !1}}
!1 = !{{!"llvm.loop.unroll.disable"}}
"""
    )
    return Code("k", "tile", text, assembled(text, target), values, rows, "test")


def assembled(text: str, target: tuple[str, str, str]) -> str:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple, cpu, features = target
    module = llvm.parse_assembly(text)
    module.triple = triple
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    return str(machine.emit_assembly(module))


def nibbles(vector: str, words: str, lanes: int) -> str:
    """Low nibbles in ``%low`` and high ones in ``%high``: one shift and two masks a register."""
    return f"""
  %p = getelementptr {vector}, ptr %w, i64 %i
  %word = load {vector}, ptr %p, align 1
  %low = and {vector} %word, splat (i8 15)
  %wide = bitcast {vector} %word to {words}
  %moved = lshr {words} %wide, splat (i16 4)
  %back = bitcast {words} %moved to {vector}
  %high = and {vector} %back, splat (i8 15)"""


def operand(name: str, vector: str, index: int, count: int) -> str:
    return f"""
  %{name}.i = mul i64 %i, {count}
  %{name}.j = add i64 %{name}.i, {index}
  %{name}.p = getelementptr {vector}, ptr %x, i64 %{name}.j
  %{name} = load {vector}, ptr %{name}.p, align 1"""


MADDUBS = """
  %m0 = call <16 x i16> @llvm.x86.avx2.pmadd.ub.sw(<32 x i8> %a0, <32 x i8> %x0)
  %m1 = call <16 x i16> @llvm.x86.avx2.pmadd.ub.sw(<32 x i8> %a1, <32 x i8> %x1)
  %m = add <16 x i16> %m0, %m1
  %d = call <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16> %m, <16 x i16> splat (i16 1))
  %sum = add <8 x i32> %acc, %d"""


def avx2_nibbles(in_order: bool) -> Code:
    body = nibbles("<32 x i8>", "<16 x i16>", 32) + operand("x0", "<32 x i8>", 0, 2) + operand("x1", "<32 x i8>", 1, 2)
    if not in_order:
        return compiled(body + MADDUBS.replace("%a0", "%low").replace("%a1", "%high"), "<8 x i32>", AVX2, 64)
    for name, half in (("a0", 0), ("a1", 8)):
        lanes = [16 * lane + half + i + 32 * which for lane in (0, 1) for i in range(8) for which in (0, 1)]
        mask = ", ".join(f"i32 {lane}" for lane in lanes)
        body += f"\n  %{name} = shufflevector <32 x i8> %low, <32 x i8> %high, <32 x i32> <{mask}>"
    return compiled(body + MADDUBS, "<8 x i32>", AVX2, 64)


def vnni_nibbles(bits: int, target: tuple[str, str, str], rows: int) -> Code:
    bytes_, words = f"<{bits // 8} x i8>", f"<{bits // 32} x i32>"
    body = nibbles(bytes_, f"<{bits // 16} x i16>", bits // 8)
    body += f"\n  %l = bitcast {bytes_} %low to {words}\n  %h = bitcast {bytes_} %high to {words}"
    last = "%acc"
    for row in range(rows):
        for half, code in enumerate(("%l", "%h")):
            name = f"q{row}{half}"
            body += operand(name, "i32", 2 * row + half, 2 * rows)
            body += f"""
  %{name}.one = insertelement {words} poison, i32 %{name}, i32 0
  %{name}.all = shufflevector {words} %{name}.one, {words} poison, <{bits // 32} x i32> zeroinitializer
  %{name}.dot = call {words} @llvm.x86.avx512.vpdpbusd.{bits}({words} {last}, {words} {code}, {words} %{name}.all)"""
            last = f"%{name}.dot"
    return compiled(body + f"\n  %sum = add {words} {last}, zeroinitializer", words, target, bits // 4, rows)


def assert_counts(code: Code, expected: dict[str, int]) -> None:
    """All classes but ``address``, which is the compiler's choice of how to walk pointers."""
    counts = instruction_counts(code)
    assert set(counts) == set(CLASSES)
    counts.pop("address")
    assert {kind: n for kind, n in counts.items() if n} == {**expected, "branch": 1}


def test_avx2_nibbles_against_a_permuted_operand() -> None:
    code = avx2_nibbles(in_order=False)
    # Words, and two operands folded into vpmaddubsw; vpmaddubsw twice and vpmaddwd; two adds; the loop's compare.
    assert_counts(code, {"load": 3, "shift": 1, "mask": 2, "dot": 3, "arithmetic": 2, "other": 1})
    assert unpack_ops_per_32(code) == 3 * 32 / 64


def test_avx2_nibbles_restored_to_order_cost_two_more_permutes() -> None:
    code = avx2_nibbles(in_order=True)
    assert_counts(code, {"load": 3, "shift": 1, "mask": 2, "permute": 2, "dot": 3, "arithmetic": 2, "other": 1})
    assert unpack_ops_per_32(code) == 5 * 32 / 64


def test_avx512_nibbles() -> None:
    code = vnni_nibbles(512, AVX512, rows=1)
    # Each small operand is a broadcast from memory: a load, folded or not.
    assert_counts(code, {"load": 3, "shift": 1, "mask": 2, "dot": 2, "other": 1})
    assert unpack_ops_per_32(code) == 0.75


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_rows_share_the_unpacking(rows: int) -> None:
    code = vnni_nibbles(256, AVX_VNNI, rows)
    assert_counts(code, {"load": 1 + 2 * rows, "shift": 1, "mask": 2, "dot": 2 * rows, "other": 1})
    assert unpack_ops_per_32(code) == 3 * 32 / 64


def test_neon_nibbles() -> None:
    body = """
  %p = getelementptr <16 x i8>, ptr %w, i64 %i
  %word = load <16 x i8>, ptr %p, align 1
  %low = and <16 x i8> %word, splat (i8 15)
  %high = lshr <16 x i8> %word, splat (i8 4)"""
    body += operand("x0", "<16 x i8>", 0, 2) + operand("x1", "<16 x i8>", 1, 2)
    body += """
  %mid = call <4 x i32> @llvm.aarch64.neon.sdot.v4i32.v16i8(<4 x i32> %acc, <16 x i8> %low, <16 x i8> %x0)
  %sum = call <4 x i32> @llvm.aarch64.neon.sdot.v4i32.v16i8(<4 x i32> %mid, <16 x i8> %high, <16 x i8> %x1)"""
    code = compiled(body, "<4 x i32>", NEON, 32)
    counts = instruction_counts(code)
    assert (counts["dot"], counts["mask"], counts["shift"]) == (2, 1, 1)
    assert unpack_ops_per_32(code) == 2.0
    assert unpack_counts(code) == {"and": 1, "ushr": 1}


def test_unsigned_bytes_need_no_unpacking() -> None:
    body = """
  %p = getelementptr <8 x i32>, ptr %w, i64 %i
  %word = load <8 x i32>, ptr %p, align 1""" + operand("x0", "<8 x i32>", 0, 1)
    body += "\n  %sum = call <8 x i32> @llvm.x86.avx512.vpdpbusd.256(<8 x i32> %acc, <8 x i32> %word, <8 x i32> %x0)"
    code = compiled(body, "<8 x i32>", AVX_VNNI, 32)
    assert_counts(code, {"load": 2, "dot": 1, "other": 1})
    assert unpack_ops_per_32(code) == 0.0


def test_signs_of_bytes_are_unpacking_and_the_small_operand_is_not() -> None:
    body = """
  %p = getelementptr <32 x i8>, ptr %w, i64 %i
  %word = load <32 x i8>, ptr %p, align 1
  %size = call <32 x i8> @llvm.abs.v32i8(<32 x i8> %word, i1 false)""" + operand("raw", "<32 x i8>", 0, 1)
    body += """
  %x0 = xor <32 x i8> %raw, splat (i8 85)
  %signed = call <32 x i8> @llvm.x86.avx2.psign.b(<32 x i8> %x0, <32 x i8> %word)
  %m = call <16 x i16> @llvm.x86.avx2.pmadd.ub.sw(<32 x i8> %size, <32 x i8> %signed)
  %d = call <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16> %m, <16 x i16> splat (i16 1))
  %sum = add <8 x i32> %acc, %d"""
    code = compiled(body, "<8 x i32>", AVX2, 32)
    assert_counts(code, {"load": 2, "mask": 1, "arithmetic": 3, "dot": 2, "other": 1})
    assert unpack_counts(code) == {"vpabsb": 1, "vpsignb": 1}


SCALED = """
  %v = getelementptr <8 x half>, ptr %s, i64 %i
  %half = load <8 x half>, ptr %v, align 1
  %scale = fpext <8 x half> %half to <8 x float>
  %value = fmul <8 x float> %f, %scale
  %sum = call <8 x float> @llvm.fmuladd.v8f32(<8 x float> %value, <8 x float> %x0, <8 x float> %acc)"""


def test_dequantised_bytes_widen_and_convert_but_scales_do_not_count() -> None:
    body = """
  %p = getelementptr <8 x i8>, ptr %w, i64 %i
  %word = load <8 x i8>, ptr %p, align 1
  %int = sext <8 x i8> %word to <8 x i32>
  %f = sitofp <8 x i32> %int to <8 x float>""" + operand("x0", "<8 x float>", 0, 1)
    code = compiled(body + SCALED, "<8 x float>", AVX2, 8)
    # vpmovsxbd from memory, vcvtdq2ps, vcvtph2ps of the scales; multiplication and FMA.
    assert_counts(code, {"load": 3, "convert": 3, "arithmetic": 2, "other": 1})
    assert unpack_ops_per_32(code) == 2 * 32 / 8


def test_fp16_converts_once_for_eight_values() -> None:
    body = """
  %p = getelementptr <8 x half>, ptr %w, i64 %i
  %word = load <8 x half>, ptr %p, align 1
  %f = fpext <8 x half> %word to <8 x float>""" + operand("x0", "<8 x float>", 0, 1)
    body += "\n  %sum = call <8 x float> @llvm.fmuladd.v8f32(<8 x float> %f, <8 x float> %x0, <8 x float> %acc)"
    code = compiled(body, "<8 x float>", AVX2, 8)
    assert_counts(code, {"load": 2, "convert": 1, "arithmetic": 1, "other": 1})
    assert unpack_ops_per_32(code) == 4.0


def test_offsets_count_where_they_are_subtracted() -> None:
    body = """
  %p = getelementptr <8 x i8>, ptr %w, i64 %i
  %word = load <8 x i8>, ptr %p, align 1
  %int = zext <8 x i8> %word to <8 x i32>
  %less = sub <8 x i32> %int, splat (i32 128)
  %f = sitofp <8 x i32> %less to <8 x float>""" + operand("x0", "<8 x float>", 0, 1)
    body += "\n  %sum = call <8 x float> @llvm.fmuladd.v8f32(<8 x float> %f, <8 x float> %x0, <8 x float> %acc)"
    assert sorted(unpack_counts(compiled(body, "<8 x float>", AVX2, 8)).values()) == [1, 1, 1]


def hand_written(lines: str, values: int = 32) -> Code:
    return Code("k", "f", "", "f:\n\t" + "\n\t".join(lines.split("; ")) + "\n.Lfunc_end0:\n", values, 1, "test")


def test_spilled_words_and_pointers_are_followed() -> None:
    code = hand_written(
        "movq %rdi, 8(%rsp); .LA:; movq 8(%rsp), %rax; addq %rdx, %rax; vmovdqu (%rax), %ymm0; "
        "vpsrlw $4, %ymm0, %ymm1; vmovdqa %ymm1, 64(%rsp); vmovdqu (%rsi), %ymm1; vpand 64(%rsp), %ymm7, %ymm2; "
        "vpmaddubsw %ymm1, %ymm2, %ymm3; addq $32, %rdx; jne .LA; retq"
    )
    assert unpack_counts(code) == {"vpsrlw": 1, "vpand": 1}


def test_results_that_no_product_reads_are_not_unpacking() -> None:
    code = hand_written(
        ".LA:; vmovdqu (%rdi,%rdx), %ymm0; vpand %ymm7, %ymm0, %ymm1; vmovdqu %ymm1, (%rcx); "
        "vpmaddubsw %ymm0, %ymm6, %ymm2; vpsrlw $4, %ymm2, %ymm2; vpmaddwd %ymm2, %ymm5, %ymm2; jne .LA; retq"
    )
    assert unpack_ops_per_32(code) == 0.0


def test_words_that_a_product_reads_from_memory_need_no_unpacking() -> None:
    code = hand_written(
        ".LA:; vpmaddubsw (%rdi,%rdx), %ymm6, %ymm2; vpsrlw $4, %ymm2, %ymm2; vpmaddwd %ymm2, %ymm5, %ymm2; "
        "jne .LA; retq"
    )
    assert unpack_ops_per_32(code) == 0.0


def test_words_of_the_next_iteration_are_followed_around_the_loop() -> None:
    code = hand_written(
        ".LA:; vpand %ymm7, %ymm0, %ymm1; vpmaddubsw %ymm6, %ymm1, %ymm2; vmovdqu (%rdi,%rdx), %ymm0; jne .LA; retq"
    )
    assert unpack_counts(code) == {"vpand": 1}


def test_a_loop_that_prepares_the_small_operand_is_not_the_hot_one() -> None:
    code = hand_written(
        ".LA:; vmovdqu (%rsi), %ymm0; vpand %ymm7, %ymm0, %ymm0; vpaddw %ymm7, %ymm0, %ymm0; vmovdqu %ymm0, (%rcx); "
        "jne .LA; .LB:; vmovdqu (%rdi), %ymm0; vpsrlw $4, %ymm0, %ymm0; vpmaddubsw (%rcx), %ymm0, %ymm0; jne .LB; retq"
    )
    assert unpack_counts(code) == {"vpsrlw": 1}
    assert instruction_counts(code)["store"] == 0


def test_straight_line_code_counts_as_one_iteration() -> None:
    code = hand_written("vmovdqu (%rdi), %ymm0; vpand %ymm7, %ymm0, %ymm0; vpmaddubsw (%rsi), %ymm0, %ymm1; retq")
    assert instruction_counts(code)["load"] == 2
    assert unpack_ops_per_32(code) == 1.0


def test_a_loop_that_never_reads_the_first_argument_is_refused() -> None:
    code = hand_written(".LA:; vmovdqu (%rsi), %ymm0; vpmaddubsw %ymm6, %ymm0, %ymm1; decq %rdi; jne .LA; retq")
    with pytest.raises(CompileError, match="first argument"):
        unpack_ops_per_32(code)

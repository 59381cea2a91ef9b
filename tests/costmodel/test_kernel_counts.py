"""Counts of kernels against counts that were made by hand, on the listings in ``listings/``.

What a loop's instructions are is read off the listing from the loop's label to its branch; the mark itself (PMTRIG) is
none of them. What stands outside the loop is the rest up to EXIT: the padding behind it is never reached.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lowbit.costmodel import kernel_counts
from lowbit.costmodel.kernel_counts import GPU_CLASSES, KernelCounts, LoopCounts, count_kernel
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.cuda import toolchain
from lowbit.kernels.cuda.backend import CudaBackend
from lowbit.kernels.cuda.code import KernelCode
from lowbit.kernels.cuda.work import work
from lowbit.kernels.errors import CompileError
from lowbit.kernels.problem import Problem

LISTINGS = Path(__file__).with_name("listings")
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120")
TILE, K_STEP, WEIGHTS, PROLOGUE = 1, 2, 4, 6

needs_tools = pytest.mark.skipif(not toolchain.available(), reason="needs ptxas and nvdisasm")


def code(text: str, entry: str, language: str = "sass") -> KernelCode:
    return KernelCode("k", f"{entry}-symbol", "", text, 32, 4, "int4/planes", "sm_86", language, 24, 8, 512, entry)


def listing(name: str) -> KernelCounts:
    return count_kernel(code((LISTINGS / f"{name}.sass").read_text(), name.partition(".")[0]))


def nonzero(loop: LoopCounts) -> dict[str, int]:
    assert set(loop.counts) == set(GPU_CLASSES)
    assert sum(loop.counts.values()) == sum(loop.opcodes.values())
    return {kind: count for kind, count in loop.counts.items() if count}


def test_saxpy() -> None:
    found = listing("saxpy.sm_86")
    outside, loop = found.loops
    # Two loads, a store, the FMA; MOV of the 4 and IADD3; ISETP; ULDC.64 and two IMAD.WIDE for addresses; BRA.
    assert nonzero(loop) == {
        "global_load": 2, "global_store": 1, "float": 1, "integer": 2, "predicate": 1, "address": 3, "branch": 1
    }  # fmt: skip
    # The products' operands come from loads as they are.
    assert loop.unpacking == {}
    assert (loop.mark, loop.marks) == (TILE, 1)
    # MOV, S2R, ISETP, a guarded EXIT and an EXIT.
    assert nonzero(outside) == {"integer": 1, "other": 1, "predicate": 1, "branch": 2}
    assert (outside.mark, outside.marks) == (None, 0)
    assert found.unknown == {}
    assert (found.symbol, found.role, found.rows, found.packing, found.language) == (
        "saxpy-symbol", "k", 4, "int4/planes", "sass"
    )  # fmt: skip
    assert (found.registers, found.spill_bytes, found.shared_bytes) == (24, 8, 512)


def test_dots_of_masked_nibbles() -> None:
    outside, loop = listing("nibbles.sm_86").loops
    # 16 bytes from either memory; six dots, of words whose nibbles take four masks and two shifts, one takes an XOR
    # and one nothing. IMAD.U32 and MOV copy the uniform pointer; three UIADD3 and a UIADD3.X advance; ISETP; BRA.
    assert nonzero(loop) == {
        "global_load": 1, "shared_load": 1, "dot": 6, "shift": 2, "logic": 5, "integer": 2, "predicate": 1,
        "address": 4, "branch": 1,
    }  # fmt: skip
    assert loop.unpacking == {"LOP3.LUT": 5, "SHF.R.U32.HI": 2}
    assert (loop.mark, loop.marks) == (K_STEP, 1)
    # Three moves before and, with the sum of both accumulators, three after; three ULDC and a UMOV; STG; EXIT.
    assert nonzero(outside) == {"integer": 6, "address": 4, "global_store": 1, "branch": 1}
    assert outside.unpacking == {}


def test_nibbles_put_in_order() -> None:
    outside, loop = listing("inorder.sm_75").loops
    # A word: a shift and two masks make two words of every other code, two PRMT put them in order.
    assert nonzero(loop) == {
        "global_load": 1, "shared_load": 1, "dot": 2, "shift": 1, "logic": 2, "permute": 2, "predicate": 1,
        "address": 4, "branch": 1,
    }  # fmt: skip
    assert loop.unpacking == {"SHF.R.U32.HI": 1, "LOP3.LUT": 2, "PRMT": 2}
    # Two IMAD.MOV, two ULDC.64, ULDC and UMOV, the store, EXIT.
    assert nonzero(outside) == {"integer": 2, "address": 4, "global_store": 1, "branch": 1}


def test_transposition_through_shared_memory() -> None:
    outside, loop = listing("transpose.sm_86").loops
    # A load and a store of each memory, two barriers; four moves of pointers' halves and two 64-bit adds of two
    # instructions each are integer; the uniform counter; ISETP; BRA.
    assert nonzero(loop) == {
        "global_load": 1, "global_store": 1, "shared_load": 1, "shared_store": 1, "barrier": 2, "integer": 8,
        "address": 1, "predicate": 1, "branch": 1,
    }  # fmt: skip
    assert loop.unpacking == {}
    # Five moves and two IMAD; LEA, two IMAD.WIDE and two ULDC; two S2R; EXIT.
    assert nonzero(outside) == {"integer": 7, "address": 5, "other": 2, "branch": 1}


def test_reduction_by_shuffles() -> None:
    _, loop = listing("reduce.sm_90").loops
    # Three shuffles, two FADD and one FMNMX, MUFU.EX2; IADD3 and IADD3.X advance one pointer, two MOV copy the other,
    # which UIADD3 and UIADD3.X advance as another UIADD3 does the counter.
    assert nonzero(loop) == {
        "global_load": 1, "global_store": 1, "shuffle": 3, "float": 3, "special": 1, "integer": 4, "address": 3,
        "predicate": 1, "branch": 1,
    }  # fmt: skip
    assert loop.unpacking == {}


def test_codes_as_halves() -> None:
    _, loop = listing("half2.sm_86").loops
    # Loads of words, of two words of the small operand and of a scale of 16 bits; LOP3 makes halves of codes, HADD2
    # subtracts their offset, HFMA2 multiplies. HADD2.F32 converts the scale for the FFMA. MOV makes LOP3's constant,
    # the other moves, IADD3 and IMAD.X are of pointers.
    assert nonzero(loop) == {
        "global_load": 3, "logic": 1, "float": 3, "convert": 1, "integer": 6, "address": 3, "predicate": 1, "branch": 1
    }  # fmt: skip
    # The conversion of a scale is no unpacking, though it lies between a load and a product.
    assert loop.unpacking == {"LOP3.LUT": 1, "HADD2": 1}
    assert loop.mark == K_STEP


def test_asynchronous_copies() -> None:
    outside, loop = listing("pipeline.sm_86").loops
    # LDGSTS, with LDGDEPBAR and DEPBAR to wait; three loads under !PT and a NOP only take their turn; the loaded words
    # take two masks and a shift before two dots.
    assert nonzero(loop) == {
        "async_copy": 1, "barrier": 2, "shared_load": 1, "dot": 2, "logic": 2, "shift": 1, "integer": 3, "address": 7,
        "predicate": 1, "branch": 1, "other": 4,
    }  # fmt: skip
    assert loop.unpacking == {"LOP3.LUT": 2, "SHF.R.U32.HI": 1}
    assert (loop.opcodes["@!PT LDS"], loop.opcodes["LDS.128"]) == (3, 1)
    # The first copy; IMAD.SHL makes its address.
    assert outside.counts["async_copy"] == outside.counts["barrier"] == outside.counts["shift"] == 1


def test_guarded_loads_and_a_predicated_tail() -> None:
    _, loop = listing("guarded.sm_120").loops
    # Both sides of the branch count. Three PRMT, SHF and SGXT.U32 are a bit-field extract; two IADD of four, I2FP and
    # these lead to the product: FFMA R11, R11, R0, R0. IMAD R6, R0, R5 is a product itself. HFMA2 makes a constant.
    # LDC and two NOP are other; IADD.64 is an address; BSSY and BSYNC are control flow as the two BRA are.
    assert nonzero(loop) == {
        "global_load": 2, "global_store": 1, "permute": 3, "shift": 1, "convert": 2, "float": 2, "integer": 6,
        "predicate": 3, "address": 1, "branch": 4, "other": 3,
    }  # fmt: skip
    assert loop.unpacking == {"PRMT": 3, "SHF.R.U32.HI": 1, "SGXT.U32": 1, "IADD": 2, "I2FP.F32.S32": 1}
    assert (loop.mark, loop.marks) == (K_STEP, 1)


NEST = """
.version 7.0
.target sm_75
.address_size 64
.visible .entry nest(.param .u64 words)
{
    .reg .pred %p<4>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<3>;
    pmevent 6;
    ld.param.u64 %rd1, [words];
TILES:
    pmevent 1;
    add.s32 %r1, %r1, 1;
MAIN:
    pmevent 2;
    ld.global.u32 %r2, [%rd1];
    and.b32 %r3, %r2, 15;
    dp4a.u32.u32 %r4, %r3, %r3, %r4;
    pmevent 2;
    ld.global.u32 %r2, [%rd1+4];
    and.b32 %r3, %r2, 15;
    dp4a.u32.u32 %r4, %r3, %r3, %r4;
    pmevent 2;
    ld.global.u32 %r2, [%rd1+8];
    and.b32 %r3, %r2, 15;
    dp4a.u32.u32 %r4, %r3, %r3, %r4;
    @%p1 bra MAIN;
REST:
    pmevent 2;
    ld.global.u32 %r2, [%rd1+16];
    and.b32 %r3, %r2, 15;
    dp4a.u32.u32 %r4, %r3, %r3, %r4;
    @%p2 bra REST;
PLAIN:
    ex2.approx.f32 %r5, %r5;
    @%p2 bra PLAIN;
    pmevent 4;
    pmevent 4;
    dp4a.u32.u32 %r4, %r5, %r5, %r4;
    dp4a.u32.u32 %r4, %r5, %r5, %r4;
    @%p3 bra TILES;
    st.global.u32 [%rd1], %r4;
    ret;
}
"""


def test_marks_tell_loops_apart() -> None:
    found = count_kernel(code(NEST, "nest", "ptx"))
    assert [(loop.mark, loop.marks) for loop in found.loops] == [(None, 0), (TILE, 1), (K_STEP, 3), (K_STEP, 1)]
    outside, tiles, main, rest = found.loops
    assert nonzero(outside) == {"other": 1, "global_store": 1, "branch": 1}
    # The loop without a mark counts once in the loop around it, the dissolved one with both its passes.
    assert nonzero(tiles) == {"integer": 1, "special": 1, "dot": 2, "branch": 2}
    assert tiles.passes == {TILE: 1, WEIGHTS: 2}
    assert nonzero(main) == {"global_load": 3, "logic": 3, "dot": 3, "branch": 1}
    assert nonzero(rest) == {"global_load": 1, "logic": 1, "dot": 1, "branch": 1}
    assert (outside.unpacking, main.unpacking, rest.unpacking) == ({}, {"and.b32": 3}, {"and.b32": 1})


def test_what_a_launch_executes() -> None:
    found = count_kernel(code(NEST, "nest", "ptx"))
    # 10 warps walk 40 tiles of 30 steps: 400 iterations of the unrolled loop make the 1200 passes, its remainder none.
    iterations = {TILE: 40.0, K_STEP: 1200.0, WEIGHTS: 80.0, PROLOGUE: 10.0}
    executed = found.executed(iterations, warps=10.0)
    assert executed["global_load"] == executed["logic"] == 1200.0
    assert executed["dot"] == 1200.0 + 80.0
    assert executed["special"] == executed["integer"] == 40.0
    assert executed["branch"] == 400.0 + 2 * 40.0 + 10.0
    assert executed["other"] == executed["global_store"] == 10.0
    assert set(executed) == set(GPU_CLASSES)
    assert found.unpacking_executed(iterations) == 1200.0
    by_opcode = found.opcodes_executed(iterations, warps=10.0)
    assert by_opcode["and.b32"] == 1200.0
    assert sum(by_opcode.values()) == sum(executed.values())


def test_passes_made_in_the_outer_loop_are_not_made_again() -> None:
    loops = (
        LoopCounts(None, 0, {"other": 5}, {}, {"a": 5}),
        LoopCounts(TILE, 2, {"dot": 7}, {"b": 1}, {"b": 7}, {TILE: 2, K_STEP: 3}),
        LoopCounts(K_STEP, 4, {"dot": 11}, {"c": 2}, {"c": 11}),
    )
    found = KernelCounts("s", "k", 1, "p", "sass", 1, 0, 0, loops, {})
    # 10 tiles are 5 iterations, which make 15 of 75 steps; 60 are left, in 15 iterations.
    iterations = {TILE: 10.0, K_STEP: 75.0}
    executed = found.executed(iterations, warps=3.0)
    assert executed["dot"] == 5 * 7 + 15 * 11
    assert executed["other"] == 3 * 5
    assert found.unpacking_executed(iterations) == 5 * 1 + 15 * 2
    # Of a loop that no pass is left of, and of one that the launch has no passes of, nothing is executed.
    assert found.executed({TILE: 10.0, K_STEP: 15.0}, 3.0)["dot"] == 5 * 7
    assert found.executed({}, 3.0)["dot"] == 0


def test_loops_without_words_unpack_nothing() -> None:
    prologue = NEST.replace("pmevent 2;", "pmevent 6;")
    found = count_kernel(code(prologue, "nest", "ptx"))
    assert [(loop.mark, loop.marks) for loop in found.loops[2:]] == [(PROLOGUE, 3), (PROLOGUE, 1)]
    assert all(loop.unpacking == {} for loop in found.loops)
    # Without any mark all code is one part, which is taken for the loop.
    plain = NEST.replace("pmevent", "// pmevent")
    (alone,) = count_kernel(code(plain, "nest", "ptx")).loops
    assert alone.unpacking == {"and.b32": 4}
    assert alone.counts["dot"] == 6


def test_data_flow_passes_guards_but_no_product() -> None:
    body = """
    pmevent 2;
    ld.global.u32 %r1, [%rd1];
    shr.u32 %r2, %r1, 4;
    @%p1 xor.b32 %r2, %r3, 7;
    @%p1 and.b32 %r3, %r3, 15;
    dp4a.u32.u32 %r4, %r2, %r3, %r4;
    shl.b32 %r5, %r4, 2;
    dp4a.u32.u32 %r6, %r5, %r3, %r6;
    ld.shared.u32 %r7, [%r8];
    add.s32 %r8, %r7, 4;
    """
    start = NEST.index("TILES:")
    text = NEST[:start] + "LOOP:" + body + "@%p2 bra LOOP;\nret;\n}\n"
    _, loop = count_kernel(code(text, "nest", "ptx")).loops
    # The shift's result is seen if the guard is false, so the shift unpacks. The XOR takes no loaded word; the mask
    # keeps its own; the second shift follows a dot; the sum makes an address.
    assert loop.unpacking == {"shr.u32": 1}
    kept = text.replace("@%p1 xor", "xor")
    assert count_kernel(code(kept, "nest", "ptx")).loops[1].unpacking == {}


def test_under_one_guard_an_earlier_value_is_gone() -> None:
    body = """
    pmevent 2;
    ld.global.u32 %r2, [%rd1];
    @%p1 add.s32 %r2, %r5, 1;
    CHANGE
    @%p1 shr.u32 %r3, %r2, 4;
    @%p1 dp4a.u32.u32 %r4, %r3, %r3, %r4;
    """
    text = NEST[: NEST.index("TILES:")] + "LOOP:" + body + "@%p2 bra LOOP;\nret;\n}\n"

    def unpacking(change: str) -> dict[str, int]:
        return count_kernel(code(text.replace("CHANGE", change), "nest", "ptx")).loops[1].unpacking

    # What the shift takes is the sum whenever it happens, unless the predicate changes or the other case intervenes.
    assert unpacking("") == {}
    assert unpacking("setp.eq.s32 %p1, %r5, 3;") == {"shr.u32": 1}
    assert unpacking("@%p3 ld.global.u32 %r2, [%rd1];") == {"shr.u32": 1}
    assert unpacking("@!%p1 ld.global.u32 %r2, [%rd1];") == {}
    assert unpacking("ld.global.u32 %r2, [%rd1];") == {"shr.u32": 1}


def test_unpacking_in_another_iteration_than_its_load() -> None:
    body = """
    pmevent 2;
    and.b32 %r2, %r1, 15;
    dp4a.u32.u32 %r4, %r2, %r2, %r4;
    mov.u32 %r1, %r3;
    ld.global.u32 %r3, [%rd1];
    """
    text = NEST[: NEST.index("TILES:")] + "LOOP:" + body + "@%p2 bra LOOP;\nret;\n}\n"
    # The move that hands the word on to the next iteration unpacks nothing.
    assert count_kernel(code(text, "nest", "ptx")).loops[1].unpacking == {"and.b32": 1}


def test_spilled_values_are_followed_through_the_stack() -> None:
    def unpacking(stored: str) -> dict[str, int]:
        lines = [
            "PMTRIG 0x4",
            "LDG.E R2, [R4.64]",
            f"STL [R1+0x8], {stored}",
            "STL [R1+0xc], R9",
            "LDL R3, [R1+0x8]",
            "LOP3.LUT R6, R3, 0xf, RZ, 0xc0, !PT",
            "IDP.4A.S8.S8 R7, R6, R6, R7",
            "@P0 BRA `(.L_x_0)",
            "EXIT",
        ]
        numbered = [f"/*{16 * i:04x}*/ {line} ;" for i, line in enumerate(lines)]
        return count_kernel(code("\n".join([".text.f:", ".L_x_0:", *numbered]), "f")).loops[1].unpacking

    # A packed word that was spilled is unpacked when it comes back, and no other value is one for having been spilled.
    assert unpacking("R2") == {"LOP3.LUT": 1}
    assert unpacking("R8") == {}


def test_unknown_opcodes_are_told() -> None:
    text = (LISTINGS / "nibbles.sm_86.sass").read_text().replace("IDP.4A.S8.S8", "ZDP.4A.S8.S8")
    found = count_kernel(code(text, "nibbles"))
    assert found.unknown == {"ZDP.4A.S8.S8": 6}
    assert found.loops[1].counts["other"] == 6
    assert found.loops[1].counts["dot"] == 0


def test_counts_survive_json() -> None:
    found = listing("nibbles.sm_86")
    assert KernelCounts.from_dict(json.loads(json.dumps(found.as_dict()))) == found


def test_counts_of_another_release_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = json.loads(json.dumps(listing("nibbles.sm_86").as_dict()))
    monkeypatch.setattr(kernel_counts, "counter", lambda: "another")
    assert KernelCounts.from_dict(stored) is None
    assert KernelCounts.from_dict({key: value for key, value in stored.items() if key != "counter"}) is None


def test_a_language_that_cannot_be_counted() -> None:
    with pytest.raises(CompileError, match="no kernel can be counted in 'wgsl'"):
        count_kernel(code("", "f", "wgsl"))


def test_a_cycle_with_two_entries_is_refused() -> None:
    text = NEST.replace("TILES:\n", "TILES:\n@%p1 bra REST;\n").replace("@%p2 bra REST", "@%p2 bra MAIN")
    with pytest.raises(CompileError, match="several entries"):
        count_kernel(code(text, "nest", "ptx"))


NAMES = sorted(path.stem for path in LISTINGS.glob("*.sass"))


@settings(max_examples=60)
@given(name=st.sampled_from(NAMES), data=st.data())
def test_lost_lines_are_an_error_at_worst(name: str, data: st.DataObject) -> None:
    lines = (LISTINGS / f"{name}.sass").read_text().splitlines()
    lost = data.draw(st.sets(st.integers(0, len(lines) - 1), min_size=1, max_size=5))
    text = "\n".join(line for i, line in enumerate(lines) if i not in lost)
    whole = count_kernel(code("\n".join(lines), name.partition(".")[0]))
    try:
        found = count_kernel(code(text, name.partition(".")[0]))
    except CompileError as error:
        assert "\n" not in str(error)
        return
    # Nothing that a loop executes went unnoticed: at most a directive, or padding at the end, is gone.
    assert found == whole


@settings(max_examples=60)
@given(name=st.sampled_from(NAMES), place=st.floats(0, 1, exclude_max=True), text=st.text(max_size=3))
@example(name="nibbles.sm_86", place=0.5, text="\x00")
def test_garbled_text_is_an_error_at_worst(name: str, place: float, text: str) -> None:
    whole = (LISTINGS / f"{name}.sass").read_text()
    at = int(place * len(whole))
    try:
        found = count_kernel(code(whole[:at] + text + whole[at + len(text) :], name.partition(".")[0]))
    except CompileError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(found, KernelCounts)


@needs_tools
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("path", sorted(LISTINGS.glob("*.ptx")), ids=lambda path: path.stem)
def test_no_opcode_of_any_architecture_is_unknown(path: Path, arch: str) -> None:
    if path.stem == "pipeline" and arch == "sm_75":
        pytest.skip("sm_75 has no asynchronous copies")
    ptx = path.read_text()
    text = toolchain.disassemble(toolchain.assemble(ptx, arch).image, arch)
    found = count_kernel(code(text, path.stem))
    assert found.unknown == {}
    assert [loop.mark is None for loop in found.loops] == [True, False]
    # PTX tells as many memory instructions, dots and multi-function operations as machine code has.
    other = count_kernel(code(ptx, path.stem, "ptx"))
    assert other.language == "ptx"
    assert [dataclasses.replace(loop, counts={}, opcodes={}, unpacking={}) for loop in other.loops] == [
        dataclasses.replace(loop, counts={}, opcodes={}, unpacking={}) for loop in found.loops
    ]
    for kind in (
        "global_load",
        "global_store",
        "shared_load",
        "shared_store",
        "async_copy",
        "dot",
        "special",
        "shuffle",
    ):
        assert [loop.counts[kind] for loop in other.loops] == [loop.counts[kind] for loop in found.loops], kind


@needs_tools
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_unpacking_is_the_same_on_every_architecture(arch: str) -> None:
    for name, count in (("nibbles", 7), ("inorder", 5), ("half2", 2), ("saxpy", 0)):
        ptx = (LISTINGS / f"{name}.ptx").read_text()
        text = toolchain.disassemble(toolchain.assemble(ptx, arch).image, arch)
        for found in (count_kernel(code(text, name)), count_kernel(code(ptx, name, "ptx"))):
            assert sum(found.loops[1].unpacking.values()) == count, (name, found.language)


needs_compiler = pytest.mark.skipif(
    not toolchain.available() or importlib.util.find_spec("numba_cuda") is None,
    reason="needs numba-cuda and its wheels",
)
LAUNCH = "rows 4, lanes 1, loads 4, stages 0, splits 16, warps 4"


@needs_compiler
@pytest.mark.parametrize(
    ("layout", "pipeline", "per_word"),
    [
        # A mask for the low nibbles of a word of eight codes and one for the high ones, which stay where they are.
        ("T/32 D/32 t32 d32 | int4/lane_interleaved/offset", "integer", {"LOP3.LUT": 2}),
        ("T/32 D/32 t32 d32 | int4/contiguous_permuted/offset", "integer", {"LOP3.LUT": 2}),
        # LOP3 turns two's complement into offset codes while it masks.
        ("T/32 D/32 t32 d32 | int4/contiguous_permuted/signed", "integer", {"LOP3.LUT": 2}),
        # Codes put back in order: a shift, two masks and two permutations.
        ("T/32 D/32 t32 d32 | int4/contiguous/offset", "integer", {"SHF.R.U32.HI": 1, "LOP3.LUT": 2, "PRMT": 2}),
        # Whole bytes are contracted besides their low nibbles: one mask.
        ("T/32 D/32 t32 d32 | int4/lane_interleaved/offset", "raw", {"LOP3.LUT": 1}),
    ],
)
def test_unpacking_of_real_kernels(layout: str, pipeline: str, per_word: dict[str, int]) -> None:
    problem = Problem("qk", 32, 8, 128, "w4a8")
    (found,) = CudaBackend("sm_86").code(problem, Candidate.parse(f"K: {layout}; {pipeline}; {LAUNCH}"))
    counts = count_kernel(found)
    assert (counts.language, counts.unknown) == ("sass", {})
    tiles = [loop for loop in counts.loops if loop.mark == TILE]
    assert [loop.unpacking for loop in counts.loops if loop.unpacking] == [tiles[0].unpacking]
    # A lane walks 128 codes in a tile of 32 tokens, 16 words.
    assert found.values_per_iteration == 128
    assert tiles[0].unpacking == {opcode: 16 * count for opcode, count in per_word.items()}


@needs_compiler
def test_dots_of_a_launch() -> None:
    problem = Problem("qk", 32, 8, 128, "w4a8")
    candidate = Candidate.parse(f"K: T/32 D/32 t32 d32 | int4/lane_interleaved/offset; integer; {LAUNCH}")
    counts = count_kernel(CudaBackend("sm_86").code(problem, candidate)[0])
    launch = work(problem, candidate, 4096, "sm_86")
    executed = counts.executed(launch.iterations, warps=8 * 16 * 4)
    # Each of 32 heads multiplies 4096 tokens of 128 codes, four a dot, in 32 lanes.
    assert executed["dot"] == 32 * 4096 * 128 / 4 / 32
    # Each of 8 key/value heads unpacks its words once for its four rows, two instructions for 8 codes.
    assert counts.unpacking_executed(launch.iterations) == 8 * 4096 * 128 / 8 * 2 / 32

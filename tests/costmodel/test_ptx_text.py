from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowbit.costmodel.loops import control_flow
from lowbit.costmodel.ptx_opcodes import KINDS
from lowbit.costmodel.ptx_text import parse_ptx
from lowbit.costmodel.warp_code import GPU_CLASSES, WarpInstruction
from lowbit.kernels.errors import CompileError

LISTINGS = Path(__file__).with_name("listings")

HEAD = """
.version 8.0
.target sm_86
.address_size 64
.visible .entry f(.param .u64 p)
{
.reg .pred %p<9>;
.reg .b16 %h<9>;
.reg .b32 %r<9>;
.reg .f32 %f<9>;
.reg .b64 %rd<9>;
"""


def kernel(body: str) -> str:
    return f"{HEAD}{body}\nret;\n}}\n"


def plain(names: frozenset[str]) -> set[str]:
    """Registers without the number of their declaration: ``%r#2`` and a 7 are ``%r7``."""
    return {re.sub(r"#\d+?(?=\d*$)", "", name) for name in names}


def only(line: str) -> WarpInstruction:
    return parse_ptx(kernel(f"L:\n{line}"), "f").instructions[0]


@pytest.mark.parametrize(
    ("line", "kind", "writes", "reads", "address"),
    [
        ("ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1+16];", "global_load", "%r1 %r2 %r3 %r4", "", "%rd1"),
        ("ld.global.nc.u16 %h1, [%rd1];", "global_load", "%h1", "", "%rd1"),
        ("ld.volatile.global.u32 %r1, [%rd1];", "global_load", "%r1", "", "%rd1"),
        ("ld.shared.u32 %r1, [%r2+4];", "shared_load", "%r1", "", "%r2"),
        ("ld.shared::cta.u32 %r1, [%r2+4];", "shared_load", "%r1", "", "%r2"),
        ("ld.param.u64 %rd1, [p];", "other", "%rd1", "", ""),
        ("st.global.v2.f32 [%rd1], {%f1, %f2};", "global_store", "", "%f1 %f2", "%rd1"),
        ("st.shared.u32 [%r2], %r1;", "shared_store", "", "%r1", "%r2"),
        ("atom.global.add.u32 %r1, [%rd1], %r2;", "global_load", "%r1", "%r2", "%rd1"),
        ("red.global.add.f32 [%rd1], %f2;", "global_store", "", "%f2", "%rd1"),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16;", "async_copy", "", "", "%r1 %rd1"),
        ("cp.async.commit_group;", "barrier", "", "", ""),
        ("cp.async.wait_group 1;", "barrier", "", "", ""),
        ("bar.sync 0;", "barrier", "", "", ""),
        ("dp4a.s32.u32 %r1, %r2, %r3, %r1;", "dot", "%r1", "%r1 %r2 %r3", ""),
        ("fma.rn.f32 %f1, %f2, %f3, %f4;", "float", "%f1", "%f2 %f3 %f4", ""),
        ("add.f32 %f1, %f2, %f3;", "float", "%f1", "%f2 %f3", ""),
        ("add.s32 %r1, %r2, %r3;", "integer", "%r1", "%r2 %r3", ""),
        ("add.s64 %rd1, %rd2, %rd3;", "address", "%rd1", "%rd2 %rd3", ""),
        ("mul.wide.s32 %rd1, %r2, 4;", "address", "%rd1", "%r2", ""),
        ("lop3.b32 %r1, %r2, %r3, 15, 0xea;", "logic", "%r1", "%r2 %r3", ""),
        ("and.pred %p1, %p2, %p3;", "predicate", "%p1", "%p2 %p3", ""),
        ("setp.lt.and.s32 %p1|%p2, %r1, %r2, %p3;", "predicate", "%p1 %p2", "%r1 %r2 %p3", ""),
        ("selp.b32 %r1, %r2, %r3, %p1;", "logic", "%r1", "%r2 %r3 %p1", ""),
        ("shf.r.wrap.b32 %r1, %r2, %r3, 4;", "shift", "%r1", "%r2 %r3", ""),
        ("prmt.b32 %r1, %r2, %r3, 0x5140;", "permute", "%r1", "%r2 %r3", ""),
        ("cvt.rn.f32.s32 %f1, %r1;", "convert", "%f1", "%r1", ""),
        ("ex2.approx.ftz.f32 %f1, %f2;", "special", "%f1", "%f2", ""),
        ("shfl.sync.bfly.b32 %r1|%p1, %r2, 1, 31, -1;", "shuffle", "%r1 %p1", "%r2", ""),
        ("mov.b64 {%r1, %r2}, %rd1;", "other", "%r1 %r2", "%rd1", ""),
        ("mov.u32 %r1, %tid.x;", "other", "%r1", "", ""),
    ],
)  # fmt: skip
def test_class_and_registers(line: str, kind: str, writes: str, reads: str, address: str) -> None:
    found = only(line)
    assert found.known
    assert found.kind == kind
    assert plain(found.writes) == set(writes.split())
    assert plain(found.reads) == set(reads.split())
    assert plain(found.address) == set(address.split())
    assert kind in GPU_CLASSES


def test_products_words_and_marks() -> None:
    assert only("mul.lo.s32 %r1, %r2, %r3;").multiplies
    assert not only("mul.lo.s32 %r1, %r2, 3;").multiplies
    assert not only("mul.f32 %f1, %f2, 0f3FB8AA3B;").multiplies
    assert not only("mul.wide.s32 %rd1, %r2, %r3;").multiplies
    assert only("ld.global.u32 %r1, [%rd1];").packed
    assert not only("ld.global.nc.u16 %h1, [%rd1];").packed
    assert not only("ld.param.u32 %r1, [p];").packed
    assert only("pmevent 5;").mark == 5
    assert only("pmevent.mask 32;").mark == 5
    with pytest.raises(CompileError, match="not one event: 3"):
        only("pmevent.mask 3;")
    with pytest.raises(CompileError, match="without a number"):
        only("pmevent;")


def test_names_declared_in_a_block_are_its_own() -> None:
    # Inline assembly declares its temporaries in braces, every piece the same ones.
    body = """
    { .reg .b32 t, %r1; // one {
      add.s32 t, %r2, 1; add.s32 %r1, t, 2; }
    { .reg .b32 t; /* another ; */ add.s32 t, %r1, 3; }
    add.s32 %r3, %r1, 4;
    """
    first, inner, second, last = parse_ptx(kernel(body), "f").instructions[:4]
    assert first.writes == inner.reads
    assert first.writes.isdisjoint(second.writes)
    assert inner.writes.isdisjoint(second.reads)
    assert second.reads == last.reads


def test_control_flow() -> None:
    body = """
    $L__BB0_1: setp.lt.s32 %p1, %r1, %r2;
    @%p1 bra $L__BB0_2;
    bra.uni $L__BB0_3;
    $L__BB0_2:
    .pragma "nounroll";
    @!%p1 bra $L__BB0_1;
    $L__BB0_3: add.s32 %r1, %r1, 1;
    """
    function = parse_ptx(kernel(body), "f")
    (compared,) = function.instructions[0].writes
    assert function.instructions[1].guard == compared
    assert function.instructions[3].guard == "!" + compared
    assert sorted(control_flow(function).edges) == [(0, 2), (0, 3), (2, 4), (3, 0), (3, 4)]


def test_one_kernel_of_several() -> None:
    text = kernel("add.s32 %r1, %r2, %r3;").replace("entry f(", "entry ff(") + kernel("bar.sync 0;")
    assert [x.opcode for x in parse_ptx(text, "f").instructions] == ["bar.sync", "ret"]
    assert [x.opcode for x in parse_ptx(text, "ff").instructions] == ["add.s32", "ret"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no kernel 'f' in the PTX"),
        (kernel("").replace("entry f", "entry g"), "no kernel 'f' in the PTX"),
        (HEAD, "ends within the kernel"),
        (HEAD.partition("{")[0], "ends within the kernel"),
        (HEAD + "}", "has no instructions"),
        (HEAD + "ret }", "ends within a statement"),
        (kernel("bra NOWHERE;"), "jumps to 'NOWHERE', which it lacks"),
        (kernel("@%p1;"), "not a PTX instruction: '@%p1'"),
        (kernel("%r1 = %r2;"), "not a PTX instruction"),
    ],
)
def test_damaged_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(CompileError, match=re.escape(message)):
        parse_ptx(text, "f")


def test_an_unknown_instruction_is_told() -> None:
    found = only("frobnicate.b32 %r1, %r2;")
    assert (found.known, found.kind) == (False, "other")
    assert set(KINDS.values()) - {"arithmetic", "memory"} <= set(GPU_CLASSES)


@given(name=st.sampled_from(sorted(path.stem for path in LISTINGS.glob("*.ptx"))), data=st.data())
def test_lost_or_garbled_text_is_an_error_at_worst(name: str, data: st.DataObject) -> None:
    text = (LISTINGS / f"{name}.ptx").read_text()
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 40)))
    put = data.draw(st.text(max_size=4) | st.sampled_from(["{", "}", ";", "@", "bra LOOP;", "ret;", ".reg", "%"]))
    try:
        function = parse_ptx(text[:start] + put + text[stop:], name)
    except CompileError as error:
        assert "\n" not in str(error)
    else:
        assert function.instructions

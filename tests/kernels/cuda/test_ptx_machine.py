"""The machine that runs PTX: instructions against arithmetic done by hand, and what it refuses."""

import numpy as np
import pytest
from ptx_machine import BASE, Buffers, run
from ptx_module import PtxError

HEAD = """.version 7.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 memory[];
.visible .entry kernel(
    .param .u64 kernel_param_0,
    .param .u32 kernel_param_1
)
{
    .reg .pred %p<8>;
    .reg .b16 %rs<8>;
    .reg .b32 %r<40>;
    .reg .b64 %rd<16>;
    ld.param.u64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
"""


def launch(body, words=32, threads=32, grid=1, value=0, shared_bytes=0, dtype=np.int32, start=None):
    """Run ``body``, in which %rd3 is the thread's word of the one buffer and %r1 its index."""
    given = np.zeros(words, dtype) if start is None else start
    buffers = Buffers({"out": given}, frozenset({"out"}))
    run(f"{HEAD}{body}\nret;\n}}\n", (grid, 1, 1), threads, shared_bytes, (buffers.addresses["out"], value), buffers)
    return buffers.read("out")


X, Y = 0x8091_A2F3, 0x7F01_FF80
"""Bytes from low to high: f3 a2 91 80, and 80 ff 01 7f."""


def signed(value, bits=8):
    return value - (1 << bits) if value >> (bits - 1) else value


BYTES = list(zip((0xF3, 0xA2, 0x91, 0x80), (0x80, 0xFF, 0x01, 0x7F), strict=True))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dp4a.s32.s32 %r4, %r2, %r3, 7;", 7 + sum(signed(a) * signed(b) for a, b in BYTES)),
        ("dp4a.u32.s32 %r4, %r2, %r3, -7;", -7 + sum(a * signed(b) for a, b in BYTES)),
        ("prmt.b32 %r4, %r2, %r3, 0x5140;", 0xFFA280F3),
        ("prmt.b32 %r4, %r2, %r3, 0x9c10;", 0xFF_FF_A2_F3),
        ("lop3.b32 %r4, %r2, %r3, 252645135, 0xC0;", X & Y),
        ("lop3.b32 %r4, %r2, %r3, 252645135, 0x6A;", (X & Y) ^ 0x0F0F0F0F),
        ("and.b32 %r4, %r2, %r3;", X & Y),
        ("not.b32 %r4, %r2;", ~X),
        ("shr.s32 %r4, %r2, 40;", -1),
        ("shr.u32 %r4, %r2, 4;", X >> 4),
        ("shr.u32 %r4, %r2, 32;", 0),
        ("shl.b32 %r4, %r2, 8;", X << 8),
        ("bfe.s32 %r4, %r2, 4, 8;", signed(X >> 4 & 0xFF)),
        ("bfe.u32 %r4, %r2, 4, 8;", X >> 4 & 0xFF),
        ("shf.l.wrap.b32 %r4, %r2, %r3, 4;", Y << 4 | X >> 28),
        ("shf.r.wrap.b32 %r4, %r2, %r3, 4;", X >> 4 | Y << 28),
        ("mul.lo.s32 %r4, %r2, %r3;", X * Y),
        ("mul.hi.u32 %r4, %r2, %r3;", X * Y >> 32),
        ("mad.lo.s32 %r4, %r2, %r3, 5;", X * Y + 5),
        ("rem.s32 %r4, %r2, 1000;", -(((1 << 32) - X) % 1000)),
        ("div.s32 %r4, %r2, 1000;", -(((1 << 32) - X) // 1000)),
        ("min.s32 %r4, %r2, %r3;", X),
        ("max.s32 %r4, %r2, %r3;", Y),
        ("cvt.rn.f32.s32 %r4, -3;", 0xC0400000),
        ("mov.b32 %r5, 0f40490FDB; cvt.rzi.s32.f32 %r4, %r5;", 3),
        ("mov.b32 %r5, 0f4B400003; add.f32 %r4, %r5, 0fCB400000;", 0x40400000),
        ("mov.b32 %r5, 0f3FC00000; fma.rn.f32 %r4, %r5, %r5, 0fBF800000;", 0x3FA00000),
        ("mov.b32 {%rs1, %rs2}, %r2; cvt.u32.u16 %r4, %rs2;", X >> 16),
        ("mov.b32 {%rs1, %rs2}, %r2; cvt.s32.s16 %r4, %rs2;", signed(X >> 16, 16)),
        ("mov.b32 {%rs1, %rs2}, %r2; mov.b32 %r4, {%rs2, %rs1};", X >> 16 | X << 16),
        ("cvt.s64.s32 %rd5, %r2; shr.u64 %rd6, %rd5, 32; cvt.u32.u64 %r4, %rd6;", -1),
        ("cvt.u64.u32 %rd5, %r2; shr.u64 %rd6, %rd5, 28; cvt.u32.u64 %r4, %rd6;", X >> 28),
        ("mov.b16 %rs1, 15872; cvt.f32.f16 %r4, %rs1;", 0x3FC00000),
        ("setp.lt.s32 %p1, %r2, %r3; selp.b32 %r4, 5, 6, %p1;", 5),
        ("setp.lt.u32 %p1, %r2, %r3; selp.b32 %r4, 5, 6, %p1;", 6),
        ("setp.gtu.f32 %p1, 0f7FC00000, 0f00000000; selp.b32 %r4, 5, 6, %p1;", 5),
        ("setp.neu.f32 %p1, 0f7FC00000, 0f00000000; selp.b32 %r4, 5, 6, %p1;", 5),
        ("setp.gt.f32 %p1, 0f7FC00000, 0f00000000; selp.b32 %r4, 5, 6, %p1;", 6),
        ("max.f32 %r4, 0f7FC00000, 0f3F800000;", 0x3F800000),
        ("ex2.approx.ftz.f32 %r4, 0fC0000000;", 0x3E800000),
        ("rcp.approx.ftz.f32 %r4, 0f40800000;", 0x3E800000),
    ],
)
def test_instructions(text, expected):
    found = launch(f"mov.u32 %r2, {X}; mov.u32 %r3, {Y}; {text} st.global.b32 [%rd3], %r4;")
    assert set(found.view(np.uint32).tolist()) == {expected & 0xFFFFFFFF}


def test_threads_diverge_and_meet_again():
    """Thread i adds 1 + 2 + … + i."""
    found = launch("""
        mov.u32 %r2, 0; mov.u32 %r3, 0;
    $again:
        setp.ge.u32 %p1, %r2, %r1;
        @%p1 bra $done;
        add.s32 %r2, %r2, 1; add.s32 %r3, %r3, %r2;
        bra.uni $again;
    $done:
        @!%p1 add.s32 %r3, %r3, 1000;
        st.global.b32 [%rd3], %r3;""")
    assert found.tolist() == [i * (i + 1) // 2 for i in range(32)]


def test_shuffles_stay_in_their_warp():
    found = launch("shfl.sync.bfly.b32 %r2, %r1, 5, 31, -1; st.global.b32 [%rd3], %r2;", 64, 64)
    assert found.tolist() == [i ^ 5 for i in range(64)]


def test_shared_memory_belongs_to_a_block_and_is_undefined():
    body = """
        mov.b64 %rd5, memory; cvt.u32.u64 %r9, %rd5; mul.lo.u32 %r10, %r1, 4; add.u32 %r9, %r9, %r10;
        mov.u32 %r2, %ctaid.x; mul.lo.u32 %r3, %r2, 128; cvt.u64.u32 %rd4, %r3; add.s64 %rd3, %rd3, %rd4;
        ld.shared.b32 %r7, [%r9];
        st.shared.b32 [%r9], %r2;
        bar.sync 0;
        ld.shared.b32 %r5, [%r9]; add.s32 %r6, %r5, %r7;
        st.global.b32 [%rd3], %r6;"""
    assert launch(body, 64, 32, 2, shared_bytes=128).tolist() == [-1] * 32 + [0] * 32
    with pytest.raises(PtxError, match="byte 124 of 64 of shared memory"):
        launch(body, 64, 32, 2, shared_bytes=64)


def test_copies_arrive_when_they_are_waited_for():
    start = np.arange(128, dtype=np.int32)
    body = """
        mov.b64 %rd5, memory; cvt.u32.u64 %r9, %rd5; mul.lo.u32 %r10, %r1, 16; add.u32 %r9, %r9, %r10;
        mul.wide.u32 %rd6, %r1, 16; add.s64 %rd7, %rd1, %rd6;
        cp.async.cg.shared.global [%r9], [%rd7], 16;
        cp.async.commit_group;
        cp.async.commit_group;
        cp.async.wait_group {behind};
        ld.shared.b32 %r5, [%r9+4];
        st.global.b32 [%rd3], %r5;"""
    arrived = launch(body.format(behind=1), shared_bytes=512, start=start)
    assert arrived[:32].tolist() == [4 * i + 1 for i in range(32)]
    early = launch(body.format(behind=2), shared_bytes=512, start=start)
    assert early[:32].tolist() == [-1] * 32


@pytest.mark.parametrize("address", ["%rd3+4", "%rd1+-4", "4096"])
def test_illegal_addresses(address):
    with pytest.raises(PtxError, match="illegal address"):
        launch(f"st.global.b32 [{address}], %r1;")


def test_memory_that_is_only_read_and_misaligned_vectors():
    buffers = Buffers({"k": np.zeros(64, np.int32)})
    for text, reason in (
        ("st.global.b32 [%rd1], %r1;", "illegal"),
        ("ld.global.v2.b32 {%r2, %r3}, [%rd1+4];", "misal"),
    ):
        with pytest.raises(PtxError, match=reason):
            run(f"{HEAD}{text}\nret;\n}}\n", (1, 1, 1), 32, 0, (buffers.addresses["k"], 0), buffers)
    assert buffers.addresses["k"] % 256 == BASE % 256 == 0


def test_threads_that_wait_for_each_other_are_an_error():
    with pytest.raises(PtxError, match="different barriers"):
        launch("setp.lt.u32 %p1, %r1, 4; @%p1 bra $other; bar.sync 0; bra $end;\n$other:\nbar.warp.sync -1;\n$end:\n")


def test_what_it_does_not_know_is_an_error():
    with pytest.raises(PtxError, match=r"unknown instruction: vadd\.s32"):
        launch("vadd.s32.s32.s32 %r2, %r1, %r1;")

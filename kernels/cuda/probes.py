"""Small kernels of known cost, as PTX that any driver since CUDA 10 translates for its GPU.

They flush caches, tell what a launch costs, and are the fixed work between measurements. Addresses are 64-bit integers.
"""

from __future__ import annotations

READ_BYTES = 64
"""What a thread of `READ` has in flight: four vectors."""

EMPTY = "lowbit_empty"
"""Returns at once. No arguments."""

READ = "lowbit_read"
"""Reads a buffer once, coalesced, past the first-level cache. Arguments: its address; int64 count of 16-byte vectors;
address of 4 writable bytes. A round is four vectors a thread of the grid; a rest that fills no round is not read."""

SPIN = "lowbit_spin"
"""Dependent multiply-adds in one thread a block: its time is the clock's. Arguments: int32 count; address of 4 writable
bytes."""

_HEADER = """.version 6.3
.target sm_75
.address_size 64
"""

_EMPTY = f""".visible .entry {EMPTY}()
{{
    ret;
}}
"""

_READ = f""".visible .entry {READ}(.param .u64 buffer, .param .u64 vectors, .param .u64 sink)
{{
    .reg .pred %p<3>;
    .reg .b32 %r<24>;
    .reg .b64 %d<12>;
    ld.param.u64 %d0, [buffer];
    ld.param.u64 %d1, [vectors];
    ld.param.u64 %d2, [sink];
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %nctaid.x;
    mul.wide.u32 %d3, %r0, %r1;
    cvt.u64.u32 %d4, %r2;
    add.u64 %d3, %d3, %d4;
    mul.wide.u32 %d5, %r3, %r1;
    shl.b64 %d6, %d5, 4;
    mov.u32 %r4, 0;
    shl.b64 %d7, %d3, 4;
    add.u64 %d7, %d0, %d7;
    mul.lo.u64 %d8, %d5, 3;
    add.u64 %d8, %d3, %d8;
    shl.b64 %d9, %d5, 2;
LOOP:
    setp.ge.u64 %p0, %d8, %d1;
    @%p0 bra DONE;
    ld.global.cg.v4.u32 {{%r5, %r6, %r7, %r8}}, [%d7];
    add.u64 %d10, %d7, %d6;
    ld.global.cg.v4.u32 {{%r9, %r10, %r11, %r12}}, [%d10];
    add.u64 %d10, %d10, %d6;
    ld.global.cg.v4.u32 {{%r13, %r14, %r15, %r16}}, [%d10];
    add.u64 %d10, %d10, %d6;
    ld.global.cg.v4.u32 {{%r17, %r18, %r19, %r20}}, [%d10];
    add.u64 %d7, %d10, %d6;
    add.u64 %d8, %d8, %d9;
{{sums}}
    bra LOOP;
DONE:
    setp.ne.u32 %p1, %r4, 0x5A17C0DE;
    @%p1 bra END;
    st.global.u32 [%d2], %r4;
END:
    ret;
}}
"""

_SPIN = f""".visible .entry {SPIN}(.param .u32 count, .param .u64 sink)
{{
    .reg .pred %p<3>;
    .reg .b32 %r<5>;
    .reg .b64 %d<2>;
    ld.param.u32 %r0, [count];
    ld.param.u64 %d0, [sink];
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p0, %r1, 0;
    @%p0 bra END;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, 0;
LOOP:
    mad.lo.u32 %r2, %r2, 1664525, 1013904223;
    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p1, %r3, %r0;
    @%p1 bra LOOP;
    setp.ne.u32 %p2, %r2, 0x5A17C0DE;
    @%p2 bra END;
    st.global.u32 [%d0], %r2;
END:
    ret;
}}
"""


def ptx() -> bytes:
    """All probes in one module."""
    sums = "\n".join(f"    xor.b32 %r4, %r4, %r{n};" for n in range(5, 21))
    return (_HEADER + _EMPTY + _READ.replace("{sums}", sums) + _SPIN).encode()

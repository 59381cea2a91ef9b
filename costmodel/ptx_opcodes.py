"""Which class each PTX instruction has, by its name without modifiers.

Source: NVIDIA's "Parallel Thread Execution ISA", chapter 9
(https://docs.nvidia.com/cuda/parallel-thread-execution/index.html). Instructions whose class depends on the type or the
state space are sorted out in `lowbit.costmodel.ptx_text`.
"""

from __future__ import annotations

_CLASSES = {
    "arithmetic": "add sub addc subc neg abs min max sad mul mul24 mad madc mad24 copysign vadd vsub vabsdiff vmin "
    "vmax vadd2 vsub2 vavrg2 vabsdiff2 vmin2 vmax2 vadd4 vsub4 vavrg4 vabsdiff4 vmin4 vmax4 vmad vset vset2 vset4",
    "float": "fma",
    "dot": "dp4a dp2a mma wmma wgmma tcgen05",
    "special": "div rem rcp sqrt rsqrt sin cos lg2 ex2 tanh popc clz bfind brev fns",
    "logic": "and or xor not cnot lop3 selp slct bmsk",
    "shift": "shl shr shf bfe bfi vshl vshr",
    "permute": "prmt",
    "convert": "cvt szext",
    "predicate": "setp set testp vote activemask elect isspacep istypep",
    "shuffle": "shfl match redux movmatrix",
    "address": "cvta mapa getctarank",
    "branch": "bra brx ret exit trap call brkpt",
    "barrier": "bar barrier membar fence mbarrier griddepcontrol clusterlaunchcontrol",
    "global_load": "tex tld4 txq suld suq",
    "global_store": "sust sured",
    "memory": "ld ldu st atom red ldmatrix stmatrix cp multimem",
    "other": "mov nanosleep prefetch prefetchu applypriority discard createpolicy pmevent alloca stacksave "
    "stackrestore setmaxnreg",
}


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


KINDS = {name: kind for kind, names in _CLASSES.items() for name in names.split()}
"""Class of an instruction, or ``arithmetic`` or ``memory`` where its modifiers decide."""

DESTLESS = _named(
    "st red stmatrix cp bra brx ret exit trap brkpt bar barrier membar fence griddepcontrol prefetch prefetchu "
    "applypriority discard pmevent nanosleep stackrestore setmaxnreg sust sured tcgen05 wgmma"
)
"""Instructions whose first operand is read."""

ENDING = _named("ret exit trap")
"""Instructions after which a thread does not continue."""

FLOATS = _named("f16 f16x2 bf16 bf16x2 f32 f32x2 f64 tf32")
"""Types of floating-point arithmetic."""

SUBWORDS = _named("b8 u8 s8 b16 u16 s16 f16 bf16")
"""Types of loads that are narrower than a word."""

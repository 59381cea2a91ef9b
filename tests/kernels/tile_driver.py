"""Call tile functions as compiled code, for the host's instruction set or for one that the host only simulates."""

from __future__ import annotations

import ctypes
import re

import llvmlite.binding as llvm
import numpy as np
from lowbit.kernels.cpu.backend import _text
from lowbit.kernels.cpu.keys import preparation
from lowbit.kernels.cpu.values import scratch_bytes
from lowbit.kernels.packed import aligned_zeros, pack
from lowbit.kernels.reference import make_operands

PIN = re.compile(r'call (<[^>]+>|\w+) asm sideeffect "", "[^"]*~\{memory\}"\s*\((?:<[^>]+>|\w+) (%\S+|\S+)\)')
DECLARATION = re.compile(r'^declare [^\n]*@"?(?P<name>llvm\.(?:x86|aarch64)\.[\w.]*)"?[^\n]*$', re.M)


def simulated(text):
    """IR that computes on any machine what ``text`` computes on its own: dots as plain arithmetic, no register pins."""
    text = re.sub(r"^target triple = .*$", "", text, flags=re.M)
    text = PIN.sub(lambda m: f"bitcast {m[1]} {m[2]} to {m[1]}", text)
    for match in DECLARATION.finditer(text):
        name = match["name"]
        plain = name.replace("llvm.", "plain.")
        define = pack_in_plain_ir if ".pack" in name else dot_in_plain_ir
        text = text.replace(match[0], define(name, plain)).replace(f'@"{name}"', f'@"{plain}"')
    assert "asm sideeffect" not in text
    assert not re.search(r"llvm\.(x86|aarch64)", text)
    return text


def pack_in_plain_ir(name, plain):
    """The saturating packs within 128-bit lanes, for operands that do not saturate."""
    bits = {"packssdw": 32, "packuswb": 16}[re.search(r"pack\w+", name)[0]]
    count = (512 if name.endswith(".512") else 256) // bits
    wide, narrow = f"<{count} x i{bits}>", f"<{2 * count} x i{bits // 2}>"
    per = 128 // bits
    lanes = [
        lane
        for start in range(0, count, per)
        for source in (0, count)
        for lane in range(source + start, source + start + per)
    ]
    picked = ", ".join(f"i32 {lane}" for lane in lanes)
    return "\n".join(
        [
            f'define internal {narrow} @"{plain}"({wide} %a, {wide} %b) {{',
            f"  %both = shufflevector {wide} %a, {wide} %b, <{2 * count} x i32> <{picked}>",
            f"  %narrow = trunc <{2 * count} x i{bits}> %both to {narrow}",
            f"  ret {narrow} %narrow",
            "}",
        ]
    )


def dot_in_plain_ir(name, plain):
    """Four-way dot products: u8 × s8 for ``vpdpbusd``, s8 × s8 for ``sdot``; sums wrap at 32 bits, products cannot."""
    lanes = 4 if "neon" in name else int(name.rsplit(".", 1)[1]) // 32
    first = "sext" if "neon" in name else "zext"
    quads, words, wide = f"<{4 * lanes} x i8>", f"<{lanes} x i32>", f"<{4 * lanes} x i32>"
    operand = quads if "neon" in name else words
    lines = [
        f'define internal {words} @"{plain}"({words} %acc, {operand} %a, {operand} %b) {{',
        f"  %a8 = bitcast {operand} %a to {quads}",
        f"  %b8 = bitcast {operand} %b to {quads}",
        f"  %aw = {first} {quads} %a8 to {wide}",
        f"  %bw = sext {quads} %b8 to {wide}",
        f"  %p = mul {wide} %aw, %bw",
    ]
    total = "%acc"
    for byte in range(4):
        picked = ", ".join(f"i32 {4 * lane + byte}" for lane in range(lanes))
        lines.append(f"  %p{byte} = shufflevector {wide} %p, {wide} poison, <{lanes} x i32> <{picked}>")
        lines.append(f"  %s{byte} = add {words} {total}, %p{byte}")
        total = f"%s{byte}"
    return "\n".join([*lines, f"  ret {words} {total}", "}"])


def compiled(text):
    """An engine for ``text`` on this machine; keep it as long as its functions."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    module = llvm.parse_assembly(text)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=1, jit=True
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


def address(array):
    return array.ctypes.data


class Tile:
    """One tile function, ready to be called from Python."""

    def __init__(self, spec):
        self.spec = spec
        self._engine = compiled(simulated(_text(spec).replace("linkonce_odr", "")))
        arguments = "ppiipppi" if spec.role == "k" else "ppiipippi"
        kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int64}
        signature = ctypes.CFUNCTYPE(None, *(kinds[a] for a in arguments))
        self._call = signature(self._engine.get_function_address(spec.symbol))

    def dot(self, x, packed, first, count):
        """Scores of prepared rows ``x`` (rows, head_dim), rounded by the integer pipeline to codes and scales here."""
        spec = self.spec
        prepared = preparation(spec)
        small = np.zeros((spec.rows, len(prepared.order)), np.int8 if spec.integer else np.float32)
        aux = np.zeros((spec.rows, 2, max(len(prepared.aux_group), 1)), np.int32)
        for row in range(spec.rows):
            values = np.append(x[row], 0).astype(np.float32)
            if spec.integer:
                groups = np.arange(spec.head_dim) // 32
                scale = np.array([np.abs(x[row][groups == g]).max() / 127 for g in range(groups.max() + 1)], np.float32)
                codes = np.append(np.floor(x[row] / scale[groups] + 0.5), 0).astype(np.int64)
                small[row] = codes[prepared.order]
                sums = np.array([codes[:-1][groups == g].sum() for g in range(groups.max() + 1)])
                aux[row, 0] = -prepared.offset * sums[prepared.aux_group] * prepared.aux_first
                aux[row, 1] = scale[prepared.aux_group].view(np.int32)
            else:
                small[row] = values[prepared.order]
        scores = np.full((spec.rows, count), np.nan, np.float32)
        words, scales = packed.words[0], packed.scales[0]
        self._call(address(words), address(scales), first, count, address(small), address(aux), address(scores), count)
        return scores

    def accumulate(self, weights, packed, first, count):
        """Weighted sums of ``count`` tokens from ``first`` on; ``weights`` is (rows, count)."""
        spec = self.spec
        p = np.ascontiguousarray(weights, np.float32)
        scratch = aligned_zeros(scratch_bytes(spec) + 4096, np.uint8)
        out = np.zeros((spec.rows, spec.head_dim), np.float32)
        words, scales = packed.words[0], packed.scales[0]
        self._call(
            address(words),
            address(scales),
            first,
            count,
            address(p),
            count,
            address(scratch),
            address(out),
            spec.head_dim,
        )
        return out


def one_head(p, layout, tokens, seed=0):
    """Operands of a problem of one head, and the packed one."""
    operands = make_operands(p, tokens, seed)
    return operands, pack(operands.k or operands.v, layout)

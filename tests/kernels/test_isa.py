"""Instruction sets: which one is chosen, that all compute the same, and the code of those that this machine lacks."""

import platform
import re
from dataclasses import replace

import numpy as np
import pytest
from hot_loop import hot_loop
from kernel_check import agree, candidate, check, problem
from lowbit.kernels.cpu import isa as isa_module
from lowbit.kernels.cpu.backend import CpuBackend
from lowbit.kernels.cpu.isa import ISAS, detect, host_features, isa_named, runs_here
from lowbit.kernels.cpu.spec import TileSpec
from lowbit.kernels.errors import DeviceError
from lowbit.kernels.layout import Layout
from tile_driver import Tile, one_head

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", {"sse2"}, "generic"),
        ("x86_64", {"avx2", "fma"}, "generic"),
        ("x86_64", AVX2, "avx2"),
        ("x86_64", AVX2 | AVX512, "avx2"),
        ("x86_64", AVX2 | {"avx512vnni"}, "avx2"),
        ("x86_64", AVX2 | {"avxvnni"}, "avx_vnni"),
        ("AMD64", AVX2 | AVX512 | {"avx512vnni"}, "avx512_vnni"),
        ("x86_64", AVX2 | AVX512 | {"avx512vnni", "avxvnni"}, "avx512_vnni"),
        ("aarch64", {"neon", "dotprod"}, "neon_dot"),
        ("arm64", {"neon", "dotprod", "fullfp16"}, "neon_dot"),
        ("aarch64", {"neon"}, "generic"),
        ("x86_64", {"neon", "dotprod"}, "generic"),
        ("riscv64", {"v"}, "generic"),
    ],
)
def test_the_best_set_whose_features_the_machine_has_is_chosen(monkeypatch, machine, features, expected):
    monkeypatch.delenv("LOWBIT_ISA", raising=False)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(isa_module, "host_features", lambda: frozenset(features))
    assert detect().name == expected
    assert CpuBackend().target() == expected


def test_a_smaller_machine_can_be_simulated_and_a_larger_one_cannot(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(isa_module, "host_features", lambda: frozenset(AVX2 | {"avxvnni"}))
    for name in ("generic", "avx2", "avx_vnni"):
        monkeypatch.setenv("LOWBIT_ISA", name)
        assert detect() is isa_named(name)
    monkeypatch.setenv("LOWBIT_ISA", "avx512_vnni")
    with pytest.raises(
        DeviceError, match=r"LOWBIT_ISA=avx512_vnni: this machine lacks avx512bw, avx512dq, .*avx512vnni"
    ):
        detect()
    monkeypatch.setenv("LOWBIT_ISA", "mmx")
    with pytest.raises(DeviceError, match="unknown instruction set 'mmx': known are amx_int8, avx512_vnni, "):
        detect()


def test_features_are_those_of_this_machine():
    assert host_features()
    assert runs_here(ISAS["generic"])
    assert all(4 * isa.lanes == isa.vector_bytes for isa in ISAS.values())


HERE = [name for name, isa in ISAS.items() if runs_here(isa)]


@pytest.mark.parametrize(
    ("key", "k", "v", "pipeline"),
    [
        (
            "attend h4/2 d80 q2 w8a8",
            "T/16 D/4 t16 d4 | int8/bytes/offset",
            "T/32 D/16 t32/4 d16 t4 | int8/bytes/offset",
            "integer",
        ),
        ("attend h3/1 d64 q1 w8a8", "T D | int8/bytes/signed", "T/32 D t32 | int8/bytes/signed", "integer"),
        (
            "attend h4/1 d128 q1 w4a8",
            "T D | int4/planes/signed",
            "T/32 D/16 t32/8 d16 t8 | int4/lane_interleaved/offset",
            "integer",
        ),
        ("attend h4/1 d96 q1 w4a8", "T D | int4/contiguous/offset", "T/32 D t32 | int4/contiguous/signed", "float"),
        ("attend h2/2 d80 q1 fp16", "T D | fp16", "T D | fp16", "float"),
    ],
)
def test_every_set_that_runs_here_computes_the_same(monkeypatch, key, k, v, pipeline):
    """Sets differ by float32 sums, and in the integer pipeline by a weight on a threshold that goes the other way."""
    p = problem(key)
    chosen = candidate(p, k, v, pipeline, rows=2)
    results = []
    for name in HERE:
        monkeypatch.setenv("LOWBIT_ISA", name)
        results.append(check(p, chosen, 75))
    assert HERE[-1] == "generic"
    for other in results[:-1]:
        allowed = 2e-3 if pipeline == "integer" else 1e-5
        assert np.linalg.norm(other - results[-1]) <= allowed * np.linalg.norm(results[-1])


@pytest.mark.parametrize(
    ("isa", "instruction", "registers"),
    [
        ("avx512_vnni", "vpdpbusd", "%zmm"),
        ("avx_vnni", "vpdpbusd", "%ymm"),
        ("avx2", "vpmaddubsw", "%ymm"),
        ("neon_dot", "sdot", r"v\d+\.4s, v\d+\.16b"),
    ],
)
@pytest.mark.parametrize("operator", ["qk", "sv"])
@pytest.mark.parametrize(
    ("precision", "packing"),
    [("w8a8", "int8/bytes/offset"), ("w8a8", "int8/bytes/signed"), ("w4a8", "int4/contiguous_permuted/signed")],
)
def test_the_contraction_uses_the_sets_dot_product(isa, instruction, registers, operator, precision, packing):
    p = problem(f"{operator} h1/1 d128 q1 {precision}")
    order = "T D" if operator == "qk" else "T/32 D t32"
    (code,) = CpuBackend(isa).code(p, candidate(p, f"{order} | {packing}"))
    dots = [operands for mnemonic, operands in hot_loop(code.assembly) if mnemonic == instruction]
    assert dots
    assert all(re.search(registers, operands) for operands in dots)
    # Each dot consumes one register of codes, so there are as many as the iteration's values fill.
    assert len(dots) == code.values_per_iteration // ISAS[isa].vector_bytes


def test_float_code_has_no_integer_dot():
    for isa in ("avx512_vnni", "avx2", "neon_dot"):
        p = problem("qk h1/1 d128 q1 w8a8")
        (code,) = CpuBackend(isa).code(p, candidate(p, "T D | int8/bytes/offset", pipeline="float"))
        mnemonics = {mnemonic for mnemonic, _ in hot_loop(code.assembly)}
        assert not mnemonics & {"vpdpbusd", "vpmaddubsw", "sdot"}
        assert any("fma" in m or m == "fmla" for m in mnemonics)


TILES = [
    ("k", 64, "T/16 D/4 t16 d4 | int8/bytes/offset"),
    ("k", 80, "T D | int8/bytes/signed"),
    ("k", 96, "T/32 D/16 t32 d16 | int4/lane_interleaved/signed"),
    ("k", 128, "T D | int4/planes/offset"),
    ("k", 128, "T D | int4/contiguous/signed"),
    ("v", 64, "T/32 D/16 t32/4 d16 t4 | int8/bytes/offset"),
    ("v", 80, "T/32 D t32 | int8/bytes/signed"),
    ("v", 96, "T/32 D/16 t32/8 d16 t8 | int4/lane_interleaved/signed"),
    ("v", 128, "T D | int8/bytes/signed"),
    ("v", 64, "T/32 D t32 | int4/contiguous_permuted/offset"),
]


@pytest.mark.parametrize("isa", ["avx512_vnni", "avx_vnni", "neon_dot"])
@pytest.mark.parametrize(("role", "head_dim", "layout"), TILES)
def test_tiles_of_other_machines_run_here_with_their_dot_spelled_out(isa, role, head_dim, layout):
    """The IR for another machine, its one special instruction replaced by plain arithmetic, against NumPy."""
    tokens, first, count, rows = 150, 32, 96, 2
    precision = "w8a8" if "int8" in layout else "w4a8"
    operator = "qk" if role == "k" else "sv"
    p = problem(f"{operator} h1/1 d{head_dim} q2 {precision}")
    operands, packed = one_head(p, Layout.parse(layout), tokens)
    for pipeline in ("integer", "float"):
        spec = TileSpec(role, packed.layout, head_dim, ISAS[isa], pipeline, rows, 2, 0)
        tile = Tile(spec)
        part = replace(operands, **{role: _slice(getattr(operands, role), first, count)})
        if role == "k":
            result = tile.dot(operands.x[0], packed, first, count)
        else:
            part = replace(part, x=operands.x[:, :, first : first + count])
            result = tile.accumulate(part.x[0], packed, first, count)
        agree(p, part, pipeline, result[None], f"{isa} {layout} {pipeline}")


def _slice(quantized, first, count):
    part = slice(first, first + count)
    return replace(quantized, codes=quantized.codes[:, part], scales=quantized.scales[:, part])


def test_accumulation_adds_to_what_is_there_and_shares_the_pass_over_tokens():
    """Two calls over halves of the context give what one call over all of it gives."""
    p = problem("sv h1/1 d64 q1 w8a8")
    operands, packed = one_head(p, Layout.parse("T/32 D t32 | int8/bytes/signed"), 128)
    tile = Tile(TileSpec("v", packed.layout, 64, ISAS["avx512_vnni"], "float", 1, 2, 0))
    whole = tile.accumulate(operands.x[0], packed, 0, 128)
    halves = [tile.accumulate(operands.x[0][:, start : start + 64], packed, start, 64) for start in (0, 64)]
    np.testing.assert_allclose(sum(halves), whole, rtol=1e-4, atol=1e-6)

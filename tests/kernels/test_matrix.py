"""The matrix unit of AMX: which tiles it is fed, the code for it, and its sums where there is one."""

import re

import numpy as np
import pytest
from kernel_check import candidate, check, problem
from lowbit.kernels.cpu.backend import CpuBackend
from lowbit.kernels.cpu.isa import ISAS, runs_here
from lowbit.kernels.cpu.mapping import Infeasible
from lowbit.kernels.cpu.matrix import QUADS, check_tiles, tiles
from lowbit.kernels.cpu.spec import TileSpec
from lowbit.kernels.errors import CompileError
from lowbit.kernels.layout import Layout

AMX = ISAS["amx_int8"]
LAYOUTS = [
    ("T/16 D/4 t16 d4 | int8/bytes/offset", "T/32 D/16 t32/4 d16 t4 | int8/bytes/signed"),
    ("T/32 D/4 t32 d4 | int8/bytes/signed", "T/32 D/16 t32/4 d16 t4 | int8/bytes/offset"),
    ("T/32 D/8 t32 d8 | int4/lane_interleaved/offset", "T/32 D/16 t32/8 d16 t8 | int4/lane_interleaved/signed"),
    ("T/16 D/8 t16 d8 | int4/contiguous_permuted/signed", "T/32 D/16 t32/8 d16 t8 | int4/contiguous_permuted/offset"),
]


def spec(role, layout, head_dim=128, rows=16, registers=1):
    return TileSpec(role, Layout.parse(layout), head_dim, AMX, "integer", rows, registers, 0)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("k, v", LAYOUTS)
def test_tiles_cover_each_product_once_and_in_the_order_of_the_small_operand(head_dim, k, v):
    """A tile's row q holds four reductions of 16 outputs that meet slot ``first_slot`` + q, whole tiles 32 of them."""
    for role, layout in (("k", k), ("v", v)):
        each = spec(role, layout, head_dim)
        check_tiles(each)
        for region in (each.plan.main, each.plan.tail):
            if region is None:
                continue
            seen = []
            for (outputs, group), tile in tiles(region, role).items():
                for row, (unit, index) in enumerate(tile.rows):
                    lanes = unit.outputs[index]
                    assert lanes.o == outputs
                    assert {region.slots[r] for r in lanes.r} == {tile.first_slot + row}
                    assert {(lanes.o[0] if role == "v" else r) // 32 for r in lanes.r[0]} == {group}
                    seen += [(o, r) for o, four in zip(lanes.o, lanes.r, strict=True) for r in four]
                assert len(tile.rows) <= QUADS
            assert len(set(seen)) == len(seen) == region.outputs * region.reductions


def test_layouts_that_mix_outputs_are_refused_with_the_reason():
    with pytest.raises(Infeasible, match="four reductions of each of 16 outputs"):
        check_tiles(spec("k", "T D | int8/bytes/signed"))
    p = problem("attend h16/1 d128 q1 w8a8")
    chosen = candidate(p, "T D | int8/bytes/signed", "T/32 D t32 | int8/bytes/signed", rows=16)
    with pytest.raises(CompileError, match="K: the matrix unit wants"):
        CpuBackend("amx_int8").code(p, chosen)


@pytest.mark.parametrize("rows, expected", [(8, False), (9, True), (16, True)])
def test_many_rows_are_contracted_by_the_unit(rows, expected):
    p = problem("attend h16/1 d128 q1 w8a8")
    for code in CpuBackend("amx_int8").code(p, candidate(p, *LAYOUTS[1], rows=rows)):
        assert ("tilestored" in code.assembly) == expected
        assert bool(re.search(r"\btdpb(uu|us|su|ss)d\b", code.assembly)) == expected
        assert (code.assembly.count("ldtilecfg"), code.assembly.count("tilerelease")) == (expected, expected)


def test_codes_of_one_byte_are_read_where_they_lie():
    """Signed bytes need no unpacking: no vector loads them, and 32 × 16 of them are one tile load."""
    p = problem("qk h16/1 d128 q1 w8a8")
    (code,) = CpuBackend("amx_int8").code(p, candidate(p, LAYOUTS[1][0], rows=16, registers=1))
    assert "vpdpbusd" not in code.assembly
    assert code.assembly.count("tdpbssd") == 1
    assert code.assembly.count("tileloadd") == 2


@pytest.mark.skipif(not runs_here(AMX), reason="no matrix unit here")
@pytest.mark.parametrize("k, v", LAYOUTS)
def test_the_unit_computes_what_the_reference_does(k, v, monkeypatch):
    monkeypatch.setenv("LOWBIT_ISA", "amx_int8")
    precision = "w8a8" if "int8" in k else "w4a8"
    for key in ("attend h8/2 d128 q5", "attend h21/3 d80 q2", "attend h9/1 d96 q1"):
        p = problem(f"{key} {precision}")
        for rows in (9, 16):
            chosen = candidate(p, k, v, rows=rows, registers=1, block=64, prefetch=24)
            for tokens in (1, 33, 130):
                check(p, chosen, tokens)


@pytest.mark.skipif(not runs_here(AMX), reason="no matrix unit here")
def test_the_unit_and_vectors_agree(monkeypatch):
    p = problem("qk h16/1 d256 q1 w8a8")
    results = []
    for name in ("amx_int8", "avx512_vnni"):
        monkeypatch.setenv("LOWBIT_ISA", name)
        results.append(check(p, candidate(p, LAYOUTS[1][0], rows=16, registers=1), 97))
    np.testing.assert_array_equal(*results)

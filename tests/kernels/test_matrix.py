"""The matrix unit of AMX: which tiles it is fed, the code for it, and its sums where there is one."""

import re

import numpy as np
import pytest
from kernel_check import candidate, check, packed_operands, problem
from lowbit.kernels.candidate import BFLOAT, Candidate
from lowbit.kernels.cpu.backend import CpuBackend
from lowbit.kernels.cpu.isa import ISAS, runs_here
from lowbit.kernels.cpu.mapping import Infeasible
from lowbit.kernels.cpu.matrix import QUADS, check_tiles, tiles
from lowbit.kernels.cpu.spec import TileSpec
from lowbit.kernels.errors import CompileError
from lowbit.kernels.layout import Layout
from lowbit.kernels.quantize import quantize
from lowbit.kernels.reference import Operands, error, make_operands, reference, tolerance

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
    """Signed bytes need no unpacking: no vector loads them, and 32 × 16 of them are one tile load for all rows."""
    p = problem("qk h32/1 d128 q1 w8a8")
    for rows, passes in ((16, 1), (32, 2)):
        (code,) = CpuBackend("amx_int8").code(p, candidate(p, LAYOUTS[1][0], rows=rows, registers=1))
        assert "vpdpbusd" not in code.assembly
        # Four groups of channels, of the first block and in the loop over the others.
        assert code.assembly.count("tdpbssd") == 8 * passes
        assert code.assembly.count("tileloadd") == 8 * (1 + passes)


def test_rows_of_keys_that_the_unit_does_not_take_are_refused_with_the_reason():
    check_tiles(spec("k", LAYOUTS[1][0], rows=32))
    for role, layout, head_dim, rows in (
        ("k", LAYOUTS[1][0], 128, 24),
        ("k", LAYOUTS[1][0], 512, 32),
        ("v", LAYOUTS[0][1], 128, 32),
    ):
        with pytest.raises(Infeasible, match="takes 16 rows at most, or 32 of few channels"):
            check_tiles(spec(role, layout, head_dim, rows))


def unit_candidate(p, k, v, **schedule):
    return candidate(p, k, v, pipeline=BFLOAT, **{"block": 96, "prefetch": 24, **schedule})


@pytest.mark.parametrize("k, v", LAYOUTS)
def test_values_are_weighted_in_bfloat_where_asked(k, v):
    """Sums start from memory and return to it outside the loop; weights are rounded by one instruction a row."""
    precision = "w8a8" if "int8" in k else "w4a8"
    p = problem(f"attend h32/1 d128 q1 {precision}")
    keys, values = CpuBackend("amx_int8").code(p, unit_candidate(p, k, v, rows=32))
    assert re.search(r"\btdpb(us|su|ss)d\b", keys.assembly)
    assert "tdpbf16ps" not in keys.assembly
    text = values.assembly
    assert not re.search(r"\btdpb(uu|us|su|ss)d\b", text)
    # In the loop over tokens and for its last ones: two tiles of rows × two of channels, and 32 rows of weights.
    assert (text.count("tdpbf16ps"), text.count("vcvtne2ps2bf16"), text.count("tilestored")) == (8, 64, 4)
    assert (text.count("ldtilecfg"), text.count("tilerelease")) == (1, 1)


@pytest.mark.parametrize(
    "key, layouts, rows, reason",
    [
        ("attend h8/1 d128 q1 w8a8", LAYOUTS[1], 8, "V: bfloat takes 9 to 32 rows"),
        ("attend h32/1 d128 q2 w8a8", LAYOUTS[1], 48, "rows"),
        ("attend h32/1 d128 q1 w8a8", (LAYOUTS[1][0], LAYOUTS[1][0]), 32, "V: "),
        ("attend h32/1 d128 q1 fp16", ("T/32 D t32 | fp16", "T/32 D t32 | fp16"), 32, "V: "),
        ("qk h32/1 d128 q1 w8a8", LAYOUTS[1], 32, "bfloat weights values, and there are none"),
    ],
)
def test_what_bfloat_cannot_do_is_refused_with_the_reason(key, layouts, rows, reason):
    p = problem(key)
    with pytest.raises(CompileError, match=reason):
        CpuBackend("amx_int8").code(p, unit_candidate(p, *layouts, rows=rows))


def test_bfloat_needs_a_matrix_unit():
    p = problem("attend h32/1 d128 q1 w8a8")
    with pytest.raises(CompileError, match="avx512_vnni has no matrix unit"):
        CpuBackend("avx512_vnni").code(p, unit_candidate(p, *LAYOUTS[1], rows=32))


@pytest.mark.parametrize(
    "key, isa, expected",
    [
        ("attend h32/8 d128 q8 w8a8", "amx_int8", {16, 32}),
        ("attend h12/1 d80 q1 w8a8", "amx_int8", {16}),
        ("sv h32/1 d128 q1 w4a8", "amx_int8", {16, 32}),
        ("attend h32/8 d128 q2 w8a8", "amx_int8", set()),
        ("attend h32/8 d128 q8 fp16", "amx_int8", set()),
        ("qk h32/1 d128 q1 w8a8", "amx_int8", set()),
        ("attend h32/8 d128 q8 w8a8", "avx512_vnni", set()),
    ],
)
def test_bfloat_is_offered_for_many_rows_of_codes_where_there_is_a_unit(key, isa, expected):
    p = problem(key)
    found = [each for each in CpuBackend(isa).space(p, 2) if getattr(each, "candidate", each).pipeline == BFLOAT]
    assert {each.schedule.rows for each in found if isinstance(each, Candidate)} == expected
    assert bool(found) == bool(expected)


def test_weights_of_eight_bits_are_within_the_tolerance_and_coarser_ones_are_not():
    p = problem("sv h12/1 d64 q1 w8a8")
    operands = make_operands(p, 200)
    expected, allowed = reference(p, operands, BFLOAT), tolerance(p, operands, BFLOAT)
    scales = operands.v.scales.astype(np.float64)
    codes = operands.v.codes.astype(np.float64)
    errors = []
    for bits in (8, 5):
        out = np.zeros_like(expected)
        for g in range(scales.shape[2]):
            mantissa, exponent = np.frexp(operands.x.astype(np.float64) * scales[:, None, :, g])
            weights = np.ldexp(np.rint(mantissa * 2**bits) / 2**bits, exponent)
            part = slice(32 * g, 32 * g + 32)
            out[:, :, part] = np.einsum("hqt,td->hqd", weights, codes[0, :, part])
        errors.append(error(out, expected))
    assert errors[0] < allowed < errors[1]


@pytest.mark.skipif(not runs_here(AMX), reason="no matrix unit here")
@pytest.mark.parametrize("k, v", LAYOUTS)
def test_bfloat_computes_what_the_reference_does(k, v, monkeypatch):
    monkeypatch.setenv("LOWBIT_ISA", "amx_int8")
    precision = "w8a8" if "int8" in k else "w4a8"
    for key in ("attend h8/1 d128 q4", "attend h21/3 d80 q2", "attend h12/1 d96 q3 window 40", "sv h20/1 d64 q1"):
        p = problem(f"{key} {precision}" if "window" not in key else key.replace("window", f"{precision} window"))
        for rows, registers in ((16, 2), (32, 1)):
            for tokens in (1, 33, 230):
                check(p, unit_candidate(p, k, v, rows=rows, registers=registers), tokens)


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


@pytest.mark.skipif(not runs_here(AMX), reason="no matrix unit here")
@pytest.mark.parametrize("tokens", [2000, 100_000])
def test_rounding_of_equal_weights_adds_up_within_the_tolerance(tokens, monkeypatch):
    monkeypatch.setenv("LOWBIT_ISA", "amx_int8")
    p = problem("attend h4/2 d64 q16 w8a8")
    k, v = LAYOUTS[1]
    equal = quantize(np.full((2, tokens, 64), 0.7, np.float32), p.stored("k"))
    operands = Operands(np.zeros((4, 16, 64), np.float32), equal, equal)
    chosen = candidate(p, k, v, pipeline=BFLOAT, rows=16, registers=1, block=288)
    result = CpuBackend().compile(p, chosen)(*packed_operands(p, chosen, operands))
    found = error(result, reference(p, operands, BFLOAT))
    assert 1e-3 < found < tolerance(p, operands, BFLOAT)

"""Register maps: the contraction that a plan describes, carried out in NumPy, is the contraction."""

import random

import numpy as np
import pytest
from lowbit.kernels.cpu.mapping import TOKENS, Infeasible
from lowbit.kernels.cpu.plan import plan
from lowbit.kernels.cpu.space import mirrored, orders
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import pack
from lowbit.kernels.packing import packings
from lowbit.kernels.quantize import Quantized

HEAD_DIMS = (64, 80, 96, 128, 256)
ALL_ORDERS = list(dict.fromkeys([*orders(), *filter(None, map(mirrored, orders()))]))


def stored(layout, tokens, head_dim, seed):
    """One head of random codes, as int64 or float64, and its bytes followed by garbage that loads may run into."""
    rng = np.random.default_rng(seed)
    format = layout.packing.format
    if format == "fp16":
        codes = rng.integers(-40, 40, (1, tokens, head_dim)).astype(np.float16)
    else:
        largest = {"int8": 127, "int4": 7}[format]
        codes = rng.integers(-largest, largest + 1, (1, tokens, head_dim)).astype(np.int8)
    scales = np.zeros((1, tokens, 0 if format == "fp16" else -(-head_dim // 32)), np.float16)
    words = pack(Quantized(format, codes, scales), layout).words[0]
    garbage = np.zeros(256, np.uint8) if format == "fp16" else rng.integers(0, 256, 256).astype(np.uint8)
    return codes[0].astype(np.int64), np.concatenate([words, garbage])


def code_registers(vector, packing):
    """What unpacking makes of one vector: registers of signed codes in the order of their bits, or of the layout."""
    if packing.format == "fp16":
        return [vector.view(np.float16).astype(np.int64)]
    unsigned = [vector] if packing.bits == 8 else [vector & 15, vector >> 4]
    half = 1 << (packing.bits - 1)
    if packing.coding == "offset":
        signed = [r.astype(np.int64) - half for r in unsigned]
    else:
        signed = [(r.astype(np.int64) ^ half) - half for r in unsigned]
    if packing.in_order:
        pairs = np.stack(signed, axis=-1).reshape(-1, 16, 2)  # (128-bit lane, byte, nibble)
        return [pairs[:, :8].ravel(), pairs[:, 8:].ravel()]
    return signed


def operands(unit, registers, lanes, integer):
    """Accumulator operands of a unit: (lanes, codes of a lane)."""
    if not integer:
        return list(registers[unit.sources[0]].reshape(-1, lanes, 1))
    if unit.kind == "direct":
        return [registers[unit.sources[0]].reshape(lanes, 4)]
    four = np.stack([registers[source] for source in unit.sources], axis=-1).reshape(
        -1, 16, 4
    )  # (128-bit lane, byte, source)
    return [four[:, 4 * quarter : 4 * quarter + 4].reshape(lanes, 4) for quarter in range(4)]


def contract(region, words, base, pitch, packing, width, lanes, integer, small):
    """Lane sums of one region added up by output."""
    registers = {}
    for number, (row, byte) in enumerate(region.chunks):
        at = base + row * pitch + byte
        assert at + width <= len(words)
        for index, register in enumerate(code_registers(words[at : at + width], packing)):
            registers[number, index] = register
    y = np.zeros(1 + max(o for unit in region.units for output in unit.outputs for o in output.o), np.int64)
    for unit in region.units:
        codes = operands(unit, registers, lanes, integer)
        assert len(codes) == len(unit.outputs)
        for part, output in zip(codes, unit.outputs, strict=True):
            assert len(output.o) == len(output.r) == lanes
            slots = np.array([region.slots[r] for r in output.r])[:, None] * part.shape[1] + np.arange(part.shape[1])
            np.add.at(y, list(output.o), (part * small[slots]).sum(axis=1))
    return y


def carried_out(layout, head_dim, width, lanes, role, integer, registers, tokens=64):
    """Result of the plan and of the plain contraction, both integers."""
    p = plan(layout, head_dim, width, role, integer, registers, lanes)
    codes, words = stored(layout, tokens, head_dim, [head_dim, width])
    rng = np.random.default_rng(head_dim)
    regions = [(p.main, trip) for trip in range(p.trips)] + ([(p.tail, p.trips)] if p.tail else [])
    common = (p.pitch_bytes, layout.packing, width, lanes, integer)
    if role == "k":
        x = rng.integers(-100, 100, head_dim)
        y = np.zeros(tokens, np.int64)
        step = p.any.outputs
        assert TOKENS % step == 0
        for t in range(0, tokens, step):
            base = t // p.tile * p.pitch_bytes + t % p.tile // step * p.token_step_bytes
            start = 0
            for region, trip in regions:
                small = np.array([x[start + r] if start + r < head_dim else 0 for r in region.order])
                part = contract(region, words, base + trip * p.channel_step_bytes, *common, small)
                assert len(part) == step
                y[t : t + step] += part
                start += region.reductions
            assert start >= head_dim
        return y, codes @ x
    x = rng.integers(0, 100, tokens)
    y = np.zeros(head_dim, np.int64)
    for t in range(0, tokens, TOKENS):
        start = 0
        for region, trip in regions:
            base = t // p.tile * p.pitch_bytes + trip * p.channel_step_bytes
            part = contract(region, words, base, *common, x[t + np.array(region.order)])
            y[start : start + region.outputs] += part[: region.outputs]
            start += region.outputs
        assert start == head_dim
    return y, x @ codes


@pytest.mark.parametrize(
    ("width", "lanes", "integer"),
    [(16, 4, True), (32, 8, True), (64, 16, True), (16, 4, False), (16, 8, False), (64, 16, False)],
)
@pytest.mark.parametrize("role", ["k", "v"])
def test_the_plan_contracts_what_the_layout_stores(width, lanes, role, integer):
    """A sample of orders, packings, head dimensions and register counts, with each packing in it."""
    choose = random.Random(f"{width} {lanes} {role} {integer}")
    formats = ("int8", "int4") if integer else ("fp16", "int8", "int4")
    feasible, reasons = set(), set()
    for packing in (p for f in formats for p in packings(f)):
        for head_dim in choose.sample(HEAD_DIMS, 2):
            for order in (choose.choice(ALL_ORDERS), "T D" if role == "k" else "T/32 D t32"):
                layout = Layout.parse(f"{order} | {packing.name} | pad {choose.choice([0, 64])}")
                try:
                    found, expected = carried_out(
                        layout, head_dim, width, lanes, role, integer, choose.choice([1, 2, 4])
                    )
                except Infeasible as reason:
                    assert str(reason)
                    assert "\n" not in str(reason)
                    reasons.add(str(reason))
                    continue
                np.testing.assert_array_equal(found, expected, f"{layout} head_dim {head_dim}")
                feasible.add((packing.name, head_dim))
    assert len({name for name, _ in feasible}) >= sum(len(packings(f)) for f in formats) - 1


@pytest.mark.parametrize("head_dim", [8, 24, 40, 72, 112])
@pytest.mark.parametrize("role", ["k", "v"])
@pytest.mark.parametrize("packing", ["int8/bytes/offset", "int4/contiguous/signed", "fp16"])
def test_rows_that_end_inside_a_vector(head_dim, role, packing):
    """Row-major storage: loads run on into the next row, or past the last one, without touching the result."""
    layout = Layout.parse(f"T D | {packing}")
    for integer in (True, False) if packing != "fp16" else (False,):
        found, expected = carried_out(layout, head_dim, 32, 8, role, integer, 2)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("name", "role", "integer", "reason"),
    [
        ("T D | int8/bytes/signed | fold 32", "k", True, "no height limit"),
        ("D T | int8/bytes/signed", "k", True, "channels outermost"),
        ("T/48 D t48 | int8/bytes/signed", "k", True, "a tile of 48 tokens does not divide"),
        ("T/16 D/64 t16 d64 | int8/bytes/signed", "k", True, "80 channels are no whole number of 64-channel tiles"),
        ("T D | int4/planes/signed", "k", True, "a row of 80 codes is no whole number of 64-code blocks"),
        ("T/32 D/16 t32/2 d16 t2 | int8/bytes/signed", "k", True, "a 32-bit lane would mix outputs"),
    ],
)
def test_reasons_for_what_cannot_be(name, role, integer, reason):
    with pytest.raises(Infeasible, match=reason) as caught:
        plan(Layout.parse(name), 80, 32, role, integer, 2)
    assert "\n" not in str(caught.value)


def test_more_registers_give_more_accumulators():
    layout = Layout.parse("T/16 D/4 t16 d4 | int8/bytes/signed")
    held = [len(plan(layout, 128, 32, "k", True, registers).any.lanes) for registers in (1, 2, 4)]
    assert held == [1, 2, 4]


def test_a_tile_of_lanes_needs_no_reordering():
    """``T/16 D/4 t16 d4`` on 16 lanes: one load is one register of 16 tokens × 4 channels, queries stay in order."""
    p = plan(Layout.parse("T/16 D/4 t16 d4 | int8/bytes/signed"), 128, 64, "k", True, 1)
    assert p.any.outputs == 16
    assert p.any.order == list(range(p.any.reductions))
    assert [unit.outputs[0].o for unit in p.any.units] == [tuple(range(16))] * (p.any.reductions // 4)
    assert [byte for _, byte in p.any.chunks] == list(range(0, 64 * len(p.any.chunks), 64))

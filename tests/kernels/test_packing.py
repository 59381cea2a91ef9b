"""Packings: placements are bijections, bytes are as documented, and users can add their own."""

import numpy as np
import pytest
from kernel_check import candidate, check, legal, problem
from lowbit.kernels import packing as registry_module
from lowbit.kernels.cpu.backend import CpuBackend
from lowbit.kernels.errors import CompileError, LayoutError
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import pack
from lowbit.kernels.packing import Packing, packing_named, packings, register_packing
from lowbit.kernels.quantize import Quantized

ALL = [p for f in ("fp16", "int8", "int4") for p in packings(f)]


@pytest.mark.parametrize("packing", ALL, ids=lambda p: p.name)
def test_placement_uses_every_slot_of_a_block_once(packing):
    """Also for several blocks: the second one starts where the first one ends."""
    codes = 3 * packing.block_codes
    byte, shift = packing.address(np.arange(codes))
    slots = sorted((byte * 8 + shift).tolist())
    assert slots == list(range(0, codes * packing.bits, packing.bits))
    assert (shift < 8).all()
    assert packing.block_bytes * 8 == packing.block_codes * packing.bits


def test_built_in_names():
    names = {p.name for p in ALL}
    arrangements = ("int4/contiguous", "int4/contiguous_permuted", "int4/lane_interleaved", "int4/planes", "int8/bytes")
    assert names == {"fp16", *(f"{a}/{coding}" for a in arrangements for coding in ("signed", "offset"))}
    assert all(packing_named(p.name) is p for p in ALL)
    assert {p.offset for p in ALL if p.coding == "offset"} == {8, 128}
    with pytest.raises(LayoutError, match="unknown packing 'int4/spiral/signed': known are fp16"):
        packing_named("int4/spiral/signed")


def packed_bytes(codes, layout):
    quantized = Quantized("int4", np.array(codes, np.int8)[None], np.ones((1, 1, -(-len(codes[0]) // 32)), np.float16))
    return pack(quantized, Layout.parse(layout)).words[0]


ONE_TO_EIGHT = [[1, 2, 3, 4, 5, 6, 7, -1]]


@pytest.mark.parametrize(
    ("arrangement", "expected"),
    [
        ("contiguous/signed", [0x21, 0x43, 0x65, 0xF7]),
        ("contiguous/offset", [0xA9, 0xCB, 0xED, 0x7F]),
        ("contiguous_permuted/signed", [0x21, 0x43, 0x65, 0xF7]),
        ("lane_interleaved/signed", [0x51, 0x62, 0x73, 0xF4]),
        ("lane_interleaved/offset", [0xD9, 0xEA, 0xFB, 0x7C]),
    ],
)
def test_bytes_of_eight_codes(arrangement, expected):
    """Nibbles are 1 2 3 4 5 6 7 f as two's complement, and 9 a b c d e f 7 with 8 added."""
    assert packed_bytes(ONE_TO_EIGHT, f"T D | int4/{arrangement}")[:4].tolist() == expected


def test_bytes_of_planes():
    """Codes 0-31 in the low nibbles, codes 32-63 in the high ones."""
    codes = [[i % 7 for i in range(32)] + [-(i % 5) for i in range(32)]]
    words = packed_bytes(codes, "T D | int4/planes/signed")
    assert words[:32].tolist() == [i % 7 | (-(i % 5) & 15) << 4 for i in range(32)]


def test_int8_bytes():
    quantized = Quantized("int8", np.array([[[-127, -1, 0, 1, 127]]], np.int8), np.ones((1, 1, 1), np.float16))
    signed = pack(quantized, Layout.parse("T D | int8/bytes/signed")).words[0]
    offset = pack(quantized, Layout.parse("T D | int8/bytes/offset")).words[0]
    assert signed[:5].tolist() == [129, 255, 0, 1, 127]
    assert offset[:5].tolist() == [1, 127, 128, 129, 255]


def pairs_high_first(index):
    return index // 2, 4 - index % 2 * 4


def int4(arrangement, place, **options):
    return Packing("int4", arrangement, 4, **{"block_codes": 2, "place": place, **options})


@pytest.mark.parametrize(
    "packing",
    [
        int4("overlapping", lambda i: (i // 2, i * 0)),
        int4("outside", lambda i: (i // 2 + 1, i % 2 * 4)),
        int4("unaligned", lambda i: (i // 2, i % 2 * 3)),
        int4("wide_shift", lambda i: (i * 0, i * 4), block_codes=4),
        int4("half_a_byte", lambda i: (i * 0, i * 0), block_codes=1),
        int4("empty", lambda i: (i, i), block_codes=0),
        int4("coded", pairs_high_first, coding="grey"),
        Packing("int8", "narrow", 4, 2, pairs_high_first),
        Packing("int3", "threes", 3, 8, lambda i: (i * 3 // 8, i * 3 % 8)),
    ],
    ids=lambda p: p.arrangement,
)
def test_impossible_packings_are_refused(packing, registry):
    with pytest.raises(LayoutError, match="packing '"):
        register_packing(packing)
    assert packing.name not in registry


def test_a_taken_name_is_refused_and_a_repetition_is_not(registry):
    first = register_packing(int4("mine", pairs_high_first))
    assert register_packing(int4("mine", pairs_high_first)).name == first.name
    for other in (int4("mine", lambda i: (i // 2, 4 - i % 2 * 4)), int4("mine", pairs_high_first, in_order=True)):
        with pytest.raises(LayoutError, match="'int4/mine/signed' is already registered"):
            register_packing(other)
    with pytest.raises(LayoutError, match="already registered"):
        register_packing(int4("contiguous", pairs_high_first))
    assert registry["int4/contiguous/signed"].in_order
    assert registry_module.packings("int4")[-1].name == "int4/mine/signed"


def scrambled(index):
    """64 codes in an order without any pattern."""
    slots = np.random.default_rng(7).permutation(64)[index]
    return slots // 2, slots % 2 * 4


def rotated_bytes(index):
    """A code's byte is the one before its own."""
    return (index - 1) % 32, np.zeros_like(index)


@pytest.mark.parametrize(("coding", "in_order"), [("signed", False), ("offset", True)])
def test_a_registered_packing_is_tuned_and_computes_the_same(registry, coding, in_order):
    for name in [name for name in registry if name.startswith("int4/")]:
        del registry[name]
    arrangement = "high_first_in_order" if in_order else "high_first"  # code is cached by name for the process
    register_packing(int4(arrangement, pairs_high_first, coding=coding, in_order=in_order))
    p = problem("attend h3/1 d64 q1 w4a8")
    found = legal(p)
    assert {c.k.packing.name for c in found} == {f"int4/{arrangement}/{coding}"}
    assert {c.pipeline for c in found} == {"integer", "float"}
    for chosen in (found[0], found[-1], found[len(found) // 3]):
        check(p, chosen, 77)


def within_groups(index):
    """32 codes in an order without any pattern."""
    slots = np.random.default_rng(7).permutation(32)[index]
    return slots // 2, slots % 2 * 4


def across_groups(index):
    slots = np.random.default_rng(7).permutation(64)[index]
    return slots // 2, slots % 2 * 4


@pytest.mark.parametrize("pipeline", ["integer", "float"])
def test_placement_without_pattern(registry, pipeline):
    register_packing(int4("scrambled", within_groups, block_codes=32))
    p = problem("qk h4/2 d128 q2 w4a8")
    check(p, candidate(p, "T D | int4/scrambled/signed", pipeline=pipeline), 45)


def test_integers_of_different_scales_are_not_added(registry):
    """A placement that puts channels of two scale groups into one lane serves floats only."""
    register_packing(int4("across", across_groups, block_codes=64))
    p = problem("qk h4/2 d128 q2 w4a8")
    check(p, candidate(p, "T D | int4/across/signed", pipeline="float"), 45)
    with pytest.raises(CompileError, match="would mix scales"):
        CpuBackend().compile(p, candidate(p, "T D | int4/across/signed"))


def test_an_eight_bit_packing_of_ones_own(registry):
    register_packing(Packing("int8", "rotated", 8, 32, rotated_bytes, coding="offset"))
    p = problem("attend h2/2 d96 q1 w8a8")
    for pipeline in ("integer", "float"):
        check(p, candidate(p, "T D | int8/rotated/offset", "T/32 D t32 | int8/rotated/offset", pipeline), 33)


def test_own_instructions_replace_the_built_in_unpacking(registry):
    """The nibbles by a multiplication and a division, which no built-in unpacking uses."""
    calls = []

    def lower(emit, word):
        calls.append(word.type.count)
        sixteen = emit.constant(word.type.element, word.type.count, 16)
        low = emit.builder.udiv(emit.builder.mul(word, sixteen), sixteen)
        return [low, emit.builder.udiv(word, sixteen)]

    register_packing(int4("divided", pairs_high_first, lower=lower))
    register_packing(int4("swapped", pairs_high_first, lower=lambda emit, word: lower(emit, word)[::-1]))
    p = problem("attend h3/1 d128 q1 w4a8")
    chosen = candidate(p, "T D | int4/divided/signed", "T/32 D t32 | int4/divided/signed")
    text = CpuBackend().code(p, chosen)[0].ir
    assert calls
    assert " mul <" in text
    check(p, chosen, 40)
    # Registers in the wrong order must show: what is compared is really made by ``lower``.
    wrong = candidate(p, "T D | int4/swapped/signed", "T/32 D t32 | int4/swapped/signed")
    with pytest.raises(AssertionError, match="exceeds"):
        check(p, wrong, 40)

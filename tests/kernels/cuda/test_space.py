"""Spaces of GPU problems: what is offered, how much of it, and what is refused with which reason."""

import functools

import pytest
from kernel_check import problem
from lowbit.kernels.backend import Rejected
from lowbit.kernels.candidate import Candidate, Schedule
from lowbit.kernels.cuda.arch import ARCHITECTURES
from lowbit.kernels.cuda.space import KEY_ORDERS, VALUE_ORDERS, natural_lanes, rejection, space
from lowbit.kernels.layout import Layout
from lowbit.kernels.packing import packings

pytest.importorskip("numba_cuda")

LLAMA = "attend h24/8 d128 q1"


@functools.cache
def legal(key, arch="sm_86"):
    return [candidate for candidate in space(problem(key), arch) if not isinstance(candidate, Rejected)]


def codes(candidates):
    return {(c.k, c.v, c.pipeline, c.plan.code) for c in candidates}


@pytest.mark.parametrize(
    ("key", "most"),
    [
        (f"{LLAMA} w4a8", 150),
        (f"{LLAMA} w8a8", 80),
        (f"{LLAMA} fp16", 80),
        (f"{LLAMA} w8a8+w4a8", 150),
        ("attend h32/4 d80 q4 w4a8", 150),
        ("gemv k3072 c1 w4a8", 150),
        ("gemv k3072 c4 w8a8", 80),
        ("gemv k8192 c1 fp16", 80),
    ],
)
def test_what_is_to_be_compiled_stays_within_minutes(key, most):
    found = legal(key)
    assert len(codes(found)) <= most
    assert len(codes(found)) >= 15
    assert len(found) <= 800


def test_every_layout_and_packing_is_offered():
    found = legal(f"{LLAMA} w4a8")
    assert {c.k.order for c in found} == set(KEY_ORDERS)
    assert {c.v.order for c in found} >= set(VALUE_ORDERS) - {"T/32 D/32 t32/4 d32 t4"}
    assert {c.v.order for c in legal(f"{LLAMA} w8a8")} == set(VALUE_ORDERS)
    for role in ("k", "v"):
        assert {getattr(c, role).packing for c in found} == set(packings("int4"))
        assert {getattr(c, role).pad_bytes for c in found} == {0, 16}
    assert {c.pipeline for c in found} == {"integer", "raw", "float"}


def test_one_thing_at_a_time_is_changed_in_what_is_compiled_in():
    found = legal(f"{LLAMA} w8a8")
    for name, least in (("rows", 3), ("lanes", 4), ("loads", 4), ("stages", 3)):
        assert len({getattr(c.plan, name) for c in found}) >= least
    assert {c.plan.stages for c in legal(f"{LLAMA} w8a8", "sm_75")} == {0}


@pytest.mark.parametrize(("key", "heads"), [("attend h8/8 d64 q1 w8a8", 8), ("attend h8/1 d64 q1 w8a8", 1)])
def test_splits_are_powers_of_two_from_one_to_a_thousand_blocks(key, heads):
    splits = {c.plan.splits for c in legal(key)}
    assert min(splits) == 1
    assert all(each & (each - 1) == 0 for each in splits)
    assert 512 <= max(splits) * heads <= 1024
    assert {c.plan.warps for c in legal(key)} >= {2, 4, 8, 16}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_has_a_space(arch):
    assert len(codes(legal("attend h4/2 d64 q1 w8a8", arch))) > 40


def test_natural_lanes_use_whole_sectors():
    """Row-major keys of one byte need two lanes' 16 bytes for a sector of 32; tiles in vectors need one lane."""
    for name, lanes in (
        ("T D | int8/bytes/signed", 2),
        ("T D | int4/planes/signed", 2),
        ("T D | fp16", 2),
        ("T/32 D/16 t32 d16 | int8/bytes/signed", 1),
        ("T/32 D/32 t32 d32 | int4/lane_interleaved/offset", 1),
        ("T/32 D/32 t32 d32 | int8/bytes/signed", 2),
        ("T/32 D t32 | int8/bytes/signed", 4),
    ):
        assert natural_lanes(Layout.parse(name), 128) == lanes, name


def test_shares_of_sectors_are_those_of_the_addresses():
    from lowbit.kernels.cuda.mapping import key_tilings

    for name, lanes, share in (("T D | int8/bytes/signed", 1, 0.5), ("T D | int8/bytes/signed", 8, 1.0)):
        tiling = next(key_tilings(Layout.parse(name), 128, lanes))
        assert tiling.sector_share == share


@pytest.mark.parametrize(
    ("key", "k", "v", "pipeline", "reason"),
    [
        (
            "qk h1/1 d64 q1 w8a8",
            "T D | int8/bytes/signed",
            "T D | int8/bytes/signed",
            "integer",
            "needs other operands",
        ),
        ("attend h1/1 d64 q1 w8a8", "T D | int8/bytes/signed", None, "integer", "attend needs other operands than k"),
        ("qk h1/1 d64 q1 w8a8", "T D | fp16", None, "integer", "holds fp16"),
        ("qk h1/1 d64 q1 w8a8", "T D | int8/bytes/signed", None, "bfloat", "no pipeline 'bfloat'"),
        ("qk h1/1 d64 q1 w8a8", "T D | int8/bytes/signed", None, "raw", "raw pipeline is for 4-bit"),
        ("qk h1/1 d64 q1 w8a8", "D T | int8/bytes/signed", None, "integer", "32 tokens"),
        ("qk h1/1 d64 q1 w8a8", "T/24 D t24 | int8/bytes/signed", None, "integer", "32 tokens"),
        ("qk h1/1 d64 q1 w8a8", "T D | int8/bytes/signed | fold 64", None, "integer", "not folded"),
        ("qk h1/1 d80 q1 w4a8", "T D | int4/planes/signed", None, "integer", "no whole number of 64-code blocks"),
    ],
)
def test_what_cannot_be_built_is_told(key, k, v, pipeline, reason):
    like = legal("qk h1/1 d64 q1 w8a8")[0]
    candidate = Candidate(k and Layout.parse(k), v and Layout.parse(v), pipeline, like.plan)
    told = rejection(problem(key), candidate, "sm_86")
    assert told is not None
    assert reason in told
    assert "\n" not in told


def test_a_schedule_is_no_launch():
    candidate = Candidate(Layout.parse("T D | fp16"), None, "float", Schedule(1, 1, 64, 1, 0, 1))
    assert "launch" in rejection(problem("qk h1/1 d64 q1 fp16"), candidate, "sm_86")

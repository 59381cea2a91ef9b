"""Compiled kernels: their very PTX run on a machine of PTX, every architecture, and what their code looks like."""

import functools
import re
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("numba_cuda")
from agreement import agree
from compiled import run_compiled
from kernel_check import problem
from lowbit.costmodel.kernel_counts import count_kernel
from lowbit.kernels.backend import Rejected
from lowbit.kernels.candidate import Candidate, Launch
from lowbit.kernels.cuda import program, ptx, toolchain
from lowbit.kernels.cuda.arch import ARCHITECTURES
from lowbit.kernels.cuda.backend import CudaBackend
from lowbit.kernels.cuda.marks import TILE
from lowbit.kernels.cuda.space import space
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import pack
from lowbit.kernels.problem import Problem
from lowbit.kernels.reference import make_operands
from pairwise import pairwise

needs_tools = pytest.mark.skipif(not toolchain.available(), reason="needs ptxas and nvdisasm")


@functools.cache
def legal(p, arch="sm_86"):
    return [candidate for candidate in space(p, arch) if not isinstance(candidate, Rejected)]


def check(p, candidate, tokens, arch="sm_86"):
    operands = make_operands(p, tokens)
    packed = {role: pack(getattr(operands, role), getattr(candidate, role)) for role in p.roles}
    result = run_compiled(p, candidate, operands.x, packed, arch)
    agree(p, operands, candidate.pipeline, result, f"{p.key}, {tokens} tokens, {arch}: {candidate.name}")


ROWS = pairwise(
    {
        "operator": ("attend", "qk", "sv", "gemv"),
        "precision": ("fp16", "w8a8", "w4a8"),
        "pipeline": ("integer", "float", "raw"),
        "head_dim": (64, 96, 256),
        "group": (1, 3),
        "tokens": (1, 33, 161),
        "stages": (0, 3),
    },
    allowed=lambda row: (
        not (row["precision"] == "fp16" and row["pipeline"] != "float")
        and not (row["precision"] == "w8a8" and row["pipeline"] == "raw")
        and not (row["operator"] != "attend" and row["stages"])
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_the_very_code_that_ships_is_right(row):
    group = row["group"]
    gemv = row["operator"] == "gemv"
    p = Problem(row["operator"], 1 if gemv else group, 1, row["head_dim"], row["precision"], group if gemv else 1)
    found = [c for c in legal(p) if c.pipeline == row["pipeline"] and c.plan.stages == row["stages"]]
    candidate = found[ROWS.index(row) * 31 % len(found)]
    plan = replace(
        candidate.plan, splits=1 if gemv else min(row["tokens"] // 32 + 1, 3), warps=min(candidate.plan.warps, 2)
    )
    check(p, replace(candidate, plan=plan), row["tokens"])


MASKS = ("q3", "q2 {} window 7", "q2 {} window 40", "q2 {} softcap 2", "q2 {} softcap 1e6")


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    rows, _, rest = mask.partition(" {}")
    p = problem(f"attend h2/1 d64 {rows} w8a8{rest}")
    candidate = legal(p)[0]
    check(p, replace(candidate, plan=replace(candidate.plan, splits=3, warps=2)), 129)


def small_candidate():
    return Candidate(
        Layout.parse("T/32 D/32 t32 d32 | int4/lane_interleaved/offset"),
        Layout.parse("T/8 D t8 | int4/lane_interleaved/offset"),
        "integer",
        Launch(1, 1, 2, 0, 1, 2),
    )


@needs_tools
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_has_code_of_every_operator(arch):
    """Compiles, assembles, does not spill, and computes the same."""
    backend = CudaBackend(arch)
    for key in ("attend h2/1 d64 q1 w4a8", "gemv k128 c1 w8a8"):
        p = problem(key)
        candidate = legal(p, arch)[0]
        candidate = replace(candidate, plan=replace(candidate.plan, splits=1, warps=2))
        (code,) = backend.code(p, candidate)
        assert code.arch == arch
        assert code.language == "sass"
        assert code.spill_bytes == 0
        assert 16 <= code.registers <= 255
        shipped = backend.shipped(p, candidate)
        assert all(each.cubin.arch == arch and each.cubin.image.startswith(b"\x7fELF") for each in shipped)
        check(p, candidate, 33, arch)


@needs_tools
def test_staged_code_copies_asynchronously_where_it_can():
    p = problem("attend h2/1 d64 q1 w8a8")
    candidate = next(c for c in legal(p, "sm_80") if c.plan.stages)
    (code,) = CudaBackend("sm_80").code(p, candidate)
    assert "cp.async.cg.shared.global" in code.ir
    assert "LDGSTS" in code.assembly
    assert not any(c.plan.stages for c in legal(p, "sm_75"))


def opcodes(code):
    """Opcodes of SASS with their modifiers, in order."""
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code.assembly)


def tile_loop(code):
    """Instructions in one pass of the tile loop, by class, and by opcode."""
    loops = [loop for loop in count_kernel(code).loops if loop.mark == TILE]
    longest = max(loops, key=lambda loop: loop.marks)
    return (
        {name: count / longest.marks for name, count in longest.counts.items()},
        {name: count / longest.marks for name, count in longest.opcodes.items()},
    )


@needs_tools
def test_integer_code_is_what_the_pipeline_promises():
    """The hot loop of one small kernel: a dot for four codes, whole words loaded, no conversion of integers."""
    p = problem("attend h1/1 d64 q1 w4a8")
    (code,) = CudaBackend("sm_86").code(p, small_candidate())
    counts, names = tile_loop(code)
    # A lane's token has 64 channels, and a lane's two channels have 32 tokens: 16 words of dots each, and one dot with
    # ones for the weights' sum, which takes the offset of the codes off.
    assert 32 <= counts["dot"] <= 33
    assert sum(count for name, count in names.items() if name.startswith("LDG") and ".128" in name) >= 2
    # One mask for low nibbles and one for high ones of eight codes.
    assert counts["logic"] >= 16
    assert not any(name.startswith(("I2F", "F2I")) for name in names)
    assert {"MUFU.EX2", "SHFL.BFLY"} <= set(names)
    assert not any(name.startswith(("LDL", "STL")) for name in opcodes(code))


@needs_tools
def test_float_code_converts_and_has_no_dots():
    p = problem("attend h1/1 d64 q1 w4a8")
    (code,) = CudaBackend("sm_86").code(p, replace(small_candidate(), pipeline="float"))
    counts, names = tile_loop(code)
    assert not counts.get("dot")
    assert sum(count for name, count in names.items() if name.startswith("FFMA")) >= 128


def test_text_of_a_small_kernel():
    """PTX of one kernel: what it takes, and the instructions of one of its tiles, however often they are unrolled."""
    p = problem("qk h1/1 d32 q1 w8a8")
    layout = Layout.parse("T/32 D/16 t32 d16 | int8/bytes/signed")
    candidate = Candidate(layout, None, "integer", Launch(1, 1, 2, 0, 1, 1))
    text = ptx.compile_entry(program.build(p, candidate, "sm_86").main, "sm_86")
    assert re.findall(r"\.param \.(\w+) \w+_param_\d+,?\n", text) == ["u64"] * 6 + ["u32"] * 3 + ["f32"]
    vectors = text.count("ld.global.nc.L1::no_allocate.v4.b32")
    assert vectors > 0
    assert vectors % 2 == 0
    tiles = vectors // 2  # 32 channels of a token are two vectors
    assert text.count("ld.global.nc.b16") == tiles  # one scale
    assert text.count("dp4a.s32.s32") == 8 * tiles
    assert text.count("st.global") == tiles
    assert "pmevent" not in text
    assert "call" not in text
    marked = ptx.compile_entry(program.build(p, candidate, "sm_86", marks=True).main, "sm_86")
    assert f"pmevent {TILE};" in marked


def test_code_is_the_same_for_problems_that_differ_at_run_time():
    candidate = small_candidate()
    backend = CudaBackend("sm_86")
    keys = ("attend h1/1 d64 q1 w4a8", "attend h24/8 d64 q1 w4a8", "attend h2/2 d64 q5 w4a8 window 100")
    assert len({backend.tiles(problem(key), candidate) for key in keys}) == 1
    others = [replace(candidate, plan=replace(candidate.plan, **{name: 2})) for name in ("splits", "warps", "rows")]
    tiles = [backend.tiles(problem(keys[0]), other) for other in (candidate, *others)]
    assert tiles[0] == tiles[1] == tiles[2] != tiles[3]
    assert backend.tiles(problem(keys[0]), candidate) != CudaBackend("sm_80").tiles(problem(keys[0]), candidate)
    assert backend.tiles(problem("attend h1/1 d64 q1 w4a8 softcap 3"), candidate) != tiles[0]


def test_values_of_a_pass():
    """A tile's codes divided by the lanes, and for a matrix those of a step's loads."""
    backend = CudaBackend("sm_86")
    for key, expected in (("attend h1/1 d64 q1 w4a8", 128), ("qk h1/1 d64 q1 w8a8", 64), ("sv h1/1 d96 q1 w8a8", 96)):
        p = problem(key)
        assert backend.code(p, legal(p)[0])[0].values_per_iteration == expected
    p = problem("gemv k256 c1 w8a8")
    candidate = next(c for c in legal(p) if c.k.order == "T D")
    built = program.build(p, candidate, "sm_86")
    assert backend.code(p, candidate)[0].values_per_iteration == 256 // built.keys.count


def test_results_are_not_zeros_by_chance():
    """The comparison itself can fail: a kernel run on other keys than the reference's is told."""
    p = problem("qk h1/1 d32 q1 w8a8")
    candidate = legal(p)[0]
    operands, others = make_operands(p, 33), make_operands(p, 33, seed=1)
    result = run_compiled(p, candidate, operands.x, {"k": pack(others.k, candidate.k)})
    assert np.isfinite(result).all()
    with pytest.raises(AssertionError, match="exceeds"):
        agree(p, operands, "integer", result, "other keys")

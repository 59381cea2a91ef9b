from __future__ import annotations

import json

import pytest
from lowbit.costmodel.assembly import CLASSES
from lowbit.costmodel.features import Features, features
from lowbit.costmodel.tile import TileCounts, count
from lowbit.costmodel.traffic import call_bytes
from lowbit.kernels.backend import Code
from lowbit.kernels.candidate import Candidate, Schedule
from lowbit.kernels.errors import LayoutError, ProblemError
from lowbit.kernels.layout import Layout
from lowbit.kernels.problem import Problem

SCHEDULE = Schedule(rows=4, registers=1, block=32, splits=3, prefetch=0, threads=2)
LAYOUT = Layout.parse("T/16 D/4 t16 d4 | int4/planes/offset")

# 64 values an iteration: two loads, two unpacking instructions, a dot with its load, a scalar add, a branch.
K = "f:\n.LA: # %once.per.64.values.\n\tvmovdqu (%rdi,%rax), %ymm0\n\tvpand %ymm7, %ymm0, %ymm1\n"
K += "\tvpsrlw $4, %ymm1, %ymm1\n\tvpdpbusd (%rsi,%rax), %ymm1, %ymm6\n"
K += "\taddq $32, %rax\n\tjne .LA\n\tretq\n.Lfunc_end0:\n"
# 16 values an iteration: a converting load, an FMA, a branch.
V = "f:\n.LA: # %once.per.16.values.\n\tvcvtph2ps (%rdi,%rax), %ymm0\n"
V += "\tvfmadd231ps %ymm0, %ymm5, %ymm6\n\tjne .LA\n\tretq\n.Lfunc_end0:\n"


def tiles(k_rows: int = 4, v_rows: int = 8) -> list[TileCounts]:
    return [count(Code("k", "f", "", K, 64, k_rows, "p")), count(Code("v", "f", "", V, 16, v_rows, "p"))]


def test_features_of_an_attention_call() -> None:
    problem = Problem("attend", heads=12, kv_heads=2, head_dim=128, precision="w4a8", query_rows=2)
    candidate = Candidate(LAYOUT, LAYOUT, "integer", SCHEDULE)
    found = features(problem, candidate, 100, tiles(), 64)
    # 12 rows meet a head: 3 passes of 4 over the keys, 2 of 8 over the values. 100 tokens are 4 blocks of 32.
    k_iterations = 3 * 2 * 128 * 128 / 64
    v_iterations = 2 * 2 * 128 * 128 / 16
    assert found.instructions == {
        **dict.fromkeys(CLASSES, 0.0),
        "load": 2 * k_iterations + v_iterations,
        "mask": k_iterations,
        "shift": k_iterations,
        "dot": k_iterations,
        "address": k_iterations,
        "convert": v_iterations,
        "arithmetic": v_iterations,
        # Each return runs once for every pass over a block of 32 tokens and all channels.
        "branch": k_iterations + v_iterations + 2 * 4 * (3 + 2),
    }
    assert found.unpack_ops == 2 * k_iterations + v_iterations
    assert found.unpack_ops_per_32 == (1.0 + 2.0) / 2
    assert found.bytes == call_bytes(problem, candidate, 100, 64)
    # Queries and results: 12 heads × 2 positions × 128 channels of float32 each.
    assert found.working_set_bytes == found.bytes + 2 * 12 * 2 * 128 * 4
    assert found.exponentials == 12 * 2 * 100
    assert (found.tasks, found.threads) == (6, 2)


@pytest.mark.parametrize(("operator", "role"), [("qk", 0), ("sv", 1)])
def test_features_of_one_operand(operator: str, role: int) -> None:
    problem = Problem(operator, heads=4, kv_heads=2, head_dim=64, precision="w4a8")
    candidate = Candidate(None if role else LAYOUT, LAYOUT if role else None, "integer", SCHEDULE)
    found = features(problem, candidate, 64, [tiles()[role]], 64)
    # The loop's branch, and a return for each of 2 heads × 2 blocks.
    assert found.instructions["branch"] == 2 * 64 * 64 / (16 if role else 64) + 4
    assert found.exponentials == 0
    # A row of 64 channels and one of 64 scores for each of 4 heads.
    assert found.working_set_bytes - found.bytes == 4 * (64 + 64) * 4


def test_a_candidate_without_the_layout_is_refused() -> None:
    problem = Problem("sv", heads=1, kv_heads=1, head_dim=64, precision="w4a8")
    with pytest.raises(LayoutError, match="'v'"):
        features(problem, Candidate(LAYOUT, None, "integer", SCHEDULE), 64, [tiles()[1]], 64)
    with pytest.raises(ProblemError, match="tokens"):
        features(problem, Candidate(None, LAYOUT, "integer", SCHEDULE), 0, [tiles()[1]], 64)


def test_features_survive_json() -> None:
    problem = Problem("attend", heads=4, kv_heads=2, head_dim=64, precision="w4a8")
    found = features(problem, Candidate(LAYOUT, LAYOUT, "integer", SCHEDULE), 50, tiles(), 128)
    assert Features.from_dict(json.loads(json.dumps(found.as_dict()))) == found


def test_a_window_bounds_what_is_walked_and_weighted() -> None:
    candidate = Candidate(LAYOUT, LAYOUT, "integer", SCHEDULE)
    whole = Problem("attend", 12, 2, 128, "w4a8")
    narrow = Problem("attend", 12, 2, 128, "w4a8", window=96)
    capped = Problem("attend", 12, 2, 128, "w4a8", softcap=30.0)
    found = {p: features(p, candidate, 960, tiles(), 64) for p in (whole, narrow, capped)}
    # Tokens 864 … 959 are three whole blocks of 30.
    for kind in ("load", "dot", "convert"):
        assert found[narrow].instructions[kind] == found[whole].instructions[kind] / 10
    assert found[narrow].bytes == found[whole].bytes / 10
    assert found[narrow].exponentials == 12 * 96
    assert found[capped].exponentials == 2 * found[whole].exponentials
    assert found[capped].bytes == found[whole].bytes


def test_features_of_a_matrix() -> None:
    problem = Problem("gemv", 1, 1, 128, "w4a8", query_rows=5)
    candidate = Candidate(LAYOUT, None, "integer", SCHEDULE)
    found = features(problem, candidate, 100, tiles()[:1], 64)
    # Five vectors take two passes of four over 128 rows of 128 columns.
    assert found.instructions["dot"] == 2 * 128 * 128 / 64
    assert found.exponentials == 0
    assert (found.tasks, found.threads) == (3, 2)
    # Vectors and results: 5 × (128 columns + 100 rows) of float32.
    assert found.working_set_bytes == found.bytes + 5 * (128 + 100) * 4

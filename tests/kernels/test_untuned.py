"""What runs where nothing was tuned."""

from __future__ import annotations

from itertools import islice

import pytest
from kernel_check import check, problem
from lowbit.kernels.cpu.backend import CpuBackend
from lowbit.kernels.cpu.isa import ISAS
from lowbit.kernels.cpu.space import rejection, unpromising
from lowbit.kernels.packing import packings

KEYS = [
    f"attend h{heads} d{head_dim} q{rows} {precision}"
    for heads, head_dim, rows in (("9/3", 64, 1), ("32/32", 80, 1), ("14/2", 256, 1), ("3/1", 8, 3), ("4/2", 40, 16))
    for precision in ("fp16", "w8a8", "w4a8", "w8a8+w4a8", "fp16+w4a8")
] + ["qk h8/1 d256 q1 w4a8", "sv h8/1 d40 q1 w8a8", "gemv k576 c1 w4a8", "gemv k1536 c8 w8a8", "gemv k64 c16 fp16"]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("key", KEYS)
def test_all_are_worth_compiling_and_the_baseline_is_last(isa: str, key: str) -> None:
    asked, backend = problem(key), CpuBackend(isa)
    found = list(backend.untuned(asked, 2))
    assert found[-1] == backend.baseline(asked, 2)
    for each in found:
        assert rejection(asked, each, ISAS[isa]) is None and unpromising(asked, each, ISAS[isa]) is None, each
    layouts = [(each.layout, each.pipeline) for each in found[:-1]]
    assert len(set(layouts)) == len(layouts)
    # Codes stay integers wherever they can.
    assert found[0].pipeline == ("float" if asked.precision == "fp16" else "integer")


@pytest.mark.parametrize("isa", ["avx512_vnni", "avx2"])
@pytest.mark.parametrize("precision", ["w8a8", "w4a8", "w8a8+w4a8"])
def test_the_first_one_is_tiled_for_both_halves(isa: str, precision: str) -> None:
    first = next(CpuBackend(isa).untuned(problem(f"attend h32/8 d128 q1 {precision}"), 2))
    tokens = 32 if isa == "avx512_vnni" else 16
    assert first.k is not None and first.v is not None
    for layout, formats in ((first.k, precision.split("+")[0]), (first.v, precision.split("+")[-1])):
        channels = 4 if formats == "w8a8" else 8
        expected = {"k": f"T/{tokens} D/{channels} t{tokens} d{channels}"}
        expected["v"] = f"T/32 D/{tokens} t32/{channels} d{tokens} t{channels}"
        assert layout.order == expected["k" if layout is first.k else "v"]


def test_packings_of_plugins_are_among_the_others() -> None:
    found = CpuBackend("avx2").untuned(problem("qk h8/2 d64 q1 w4a8"), 2)
    assert {each.k.packing for each in found if each.k is not None} == set(packings("int4"))


@pytest.mark.parametrize("key", ["attend h4/2 d64 q1 w8a8+w4a8", "attend h3/1 d80 q1 fp16", "gemv k72 c3 w4a8"])
def test_they_compute_what_is_asked(key: str) -> None:
    for chosen in islice(CpuBackend().untuned(problem(key), 1), 2):
        check(problem(key), chosen, 77)

"""Spaces of matrices, and of attention whose keys and values differ in format."""

import pytest
from kernel_check import agree, legal, problem
from lowbit.kernels.backend import Rejected
from lowbit.kernels.cpu import matrices
from lowbit.kernels.cpu.backend import CpuBackend
from lowbit.kernels.cpu.isa import ISAS, isa_named
from lowbit.kernels.reference import make_operands


@pytest.mark.parametrize("key", ["gemv k96 c1 w8a8", "gemv k64 c7 w4a8", "gemv k40 c16 w8a8", "gemv k72 c3 fp16"])
def test_every_schedule_of_a_matrix_computes_it(key):
    wanted = problem(key)
    first = {}
    for candidate in legal(wanted, 2):
        first.setdefault((candidate.pipeline, candidate.schedule), candidate)
    assert len(first) >= 5
    operands = make_operands(wanted, 97)
    for candidate in first.values():
        kernel = CpuBackend().compile(wanted, candidate)
        result = kernel(operands.x, kernel.pack("k", operands.k))
        agree(wanted, operands, candidate.pipeline, result, candidate.name)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 6])
def test_all_threads_have_rows_of_a_matrix(isa, threads):
    for key in ("gemv k2048 c1 w4a8", "gemv k8192 c16 fp16"):
        found = matrices.schedules(problem(key), isa_named(isa), threads)
        assert len(set(found)) == len(found)
        assert all(each.splits >= each.threads for each in found)
        assert {each.threads for each in found} == {1, threads}
        assert all(each.rows <= problem(key).query_rows for each in found)
        assert any(each.prefetch for each in found) and any(not each.prefetch for each in found)


def test_matrices_are_tuned_for_every_packing_and_order():
    found = legal(problem("gemv k2048 c1 w4a8"), 2)
    assert {c.k.packing.coding for c in found} == {"signed", "offset"}
    assert len({c.k.order for c in found}) >= 5
    assert {c.pipeline for c in found} == {"integer", "float"}


@pytest.mark.parametrize("key", ["attend h4/2 d64 q1 w8a8+w4a8", "attend h4/2 d64 q1 w4a8+w8a8"])
def test_two_formats_are_about_as_many_candidates_as_one(key):
    mixed = list(CpuBackend().space(problem(key), 2))
    kept = [each for each in mixed if not isinstance(each, Rejected)]
    assert len(kept) <= len(legal(problem("attend h4/2 d64 q1 w4a8"), 2))
    left = [each for each in mixed if isinstance(each, Rejected) and "exclusive-or" in each.reason]
    assert left and all(each.compiles for each in left)
    for role in ("k", "v"):
        arrangements = {getattr(each, role).packing.arrangement for each in kept}
        dropped = {getattr(each.candidate, role).packing.arrangement for each in left}
        assert arrangements >= dropped  # only codings are dropped
    # Each pipeline keeps, for each role and arrangement, a coding.
    for pipeline in ("integer", "float"):
        assert {each.k.packing.format for each in kept if each.pipeline == pipeline} == {
            problem(key).stored("k").format
        }


def test_one_format_keeps_all_its_codings():
    found = legal(problem("attend h4/2 d64 q1 w8a8"), 2)
    assert {c.k.packing.coding for c in found} == {"signed", "offset"}

"""The peers that are installed here compute what they should. None of them has to be."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from lowbit.autotune.bench.case import TOLERANCE, Case
from lowbit.autotune.bench.contestant import Absent, Contestant, Unsupported, contestant_named
from lowbit.autotune.bench.inputs import relative_error, small_operand, truth
from lowbit.kernels.backend import backend_named
from lowbit.kernels.errors import ProblemError
from lowbit.kernels.problem import Problem

GGML = ("llama_cpp", "ik_llama_cpp")
ATTEND = [Case(Problem("attend", 4, 2, 64, precision, rows), 100) for precision in ("fp16", "w8a8") for rows in (1, 5)]
GEMV = [Case(Problem("gemv", 1, 1, 64, precision, vectors), 48) for precision in ("fp16", "w4a8") for vectors in (1, 3)]


def opened(name: str) -> Contestant:
    contestant = contestant_named(name)
    try:
        assert contestant.open(1)
    except Absent as error:
        pytest.skip(str(error))
    return contestant


def errors(contestant: Contestant, case: Case, candidate: str = "") -> dict[str, float]:
    """Error of each way in which the contestant stores the case."""
    found = {}
    for entry in contestant.enter(case, candidate):
        entry.wake()
        entry.run()
        assert entry.result is not None and entry.stored is not None
        assert all(size > 0 and address > 0 for address, size in entry.regions)
        found[entry.storage] = relative_error(entry.result(), truth(case, small_operand(case), entry.stored))
    return found


@pytest.mark.parametrize("case", [*ATTEND, *GEMV], ids=lambda case: case.key)
def test_numpy_agrees_with_float64(case: Case) -> None:
    contestant = opened("numpy")
    if case.kv != "fp16":
        with pytest.raises(Unsupported):
            errors(contestant, case)
        return
    (error,) = errors(contestant, case).values()
    assert error < 1e-5


@pytest.mark.parametrize("case", [*ATTEND, *GEMV], ids=lambda case: case.key)
def test_this_projects_kernels_take_part(case: Case) -> None:
    contestant = opened("lowbit")
    candidate = backend_named("cpu").baseline(case.problem, 1).name
    (error,) = errors(contestant, case, candidate).values()
    assert error < TOLERANCE


@pytest.mark.parametrize("case", [case for case in (*ATTEND, *GEMV) if case.kv == "fp16"], ids=lambda case: case.key)
def test_torch_agrees_with_float64(case: Case) -> None:
    found = errors(opened("torch"), case)
    assert set(found) == {"bfloat16", "float16"}
    assert max(found.values()) < TOLERANCE


@pytest.mark.parametrize("name", GGML)
@pytest.mark.parametrize("case", [*ATTEND, *GEMV], ids=lambda case: case.key)
def test_ggml_agrees_with_float64(name: str, case: Case) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    found = errors(opened(name), case)
    assert "f16" in found or found.keys() <= {"q8_0", "q4_0"}
    assert max(found.values()) < TOLERANCE


def test_an_absent_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Absent, match="pip install ik-llama-cpp-python"):
        contestant_named("ik_llama_cpp").open(1)


def test_a_package_without_its_library_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    spec = importlib.util.spec_from_file_location("llama_cpp", f"{tmp_path}/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(Absent, match="holds no ggml-base library"):
        contestant_named("llama_cpp").open(1)


def test_an_unknown_contestant_is_refused() -> None:
    with pytest.raises(ProblemError, match="unknown implementation 'mkl'"):
        contestant_named("mkl")


def test_the_limit_reads_as_many_bytes_as_the_case_has() -> None:
    contestant = opened("limit")
    case = Case(Problem("attend", 4, 2, 64, "w8a8"), 5000)
    ways = list(contestant.enter(case, ""))
    assert ways
    for entry in ways:
        entry.run()
        assert entry.wake() is not None
        assert entry.result is None
        assert entry.nbytes == pytest.approx(case.nbytes, rel=0.01)
        assert np.isfinite(entry.nbytes)

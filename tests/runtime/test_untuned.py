"""What `select` does where nothing fits: by a shipped cost model first, then by a rule of thumb."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lowbit.db import Store
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.errors import CompileError, NoWinnerError
from lowbit.kernels.problem import Problem
from lowbit.runtime import Database, FallbackWarning, open_db
from shipped_model import DESCRIPTION, MACHINE, Shown, ship

PROBLEM = Problem("attend", 4, 2, 64, "w8a8")
DEFAULT, *OTHERS = Shown().untuned(PROBLEM, MACHINE.cores)
# No two of these share a tile function.
SLOW, FAST, FASTER = (
    next(each for each in OTHERS if each.k and each.v and each.k.order == each.v.order == order)
    for order in ("T/16 D/16 t16 d16", "T/32 D/8 t32 d8", "T/16 D/8 t16 d8")
)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Shown:
    backend = Shown()
    monkeypatch.setattr("lowbit.runtime.select.backend_named", lambda name: backend)
    monkeypatch.setattr("lowbit.costmodel.device.detect", lambda: MACHINE)
    return backend


def selected(db: Database, tokens: int = 512) -> tuple[Candidate, str]:
    with pytest.warns(FallbackWarning) as caught:
        candidate = db.select(PROBLEM, tokens).candidate
    (only,) = caught
    return candidate, str(only.message)


@pytest.mark.usefixtures("backend")
def test_the_cost_model_decides_among_what_was_counted(tmp_path: Path) -> None:
    ship(tmp_path / "t.db", PROBLEM, {SLOW: 40, FASTER: 10, FAST: 20})
    db = open_db(tmp_path / "t.db")
    choice = db.choose(PROBLEM, 512)
    assert (choice.candidate, choice.how, choice.winner) == (FASTER, "predicted", None)
    candidate, message = selected(db)
    assert candidate == FASTER
    assert f"has no winner that fits; using what its cost model likes best, {FASTER}" in message
    with pytest.raises(NoWinnerError):
        db.winner(PROBLEM, 512)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert db.select(PROBLEM.key, 100_000).candidate == FASTER


@pytest.mark.usefixtures("backend")
def test_a_sibling_of_the_same_instruction_set_lends_its_coefficients(tmp_path: Path) -> None:
    ship(tmp_path / "t.db", PROBLEM, {SLOW: 40, FASTER: 10}, device="sibling")
    assert selected(open_db(tmp_path / "t.db"))[0] == FASTER


def test_what_does_not_compile_gives_way_to_the_next_prediction(
    tmp_path: Path, backend: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Shown.compile

    def compile_(self: Shown, problem: Problem, candidate: Candidate) -> Any:
        if candidate == FASTER:
            raise CompileError("no such registers")
        return whole(self, problem, candidate)

    monkeypatch.setattr(Shown, "compile", compile_)
    ship(tmp_path / "t.db", PROBLEM, {SLOW: 40, FASTER: 10, FAST: 20})
    db = open_db(tmp_path / "t.db")
    candidate, message = selected(db)
    assert candidate == FAST == db.choose(PROBLEM, 512).candidate
    assert f"skipped what does not compile here: {FASTER} (no such registers)" in message


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("lacking", ["file", "calibration", "counts", "caches", "coefficients"])
def test_without_a_whole_model_it_is_what_usually_wins(tmp_path: Path, lacking: str) -> None:
    path = tmp_path / "t.db"
    ship(path, PROBLEM, {} if lacking == "counts" else {SLOW: 40, FASTER: 10})
    with Store.open(path) as store:
        if lacking == "caches":
            store.put_device("here", {"isa": "avx2"})
        if lacking == "coefficients":
            store.put_calibration("here", MACHINE.cores, {"extended": {"form": "of another release"}}, "t")
    if lacking == "calibration":
        path.unlink()
        with Store.open(path) as store:
            store.put_device("here", DESCRIPTION)
    db = open_db(path)
    if lacking == "file":
        path.unlink()
    candidate, message = selected(db)
    assert candidate == DEFAULT
    assert db.choose(PROBLEM, 512).how == "default"
    assert f"has nothing that fits; using what usually wins, untuned, {DEFAULT}" in message


def test_the_baseline_is_what_is_left(tmp_path: Path, backend: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = backend.baseline(PROBLEM, MACHINE.cores)

    ship(tmp_path / "t.db", PROBLEM, {})
    db = open_db(tmp_path / "t.db")
    monkeypatch.setattr(Shown, "compile", lambda self, problem, candidate: refuse(candidate, baseline))
    with pytest.warns(FallbackWarning, match="untuned baseline.*skipped what does not compile here: .* .no registers"):
        assert db.select(PROBLEM, 512) == "baseline"
    monkeypatch.setattr(Shown, "compile", lambda self, problem, candidate: refuse(candidate, None))
    with pytest.raises(CompileError, match="no registers"):
        db.select(replace(PROBLEM, heads=2), 512)


def refuse(candidate: Candidate, unless: Candidate | None) -> str:
    if candidate != unless:
        raise CompileError("no registers")
    return "baseline"


def test_the_model_prices_a_length_by_memory_and_by_instructions(tmp_path: Path, backend: Shown) -> None:
    from lowbit.runtime.stored_model import stored_model

    ship(tmp_path / "t.db", PROBLEM, {SLOW: 40, FASTER: 1})
    model = stored_model(tmp_path / "t.db", backend, "here", "avx2", MACHINE.cores)
    assert model is not None
    tokens = 1024
    values = PROBLEM.kv_heads * tokens * PROBLEM.head_dim
    prices = model.prices_us(PROBLEM, [FASTER, DEFAULT, SLOW], tokens)
    assert list(prices) == [FASTER, SLOW]
    # Two tasks for two threads, each of K and V so many dots of a nanosecond for 32 values; a fork of 3 µs.
    assert prices[SLOW] == pytest.approx(2 * 40 * values / 32 / 2 * 1e-3 + 3)
    # Scales are two bytes for 32 values. From memory at 10 GB/s rather than from the first cache at 100.
    size = 2 * values * (1 + 2 / 32)
    assert prices[FASTER] == pytest.approx(size * (1 / 10 - 1 / 100) * 1e-3 + 3, rel=0.02)
    # As few tokens as are walked at once: 128 instructions of each kind, and what memory would take hides the rest.
    assert model.prices_us(PROBLEM, [FASTER], 32, cold=False)[FASTER] == pytest.approx(3.128)
    assert model.prices_us(PROBLEM, [FASTER], 32)[FASTER] > 3.5

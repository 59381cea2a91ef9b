"""The script for a machine with a GPU, as far as a machine without one can run it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from lowbit.kernels.backend import backend_named
from lowbit.kernels.problem import OPERATORS, PRECISIONS, Problem
from lowbit.search.gpu_calibrate import spread
from lowbit.search.messages import Prepared
from lowbit.search.rounds import Fault

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


def run(*options: str, place: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=place, env=dict(os.environ))


def test_simulated_kernels_are_correct_and_everything_is_told(tmp_path: Path) -> None:
    pytest.importorskip("numba_cuda")
    ended = run("--simulate", place=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "gpu_check.json").read_text())["correctness"]
    assert found["wrong"] == {} and found["refused"] == {}
    assert found["correct"] == found["checked"] == found["wanted"] >= 24
    assert {key.split()[0] for key in found["worst"]} == set(OPERATORS)
    assert {key.split()[-1] for key in found["worst"]} == set(PRECISIONS)
    assert 0 < max(found["worst"].values()) < 1e-3
    last = ended.stdout.strip().splitlines()[-1]
    assert last == f"correct: {found['correct']} of {found['correct']} candidates (0 wrong, 0 not compiled)"


def test_without_a_gpu_one_line_and_a_status(tmp_path: Path) -> None:
    ended = run(place=tmp_path)
    if ended.returncode == 0:
        pytest.skip("this machine has a GPU")
    assert ended.returncode == 3
    assert ended.stderr.startswith("error: no NVIDIA GPU to check: ") and ended.stderr.count("\n") == 1
    assert ended.stdout == "" and list(tmp_path.iterdir()) == []


def test_every_operator_and_precision_is_checked_in_different_layouts(script: ModuleType) -> None:
    problems = [Problem.parse(key) for key in script.CHECKED]
    pairs = {(problem.operator, problem.precision) for problem in problems}
    assert pairs >= {(operator, precision) for operator in OPERATORS for precision in PRECISIONS}
    assert {problem.head_dim for problem in problems if problem.operator == "attend"} >= {64, 80, 128, 256}
    chosen = spread(problems[0], backend_named("sm_90"), script.LAYOUTS).values()
    assert len({each.layout for each in chosen}) > script.LAYOUTS // 2
    for key, _ in script.RACES:
        Problem.parse(key)


def test_a_part_that_has_no_time_is_left_out_and_said(script: ModuleType) -> None:
    check = script.Check(time.monotonic() + 10)
    with check.part("long", 60) as values:
        assert values is None
    with check.part("short", 1) as values:
        values["n"] = 1
    with check.part("broken", 1):
        raise ValueError("what\nhappened")
    assert check.found["short"]["n"] == 1 and "long" not in check.found
    assert check.notes[0].startswith("long: left out") and check.notes[1] == "broken: ValueError: what\nhappened"


def test_the_tally_tells_wrong_from_refused(script: ModuleType) -> None:
    tally = script.Tally()
    tally.add("p", "a", Prepared(1e-3, 0.1))
    tally.add("p", "b", Prepared(2e-3, 0.1))
    tally.add("p", "c", Fault("compile_failed", "no"))
    tally.add("p", "d", Fault("wrong", "off", 0.5))
    found = tally.as_dict(5)
    assert (found["wanted"], found["checked"], found["correct"]) == (5, 4, 2)
    assert found["worst"] == {"p": 2e-3}
    assert list(found["refused"]) == ["p: c"] and list(found["wrong"]) == ["p: d"]


def test_the_table_has_a_line_for_each_part(script: ModuleType) -> None:
    raced = {
        "best_us": 10.0,
        "choice_us": 11.0,
        "regret": 0.1,
        "bandwidth_share": 0.8,
        "baseline_us": 40.0,
        "energy": {"joules": 0.002},
    }
    found = {
        "gpu": {"name": "Some GPU", "arch": "sm_86", "sms": 82, "driver": "13.0"},
        "correctness": {"wanted": 3, "checked": 3, "correct": 2, "wrong": {"x": "y"}, "refused": {}},
        "bandwidth": {"read_gbps": 850.0, "published_gbps": 936.0},
        "calibration": {"residual": {"median": 0.05, "p95": 0.2, "samples": 40}},
        "attend h32/8 d128 q1 w8a8 at 16384": raced,
        "peers": {"us": {"torch sdpa": 55.5}},
    }
    lines = list(script.table(found, ["peers: no Triton"]))
    assert lines[0] == "Some GPU (sm_86, 82 multiprocessors, driver 13.0)"
    assert lines[1] == "correct: 2 of 3 candidates (1 wrong, 0 not compiled)"
    assert lines[2] == "read: 850 GB/s of 936"
    assert lines[3] == "model: median error 5.0% over 40 samples"
    assert lines[5].split()[-6:] == ["10.00", "11.00", "10.0%", "80.0%", "4.00x", "2.000"]
    assert lines[6].split()[-1] == "55.50" and lines[7] == "note: peers: no Triton"

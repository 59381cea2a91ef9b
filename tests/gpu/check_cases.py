"""The script's race on the fake GPU: kernels of known times, and a model that is told what to predict."""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from lowbit.costmodel.gpu_features import GpuFeatures, gpu_features
from lowbit.costmodel.gpu_here import profile_here
from lowbit.costmodel.gpu_lep import default_coefficients, predict_us
from lowbit.costmodel.kernel_counts import count_kernel
from lowbit.kernels.backend import backend_named
from lowbit.kernels.cuda.gpus import gpus_here
from lowbit.kernels.cuda.work import work
from lowbit.kernels.problem import Problem
from lowbit.search import crew as crews

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from fake_gpu_backend import FAULT, PROBLEM, FakeGpuBackend, candidate  # noqa: E402


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("gpu_check", HERE.parents[1] / "benchmarks" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


class Racing(FakeGpuBackend):
    def space(self, problem, threads):
        return iter([candidate(n) for n in (1, 2, 3)] + [candidate(4, FAULT)])


def some_features(board) -> GpuFeatures:
    """Those of a real kernel."""
    backend, problem = backend_named("sm_86"), Problem.parse("qk h2/1 d32 q1 fp16")
    made = backend.baseline(problem, 1)
    (code,) = backend.code(problem, made)
    return gpu_features(problem, made, 64, count_kernel(code), board, work(problem, made, 64, "sm_86"))


def test_the_choice_is_compared_with_the_fastest(fake, script, monkeypatch):
    monkeypatch.setenv("FAKE_KERNEL_US", "25")
    monkeypatch.setattr(crews, "worker_module", lambda backend: "gpu_worker")
    monkeypatch.setattr(script, "workers", lambda: 1)
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    board = profile_here(gpus_here()[0])
    features = some_features(board)
    # The model prefers the candidate that faults, then the second, which takes as long as all others.
    preferred = {candidate(4, FAULT).name: 0, candidate(2).name: 1, candidate(1).name: 2, candidate(3).name: 3}
    told = {name: replace(features, dram_bytes=1e6 * (1 + n)) for name, n in preferred.items()}
    monkeypatch.setattr(script, "featured", lambda *rest: told)
    check = script.Check(time.monotonic() + 200)
    coefficients = default_coefficients(board)
    script.race(check, PROBLEM.key, 64, "fake_gpu_backend:FakeGpuBackend", Racing(), coefficients, 500.0, 100.0)
    assert check.notes == []
    (found,) = check.found.values()
    assert found["choice"] == candidate(2).name and candidate(4, FAULT).name in found["faults"]
    assert set(found["timed_us"]) == {candidate(n).name for n in (1, 2, 3)}
    assert found["timed_us"][found["choice"]] == pytest.approx(26.5, rel=1e-3)
    assert found["regret"] == pytest.approx(0.0, abs=1e-3)
    assert found["choice_predicted_us"] == pytest.approx(predict_us(told[found["choice"]], coefficients))
    # The best one's bytes at the measured 500 GB/s, over its time.
    share = told[found["best"]].dram_bytes / 500e3 / found["best_us"]
    assert found["bandwidth_share"] == pytest.approx(share, rel=1e-3)
    assert found["energy"]["joules"] == pytest.approx(200 * 26.5e-6, rel=0.1)


def test_a_race_without_a_finisher_is_said(fake, script, monkeypatch):
    monkeypatch.setattr(crews, "worker_module", lambda backend: "gpu_worker")
    monkeypatch.setattr(script, "workers", lambda: 1)
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    board = profile_here(gpus_here()[0])
    monkeypatch.setattr(script, "featured", lambda *rest: {candidate(4, FAULT).name: some_features(board)})
    check = script.Check(time.monotonic() + 200)
    name = "fake_gpu_backend:FakeGpuBackend"
    script.race(check, PROBLEM.key, 64, name, Racing(), default_coefficients(board), 500.0, 100.0)
    assert len(check.notes) == 1 and "nothing could be timed: crashed" in check.notes[0]

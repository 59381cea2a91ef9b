"""Calibration with real kernels, compiled for the fake GPU, which takes 25 us for each whatever it computes."""

from __future__ import annotations

import json

import pytest
from lowbit.costmodel.gpu_here import profile_here
from lowbit.costmodel.gpu_lep import GpuCoefficients, predict_us
from lowbit.kernels.backend import backend_named
from lowbit.kernels.cuda.gpus import gpus_here
from lowbit.kernels.errors import NoiseError
from lowbit.kernels.problem import Problem
from lowbit.search import gpu_calibrate
from lowbit.search.gpu_calibrate import calibrate_gpu, spread

SMALL = (("qk h2/1 d32 q1 fp16", (64, 128, 256)), ("gemv k1024 c1 fp16", (128, 256)))


@pytest.fixture
def board(fake, monkeypatch):
    monkeypatch.setenv("FAKE_KERNEL_US", "25")
    return profile_here(gpus_here()[0])


def test_what_is_measured_is_what_is_fitted_and_stored(board):
    found = calibrate_gpu("sm_86", backend_named("sm_86"), board, 0, problems=SMALL, each=2)
    assert len(found.samples) >= gpu_calibrate.LEAST_SAMPLES and found.failed == {}
    launches = {1: 25 + 1.5, 2: 2 * (25 + 1.5)}
    for sample in found.samples:
        assert sample.measured_us == pytest.approx(launches[sample.features.launches], rel=1e-3)
    assert found.launch_us == pytest.approx(1.5, rel=1e-3)
    assert 900 < found.bandwidth_gbps <= 1000  # 1 TB/s and a launch
    stored = json.loads(json.dumps(found.as_dict()))
    restored = GpuCoefficients.from_dict(stored)
    assert restored.values == found.coefficients.values and restored.gpu == board
    first = found.samples[0]
    assert stored["samples"][0]["predicted_us"] == pytest.approx(predict_us(first.features, restored))
    assert found.coefficients.residual.samples == len(found.samples)


def test_too_little_time_is_said(board):
    with pytest.raises(NoiseError, match="only 0 candidates could be timed"):
        calibrate_gpu("sm_86", backend_named("sm_86"), board, 0, budget_s=0.0, problems=SMALL)


def test_candidates_are_spread_over_the_space():
    backend = backend_named("sm_86")
    problem = Problem.parse("attend h32/8 d128 q1 w4a8")
    chosen = spread(problem, backend, 6)
    assert 5 <= len(chosen) <= 6
    assert len({each.layout for each in chosen.values()}) >= 3
    assert backend.baseline(problem, 1).name in chosen

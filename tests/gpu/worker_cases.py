"""Worker processes whose GPU can be broken by a candidate."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lowbit.kernels.problem import Problem
from lowbit.search import crew as crews
from lowbit.search.crew import Crew, worker_module
from lowbit.search.gpu_timing import GpuSlot
from lowbit.search.messages import Prepare, Prepared, Setup, TimeSlot
from lowbit.search.rounds import Fault

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from fake_gpu_backend import FAULT, FAULT_WHEN_TIMED, PROBLEM, RAISES, candidate  # noqa: E402

TOKENS = 64


@pytest.fixture
def crew(fake, monkeypatch):
    monkeypatch.setattr(crews, "worker_module", lambda backend: "gpu_worker")
    setup = Setup("fake_gpu_backend:FakeGpuBackend", search_path=(str(HERE), *sys.path))
    with Crew(setup, 1) as crew:
        yield crew


def prepare(made_of) -> Prepare:
    return Prepare(PROBLEM.key, TOKENS, made_of.name)


def time_slot(made_of, protocol="cold") -> TimeSlot:
    return TimeSlot(PROBLEM.key, TOKENS, made_of.name, protocol)


def test_gpu_backends_get_the_gpus_worker():
    assert worker_module("sm_86") == worker_module("sm_120") == "gpu_worker"
    assert worker_module("cpu") == worker_module("fake_backend:FakeBackend") == "worker"
    assert Problem.parse(PROBLEM.key) == PROBLEM


def test_a_fault_costs_its_candidate_and_no_other(crew):
    """One worker: what it had compiled is gone, but nothing that comes after the fault fails."""
    good, bad, other = candidate(1), candidate(2, FAULT), candidate(3)
    replies = {}
    for request, reply in crew.work([prepare(good), prepare(bad), prepare(other)]):
        replies[request.candidate] = reply
    assert isinstance(replies[good.name], Prepared) and isinstance(replies[other.name], Prepared)
    fault = replies[bad.name]
    assert isinstance(fault, Fault) and fault.status == "crashed"
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in fault.message and "while checking" in fault.message
    assert not crew.owns(PROBLEM.key, good.name) and crew.owns(PROBLEM.key, other.name)
    assert isinstance(crew.ask(prepare(good)), Prepared)


def test_a_fault_while_timed_ends_the_worker_too(crew):
    good, bad = candidate(1), candidate(2, FAULT_WHEN_TIMED)
    assert isinstance(crew.ask(prepare(bad)), Prepared)
    assert isinstance(crew.ask(prepare(good)), Prepared)
    process = crew._workers[0].process
    fault = crew.ask(time_slot(bad))
    assert isinstance(fault, Fault) and "while timed" in fault.message
    assert process.poll() is not None
    slot = crew.ask(time_slot(good))
    assert isinstance(slot, GpuSlot) and slot.samples_us


def test_a_fault_that_leaves_the_gpu_whole_keeps_the_worker(crew):
    good, bad = candidate(1), candidate(2, RAISES)
    assert isinstance(crew.ask(prepare(good)), Prepared)
    process = crew._workers[0].process
    fault = crew.ask(prepare(bad))
    assert isinstance(fault, Fault) and "ArithmeticError" in fault.message
    assert crew._workers[0].process is process and crew.owns(PROBLEM.key, good.name)


def test_slots_of_a_candidate_reuse_its_operands_on_the_gpu(crew):
    good = candidate(1)
    assert isinstance(crew.ask(prepare(good)), Prepared)
    slots = [crew.ask(time_slot(good, protocol)) for protocol in ("cold", "cold", "warm")]
    assert all(isinstance(slot, GpuSlot) and slot.launch_us == pytest.approx(1.5, rel=1e-3) for slot in slots)

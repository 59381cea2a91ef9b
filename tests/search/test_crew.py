from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest
from fake_backend import (
    COMPILER_DIES,
    COMPILER_HANGS,
    EXITS,
    HANG,
    ILLEGAL,
    NAN,
    OK,
    PROBLEM,
    RAISES,
    REFUSES,
    SEGV,
    WRONG,
    WRONG_AT_33,
    candidate,
)
from lowbit.kernels.errors import DeviceError
from lowbit.search.crew import Crew
from lowbit.search.messages import Prepare, Prepared, Setup, TimeSlot
from lowbit.search.rounds import Fault
from lowbit.search.timing import Slot

TOKENS = 50


def setup(backend: str = "fake_backend:FakeBackend", plugins: tuple[str, ...] = ()) -> Setup:
    return Setup(backend, plugins, cache_bytes=1 << 20, search_path=tuple(sys.path))


def prepare(behaviour: int, tens_us: int = 10) -> Prepare:
    return Prepare(PROBLEM.key, TOKENS, candidate(tens_us, behaviour).name)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(setup(), 2, {"run": 1.5, "compile": 15.0}) as crew:
        yield crew


def test_every_kind_of_failure_has_its_class_and_ends_nothing(crew: Crew) -> None:
    behaviours = (SEGV, OK, ILLEGAL, HANG, WRONG, NAN, REFUSES, COMPILER_DIES, RAISES, WRONG_AT_33, EXITS)
    replies = dict(crew.work([prepare(each) for each in behaviours]))
    found = {each: replies[prepare(each)] for each in behaviours}
    good = found.pop(OK)
    assert isinstance(good, Prepared) and 0 <= good.max_error < 1e-3
    faults = {each: reply for each, reply in found.items() if isinstance(reply, Fault)}
    assert {each: fault.status for each, fault in faults.items()} == {
        SEGV: "crashed",
        ILLEGAL: "illegal_instruction",
        HANG: "hung",
        WRONG: "wrong",
        NAN: "wrong",
        REFUSES: "compile_failed",
        COMPILER_DIES: "crashed",
        RAISES: "crashed",
        WRONG_AT_33: "wrong",
        EXITS: "crashed",
    }
    assert faults[SEGV].message == "SIGSEGV in stage 'run'"
    assert faults[COMPILER_DIES].message == "SIGABRT in stage 'compile'"
    assert faults[REFUSES].message == "no such instruction"
    assert faults[RAISES].message == "while checking: ArithmeticError: division"
    assert faults[EXITS].message.startswith("exit status 3")
    assert faults[NAN].max_error == float("inf")
    assert faults[WRONG].max_error == pytest.approx(0.5, abs=1e-3)
    assert "33 tokens" in faults[WRONG_AT_33].message


def test_a_hung_compiler_is_killed() -> None:
    with Crew(setup(), 1, {"compile": 0.5}) as crew:
        assert crew.ask(prepare(COMPILER_HANGS)) == Fault("hung", "no answer within 0.5 s in stage 'compile'")
        assert isinstance(crew.ask(prepare(OK)), Prepared)


def test_slots_take_no_less_than_the_kernel_takes(crew: Crew) -> None:
    for tens_us in (20, 200):
        name = candidate(tens_us).name
        assert isinstance(crew.ask(Prepare(PROBLEM.key, TOKENS, name)), Prepared)
        assert crew.owns(PROBLEM.key, name)
        for protocol in ("warm", "cold"):
            request = TimeSlot(PROBLEM.key, TOKENS, name, protocol)
            slots = [crew.ask(request) for _ in range(8)]
            samples = [us for slot in slots if isinstance(slot, Slot) for us in slot.samples_us]
            # The kernel spins until the clock says so: never less.
            assert samples and min(samples) >= 10 * tens_us


def test_what_a_dead_worker_owned_is_no_longer_owned() -> None:
    with Crew(setup(), 1) as crew:
        good = prepare(OK)
        crew.ask(good)
        assert crew.owns(PROBLEM.key, good.candidate)
        crew.ask(prepare(SEGV))
        assert not crew.owns(PROBLEM.key, good.candidate)
        # It can be timed all the same: whoever is asked compiles it.
        assert isinstance(crew.ask(TimeSlot(PROBLEM.key, TOKENS, good.candidate, "warm")), Slot)


def test_workers_that_cannot_start_are_an_error_not_a_verdict_on_candidates() -> None:
    for wrong in (setup("fake_backend:BrokenBackend"), setup(plugins=("no_such_plugin",))):
        with Crew(wrong, 1) as crew, pytest.raises(DeviceError, match=r"no such device|no_such_plugin"):
            crew.ask(prepare(OK))


def test_a_worker_that_dies_idle_is_replaced(crew: Crew) -> None:
    with Crew(setup(), 1) as crew:
        crew.ask(prepare(OK))
        (worker,) = crew._workers
        assert worker is not None
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
        assert isinstance(crew.ask(prepare(OK)), Prepared)


def test_an_abandoned_job_leaves_the_crew_usable(crew: Crew) -> None:
    started = time.monotonic()
    for _ in crew.work([prepare(OK, 11), prepare(HANG, 12)]):
        break
    assert isinstance(crew.ask(prepare(OK, 13)), Prepared)
    assert time.monotonic() - started < 60


@pytest.mark.skipif(sys.platform != "linux", reason="the system's own parent-death signal")
def test_workers_do_not_outlive_a_killed_parent(tmp_path: object) -> None:
    import subprocess

    program = (
        "import sys\n"
        "from lowbit.search.crew import Crew\nfrom lowbit.search.messages import Prepare, Setup\n"
        "crew = Crew(Setup('fake_backend:FakeBackend', search_path=tuple(sys.path)), 1)\n"
        f"work = crew.work([Prepare({PROBLEM.key!r}, 40, {candidate(10).name!r}),"
        f" Prepare({PROBLEM.key!r}, 40, {candidate(10, HANG).name!r})])\n"
        "next(work)\nprint(crew._workers[0].process.pid, flush=True)\nnext(work)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _alive(child):
        time.sleep(0.05)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

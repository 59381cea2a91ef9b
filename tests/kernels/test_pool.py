"""The fork/join pool: every index exactly once, whatever the counts, the callers and the life of the process."""

import ctypes
import os
import subprocess
import sys
import threading

import llvmlite.binding as llvm
import numpy as np
import pytest
from lowbit.kernels.cpu.pool import Pool, allowed_cpus, pinned, pool, run

IR = """
define void @count(ptr %a, i64 %i) {
  %p = getelementptr i64, ptr %a, i64 %i
  %old = atomicrmw add ptr %p, i64 1 seq_cst
  ret void
}

; A job: address of numbers to read, of numbers to write, and how many there are.
define void @relay(ptr %job, i64 %i) {
  %to.p = getelementptr i64, ptr %job, i64 1
  %size.p = getelementptr i64, ptr %job, i64 2
  %from = load ptr, ptr %job
  %to = load ptr, ptr %to.p
  %size = load i64, ptr %size.p
  %after = add i64 %i, 1
  %neighbour = urem i64 %after, %size
  %in.p = getelementptr i64, ptr %from, i64 %neighbour
  %in = load i64, ptr %in.p
  %sum = add i64 %in, 1
  %out.p = getelementptr i64, ptr %to, i64 %i
  store i64 %sum, ptr %out.p
  ret void
}
"""


@pytest.fixture(scope="module")
def functions():
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(IR), machine)
    engine.finalize_object()
    yield {name: engine.get_function_address(name) for name in ("count", "relay")}


@pytest.fixture
def count(functions):
    return functions["count"]


@pytest.fixture
def relay(functions):
    return functions["relay"]


def counters(size):
    memory = (ctypes.c_int64 * size)()
    return memory, ctypes.addressof(memory)


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
@pytest.mark.parametrize("tasks", [0, 1, 2, 3, 7, 64, 1001])
def test_each_index_runs_exactly_once(count, threads, tasks):
    memory, address = counters(tasks + 8)
    run(count, address, tasks, threads)
    assert list(memory) == [1] * tasks + [0] * 8


def test_a_thousand_rapid_calls_with_changing_arguments(count):
    buffers = [counters(40) for _ in range(3)]
    expected = [[0] * 40 for _ in range(3)]
    p = pool(3)
    for call in range(1000):
        which, tasks = call % 3, call % 37
        p.run(count, buffers[which][1], tasks)
        for index in range(tasks):
            expected[which][index] += 1
    assert [list(memory) for memory, _ in buffers] == expected


def test_wakes_parked_workers(count):
    """Two tasks that wait for each other can only end if a second thread joins in, also after it has parked."""
    p = pool(2)
    buffer = counters(2)
    p.run(count, buffer[1], 2)
    meeting = threading.Barrier(2, timeout=20)
    met = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
    def task(_, index):
        meeting.wait()
        met.append(index)

    for gap in (0.0, 0.05, 0.0, 0.05):
        threading.Event().wait(gap)
        p.run(ctypes.cast(task, ctypes.c_void_p).value, 0, 2)
    assert sorted(met) == [0] * 4 + [1] * 4


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("tasks", "turns"), [(0, 1), (1, 0), (2, 1), (7, 3)])
def test_bound_call_runs_its_prologue_and_then_each_index(count, threads, tasks, turns):
    memory, address = counters(16)
    call = pool(threads).bind(count, address, tasks, count, turns)
    for repeated in (1, 2, 3):
        call()
        assert list(memory) == [repeated * ((i < tasks) + (i < turns)) for i in range(16)]


def test_bound_call_wakes_parked_workers(count):
    memory, address = counters(64)
    call = pool(2).bind(count, address, 64)
    for _ in range(3):
        call()
        threading.Event().wait(0.02)
    assert list(memory) == [3] * 64


def test_bound_call_needs_functions(count):
    with pytest.raises(ValueError, match="cannot run"):
        pool(2).bind(0, 0, 3)
    with pytest.raises(ValueError, match="cannot run"):
        pool(2).bind(count, 0, 3, 0, 1)


def test_limit_of_one_runs_in_order_on_the_caller():
    seen = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
    def task(_, index):
        seen.append((index, threading.get_ident()))

    pool(2).run(ctypes.cast(task, ctypes.c_void_p).value, 0, 5, threads=1)
    assert seen == [(index, threading.get_ident()) for index in range(5)]


def test_concurrent_callers_are_serialised(count):
    memory, address = counters(16)
    p = pool(2)
    callers = [threading.Thread(target=lambda: [p.run(count, address, 16) for _ in range(200)]) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert list(memory) == [800] * 16


def test_pools_are_cached_by_thread_count():
    assert pool(2) is pool(2)
    assert pool(3).threads == 3


@pytest.mark.parametrize(("tasks", "threads"), [(-1, 2), (2**31, 2), (3, 0)])
def test_impossible_counts_are_refused(count, tasks, threads):
    with pytest.raises(ValueError, match="cannot run"):
        pool(2).run(count, 0, tasks, threads)


def test_null_function_and_empty_pool_are_refused():
    with pytest.raises(ValueError, match="0x0"):
        pool(2).run(0, 0, 1)
    with pytest.raises(ValueError, match="at least one thread"):
        Pool(0)


def test_a_stopped_pool_still_runs_everything(count):
    p = Pool(3)
    memory, address = counters(9)
    p.run(count, address, 9)
    workers = [thread for thread, _ in p._workers]
    p.stop()
    assert not any(thread.is_alive() for thread in workers)
    p.run(count, address, 9)
    assert list(memory) == [2] * 9


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs thread affinity")
def test_pinning_lasts_as_long_as_its_block():
    before = os.sched_getaffinity(0)
    with pinned():
        assert os.sched_getaffinity(0) == {allowed_cpus()[0]}
    assert os.sched_getaffinity(0) == before
    assert set(allowed_cpus()) == before


SCRIPT = """
import ctypes, os, sys
import llvmlite.binding as llvm
from lowbit.kernels.cpu.pool import pool
llvm.initialize_native_target(); llvm.initialize_native_asmprinter()
machine = llvm.Target.from_default_triple().create_target_machine()
engine = llvm.create_mcjit_compiler(llvm.parse_assembly({ir!r}), machine)
engine.finalize_object()
function = engine.get_function_address("count")
memory = (ctypes.c_int64 * 8)()
pool(3).run(function, ctypes.addressof(memory), 8)
"""


def finishes_cleanly(tail):
    script = SCRIPT.format(ir=IR) + tail
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def test_exit_with_workers_still_spinning():
    assert finishes_cleanly("print(list(memory))") == f"{[1] * 8}\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_child_of_a_fork_gets_workers_of_its_own():
    tail = """
child = os.fork()
pool(3).run(function, ctypes.addressof(memory), 8)
if child == 0:
    workers = [t.is_alive() for t, _ in pool(3)._workers]
    sys.exit(0 if list(memory) == [2] * 8 and workers == [True, True] else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), list(memory))
"""
    assert finishes_cleanly(tail) == f"0 {[2] * 8}\n"


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_sequence_ends_each_stage_before_the_next(relay, threads):
    """Each task adds one to its neighbour's number of the stage before: any that ran early would be one short."""
    size, count = 7, 3000
    numbers = np.zeros((2, size), np.int64)
    jobs = np.array([[numbers[i % 2].ctypes.data, numbers[1 - i % 2].ctypes.data, size] for i in range(2)], np.int64)
    stages = np.array(
        [[relay, jobs[i % 2].ctypes.data, size, (1, threads)[i % 3 != 0]] for i in range(count)], np.int64
    )
    program = pool(threads).sequence(stages)
    for run_number in range(1, 4):
        program()
        assert (numbers[count % 2] == run_number * count).all()


def test_a_sequence_reads_its_stages_anew(count):
    memory, address = counters(4)
    stages = np.array([[count, address, 4, 2]], np.int64)
    program = pool(2).sequence(stages)
    program()
    stages[0, 2] = 2
    program()
    assert list(memory) == [2, 2, 1, 1]


@pytest.mark.parametrize(
    "stages",
    [
        np.zeros((1, 4), np.int64),
        np.ones((1, 3), np.int64),
        np.ones((2, 4), np.int32),
        np.array([[1, 1, 1, 3]], np.int64),
        np.ones((4, 4), np.int64).T[::2],
    ],
)
def test_a_sequence_refuses_malformed_stages(stages):
    with pytest.raises(ValueError):
        Pool(2).sequence(stages)

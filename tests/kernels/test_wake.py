import ctypes
import threading

import pytest
from lowbit.kernels.cpu import wake as module
from lowbit.kernels.cpu.pool import allowed_cpus
from lowbit.kernels.cpu.wake import wake

two_cores = pytest.mark.skipif(len(allowed_cpus()) < 2, reason="needs two cores")


@pytest.mark.parametrize("threads", [1, 1000])
def test_pools_that_never_spin_are_left_alone(threads: int) -> None:
    before = threading.active_count()
    assert wake(threads)
    assert threading.active_count() == before


@two_cores
def test_all_threads_come_once_they_are_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_NS", 20_000_000_000)  # a busy machine must not fail a test
    assert wake(2)
    assert "lowbit-1" in {thread.name for thread in threading.enumerate()}


@two_cores
def test_a_thread_that_stays_away_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lonely:
        """A pool whose caller does everything."""

        def run(self, function: int, args: int, tasks: int) -> None:
            task = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(function)
            for index in range(tasks):
                task(args, index)

    monkeypatch.setattr(module, "pool", lambda threads: Lonely())
    monkeypatch.setattr(module, "PATIENCE_NS", 0)
    assert not wake(2)

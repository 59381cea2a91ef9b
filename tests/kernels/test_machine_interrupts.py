"""Interrupts while LLVM works: heeded afterwards, with nothing lost."""

import signal
import threading
import time

import pytest
from lowbit.kernels.cpu.machine import shielded


def test_an_interrupt_waits_for_the_work_to_end():
    ended = []

    @shielded
    def work(seconds):
        assert threading.current_thread() is not threading.main_thread()
        time.sleep(seconds)
        ended.append(True)
        return 7

    assert work(0) == 7
    timer = threading.Timer(0.05, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        work(0.5)
    assert len(ended) == 2


def test_errors_are_passed_on():
    @shielded
    def work():
        raise RuntimeError("no module")

    with pytest.raises(RuntimeError, match="no module"):
        work()


def test_another_thread_works_by_itself():
    found = []
    thread = threading.Thread(target=lambda: found.append(shielded(threading.current_thread)()))
    thread.start()
    thread.join()
    assert found == [thread]

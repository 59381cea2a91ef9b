"""The worker process: compiles, checks and times candidates, and may be killed at any moment.

Started as ``python -m lowbit.search.worker FD`` by `lowbit.search.crew` with one end of a socket pair, and never
forked: a fork would inherit thread pools and compiler locks in whatever state they are. It answers each request with
one reply, and announces each stage before it, so that the other side knows what hung or crashed. It ends when its pipe
closes.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from ..kernels.backend import Backend, Kernel, backend_named
from ..kernels.candidate import Candidate
from ..kernels.cpu.pool import allowed_cpus
from ..kernels.errors import CompileError
from ..kernels.problem import USER, Problem
from .check import Expectation
from .chill import Chill
from .control import Control
from .last_reply import Last
from .messages import (
    Count,
    Counted,
    Prepare,
    Prepared,
    Ready,
    Refused,
    Reply,
    Request,
    Setup,
    Stage,
    TimeSlot,
)
from .operands import PackedOperands
from .rounds import Fault
from .timing import Slot, Stopwatch, copies_needed
from .truth import truth_of
from .wording import one_line

_PR_SET_PDEATHSIG = 1


def resolve_backend(name: str) -> Backend:
    """`backend_named`, what ``module:callable`` makes, or the kernel at ``user:file.py:name``.

    Raises
    ------
    DeviceError
        If there is no such backend.
    KernelError
        If there is no such kernel.
    """
    if name.startswith(USER):
        from ..kernels.cpu.user import backend_at

        return backend_at(name)
    module, colon, attribute = name.partition(":")
    if not colon:
        return backend_named(name)
    backend = getattr(importlib.import_module(module), attribute)()
    assert isinstance(backend, Backend)
    return backend


def _for_isa(name: str) -> Backend:
    from ..kernels.cpu.backend import CpuBackend

    return CpuBackend(name)


class _Wrong(Exception):
    def __init__(self, tokens: int, error: float, limit: float) -> None:
        super().__init__(f"error {error:.3g} exceeds {limit:.3g} at {tokens} tokens")
        self.error = error


class Workbench:
    """One worker's state: kernels of the problems it has met, and operands of the context length at hand.

    Not thread-safe. `answer` lets no exception out that concerns a candidate.

    Parameters
    ----------
    setup : Setup
    announce : callable
        Told each `Stage` before it begins.
    """

    def __init__(self, setup: Setup, announce: Any) -> None:
        self._setup = setup
        self._announce = announce
        self._backend = _for_isa(setup.isa) if setup.isa else resolve_backend(setup.backend)
        self._truth = truth_of(self._backend, setup.seed)
        self._problem: Problem | None = None
        self._kernels: dict[tuple[str, str], Kernel] = {}
        self._checked: dict[tuple[str, str], float] = {}
        self._awkward: dict[str, list[tuple[int, Expectation, PackedOperands]]] = {}
        self._tokens = 0
        self._expectations: dict[tuple[int, str], Expectation] = {}
        self._operands: PackedOperands | None = None
        self._stopwatches: dict[tuple[str, str], Stopwatch] = {}
        self._control: Control | None = None

    def answer(self, request: Request) -> Reply | Last:
        if isinstance(request, Prepare):
            return self._prepare(request)
        if isinstance(request, TimeSlot):
            return self._time(request)
        return self._count(request)

    # -- compile and check ----------------------------------------------------------------------------------------

    def _prepare(self, request: Prepare) -> Prepared | Fault:
        started = time.perf_counter()
        try:
            problem, kernel = self._open(request)
        except Exception as error:
            return Fault("compile_failed", _reason(error))
        compile_s = time.perf_counter() - started
        try:
            worst = max(self._check_awkward(problem, kernel), self._check_full(problem, kernel, request.tokens))
        except _Wrong as error:
            return Fault("wrong", str(error), error.error)
        except Exception as error:
            return Fault("crashed", f"while checking: {one_line(error)}")
        return Prepared(worst, compile_s)

    def _open(self, request: Prepare | TimeSlot) -> tuple[Problem, Kernel]:
        """Turn to the request's problem and context length, and have its kernel compiled."""
        problem = Problem.parse(request.problem)
        if problem != self._problem:
            self._problem, self._tokens = problem, 0
            self._awkward.clear()
            self._kernels.clear()
            self._checked.clear()
        if request.tokens != self._tokens:
            self._tokens, self._operands = request.tokens, None
            self._expectations.clear()
            self._stopwatches.clear()
        key = request.problem, request.candidate
        if key not in self._kernels:
            self._announce(Stage("compile"))
            self._kernels[key] = self._backend.compile(problem, Candidate.parse(request.candidate))
        return problem, self._kernels[key]

    def _check_awkward(self, problem: Problem, kernel: Kernel) -> float:
        key, pipeline = (problem.key, kernel.candidate.name), kernel.candidate.pipeline
        if key not in self._checked:
            if pipeline not in self._awkward:
                self._announce(Stage("reference"))
                self._awkward[pipeline] = self._truth.awkward(problem, pipeline)
            self._announce(Stage("run"))
            self._checked[key] = max(
                self._judge(kernel, packed, n, expectation) for n, expectation, packed in self._awkward[pipeline]
            )
        return self._checked[key]

    def _check_full(self, problem: Problem, kernel: Kernel, tokens: int) -> float:
        operands, pipeline = self._packed(problem, tokens), kernel.candidate.pipeline
        lengths = self._truth.lengths(tokens)
        for length in lengths:
            if (length, pipeline) not in self._expectations:
                self._announce(Stage("reference"))
                self._expectations[length, pipeline] = self._truth.expect(problem, operands.operands, length, pipeline)
        self._announce(Stage("pack"))
        operands.arguments(kernel)
        self._announce(Stage("run"))
        return max(self._judge(kernel, operands, n, self._expectations[n, pipeline]) for n in lengths)

    def _packed(self, problem: Problem, tokens: int) -> PackedOperands:
        if self._operands is None:
            self._announce(Stage("reference"))
            self._operands = PackedOperands(self._truth.operands(problem, tokens), self._setup.memory_bytes)
        return self._operands

    def _judge(self, kernel: Kernel, packed: PackedOperands, tokens: int, expectation: Expectation) -> float:
        """The error at ``tokens``, on operands that are packed once for all lengths."""
        arguments = list(packed.arguments(kernel)[0])
        arguments[0] = expectation.operands.x
        error = expectation.error(kernel(*arguments, tokens=tokens))
        if not error <= expectation.tolerance:
            raise _Wrong(tokens, error, expectation.tolerance)
        return error

    # -- time -----------------------------------------------------------------------------------------------------

    def _time(self, request: TimeSlot) -> Slot | Fault:
        try:
            problem, kernel = self._open(request)
            if self._control is None:
                self._announce(Stage("compile"))
                self._control = Control(allowed_cpus()[: self._setup.threads], self._setup.cache_bytes)
            return self._stopwatch(problem, kernel, request).slot(self._control)
        except Exception as error:
            return Fault("crashed", f"while timed: {one_line(error)}")

    def _stopwatch(self, problem: Problem, kernel: Kernel, request: TimeSlot) -> Stopwatch:
        """Calls on operands that are packed before the slot begins."""
        operands = self._packed(problem, request.tokens)
        self._announce(Stage("pack"))
        copies = copies_needed(operands.nbytes(kernel), self._setup.cache_bytes, request.protocol)
        arguments = operands.arguments(kernel, copies)
        key = request.candidate, request.protocol
        if key not in self._stopwatches:
            self._stopwatches[key] = Stopwatch()
        stopwatch = self._stopwatches[key]
        self._announce(Stage("run"))
        out = kernel(*arguments[0], tokens=request.tokens)
        stopwatch.calls = [kernel.bind(*each, tokens=request.tokens, out=out) for each in arguments]
        if request.protocol == "evicted":
            stopwatch.chill = Chill(arguments, kernel.candidate.schedule.threads)
        return stopwatch

    # -- count ----------------------------------------------------------------------------------------------------

    def _count(self, request: Count) -> Counted:
        from ..costmodel.counts import count

        problem = Problem.parse(request.problem)
        counts, failed = {}, {}
        for symbol, name in request.tiles:
            self._announce(Stage("compile"))
            try:
                counts[symbol] = count(self._backend.tile(problem, Candidate.parse(name), symbol))
            except Exception as error:
                failed[symbol] = _reason(error)
        return Counted(counts, failed)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, CompileError) and str(error) else one_line(error)


def serve(connection: Connection, bench: type[Workbench] = Workbench) -> None:
    """Answer requests until the other side closes, or up to a `Last` reply. The first message is a `Setup`."""
    setup: Setup = connection.recv()
    try:
        sys.path[:] = [*setup.search_path, *(entry for entry in sys.path if entry not in setup.search_path)]
        for plugin in setup.plugins:
            importlib.import_module(plugin)
        workbench = bench(setup, connection.send)
        allowed_cpus()
        gc.freeze()  # what is imported stays; looking it through for garbage would slow every candidate down
    except Exception as error:
        connection.send(Refused(one_line(error)))
        return
    connection.send(Ready())
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        reply = workbench.answer(request)
        connection.send(reply)
        if isinstance(reply, Last):
            return


def main(bench: type[Workbench] = Workbench) -> None:
    if sys.platform == "linux":
        # A hung kernel never sees its pipe close; the system ends it with its parent.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ctrl-C goes to the whole foreground group; the parent decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    serve(Connection(int(sys.argv[1])), bench)


if __name__ == "__main__":
    main()

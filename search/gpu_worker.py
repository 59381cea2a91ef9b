"""The worker process for GPU candidates: as `lowbit.search.worker`, but for how it times and when it ends.

A kernel that touches memory which is not its own breaks the GPU's context for its whole process: every later call
fails, whatever it asks. So after a fault the worker looks whether its context still answers; if not, the answer is its
`Last`, and the crew replaces it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ..kernels.backend import Kernel
from ..kernels.cuda.device import Driver, context_broken
from ..kernels.errors import GpuMemoryError
from ..kernels.problem import Problem
from . import worker
from .gpu_meters import Meter
from .gpu_timing import GpuControl, GpuStopwatch, copies_wanted
from .last_reply import Last
from .messages import Reply, Request, Setup, Stage, TimeSlot
from .rounds import Fault
from .timing import Slot
from .wording import one_line


class GpuWorkbench(worker.Workbench):
    """See `lowbit.search.worker.Workbench`. Holds operands on the GPU, within the set-up's bound on memory."""

    def __init__(self, setup: Setup, announce: Any) -> None:
        super().__init__(setup, announce)
        self._watches: OrderedDict[tuple[str, int, str, str], tuple[GpuStopwatch, int]] = OrderedDict()
        self._gpus: dict[int, tuple[GpuControl, Meter]] = {}

    def answer(self, request: Request) -> Reply | Last:
        reply = super().answer(request)
        if isinstance(reply, Fault) and context_broken():
            return Last(reply)
        return reply

    def _time(self, request: TimeSlot) -> Slot | Fault:
        try:
            problem, kernel = self._open(request)
            try:
                watch = self._watch(problem, kernel, request)
            except GpuMemoryError:
                self._drop(0)
                watch = self._watch(problem, kernel, request)
            return watch.slot(self._parts(watch.calls[0].driver)[0])
        except Exception as error:
            return Fault("crashed", f"while timed: {one_line(error)}")

    def _watch(self, problem: Problem, kernel: Kernel, request: TimeSlot) -> GpuStopwatch:
        key = (request.problem, request.tokens, request.candidate, request.protocol)
        if key in self._watches:
            self._watches.move_to_end(key)
            self._announce(Stage("run"))
            return self._watches[key][0]
        operands = self._packed(problem, request.tokens)
        self._announce(Stage("pack"))
        (arguments,) = operands.arguments(kernel)
        each_bytes = operands.nbytes(kernel)
        copies = copies_wanted(each_bytes, request.protocol)
        self._drop(self._setup.memory_bytes - copies * each_bytes)
        self._announce(Stage("run"))
        calls: list[Any] = [kernel.bind(*arguments, tokens=request.tokens) for _ in range(copies)]
        watch = GpuStopwatch(calls, request.protocol, self._parts(calls[0].driver)[1])
        self._watches[key] = watch, copies * each_bytes
        return watch

    def _parts(self, driver: Driver) -> tuple[GpuControl, Meter]:
        if driver.gpu.ordinal not in self._gpus:
            self._gpus[driver.gpu.ordinal] = GpuControl(driver), Meter(driver.gpu.pci)
        return self._gpus[driver.gpu.ordinal]

    def _drop(self, limit_bytes: int) -> None:
        """Give back the operands that were used longest ago, until the rest are within ``limit_bytes``."""
        total = sum(nbytes for _, nbytes in self._watches.values())
        while self._watches and total > max(limit_bytes, 0):
            _, (watch, nbytes) = self._watches.popitem(last=False)
            watch.close()
            total -= nbytes


if __name__ == "__main__":
    worker.main(GpuWorkbench)

"""The synthetic loops of `lowbit.costmodel.microloops`, compiled and timed on this machine."""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..kernels.backend import Code
from ..kernels.cpu.isa import Isa, isa_named
from ..kernels.cpu.memory import evict, huge_zeros
from ..kernels.cpu.pool import pool
from ..kernels.cpu.wake import wake
from .device import Device
from .features import Features
from .microloops import LOOPS, SCRATCH_BYTES, write_loops
from .unpack import instruction_counts, unpack_ops_per_32

MOST_TASKS = 1024


def compile_loops(isa: Isa, host: bool) -> tuple[str, str, Any]:
    """Assembly of the loops.

    Parameters
    ----------
    isa : Isa
    host : bool
        Compile for this machine and load the code, or only show what ``isa``'s own target makes of it.

    Returns
    -------
    ir, assembly : str
    engine : llvmlite.binding.ExecutionEngine or None
    """
    import llvmlite.binding as llvm

    text, _ = write_loops(isa)
    if host:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target, cpu = llvm.Target.from_default_triple(), llvm.get_host_cpu_name()
        machine = target.create_target_machine(cpu=cpu, features=llvm.get_host_cpu_features().flatten(), opt=3)
    else:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        target = llvm.Target.from_triple(isa.triple)
        machine = target.create_target_machine(cpu=isa.cpu, features=isa.features, opt=3)
    module = llvm.parse_assembly(text)
    module.triple = target.triple if host else isa.triple
    module.data_layout = str(machine.target_data)
    module.verify()
    assembly = machine.emit_assembly(module)
    if not host:
        return text, assembly, None
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return text, assembly, engine


class Bench:
    """The compiled loops on this machine, with the data they read.

    Parameters
    ----------
    device : Device
    largest_bytes : int
        Size of the buffer, the largest working set.
    """

    def __init__(self, device: Device, largest_bytes: int) -> None:
        self.device = device
        isa = isa_named(device.isa)
        text, self._bodies = write_loops(isa)
        _, assembly, self._engine = compile_loops(isa, host=True)
        self.codes = {
            name: Code("k", f"{name}_loop", text, assembly, body.values, 1, "") for name, body in self._bodies.items()
        }
        # One tile of floats in [-1, -0.5), whose bytes and halves are also harmless as any other type.
        tile = np.random.default_rng(0).random(1 << 16, np.float32) * 0.5 - 1.0
        self._data = huge_zeros(-(-largest_bytes // 4) * 4 + 4 * 4096).view(np.float32)
        self._data[:] = np.resize(tile, self._data.size)
        self._scratch = np.resize(tile, MOST_TASKS * SCRATCH_BYTES // 4 + 1024)
        self._turns = itertools.count()
        self._out = np.zeros(MOST_TASKS * 128 + 64, np.uint8)

    @property
    def address(self) -> int:
        """Where the first task's bytes begin."""
        return int(self._data.ctypes.data + -self._data.ctypes.data % 4096)

    @property
    def names(self) -> list[str]:
        """The loops of `lowbit.costmodel.microloops.LOOPS` that this machine has."""
        return [name for name in self._bodies if name in LOOPS]

    def whole_steps(self, name: str, size_bytes: int) -> int:
        """``size_bytes`` rounded down to whole iterations of a loop, and to cache lines."""
        step = int(np.lcm(self._bodies[name].step_bytes, self.device.line_bytes))
        return max(size_bytes // step, 1) * step

    def call(
        self, name: str, threads: int, tasks: int, bytes_per_task: int, passes: int, windows: int = 1
    ) -> Callable[[], None]:
        """A function that runs the loop ``name`` (or ``nothing``) as ``tasks`` tasks on ``threads`` threads.

        Each task streams its own ``bytes_per_task`` bytes ``passes`` times. Successive calls, of whichever loop, move
        on through ``windows`` stretches of the buffer: short calls with a large working set, which a busy machine's
        scheduler interrupts less often than long ones.
        """
        span = tasks * bytes_per_task
        if tasks > MOST_TASKS or windows * span > self._data.nbytes:
            raise ValueError(f"{windows} windows of {tasks} tasks of {bytes_per_task} bytes exceed the buffers")
        start = self.address
        scratch = self._scratch.ctypes.data + -self._scratch.ctypes.data % 4096
        args = (ctypes.c_int64 * 5)(start, bytes_per_task, passes, scratch, self._out.ctypes.data)
        address = self._engine.get_function_address(name)
        run, where = pool(threads).run, ctypes.addressof(args)

        def call() -> None:
            args[0] = start + (next(self._turns) % windows) * span
            run(address, where, tasks)

        return call

    def features(
        self, name: str, threads: int, tasks: int, bytes_per_task: int, passes: int, windows: int = 1
    ) -> Features:
        """What the cost model sees of `call` with the same arguments."""
        counts, unpack = self._counts(name)
        body = self._bodies.get(name)
        iterations = tasks * passes * bytes_per_task // body.step_bytes if body else 0
        exponentials = iterations * body.exponentials if body else 0
        instructions = {kind: 0.0 if exponentials else float(count * iterations) for kind, count in counts.items()}
        values = iterations * body.values if body else 0
        return Features(
            bytes=tasks * bytes_per_task * passes,
            working_set_bytes=windows * tasks * bytes_per_task,
            instructions=instructions,
            unpack_ops=0.0 if exponentials else unpack * values / 32,
            unpack_ops_per_32=unpack,
            exponentials=exponentials,
            tasks=tasks,
            threads=threads,
        )

    @functools.cache  # noqa: B019 (a bench lives as long as its calibration)
    def _counts(self, name: str) -> tuple[dict[str, int], float]:
        if name not in self.codes:
            return {}, 0.0
        code = self.codes[name]
        return instruction_counts(code), unpack_ops_per_32(code)

    def chill(self, nbytes: int, threads: int) -> bool:
        """Evict the first ``nbytes`` bytes that tasks read, if this machine can, and wake the pool's threads.

        Returns whether both worked.
        """
        evicted = evict(self.address, min(nbytes, self._data.nbytes))
        return wake(threads) and evicted

    def cold_seconds(self, call: Callable[[], None], nbytes: int, threads: int) -> float:
        """Wall time of one call whose ``nbytes`` bytes come from memory."""
        self.chill(nbytes, threads)
        return self.seconds(call)

    @staticmethod
    def seconds(call: Callable[[], None]) -> float:
        """Wall time of one call."""
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

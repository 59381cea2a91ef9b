"""The GPU at hand, through cuda.core: memory, code, launches, events, graphs.

What is imported here needs no driver; a `Driver` does. All of its work goes, in order, to one stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from ..errors import CompileError, DeviceError, GpuMemoryError, poisoned
from . import probes
from .faults import checked, translated
from .gpus import describe, has_driver, why_no_driver

ORDINARY_SHARED_BYTES = 48 << 10
"""Dynamic shared memory that a block gets without asking."""
FLUSH_CACHES = 2
"""A flush reads this many times what the second-level cache holds."""
LEAST_FLUSH_BYTES = 32 << 20

READ_BLOCKS, READ_THREADS = 4, 256
"""Blocks of a read on each multiprocessor: all resident at once, so that none begins when others end. With 64 bytes a
thread they ask for 64 KiB at a time, more than bandwidth times latency of any board here."""

ARGUMENT_TYPES: Mapping[str, type[np.int64 | np.int32 | np.float32]] = {
    "pointer": np.int64,
    "int64": np.int64,
    "int32": np.int32,
    "float32": np.float32,
}
"""What a kernel takes for a parameter of each type."""


class Parameter(Protocol):
    """`lowbit.kernels.cuda.program.Parameter`, or what has its attributes."""

    @property
    def name(self) -> str: ...

    @property
    def type(self) -> str: ...


class Geometry(Protocol):
    """`lowbit.kernels.cuda.program.Geometry`, or what has its attributes."""

    @property
    def grid(self) -> tuple[int, int, int]: ...

    @property
    def threads(self) -> int: ...

    @property
    def shared_bytes(self) -> int: ...


@dataclass(frozen=True)
class Blocks:
    """A `Geometry` that needs nothing of what kernels are made with."""

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int = 0


_SMALLEST = Blocks((1, 1, 1), 32)


def typed_arguments(parameters: Sequence[Parameter], values: Mapping[str, int | float]) -> tuple[np.generic, ...]:
    """A kernel's arguments in order, each of its parameter's type.

    Raises
    ------
    CompileError
        If a value is missing, does not fit its type, or the type is unknown.
    """
    arguments = []
    for parameter in parameters:
        if parameter.name not in values or parameter.type not in ARGUMENT_TYPES:
            raise CompileError(f"the kernel's argument {parameter.name} ({parameter.type}) has no value")
        try:
            arguments.append(ARGUMENT_TYPES[parameter.type](values[parameter.name]))
        except OverflowError as error:
            raise CompileError(
                f"the kernel's argument {parameter.name} ({parameter.type}) cannot be {values[parameter.name]}"
            ) from error
    return tuple(arguments)


class Memory:
    """Device memory: an address and a length. Freed by `free`, or with the object.

    Attributes
    ----------
    address : int
    nbytes : int
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    def free(self) -> None:
        """Give the memory back; a second time is harmless, and so is a broken context, which has none left."""
        if not self.address:
            return
        from cuda.bindings import driver

        address, self.address = self.address, 0
        driver.cuMemFree(address)

    def __del__(self) -> None:
        with suppress(Exception):
            self.free()


class Function:
    """A loaded kernel.

    Attributes
    ----------
    symbol : str
    kernel : cuda.core.Kernel
    registers, shared_bytes, most_threads : int
        Of a thread; static shared memory of a block; of a block.
    """

    def __init__(self, symbol: str, code: Any, kernel: Any) -> None:
        self.symbol = symbol
        self.kernel = kernel
        self._code = code
        attributes = kernel.attributes
        self.registers = int(attributes.num_regs)
        self.shared_bytes = int(attributes.shared_size_bytes)
        self.most_threads = int(attributes.max_threads_per_block)
        self.dynamic_bytes = ORDINARY_SHARED_BYTES

    def argument_sizes(self) -> tuple[int, ...] | None:
        """Bytes of each parameter; None where the driver is too old to say (before CUDA 12.4)."""
        try:
            return tuple(int(info.size) for info in self.kernel.arguments_info)
        except Exception:
            return None


class Event:
    """A moment in the stream's work."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def since(self, earlier: Event) -> float:
        """Microseconds from ``earlier`` to this; waits until this has come.

        Raises
        ------
        GpuFaultError
            If the work before it broke the context.
        """
        with translated("waiting for a kernel"):
            self._event.sync()
            return float(self._event - earlier._event) * 1e3


class Graph:
    """Captured work that one call replays.

    Attributes
    ----------
    calls : int
        How often the captured work is in it.
    """

    def __init__(self, graph: Any, stream: Any, work: Sequence[Callable[[], object]]) -> None:
        self._graph, self._stream, self.calls = graph, stream, len(work)
        self._work = tuple(work)  # A graph holds addresses; what they lead to must live as long.

    def enqueue(self) -> None:
        with translated("replaying a graph"):
            self._graph.launch(self._stream)

    def close(self) -> None:
        with suppress(Exception):
            self._graph.close()


class Driver:
    """One GPU, owned by one thread.

    Everything is enqueued on one stream, in order; `read`, `synchronize` and `Event.since` wait. A kernel's fault shows
    at the next wait, or later.

    Parameters
    ----------
    ordinal : int
        Of `lowbit.kernels.cuda.gpus.gpus_here`.

    Attributes
    ----------
    gpu : GpuHere

    Raises
    ------
    DeviceError
        If there is no driver, or no such GPU. From every method: `GpuFaultError` once the context is broken (this
        process must end), `GpuMemoryError`, or a `DeviceError` that names the driver's own.
    """

    def __init__(self, ordinal: int = 0) -> None:
        if not has_driver():
            raise DeviceError(f"no NVIDIA GPU can be used: {why_no_driver()}")
        from cuda import core
        from cuda.bindings import driver

        checked(driver.cuInit(0), "starting CUDA")
        self.gpu = describe(ordinal)
        with translated(f"opening GPU {ordinal}"):
            self._device = core.Device(ordinal)
            self._device.set_current()
            self._stream = self._device.create_stream()
        self._target: Any = self._stream
        self._stand_in: Function | None = None
        self._probes: dict[str, Function] = {}
        self._flush: Memory | None = None
        self._sink: Memory | None = None
        _open.add(self)

    # -- memory ---------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> Memory:
        """Uninitialised memory, aligned to 256 bytes; at least one byte of it."""
        from cuda.bindings import driver

        doing = f"allocating {nbytes} bytes on the GPU"
        return Memory(int(checked(driver.cuMemAlloc(max(nbytes, 1)), doing)), nbytes)

    def upload(self, array: NDArray[Any]) -> Memory:
        """New memory that holds ``array``'s bytes in C order."""
        array = np.ascontiguousarray(array)
        memory = self.alloc(array.nbytes)
        self.write(memory, array)
        return memory

    def write(self, memory: Memory, array: NDArray[Any], offset: int = 0) -> None:
        """Copy ``array``'s bytes, in C order, to ``offset`` bytes into ``memory``; returns when they are there."""
        from cuda.bindings import driver

        array = np.ascontiguousarray(array)
        _require_room(memory, array.nbytes, offset)
        if array.nbytes:
            doing = f"copying {array.nbytes} bytes to the GPU"
            address = memory.address + offset
            checked(driver.cuMemcpyHtoDAsync(address, array.ctypes.data, array.nbytes, self._stream.handle), doing)
            self.synchronize()

    def read(self, memory: Memory, out: NDArray[Any], offset: int = 0) -> NDArray[Any]:
        """Fill ``out``, which must be contiguous, from ``offset`` bytes into ``memory``; waits for earlier work."""
        from cuda.bindings import driver

        if not out.flags.c_contiguous or not out.flags.writeable:
            raise DeviceError("what is read from the GPU needs a contiguous, writable array")
        _require_room(memory, out.nbytes, offset)
        if out.nbytes:
            doing = f"copying {out.nbytes} bytes from the GPU"
            address = memory.address + offset
            checked(driver.cuMemcpyDtoHAsync(out.ctypes.data, address, out.nbytes, self._stream.handle), doing)
        self.synchronize()
        return out

    def fill(self, memory: Memory, value: int = 0) -> None:
        """Enqueue setting every byte to ``value``."""
        from cuda.bindings import driver

        if memory.nbytes:
            checked(
                driver.cuMemsetD8Async(memory.address, value, memory.nbytes, self._stream.handle), "clearing GPU memory"
            )

    def free_bytes(self) -> int:
        """Memory that is left."""
        from cuda.bindings import driver

        return int(checked(driver.cuMemGetInfo(), "asking for the GPU's free memory")[0])

    # -- code -----------------------------------------------------------------------------------------------------

    def load(self, code: bytes, symbol: str) -> Function:
        """Load one kernel of a cubin, or of PTX, which the driver then translates.

        Raises
        ------
        CompileError
            If the driver refuses the code, or it has no such symbol.
        """
        from cuda import core

        cubin = code.startswith(b"\x7fELF")
        with translated(f"loading kernel {symbol}"):
            # PTX is text, and the driver looks for its end.
            made = core.ObjectCode.from_cubin(code) if cubin else core.ObjectCode.from_ptx(code.rstrip(b"\0") + b"\0")
            return Function(symbol, made, made.get_kernel(symbol))

    def launch(self, function: Function, geometry: Geometry, arguments: Sequence[np.generic]) -> None:
        """Enqueue one launch; ``arguments`` are of NumPy scalar types of the parameters' widths.

        Raises
        ------
        CompileError
            If the GPU cannot launch it: too many threads or too much shared memory.
        """
        from cuda import core

        if self._stand_in is not None:
            function, geometry, arguments = self._stand_in, _SMALLEST, ()
        if geometry.threads > function.most_threads:
            raise CompileError(
                f"kernel {function.symbol} can have {function.most_threads} threads a block, not {geometry.threads}"
            )
        if geometry.shared_bytes > function.dynamic_bytes:
            self._allow(function, geometry.shared_bytes)
        config = core.LaunchConfig(grid=geometry.grid, block=geometry.threads, shmem_size=geometry.shared_bytes)
        with translated(f"launching kernel {function.symbol}"):
            core.launch(self._target, config, function.kernel, *arguments)

    def _allow(self, function: Function, nbytes: int) -> None:
        from cuda.bindings import driver

        most = self.gpu.shared_bytes - function.shared_bytes
        if nbytes > most:
            raise CompileError(
                f"kernel {function.symbol} wants {nbytes} bytes of shared memory, a block here has {most}"
            )
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = checked(driver.cuDeviceGet(self.gpu.ordinal), "looking at the GPU")
        doing = f"giving kernel {function.symbol} {nbytes} bytes of shared memory"
        checked(driver.cuKernelSetAttribute(attribute, nbytes, function.kernel.handle, device), doing)
        function.dynamic_bytes = nbytes

    # -- time -----------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until all that was enqueued is done."""
        with translated("waiting for the GPU"):
            self._stream.sync()

    def event(self) -> Event:
        """A mark in the stream, after what has been enqueued."""
        from cuda import core

        with translated("recording an event"):
            return Event(self._stream.record(options=core.EventOptions(timing_enabled=True)))

    def capture(self, calls: Sequence[Callable[[], object]]) -> Graph:
        """A graph of what ``calls`` enqueue, one after the other. They must not wait, copy or allocate."""
        with translated("capturing a graph"):
            builder = self._stream.create_graph_builder()
            builder.begin_building()
        self._target = builder
        try:
            for call in calls:
                call()
        finally:
            self._target = self._stream
            with translated("capturing a graph"):
                builder.end_building()
        with translated("making a graph"):
            graph = builder.complete()
            builder.close()
            graph.upload(self._stream)
        return Graph(graph, self._stream, calls)

    def capture_empty(self, calls: Sequence[Callable[[], object]]) -> Graph:
        """`capture`, with a kernel that returns at once in place of every launch: what the launches alone cost."""
        self._stand_in = self.probe(probes.EMPTY)
        try:
            return self.capture(calls)
        finally:
            self._stand_in = None

    def flush_l2(self) -> None:
        """Enqueue a read of other memory that leaves nothing else in the second-level cache, nor what is unwritten."""
        if self._flush is None:
            self._flush = self.alloc(max(FLUSH_CACHES * self.gpu.l2_bytes, LEAST_FLUSH_BYTES))
            self.fill(self._flush)
        self.read_through(self._flush)

    # -- probes ---------------------------------------------------------------------------------------------------

    def probe(self, symbol: str) -> Function:
        """One of `lowbit.kernels.cuda.probes`."""
        if symbol not in self._probes:
            self._probes[symbol] = self.load(probes.ptx(), symbol)
        return self._probes[symbol]

    def read_through(self, memory: Memory) -> int:
        """Enqueue a read of ``memory`` by the whole GPU; returns how many bytes it is, the rest fills no round."""
        geometry = Blocks((self.gpu.sms * READ_BLOCKS, 1, 1), READ_THREADS)
        round_bytes = geometry.grid[0] * geometry.threads * probes.READ_BYTES
        nbytes = memory.nbytes // round_bytes * round_bytes
        arguments = (np.int64(memory.address), np.int64(nbytes // 16), np.int64(self.sink()))
        self.launch(self.probe(probes.READ), geometry, arguments)
        return nbytes

    def spin(self, count: int) -> None:
        """Enqueue ``count`` dependent multiply-adds in one thread of each SM."""
        arguments = (np.int32(count), np.int64(self.sink()))
        self.launch(self.probe(probes.SPIN), Blocks((self.gpu.sms, 1, 1), 32), arguments)

    def nothing(self) -> None:
        """Enqueue a kernel that returns at once."""
        self.launch(self.probe(probes.EMPTY), _SMALLEST, ())

    def sink(self) -> int:
        """Address of 4 bytes that probes may write to."""
        if self._sink is None:
            self._sink = self.alloc(4)
        return self._sink.address


_open: WeakSet[Driver] = WeakSet()


def context_broken() -> bool:
    """Whether a fault has broken the context of a `Driver` of this process, which must then end; waits for its work."""
    for driver in tuple(_open):
        try:
            driver.synchronize()
        except DeviceError as error:
            if poisoned(error):
                return True
    return False


def _require_room(memory: Memory, nbytes: int, offset: int) -> None:
    if not memory.address or offset < 0 or offset + nbytes > memory.nbytes:
        raise GpuMemoryError(f"{nbytes} bytes at {offset} do not fit into {memory.nbytes} bytes of GPU memory")

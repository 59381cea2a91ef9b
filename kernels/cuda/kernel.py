"""One candidate that can be called: in the simulator, or on the GPU at hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..backend import Kernel
from ..calls import Call, checked_call, packed_operand
from ..errors import DeviceError
from ..packed import SLACK_BYTES, PackedTensor, aligned_zeros
from ..quantize import Quantized
from . import memory, simulator

if TYPE_CHECKING:
    from .device import Driver, Function, Memory
    from .program import Entry, Geometry, Program

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Image:
    """Machine code of one of a program's kernels: a cubin, or PTX for the driver to translate."""

    entry: Entry
    code: bytes


class CudaKernel(Kernel):
    """See `lowbit.kernels.backend.Kernel`.

    Parameters
    ----------
    program : Program
    images : tuple of Image
        Of the program's entries; none of them where kernels are simulated.
    """

    def __init__(self, program: Program, images: tuple[Image, ...]):
        self.problem, self.candidate = program.problem, program.candidate
        self.program, self.images = program, images
        self._functions: dict[str, Function] = {}

    def pack(self, role: str, values: NDArray[np.floating] | Quantized, capacity: int | None = None) -> PackedTensor:
        return packed_operand(self.problem, self.candidate, role, values, capacity)

    def __call__(self, *operands: Any, tokens: int | None = None, out: Float32 | None = None) -> Float32:
        return self.bind(*operands, tokens=tokens, out=out)()

    def bind(self, *operands: Any, tokens: int | None = None, out: Float32 | None = None) -> Callable[[], Float32]:
        """See `lowbit.kernels.backend.Kernel.bind`.

        On a GPU the packed operands are copied to it here, once, and ``x`` and ``out`` by every call. What is returned
        is a `Bound`, whose `Bound.enqueue` launches without copying or waiting.

        Raises
        ------
        DeviceError
            If there is no GPU of the kernel's architecture, and kernels are not simulated either.
        """
        call = checked_call(self.problem, self.candidate, operands, tokens, out)
        if simulator.simulating():
            return functools.partial(_simulate, self.program, call)
        driver = driver_for(self.program.arch)
        for image in self.images:
            if image.entry.symbol not in self._functions:
                self._functions[image.entry.symbol] = driver.load(image.code, image.entry.symbol)
        return Bound(self.program, self._functions, call, driver)


def _launches(program: Program, tokens: int) -> list[tuple[Entry, Geometry]]:
    launches = [(program.main, program.geometry(tokens))]
    if program.merge is not None:
        launches.append((program.merge, program.merge_geometry(tokens)))
    return launches


def _strides(call: Call) -> dict[str, int]:
    """Bytes from head to head of each packed operand's words and scales."""
    values = {}
    for role, operand in call.packed.items():
        values[f"{role}_stride"], values[f"{role}_scale_stride"] = operand.words.strides[0], operand.scales.strides[0]
    return values


# -- in the simulator --------------------------------------------------------------------------------------------------


def _simulate(program: Program, call: Call) -> Float32:
    """Run a call in the simulator, whose kernels may touch its operands and nothing else."""
    x, out = aligned_zeros(call.x.size, np.float32), aligned_zeros(call.out.size, np.float32)
    partials = aligned_zeros(program.workspace_bytes(call.tokens), np.uint8)
    x[:] = call.x.reshape(-1)
    for array in (out, partials):  # what a kernel reads too early or leaves out is seen
        array.view(np.uint8)[:] = simulator.UNDEFINED
    regions, values = [], {}
    for name, array in (("x", x), ("out", out), ("partials", partials)):
        values[name] = array.ctypes.data
        regions.append(memory.Region(array.ctypes.data, array.nbytes, name != "x", name))
    for role, operand in call.packed.items():
        for name, array in ((f"{role}_words", operand.words), (f"{role}_scales", operand.scales)):
            values[name] = array.ctypes.data
            regions.append(memory.Region(array.ctypes.data, array.nbytes + SLACK_BYTES, False, name))
    values |= _strides(call)
    with memory.registered(*regions):
        for entry, geometry in _launches(program, call.tokens):
            simulator.run(entry, geometry, {**program.constants(call.tokens), **values})
    call.out[...] = out.reshape(call.out.shape)
    return call.out


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@functools.cache
def _drivers() -> dict[str, Driver]:
    return {}


def driver_for(arch: str) -> Driver:
    """The first GPU of an architecture, opened once a process.

    Raises
    ------
    DeviceError
        If there is none.
    """
    drivers = _drivers()
    if arch not in drivers:
        from .device import Driver
        from .gpus import gpus_here, has_driver, why_no_driver

        if not has_driver():
            raise DeviceError(f"no GPU to run kernels for {arch} on: {why_no_driver()}")
        here = gpus_here()
        ordinal = next((gpu.ordinal for gpu in here if gpu.arch == arch), None)
        if ordinal is None:
            found = ", ".join(f"{gpu.name} ({gpu.arch})" for gpu in here) or "none"
            raise DeviceError(f"no GPU to run kernels for {arch} on: this machine has {found}")
        drivers[arch] = Driver(ordinal)
    return drivers[arch]


class Bound:
    """One call whose operands lie on the GPU.

    Attributes
    ----------
    driver : Driver
    out : ndarray of float32
        Filled by a call, not by `enqueue`.
    """

    def __init__(self, program: Program, functions: dict[str, Function], call: Call, driver: Driver):
        from .device import typed_arguments

        self.driver, self.out = driver, call.out
        self._call = call
        self._x, self._out = driver.alloc(call.x.nbytes), driver.alloc(call.out.nbytes)
        self._memory = [self._x, self._out, driver.alloc(program.workspace_bytes(call.tokens))]
        values: dict[str, int | float] = {
            name: held.address for name, held in zip(("x", "out", "partials"), self._memory, strict=True)
        }
        for role, operand in call.packed.items():
            for name, array in ((f"{role}_words", operand.words), (f"{role}_scales", operand.scales)):
                held = _with_slack(driver, array)
                self._memory.append(held)
                values[name] = held.address
        values |= _strides(call)
        values |= program.constants(call.tokens)
        self._launches = [
            (functions[entry.symbol], geometry, typed_arguments(entry.parameters, values))
            for entry, geometry in _launches(program, call.tokens)
        ]
        driver.write(self._x, call.x)

    def enqueue(self) -> None:
        """Launch on the driver's stream, and wait for nothing."""
        for function, geometry, arguments in self._launches:
            self.driver.launch(function, geometry, arguments)

    def __call__(self) -> Float32:
        self.driver.write(self._x, self._call.x)
        self.enqueue()
        self.driver.read(self._out, self.out)
        return self.out


def _with_slack(driver: Driver, array: NDArray[Any]) -> Memory:
    """A copy on the GPU, followed by the readable bytes that a packed operand promises."""
    held = driver.alloc(array.nbytes + SLACK_BYTES)
    driver.fill(held)
    driver.write(held, array)
    return held

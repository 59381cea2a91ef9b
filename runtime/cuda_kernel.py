"""Winners that were shipped with their machine code: loaded and launched without a compiler."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..db.kernels import KernelImage, ShippedWinner
from ..db.records import Winner
from ..db.store import Store
from ..kernels.backend import Kernel
from ..kernels.calls import Call, checked_call, packed_operand
from ..kernels.candidate import Candidate
from ..kernels.cuda.device import ARGUMENT_TYPES, Blocks, typed_arguments
from ..kernels.errors import CompileError, DatabaseError, DeviceError, LayoutError, NoWinnerError
from ..kernels.packed import SLACK_BYTES, PackedTensor
from ..kernels.problem import Problem, check_tokens
from ..kernels.quantize import Quantized
from .choice import Entry, Pools, ranked
from .cuda_loaders import Block, Loaded, Loader, loader_named
from .cuda_trust import TRUST_THIS_FILE, Trust, vouched
from .select import Database, FallbackWarning

__all__ = ["TRUST_THIS_FILE", "ShippedKernel", "Trust", "load_kernel"]

Float32 = NDArray[np.float32]


def load_kernel(
    database: str | Path | Database,
    problem: Problem | str,
    tokens: int,
    *,
    digest: str | None = None,
    trust: Trust | None = None,
    device: str | None = None,
    loader: str | None = None,
    ordinal: int = 0,
) -> ShippedKernel:
    """Load the winner for a problem at a context length, with the machine code that the database holds.

    Nothing is compiled but PTX, by the driver, where the cubin is of another architecture. A winner of the GPU itself
    comes before one of another board, and one whose range holds ``tokens`` before others; anything but both warns with
    `FallbackWarning`.

    Parameters
    ----------
    database : str, Path or Database
    problem : Problem or str
        The problem, or its `Problem.key`.
    tokens : int
    digest : str, optional
        SHA-256 of the database file in hexadecimal, from a source that is trusted.
    trust : Trust, optional
        `TRUST_THIS_FILE` instead of a digest.
    device : str, optional
        Fingerprint of the board whose winners come first; the GPU's own unless given.
    loader : str, optional
        ``cuda.core`` or ``pycuda``; the first that is installed unless given.
    ordinal : int
        Of the GPU.

    Raises
    ------
    TrustError
        If neither ``digest`` nor ``trust`` is given, or the file has another digest. Nothing is loaded then.
    DatabaseError
        If the file cannot be read, or code in it is not what its own digest says.
    NoWinnerError
        If no winner with code answers, or none of those runs on this GPU.
    DeviceError
        If there is no GPU, or no loader.
    CompileError
        If the driver refuses the code, or its parameters are not what the database says.
    """
    path = database.path if isinstance(database, Database) else Path(database)
    problem = Problem.parse(problem) if isinstance(problem, str) else problem
    check_tokens(tokens, problem.length_name)
    with vouched(path, digest, trust) as store:
        found = _winners(store, problem)
        if not found:
            raise NoWinnerError(f"{path} holds no winner with machine code for {problem.key}")
        gpu = loader_named(loader, ordinal)
        winner, why = _best(found, problem, tokens, gpu.arch, device or _fingerprint(ordinal))
        if winner is None:
            archs = ", ".join(dict.fromkeys(arch for _, arch in found))
            raise NoWinnerError(f"{path} holds code for {problem.key} on {archs}, which does not run on {gpu.arch}")
        kept = store.shipped(winner)
    if kept is None:  # it had code a moment ago, within one reading
        raise DatabaseError(f"{path}: kernels of the winner for {problem.key} are missing")
    if why:
        warnings.warn(f"{problem.key} at {tokens} {problem.length_name}: {why}", FallbackWarning, stacklevel=2)
    return ShippedKernel(winner, *kept, gpu)


def _winners(store: Store, problem: Problem) -> list[tuple[Winner, str]]:
    found = []
    for winner in store.winners(problem=problem.key):
        arch = store.shipped_arch(winner)
        if arch is not None:
            found.append((winner, arch))
    return found


def runs_on(code: str, gpu: str) -> bool:
    """Whether code for architecture ``code`` runs on ``gpu``: as it is, or translated from PTX."""
    return _number(code) <= _number(gpu)


def cubin_runs_on(code: str, gpu: str) -> bool:
    """Whether a cubin does: on its own major architecture, from its own minor one on."""
    return _number(code) // 10 == _number(gpu) // 10 and runs_on(code, gpu)


def _number(arch: str) -> int:
    digits = arch.removeprefix("sm_")
    if not digits.isdecimal():
        raise DeviceError(f"not a GPU architecture: {arch!r}")
    return int(digits)


def _fingerprint(ordinal: int) -> str:
    """The GPU's key in databases; empty where only its driver knows it."""
    from ..costmodel.gpu_here import profile_here
    from ..kernels.cuda.gpus import gpus_here

    here = next((gpu for gpu in gpus_here() if gpu.ordinal == ordinal), None)
    try:
        return profile_here(here).fingerprint if here else ""
    except DeviceError:
        return ""


def _best(
    found: list[tuple[Winner, str]], problem: Problem, tokens: int, gpu: str, device: str
) -> tuple[Winner | None, str]:
    """The winner to load, and what is not exact about it."""
    pools: dict[str, list[Entry]] = {"same": [], "near": [], "others": []}
    for winner, arch in found:
        if not runs_on(arch, gpu):
            continue
        try:
            candidate = Candidate.parse(winner.candidate)
        except LayoutError:
            continue  # For instance the packing of a plugin that this process has not imported.
        place = "same" if winner.device == device else "near" if arch == gpu else "others"
        pools[place].append(Entry(winner, candidate, False, 0.0, log2(winner.tokens)))
    for entries in pools.values():
        for choice in ranked(Pools(tuple(entries), (), ()), tokens):
            chosen = choice.winner
            assert chosen is not None
            reasons = []
            if not chosen.covers(tokens):
                reasons.append(f"no winner for this length; using that of {chosen.tokens} {problem.length_name}")
            if entries is not pools["same"]:
                reasons.append(f"no winner of this GPU ({gpu}); using that of {chosen.device}")
            return chosen, "; ".join(reasons)
    return None, ""


@dataclass(frozen=True)
class Argument:
    """One of a kernel's, as the database has it."""

    name: str
    type: str


class ShippedKernel(Kernel):
    """A winner's kernels on one GPU. Owned by the caller; calls on one kernel must not overlap in time.

    Attributes
    ----------
    winner : Winner
    images : tuple of KernelImage
        The code of each launch.
    native : bool
        Whether cubins run as they are; the driver has translated PTX otherwise.
    """

    def __init__(self, winner: Winner, shipped: ShippedWinner, images: tuple[KernelImage, ...], loader: Loader) -> None:
        self.winner, self.images = winner, images
        self.problem, self.candidate = Problem.parse(winner.problem), Candidate.parse(winner.candidate)
        self._shipped, self._loader = shipped, loader
        self.native = all(image.cubin and cubin_runs_on(image.arch, loader.arch) for image in images)
        self._parameters = [tuple(Argument(*each) for each in image.arguments) for image in images]
        self._functions = [_load(image, loader) for image in images]

    def pack(self, role: str, values: NDArray[np.floating] | Quantized, capacity: int | None = None) -> PackedTensor:
        return packed_operand(self.problem, self.candidate, role, values, capacity)

    def __call__(self, *operands: Any, tokens: int | None = None, out: Float32 | None = None) -> Float32:
        return self.bind(*operands, tokens=tokens, out=out)()

    def bind(self, *operands: Any, tokens: int | None = None, out: Float32 | None = None) -> ShippedCall:
        """See `lowbit.kernels.backend.Kernel.bind`. Packed operands are copied to the GPU here, once."""
        return ShippedCall(self, checked_call(self.problem, self.candidate, operands, tokens, out))

    def bind_pointers(self, values: Mapping[str, Any], tokens: int) -> PointerCall:
        """A call on operands that lie on the GPU, which are not checked: wrong addresses break the process's context.

        Parameters
        ----------
        values : mapping
            What `argument_names` says: device addresses as integers, or arrays with ``__cuda_array_interface__``, and
            strides in bytes. They stay referenced.
        tokens : int

        Raises
        ------
        CompileError
            If a value is missing.
        """
        return PointerCall(self, values, check_tokens(tokens, self.problem.length_name))

    def argument_names(self) -> tuple[str, ...]:
        """What `bind_pointers` needs."""
        names = {parameter.name: None for each in self._parameters for parameter in each}
        given = {"partials"} | {name for launch in self._shipped.launches for name in launch.constants}
        return tuple(name for name in names if name not in given)

    def _workspace(self, tokens: int) -> Block:
        return self._loader.alloc(int(self._shipped.workspace_bytes.at(tokens)))

    def _launches(self, values: Mapping[str, int | float], tokens: int) -> list[_Launch]:
        made = []
        for launch, parameters, function in zip(self._shipped.launches, self._parameters, self._functions, strict=True):
            constants = {name: rule.at(tokens) for name, rule in launch.constants.items()}
            x, y, z = (int(rule.at(tokens)) for rule in launch.grid)
            geometry = Blocks((x, y, z), launch.threads, int(launch.shared_bytes.at(tokens)))
            if min(geometry.grid) < 1 or geometry.shared_bytes < 0:
                raise CompileError(f"kernel {launch.symbol} cannot be launched at {tokens}: {geometry}")
            made.append((function, geometry, typed_arguments(parameters, {**constants, **values})))
        return made


_Launch = tuple[Loaded, Blocks, tuple[np.generic, ...]]


def _load(image: KernelImage, loader: Loader) -> Loaded:
    code = image.cubin if image.cubin and cubin_runs_on(image.arch, loader.arch) else image.ptx.encode()
    function = loader.load(code, image.symbol)
    sizes = function.argument_sizes()
    wanted = tuple(np.dtype(ARGUMENT_TYPES[type_]).itemsize for _, type_ in image.arguments)
    if sizes is not None and sizes != wanted:
        raise CompileError(f"kernel {image.symbol} takes parameters of {sizes} bytes, its database says {wanted}")
    return function


class PointerCall:
    """A call whose operands lie on the GPU."""

    def __init__(self, kernel: ShippedKernel, values: Mapping[str, Any], tokens: int) -> None:
        self._loader, self._held = kernel._loader, dict(values)
        self._partials = kernel._workspace(tokens)
        addresses = {name: _address(value) for name, value in values.items()}
        self._launches = kernel._launches({"partials": self._partials.address, **addresses}, tokens)

    def enqueue(self) -> None:
        """Launch on the loader's stream, and wait for nothing."""
        for function, geometry, arguments in self._launches:
            self._loader.launch(function, geometry, arguments)

    def synchronize(self) -> None:
        """Wait until all that was enqueued is done."""
        self._loader.synchronize()


def _address(value: Any) -> int:
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is not None:
        return int(interface["data"][0])
    return int(value)


class ShippedCall:
    """A call with NumPy operands; packed ones lie on the GPU.

    Attributes
    ----------
    out : ndarray of float32
        Filled by a call, not by `enqueue`.
    """

    def __init__(self, kernel: ShippedKernel, call: Call) -> None:
        loader = self._loader = kernel._loader
        self._call, self.out = call, call.out
        self._x, self._out = loader.alloc(call.x.nbytes), loader.alloc(call.out.nbytes)
        values: dict[str, Any] = {"x": self._x.address, "out": self._out.address}
        self._held = [self._x, self._out]
        for role, operand in call.packed.items():
            for part, array in (("words", operand.words), ("scales", operand.scales)):
                memory = loader.alloc(array.nbytes + SLACK_BYTES)
                loader.fill(memory)
                loader.write(memory, array)
                self._held.append(memory)
                values[f"{role}_{part}"] = memory.address
            values[f"{role}_stride"] = operand.words.strides[0]
            values[f"{role}_scale_stride"] = operand.scales.strides[0]
        self._pointers = PointerCall(kernel, values, call.tokens)
        loader.write(self._x, call.x)

    def enqueue(self) -> None:
        """Launch on what lies on the GPU, and wait for nothing."""
        self._pointers.enqueue()

    def __call__(self) -> Float32:
        self._loader.write(self._x, self._call.x)
        self.enqueue()
        self._loader.read(self._out, self.out)
        return self.out

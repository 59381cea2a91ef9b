"""The seam between what is computed and a device that computes it."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from .candidate import Candidate
from .problem import Problem
from .quantize import Quantized

Array = NDArray[Any]


@dataclass(frozen=True)
class Rejected:
    """A candidate that cannot exist on a device, or is not worth trying there.

    Attributes
    ----------
    candidate : Candidate
    reason : str
        In words a user can act on.
    compiles : bool
        Whether it is only left out for its prospects.
    """

    candidate: Candidate
    reason: str
    compiles: bool = False


@dataclass(frozen=True)
class Code:
    """Generated code of one hot tile function.

    Attributes
    ----------
    role : str
        ``k`` (dot a tile) or ``v`` (accumulate a tile).
    symbol : str
        The function's name in both texts.
    ir : str
        LLVM IR before optimisation, or the device's source language.
    assembly : str
        What the device's compiler made of it.
    values_per_iteration : int
        Codes of the packed operand that one iteration of the hot loop consumes.
    rows : int
        Rows of the small operand that the same iteration serves.
    packing : str
        Name of the packing it unpacks.
    """

    role: str
    symbol: str
    ir: str
    assembly: str
    values_per_iteration: int
    rows: int
    packing: str


class Kernel(ABC):
    """One compiled candidate. Owned by the caller; calls on one kernel must not overlap in time."""

    problem: Problem
    candidate: Candidate

    @abstractmethod
    def pack(self, role: str, values: Array | Quantized, capacity: int | None = None) -> Any:
        """Pack ``values`` (kv_heads, tokens, head_dim) for ``role`` ``k`` or ``v``; floats are quantised first."""

    @abstractmethod
    def __call__(self, *operands: Any, tokens: int | None = None, out: Array | None = None) -> Array:
        """Run on packed operands: ``attend(q, k, v)``, ``qk(q, k)``, ``sv(p, v)`` or ``gemv(x, w)``.

        ``q`` is float32 (heads, query_rows, head_dim); see `lowbit.kernels.reference` for each operator's shapes.
        """

    def bind(self, *operands: Any, tokens: int | None = None, out: Array | None = None) -> Callable[[], Array]:
        """The same call with everything checked and looked up once: what a decode loop repeats, and what is timed.

        The operands and ``out`` stay referenced, and are read and written anew by every call.
        """
        return functools.partial(self, *operands, tokens=tokens, out=out)


class Backend(ABC):
    """One device family: legality, compilation, generated code.

    Stateless but for caches; safe to use from several threads. Nothing touches the device before the first method call.
    """

    name: str
    counted_at_once: int = 8
    """Tile functions of one request to count them, kept together and lost together where the request is cut off: so
    few that all workers are busy to the end, and so many that the time goes into compiling rather than into messages.
    """
    first_count_s: float = 0.0
    """Seconds that counting needs to get anywhere, the start of a worker included: a budget's share for one problem is
    no shorter, for a shorter one were lost.
    """

    @abstractmethod
    def target(self) -> str:
        """The instruction set that kernels are compiled for (``avx2``), part of every stored measurement's identity."""

    @abstractmethod
    def toolchain(self) -> str:
        """Versions and source digest that a measurement depends on; a change makes stored measurements stale."""

    def tile_toolchain(self) -> str:
        """The part of `toolchain` that tile functions depend on: key of what is counted in them."""
        return self.toolchain()

    def require_compiler(self) -> None:
        """Refuse what would compile, where nothing can be compiled: sooner than candidate by candidate.

        Raises
        ------
        CompileError
            With what is missing. Never where compilers come with the package's own dependencies.
        """
        return None

    @abstractmethod
    def space(self, problem: Problem, threads: int) -> Iterator[Candidate | Rejected]:
        """Every candidate of ``problem``, each impossible or hopeless one as `Rejected` with its reason.

        The order is deterministic.
        """

    @abstractmethod
    def baseline(self, problem: Problem, threads: int) -> Candidate:
        """Row-major storage dequantised to float in the hot loop: what speed-ups are quoted against."""

    def untuned(self, problem: Problem, threads: int) -> Iterator[Candidate]:
        """What to run where nothing was tuned: candidates that should compile, the most promising first.

        None of them is measured or counted: a rule of thumb for devices of this kind. The baseline comes last.
        """
        yield self.baseline(problem, threads)

    @abstractmethod
    def compile(self, problem: Problem, candidate: Candidate) -> Kernel:
        """Compile, or raise `CompileError` with a reason."""

    @abstractmethod
    def tiles(self, problem: Problem, candidate: Candidate) -> tuple[str, ...]:
        """Symbols of the candidate's tile functions as they are counted, without prefetches, in the order of `code`.

        Code of one symbol and toolchain is the same for all problems and candidates, and on every machine: what is
        counted in it is counted once. Raises `CompileError` as `code` does.
        """

    @abstractmethod
    def code(self, problem: Problem, candidate: Candidate) -> Sequence[Code]:
        """Generated code of the candidate's tile functions, without running anything."""

    def tile(self, problem: Problem, candidate: Candidate, symbol: str) -> Code:
        """The one of `code` with this symbol, which is one of `tiles`; backends need not generate the others."""
        return next(code for code in self.code(problem, candidate) if code.symbol == symbol)


def backend_named(name: str) -> Backend:
    """The backend of this machine's CPU, ``cpu``, or of an architecture of NVIDIA GPUs, ``sm_86``.

    Raises
    ------
    DeviceError
        If there is none.
    """
    from .cuda.arch import ARCHITECTURES
    from .errors import DeviceError

    if name == "cpu":
        from .cpu.backend import CpuBackend

        return CpuBackend()
    if name in ARCHITECTURES:
        from .cuda.backend import CudaBackend

        return CudaBackend(name)
    raise DeviceError(f"unknown device {name!r}: choose cpu or one of {', '.join(ARCHITECTURES)}")

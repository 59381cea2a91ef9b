"""What is tuned for: a device's identity, whether candidates run here, and what turns their counts into times."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..kernels.backend import Backend
from ..kernels.candidate import Candidate
from ..kernels.errors import DeviceError
from ..kernels.problem import Problem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..costmodel.counts import Counts
    from ..db.records import Winner
    from ..db.store import Store
    from ..search.features import Features

GPU_BACKEND = "cuda"
"""`Backend.name` of the backend whose targets are GPUs."""


class Prices(Protocol):
    """A device's cost model with its figures filled in: what features cost."""

    def restored(self, values: Mapping[str, Any]) -> Features:
        """Features from their `as_dict`."""

    def as_timed(self, features: Features, protocol: str) -> Features:
        """As `Target.as_timed`."""

    def predict_us(self, features: Sequence[Features]) -> NDArray[np.float64]:
        """Predicted microseconds of each call: shape (len(features),)."""

    def terms_us(self, features: Features) -> dict[str, float]:
        """What one prediction adds up from, in microseconds; savings are negative."""

    def limit(self, features: Features) -> str:
        """What one call's time is mostly spent on, in a word or two: ``memory``, ``instructions``."""

    def transfer_us(self, features: Features) -> float:
        """Time that reading the operands alone would take, in microseconds."""


class Fit(Protocol):
    """What calibrating a device found."""

    @property
    def seconds(self) -> float:
        """What it took."""

    def as_dict(self) -> dict[str, Any]:
        """What is stored."""


class Target(ABC):
    """One device to tune for, which need not be in this machine.

    Everything that depends on the kind of device is asked of the target: nothing else tells CPUs from GPUs. A
    value; safe to use from several threads.

    Attributes
    ----------
    name : str
        What workers resolve to the same backend: ``cpu``, ``sm_86``, or ``module:callable``.
    backend : Backend
    isa : str
        Instruction set asked for instead of the machine's own; empty if none was.
    threads : int
        Threads of a decode step, part of a calibration's key.
    workers : int
        Processes that may compile at once on this machine.
    cache_bytes : int
        Size of the last cache level, beyond which operands come from memory.
    """

    name: str
    backend: Backend
    isa: str = ""
    threads: int
    workers: int
    cache_bytes: int
    calibration_s: tuple[float, float]
    """Most seconds of a calibration before tuning, and before quick tuning."""
    languages: tuple[str, str]
    """What `lowbit.kernels.backend.Code` holds: source and machine code, as people call them."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Key of everything that is stored about the device."""

    @property
    @abstractmethod
    def description(self) -> str:
        """For people."""

    @property
    def notice(self) -> str:
        """What was chosen for the user, to be told before anything is done; empty if nothing was."""
        return ""

    @property
    @abstractmethod
    def present(self) -> bool:
        """Whether candidates can be run on this machine."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """The device for JSON and for the database, ``fingerprint`` and ``description`` among it."""

    @abstractmethod
    def protocol(self, asked: str) -> str:
        """Under which name measurements of ``cold`` or ``warm`` are taken and stored."""

    # -- what the cost model needs -------------------------------------------------------------------------------

    @abstractmethod
    def unfit(self, problem: Problem, candidate: Candidate, counts: Sequence[Counts]) -> str | None:
        """See `lowbit.search.features.Device`."""

    @abstractmethod
    def features(self, problem: Problem, candidate: Candidate, tokens: int, counts: Sequence[Counts]) -> Features:
        """See `lowbit.search.features.Device`."""

    @abstractmethod
    def as_timed(self, features: Features, protocol: str) -> Features:
        """Features as the timing protocol has it: ``cold`` operands come from memory, however small they are."""

    @abstractmethod
    def known_prices(self, store: Store | None) -> Prices | None:
        """Prices that need no measurement here: from a stored calibration, or from a published profile."""

    @abstractmethod
    def calibrate(self, budget_s: float | None = None) -> Fit:
        """Measure what the model needs, within the time that is given or that it takes.

        Raises
        ------
        DeviceError
            If the device is not in this machine.
        """

    @abstractmethod
    def rough_prices(self, report: Callable[[str], None]) -> Prices:
        """What prices candidates well enough for one answer, where `known_prices` has nothing.

        Parameters
        ----------
        report : callable
            Told what takes a while, if anything does.
        """

    @abstractmethod
    def prices(self, fit: Fit) -> Prices:
        """The model with a calibration's figures."""

    # -- what explanations and deployments need ------------------------------------------------------------------

    @abstractmethod
    def unpacking(self, counts: Sequence[Counts]) -> dict[str, Mapping[str, int]]:
        """Instructions of hot loops that only unpack: by packed operand or loop, then by mnemonic."""

    def unknown(self, counts: Sequence[Counts]) -> Mapping[str, int]:
        """Opcodes that the analyzer does not know, and how many of each are in the code; none of a CPU's."""
        return {}

    def kernel(self, counts: Sequence[Counts], prices: Prices | None, features: Features) -> dict[str, Any]:
        """What a GPU's kernel needs and executes, for JSON: registers, occupancy, loops. Nothing, of a CPU's."""
        return {}

    def ship(self, store: Store, winners: Sequence[Winner]) -> None:
        """Keep what a deployment needs to run stored winners, where that is more than their names: nothing, for a CPU.

        Raises
        ------
        CompileError
            If a winner's code cannot be made.
        """
        return None

    def require_present(self, what: str) -> None:
        """Refuse what needs the device.

        Parameters
        ----------
        what : str
            What follows if it is not here: ``nothing can be calibrated``.

        Raises
        ------
        DeviceError
            If the device is not in this machine.
        """
        if not self.present:
            raise DeviceError(f"{self.description} is not in this machine: {what}")


def stored_prices(store: Store, device: str, threads: int) -> Prices | None:
    """What prices features that a database holds of a device, which need not be this machine's.

    Parameters
    ----------
    device : str
        Fingerprint.
    threads : int
        Of a CPU's calibration.

    Returns
    -------
    Prices or None
        None where the database holds neither a calibration nor a profile.
    """
    description = store.devices().get(device, {})
    if "arch" in description:
        from .gpu_target import stored_gpu_prices

        return stored_gpu_prices(store, description)
    from .cpu_target import stored_cpu_prices

    return stored_cpu_prices(store, device, description, threads)


def target_for(name: str, threads: int | None = None, gpu: str | None = None, isa: str = "") -> Target:
    """The target called ``name``.

    Parameters
    ----------
    name : str
        As for `lowbit.search.worker.resolve_backend`.
    threads : int, optional
        Threads of a decode step; the device's cores otherwise. Of CPUs only.
    gpu : str, optional
        Board of a GPU architecture; its most common one otherwise.
    isa : str, optional
        Instruction set of CPUs to generate code for, instead of this machine's.

    Raises
    ------
    DeviceError
        For an unknown device, or options that it does not have.
    """
    from ..search.worker import resolve_backend

    if isa and name != "cpu":
        raise DeviceError(f"--isa names instruction sets of CPUs, not of {name!r}")
    backend = resolve_backend(name)
    if backend.name == GPU_BACKEND:
        from .gpu_target import GpuTarget

        if threads is not None:
            raise DeviceError(f"--threads is for CPUs, not for {name!r}")
        return GpuTarget(name, backend, gpu)
    if gpu is not None:
        from ..costmodel.gpu import gpu_named

        raise DeviceError(f"--gpu {gpu!r} goes with --device {gpu_named(gpu).arch}, not with {name!r}")
    from .cpu_target import CpuTarget

    return CpuTarget(name, backend, threads, isa)

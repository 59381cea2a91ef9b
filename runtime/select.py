"""From a tuned database to a kernel: which stored choice answers a question, and what to do when none does."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..db.described import GPU, isa_of, short_names
from ..db.records import Winner
from ..db.store import Store
from ..kernels.backend import Backend, Kernel, backend_named
from ..kernels.candidate import Candidate, Schedule
from ..kernels.errors import CompileError, DeviceError, LayoutError, NoWinnerError, ProblemError
from ..kernels.problem import USER, Problem
from .choice import UNTUNED_LENGTHS, Choice, Entry, Pools, distance, ranked, related
from .table import SelectTable
from .untuned import Guesses

if TYPE_CHECKING:
    from ..costmodel.device import Device
    from .prices import LayoutPrices
    from .stored_model import StoredModel


SHIPPED_CODE = "lowbit.runtime.cuda_kernel.load_kernel"
"""What runs a GPU's winners without compiling them."""


class FallbackWarning(UserWarning):
    """The database had no exact and current answer; says what was used instead, and why."""


def anything(candidate: Candidate) -> bool:
    """Any candidate."""
    return True


class Database:
    """The winners of one file, held in memory.

    Safe to use from several threads. A kernel that `select` returns is shared by all who ask for the same problem and
    candidate; calls on it must not overlap in time.

    Parameters
    ----------
    path : Path
        Where the winners come from, for messages.
    winners : sequence of Winner
    devices : mapping
        Descriptions by fingerprint, of which ``isa`` and ``description`` are read.
    backend : str
        Name of the backend that compiles for this machine's device: ``cpu``, or the architecture of a GPU that it has.
    """

    def __init__(
        self, path: Path, winners: Sequence[Winner], devices: Mapping[str, Mapping[str, Any]], backend: str = "cpu"
    ) -> None:
        self.path = path
        self.winners = tuple(winners)
        self._devices = devices
        self._backend_name = backend
        self._problems: dict[str, Problem] = {}
        for key in {winner.problem for winner in winners}:
            with suppress(ProblemError):  # A later release may know operators that this one does not.
                self._problems[key] = Problem.parse(key)
        self._tables: dict[tuple[str, Problem], SelectTable] = {}
        self._own: dict[Problem | str, SelectTable] = {}
        self._kernels: dict[tuple[str, Problem, str], Kernel] = {}
        self._announced: set[Problem] = set()
        self._backends: dict[str, Backend] = {}
        self._models: dict[str, StoredModel | None] = {}
        self._guesses: dict[tuple[Problem, str], Guesses] = {}
        self._prices: dict[Problem, LayoutPrices] = {}
        self._toolchains: dict[str, str | None] = {}
        self._lock = threading.Lock()

    def select(self, problem: Problem | str, tokens: int, device: str | None = None) -> Kernel:
        """A compiled kernel for ``problem`` at a context of ``tokens``.

        Tries what is stored in the order of `lowbit.runtime.choice.HOW`, skipping what does not compile. Warns with
        `FallbackWarning`, once a problem, unless the answer is exact and of the current toolchain.

        Parameters
        ----------
        problem : Problem or str
            The problem, or its `Problem.key`.
        tokens : int
        device : str, optional
            Fingerprint to choose for; this machine's unless given.

        Raises
        ------
        ProblemError
            For a malformed key or ``tokens`` out of range.
        DeviceError
            If ``device`` is a GPU and there is none of its architecture here: `choose` answers all the same, and
            `lowbit.runtime.cuda_kernel` runs shipped code where there is no compiler.
        CompileError
            If not even the baseline compiles.
        KernelError
            If the problem is one of somebody's own kernel that this process has not imported.
        """
        table = self._own.get(problem) if device is None else None
        kernel = None if table is None else table.ready(tokens)
        if kernel is not None:
            return kernel
        self._require_here(device or self._fingerprint)
        return self.table(problem, device).select(tokens)

    def table(self, problem: Problem | str, device: str | None = None) -> SelectTable:
        """What `select` and `choose` look up: the choices for ``problem`` at every context length.

        Raises
        ------
        ProblemError
            For a malformed key.
        """
        own = self._own.get(problem) if device is None else None
        if own is not None:
            return own
        known, fingerprint = _problem(problem), device or self._fingerprint
        with self._lock:
            table = self._tables.get((fingerprint, known))
            if table is None:
                table = self._tables[fingerprint, known] = self._table(known, fingerprint)
            if device is None:
                self._own[problem] = table
        return table

    def _table(self, problem: Problem, device: str) -> SelectTable:
        pools = self._pools_of(problem, device)
        return SelectTable(
            problem,
            pools.starts,
            lambda tokens: self._choices(problem, pools, tokens, device),
            lambda candidate: self._kernel(problem, candidate, device),
            lambda tokens, choice, skipped: self._announce(problem, tokens, choice, skipped, device),
        )

    def choose(self, problem: Problem | str, tokens: int, device: str | None = None) -> Choice:
        """What `select` would try to compile first: microseconds, once a problem has been asked for.

        Raises
        ------
        ProblemError
            For a malformed key or ``tokens`` out of range.
        """
        return self.table(problem, device).choose(tokens)

    def prices(self, problem: Problem | str, usable: Callable[[Candidate], bool] = anything) -> LayoutPrices:
        """What attention costs in each pair of layouts on this machine, at any context length.

        From measurements of the problem, of the current toolchain if there are any, else by the shipped cost model,
        else of one layout alone, at a made-up price.

        Parameters
        ----------
        problem : Problem or str
        usable : callable, optional
            Whether a candidate may be used at all.
        """
        from .stored_prices import stored_prices

        known, device = _problem(problem), self._fingerprint
        found = self._prices.get(known) if usable is anything else None
        if found is None:
            guesses = self._guesses_of(known, device)
            found = stored_prices(
                self.path,
                known,
                device,
                self._toolchain(known, device),
                guesses.model,
                lambda: [each for each in guesses.candidates if usable(each)],
                lambda: (self.choose(known, tokens).candidate for tokens in UNTUNED_LENGTHS),
                usable,
            )
            if usable is anything:
                self._prices[known] = found
        return found

    def winner(self, problem: Problem | str, tokens: int, device: str | None = None) -> Winner:
        """The stored winner that `choose` falls on.

        Raises
        ------
        NoWinnerError
            If it falls on nothing that was tuned.
        ProblemError
            For a malformed key or ``tokens`` out of range.
        """
        problem = _problem(problem)
        winner = self.choose(problem, tokens, device).winner
        if winner is None:
            raise NoWinnerError(f"{self.path} holds no winner for {problem.key}, nor for one like it: tune it first")
        return winner

    def _isa(self, device: str) -> str:
        """Instruction set, or architecture, of a device; a stranger that is no GPU is taken to be like this machine."""
        return isa_of(device, self._devices.get(device, {})) or self._machine.isa

    def _require_here(self, device: str) -> None:
        arch = self._isa(device)
        if not arch.startswith(GPU):
            return
        from ..kernels.cuda.gpus import gpus_here

        if all(each.arch != arch for each in gpus_here()):
            raise DeviceError(
                f"no {arch} GPU is in this machine to run {device}'s kernels: choose() tells which they are"
            )

    def _compiles(self, problem: Problem, device: str) -> str:
        """Name of the backend of a problem on a device: GPUs have their own, and so has somebody's own kernel."""
        if problem.operator.startswith(USER):
            return problem.operator
        isa = self._isa(device)
        return isa if isa.startswith(GPU) else self._backend_name

    def _backend_for(self, problem: Problem, device: str) -> Backend:
        name = self._compiles(problem, device)
        if name not in self._backends:
            if name.startswith(USER):
                from ..kernels.cpu.user import backend_of

                self._backends[name] = backend_of(name)
            else:
                self._backends[name] = backend_named(name)
        return self._backends[name]

    def _toolchain(self, problem: Problem, device: str) -> str | None:
        """Of the backend; None where a GPU's compiler is not installed, so that nothing can be called stale."""
        name = self._compiles(problem, device)
        if name not in self._toolchains:
            try:
                self._toolchains[name] = self._backend_for(problem, device).toolchain()
            except CompileError:
                self._toolchains[name] = None
        return self._toolchains[name]

    @cached_property
    def _machine(self) -> Device:
        from ..costmodel.device import detect

        return detect()

    @cached_property
    def _fingerprint(self) -> str:
        """This machine's device that the backend compiles for."""
        if not self._backend_name.startswith(GPU):
            return self._machine.fingerprint
        from ..costmodel.gpu_here import chosen_gpu

        gpu, here, _ = chosen_gpu(self._backend_name, None)
        if here is None:
            raise DeviceError(f"no {self._backend_name} GPU is in this machine: name the device to choose for")
        return gpu.fingerprint

    def _choices(self, problem: Problem, pools: Pools, tokens: int, device: str) -> Iterator[Choice]:
        """Every choice, best first, with the default at the end."""
        yield from ranked(pools, tokens)
        yield from self._guesses_of(problem, device).choices(tokens)

    def _guesses_of(self, problem: Problem, device: str) -> Guesses:
        known = self._guesses.get((problem, device))
        if known is None:
            backend, model = self._backend_for(problem, device), None
            if self._compiles(problem, device) == "cpu":  # What prices GPUs is not shipped.
                model = self._model(device, backend)
            known = self._guesses[problem, device] = Guesses(problem, backend, self._machine.cores, model)
        return known

    def _model(self, device: str, backend: Backend) -> StoredModel | None:
        from .stored_model import stored_model  # brings in what analyses code, which winners do without

        if device not in self._models:
            self._models[device] = stored_model(self.path, backend, device, self._isa(device), self._machine.cores)
        return self._models[device]

    def _pools_of(self, problem: Problem, device: str) -> Pools:
        isa = self._isa(device)
        same: list[Entry] = []
        family: list[Entry] = []
        others: list[Entry] = []
        for winner in self.winners:
            stored = self._problems.get(winner.problem)
            if stored is None or not related(stored, problem):
                continue
            if winner.device != device and self._devices.get(winner.device, {}).get("isa") != isa:
                continue
            entry = self._entry(problem, winner, stored, device)
            if entry is not None:
                pool = others if winner.device != device else same if stored == problem else family
                pool.append(entry)
        return Pools(tuple(same), tuple(family), tuple(others))

    def _entry(self, problem: Problem, winner: Winner, stored: Problem, device: str) -> Entry | None:
        try:
            candidate = Candidate.parse(winner.candidate)
        except LayoutError:
            return None  # For instance the packing of a plugin that this process has not imported.
        plan = candidate.plan
        if winner.device != device and isinstance(plan, Schedule) and plan.threads > self._machine.cores:
            candidate = replace(candidate, plan=replace(plan, threads=self._machine.cores))
        stale = self._toolchain(problem, device) not in (None, winner.toolchain)
        return Entry(winner, candidate, stale, distance(stored, problem), log2(winner.tokens))

    def _kernel(self, problem: Problem, candidate: Candidate, device: str) -> Kernel:
        key = self._compiles(problem, device), problem, candidate.name
        kernel = self._kernels.get(key)
        if kernel is None:
            with self._lock:
                kernel = self._kernels.get(key)
                if kernel is None:
                    kernel = self._kernels[key] = self._backend_for(problem, device).compile(problem, candidate)
        return kernel

    def _announce(self, problem: Problem, tokens: int, choice: Choice, skipped: Mapping[str, str], device: str) -> None:
        if choice.how == "exact" and not choice.stale and not skipped:
            return
        with self._lock:
            if problem in self._announced:
                return
            self._announced.add(problem)
        message = f"{problem.key} at {tokens} {problem.length_name}: {self._reason(problem, choice, device)}"
        if skipped:
            reasons = ", ".join(f"{name} ({reason})" for name, reason in skipped.items())
            message += f"; skipped what does not compile here: {reasons}"
        warnings.warn(message, FallbackWarning, stacklevel=_callers_level())

    def _reason(self, problem: Problem, choice: Choice, device: str) -> str:
        winner = choice.winner
        if winner is None:
            baseline = self._guesses_of(problem, device).baseline
            what = "the untuned baseline" if choice.candidate == baseline else "what usually wins, untuned"
            used = f"{self.path} has nothing that fits; using {what}, {choice.candidate}"
            if choice.how == "predicted":
                used = f"{self.path} has no winner that fits; using what its cost model likes best, {choice.candidate}"
            return "; ".join([used, *self._elsewhere(problem, device)])
        because = {"exact": "", "nearest": "no winner for this length; "}
        missing = "no winner for this problem here; "
        where = f"tuned at {winner.tokens} {problem.length_name}"
        if choice.how in ("family", "other_device"):
            where += f" for {winner.problem}"
        if choice.how == "other_device":
            where += f" on {self._devices[winner.device].get('description', winner.device)}"
        if choice.stale:
            where += f" with another toolchain ({winner.toolchain}, here {self._toolchain(problem, device)})"
        return f"{because.get(choice.how, missing)}using {choice.candidate}, {where}"

    def _elsewhere(self, problem: Problem, device: str) -> Iterator[str]:
        """For which devices of other kinds there are winners, and what runs a GPU's."""
        isa, names = self._isa(device), short_names(self._devices)
        stored = dict.fromkeys(winner.device for winner in self.winners if winner.problem == problem.key)
        kinds = {each: isa_of(each, self._devices.get(each, {})) for each in stored if each != device}
        for gpus, run in ((True, f", which {SHIPPED_CODE} runs"), (False, "")):
            others = [each for each, kind in kinds.items() if kind != isa and kind.startswith(GPU) == gpus]
            if others:
                yield f"it has winners for {', '.join(names.get(each, each) for each in others)}{run}"


def open_db(path: str | Path, backend: str = "cpu") -> Database:
    """Load a tuned database. Never tunes, never changes the file, and needs no network.

    Parameters
    ----------
    path : str or Path
    backend : str
        Name of the backend that compiles for this machine's device: ``cpu``, or the architecture of a GPU that it has.

    Raises
    ------
    DatabaseError
        If ``path`` is missing or refused, see `lowbit.db.Store.open`.
    """
    with Store.open(path, "read") as store:
        return Database(Path(path), store.winners(), store.devices(), backend)


def _problem(problem: Problem | str) -> Problem:
    return Problem.parse(problem) if isinstance(problem, str) else problem


def _callers_level() -> int:
    """``stacklevel`` of whoever called into this package's selection."""
    level, frame = 1, sys._getframe(1)
    own = __name__, SelectTable.__module__
    while frame.f_back is not None and frame.f_globals.get("__name__") in own:
        level, frame = level + 1, frame.f_back
    return level

"""Before somebody's kernel is tuned: whether it works at all, in the storage that asks least of it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from ..db.records import Measurement
from ..db.store import Store
from ..kernels.backend import Backend
from ..kernels.candidate import Candidate
from ..kernels.cpu.user import UserBackend
from ..kernels.errors import CompileError, KernelError
from ..kernels.problem import Problem
from ..search.crew import Crew
from ..search.messages import Prepare, Setup
from ..search.rounds import Fault
from .outcome import Options, Progress
from .target import Target, target_for

_TOO_COARSE = "; 8 bits may be too coarse: raise the tolerance, or declare pipelines=('float',)"


def preflight(problems: Sequence[Problem], tokens: int, options: Options, progress: Progress) -> None:
    """Compile and check each problem's baseline, and one candidate in integers; what fails is stored as a measurement.

    A kernel that fails here does so in every layout, and the search would try them all.

    Parameters
    ----------
    problems : sequence of Problem
        Of one kernel, which ``options.device`` names.
    tokens : int
        Context length to check at, besides the awkward ones.

    Raises
    ------
    CompileError
        If the kernel does not compile.
    KernelError
        If it is wrong, crashes or hangs, or if its reference fails.
    """
    target = target_for(options.device, options.threads, options.gpu)
    backend = target.backend
    if isinstance(backend, UserBackend):
        backend.definition.check_reference()
    setup = Setup(options.device, options.plugins, target.threads, search_path=tuple(sys.path))
    with Crew(setup, 1, options.deadlines_s) as crew:
        for done, problem in enumerate(problems):
            progress.update("checking", done, len(problems), problem.key)
            for candidate in _first_ones(backend, problem, target.threads):
                fault = crew.ask(Prepare(problem.key, tokens, candidate.name))
                if not isinstance(fault, Fault):
                    continue
                _keep(options, target, problem, tokens, candidate, fault)
                if fault.status == "compile_failed":
                    raise CompileError(fault.message)
                said = f"{problem.key} in {candidate.pipeline}s: {fault.status}, {fault.message}"
                # Floats have shown that the kernel itself is right.
                coarse = candidate.pipeline == "integer" and fault.status == "wrong"
                raise KernelError(said + (_TOO_COARSE if coarse else ""))
    progress.update("checking", len(problems), len(problems), "")


def _first_ones(backend: Backend, problem: Problem, threads: int) -> list[Candidate]:
    """The baseline, which contracts in floats, and a candidate that does so in integers, if there is one."""
    space = backend.space(problem, threads)
    integers = (each for each in space if isinstance(each, Candidate) and each.pipeline == "integer")
    return [backend.baseline(problem, threads), *itertools.islice(integers, 1)]


def _keep(
    options: Options,
    target: Target,
    problem: Problem,
    tokens: int,
    candidate: Candidate,
    fault: Fault,
) -> None:
    measurement = Measurement(
        device=target.fingerprint,
        problem=problem.key,
        tokens=tokens,
        candidate=candidate.name,
        protocol=target.protocol(options.protocol),
        status=fault.status,
        max_error=fault.max_error,
        message=fault.message,
        toolchain=target.backend.toolchain(),
    )
    with Store.open(options.db_path) as store:
        store.put_device(target.fingerprint, target.as_dict())
        store.put_measurement(measurement)

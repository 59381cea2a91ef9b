"""Which kernel stands for this project: this device's winner for exactly the case, tuned first where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ...costmodel.device import Device
from ...db.records import Winner
from ...db.store import Store
from ...kernels.backend import backend_named
from ...kernels.candidate import Candidate
from ...kernels.errors import EmptyDatabaseError, NoiseError, NoWinnerError
from ...kernels.problem import Problem
from ...search.timing import protocol_here
from ..outcome import Options, Progress
from ..tune import tune
from .case import Case


def winners(
    cases: Sequence[Case],
    path: Path,
    device: Device,
    threads: int,
    protocol: str,
    progress: Progress,
    say: Callable[[str], None],
) -> dict[Case, str]:
    """The candidate of each case.

    Parameters
    ----------
    cases : sequence of Case
    path : Path
        Database; created if missing. What is tuned is stored there.
    device : Device
    threads : int
        Most threads that a winner may use.
    protocol : str
        ``cold`` or ``warm``.
    progress : Progress
    say : callable
        Told, in one line, that something has to be tuned.

    Raises
    ------
    NoWinnerError
        If tuning left a case without a winner.
    LowbitError
        From `lowbit.autotune.tune.tune`.
    """
    found = _stored(cases, path, device, threads, protocol)
    missing: dict[Problem, list[int]] = {}
    for case in cases:
        if case not in found:
            missing.setdefault(case.problem, []).append(case.tokens)
    for problem, lengths in missing.items():
        say(f"{path} has no measured winner for {problem.key} at {', '.join(map(str, sorted(set(lengths))))}: tuning")
        options = Options(path, strategy="verify", quick=True, threads=threads, protocol=protocol)
        try:
            tune([problem], lengths, options, progress)
        except NoiseError as error:
            say(str(error))  # predicted winners are stored, and the bench measures how good they are
    if missing:
        found = _stored(cases, path, device, threads, protocol, predicted=True)
    for case in cases:
        if case not in found:
            raise NoWinnerError(f"{path} holds no winner for {case.key}, not even after tuning")
    return found


def _stored(
    cases: Sequence[Case], path: Path, device: Device, threads: int, protocol: str, predicted: bool = False
) -> dict[Case, str]:
    if not path.exists():
        return {}
    toolchain = backend_named("cpu").toolchain()

    def fits(winner: Winner) -> bool:
        measured = winner.provenance != "predicted" and winner.protocol == protocol_here(protocol)
        usable = Candidate.parse(winner.candidate).schedule.threads <= threads
        return winner.toolchain == toolchain and usable and (measured or predicted)

    try:
        store = Store.open(path, "read")
    except EmptyDatabaseError:  # another process has only just made it
        return {}
    with store:
        stored = {(w.problem, w.tokens): w.candidate for w in store.winners(device.fingerprint) if fits(w)}
    return {case: found for case in cases if (found := stored.get((case.problem.key, case.tokens))) is not None}

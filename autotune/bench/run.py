"""The bench itself: every contestant enters a case, and those that are right are timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...costmodel.device import Device, detect
from ...kernels.cpu.pool import allowed_cpus, pinned
from ...kernels.errors import NoiseError
from ...search.control import Contention, Control, ControlTime
from ...search.rounds import Effort, Fault, Timed, interleave
from ...search.statistics import median, spread
from ...search.timing import Slot
from ..outcome import Progress
from .case import Case
from .contestant import LIMIT
from .messages import Enter, Entered, Leave, Refused, Taken, Time
from .outcome import ABSENT, LimitPoint, Outcome, Row
from .team import Player, Team

FULL = Effort(min_rounds=12, max_rounds=30, target_spread=0.02)
QUICK = Effort(min_rounds=4, max_rounds=8, target_spread=0.05)
LEAST_ROUNDS = 3
"""Undisturbed rounds without which a median is not reported."""
MOST_SPREAD = 0.4
"""Interquartile range over median beyond which a median is not reported."""
TOGETHER_VALUES = 128 << 20
"""Values of all contestants' operands that are prepared at once; larger cases are prepared one by one."""


@dataclass
class Run:
    """One call of `bench`."""

    team: Team
    protocol: str
    effort: Effort
    outcome: Outcome
    control: Control
    contention: Contention = field(default_factory=Contention)

    def case(self, case: Case, candidate: str) -> None:
        """Add a case's rows to the outcome."""
        entered = self._enter(case, candidate)
        ready = [name for name, reply in entered.items() if isinstance(reply, Entered)]
        timed: dict[str, Timed | Fault] = {}
        try:
            interleave(ready, self._slot, self.effort, self.contention, timed.__setitem__)
        except NoiseError:
            pass  # whoever has no time is noisy
        finally:
            for name in ready:
                self.team.players[name].ask(Leave())
        for result in timed.values():
            if isinstance(result, Timed):
                self.outcome.rounds += result.rounds
                self.outcome.tainted += result.tainted
        limit = self._limit(case, entered.get(LIMIT), timed.get(LIMIT))
        for name, player in self.team.players.items():
            if name != LIMIT:
                row = _row(case, player, entered.get(name), timed.get(name), limit)
                self.outcome.rows.append(replace(row, candidate=candidate if name == "lowbit" else ""))

    def _enter(self, case: Case, candidate: str) -> dict[str, Entered | Refused]:
        players = [player for player in self.team.players.values() if not player.opened.absent]
        step = len(players) if case.values * len(players) <= TOGETHER_VALUES else 1
        replies: dict[str, Entered | Refused] = {}
        for start in range(0, len(players), step):
            group = players[start : start + step]
            for player in group:
                player.send(Enter(case, candidate, self.protocol))
            for player in group:
                reply = player.receive()
                assert isinstance(reply, Entered | Refused)
                replies[player.name] = reply
        return replies

    def _slot(self, name: str) -> Slot | Fault:
        before = self._read(self.control.recent)
        reply = self.team.players[name].ask(Time(self.protocol))
        if isinstance(reply, Taken):
            return Slot(reply.samples_us, before, self._read(self.control.time), reply.preempted)
        assert isinstance(reply, Refused)
        return Fault(reply.status, reply.message)

    def _read(self, read: Callable[[], ControlTime]) -> ControlTime:
        with pinned():
            return read()

    def _limit(self, case: Case, entered: Entered | Refused | None, timed: Timed | Fault | None) -> LimitPoint | None:
        if not isinstance(entered, Entered) or not isinstance(timed, Timed):
            return None
        if spread(timed.samples_us) > MOST_SPREAD or timed.rounds - timed.tainted < LEAST_ROUNDS:
            return None
        point = LimitPoint(case, entered.nbytes, median(timed.samples_us), spread(timed.samples_us))
        self.outcome.limits.append(point)
        return point


def _row(
    case: Case,
    player: Player,
    entered: Entered | Refused | None,
    timed: Timed | Fault | None,
    limit: LimitPoint | None,
) -> Row:
    if entered is None:
        return Row(case, player.name, ABSENT, player.opened.absent)
    if isinstance(entered, Refused):
        return Row(case, player.name, entered.status, entered.message, max_rel_error=entered.max_rel_error)
    row = Row(
        case,
        player.name,
        "ok",
        storage=entered.storage,
        nbytes=entered.nbytes,
        max_rel_error=entered.max_rel_error,
    )
    if isinstance(timed, Fault):
        return replace(row, status=timed.status, message=timed.message)
    clean = 0 if timed is None else timed.rounds - timed.tainted
    if timed is None or clean < LEAST_ROUNDS:
        return replace(row, status="noisy", message=f"only {clean} timing rounds of it were undisturbed")
    middle, width = median(timed.samples_us), spread(timed.samples_us)
    if width > MOST_SPREAD:
        return replace(row, status="noisy", message=f"its samples' spread of {width:.0%} says nothing about its speed")
    share = None if limit is None else entered.nbytes / limit.gbps / 1e3 / middle
    return replace(row, median_us=middle, spread=width, samples=len(timed.samples_us), limit_share=share)


def bench(
    cases: Sequence[Case],
    names: Sequence[str],
    threads: int,
    protocol: str,
    effort: Effort,
    candidates: Mapping[Case, str],
    progress: Progress,
    device: Device | None = None,
) -> Outcome:
    """Compare ``names`` in every case.

    Parameters
    ----------
    cases : sequence of Case
    names : sequence of str
        Contestants; see `lowbit.autotune.bench.contestant.contestant_named`. The limit is added to them.
    threads : int
        Threads that each of them may use.
    protocol : str
        ``cold`` or ``warm``; see `lowbit.autotune.bench.slot`.
    effort : Effort
    candidates : mapping of Case to str
        The kernel that ``lowbit`` uses in each case.
    progress : Progress
    device : Device, optional
        This machine, unless it is given.

    Raises
    ------
    NoiseError
        If the machine was too busy for anything to be timed.
    """
    device = device or detect()
    outcome = Outcome(device.as_dict(), threads, protocol)
    control = Control(allowed_cpus()[:threads], max(cache.size_bytes for cache in device.caches))
    with Team([LIMIT, *names], threads) as team:
        for name, player in team.players.items():
            if name != LIMIT:
                absent = player.opened.absent
                outcome.peers[name] = f"absent: {absent}" if absent else player.opened.version
        run = Run(team, protocol, effort, outcome, control)
        for number, case in enumerate(cases):
            progress.update("benchmarking", number, len(cases), case.key)
            run.case(case, candidates.get(case, ""))
    progress.update("benchmarking", len(cases), len(cases), "")
    entered = [row for row in outcome.rows if row.status in ("ok", "noisy")]
    if entered and all(row.status == "noisy" for row in entered):
        raise NoiseError("the machine was too busy for anything to be timed: stop what else runs, and try again")
    return outcome

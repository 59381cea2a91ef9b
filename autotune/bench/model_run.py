"""Whole models compared: each contestant in its own process, one computing at a time, repetitions in turns."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...costmodel.device import Device, detect
from ...kernels.cpu.pool import allowed_cpus, pinned
from ...kernels.errors import LogitsError, NoiseError
from ...runtime.cache_types import CacheTypes
from ...search.control import Contention, Control
from ...search.rounds import Effort, Fault, Timed, interleave
from ...search.timing import Slot
from ..divergence import score
from ..outcome import Progress
from .messages import Refused, Taken
from .model_contestant import PLAIN
from .model_messages import Check, Checked, ModelSetup, Reach, Reached, Repeat, Weigh, Weighed
from .model_outcome import GENERATE, OWN, PEER, PROMPT, ModelCase, ModelOutcome, ModelRow, timed_row
from .outcome import ABSENT
from .team import Player

LEAST_CLEAN = 3
"""Undisturbed repetitions that make a median, if so many were asked for."""
CHECK_TOKENS = 48
MOST_DIVERGENCE = 2.0
"""Nats that two contestants' distributions may differ by after a short text of random tokens. Caches of 4 bits move
them by some tenths; a wrong model is as far off as another text would be, which is five and more."""


@dataclass(frozen=True)
class Plan:
    """What to compare.

    Attributes
    ----------
    model : Path
    database : Path or None
    names : tuple of str
        Contestants; see `lowbit.autotune.bench.model_contestant.model_contestant_named`.
    types : tuple of CacheTypes
    depths : tuple of int
    prompt, generate : int
        Tokens of the two tests; 0 leaves one out.
    threads, repetitions : int
    """

    model: Path
    database: Path | None
    names: tuple[str, ...]
    types: tuple[CacheTypes, ...]
    depths: tuple[int, ...]
    prompt: int
    generate: int
    threads: int
    repetitions: int

    @property
    def room(self) -> int:
        """Tokens that a cache holds beside those of the depth."""
        return max(self.prompt, self.generate, 1)

    def cases(self, types: CacheTypes, depth: int) -> list[ModelCase]:
        """The tests at one depth."""
        tests = ((PROMPT, self.prompt), (GENERATE, self.generate))
        return [ModelCase(types, depth, test, tokens) for test, tokens in tests if tokens]

    def contestants(self, types: CacheTypes) -> list[str]:
        """Names, and llama.cpp's other way of attention where values are f16."""
        found = list(self.names)
        if PEER in found and types.v == "f16":
            found.insert(found.index(PEER) + 1, PLAIN)
        return found


class ModelPlayer(Player):
    """One contestant's process."""

    worker = "model_worker"
    start_s = 900.0

    def __init__(self, name: str, plan: Plan) -> None:
        self._plan = plan
        super().__init__(name, plan.threads)

    def _setup(self) -> ModelSetup:
        plan = self._plan
        return ModelSetup(self.name, plan.threads, allowed_cpus()[0], tuple(sys.path), plan.model, plan.database)

    def _limit_s(self, request: object) -> float:
        return 3600.0


@dataclass
class ModelRun:
    """One call of `bench_model`."""

    plan: Plan
    progress: Progress
    outcome: ModelOutcome
    control: Control
    contention: Contention = field(default_factory=Contention)

    def types(self, types: CacheTypes, done: int, total: int) -> None:
        """Add the rows of one kind of cache, each contestant in a fresh process so that its memory is this cache's."""
        with ExitStack() as closing:
            players: dict[str, ModelPlayer] = {}
            for name in self.plan.contestants(types):
                self.progress.update("benchmarking", done, total, f"{types.name}: loading {name}")
                player = players[name] = ModelPlayer(name, self.plan)
                closing.callback(player.close)
            for name, player in players.items():
                if name != PLAIN:
                    absent = player.opened.absent
                    self.outcome.peers[name] = f"absent: {absent}" if absent else player.opened.version
            reasons = {name: player.opened.absent for name, player in players.items()}
            refused = {name: Refused(ABSENT, reason) for name, reason in reasons.items() if reason}
            refused |= self._disagreement({name: each for name, each in players.items() if name not in refused}, types)
            for depth in self.plan.depths:
                self._depth(players, refused, types, depth, done, total)
                done += len(self.plan.cases(types, depth))
            for name, player in players.items():
                if name not in refused:
                    weighed = player.ask(Weigh())
                    if isinstance(weighed, Weighed):
                        self.outcome.weights[name, types] = weighed

    def _disagreement(self, players: dict[str, ModelPlayer], types: CacheTypes) -> dict[str, Refused]:
        """Who is refused for a distribution that is not llama.cpp's."""
        if PEER not in players:
            return {}
        theirs = players[PEER].ask(Check(types, CHECK_TOKENS))
        if not isinstance(theirs, Checked):
            return {}
        refused = {}
        for name, player in players.items():
            if name == PEER:
                continue
            own = player.ask(Check(types, CHECK_TOKENS))
            if isinstance(own, Refused):
                refused[name] = own
                continue
            assert isinstance(own, Checked)
            divergence = _divergence(own, theirs)
            if name == OWN:
                self.outcome.divergences[types] = divergence
            if not divergence <= MOST_DIVERGENCE:
                words = f"its distribution diverges from llama.cpp's by {divergence:.3g} nats"
                refused[name] = Refused("wrong", words)
        return refused

    def _depth(
        self,
        players: dict[str, ModelPlayer],
        refused: dict[str, Refused],
        types: CacheTypes,
        depth: int,
        done: int,
        total: int,
    ) -> None:
        at = f"{types.name} at depth {depth:,}"
        here = dict(refused)
        for name, player in players.items():
            if name not in here:
                self.progress.update("benchmarking", done, total, f"{at}: filling the cache of {name}")
                reply = player.ask(Reach(types, depth, self.plan.room))
                if not isinstance(reply, Reached):
                    assert isinstance(reply, Refused)
                    here[name] = reply
        ready = [name for name in players if name not in here]
        for number, case in enumerate(self.plan.cases(types, depth)):
            self.progress.update("benchmarking", done + number, total, f"{at}: {case.test}{case.tokens}")
            timed = self._time(players, ready, case)
            for name in players:
                if name in here:
                    if name != PLAIN or here[name].status not in ("unsupported", ABSENT):
                        self.outcome.rows.append(ModelRow(case, name, here[name].status, here[name].message))
                    continue
                least = min(LEAST_CLEAN, self.plan.repetitions)
                self.outcome.rows.append(timed_row(case, name, timed.get(name), least))

    def _time(self, players: dict[str, ModelPlayer], ready: Sequence[str], case: ModelCase) -> dict[str, Timed | Fault]:
        timed: dict[str, Timed | Fault] = {}

        def slot(name: str) -> Slot | Fault:
            with pinned():
                before = self.control.recent()
            reply = players[name].ask(Repeat(case.test, case.tokens))
            if isinstance(reply, Taken):
                with pinned():
                    return Slot(reply.samples_us, before, self.control.time(), reply.preempted)
            assert isinstance(reply, Refused)
            return Fault(reply.status, reply.message)

        count = self.plan.repetitions
        effort = Effort(min_rounds=count, max_rounds=count, target_spread=math.inf)
        with suppress(NoiseError):  # whoever has no time is noisy
            interleave(ready, slot, effort, self.contention, timed.__setitem__)
        for result in timed.values():
            if isinstance(result, Timed):
                self.outcome.rounds += result.rounds
                self.outcome.tainted += result.tainted
        return timed


def _divergence(own: Checked, theirs: Checked) -> float:
    try:
        return float(score(own.logits[None], theirs.logits[None], np.zeros(1, np.int64)).divergence[0])
    except LogitsError:
        return math.nan


def bench_model(plan: Plan, progress: Progress, device: Device | None = None) -> ModelOutcome:
    """Compare contestants.

    Parameters
    ----------
    plan : Plan
    progress : Progress
    device : Device, optional
        This machine, unless it is given.

    Raises
    ------
    NoiseError
        If the machine was too busy for anything to be timed.
    """
    device = device or detect()
    outcome = ModelOutcome(device.as_dict(), plan.threads, str(plan.model))
    control = Control(allowed_cpus()[: plan.threads], max(cache.size_bytes for cache in device.caches))
    run = ModelRun(plan, progress, outcome, control)
    each = len(plan.depths) * len(plan.cases(plan.types[0], 0))
    for number, types in enumerate(plan.types):
        run.types(types, number * each, each * len(plan.types))
    progress.update("benchmarking", each * len(plan.types), each * len(plan.types), "")
    entered = [row for row in outcome.rows if row.status in ("ok", "noisy")]
    if entered and all(row.status == "noisy" for row in entered):
        raise NoiseError("the machine was too busy for anything to be timed: stop what else runs, and try again")
    return outcome

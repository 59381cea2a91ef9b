"""A session on a real device: a crew of workers, a store, and rounds between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..db.records import TIMED, Measurement
from ..db.store import Store
from ..kernels.candidate import Candidate
from ..kernels.errors import NoiseError
from ..kernels.packed import round_capacity
from ..kernels.problem import Problem
from .control import Contention
from .crew import Crew
from .messages import Prepare, Request, TimeSlot
from .rounds import Effort, Fault, Timed, interleave
from .statistics import median, spread
from .timing import Slot, copies_needed

MAX_CHUNK = 16
"""Candidates that are compiled together and then timed against each other."""


@dataclass
class Bench:
    """What sessions of one run share.

    Attributes
    ----------
    crew : Crew
    store : Store
    device, toolchain : str
        Keys of what is stored.
    protocol : str
        ``warm`` or ``cold``.
    contention : Contention
        Its best-known control is the run's.
    cache_bytes, memory_bytes : int
        Last cache level; packed operands that one worker may keep.
    run : int or None
        The store's id of this run.
    report : callable
        Told, without arguments, whenever another candidate's outcome is known.
    rounds, tainted : int
        Timing rounds of finished candidates, and how many of them contention spoilt.
    """

    crew: Crew
    store: Store
    device: str
    toolchain: str
    protocol: str
    contention: Contention = field(default_factory=Contention)
    cache_bytes: int = 32 << 20
    memory_bytes: int = 1 << 30
    run: int | None = None
    report: Callable[[], None] = lambda: None
    rounds: int = 0
    tainted: int = 0


class DeviceSession:
    """Implements `lowbit.search.strategy.Session`; used by one thread.

    Parameters
    ----------
    bench : Bench
    problem : Problem
    tokens : int
    candidates : mapping of str to Candidate
        In the order of the predictions.
    predicted_us : mapping of str to float
    baseline : Candidate
    deadline : float or None
        `time.monotonic` value at which measuring stops.
    steady : str
        See `Session.steady`.

    Attributes
    ----------
    measured : dict of str to Measurement
        The newest measurement of each candidate, earlier runs' included.
    asked, settled : set of str
        Candidates that were asked for, and those of them whose outcome is known. What contention or the deadline kept
        from being measured is not settled.
    """

    def __init__(
        self,
        bench: Bench,
        problem: Problem,
        tokens: int,
        candidates: Mapping[str, Candidate],
        predicted_us: Mapping[str, float],
        baseline: Candidate,
        deadline: float | None = None,
        steady: str = "",
    ) -> None:
        self._bench = bench
        self.problem = problem
        self.tokens = tokens
        self.candidates = candidates
        self.predicted_us = predicted_us
        self.baseline = baseline.name
        self.deadline = deadline
        self.steady = steady
        self._named = {**candidates, self.baseline: baseline}
        self._errors: dict[str, float] = {}
        key = bench.device, problem.key, tokens, bench.toolchain
        self.measured = {m.candidate: m for m in bench.store.measurements(*key, protocol=bench.protocol)}
        self._concluded = any(
            w.provenance != "predicted"
            and (w.tokens, w.toolchain, w.protocol) == (tokens, bench.toolchain, bench.protocol)
            for w in bench.store.winners(bench.device, problem.key)
        )
        self._fresh: set[str] = set()
        self.settled: set[str] = set()
        self.asked: set[str] = set()

    @property
    def study_key(self) -> str:
        bench = self._bench
        return " | ".join((self.problem.key, f"{self.tokens} tokens", bench.protocol, bench.device, bench.toolchain))

    @property
    def exhausted(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def measure(self, names: Sequence[str], effort: Effort, final: bool = False) -> list[Measurement]:
        """See `Session.measure`."""
        names = list(dict.fromkeys(names))
        self.asked.update(names)
        if final:
            todo = [] if self._concluded and not self._fresh.intersection(names) else list(names)
        else:
            todo = [name for name in names if not self._known(name, effort)]
        self.settled.update(set(names).difference(todo))
        self._bench.report()
        noise = self._measure_all(todo, effort)
        left = [name for name in todo if name not in self.settled]
        if left and not self.exhausted:
            noise = self._measure_all(left, effort)
        if noise is not None and not any(self._timed(name) for name in todo):
            raise noise
        return [self.measured[name] for name in names if name in self.measured]

    def _measure_all(self, names: Sequence[str], effort: Effort) -> NoiseError | None:
        """Measure chunk by chunk. A busy minute must not end an hour's run, so noise is only returned."""
        # Whoever has compiled a candidate soon prepares those that share its code, before it is forgotten.
        first = {shared_code(self._named[name]): rank for rank, name in reversed(list(enumerate(names)))}
        ordered = sorted(names, key=lambda name: first[shared_code(self._named[name])])
        size = self._chunk_size(ordered)
        noise = None
        for start in range(0, len(ordered), size):
            if self.exhausted:
                break
            try:
                self._measure_chunk(ordered[start : start + size], effort)
            except NoiseError as error:
                noise = error
        return noise

    def _timed(self, name: str) -> bool:
        return name in self._fresh and self.measured[name].status in TIMED

    def _known(self, name: str, effort: Effort) -> bool:
        """Whether what is stored answers the question. A candidate given up as slow is timed properly on demand."""
        stored = self.measured.get(name)
        return stored is not None and (stored.status != "slow" or effort.slow_factor is not None)

    def _chunk_size(self, names: Sequence[str]) -> int:
        """As many candidates as the workers can keep operands for, so that no round has to pack again."""
        if not names:
            return 1
        largest = max(self._operand_bytes(self._named[name]) for name in names)
        copies = copies_needed(largest, self._bench.cache_bytes, self._bench.protocol)
        room = self._bench.memory_bytes * self._bench.crew.size
        return max(2, min(MAX_CHUNK, room // max(copies * largest, 1)))

    def _operand_bytes(self, candidate: Candidate) -> int:
        layouts = [layout for layout in (candidate.k, candidate.v) if layout is not None]
        head_dim = self.problem.head_dim
        heads = (layout.head_bytes(round_capacity([layout], self.tokens), head_dim) for layout in layouts)
        return self.problem.kv_heads * sum(heads)

    # -- one chunk ------------------------------------------------------------------------------------------------

    def _measure_chunk(self, names: Sequence[str], effort: Effort) -> None:
        correct = self._prepare(names)
        known = [m.median_us for m in self.measured.values() if m.status == "ok" and m.median_us is not None]
        interleave(
            [name for name in names if name in correct],
            self._slot,
            effort,
            self._bench.contention,
            self._finished,
            min(known, default=None),
            self.deadline,
        )

    def _prepare(self, names: Sequence[str]) -> set[str]:
        requests: list[Request] = [self._request(name) for name in names]
        correct = set()
        for request, reply in self._bench.crew.work(requests):
            assert isinstance(request, Prepare)
            if isinstance(reply, Fault):
                self._finished(request.candidate, reply)
            else:
                self._note_error(request.candidate, reply)
                correct.add(request.candidate)
        return correct

    def _slot(self, name: str) -> Slot | Fault:
        crew, key = self._bench.crew, self.problem.key
        if not crew.owns(key, name):
            # Its worker died of another candidate.
            prepared = crew.ask(self._request(name))
            if isinstance(prepared, Fault):
                return prepared
            self._note_error(name, prepared)
        reply = crew.ask(TimeSlot(key, self.tokens, name, self._bench.protocol))
        assert isinstance(reply, Slot | Fault)
        return reply

    def _request(self, name: str) -> Prepare:
        return Prepare(self.problem.key, self.tokens, name, shared_code(self._named[name]))

    def _note_error(self, name: str, reply: object) -> None:
        self._errors[name] = getattr(reply, "max_error", 0.0)

    def _finished(self, name: str, outcome: Timed | Fault) -> None:
        """Commit one candidate's outcome."""
        bench = self._bench
        if isinstance(outcome, Fault):
            samples: tuple[float, ...] = ()
            max_error, message = outcome.max_error, outcome.message
        else:
            samples = outcome.samples_us
            max_error, message = self._errors.get(name), ""
            bench.rounds += outcome.rounds
            bench.tainted += outcome.tainted
        measurement = Measurement(
            device=bench.device,
            problem=self.problem.key,
            tokens=self.tokens,
            candidate=name,
            protocol=bench.protocol,
            status=outcome.status,
            median_us=median(samples) if samples else None,
            spread=spread(samples) if len(samples) > 1 else None,
            samples=len(samples),
            max_error=max_error,
            message=message,
            conditions=outcome.conditions if isinstance(outcome, Timed) else {},
            toolchain=bench.toolchain,
        )
        bench.store.put_measurement(measurement, bench.run)
        self.measured[name] = measurement
        self._fresh.add(name)
        self.settled.add(name)
        bench.report()


def shared_code(candidate: Candidate) -> str:
    """Names candidates whose machine code backends can share: block, splits and threads are run-time values."""
    return f"{candidate.layout}; {candidate.pipeline}; {', '.join(map(str, candidate.plan.code))}"

"""The main job: from problems to stored winners."""

from __future__ import annotations

import importlib
import math
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..db.records import TIMED, Winner
from ..db.store import Store
from ..kernels.errors import LowbitError, NoiseError
from ..kernels.problem import Problem, check_tokens
from ..search.crew import Crew
from ..search.messages import Setup
from ..search.rounds import Effort
from ..search.session import Bench, DeviceSession
from ..search.strategy import FINAL, SCREEN, Choice, Parameters, Strategy, predicted_choice, strategy_named
from ..search.timing import PROTOCOLS
from .outcome import Decision, Options, Progress, Silent, TuneInterrupted, TuneReport
from .phases import phases_in
from .ranges import store_winner
from .ranking import Ranked, Ranker
from .target import Prices, Target, target_for

QUICK_SCREEN = Effort(min_rounds=3, max_rounds=6, target_spread=0.1)
QUICK_FINAL = Effort(min_rounds=6, max_rounds=12, target_spread=0.05)
COUNTING_SHARE = 0.6
"""Of what a budget leaves after calibration, the part that counting instructions may take if measuring follows."""
WORKER_BYTES = 512 << 20
BYTES_PER_VALUE = 24
"""What a worker holds for each key and value while it makes operands: float32 values, quantised ones, temporaries."""


def tune(
    problems: Sequence[Problem],
    tokens: Sequence[int] | Mapping[Problem, Sequence[int]],
    options: Options,
    progress: Progress | None = None,
) -> TuneReport:
    """Find and store the winner of each problem at each context length.

    Everything finished is committed at once: after an interrupt, a crash or a ``kill -9`` the same call resumes and
    measures nothing twice. A strategy that does not measure decides each problem as soon as it is ranked.

    Parameters
    ----------
    problems : sequence of Problem
    tokens : sequence of int, or mapping of Problem to one
        Context lengths, or a matrix's numbers of rows: of all problems, or of each.
    options : Options
    progress : Progress, optional

    Raises
    ------
    ProblemError
        For a length that is none.
    DeviceError
        For an unknown device, one that the strategy measures on and that is not here, or workers that cannot start.
    DatabaseError
        If the database cannot be used; it is left as it was.
    CompileError
        If nothing can be compiled for the device, or no candidate of a problem works.
    NoiseError
        If the machine was too busy to measure anything. The predicted winners are stored then.
    TuneInterrupted
        On SIGINT and SIGTERM.
    """
    each = tokens if isinstance(tokens, Mapping) else dict.fromkeys(problems, tokens)
    work = {
        problem: sorted({check_tokens(count, problem.length_name) for count in each[problem]}) for problem in problems
    }
    for plugin in options.plugins:
        importlib.import_module(plugin)
    target = target_for(options.device, options.threads, options.gpu)
    strategy = _strategy(options.strategy, target)
    target.backend.require_compiler()
    options = replace(options, strategy=strategy.name)
    if options.protocol not in PROTOCOLS:
        raise LowbitError(f"unknown protocol {options.protocol!r}: choose one of {', '.join(PROTOCOLS)}")
    report = TuneReport(target.as_dict(), options.db_path)
    with Store.open(options.db_path) as store, _terminating():
        run = store.put_run(options.command(work))
        status = "failed"
        try:
            _Run(target, strategy, store, run, options, progress or Silent(), report).tune(work)
            status = "finished"
        except KeyboardInterrupt:
            status = "interrupted"
            raise TuneInterrupted(report) from None
        finally:
            store.finish_run(run, status)
    return report


def _strategy(name: str | None, target: Target) -> Strategy:
    """What was asked for, or else ``verify`` where the device is at hand and ``lep`` where it is not.

    Raises
    ------
    LowbitError
        For an unknown name.
    DeviceError
        If the device is not here and the strategy measures.
    """
    strategy = strategy_named(name or ("verify" if target.present else "lep"))
    if strategy.measures:
        target.require_present(f"--strategy {strategy.name} cannot measure, --strategy lep predicts")
    return strategy


class _Run:
    """One call of `tune`."""

    def __init__(
        self,
        target: Target,
        strategy: Strategy,
        store: Store,
        run: int,
        options: Options,
        progress: Progress,
        report: TuneReport,
    ) -> None:
        self.target, self.strategy, self.store = target, strategy, store
        self.run, self.options, self.progress, self.report = run, options, progress, report
        self.toolchain = target.backend.toolchain()
        self.started = time.monotonic()
        self.lacking: dict[Problem, str] = {}
        """Why most of those candidates of a problem that were not predicted were not."""

    def tune(self, work: Mapping[Problem, Sequence[int]]) -> None:
        self.store.put_device(self.target.fingerprint, self.target.as_dict())
        prices = self._prices()
        setup, size = self._crew_plan(work)
        with Crew(setup, size, self.options.deadlines_s) as crew:
            bench = self._bench(crew, setup)
            ranker = Ranker(self.target, prices, bench, self.progress, self.report)
            ranked: list[Ranked] = []
            counted_by = self._counting_deadline()
            for number, (problem, tokens) in enumerate(work.items()):
                until = None
                if counted_by is not None:
                    now = time.monotonic()
                    share = (counted_by - now) / (len(work) - number)
                    until = min(now + max(share, self.target.backend.first_count_s), counted_by)
                own = self._rank(replace(ranker, until=until), problem, tokens)
                if self.strategy.measures:
                    ranked += own
                else:
                    # Nothing is gained by waiting for other problems, and something lost if they are interrupted.
                    self._decide(own, bench, prices)
            if self.strategy.measures:
                self._decide(ranked, bench, prices)
        self._conclude(work)

    def _rank(self, ranker: Ranker, problem: Problem, tokens: Sequence[int]) -> list[Ranked]:
        before = Counter(self.report.unpredicted)
        ranked = ranker.rank(problem, tokens)
        for reason, _ in (self.report.unpredicted - before).most_common(1):
            self.lacking[problem] = reason
        return ranked

    def _conclude(self, work: Mapping[Problem, Sequence[int]]) -> None:
        """What only all winners together say."""
        stored = [w for problem in work for w in self.store.winners(self.target.fingerprint, problem.key)]
        own = [w for w in stored if w.toolchain == self.toolchain]
        self.report.phases += phases_in(self.store, own)
        self.target.ship(self.store, own)

    def _counting_deadline(self) -> float | None:
        """When counting has to stop, so that a short budget leaves time to measure something."""
        if self.options.budget_s is None:
            return None
        now = time.monotonic()
        share = COUNTING_SHARE if self.strategy.measures else 1.0
        return now + share * max(self.started + self.options.budget_s - now, 0.0)

    # -- what everything rests on ---------------------------------------------------------------------------------

    def _prices(self) -> Prices:
        known = self.target.known_prices(self.store)
        if known is not None:
            return known
        self.progress.update("calibrating", 0, 1, self.target.description)
        thorough_s, quick_s = self.target.calibration_s
        fit = self.target.calibrate(quick_s if self.options.quick else thorough_s)
        self.store.put_calibration(self.target.fingerprint, self.target.threads, fit.as_dict(), self.toolchain)
        self.progress.update("calibrating", 1, 1, f"{fit.seconds:.0f} s")
        return self.target.prices(fit)

    def _crew_plan(self, work: Mapping[Problem, Sequence[int]]) -> tuple[Setup, int]:
        """As many workers as can be busy at once, but no more than their operands leave memory for."""
        import psutil

        available = int(psutil.virtual_memory().available)
        values = 0
        if self.strategy.measures:
            values = max(p.kv_heads * p.head_dim * max(tokens) for p, tokens in work.items())
        room = int(0.7 * available) // (WORKER_BYTES + BYTES_PER_VALUE * values)
        size = max(1, min(self.target.workers, room))
        setup = Setup(
            backend=self.options.device,
            plugins=self.options.plugins,
            threads=self.target.threads,
            cache_bytes=self.target.cache_bytes,
            memory_bytes=max(256 << 20, min(2 << 30, available // 4 // size)),
            search_path=tuple(sys.path),
        )
        return setup, size

    def _bench(self, crew: Crew, setup: Setup) -> Bench:
        return Bench(
            crew,
            self.store,
            self.target.fingerprint,
            self.toolchain,
            self.target.protocol(self.options.protocol),
            cache_bytes=setup.cache_bytes,
            memory_bytes=setup.memory_bytes,
            run=self.run,
        )

    # -- decisions ------------------------------------------------------------------------------------------------

    def _decide(self, ranked: Sequence[Ranked], bench: Bench, prices: Prices) -> None:
        parameters = self._parameters()
        planned = [self.strategy.planned(len(each.candidates), parameters) for each in ranked]
        for index, each in enumerate(ranked):
            session = self._session(each, bench, len(ranked) - index)
            bench.report = self._reporter(session, sum(planned[:index]), planned[index], sum(planned))
            try:
                choice = self.strategy.choose(session, parameters)
            except NoiseError:
                faulty = frozenset(n for n, m in session.measured.items() if m.status not in TIMED)
                choice = predicted_choice(session, faulty=faulty)
                self.report.noisy.append(f"{each.problem.key}, {each.tokens} {each.problem.length_name}")
            finally:
                self.report.rounds, self.report.tainted = bench.rounds, bench.tainted
                key = each.problem.key, each.tokens
                self.report.measurements.update({(*key, n): session.measured[n] for n in session.settled})
                self.report.unmeasured += len(session.asked - session.settled)
            self._store(each, choice, prices)
        if self.report.noisy and len(self.report.noisy) == len(ranked):
            raise NoiseError(
                "the machine was too busy to measure anything: winners are predicted ones; "
                "stop what else runs and tune again"
            )

    def _parameters(self) -> Parameters:
        quick, path = self.options.quick, self.options.db_path
        return Parameters(
            top_k=self.options.top_k or (4 if quick else 8),
            trials=self.options.trials,
            study_path=path.with_name(f"{path.stem}.optuna.db"),
            screen=QUICK_SCREEN if quick else SCREEN,
            final=QUICK_FINAL if quick else FINAL,
        )

    def _session(self, each: Ranked, bench: Bench, sessions_left: int) -> DeviceSession:
        deadline = None
        if self.options.budget_s is not None:
            now = time.monotonic()
            deadline = now + max(self.started + self.options.budget_s - now, 0.0) / sessions_left
        baseline = self.target.backend.baseline(each.problem, self.target.threads)
        return DeviceSession(
            bench, each.problem, each.tokens, each.candidates, each.predicted_us, baseline, deadline, each.steady
        )

    def _reporter(self, session: DeviceSession, before: int, planned: int, total: int) -> Callable[[], None]:
        def report() -> None:
            message = f"{session.problem.key}, {session.tokens} {session.problem.length_name}"
            self.progress.update("measuring", before + min(len(session.settled), planned), total, message)

        return report

    def _store(self, each: Ranked, choice: Choice, prices: Prices) -> None:
        measurement = choice.measurement
        predicted_us = choice.predicted_us
        if predicted_us is not None and not 0 < predicted_us < math.inf:
            predicted_us = None
            choice = replace(choice, predicted_us=None)
        if measurement is None and predicted_us is None:
            place = f"{each.problem.key}, {each.tokens} {each.problem.length_name}"
            self.report.undecided[place] = self.lacking.get(each.problem, "nothing could be predicted")
            return
        decision = Decision(each.problem.key, each.tokens, choice, self._bandwidth_share(each, choice, prices))
        self.report.decisions.append(decision)
        measured: dict[str, Any] = {}
        if measurement is not None:
            measured = {
                "median_us": measurement.median_us,
                "spread": measurement.spread,
                "samples": measurement.samples,
                "protocol": measurement.protocol,
            }
        winner = Winner(
            device=self.target.fingerprint,
            problem=each.problem.key,
            tokens=each.tokens,
            tokens_from=1,
            tokens_to=None,
            candidate=choice.candidate.name,
            provenance=choice.provenance,
            predicted_us=predicted_us,
            tied=choice.tied,
            baseline_us=decision.baseline_us,
            bandwidth_share=decision.bandwidth_share,
            toolchain=self.toolchain,
            **measured,
        )
        store_winner(self.store, winner)

    def _bandwidth_share(self, each: Ranked, choice: Choice, prices: Prices) -> float | None:
        measurement, name = choice.measurement, choice.candidate.name
        if measurement is None or measurement.median_us is None or name not in each.features:
            return None
        features = self.target.as_timed(each.features[name], self.options.protocol)
        return prices.transfer_us(features) / measurement.median_us


@contextmanager
def _terminating() -> Iterator[None]:
    """Let SIGTERM interrupt as Ctrl-C does, where this thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

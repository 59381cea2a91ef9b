"""The contract that every strategy keeps, on sessions whose truth is known."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from fake_backend import LAYOUTS, PROBLEM
from lowbit.db.records import Measurement
from lowbit.kernels.candidate import Candidate, Schedule
from lowbit.kernels.errors import CompileError, LowbitError
from lowbit.kernels.layout import Layout
from lowbit.search.optuna_study import CandidateSpace
from lowbit.search.rounds import Effort
from lowbit.search.strategy import Choice, Parameters, Session, strategy_named

NAMES = ("lep", "verify", "optuna", "oracle")
MEASURING = NAMES[1:]


def space() -> dict[str, Candidate]:
    """Candidates with legal and illegal combinations of fields: 3 layouts a role, but prefetch only with equal ones."""
    found = {}
    for k in LAYOUTS:
        for v in LAYOUTS:
            for registers in (1, 2, 4):
                for prefetch in (0, 8) if k == v else (0,):
                    schedule = Schedule(1, registers, 32, 1, prefetch, 1)
                    c = Candidate(Layout.parse(k), Layout.parse(v), "float", schedule)
                    found[c.name] = c
    return found


class KnownSession:
    """A session whose times are given; counts what it is asked for."""

    problem = PROBLEM
    tokens = 64
    study_key = "test"
    steady = ""

    def __init__(
        self, truth_us: Mapping[str, float], predicted_us: Mapping[str, float], faults: Mapping[str, str] | None = None
    ) -> None:
        every = space()
        ranked = sorted(truth_us, key=lambda name: (predicted_us[name], name))
        self.candidates = {name: every[name] for name in ranked}
        self.predicted_us = {name: predicted_us[name] for name in ranked}
        self.baseline = "baseline"
        self.truth_us = {**truth_us, "baseline": 1000.0}
        self.faults = dict(faults or {})
        self.stored: dict[str, Measurement] = {}
        self.timed: list[str] = []
        self.limit = math.inf
        self.finals: list[list[str]] = []

    @property
    def exhausted(self) -> bool:
        return len(self.timed) >= self.limit

    def measure(self, names: Sequence[str], effort: Effort, final: bool = False) -> list[Measurement]:
        if final:
            self.finals.append(list(names))
        for name in names:
            if (name not in self.stored or final) and not self.exhausted:
                self.timed.append(name)
                self.stored[name] = self._row(name, effort)
        return [self.stored[name] for name in names if name in self.stored]

    def _row(self, name: str, effort: Effort) -> Measurement:
        status, us = self.faults.get(name, "ok"), self.truth_us[name]
        best = min((m.median_us for m in self.stored.values() if m.median_us and m.status == "ok"), default=math.inf)
        if status == "ok" and effort.slow_factor is not None and us > effort.slow_factor * best:
            status = "slow"
        return Measurement(
            device="d", problem=PROBLEM.key, tokens=64, candidate=name, protocol="warm", status=status,
            median_us=us if status in ("ok", "slow") else None, spread=0.001, samples=9, toolchain="t",
        )  # fmt: skip


def session(seed: int = 0, noise: float = 0.2, faults: Mapping[str, str] | None = None) -> KnownSession:
    """Times that depend on the fields, and a prediction that is off by ``noise``."""
    rng = np.random.default_rng(seed)
    weight = {layout: rng.uniform(1, 3) for layout in LAYOUTS}
    truth = {
        name: 100
        * weight[c.k.name]
        * weight[c.v.name]
        * c.schedule.registers**0.5
        * (0.9 if c.schedule.prefetch else 1)
        for name, c in space().items()
        if c.k is not None and c.v is not None
    }
    predicted = {name: us * float(np.exp(rng.normal(0, noise))) for name, us in truth.items()}
    return KnownSession(truth, predicted, faults)


def choose(name: str, known: KnownSession, parameters: Parameters | None = None) -> Choice:
    protocol: Session = known
    return strategy_named(name).choose(protocol, parameters or Parameters())


def best(known: KnownSession) -> str:
    good = {name: us for name, us in known.truth_us.items() if name in known.candidates and name not in known.faults}
    return min(good, key=good.__getitem__)


@pytest.mark.parametrize("name", NAMES)
def test_the_choice_is_one_of_the_candidates_with_its_prediction(name: str) -> None:
    known = session()
    choice = choose(name, known)
    assert known.candidates[choice.candidate.name] == choice.candidate
    assert choice.predicted_us == known.predicted_us[choice.candidate.name]
    assert choice.provenance == {"lep": "predicted", "verify": "verified"}.get(name, "measured")


@pytest.mark.parametrize("name", MEASURING)
def test_a_measured_choice_carries_its_measurement_and_the_baseline(name: str) -> None:
    known = session()
    choice = choose(name, known)
    assert choice.measurement is not None and choice.measurement.median_us == known.truth_us[choice.candidate.name]
    assert choice.baseline is not None and choice.baseline.median_us == 1000.0


@pytest.mark.parametrize("name", NAMES)
def test_choices_repeat(name: str) -> None:
    first, second = choose(name, session(3)), choose(name, session(3))
    assert (first.candidate, first.tied) == (second.candidate, second.tied)


@pytest.mark.parametrize("name", MEASURING)
@pytest.mark.parametrize("status", ["wrong", "crashed", "hung", "illegal_instruction", "compile_failed"])
def test_a_faulty_candidate_cannot_win_however_fast(name: str, status: str) -> None:
    known = session(noise=0.0)
    fastest = best(known)
    known.faults[fastest] = status
    assert choose(name, known).candidate.name == best(known) != fastest


@pytest.mark.parametrize("name", MEASURING)
def test_if_nothing_works_that_is_an_error(name: str) -> None:
    known = session()
    known.faults = dict.fromkeys(known.candidates, "crashed")
    with pytest.raises(CompileError, match="no candidate of attend"):
        choose(name, known, Parameters(trials=1000))


@pytest.mark.parametrize("name", MEASURING)
def test_without_time_the_prediction_decides_and_says_so(name: str) -> None:
    known = session()
    known.limit = 0
    choice = choose(name, known)
    assert choice.provenance == "predicted" and choice.measurement is None
    assert choice.candidate.name == next(iter(known.candidates))


@pytest.mark.parametrize("name", MEASURING)
def test_what_is_stored_is_not_timed_again_except_in_the_final(name: str) -> None:
    known = session()
    choose(name, known)
    finals = [each for final in known.finals for each in final]
    screened = list(known.timed)
    for each in finals:
        screened.remove(each)
    assert len(set(screened)) == len(screened)


@pytest.mark.parametrize("name", MEASURING)
def test_near_candidates_meet_in_a_final_and_ties_are_named(name: str) -> None:
    known = session(noise=0.0)
    fastest = best(known)
    twin = next(each for each in known.candidates if each != fastest and known.predicted_us[each] > 0)
    known.truth_us[twin] = known.truth_us[fastest] * 1.001
    choice = choose(name, known)
    assert {fastest, twin} <= set(known.finals[-1])
    assert {choice.candidate.name, *choice.tied} == {fastest, twin}
    assert choice.candidate.name == min((fastest, twin), key=lambda each: known.predicted_us[each])


def test_lep_measures_nothing() -> None:
    known = session()
    choose("lep", known)
    assert known.timed == []


def test_oracle_finds_the_best_whatever_was_predicted() -> None:
    known = session(seed=5, noise=3.0)
    assert choose("oracle", known).candidate.name == best(known)
    assert set(known.stored) == {*known.candidates, "baseline"}
    screened = [each for each in known.timed if each != "baseline"]
    assert screened[: len(known.candidates)] == list(known.candidates)


def test_verify_measures_the_shortlist_and_goes_on_only_if_all_of_it_fails() -> None:
    known = session()
    names = list({known.candidates[name].layout: name for name in reversed(known.candidates)}.values())[::-1]
    names.sort(key=list(known.candidates).index)
    choose("verify", known, Parameters(top_k=3))
    shortlist = [each for each in known.timed if each != "baseline"][:3]
    assert shortlist == names[:3]
    refined = {known.candidates[name].layout for name in known.stored if name not in (*shortlist, "baseline")}
    assert 1 <= len(refined) <= 2 and refined <= {known.candidates[name].layout for name in shortlist}
    layouts = {known.candidates[name].layout for name in names[:3]}
    faulty = [name for name, each in known.candidates.items() if each.layout in layouts]
    broken = session(faults=dict.fromkeys(faulty, "hung"))
    choose("verify", broken, Parameters(top_k=3))
    assert set(names[:6]) <= set(broken.stored)
    assert any(name not in names for name in broken.stored if name in faulty)  # a second chance


def test_verify_measures_every_schedule_of_the_fastest_layout() -> None:
    known = session(noise=0.0)
    fastest = best(known)
    layout = known.candidates[fastest].layout
    first = next(name for name in known.candidates if known.candidates[name].layout == layout)
    choice = choose("verify", known, Parameters(top_k=len(known.candidates)))
    assert first in known.stored
    assert {name for name, each in known.candidates.items() if each.layout == layout} <= set(known.stored)
    assert choice.candidate.name == fastest


def test_optuna_tries_as_many_candidates_as_asked_the_shortlist_first() -> None:
    known = session()
    names = list(known.candidates)
    choose("optuna", known, Parameters(top_k=5, trials=12))
    tried = [each for each in dict.fromkeys(known.timed) if each != "baseline"]
    assert tried[:5] == names[:5] and len(tried) == 12


@pytest.mark.parametrize("seed", range(4))
def test_optuna_comes_near_the_best_from_a_poor_shortlist(seed: int) -> None:
    known = session(seed, noise=0.6)
    choice = choose("optuna", known, Parameters(top_k=6, trials=24))
    assert known.truth_us[choice.candidate.name] <= 1.03 * known.truth_us[best(known)]


def test_a_study_is_stored_continued_and_readable(tmp_path: Path) -> None:
    import optuna

    parameters = Parameters(top_k=4, trials=10, study_path=tmp_path / "t.optuna.db")
    known = session()
    known.limit = 6
    choose("optuna", known, parameters)
    resumed = session()
    resumed.stored = known.stored
    choose("optuna", resumed, parameters)
    tried = {each for each in [*known.timed, *resumed.timed] if each != "baseline"}
    assert len(tried) == 10
    in_finals = {each for final in resumed.finals for each in final}
    assert set(resumed.timed) & set(known.timed) <= in_finals
    (study,) = optuna.get_all_study_summaries(f"sqlite:///{parameters.study_path}")
    assert study.study_name == "test"
    trials = optuna.load_study(study_name="test", storage=f"sqlite:///{parameters.study_path}").trials
    candidates = CandidateSpace(known.candidates)
    done = [t for t in trials if t.state.name in ("COMPLETE", "PRUNED")]
    assert len(done) == 10
    for trial in done:
        name = trial.user_attrs["candidate"]
        assert candidates.name_of(trial.params) == name
        assert trial.intermediate_values[0] == known.truth_us[name]
    with sqlite3.connect(parameters.study_path or "") as db:
        assert db.execute("select count(*) from studies").fetchone() == (1,)


def test_a_trial_that_a_killed_process_left_running_is_tried_again(tmp_path: Path) -> None:
    import optuna

    parameters = Parameters(top_k=3, trials=5, study_path=tmp_path / "t.optuna.db")
    known = session()
    candidates = CandidateSpace(known.candidates)
    study = optuna.create_study(study_name="test", storage=f"sqlite:///{parameters.study_path}")
    first = next(iter(known.candidates))
    study.enqueue_trial(candidates.fields[first], user_attrs={"candidate": first, "process": 2**22 + 1})
    study.ask(candidates.distributions())
    choose("optuna", known, parameters)
    assert first in known.stored


def test_slow_and_faulty_trials_are_pruned(tmp_path: Path) -> None:
    import optuna

    parameters = Parameters(top_k=4, trials=8, study_path=tmp_path / "t.optuna.db")
    known = session(noise=0.0)
    names = list(known.candidates)
    known.faults[names[1]] = "crashed"
    known.truth_us[names[2]] = 10 * known.truth_us[names[0]]
    choose("optuna", known, parameters)
    trials = optuna.load_study(study_name="test", storage=f"sqlite:///{parameters.study_path}").trials
    by_name = {t.user_attrs["candidate"]: t for t in trials}
    assert by_name[names[1]].state.name == by_name[names[2]].state.name == "PRUNED"
    assert by_name[names[1]].user_attrs["status"] == "crashed"
    assert by_name[names[2]].intermediate_values == {0: known.truth_us[names[2]]}


def test_a_proposal_moves_to_the_nearest_untried_candidate() -> None:
    candidates = CandidateSpace(space())
    assert set(candidates.choices) == {"k.order", "k.pad", "v.order", "v.pad", "registers", "prefetch"}
    name, other = list(candidates.fields)[:2]
    assert candidates.nearest(candidates.fields[name], []) == name
    moved = candidates.nearest(candidates.fields[name], [name])
    differing = [key for key in candidates.choices if candidates.fields[moved][key] != candidates.fields[name][key]]
    assert len(differing) == 1
    illegal = {**candidates.fields[name], "prefetch": "8", "k.pad": "64"}
    assert illegal not in candidates.fields.values()
    assert candidates.nearest(illegal, []) in candidates.fields
    assert candidates.nearest({}, [name]) == other


def test_unknown_strategies_are_refused() -> None:
    with pytest.raises(LowbitError, match="'genetic'"):
        strategy_named("genetic")


def test_a_baseline_that_is_a_candidate_can_win() -> None:
    known = session(noise=0.0)
    known.baseline = best(known)
    choice = choose("verify", known)
    assert choice.candidate.name == known.baseline
    assert choice.baseline == choice.measurement == known.stored[known.baseline]


def test_predictions_that_tie_are_settled_by_the_least_work() -> None:
    same = [name for name, each in space().items() if each.k == each.v and each.k is not None][:6]
    predicted = {name: 100.0 + i for i, name in enumerate(reversed(same))}
    known = KnownSession(dict.fromkeys(same, 50.0), predicted)
    choice = strategy_named("lep").choose(known, Parameters())
    within = [name for name in same if predicted[name] <= 103.0]
    best = min(within, key=lambda name: (space()[name].schedule.registers, space()[name].schedule.prefetch))
    assert len(within) == 4
    assert choice.candidate.name == best != min(predicted, key=predicted.__getitem__)


@pytest.mark.parametrize("name", ["verify"])
def test_a_baseline_without_an_opponent_wins_nothing(name: str) -> None:
    known = session()
    slow = list(known.candidates)[-1]
    known.baseline = slow
    known.measure = lambda names, effort, final=False: [known._row(slow, effort)] if slow in names else []  # type: ignore[method-assign]
    choice = choose(name, known, Parameters(top_k=3))
    assert (choice.provenance, choice.candidate.name != slow) == ("predicted", True)


def test_a_prediction_names_the_other_layouts_that_it_cannot_tell_apart() -> None:
    every = space()
    shapes: dict[str, list[str]] = {}
    for name, each in every.items():
        shapes.setdefault(each.layout, []).append(name)
    first, near, far = list(shapes.values())[:3]
    predicted = {first[0]: 100.0, near[1]: 101.0, near[0]: 102.9, far[0]: 103.1}
    choice = choose("lep", KnownSession(predicted, predicted))
    # Of one layout the schedule with least machinery is the choice; of a tied one the best predicted is named.
    assert every[near[0]].plan.effort < every[near[1]].plan.effort
    assert (choice.candidate.name, choice.tied) == (first[0], (near[1],))
    # A layout that suits the other lengths is preferred, but only among ties.
    for steady, chosen in ((near[1], near[0]), (far[0], first[0])):
        known = KnownSession(predicted, predicted)
        known.steady = every[steady].layout
        assert choose("lep", known).candidate.name == chosen
    unknown = dict.fromkeys(predicted, math.inf)
    assert choose("lep", KnownSession(unknown, unknown)).tied == ()

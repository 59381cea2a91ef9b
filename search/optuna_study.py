"""`optuna`: a study over the fields of candidates, seeded by the prediction."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..db.records import Measurement
from ..kernels.candidate import Candidate
from .strategy import Choice, Parameters, Session, Strategy, measured_choice

if TYPE_CHECKING:
    import optuna

SLOW_FACTOR = 2.0
"""Trials this much slower than the best are pruned after the screening rounds."""
BATCH = 4
"""Trials asked for together, so that their candidates compile in parallel and are timed against each other."""
LOCK_TIMEOUT_S = 30.0

Fields = dict[str, str]


class OptunaStudy(Strategy):
    """`Parameters.trials` trials of a multivariate TPE with a fixed seed, the LEP shortlist first.

    The search space has one categorical dimension for each field in which candidates differ. Most combinations of
    fields are no candidate, so each proposal is replaced by the nearest candidate that has not been tried, before the
    trial gets its parameters: every trial in the study is one candidate with its true fields. Clearly slow candidates
    are pruned trials; wrong and crashing ones are pruned without a value, which TPE ranks last.

    The study is stored in an SQLite file of its own, which optuna-dashboard opens; it is continued by a later run, and
    processes may share it.
    """

    name = "optuna"

    def choose(self, session: Session, parameters: Parameters) -> Choice:

        space = CandidateSpace(session.candidates)
        study = _open_study(session, parameters, space)
        _give_up_dead(study)
        taken = _taken(study)
        for name in list(session.candidates)[: parameters.top_k]:
            if name not in taken:
                study.enqueue_trial(space.fields[name], user_attrs={"candidate": name})
        effort = replace(parameters.screen, slow_factor=SLOW_FACTOR)
        yardstick = session.measure([session.baseline], parameters.screen)
        measured: dict[str, Measurement] = {}
        for name in _told(study):
            measured.update({m.candidate: m for m in session.measure([name], effort)})
        while not session.exhausted:
            wanted = min(BATCH, parameters.trials - len(_told(study)), len(space.fields) - len(_told(study)))
            if wanted < 1:
                break
            trials = [study.ask(space.distributions()) for _ in range(wanted)]
            names = [space.name_of(trial.params) for trial in trials]
            for trial, name in zip(trials, names, strict=True):
                trial.set_user_attr("candidate", name)
                trial.set_user_attr("process", os.getpid())
            results = {m.candidate: m for m in session.measure(names, effort)}
            measured.update(results)
            for trial, name in zip(trials, names, strict=True):
                _tell(study, trial, results.get(name))
        return measured_choice(session, [*measured.values(), *yardstick], parameters, "measured")

    def planned(self, candidates: int, parameters: Parameters) -> int:
        return min(parameters.trials, candidates) + 1


class CandidateSpace:
    """Candidates as points of a categorical space.

    Parameters
    ----------
    candidates : mapping of str to Candidate
        By name, the most promising first.
    """

    def __init__(self, candidates: Mapping[str, Candidate]) -> None:
        every = {name: _fields(candidate) for name, candidate in candidates.items()}
        first = next(iter(every.values()), {})
        choices = {key: sorted({fields[key] for fields in every.values()}) for key in first}
        self.choices = {key: values for key, values in choices.items() if len(values) > 1}
        self.fields: dict[str, Fields] = {
            name: {key: fields[key] for key in self.choices} for name, fields in every.items()
        }
        self._names = {self._point(fields): name for name, fields in self.fields.items()}

    def distributions(self) -> dict[str, optuna.distributions.BaseDistribution]:
        from optuna.distributions import CategoricalDistribution

        return {key: CategoricalDistribution(values) for key, values in self.choices.items()}

    def name_of(self, parameters: Mapping[str, Any]) -> str:
        return self._names[self._point(parameters)]

    def nearest(self, proposal: Mapping[str, Any], tried: Collection[str]) -> str:
        """The untried candidate that differs from ``proposal`` in the fewest fields; the most promising of several.

        An empty proposal is near every candidate alike. If all were tried, the first candidate.
        """
        left = [name for name in self.fields if name not in tried] or list(self.fields)[:1]

        def distance(name: str) -> int:
            fields = self.fields[name]
            return sum(value != fields.get(key) for key, value in proposal.items())

        return min(left, key=distance)

    def _point(self, fields: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(str(fields[key]) for key in self.choices)


def _fields(candidate: Candidate) -> Fields:
    fields = {"pipeline": candidate.pipeline}
    for role, layout in (("k", candidate.k), ("v", candidate.v)):
        if layout is not None:
            fields[f"{role}.order"] = layout.order
            fields[f"{role}.packing"] = layout.packing.name
            fields[f"{role}.pad"] = str(layout.pad_bytes)
            fields[f"{role}.fold"] = str(layout.fold_rows)
    return fields | {key: str(value) for key, value in candidate.plan.as_dict().items()}


def _open_study(session: Session, parameters: Parameters, space: CandidateSpace) -> optuna.Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage: optuna.storages.BaseStorage | None = None
    if parameters.study_path is not None:
        storage = optuna.storages.RDBStorage(
            f"sqlite:///{parameters.study_path}", engine_kwargs={"connect_args": {"timeout": LOCK_TIMEOUT_S}}
        )
    return optuna.create_study(
        storage=storage,
        sampler=_sampler(space, parameters),
        study_name=session.study_key,
        direction="minimize",
        load_if_exists=True,
    )


def _sampler(space: CandidateSpace, parameters: Parameters) -> optuna.samplers.BaseSampler:
    import optuna

    class LegalSampler(optuna.samplers.TPESampler):
        """TPE whose joint proposals are moved to the nearest untried candidate."""

        def infer_relative_search_space(
            self, study: optuna.Study, trial: optuna.trial.FrozenTrial
        ) -> dict[str, optuna.distributions.BaseDistribution]:
            return space.distributions()

        def sample_relative(
            self,
            study: optuna.Study,
            trial: optuna.trial.FrozenTrial,
            search_space: dict[str, optuna.distributions.BaseDistribution],
        ) -> dict[str, Any]:
            proposal = super().sample_relative(study, trial, search_space)
            taken = _taken(study, but=trial.number)
            # A trial of another process names its candidate only after it has its parameters.
            taken |= {
                space.name_of(t.params) for t in _alive(study, trial.number) if set(t.params) == set(space.choices)
            }
            return dict(space.fields[space.nearest(proposal, taken)])

    # Until the shortlist is in, there is nothing to model; the nearest to nothing is the prediction's next.
    startup = max(min(parameters.top_k, parameters.trials), 1)
    return LegalSampler(seed=parameters.seed, multivariate=True, constant_liar=True, n_startup_trials=startup)


def _tell(study: optuna.Study, trial: optuna.Trial, measurement: Measurement | None) -> None:
    from optuna.trial import TrialState

    if measurement is None:
        study.tell(trial, state=TrialState.FAIL)  # out of time: to be tried again by the run that resumes
        return
    trial.set_user_attr("status", measurement.status)
    if measurement.median_us is None:
        study.tell(trial, state=TrialState.PRUNED)
        return
    trial.report(measurement.median_us, step=0)
    if measurement.status == "slow":
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, measurement.median_us)


def _alive(study: optuna.Study, but: int | None = None) -> list[optuna.trial.FrozenTrial]:
    """Trials that are waiting, running or finished, except number ``but``."""
    from optuna.trial import TrialState

    return [t for t in study.get_trials(deepcopy=False) if t.number != but and t.state != TrialState.FAIL]


def _taken(study: optuna.Study, but: int | None = None) -> set[str]:
    return {t.user_attrs["candidate"] for t in _alive(study, but) if "candidate" in t.user_attrs}


def _give_up_dead(study: optuna.Study) -> None:
    """Fail the trials that a killed process left running, so that their candidates are tried again."""
    import psutil
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if not psutil.pid_exists(trial.user_attrs.get("process", 0)) or "process" not in trial.user_attrs:
            study.tell(trial.number, state=TrialState.FAIL)


def _told(study: optuna.Study) -> list[str]:
    """Candidates of the finished trials."""
    from optuna.trial import TrialState

    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
    return list(dict.fromkeys(t.user_attrs["candidate"] for t in finished if "candidate" in t.user_attrs))

"""Features of a whole space, extracted on all workers at once and kept in the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ..costmodel.features import Features
from ..db.store import Store
from ..kernels.candidate import Candidate
from ..kernels.problem import Problem
from .crew import Crew
from .messages import Extract, Extracted, Request
from .rounds import Fault

CHUNK = 16
"""Candidates of one request: few enough to keep all workers busy to the end, enough that neighbours share code."""


def extract(
    problem: Problem,
    tokens: Sequence[int],
    candidates: Mapping[str, Candidate],
    crew: Crew,
    store: Store,
    device: str,
    toolchain: str,
    line_bytes: int,
    report: Callable[[int], None],
) -> tuple[dict[int, dict[str, Features]], dict[str, str]]:
    """Features of every candidate at every context length, from the store where it has them.

    Code is generated once for all lengths, and candidates that share tile functions go to the same worker, whose
    backend remembers them.

    Parameters
    ----------
    report : callable
        Told how many more candidates are done, now and then.

    Returns
    -------
    features : dict of int to dict of str to Features
        By context length and candidate name.
    failed : dict of str to str
        Why candidates have none.
    """
    found = {each: store.features(device, problem.key, each, toolchain) for each in tokens}
    missing = [name for name in candidates if any(name not in known for known in found.values())]
    report(len(candidates) - len(missing))
    failed: dict[str, str] = {}
    requests = [_request(problem, tokens, names, line_bytes) for names in _chunks(missing, candidates)]
    for request, reply in _answers(crew, requests):
        if isinstance(reply, Fault):
            failed.update(dict.fromkeys(request.candidates, f"{reply.status}: {reply.message}"))
        else:
            failed.update(reply.failed)
            for each, rows in reply.features.items():
                found[each].update(rows)
                store.put_features(device, problem.key, each, rows, toolchain)
        report(len(request.candidates))
    features = {
        each: {name: Features.from_dict(known[name]) for name in candidates if name in known}
        for each, known in found.items()
    }
    return features, failed


def _request(problem: Problem, tokens: Sequence[int], names: Sequence[str], line_bytes: int) -> Extract:
    return Extract(problem.key, tuple(tokens), tuple(names), line_bytes)


def _chunks(names: Sequence[str], candidates: Mapping[str, Candidate]) -> Iterator[Sequence[str]]:
    def shared(name: str) -> tuple[str, str, int, int]:
        c = candidates[name]
        layout = c.k if c.k is not None else c.v
        return "" if layout is None else layout.name, c.pipeline, c.schedule.rows, c.schedule.registers

    ordered = sorted(names, key=shared)
    for start in range(0, len(ordered), CHUNK):
        yield ordered[start : start + CHUNK]


def _answers(crew: Crew, requests: Sequence[Extract]) -> Iterator[tuple[Extract, Extracted | Fault]]:
    """Replies; a chunk that costs its worker is asked for again candidate by candidate."""
    again: list[Request] = []
    for request, reply in crew.work(requests):
        assert isinstance(request, Extract) and isinstance(reply, Extracted | Fault)
        if isinstance(reply, Fault) and len(request.candidates) > 1:
            again += [
                Extract(request.problem, request.tokens, (name,), request.line_bytes) for name in request.candidates
            ]
        else:
            yield request, reply
    for request, reply in crew.work(again):
        assert isinstance(request, Extract) and isinstance(reply, Extracted | Fault)
        yield request, reply

"""A long decode, token by token: segments, their cost, the best plan, and spikes.

``python benchmarks/long_decode.py -m FILE [--db FILE] [--tokens 10000] [--cache-type q8_0] [--json]``

Sessions of one model take turns, a token each, so that all meet the same machine:

- ``greedy`` changes layouts as it goes; ``planned`` follows the shortest path for this very length;
- ``one`` keeps greedy's last layout in one segment; ``many`` keeps it, too, but is cut into segments of equal length.

Printed are medians over tokens of the ratio of two sessions' times for the same token, and totals.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.cpu.pool import pinned
from lowbit.runtime import open_db
from lowbit.runtime.cache_types import cache_precision
from lowbit.runtime.kvcache import KVCache
from lowbit.runtime.model.model import Model
from lowbit.runtime.model.session import Session
from lowbit.runtime.model.tuned import Readers, attention_problem
from lowbit.runtime.switching import PhaseSwitcher, plan_of
from lowbit.search.plan import Plan, optimal_plan, plan_cost

NEIGHBOURS = 50
"""Tokens before and after one whose median time it is compared with."""


class Follower:
    """A switcher that follows a plan."""

    period = 1

    def __init__(self, plan: Plan[Candidate]) -> None:
        self._plan = plan

    def layout_at(self, segments: Sequence[Any], tokens: int, ahead: int = 0) -> Candidate:
        return [layout for start, layout in self._plan.segments if start <= tokens][-1]


def session(model: Model, cache_type: str, tokens: int, switcher: Any, segment_tokens: int | None = None) -> Session:
    config, precision = model.config, cache_precision(cache_type)
    problem = attention_problem(config, precision, precision)
    readers = Readers(problem, model.isa, model.threads)
    layout = readers.learn(switcher.layout_at([], 0))
    cache = KVCache(config.layers, config.kv_heads, config.head_dim, tokens, layout, segment_tokens=segment_tokens)
    return Session(model, cache, problem, readers, switcher)


def measure(model: Model, cache_type: str, tokens: int, cuts: int) -> dict[str, Any]:
    precision = cache_precision(cache_type)
    prices = model.database.prices(attention_problem(model.config, precision, precision))
    greedy = plan_of(PhaseSwitcher(prices, horizon=tokens), tokens)
    best = optimal_plan(prices, tokens)
    last: Plan[Candidate] = Plan(((0, greedy.segments[-1][1]),))
    sessions = {
        "greedy": session(model, cache_type, tokens, PhaseSwitcher(prices, horizon=tokens)),
        "planned": session(model, cache_type, tokens, Follower(best)),
        "one": session(model, cache_type, tokens, Follower(last)),
        "many": session(model, cache_type, tokens, Follower(last), -(-tokens // cuts // 32) * 32),
    }
    ids = np.random.default_rng(0).integers(0, model.config.vocabulary, tokens)
    times = {name: np.zeros(tokens) for name in sessions}
    segments = np.zeros(tokens, np.int64)
    names = list(sessions)
    for each in sessions.values():  # compiles what is compiled once
        each.step(0)
        each.truncate(0)
    with pinned():
        for position, token in enumerate(ids):
            for name in names[position % len(names) :] + names[: position % len(names)]:
                started = time.perf_counter()
                sessions[name].step(int(token))
                times[name][position] = time.perf_counter() - started
            segments[position] = len(sessions["greedy"].cache.segments)
    return {
        "cache_type": cache_type,
        "tokens": tokens,
        "segments": {"mean": float(segments.mean()), "most": int(segments.max()), "planned": len(best.segments)},
        "predicted_over_optimal": plan_cost(prices, greedy, tokens) / plan_cost(prices, best, tokens) - 1,
        "over_planned": _over(times["greedy"], times["planned"]),
        "many_segments": len(sessions["many"].cache.segments),
        "segment_overhead": _over(times["many"], times["one"]),
        "tokens_per_s": {name: tokens / float(own.sum()) for name, own in times.items()},
        "latency_p99_9_over_neighbours": float(np.quantile(_spikes(times["greedy"]), 0.999)),
        "latency_p99_9_of_one_segment": float(np.quantile(_spikes(times["one"]), 0.999)),
    }


def _over(own: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """By how much one takes longer: the median token, and all of them."""
    return {"median": float(np.median(own / other)) - 1, "total": float(own.sum() / other.sum()) - 1}


def _spikes(times: np.ndarray) -> np.ndarray:
    """Each token's time over the median of its neighbours'."""
    padded = np.pad(times, NEIGHBOURS, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * NEIGHBOURS + 1)
    return times / np.median(windows, axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--db")
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--cache-type", default="q8_0")
    parser.add_argument("--cuts", type=int, default=5, help="segments of the session that is cut on purpose")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        database = open_db(given.db) if given.db else None
        model = Model.load(given.model, database=database, threads=given.threads)
        found = measure(model, given.cache_type, given.tokens, given.cuts)
    print(json.dumps(found, indent=2) if given.json else "\n".join(f"{key}: {value}" for key, value in found.items()))


if __name__ == "__main__":
    main()

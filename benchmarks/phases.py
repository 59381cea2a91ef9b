"""Greedy switching of layouts beside the best plan: ``python benchmarks/phases.py [--db FILE] [--json]``.

Made-up families of price curves, and with ``--db`` the prices that a tuned database gives for its attention problems.
For each: decode time that greedy switching takes over that of the plan which knows the length, and segments of both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.cpu.backend import CpuBackend
from lowbit.kernels.problem import Problem
from lowbit.runtime import open_db
from lowbit.runtime.curve import Curve
from lowbit.runtime.prices import LayoutPrices
from lowbit.runtime.switching import PhaseSwitcher, plan_of
from lowbit.search.plan import optimal_plan, plan_cost

LENGTHS = (128, 512, 2048, 8192, 32768)
FIXED_S, PER_TOKEN_S = 3e-6, (5e-9, 1e-7)
"""What calls of a layout cost beside others', and what a token costs, of one layer: from small heads to large ones."""


def affine(rng: np.random.Generator, token_s: float, share: float) -> dict[int, float]:
    """Fixed costs and costs of a token that have nothing to do with each other."""
    return _line(rng.uniform(0, FIXED_S), token_s * rng.uniform(1, 1.4))


def crossing(rng: np.random.Generator, token_s: float, share: float) -> dict[int, float]:
    """What is cheaper in long contexts is dearer in short ones; the lines cross at 64 to 1,024 tokens."""
    slope = token_s * (1 + 0.3 * share)
    return _line((1.3 * token_s - slope) * 2 ** rng.uniform(6, 10), slope)


def caches(rng: np.random.Generator, token_s: float, share: float) -> dict[int, float]:
    """Another cost of a token from a length on at which operands leave a cache."""
    fixed, near, far = rng.uniform(0, FIXED_S), *(token_s * rng.uniform(1, 1.5, 2))
    edge = int(rng.uniform(1000, 12000))
    return {0: fixed, edge: fixed + near * edge, 1 << 17: fixed + near * edge + far * ((1 << 17) - edge)}


def noisy(rng: np.random.Generator, token_s: float, share: float) -> dict[int, float]:
    """Lines, measured at the lengths that are tuned for by default, with 3 % of noise."""
    fixed, slope = rng.uniform(0, FIXED_S), token_s * rng.uniform(1, 1.3)
    return {tokens: (fixed + slope * tokens) * float(np.exp(rng.normal(0, 0.03))) for tokens in LENGTHS}


def _line(fixed: float, slope: float) -> dict[int, float]:
    return {0: fixed, 1 << 17: fixed + slope * (1 << 17)}


FAMILIES: tuple[Callable[[np.random.Generator, float, float], dict[int, float]], ...] = (
    affine,
    crossing,
    caches,
    noisy,
)


def layouts() -> list[Candidate]:
    """Some that differ, for names."""
    return list(CpuBackend("avx2").untuned(Problem("attend", 9, 3, 64, "w8a8"), 2))


def made_up(seed: int, count: int) -> Iterator[tuple[str, LayoutPrices]]:
    """``count`` of each family, of two to six layouts."""
    known = layouts()
    for family in FAMILIES:
        rng = np.random.default_rng(seed)
        for _ in range(count):
            number = int(rng.integers(2, 7))
            token_s = float(np.exp(rng.uniform(*np.log(PER_TOKEN_S))))
            curves = {known[i]: Curve(family(rng, token_s, i / (number - 1))) for i in range(number)}
            yield family.__name__, LayoutPrices(curves)


def tuned(path: Path) -> Iterator[tuple[str, LayoutPrices]]:
    """What a database knows of this machine."""
    database = open_db(path)
    for key in sorted({winner.problem for winner in database.winners}):
        if key.startswith("attend "):
            prices = database.prices(key)
            yield f"{key} ({prices.provenance})", prices


def compared(prices: LayoutPrices, tokens: int, horizon: int | None, rule: dict[str, Any]) -> dict[str, float]:
    greedy = plan_of(PhaseSwitcher(prices, horizon=horizon, **rule), tokens)
    best = optimal_plan(prices, tokens, step=max(tokens // 64, 16))
    segments = [*(start for start, _ in greedy.segments), tokens]
    overheads = sum((tokens - start) * prices.overhead_s for start in segments[1:-1])
    cost = plan_cost(prices, greedy, tokens)
    return {
        "ratio": cost / plan_cost(prices, best, tokens),
        "segments": len(greedy.segments),
        "best_segments": len(best.segments),
        "overhead_share": overheads / cost,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--db", type=Path)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1000, 10_000])
    parser.add_argument("--count", type=int, default=60, help="price curves of each family")
    for name, kind in (("outlook", int), ("hysteresis", float), ("growth", float)):
        parser.add_argument(f"--{name}", type=kind, help="of the switcher, instead of its own")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in ("outlook", "hysteresis", "growth")}
    rule = {name: value for name, value in given.items() if value is not None}
    rows: list[dict[str, Any]] = []
    for tokens in options.tokens:
        for limit in (None, 16_384):
            if limit is not None and limit < tokens:
                continue
            found: dict[str, list[dict[str, float]]] = {}
            sources = [*made_up(1, options.count), *(tuned(options.db) if options.db else ())]
            for name, prices in sources:
                found.setdefault(name, []).append(compared(prices, tokens, limit, rule))
            for name, each in found.items():
                ratios = np.array([one["ratio"] for one in each])
                rows.append(
                    {
                        "prices": name,
                        "tokens": tokens,
                        "context_limit": limit,
                        "mean_ratio": float(ratios.mean()),
                        "p95_ratio": float(np.quantile(ratios, 0.95)),
                        "worst_ratio": float(ratios.max()),
                        "mean_segments": float(np.mean([one["segments"] for one in each])),
                        "most_segments": max(int(one["segments"]) for one in each),
                        "mean_best_segments": float(np.mean([one["best_segments"] for one in each])),
                        "worst_overhead_share": max(one["overhead_share"] for one in each),
                    }
                )
    if options.json:
        print(json.dumps({"rows": rows}, indent=2))
        return
    print(f"{'prices':44} {'tokens':>6} {'limit':>6}  mean    p95   worst  segments  most  best plan's")
    for row in rows:
        print(
            f"{row['prices']:44} {row['tokens']:6} {row['context_limit'] or '-':>6} {row['mean_ratio']:.4f} "
            f"{row['p95_ratio']:.4f} {row['worst_ratio']:.4f} {row['mean_segments']:7.2f} {row['most_segments']:6} "
            f"{row['mean_best_segments']:9.2f}"
        )


if __name__ == "__main__":
    main()

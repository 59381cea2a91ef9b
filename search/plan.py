"""The best plan of layouts for a whole decode, if its length were known: what switching as one goes is compared with.

A plan opens segments; each lies in one layout and no token ever moves. After the token at position t every segment is
read once, so a segment of n tokens that lies in layout L costs every later step the same. Its cost over its whole life
follows from where it begins and ends alone: a plan is a path, and the best one the shortest.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

L = TypeVar("L", bound=Hashable)


class SegmentPrices(Protocol[L]):
    """What segments cost; `lowbit.runtime.prices.LayoutPrices` is one."""

    @property
    def candidates(self) -> Sequence[L]:
        """The layouts to choose from."""

    @property
    def call_s(self) -> float:
        """Seconds that a decode step costs whatever it reads."""

    def segments_s(self, candidate: L, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds that a segment adds to a step, for each number of its tokens."""


@dataclass(frozen=True)
class Plan(Generic[L]):
    """Which layout new tokens lie in.

    Attributes
    ----------
    segments : tuple of (int, L)
        Context length at which each segment is opened, ascending from 0, and its layout.
    """

    segments: tuple[tuple[int, L], ...]


def plan_cost(prices: SegmentPrices[L], plan: Plan[L], horizon: int, prompt: int = 0) -> float:
    """Seconds of the decode steps that bring the context from ``prompt`` to ``horizon`` tokens.

    Raises
    ------
    ValueError
        If the plan's first segment does not begin at 0, or they do not ascend to less than ``horizon``.
    """
    starts = [start for start, _ in plan.segments]
    if starts[:1] != [0] or sorted({*starts, horizon}) != [*starts, horizon]:
        raise ValueError(f"a plan's segments must ascend from 0 to less than {horizon}, not {starts}")
    lives = [
        _life(prices.segments_s(layout, np.arange(horizon - start + 1)), start, horizon, prompt)
        for start, layout in plan.segments
    ]
    ends = [*starts[1:], horizon]
    reading = sum(float(life[end - start - 1]) for life, start, end in zip(lives, starts, ends, strict=True))
    return reading + (horizon - prompt) * prices.call_s


def _life(prices: NDArray[np.float64], start: int, horizon: int, prompt: int) -> NDArray[np.float64]:
    """Cost until ``horizon`` of a segment that begins at ``start``, for every number of its tokens from 1 on.

    Parameters
    ----------
    prices : ndarray, shape (horizon − start + 1,)
        Of a segment with 0, 1, … tokens.
    """
    tokens = np.arange(1, len(prices))
    growing = np.concatenate(([0.0], np.cumsum(prices[1:])))
    unseen = np.minimum(max(prompt - start, 0), tokens)  # tokens of the prompt are there before the first step
    while_it_grows = growing[tokens] - growing[unseen]
    afterwards = horizon - np.maximum(start + tokens, prompt)
    return np.asarray(while_it_grows + afterwards * prices[1:])


def optimal_plan(prices: SegmentPrices[L], horizon: int, step: int = 64, prompt: int = 0) -> Plan[L]:
    """The plan that costs least, of those that open segments at multiples of ``step``.

    A segment is never followed by one in the same layout, which would be the same segment.

    Parameters
    ----------
    horizon : int
        Context length at the end, at least 1.
    prompt : int
        Tokens that are there before the first step.
    """
    import networkx as nx  # a decoder that only follows prices does without

    if horizon < 1 or step < 1:
        raise ValueError(f"a plan needs a horizon and a step of at least 1, not {horizon} and {step}")
    checkpoints = [*range(0, horizon, step), horizon]
    layouts = list(prices.candidates)
    graph: nx.DiGraph[Any] = nx.DiGraph()
    # A node is a checkpoint and the layout that begins or ends there. Changing the layout costs nothing in itself.
    for first, layout in enumerate(layouts):
        graph.add_edge("start", (0, first, "begins"), weight=0.0)
        graph.add_edge((horizon, first, "ends"), "end", weight=0.0)
        lengths = prices.segments_s(layout, np.arange(horizon + 1))
        for position, start in enumerate(checkpoints[:-1]):
            life = _life(lengths[: horizon - start + 1], start, horizon, prompt)
            graph.add_weighted_edges_from(
                ((start, first, "begins"), (end, first, "ends"), float(life[end - start - 1]))
                for end in checkpoints[position + 1 :]
            )
            if start:
                graph.add_weighted_edges_from(
                    ((start, first, "ends"), (start, other, "begins"), 0.0)
                    for other in range(len(layouts))
                    if other != first
                )
    path = nx.shortest_path(graph, "start", "end", weight="weight")
    return Plan(tuple((node[0], layouts[node[1]]) for node in path if node[2:] == ("begins",)))

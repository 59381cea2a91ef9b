"""Where data flow leads: paths over the places of instructions, of a CPU's code or a GPU's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping


def reached(starts: Iterable[int], edges: Mapping[int, Iterable[int]], within: Collection[int]) -> set[int]:
    """``starts`` and everything that edges lead to from them without leaving ``within``."""
    found, todo = set(starts), list(starts)
    while todo:
        for place in edges.get(todo.pop(), ()):
            if place in within and place not in found:
                found.add(place)
                todo.append(place)
    return found

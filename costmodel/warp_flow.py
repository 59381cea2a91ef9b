"""Where values of a GPU kernel come from: reaching definitions over its blocks, and which instructions only unpack.

The definition of unpacking is that of `lowbit.costmodel.unpack`: an instruction unpacks if data that was loaded flows
into it, its result flows on into a product, and neither path passes a product. Products are dot products and
multiplications of two values. What a load's address is made of flows into no value, so address arithmetic does not
count; a load of less than a word loads scales; a copy from register to register is no unpacking. A guard decides
whether an instruction happens and is no value of it, but what a guarded instruction writes may have come from before
it.

A kernel with dot products has a softmax beside them, in floats that are loaded too. So there a path that ends in
another product than a dot must not pass floating-point arithmetic: codes of 16 bits, which are contracted as floats
next to integers, take conversions alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import networkx as nx

from .reachability import reached
from .warp_code import WarpFunction, WarpInstruction

UNPACKING = frozenset(("shift", "logic", "permute", "convert", "float", "integer", "address"))
"""Classes an unpacking instruction can have. Arithmetic subtracts offsets; shifts and adds can be done by LEA."""

Definitions = dict[str, set[int]]
Guarded = dict[tuple[str, str], set[int]]
"""Definitions of a register that an instruction under the same guard can see."""


def unpacking(function: WarpFunction, graph: nx.DiGraph[int]) -> frozenset[int]:
    """Places of the instructions that only unpack."""
    code = dict(enumerate(function.instructions))
    values = data_flow(function, graph)
    products = {place for place, x in code.items() if x.multiplies}
    dots = {place for place in products if code[place].kind == "dot"}
    loads = {place for place, x in code.items() if x.packed}
    if not dots:
        found = _between(loads, products, values, code.keys() - products)
    else:
        bits = {place for place, x in code.items() if x.moves or x.kind in UNPACKING - {"float"}}
        found = _between(loads, dots, values, code.keys() - products)
        found |= _between(loads, products - dots, values, bits - products)
    return frozenset(place for place in found if code[place].kind in UNPACKING and not code[place].moves)


def _between(
    starts: Collection[int], ends: Collection[int], values: Mapping[int, set[int]], within: Collection[int]
) -> set[int]:
    """Places on paths from ``starts`` to ``ends``, neither of them included, that stay ``within``."""
    loaded = reached(starts, values, within)
    sources: dict[int, set[int]] = defaultdict(set)
    for place in loaded:
        for use in values.get(place, ()):
            sources[use].add(place)
    return reached(ends, sources, loaded) - set(starts) - set(ends)


def data_flow(function: WarpFunction, graph: nx.DiGraph[int]) -> dict[int, set[int]]:
    """From the place of each instruction that gives a value to the places of those that may take it."""
    blocks = {start: function.instructions[start : start + len(graph.nodes[start]["instructions"])] for start in graph}
    reaching: dict[int, Definitions] = {start: {} for start in graph}
    effects = {start: _effect(start, block) for start, block in blocks.items()}
    todo = sorted(graph, reverse=True)
    while todo:
        start = todo.pop()
        given, kept = effects[start]
        leaving = {name: places for name, places in reaching[start].items() if name not in given or name in kept}
        for after in graph.successors(start):
            changed = _merge(reaching[after], leaving)
            changed = _merge(reaching[after], given) or changed
            if changed and after not in todo:
                todo.append(after)

    values: dict[int, set[int]] = defaultdict(set)
    for start, block in blocks.items():
        current = {name: set(places) for name, places in reaching[start].items()}
        guarded: Guarded = {}
        for place, x in enumerate(block, start):
            for name in x.reads:
                for source in guarded.get((name, x.guard or ""), current.get(name, ())):
                    values[source].add(place)
            _define(current, place, x)
            _define_guarded(guarded, place, x)
    return values


def _effect(start: int, block: Iterable[WarpInstruction]) -> tuple[Definitions, set[str]]:
    """What a block's end sees of its own definitions, and the names whose earlier definitions may be seen as well."""
    given: Definitions = {}
    certain: set[str] = set()
    for place, x in enumerate(block, start):
        _define(given, place, x)
        if x.guard is None:
            certain |= x.writes
    return given, given.keys() - certain


def _define(current: Definitions, place: int, x: WarpInstruction) -> None:
    for name in x.writes:
        current[name] = {place} if x.guard is None else current.get(name, set()) | {place}


def _define_guarded(guarded: Guarded, place: int, x: WarpInstruction) -> None:
    """Note what is sure under a guard: there an earlier value is gone, until the guard's predicate changes."""
    for name, guard in list(guarded):
        if guard.lstrip("!") in x.writes or (name in x.writes and x.guard is None):
            del guarded[name, guard]
        elif name in x.writes and {guard, x.guard} != {guard.lstrip("!"), "!" + guard.lstrip("!")}:
            guarded[name, guard] = guarded[name, guard] | {place}
    if x.guard is not None and x.guard.lstrip("!") not in x.writes:
        guarded.update({(name, x.guard): {place} for name in x.writes})


def _merge(known: Definitions, added: Mapping[str, set[int]]) -> bool:
    changed = False
    for name, places in added.items():
        before = known.setdefault(name, set())
        changed = changed or not places <= before
        before |= places
    return changed

"""Which loop of a compiled function is hot: control-flow graph, dominators, back edges, natural loops.

An edge whose target dominates its source is a back edge, and its natural loop is the target (the header) with every
block that reaches the source without passing the header (Aho, Sethi and Ullman). Back edges that share a header make
one loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import networkx as nx

from ..kernels.errors import CompileError
from .assembly import Instruction


class Step(Protocol):
    """What control flow asks of an instruction, whatever it is an instruction of."""

    @property
    def kind(self) -> str:
        """``branch`` if a block ends with it."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Labels it may jump to."""

    @property
    def falls_through(self) -> bool:
        """Whether control can continue with the next instruction."""


class Steps(Protocol):
    """A function's instructions in address order, and the index that each label stands before."""

    @property
    def instructions(self) -> Sequence[Step]: ...

    @property
    def labels(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class Loop:
    """A natural loop.

    Attributes
    ----------
    header : int
        Its only entry: index of the block's first instruction in the function.
    blocks : tuple of int
        Its blocks, nested loops' included, in address order.
    depth : int
        1 for an outermost loop.
    innermost : bool
        Whether no other loop lies within.
    """

    header: int
    blocks: tuple[int, ...]
    depth: int
    innermost: bool


def control_flow(function: Steps) -> nx.DiGraph[int]:
    """Basic blocks of ``function`` and the jumps between them.

    Returns
    -------
    networkx.DiGraph
        A node is the index of its block's first instruction; its attribute ``instructions`` is the block. Jumps out of
        the function and indirect jumps have no edge.
    """
    code = function.instructions
    end = len(code)
    starts = {0, *function.labels.values(), *(i + 1 for i, x in enumerate(code) if x.kind == "branch")} - {end}
    order = sorted(starts) if code else []
    graph: nx.DiGraph[int] = nx.DiGraph()
    for start, stop in zip(order, [*order[1:], end], strict=True):
        graph.add_node(start, instructions=code[start:stop])
    for start, stop in zip(order, [*order[1:], end], strict=True):
        last = code[stop - 1]
        successors = [stop] if last.falls_through else []
        successors += [function.labels[target] for target in last.targets if target in function.labels]
        graph.add_edges_from((start, successor) for successor in successors if successor < end)
    return graph


def natural_loops(graph: nx.DiGraph[int]) -> list[Loop]:
    """All loops reachable from the entry block, in order of their headers' addresses.

    Raises
    ------
    CompileError
        If the graph is irreducible: a cycle can be entered at several blocks, so it is no natural loop.
    """
    if 0 not in graph:
        return []
    graph = graph.subgraph({0} | nx.descendants(graph, 0))
    dominator = nx.immediate_dominators(graph, 0)
    bodies: dict[int, set[int]] = {}
    forward = nx.DiGraph(graph)
    for source, header in graph.edges:
        if _dominates(dominator, header, source):
            forward.remove_edge(source, header)
            within = graph.subgraph(set(graph) - {header})
            reaching = set() if source == header else nx.ancestors(within, source) | {source}
            bodies.setdefault(header, {header}).update(reaching)
    if not nx.is_directed_acyclic_graph(forward):
        raise CompileError("the compiled function has a cycle with several entries: its hot loop cannot be counted")
    return [
        Loop(
            header,
            tuple(sorted(body)),
            depth=sum(header in other for other in bodies.values()),
            innermost=not any(other in body and other != header for other in bodies),
        )
        for header, body in sorted(bodies.items())
    ]


def _dominates(dominator: dict[int, int | None], header: int, block: int) -> bool:
    current: int | None = block
    while current is not None and current != header:
        parent = dominator.get(current)
        current = None if parent == current else parent
    return current == header


def hot_loop(graph: nx.DiGraph[int], through: Collection[int]) -> Loop | None:
    """The innermost loop with most vector instructions among those that hold a block of ``through``; None without any.

    A tile function has other loops as well, to prepare its small operand for instance, so the caller names the blocks
    that read the packed words. Where a compiler splits the loop over them (a main loop and its remainder), the one with
    the most vector instructions is the main loop: a remainder repeats a part of it. Equal ones are told apart by depth,
    then by address.

    Raises
    ------
    CompileError
        If the graph is irreducible.
    """
    candidates = [loop for loop in natural_loops(graph) if loop.innermost and not set(loop.blocks).isdisjoint(through)]
    return max(candidates, key=lambda loop: (_vectors(graph, loop), loop.depth, -loop.header), default=None)


def _vectors(graph: nx.DiGraph[int], loop: Loop) -> int:
    return sum(x.vector for block in loop.blocks for x in block_instructions(graph, block))


def block_instructions(graph: nx.DiGraph[int], block: int) -> tuple[Instruction, ...]:
    """Instructions of one block of `control_flow`'s graph."""
    instructions: tuple[Instruction, ...] = graph.nodes[block]["instructions"]
    return instructions

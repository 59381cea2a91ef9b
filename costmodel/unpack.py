"""UnpackOps: what a compiled hot loop spends on turning packed words into codes that its dot product reads.

An instruction of the hot loop unpacks if data loaded from the packed operand flows into it and its result flows on
into a dot product, FMA or multiplication, and neither path passes a multiplication. So the shift, mask, permute,
conversion or sign fix between a load and the dot counts. Accumulations do not, for they follow the dot; nor does work
on the small operand or on scales alone, for no packed word flows into it. Where a packed word's sign is moved onto the
small operand (vpsignb), that counts, once for every row.

The hot loop is the innermost loop with most vector instructions of those that load from the packed operand. A load is
from the packed operand if its address derives, through scalar arithmetic, from the function's first argument. Within
the loop it is the data flow that decides (reaching definitions over the function's blocks, back edges included, with
stack slots as registers), so it does not matter where the compiler put an instruction. One thing text cannot tell: an
SSE shuffle into a register whose old content is irrelevant looks as if it used that content (in the generic kernels
about one such instruction in twenty).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import networkx as nx

from ..kernels.backend import Code
from ..kernels.cpu.share import Share
from ..kernels.errors import CompileError
from .assembly import ARGUMENTS, CLASSES, Instruction, parse_function
from .loops import block_instructions, control_flow, hot_loop, natural_loops
from .reachability import reached

UNPACKING = frozenset(("shift", "mask", "permute", "convert", "arithmetic"))
"""Classes an unpacking instruction can have; ``arithmetic`` subtracts offsets and fixes signs."""

ENTRY = -1
"""Where the function's first argument comes from, in place of an instruction's index."""


@dataclass(frozen=True)
class HotLoop:
    """What one iteration of a hot loop executes.

    Attributes
    ----------
    counts : dict of str to int
        Instructions by class, each of `CLASSES`.
    unpacking : dict of str to int
        Unpacking instructions by mnemonic.
    parts : tuple of (Share or None, dict of str to int)
        Every part of the function that has a share of its own, with its instructions by class: loops without the loops
        in them, and, under None, what runs once per call.
    """

    counts: dict[str, int]
    unpacking: dict[str, int]
    parts: tuple[tuple[Share | None, dict[str, int]], ...]


def instruction_counts(code: Code) -> dict[str, int]:
    """Instructions that one iteration of the hot loop executes, by class.

    Code that reads packed words outside any loop counts as one iteration. Blocks that an iteration may skip count as
    executed. An instruction with a memory operand appears under its own class and under ``load`` or ``store``.

    Returns
    -------
    dict
        A count for each of `CLASSES`.

    Raises
    ------
    CompileError
        If the assembly lacks the symbol, its control flow is irreducible, or it reads nothing through its first
        argument, which has to be the pointer to the packed words.
    """
    return dict(analysed(code.assembly, code.symbol).counts)


def unpack_counts(code: Code) -> dict[str, int]:
    """Unpacking instructions of one iteration by mnemonic, for people who ask why.

    Raises
    ------
    CompileError
        As `instruction_counts`.
    """
    return dict(analysed(code.assembly, code.symbol).unpacking)


def unpack_ops_per_32(code: Code) -> float:
    """UnpackOps: unpacking instructions of the hot loop for each 32 values of the packed operand.

    Raises
    ------
    CompileError
        As `instruction_counts`.
    """
    return sum(analysed(code.assembly, code.symbol).unpacking.values()) * 32 / code.values_per_iteration


@lru_cache(maxsize=64)
def analysed(assembly: str, symbol: str) -> HotLoop:
    """Count the hot loop of the function ``symbol`` in ``assembly``.

    Raises
    ------
    CompileError
        As `instruction_counts`.
    """
    function = parse_function(assembly, symbol)
    graph = control_flow(function)
    code = {start + i: x for start in graph for i, x in enumerate(block_instructions(graph, start))}
    values, addresses = _data_flow(graph)
    scalar = {p for p, x in code.items() if not x.vector and not x.address}
    pointers = reached([ENTRY], values, scalar)
    packed = {p for pointer in pointers for p in addresses.get(pointer, ()) if code[p].loads}
    if not packed:
        raise CompileError(f"{symbol!r} reads nothing through its first argument, the packed words")

    places = {start: range(start, start + len(block_instructions(graph, start))) for start in graph}
    loop = hot_loop(graph, [start for start in graph if not packed.isdisjoint(places[start])])
    hot = {p for start in (graph if loop is None else loop.blocks) for p in places[start]}
    seen = Counter(kind for p in hot for kind in code[p].classes)
    unpacking = Counter(code[p].mnemonic for p in sorted(_unpacking(code, values, hot, packed & hot)))
    return HotLoop({kind: seen[kind] for kind in CLASSES}, dict(unpacking), _parts(graph, function.notes))


def _parts(graph: nx.DiGraph[int], notes: Mapping[int, Share]) -> tuple[tuple[Share | None, dict[str, int]], ...]:
    """Blocks by the share of the innermost noted loop around them."""
    loops = sorted(natural_loops(graph), key=lambda loop: -loop.depth)
    shares: dict[int, Share] = {}
    for loop in loops:
        inner = {block for other in loops if other.depth > loop.depth for block in other.blocks}
        own = [loop.header, *(block for block in loop.blocks if block not in inner)]
        found = next((notes[block] for block in own if block in notes), None)
        if found is not None:
            shares[loop.header] = found
    counts: dict[Share | None, Counter[str]] = defaultdict(Counter)
    for start in graph:
        around = [loop for loop in loops if start in loop.blocks and loop.header in shares]
        share = shares[around[0].header] if around else None
        for instruction in block_instructions(graph, start):
            counts[share].update(instruction.classes)
    return tuple((share, dict(found)) for share, found in counts.items())


def _unpacking(
    code: Mapping[int, Instruction], values: Mapping[int, set[int]], hot: set[int], packed: set[int]
) -> set[int]:
    """Places in ``hot`` between loads of packed words and the products that read them."""
    products = {p for p in hot if code[p].multiplies}
    loaded = reached(packed - products, values, hot - products)
    sources: dict[int, set[int]] = defaultdict(set)
    for p in loaded:
        for use in values.get(p, ()):
            sources[use].add(p)
    return {p for p in reached(products, sources, loaded) - products if code[p].kind in UNPACKING}


def _data_flow(graph: nx.DiGraph[int]) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """From each instruction that gives a register's or stack slot's value to those that may take that value.

    Returns
    -------
    values, addresses : dict of int to set of int
        Uses as an operand, and uses in the address of a memory operand, by index in the function; `ENTRY` gives the
        first argument.
    """
    given = {
        start: {name: start + i for i, x in enumerate(block_instructions(graph, start)) for name in x.writes}
        for start in graph
    }
    entry = {registers[0]: {ENTRY} for registers in ARGUMENTS}
    reaching: dict[int, dict[str, set[int]]] = {start: {} for start in graph}
    for name, places in entry.items():
        reaching[0][name] = set(places)
    todo = sorted(graph, reverse=True)
    while todo:
        start = todo.pop()
        leaving = reaching[start] | {name: {place} for name, place in given[start].items()}
        for after in graph.successors(start):
            changed = False
            for name, places in leaving.items():
                known = reaching[after].setdefault(name, set())
                changed = changed or not places <= known
                known |= places
            if changed and after not in todo:
                todo.append(after)

    values: dict[int, set[int]] = defaultdict(set)
    addresses: dict[int, set[int]] = defaultdict(set)
    for start in graph:
        current = dict(reaching[start])
        for place, x in enumerate(block_instructions(graph, start), start):
            for names, uses in ((x.reads, values), (x.address, addresses)):
                for name in names:
                    for source in current.get(name, ()):
                        uses[source].add(place)
            for name in x.writes:
                current[name] = {place}
    return values, addresses

"""Instructions of a GPU kernel, loop by loop, as its SASS (or, where no tool makes SASS, its PTX) has them.

Loops are told apart by marks, performance events that the build for counting triggers in them (see
`lowbit.kernels.cuda.marks`). A compiler may unroll a loop, whose mark then appears several times in one iteration, or
dissolve it into the loop around it, where its marks are then found.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import networkx as nx

from ..kernels.cuda.code import KernelCode
from ..kernels.cuda.marks import K_STEP, TILE, WEIGHTS
from ..kernels.errors import CompileError
from .loops import Loop, control_flow, natural_loops
from .ptx_text import parse_ptx
from .sass import parse_sass
from .warp_code import GPU_CLASSES, WarpFunction, WarpInstruction
from .warp_flow import unpacking

__all__ = ["GPU_CLASSES", "KernelCounts", "LoopCounts", "count_kernel", "counter"]

Counts = dict[str, int]

_NESTING = (TILE, K_STEP, WEIGHTS)
"""Outer loops first: the loop that others were dissolved into is the one that gives the name."""

_WITH_WORDS = frozenset((TILE, K_STEP))
"""Marks of loops that touch packed words."""

SOURCES = (
    "assembly.py",
    "kernel_counts.py",
    "loops.py",
    "ptx_opcodes.py",
    "ptx_text.py",
    "reachability.py",
    "sass.py",
    "sass_opcodes.py",
    "warp_code.py",
    "warp_flow.py",
)
"""Everything here that counting depends on."""


@dataclass(frozen=True)
class LoopCounts:
    """Instructions of one loop, without those of marked loops within it.

    Attributes
    ----------
    mark : int or None
        Which loop it is; None for what no marked loop has, which a warp executes once.
    marks : int
        Passes of the marked loop that one iteration makes: marks of that number in its body.
    counts : dict of str to int
        Instructions of one iteration by class, each of `GPU_CLASSES`; those that an iteration may skip are counted.
    unpacking : dict of str to int
        Those of them that only unpack, by opcode.
    opcodes : dict of str to int
        All of them by opcode.
    passes : dict of int to int
        Every mark in its body: also of loops within that the compiler dissolved. Empty means its own only.
    """

    mark: int | None
    marks: int
    counts: Counts
    unpacking: Counts
    opcodes: Counts
    passes: dict[int, int] = field(default_factory=dict)

    @property
    def own_passes(self) -> dict[int, int]:
        """`passes`, or what stands for it."""
        return self.passes or ({} if self.mark is None else {self.mark: self.marks})


@dataclass(frozen=True)
class KernelCounts:
    """Instructions of one kernel.

    Attributes
    ----------
    symbol : str
        The kernel's name, unique to its code.
    role : str
        ``kv``, ``k`` or ``v``: the packed operands that it reads.
    rows : int
        Rows of the small operand that one pass serves.
    packing : str
        Name of the packing that it unpacks.
    language : str
        What was counted: ``sass``, or ``ptx``, of which machine code may execute more or less.
    registers, shared_bytes, spill_bytes : int
        As in `lowbit.kernels.cuda.code.KernelCode`.
    loops : tuple of LoopCounts
        Outer ones first.
    unknown : dict of str to int
        Opcodes that the tables lack, which are counted as ``other``.
    """

    symbol: str
    role: str
    rows: int
    packing: str
    language: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    loops: tuple[LoopCounts, ...]
    unknown: Counts

    def executed(self, iterations: Mapping[int, float], warps: float) -> dict[str, float]:
        """Warp instructions that a launch executes, by class.

        Of several loops with one mark, the main loop of an unrolled one and its remainder, the one with most marks
        takes all passes.

        Parameters
        ----------
        iterations : mapping of int to float
            Passes of each marked loop, all warps together.
        warps : float
            Warps of the launch.
        """
        total = dict.fromkeys(GPU_CLASSES, 0.0)
        for loop, times in self._times(iterations, warps):
            for kind, count in loop.counts.items():
                total[kind] += count * times
        return total

    def opcodes_executed(self, iterations: Mapping[int, float], warps: float) -> dict[str, float]:
        """As `executed`, by opcode."""
        total: dict[str, float] = defaultdict(float)
        for loop, times in self._times(iterations, warps):
            for opcode, count in loop.opcodes.items():
                total[opcode] += count * times
        return dict(total)

    def unpacking_executed(self, iterations: Mapping[int, float]) -> float:
        """Warp instructions of the marked loops that only unpack."""
        return sum(sum(loop.unpacking.values()) * times for loop, times in self._times(iterations, 0.0))

    def _times(self, iterations: Mapping[int, float], warps: float) -> Iterator[tuple[LoopCounts, float]]:
        """How often each loop's body is executed. Passes made in an outer loop's body are no loop's any more."""
        remaining = dict(iterations)
        main: dict[int | None, LoopCounts] = {}
        for loop in self.loops:
            chosen = main.setdefault(loop.mark, loop)
            if (loop.marks, sum(loop.counts.values())) > (chosen.marks, sum(chosen.counts.values())):
                main[loop.mark] = loop
        for loop in self.loops:
            if loop.mark is None:
                times = warps
            else:
                times = remaining.get(loop.mark, 0.0) / loop.marks if loop is main[loop.mark] else 0.0
            for mark, passes in loop.own_passes.items():
                remaining[mark] = max(0.0, remaining.get(mark, 0.0) - passes * times)
            yield loop, times

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` is the inverse."""
        loops = [{**asdict(loop), "passes": [list(item) for item in loop.passes.items()]} for loop in self.loops]
        return {**vars(self), "loops": loops, "counter": counter()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self | None:
        """None if another release made ``values`` and may have counted otherwise: the code has to be counted anew."""
        if values.get("counter") != counter():
            return None
        loops = (LoopCounts(**{**loop, "passes": dict(loop["passes"])}) for loop in values["loops"])
        rest = {name: value for name, value in values.items() if name not in ("loops", "counter")}
        return cls(**rest, loops=tuple(loops))


def count_kernel(code: KernelCode) -> KernelCounts:
    """Count a kernel's marked build.

    Raises
    ------
    CompileError
        If the text lacks the kernel or is damaged, or its control flow is irreducible.
    """
    loops, unknown = _analysed(code.assembly, code.entry, code.language)
    return KernelCounts(
        code.symbol,
        code.role,
        code.rows,
        code.packing,
        code.language,
        code.registers,
        code.shared_bytes,
        code.spill_bytes,
        loops,
        dict(unknown),
    )


@functools.cache
def counter() -> str:
    """Digest of the sources that count: a change makes stored counts stale, though the code they count is the same."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:12]


@functools.lru_cache(maxsize=64)
def _analysed(text: str, entry: str, language: str) -> tuple[tuple[LoopCounts, ...], tuple[tuple[str, int], ...]]:
    """Loops and unknown opcodes of the kernel."""
    if language not in ("sass", "ptx"):
        raise CompileError(f"no kernel can be counted in {language!r}: only in 'sass' and 'ptx'")
    function = parse_sass(text, entry) if language == "sass" else parse_ptx(text, entry)
    graph = control_flow(function)
    graph = graph.subgraph({0} | nx.descendants(graph, 0))
    found = unpacking(function, graph)
    places = {start: range(start, start + len(graph.nodes[start]["instructions"])) for start in graph}
    blocks = _blocks_of_loops(function, graph, places)
    outside, *within = ([p for start in starts for p in places[start]] for starts in blocks)
    counted = [_outside(function, outside, found if not within else frozenset())]
    counted += [_marked(function, loop, found) for loop in within]
    code = [function.instructions[p] for start in graph for p in places[start]]
    unknown = Counter(x.opcode for x in code if not x.known)
    return tuple(counted), tuple(unknown.items())


def _blocks_of_loops(function: WarpFunction, graph: nx.DiGraph[int], places: Mapping[int, range]) -> list[list[int]]:
    """Blocks outside marked loops, then each marked loop's own, outer loops first."""
    loops = sorted(natural_loops(graph), key=lambda loop: (loop.depth, loop.header))
    innermost: dict[int, Loop] = {block: loop for loop in loops for block in loop.blocks}
    marked = {
        loop.header
        for block, loop in innermost.items()
        if any(function.instructions[p].mark is not None for p in places[block])
    }
    kept = [loop for loop in loops if loop.header in marked]
    owner: dict[int, int] = {block: loop.header for loop in kept for block in loop.blocks}
    own: dict[int | None, list[int]] = {None: [], **{loop.header: [] for loop in kept}}
    for block in sorted(graph):
        own[owner.get(block)].append(block)
    return list(own.values())


def _outside(function: WarpFunction, places: Sequence[int], found: frozenset[int]) -> LoopCounts:
    code, passes = _split(function, places)
    return _counted(None, 0, code, found, passes)


def _marked(function: WarpFunction, places: Sequence[int], found: frozenset[int]) -> LoopCounts:
    code, passes = _split(function, places)
    mark = min(passes, key=_rank)
    return _counted(mark, passes[mark], code, found if mark in _WITH_WORDS else frozenset(), passes)


def _split(function: WarpFunction, places: Sequence[int]) -> tuple[dict[int, WarpInstruction], dict[int, int]]:
    """The instructions by place, and the marks among them, which are none of the kernel's."""
    code = {place: function.instructions[place] for place in places}
    passes = Counter(x.mark for x in code.values() if x.mark is not None)
    return {place: x for place, x in code.items() if x.mark is None}, dict(passes)


def _counted(
    mark: int | None, marks: int, code: Mapping[int, WarpInstruction], found: frozenset[int], passes: dict[int, int]
) -> LoopCounts:
    kinds = Counter(x.kind for x in code.values())
    return LoopCounts(
        mark,
        marks,
        {kind: kinds[kind] for kind in GPU_CLASSES},
        dict(Counter(x.opcode for place, x in code.items() if place in found)),
        dict(Counter(x.opcode for x in code.values())),
        passes,
    )


def _rank(mark: int) -> tuple[int, int]:
    return (_NESTING.index(mark) if mark in _NESTING else len(_NESTING), mark)

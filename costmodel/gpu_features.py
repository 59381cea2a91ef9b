"""What the cost model reads about one call of one GPU candidate: traffic, instructions by pipe, and how it is spread.

Traffic is counted twice. `GpuFeatures.dram_bytes` are distinct sectors, counted from the layouts alone; re-reading keys
and values for further rows of queries goes to memory again unless they fit the L2 cache or all blocks run at once.
`GpuFeatures.l2_bytes` are the sectors that warps ask of the L2 cache, instruction by instruction: what neighbouring
loads of one tile share is asked once if the tiles of all resident warps fit the L1 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from ..kernels.candidate import Candidate
from ..kernels.cuda import marks
from ..kernels.cuda.mapping import LANES, SECTOR_BYTES
from ..kernels.cuda.records import RECORD_HEAD
from ..kernels.cuda.work import WarpAccess, Work
from ..kernels.errors import CompileError
from ..kernels.problem import Problem, check_tokens
from .gpu import Gpu
from .gpu_pipes import pipes_of
from .kernel_counts import KernelCounts
from .occupancy import occupancy, refusal, waves
from .traffic import call_bytes, layout_of, stored_channels, walked_tokens
from .warp_access import ideal_sectors, l1_cycles, sectors, wavefronts

FLOAT_BYTES = 4
_PACKED = ("k", "v", "scales")


@dataclass(frozen=True)
class GpuFeatures:
    """One call of one candidate at one context length, on one GPU; totals are over all heads and blocks.

    Attributes
    ----------
    dram_bytes : float
        Sectors that come from or go to memory when nothing is in the L2 cache beforehand.
    footprint_bytes : float
        Distinct sectors of all operands: whether a repeated call finds them in the L2 cache.
    l2_bytes, loaded_bytes : float
        Sectors that the multiprocessors ask of the L2 cache or leave there; those of them that warps wait for.
    sectors_per_ideal : float
        Sectors that loads of packed operands touch, for each that their bytes would fill: 1 is coalesced.
    instructions : dict of str to float
        Warp instructions executed, for each class of `lowbit.costmodel.warp_code.GPU_CLASSES`.
    pipes : dict of str to float
        Warp instructions executed in each of `lowbit.costmodel.gpu_pipes.PIPES`.
    shared_wavefronts : float
        Passes of warps through the banks of shared memory, conflicts included.
    l1_cycles : float
        Cycles of L1 caches for global requests.
    registers, shared_bytes : int
        Of a thread; of a block, static and dynamic.
    blocks, warps : int
        Of the grid; of a block.
    blocks_per_sm, limiter : int, str
        See `lowbit.costmodel.occupancy.Occupancy`.
    waves, tail, balance : float
        See `lowbit.costmodel.occupancy.Waves`; ``waves`` is blocks over slots, at least 1.
    in_flight_bytes : float
        That one multiprocessor's resident warps have asked for at a time.
    stages : int
        Tiles that a warp has on their way while it works on another; 0 if it waits for what it loads.
    rounds : float
        Times that the longest warp waits for memory.
    chain : float
        Tiles of 32 tokens (of a matrix: steps) that the longest warp takes one after the other.
    chain_instructions : float
        Instructions of the longest warp.
    launches : int
        2 if splits are merged.
    merge_bytes : float
        Partial results that the merge reads.
    unpack_ops : float
        Warp instructions that only unpack.
    unpack_ops_per_32 : float
        The same of a lane, for each 32 codes.
    """

    dram_bytes: float
    footprint_bytes: float
    l2_bytes: float
    loaded_bytes: float
    sectors_per_ideal: float
    instructions: dict[str, float]
    pipes: dict[str, float]
    shared_wavefronts: float
    l1_cycles: float
    registers: int
    shared_bytes: int
    blocks: int
    warps: int
    blocks_per_sm: int
    limiter: str
    waves: float
    tail: float
    balance: float
    in_flight_bytes: float
    stages: int
    rounds: float
    chain: float
    chain_instructions: float
    launches: int
    merge_bytes: float
    unpack_ops: float
    unpack_ops_per_32: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        copied = {name: dict(values[name]) for name in ("instructions", "pipes")}
        return cls(**{**values, **copied})


def gpu_features(
    problem: Problem, candidate: Candidate, tokens: int, counts: KernelCounts, gpu: Gpu, work: Work
) -> GpuFeatures:
    """Features of one call whose operands come from memory, as those of a model's consecutive layers do.

    Parameters
    ----------
    problem : Problem
    candidate : Candidate
        With a `lowbit.kernels.candidate.Launch`.
    tokens : int
        Context length; rows of a matrix.
    counts : KernelCounts
        Of the candidate's main kernel.
    gpu : Gpu
    work : Work
        Of the same candidate and context length.

    Raises
    ------
    CompileError
        If a block of the candidate cannot be launched on the GPU.
    LayoutError
        If the candidate lacks a layout that the operator needs, or has no launch.
    ProblemError
        If ``tokens`` is no context length.
    """
    launch, geometry = candidate.launch, work.geometry
    grid_x, grid_y, passes = geometry.grid
    blocks, warps = grid_x * grid_y * passes, -(-geometry.threads // LANES)
    shared_bytes = counts.shared_bytes + geometry.shared_bytes
    reason = refusal(gpu, geometry.threads, counts.registers, shared_bytes)
    if reason is not None:
        raise CompileError(f"cannot be launched: {reason}")
    held = occupancy(gpu, geometry.threads, counts.registers, shared_bytes)
    ran = waves(blocks, held.blocks_per_sm, gpu.sms)
    resident = min(held.blocks_per_sm, -(-blocks // gpu.sms)) * warps

    packed = call_bytes(problem, candidate, check_tokens(tokens), SECTOR_BYTES)
    small = _small_bytes(problem, tokens)
    partials = _partial_bytes(problem, tokens, launch.splits)
    again = 1 if packed <= gpu.l2_bytes or ran.waves == 1 else passes
    traffic = _Traffic(work, [access for access in work.accesses if access.space == "global"])
    tiles = work.iterations.get(marks.TILE) or work.iterations.get(marks.K_STEP) or 1.0
    tile_bytes = packed * passes / tiles
    l1_share = min((gpu.l1_bytes - held.blocks_per_sm * shared_bytes) / max(resident * tile_bytes, 1), 1.0)

    loaded = traffic.loaded_bytes(packed * passes, max(l1_share, 0.0))
    instructions = counts.executed(work.iterations, blocks * warps)
    unpack_ops = counts.unpacking_executed(work.iterations)
    codes = _codes(problem, candidate, tokens) * passes
    return GpuFeatures(
        dram_bytes=packed * again + small + partials,
        footprint_bytes=packed + small + partials,
        l2_bytes=loaded + traffic.stored_bytes,
        loaded_bytes=loaded,
        sectors_per_ideal=traffic.sectors_per_ideal,
        instructions=dict(instructions),
        pipes=pipes_of(counts, work.iterations, blocks * warps),
        shared_wavefronts=_shared_wavefronts(work, instructions),
        l1_cycles=traffic.l1_cycles,
        registers=counts.registers,
        shared_bytes=shared_bytes,
        blocks=blocks,
        warps=warps,
        blocks_per_sm=held.blocks_per_sm,
        limiter=held.limiter,
        waves=max(blocks / ran.slots, 1.0),
        tail=ran.tail,
        balance=ran.balance,
        in_flight_bytes=resident * traffic.in_flight_bytes(launch.loads, launch.stages, tile_bytes),
        stages=launch.stages,
        rounds=traffic.rounds(launch.loads, launch.stages),
        chain=work.longest.get(marks.TILE, work.longest.get(marks.K_STEP, 0.0)),
        chain_instructions=sum(counts.executed(work.longest, 1).values()),
        launches=2 if partials else 1,
        merge_bytes=partials,
        unpack_ops=unpack_ops,
        unpack_ops_per_32=unpack_ops * LANES * 32 / codes if codes else 0.0,
    )


def warm(features: GpuFeatures, gpu: Gpu) -> GpuFeatures:
    """The same call repeated: what fits the L2 cache does not come from memory again."""
    if features.footprint_bytes > gpu.l2_bytes:
        return features
    return replace(features, dram_bytes=0.0)


class _Traffic:
    """What global accesses ask for."""

    def __init__(self, work: Work, accesses: Iterable[WarpAccess]) -> None:
        self._work = work
        self._accesses = tuple(accesses)
        self._packed = tuple(access for access in self._accesses if access.name in _PACKED)

    def _total(self, accesses: Iterable[WarpAccess], each: Callable[[WarpAccess], float]) -> float:
        return float(sum(each(a) * a.count * _passes(self._work.iterations, a) for a in accesses))

    @property
    def stored_bytes(self) -> float:
        return self._total((a for a in self._accesses if a.kind == "store"), sectors) * SECTOR_BYTES

    def loaded_bytes(self, distinct: float, l1_share: float) -> float:
        """Sectors asked of L2, of which a share of those that loads of one tile have in common is met by L1."""
        straight = [access for access in self._packed if access.kind == "load"]
        asked = self._total(straight, sectors) * SECTOR_BYTES
        copied = self._total((a for a in self._packed if a.kind == "async"), sectors) * SECTOR_BYTES
        others = (a for a in self._accesses if a.name not in _PACKED and a.kind != "store")
        shared = max(asked - max(distinct - copied, 0.0), 0.0) * l1_share
        return max(asked - shared + copied, distinct) + self._total(others, sectors) * SECTOR_BYTES

    @property
    def sectors_per_ideal(self) -> float:
        ideal = self._total(self._packed, ideal_sectors)
        return self._total(self._packed, sectors) / ideal if ideal else 1.0

    @property
    def l1_cycles(self) -> float:
        return self._total(self._accesses, l1_cycles)

    def in_flight_bytes(self, loads: int, stages: int, tile_bytes: float) -> float:
        """Of one warp: whole tiles on their way into shared memory, or the vectors that its lanes wait for."""
        if stages:
            return stages * tile_bytes
        vectors = [access for access in self._packed if access.name != "scales"]
        executed = self._total(vectors, lambda _: 1)
        return loads * self._total(vectors, ideal_sectors) / executed * SECTOR_BYTES if executed else 0.0

    def rounds(self, loads: int, stages: int) -> float:
        """Waits for memory of the longest warp: for its first scales and queries, and for every batch of vectors."""
        if stages:
            return 1 + self._work.longest.get(marks.TILE, 0.0) / stages
        vectors = sum(
            access.count * self._work.longest.get(access.mark, 1.0)
            for access in self._packed
            if access.name != "scales"
        )
        return 1 + vectors / loads


def _shared_wavefronts(work: Work, instructions: Mapping[str, float]) -> float:
    """Passes through the banks: how many accesses there are is the code's, how they conflict is the accesses'.

    A compiler keeps in registers what a loop need not read again, and what is outside the loops has no access of its
    own; it is taken to have no conflicts.
    """
    total = 0.0
    for kind in ("load", "store"):
        accesses = [each for each in work.accesses if each.space == "shared" and each.kind == kind]
        times = [each.count * _passes(work.iterations, each) for each in accesses]
        expected, executed = sum(times), instructions.get(f"shared_{kind}", 0.0)
        passes = sum(wavefronts(each) * n for each, n in zip(accesses, times, strict=True))
        total += passes * min(executed / expected, 1.0) + max(executed - expected, 0.0) if expected else executed
    return total


def _passes(iterations: Mapping[int, float], access: WarpAccess) -> float:
    return iterations.get(access.mark, 0.0)


def _codes(problem: Problem, candidate: Candidate, tokens: int) -> float:
    """Codes that one pass over the packed operands unpacks."""
    channels = sum(stored_channels(layout_of(candidate, role), problem.head_dim) for role in problem.roles)
    return float(problem.kv_heads * walked_tokens(problem, tokens) * channels)


def _small_bytes(problem: Problem, tokens: int) -> float:
    """Float32 operand and result: channels or scores, for every query head and position."""
    rows = problem.heads * problem.query_rows
    width = 2 * problem.head_dim if problem.operator == "attend" else problem.head_dim + tokens
    return float(rows * width * FLOAT_BYTES)


def _partial_bytes(problem: Problem, tokens: int, splits: int) -> float:
    """Float32 results that splits leave for the merge; scores of split tokens are results already."""
    if splits == 1 or problem.operator == "qk":
        return 0.0
    rows = problem.heads * problem.query_rows
    width = tokens if problem.operator == "gemv" else RECORD_HEAD + problem.head_dim
    return float(splits * rows * width * FLOAT_BYTES)

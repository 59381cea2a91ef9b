"""How many blocks of a kernel a multiprocessor holds at once, what limits them, and in how many waves they run.

The rules are those of NVIDIA's occupancy calculator (CUDA Toolkit, ``cuda_occupancy.h``): registers are given to whole
warps in steps of 256 and live in the four partitions of a multiprocessor, shared memory is given to blocks in steps
after the driver has taken its own, and threads count in whole warps. The shared memory of a multiprocessor is taken to
be set to its largest size.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.cuda.arch import MOST_THREADS
from ..kernels.cuda.mapping import LANES
from .gpu import Gpu

THREADS, BLOCKS, REGISTERS, SHARED = "threads", "blocks", "registers", "shared memory"


@dataclass(frozen=True)
class Occupancy:
    """What a multiprocessor holds of one kernel.

    Attributes
    ----------
    blocks_per_sm : int
        Resident blocks; 0 if not even one fits.
    warps_per_sm : int
        Their warps.
    share : float
        Of the warps that the multiprocessor could hold.
    limiter : str
        What allows no more: ``threads``, ``blocks``, ``registers`` or ``shared memory``.
    """

    blocks_per_sm: int
    warps_per_sm: int
    share: float
    limiter: str


@dataclass(frozen=True)
class Waves:
    """How a grid runs on all multiprocessors.

    Attributes
    ----------
    slots : int
        Blocks that are resident at once.
    waves : int
        Rounds of ``slots`` blocks that it takes, the last one perhaps not full.
    tail : float
        Share of the last round's slots that have a block.
    efficiency : float
        Share of all the rounds' slots that have a block.
    balance : float
        Blocks of the busiest multiprocessor over the mean of all: how much longer throughput is needed where the
        blocks do not divide evenly.
    """

    slots: int
    waves: int
    tail: float
    efficiency: float
    balance: float


def refusal(gpu: Gpu, threads: int, registers: int, shared_bytes: int) -> str | None:
    """Why a kernel cannot be launched at all; None if it can.

    Parameters
    ----------
    gpu : Gpu
    threads : int
        Of a block.
    registers : int
        Of a thread.
    shared_bytes : int
        Static and dynamic shared memory of a block.
    """
    if not 1 <= threads <= MOST_THREADS:
        return f"a block of {threads} threads, but 1 to {MOST_THREADS} are possible"
    if registers > gpu.max_registers_per_thread:
        return f"{registers} registers a thread, but {gpu.arch} has {gpu.max_registers_per_thread}"
    if shared_bytes > gpu.shared_bytes_per_block:
        return f"{shared_bytes} bytes of shared memory a block, but {gpu.arch} has {gpu.shared_bytes_per_block}"
    # The launch is checked as if a block's warps filled all partitions evenly.
    assumed = _warp_registers(gpu, registers) * _ceil(_ceil(threads, LANES), gpu.schedulers) * gpu.schedulers
    if assumed > gpu.registers_per_sm:
        return f"{assumed} registers a block, but {gpu.arch} has {gpu.registers_per_sm}"
    return None


def occupancy(gpu: Gpu, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Blocks that one multiprocessor holds.

    Parameters
    ----------
    gpu : Gpu
    threads : int
        Of a block.
    registers : int
        Of a thread; 0 if unknown, which then limits nothing.
    shared_bytes : int
        Static and dynamic shared memory of a block.
    """
    if not 1 <= threads <= MOST_THREADS:
        return Occupancy(0, 0, 0.0, THREADS)
    warps = _ceil(threads, LANES)
    most_warps = gpu.max_threads_per_sm // LANES
    limits = {THREADS: most_warps // warps, BLOCKS: gpu.max_blocks_per_sm}
    if registers:
        a_partition = gpu.registers_per_sm // gpu.schedulers // _warp_registers(gpu, registers)
        limits[REGISTERS] = a_partition * gpu.schedulers // warps
    step = gpu.shared_granularity_bytes
    allocated = _ceil(shared_bytes + gpu.shared_reserved_bytes, step) * step
    if allocated:
        limits[SHARED] = gpu.shared_bytes_per_sm // allocated
    if refusal(gpu, threads, registers, shared_bytes):
        limits[SHARED if shared_bytes > gpu.shared_bytes_per_block else REGISTERS] = 0
    limiter = min(limits, key=lambda name: limits[name])
    blocks = limits[limiter]
    return Occupancy(blocks, blocks * warps, blocks * warps / most_warps, limiter)


def waves(blocks: int, blocks_per_sm: int, sms: int) -> Waves:
    """How ``blocks`` blocks run on ``sms`` multiprocessors that hold ``blocks_per_sm`` each.

    Raises
    ------
    ValueError
        Unless all three are positive.
    """
    if min(blocks, blocks_per_sm, sms) < 1:
        raise ValueError(f"cannot run {blocks} blocks on {sms} multiprocessors of {blocks_per_sm}")
    slots = blocks_per_sm * sms
    rounds = _ceil(blocks, slots)
    last = blocks - (rounds - 1) * slots
    return Waves(slots, rounds, last / slots, blocks / (rounds * slots), _ceil(blocks, sms) * sms / blocks)


def _warp_registers(gpu: Gpu, registers: int) -> int:
    step = gpu.register_granularity
    return max(_ceil(registers * LANES, step), 1) * step


def _ceil(count: int, step: int) -> int:
    return -(-count // step)

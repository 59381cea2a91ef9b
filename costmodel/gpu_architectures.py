"""NVIDIA architectures: what every multiprocessor of a compute capability has, each figure with where it is published.

Sources are public documents; a figure that none states begins with ``estimate:`` and says how it was had. Throughputs
count results (lanes) a clock and multiprocessor, as NVIDIA's tables do: a warp instruction is 32 of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KIB = 1 << 10

CAPABILITIES = "CUDA Programming Guide 13, compute capabilities, technical specifications"
OCCUPANCY = "CUDA Toolkit 13, cuda_occupancy.h"
THROUGHPUT = "CUDA C++ Best Practices Guide 13, throughput of native arithmetic instructions"
PIPES = "Nsight Compute Profiling Guide, pipelines"
BENCHES = "RRZE-HPC/gpu-benches on GitHub"
LATENCIES = "markdewing/AI_kernels on GitHub, latency/README.md"

_DOT = (
    f"estimate: integer dot products run in the pipe of integer multiply-adds ({PIPES}), which gives 64 ({THROUGHPUT})"
)


@dataclass(frozen=True)
class Architecture:
    """What a multiprocessor of one compute capability has.

    Attributes
    ----------
    shared_bytes_per_sm, shared_bytes_per_block : int
        Most shared memory of a multiprocessor, and of a block that asks for more than the default 48 KiB.
    shared_reserved_bytes, shared_granularity_bytes : int
        What the driver takes of each block's shared memory, and the step it is allocated in.
    l1_bytes : int
        Unified L1 cache and shared memory.
    registers_per_sm, register_granularity : int
        32-bit registers, and the step in which a warp gets them.
    fp32_per_clock, int32_per_clock, logic_per_clock : int
        Float additions and multiply-adds; integer additions; shifts, AND, OR, XOR, comparisons.
    dp4a_per_clock, convert_per_clock, special_per_clock, shuffle_per_clock : int
        Integer dot products of four bytes; int-to-float and other conversions; exp2, reciprocal and so on; shuffles.
    load_store_lanes : int
        Lanes whose addresses the load/store unit takes a clock.
    l1_bytes_per_clock : int
        Bytes that the L1 cache or shared memory delivers.
    dram_latency_ns, l2_latency_ns : float
        Of one load that nothing else disturbs.
    sources : mapping of str to str
        For every figure.
    """

    arch: str
    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    shared_reserved_bytes: int
    shared_granularity_bytes: int
    l1_bytes: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    fp32_per_clock: int
    int32_per_clock: int
    l1_bytes_per_clock: int
    load_store_lanes: int
    dram_latency_ns: float
    l2_latency_ns: float
    sources: Mapping[str, str]
    logic_per_clock: int = 64
    dp4a_per_clock: int = 64
    convert_per_clock: int = 16
    special_per_clock: int = 16
    shuffle_per_clock: int = 32
    schedulers: int = 4
    registers_per_sm: int = 65536
    register_granularity: int = 256
    max_registers_per_thread: int = 255


def _arch_sources(whitepaper: str, dram: str, l2: str, **others: str) -> dict[str, str]:
    capabilities = (
        *("shared_bytes_per_sm", "shared_bytes_per_block", "l1_bytes", "max_threads_per_sm"),
        *("registers_per_sm", "max_registers_per_thread"),
    )
    occupancy = ("shared_granularity_bytes", "register_granularity", "max_blocks_per_sm", "schedulers")
    throughput = ("fp32_per_clock", "int32_per_clock", "logic_per_clock", "special_per_clock", "shuffle_per_clock")
    return {
        **dict.fromkeys(capabilities, CAPABILITIES),
        **dict.fromkeys(occupancy, OCCUPANCY),
        **dict.fromkeys(throughput, THROUGHPUT),
        "shared_reserved_bytes": f"{CAPABILITIES}: 1 KiB a block since 8.0",
        "convert_per_clock": f"{THROUGHPUT}: all other type conversions",
        "dp4a_per_clock": _DOT,
        "l1_bytes_per_clock": whitepaper,
        "load_store_lanes": f"estimate: {whitepaper}; a lane is four of the bytes a clock",
        "dram_latency_ns": dram,
        "l2_latency_ns": l2,
        **others,
    }


def _chased(board: str, cycles: float, mhz: int, file: str) -> str:
    return f"{BENCHES}, gpu-latency/{file}: {cycles} cycles at {mhz} MHz, {board}"


_WIDE = "NVIDIA GA102 whitepaper: 128 bytes a clock, 64 on Turing; 125-128 measured, " + f"{BENCHES}, gpu-strides"

_TURING = Architecture(
    "sm_75",
    shared_bytes_per_sm=64 * KIB,
    shared_bytes_per_block=64 * KIB,
    shared_reserved_bytes=0,
    shared_granularity_bytes=256,
    l1_bytes=96 * KIB,
    max_threads_per_sm=1024,
    max_blocks_per_sm=16,
    fp32_per_clock=64,
    int32_per_clock=64,
    l1_bytes_per_clock=64,
    load_store_lanes=16,
    dram_latency_ns=315.0,
    l2_latency_ns=154.0,
    sources=_arch_sources(
        "NVIDIA GA102 whitepaper: 64 bytes a clock on Turing, against 128 of its own",
        f"estimate: as of the V100; {BENCHES}, gpu-latency/v100.txt: 434 cycles at 1380 MHz",
        f"estimate: as of the V100; {BENCHES}, gpu-latency/v100.txt: 212 cycles at 1380 MHz",
    ),
)
_AMPERE = Architecture(
    "sm_80",
    shared_bytes_per_sm=164 * KIB,
    shared_bytes_per_block=163 * KIB,
    shared_reserved_bytes=1024,
    shared_granularity_bytes=128,
    l1_bytes=192 * KIB,
    max_threads_per_sm=2048,
    max_blocks_per_sm=32,
    fp32_per_clock=64,
    int32_per_clock=64,
    l1_bytes_per_clock=128,
    load_store_lanes=32,
    dram_latency_ns=392.0,
    l2_latency_ns=146.0,
    sources=_arch_sources(
        f"NVIDIA A100 whitepaper; 126 measured, {BENCHES}, gpu-strides/a100.txt",
        _chased("A100 80GB", 552.4, 1410, "a100_80.txt"),
        _chased("A100 80GB, the near half of L2", 205.7, 1410, "a100_80.txt"),
    ),
)
_GAMING_AMPERE = Architecture(
    "sm_86",
    shared_bytes_per_sm=100 * KIB,
    shared_bytes_per_block=99 * KIB,
    shared_reserved_bytes=1024,
    shared_granularity_bytes=128,
    l1_bytes=128 * KIB,
    max_threads_per_sm=1536,
    max_blocks_per_sm=16,
    fp32_per_clock=128,
    int32_per_clock=64,
    l1_bytes_per_clock=128,
    load_store_lanes=32,
    dram_latency_ns=320.0,
    l2_latency_ns=144.0,
    sources=_arch_sources(_WIDE, _chased("A40", 556.6, 1740, "a40.txt"), _chased("A40", 250.4, 1740, "a40.txt")),
)
_ORIN = Architecture(
    "sm_87",
    shared_bytes_per_sm=164 * KIB,
    shared_bytes_per_block=163 * KIB,
    shared_reserved_bytes=1024,
    shared_granularity_bytes=128,
    l1_bytes=192 * KIB,
    max_threads_per_sm=1536,
    max_blocks_per_sm=16,
    fp32_per_clock=128,
    int32_per_clock=64,
    l1_bytes_per_clock=128,
    load_store_lanes=32,
    dram_latency_ns=600.0,
    l2_latency_ns=200.0,
    sources=_arch_sources(
        f"estimate: as of sm_86; {_WIDE}",
        "estimate: LPDDR5 behind a fabric shared with the CPU, taken to be nearly twice GDDR6's 320 ns",
        "estimate: the A40's 250 cycles at the lower clock of 1300 MHz",
    ),
)
_ADA = Architecture(
    "sm_89",
    shared_bytes_per_sm=100 * KIB,
    shared_bytes_per_block=99 * KIB,
    shared_reserved_bytes=1024,
    shared_granularity_bytes=128,
    l1_bytes=128 * KIB,
    max_threads_per_sm=1536,
    max_blocks_per_sm=24,
    fp32_per_clock=128,
    int32_per_clock=64,
    l1_bytes_per_clock=128,
    load_store_lanes=32,
    dram_latency_ns=251.0,
    l2_latency_ns=110.0,
    sources=_arch_sources(_WIDE, _chased("L40", 624.9, 2490, "l40.txt"), _chased("L40", 273.6, 2490, "l40.txt")),
)
_HOPPER = Architecture(
    "sm_90",
    shared_bytes_per_sm=228 * KIB,
    shared_bytes_per_block=227 * KIB,
    shared_reserved_bytes=1024,
    shared_granularity_bytes=128,
    l1_bytes=256 * KIB,
    max_threads_per_sm=2048,
    max_blocks_per_sm=32,
    fp32_per_clock=128,
    int32_per_clock=64,
    l1_bytes_per_clock=128,
    load_store_lanes=32,
    dram_latency_ns=348.0,
    l2_latency_ns=142.0,
    sources=_arch_sources(
        f"126 measured, {BENCHES}, gpu-strides/h200.txt",
        _chased("GH200", 689.0, 1980, "gh200.txt"),
        _chased("GH200", 280.4, 1980, "gh200.txt"),
    ),
)
_BLACKWELL = Architecture(
    "sm_100",
    shared_bytes_per_sm=228 * KIB,
    shared_bytes_per_block=227 * KIB,
    shared_reserved_bytes=1024,
    shared_granularity_bytes=128,
    l1_bytes=256 * KIB,
    max_threads_per_sm=2048,
    max_blocks_per_sm=32,
    fp32_per_clock=128,
    int32_per_clock=64,
    l1_bytes_per_clock=128,
    load_store_lanes=32,
    dram_latency_ns=438.0,
    l2_latency_ns=150.0,
    sources=_arch_sources(
        f"estimate: as of sm_90, whose figure is measured, {BENCHES}, gpu-strides/h200.txt",
        f"{LATENCIES}: 860 cycles, B200; at its boost clock of 1965 MHz",
        f"{LATENCIES}: 295 cycles, B200; at its boost clock of 1965 MHz",
    ),
)
_GAMING_BLACKWELL = Architecture(
    "sm_120",
    shared_bytes_per_sm=100 * KIB,
    shared_bytes_per_block=99 * KIB,
    shared_reserved_bytes=1024,
    shared_granularity_bytes=128,
    l1_bytes=128 * KIB,
    max_threads_per_sm=1536,
    max_blocks_per_sm=24,
    fp32_per_clock=128,
    int32_per_clock=128,
    l1_bytes_per_clock=128,
    load_store_lanes=32,
    dram_latency_ns=389.0,
    l2_latency_ns=150.0,
    sources=_arch_sources(
        f"estimate: as of sm_86; {_WIDE}",
        f"{LATENCIES}: 936 cycles, RTX 5090; at its boost clock of 2407 MHz",
        f"{LATENCIES}: 360 cycles, RTX 5090; at its boost clock of 2407 MHz",
    ),
)

ARCHITECTURES = {
    each.arch: each for each in (_TURING, _AMPERE, _GAMING_AMPERE, _ORIN, _ADA, _HOPPER, _BLACKWELL, _GAMING_BLACKWELL)
}

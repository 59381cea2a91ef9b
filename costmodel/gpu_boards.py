"""NVIDIA boards: what is published about each product, each figure with where.

As in `lowbit.costmodel.gpu_architectures`, a figure that no public document states begins with ``estimate:`` and says
how it was had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .gpu_architectures import BENCHES, KIB, LATENCIES

GIB = 1 << 30
SPECS = "TechPowerUp GPU database"


@dataclass(frozen=True)
class Board:
    """One product.

    Attributes
    ----------
    clock_mhz : int
        Boost clock.
    bandwidth_gbps : float
        Of its memory, decimal gigabytes a second.
    l2_bytes_per_clock : float
        What the L2 cache delivers to all multiprocessors together.
    tdp_w : int
    sources : mapping of str to str
        ``specification`` for all figures that have no entry of their own.
    aliases : tuple of str
        Other names, the driver's among them.
    """

    name: str
    arch: str
    sms: int
    clock_mhz: int
    bandwidth_gbps: float
    memory_bytes: int
    l2_bytes: int
    l2_bytes_per_clock: float
    tdp_w: int
    sources: Mapping[str, str]
    aliases: tuple[str, ...] = field(default=())


DEFAULTS = {
    "sm_75": "T4",
    "sm_80": "A100 SXM 80GB",
    "sm_86": "RTX 3090",
    "sm_87": "Jetson AGX Orin 64GB",
    "sm_89": "RTX 4090",
    "sm_90": "H100 SXM",
    "sm_100": "B200",
    "sm_120": "RTX 5090",
}
"""The board that a bare architecture stands for: the one that decoding is published on most often."""

_A100_L2 = f"{BENCHES}, gpu-l2-cache/a100_80.txt: 5,400 GB/s at 1410 MHz"
_H200_L2 = f"{BENCHES}, gpu-l2-cache/h200.txt: 9,700 GB/s at 1980 MHz"
_H100_L2 = f"{BENCHES}, gpu-l2-cache/h100_pcie.txt: 7,000 GB/s at 1755 MHz"
_A40_L2 = f"{BENCHES}, gpu-l2-stream/a40.txt: 3,200 GB/s at 1740 MHz"
_L40_L2 = f"{BENCHES}, gpu-l2-cache/l40.txt: 5,200 GB/s at 2490 MHz"
_T4_L2 = "Jia et al., arXiv:1903.07486: 1,270 GB/s at 1590 MHz, T4"


def _scaled(measured: str, ratio: str) -> str:
    return f"estimate: {measured}, times {ratio} of the memory bus, at this board's clock"


def _sources(document: str, l2: str, **others: str) -> dict[str, str]:
    return {"specification": document, "l2_gbps": l2, **others}


def _boards() -> tuple[Board, ...]:
    turing, tesla = f"{SPECS}; NVIDIA Turing whitepaper", f"{SPECS}; NVIDIA T4 datasheet"
    a100 = f"{SPECS}; NVIDIA A100 datasheet and whitepaper"
    ga102, gaming = f"{SPECS}; NVIDIA GA102 whitepaper", f"{SPECS}; NVIDIA Ada whitepaper"
    hopper = f"{SPECS}; NVIDIA H100 datasheet and whitepaper"
    blackwell = f"{SPECS}; NVIDIA RTX Blackwell whitepaper"
    orin = "NVIDIA Jetson Orin datasheets and technical brief"
    orin_l2 = "estimate: 64 bytes a clock and multiprocessor, the rate at which an L1 cache is filled"

    def board(
        name: str,
        arch: str,
        sms: int,
        clock: int,
        gbps: float,
        memory: int,
        l2_kib: int,
        l2_rate: float,
        watts: int,
        sources: Mapping[str, str],
        *aliases: str,
    ) -> Board:
        return Board(name, arch, sms, clock, gbps, memory, l2_kib * KIB, l2_rate, watts, sources, aliases)

    return (
        board("T4", "sm_75", 40, 1590, 320, 16 * GIB, 4096, 799, 70, _sources(tesla, _T4_L2), "Tesla T4"),
        board(
            *("RTX 2080 Ti", "sm_75", 68, 1545, 616, 11 * GIB, 5632, 1098, 250),
            _sources(turing, _scaled(_T4_L2, "352/256")),
        ),
        board(
            *("A100 PCIe 40GB", "sm_80", 108, 1410, 1555, 40 * GIB, 40960, 3830, 250),
            _sources(a100, _A100_L2),
            *("A100-PCIE-40GB", "A100 40GB PCIe"),
        ),
        board(
            *("A100 SXM 40GB", "sm_80", 108, 1410, 1555, 40 * GIB, 40960, 3830, 400),
            _sources(a100, _A100_L2),
            *("A100-SXM4-40GB", "A100 40GB", "A100 40GB SXM"),
        ),
        board(
            *("A100 PCIe 80GB", "sm_80", 108, 1410, 1935, 80 * GIB, 40960, 3830, 300),
            _sources(a100, _A100_L2),
            *("A100 80GB PCIe", "A100-PCIE-80GB"),
        ),
        board(
            *("A100 SXM 80GB", "sm_80", 108, 1410, 2039, 80 * GIB, 40960, 3830, 400),
            _sources(a100, _A100_L2),
            *("A100-SXM4-80GB", "A100 80GB", "A100 80GB SXM", "A100"),
        ),
        board(
            *("A30", "sm_80", 56, 1440, 933, 24 * GIB, 24576, 2298, 165),
            _sources(f"{SPECS}; NVIDIA A30 datasheet", _scaled(_A100_L2, "3072/5120")),
        ),
        board(
            *("RTX 3090", "sm_86", 82, 1695, 936, 24 * GIB, 6144, 1840, 350), _sources(ga102, _scaled(_A40_L2, "all"))
        ),
        board(
            *("RTX 3080", "sm_86", 68, 1710, 760, 10 * GIB, 5120, 1533, 320),
            _sources(ga102, _scaled(_A40_L2, "320/384")),
        ),
        board(
            *("RTX 3060", "sm_86", 28, 1777, 360, 12 * GIB, 2304, 920, 170),
            _sources(
                ga102, _scaled(_A40_L2, "192/384"), l2_bytes="deviceQuery of an RTX 3060, public: 2,359,296 bytes"
            ),
        ),
        board(
            *("A10", "sm_86", 72, 1695, 600, 24 * GIB, 6144, 1840, 150),
            _sources(f"{SPECS}; NVIDIA A10 datasheet", _scaled(_A40_L2, "all")),
        ),
        board(
            *("A40", "sm_86", 84, 1740, 696, 48 * GIB, 6144, 1840, 300),
            _sources(f"{SPECS}; NVIDIA A40 datasheet", _A40_L2),
        ),
        board(
            *("RTX A6000", "sm_86", 84, 1800, 768, 48 * GIB, 6144, 1840, 300),
            _sources(f"{SPECS}; NVIDIA RTX A6000 datasheet", _scaled(_A40_L2, "all")),
            "A6000",
        ),
        board(
            *("Jetson AGX Orin 64GB", "sm_87", 16, 1300, 204.8, 64 * GIB, 4096, 1024, 60),
            _sources(orin, orin_l2),
            *("AGX Orin 64GB", "AGX Orin", "Orin AGX", "Orin AGX 64GB", "Orin"),
        ),
        board(
            *("Jetson Orin NX 16GB", "sm_87", 8, 918, 102.4, 16 * GIB, 2048, 512, 25),
            _sources(orin, orin_l2, l2_bytes="deviceQuery of an Orin NX, public: 2,097,152 bytes"),
            *("Orin NX 16GB", "Orin NX"),
        ),
        board(
            *("Jetson Orin Nano 8GB", "sm_87", 8, 625, 68, 8 * GIB, 2048, 512, 15),
            _sources(orin, orin_l2, l2_bytes="deviceQuery of an Orin Nano, public: 2,097,152 bytes"),
            *("Orin Nano 8GB", "Orin Nano"),
        ),
        board(
            *("RTX 4090", "sm_89", 128, 2520, 1008, 24 * GIB, 73728, 2088, 450),
            _sources(gaming, _scaled(_L40_L2, "all")),
        ),
        board(
            *("RTX 4080", "sm_89", 76, 2505, 717, 16 * GIB, 65536, 1392, 320),
            _sources(gaming, _scaled(_L40_L2, "256/384")),
        ),
        board(
            *("RTX 4060 Ti", "sm_89", 34, 2535, 288, 8 * GIB, 32768, 696, 160),
            _sources(gaming, _scaled(_L40_L2, "128/384")),
        ),
        board(
            *("L4", "sm_89", 58, 2040, 300, 24 * GIB, 49152, 1044, 72),
            _sources(
                f"{SPECS}; NVIDIA L4 datasheet",
                _scaled(_L40_L2, "192/384"),
                sms="deviceQuery of an L4, public: 58 multiprocessors at 2040 MHz",
            ),
        ),
        board(
            *("L40S", "sm_89", 142, 2520, 864, 48 * GIB, 98304, 2088, 350),
            _sources(f"{SPECS}; NVIDIA L40S datasheet", _scaled(_L40_L2, "all")),
        ),
        board(
            *("L40", "sm_89", 142, 2490, 864, 48 * GIB, 98304, 2088, 300),
            _sources(f"{SPECS}; NVIDIA L40 datasheet", _L40_L2),
        ),
        board(
            *("RTX 6000 Ada", "sm_89", 142, 2505, 960, 48 * GIB, 98304, 2088, 300),
            _sources(f"{SPECS}; NVIDIA RTX 6000 Ada datasheet", _scaled(_L40_L2, "all")),
            "RTX 6000 Ada Generation",
        ),
        board(
            *("H100 SXM", "sm_90", 132, 1980, 3352, 80 * GIB, 51200, 4900, 700),
            _sources(hopper, f"estimate: the H200's, the same chip; {_H200_L2}"),
            *("H100 80GB HBM3", "H100 SXM5", "H100"),
        ),
        board(
            *("H100 PCIe", "sm_90", 114, 1755, 2039, 80 * GIB, 51200, 3990, 350),
            _sources(hopper, _H100_L2),
            *("H100 80GB PCIe",),
        ),
        board(
            *("H200", "sm_90", 132, 1980, 4800, 141 * 10**9, 51200, 4900, 700),
            _sources(f"{SPECS}; NVIDIA H200 datasheet", _H200_L2),
            "H200 SXM",
        ),
        board(
            *("GH200", "sm_90", 132, 1980, 4000, 96 * 10**9, 61440, 4900, 700),
            _sources(
                f"{SPECS}; NVIDIA GH200 datasheet",
                f"estimate: the H200's, the same chip; {_H200_L2}",
                l2_bytes=f"{LATENCIES}: 60 MiB",
            ),
            "GH200 480GB",
        ),
        board(
            *("B200", "sm_100", 148, 1965, 8000, 180 * 10**9, 129536, 5490, 1000),
            _sources(
                f"{SPECS}; NVIDIA Blackwell architecture technical brief",
                f"estimate: a multiprocessor's share of the H200's, times 148; {_H200_L2}",
                l2_bytes=f"{LATENCIES}: 126.5 MiB",
            ),
        ),
        board(
            *("RTX 5090", "sm_120", 170, 2407, 1792, 32 * GIB, 98304, 2784, 575),
            _sources(blackwell, _scaled(_L40_L2, "512/384"), l2_bytes=f"{LATENCIES}: 96 MiB"),
        ),
        board(
            *("RTX 5080", "sm_120", 84, 2617, 960, 16 * GIB, 65536, 1392, 360),
            _sources(blackwell, _scaled(_L40_L2, "256/384")),
        ),
        board(
            *("RTX PRO 6000 Blackwell", "sm_120", 188, 2617, 1792, 96 * GIB, 131072, 2784, 600),
            _sources(
                f"{SPECS}; NVIDIA RTX PRO 6000 Blackwell datasheet",
                _scaled(_L40_L2, "512/384"),
                l2_bytes=f"{LATENCIES}: 128 MiB",
            ),
            *("RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000", "RTX PRO 6000 Blackwell Server Edition"),
        ),
    )


BOARDS = _boards()

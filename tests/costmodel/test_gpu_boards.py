"""Figures of architectures and boards: all sourced, consistent with each other and with the hardware's hard limits."""

from dataclasses import fields

import pytest
from lowbit.costmodel.gpu import gpu_named, gpus
from lowbit.costmodel.gpu_architectures import ARCHITECTURES, Architecture
from lowbit.costmodel.gpu_boards import BOARDS, DEFAULTS
from lowbit.kernels.cuda.arch import LIMITS

ASKED = {
    "sm_75": ("T4", "RTX 2080 Ti"),
    "sm_80": ("A100 PCIe 40GB", "A100 SXM 40GB", "A100 PCIe 80GB", "A100 SXM 80GB", "A30"),
    "sm_86": ("RTX 3090", "RTX 3080", "RTX 3060", "A10", "A40", "RTX A6000"),
    "sm_87": ("Jetson AGX Orin 64GB", "Jetson Orin NX 16GB", "Jetson Orin Nano 8GB"),
    "sm_89": ("RTX 4090", "RTX 4080", "RTX 4060 Ti", "L4", "L40S", "RTX 6000 Ada"),
    "sm_90": ("H100 SXM", "H100 PCIe", "H200"),
    "sm_100": ("B200",),
    "sm_120": ("RTX 5090", "RTX 5080", "RTX PRO 6000 Blackwell"),
}


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.name)
def test_every_figure_has_a_source(gpu):
    figures = {field.name for field in fields(gpu)} - {"name", "arch", "sources"}
    assert {name for name in figures if len(gpu.sources.get(name, "")) < 8} == set()
    assert set(gpu.sources) <= figures


@pytest.mark.parametrize(("arch", "names"), ASKED.items())
def test_the_common_boards_of_each_architecture_are_there(arch, names):
    assert set(names) <= {gpu.name for gpu in gpus(arch)}
    assert DEFAULTS[arch] in names


def test_kernels_are_built_for_what_is_modelled_with_the_same_limits():
    assert {arch: each.shared_bytes for arch, each in LIMITS.items()} == {
        arch: each.shared_bytes_per_block for arch, each in ARCHITECTURES.items()
    }


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=lambda arch: arch.arch)
def test_architectures_keep_the_hardwares_invariants(arch):
    assert arch.shared_bytes_per_block + arch.shared_reserved_bytes == arch.shared_bytes_per_sm
    assert arch.l1_bytes > arch.shared_bytes_per_sm
    assert arch.max_threads_per_sm % (32 * arch.schedulers) == 0
    assert arch.registers_per_sm == 65536
    # A lane that loads a word takes four bytes of what the cache delivers.
    assert arch.load_store_lanes * 4 == arch.l1_bytes_per_clock
    # No pipe takes more than one warp instruction of every scheduler a clock.
    pipes = [each.name for each in fields(Architecture) if each.name.endswith("_per_clock")]
    lanes = [getattr(arch, name) for name in pipes if name != "l1_bytes_per_clock"]
    assert max(lanes) <= 32 * arch.schedulers
    assert arch.l2_latency_ns < arch.dram_latency_ns


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("T4", 8.1),
        ("RTX 2080 Ti", 13.4),
        ("A100 SXM 80GB", 19.5),
        ("A30", 10.3),
        ("RTX 3090", 35.6),
        ("RTX 3080", 29.8),
        ("RTX 3060", 12.7),
        ("A10", 31.2),
        ("A40", 37.4),
        ("RTX A6000", 38.7),
        ("Jetson AGX Orin 64GB", 5.3),
        ("RTX 4090", 82.6),
        ("RTX 4080", 48.7),
        ("RTX 4060 Ti", 22.1),
        ("L4", 30.3),
        ("L40S", 91.6),
        ("RTX 6000 Ada", 91.1),
        ("H100 SXM", 66.9),
        ("H100 PCIe", 51.2),
        ("RTX 5090", 104.8),
        ("RTX 5080", 56.3),
        ("RTX PRO 6000 Blackwell", 125.0),
    ],
)
def test_multiprocessors_clock_and_lanes_give_the_published_float_rate(name, teraflops):
    gpu = gpu_named(name)
    rate = 2 * gpu.sms * gpu.fp32_per_clock * gpu.clock_mhz * 1e-6
    assert rate == pytest.approx(teraflops, rel=0.01)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_the_cache_is_faster_than_memory_and_smaller(board):
    gpu = gpu_named(board.name)
    assert gpu.l2_gbps > gpu.bandwidth_gbps
    assert gpu.l2_bytes < gpu.memory_bytes / 50
    # Multiprocessors cannot take more from L2 than 64 bytes a clock each.
    assert board.l2_bytes_per_clock <= 64 * board.sms

"""Occupancy: equal to NVIDIA's own calculator, and never more than a multiprocessor has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowbit.costmodel.gpu import architectures, default_gpu, gpu_named
from lowbit.costmodel.occupancy import occupancy, refusal, waves

# Computed by cudaOccMaxActiveBlocksPerMultiprocessor of CUDA 13.5's cuda_occupancy.h, with the largest shared memory
# carveout and the opt-in limit: architecture, threads, registers, shared bytes; blocks per multiprocessor, limit.
CALCULATED = [
    ("sm_75", 32, 24, 2192, 16, "blocks"),
    ("sm_75", 704, 115, 20847, 0, "registers"),
    ("sm_75", 256, 229, 4238, 1, "registers"),
    ("sm_75", 192, 163, 7625, 2, "registers"),
    ("sm_75", 160, 128, 14530, 3, "registers"),
    ("sm_75", 64, 126, 88, 8, "registers"),
    ("sm_75", 64, 129, 65843, 0, "shared memory"),
    ("sm_75", 128, 22, 41400, 1, "shared memory"),
    ("sm_75", 64, 75, 27781, 2, "shared memory"),
    ("sm_75", 64, 235, 20867, 3, "shared memory"),
    ("sm_75", 96, 66, 8180, 8, "shared memory"),
    ("sm_75", 768, 30, 7509, 1, "threads"),
    ("sm_75", 448, 24, 3728, 2, "threads"),
    ("sm_75", 320, 43, 3360, 3, "threads"),
    ("sm_75", 192, 42, 944, 5, "threads"),
    ("sm_80", 32, 29, 2476, 32, "blocks"),
    ("sm_80", 800, 242, 8936, 0, "registers"),
    ("sm_80", 192, 173, 4963, 1, "registers"),
    ("sm_80", 160, 139, 8668, 2, "registers"),
    ("sm_80", 320, 55, 4064, 3, "registers"),
    ("sm_80", 32, 208, 5371, 8, "registers"),
    ("sm_80", 256, 143, 169303, 0, "shared memory"),
    ("sm_80", 352, 29, 139181, 1, "shared memory"),
    ("sm_80", 256, 16, 74400, 2, "shared memory"),
    ("sm_80", 160, 20, 47080, 3, "shared memory"),
    ("sm_80", 32, 79, 6520, 22, "shared memory"),
    ("sm_80", 832, 16, 29609, 2, "threads"),
    ("sm_80", 672, 23, 288, 3, "threads"),
    ("sm_80", 192, 24, 7910, 10, "threads"),
    ("sm_86", 32, 52, 3100, 16, "blocks"),
    ("sm_86", 896, 97, 1039, 0, "registers"),
    ("sm_86", 256, 145, 14968, 1, "registers"),
    ("sm_86", 128, 247, 32292, 2, "registers"),
    ("sm_86", 128, 158, 22809, 3, "registers"),
    ("sm_86", 128, 57, 5107, 8, "registers"),
    ("sm_86", 128, 248, 101427, 0, "shared memory"),
    ("sm_86", 32, 143, 96192, 1, "shared memory"),
    ("sm_86", 288, 33, 42192, 2, "shared memory"),
    ("sm_86", 32, 165, 27952, 3, "shared memory"),
    ("sm_86", 32, 172, 18088, 5, "shared memory"),
    ("sm_86", 800, 26, 3129, 1, "threads"),
    ("sm_86", 768, 23, 23146, 2, "threads"),
    ("sm_86", 480, 29, 4203, 3, "threads"),
    ("sm_86", 224, 16, 606, 6, "threads"),
    ("sm_87", 64, 46, 4189, 16, "blocks"),
    ("sm_87", 384, 196, 16396, 0, "registers"),
    ("sm_87", 704, 42, 4863, 1, "registers"),
    ("sm_87", 352, 68, 3716, 2, "registers"),
    ("sm_87", 256, 79, 350, 3, "registers"),
    ("sm_87", 128, 110, 430, 4, "registers"),
    ("sm_87", 576, 42, 167816, 0, "shared memory"),
    ("sm_87", 320, 17, 155539, 1, "shared memory"),
    ("sm_87", 128, 125, 76316, 2, "shared memory"),
    ("sm_87", 32, 38, 48901, 3, "shared memory"),
    ("sm_87", 32, 230, 20060, 7, "shared memory"),
    ("sm_87", 1024, 28, 5017, 1, "threads"),
    ("sm_87", 608, 22, 12740, 2, "threads"),
    ("sm_87", 448, 19, 34068, 3, "threads"),
    ("sm_87", 224, 32, 8447, 6, "threads"),
    ("sm_89", 32, 19, 1607, 24, "blocks"),
    ("sm_89", 704, 84, 30211, 0, "registers"),
    ("sm_89", 448, 107, 6267, 1, "registers"),
    ("sm_89", 192, 126, 5631, 2, "registers"),
    ("sm_89", 352, 56, 24249, 3, "registers"),
    ("sm_89", 128, 84, 3833, 5, "registers"),
    ("sm_89", 512, 102, 102355, 0, "shared memory"),
    ("sm_89", 384, 44, 95113, 1, "shared memory"),
    ("sm_89", 160, 56, 44605, 2, "shared memory"),
    ("sm_89", 160, 81, 31641, 3, "shared memory"),
    ("sm_89", 32, 226, 13221, 7, "shared memory"),
    ("sm_89", 1024, 25, 2228, 1, "threads"),
    ("sm_89", 672, 22, 26450, 2, "threads"),
    ("sm_89", 512, 32, 921, 3, "threads"),
    ("sm_89", 352, 20, 762, 4, "threads"),
    ("sm_90", 32, 26, 5247, 32, "blocks"),
    ("sm_90", 544, 204, 194075, 0, "registers"),
    ("sm_90", 352, 137, 31036, 1, "registers"),
    ("sm_90", 96, 183, 913, 2, "registers"),
    ("sm_90", 192, 84, 7146, 3, "registers"),
    ("sm_90", 64, 169, 37267, 4, "registers"),
    ("sm_90", 160, 152, 234137, 0, "shared memory"),
    ("sm_90", 384, 38, 192165, 1, "shared memory"),
    ("sm_90", 128, 122, 79607, 2, "shared memory"),
    ("sm_90", 160, 85, 63281, 3, "shared memory"),
    ("sm_90", 288, 38, 51892, 4, "shared memory"),
    ("sm_90", 800, 24, 64892, 2, "threads"),
    ("sm_90", 608, 20, 1944, 3, "threads"),
    ("sm_90", 480, 19, 2886, 4, "threads"),
    ("sm_100", 32, 31, 2479, 32, "blocks"),
    ("sm_100", 864, 218, 138215, 0, "registers"),
    ("sm_100", 800, 36, 3281, 1, "registers"),
    ("sm_100", 96, 195, 76545, 2, "registers"),
    ("sm_100", 128, 155, 8888, 3, "registers"),
    ("sm_100", 128, 71, 2211, 7, "registers"),
    ("sm_100", 224, 189, 233388, 0, "shared memory"),
    ("sm_100", 32, 145, 123662, 1, "shared memory"),
    ("sm_100", 384, 18, 105466, 2, "shared memory"),
    ("sm_100", 64, 204, 60124, 3, "shared memory"),
    ("sm_100", 128, 34, 50001, 4, "shared memory"),
    ("sm_100", 704, 22, 6264, 2, "threads"),
    ("sm_100", 640, 18, 48513, 3, "threads"),
    ("sm_100", 448, 19, 4468, 4, "threads"),
    ("sm_120", 928, 166, 4941, 0, "registers"),
    ("sm_120", 352, 138, 7060, 1, "registers"),
    ("sm_120", 128, 223, 5350, 2, "registers"),
    ("sm_120", 320, 56, 9929, 3, "registers"),
    ("sm_120", 32, 199, 5965, 8, "registers"),
    ("sm_120", 64, 83, 101614, 0, "shared memory"),
    ("sm_120", 128, 163, 89697, 1, "shared memory"),
    ("sm_120", 288, 65, 36833, 2, "shared memory"),
    ("sm_120", 64, 31, 31186, 3, "shared memory"),
    ("sm_120", 32, 116, 21080, 4, "shared memory"),
    ("sm_120", 1024, 24, 9522, 1, "threads"),
    ("sm_120", 640, 17, 4707, 2, "threads"),
    ("sm_120", 512, 24, 8330, 3, "threads"),
    ("sm_120", 256, 18, 9492, 6, "threads"),
]


@pytest.mark.parametrize(("arch", "threads", "registers", "shared_bytes", "blocks", "limiter"), CALCULATED)
def test_blocks_are_those_of_the_vendors_calculator(arch, threads, registers, shared_bytes, blocks, limiter):
    held = occupancy(default_gpu(arch), threads, registers, shared_bytes)
    assert (held.blocks_per_sm, held.limiter) == (blocks, limiter)


def test_every_architecture_and_limit_is_among_the_cases():
    assert {row[0] for row in CALCULATED} == set(architectures())
    assert {row[5] for row in CALCULATED} == {"threads", "blocks", "registers", "shared memory"}


def test_a_small_kernel_is_limited_by_blocks_and_a_full_one_by_threads():
    gpu = gpu_named("RTX 3090")
    assert occupancy(gpu, 32, 16, 0).limiter == "blocks"
    assert occupancy(gpu, 32, 16, 0).warps_per_sm == 16
    full = occupancy(gpu, 256, 32, 0)
    assert (full.blocks_per_sm, full.warps_per_sm, full.share, full.limiter) == (6, 48, 1.0, "threads")


def test_registers_are_given_to_warps_in_steps_of_256():
    gpu = gpu_named("A100 SXM 80GB")
    # 33 registers are 1056 a warp, allocated as 1280: 12 warps in a partition of 16384, 48 in four.
    assert occupancy(gpu, 128, 33, 0).warps_per_sm == 48
    assert occupancy(gpu, 128, 32, 0).warps_per_sm == 64


def test_the_driver_takes_a_kibibyte_of_each_block_since_ampere():
    # Three blocks of 32 KiB fit 100 KiB with their reserve (99 KiB), four of 24.5 KiB do not (102 KiB).
    gpu = gpu_named("RTX 3090")
    assert occupancy(gpu, 128, 32, 32 << 10).blocks_per_sm == 3
    assert occupancy(gpu, 128, 32, (24 << 10) + 512).blocks_per_sm == 3
    assert occupancy(gpu, 128, 32, 24 << 10).blocks_per_sm == 4
    assert occupancy(gpu_named("T4"), 128, 32, 32 << 10).blocks_per_sm == 2


def test_unknown_registers_limit_nothing():
    assert occupancy(gpu_named("T4"), 256, 0, 0).limiter == "threads"


@pytest.mark.parametrize(
    ("threads", "registers", "shared_bytes", "reason"),
    [
        (0, 32, 0, "0 threads"),
        (1056, 32, 0, "1056 threads"),
        (128, 256, 0, "256 registers a thread, but sm_86 has 255"),
        (128, 32, 101377, "101377 bytes of shared memory a block, but sm_86 has 101376"),
        (1024, 65, 0, "73728 registers a block, but sm_86 has 65536"),
        (288, 255, 0, "98304 registers a block, but sm_86 has 65536"),
    ],
)
def test_what_cannot_be_launched_is_refused_with_the_reason(threads, registers, shared_bytes, reason):
    gpu = gpu_named("RTX 3090")
    assert reason in (refusal(gpu, threads, registers, shared_bytes) or "")
    assert occupancy(gpu, threads, registers, shared_bytes).blocks_per_sm == 0


@given(
    arch=st.sampled_from(architectures()),
    warps=st.integers(1, 32),
    registers=st.integers(1, 255),
    shared_bytes=st.integers(0, 232448),
)
def test_resident_blocks_never_exceed_what_there_is(arch, warps, registers, shared_bytes):
    gpu = default_gpu(arch)
    held = occupancy(gpu, 32 * warps, registers, shared_bytes)
    assert (held.blocks_per_sm == 0) == (refusal(gpu, 32 * warps, registers, shared_bytes) is not None)
    assert held.blocks_per_sm * 32 * warps <= gpu.max_threads_per_sm
    assert held.blocks_per_sm * 32 * warps * registers <= gpu.registers_per_sm
    assert held.blocks_per_sm * (shared_bytes + gpu.shared_reserved_bytes) <= gpu.shared_bytes_per_sm
    # More of anything never lets more blocks in.
    assert occupancy(gpu, 32 * warps, min(registers + 1, 255), shared_bytes).blocks_per_sm <= held.blocks_per_sm
    assert occupancy(gpu, 32 * warps, registers, shared_bytes + 64).blocks_per_sm <= held.blocks_per_sm


def test_waves_by_hand():
    # 82 multiprocessors of 4 blocks are 328 slots: 400 blocks take two rounds, the second with 72.
    ran = waves(400, 4, 82)
    assert (ran.slots, ran.waves) == (328, 2)
    assert ran.tail == pytest.approx(72 / 328)
    assert ran.efficiency == pytest.approx(400 / 656)
    # The busiest multiprocessor gets 5 blocks, the mean one 400/82.
    assert ran.balance == pytest.approx(5 * 82 / 400)


@given(blocks=st.integers(1, 100_000), each=st.integers(1, 32), sms=st.integers(1, 200))
def test_waves_hold_all_blocks_and_no_round_more(blocks, each, sms):
    ran = waves(blocks, each, sms)
    assert (ran.waves - 1) * ran.slots < blocks <= ran.waves * ran.slots
    assert 0 < ran.tail <= 1
    assert ran.efficiency <= 1 <= ran.balance
    assert ran.balance == pytest.approx(max(len(range(sm, blocks, sms)) for sm in range(sms)) * sms / blocks)


def test_nothing_cannot_run():
    with pytest.raises(ValueError, match="0 blocks"):
        waves(0, 1, 1)

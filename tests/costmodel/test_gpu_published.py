"""Predictions for kernels that others wrote and measured, on boards that nobody here has, against what they published.

The defaults of the model were chosen on streams of four of these boards; the streams of the other two and decode
attention played no part in that. A row counts as met if the prediction is within 25 % of the measurement; rows that
are not met are named.
"""

import re

import pytest
from lowbit.costmodel.gpu import gpu_named
from lowbit.costmodel.gpu_features import GpuFeatures, gpu_features
from lowbit.costmodel.gpu_lep import default_coefficients, explain, predict_us
from lowbit.costmodel.gpu_pipes import PIPES
from lowbit.costmodel.kernel_counts import KernelCounts, LoopCounts
from lowbit.costmodel.occupancy import waves
from lowbit.kernels.candidate import Candidate, Launch
from lowbit.kernels.cuda import marks
from lowbit.kernels.cuda.program import Geometry
from lowbit.kernels.cuda.work import WarpAccess, Work
from lowbit.kernels.layout import Layout
from lowbit.kernels.problem import Problem

TOLERANCE = 0.25

# RRZE-HPC/gpu-benches at 1038c5d, gpu-stream/*.txt: GB/s of the kernels "read" (one 8-byte load a thread, then it ends)
# and "scale" (a load and a store) with two blocks of so many threads on each multiprocessor: threads=read/scale.
STREAMS = """
A100 SXM 80GB: 64=166/303 128=323/579 192=465/791 256=615/1025 384=872/1379 512=1119/1577 768=1491/1682 1024=1776/1737
A40: 64=160/291 128=305/515 192=436/614 256=553/644 384=677/658 512=680/657 768=680/653
L40: 64=321/551 128=617/774 192=824/773 256=845/795 384=845/797 512=845/797 768=845/776
GH200: 64=245/464 128=486/854 192=704/1122 256=935/1397 384=1320/1868 512=1715/2269 768=2314/2854 1024=2775/3174
"""
# Older files: of these two boards, the two blocks of a multiprocessor are inferred from its threads.
HELD_OUT = """
A100 SXM 40GB: 64=162/292 128=310/548 192=449/749 256=592/956 384=838/1245 512=1064/1338 768=1372/1367 1024=1500/1382
H100 PCIe: 64=189/341 128=368/607 192=533/817 256=702/1037 384=985/1378 512=1261/1583 768=1680/1666 1024=1942/1704
"""
STREAM_MISSES = {("L40", "read", 192)}
ELEMENTS = (256 << 20) + 2


def stream(gpu, threads, stores):
    """One 8-byte load a thread, and a store or none, with two resident blocks on each multiprocessor."""
    blocks, warps = -(-ELEMENTS // threads), threads // 32
    ran = waves(blocks, 2, gpu.sms)
    accesses = blocks * warps * (1 + stores)
    bytes_each = 8.0 * ELEMENTS
    return GpuFeatures(
        dram_bytes=bytes_each * (1 + stores),
        footprint_bytes=bytes_each * (1 + stores),
        l2_bytes=bytes_each * (1 + stores),
        loaded_bytes=bytes_each,
        sectors_per_ideal=1.0,
        instructions={},
        # A dozen instructions a warp: indices, the bound, the access.
        pipes=dict.fromkeys(PIPES, 0.0) | {"load_store": accesses, "issue": 12.0 * blocks * warps},
        shared_wavefronts=0.0,
        l1_cycles=2.0 * accesses,
        registers=16,
        shared_bytes=0,
        blocks=blocks,
        warps=warps,
        blocks_per_sm=2,
        limiter="shared memory",
        waves=blocks / ran.slots,
        tail=ran.tail,
        balance=ran.balance,
        in_flight_bytes=2 * threads * 8.0,
        stages=0,
        rounds=1.0,
        chain=1.0,
        chain_instructions=12.0,
        launches=1,
        merge_bytes=0.0,
        unpack_ops=0.0,
        unpack_ops_per_32=0.0,
    )


def stream_ratios(table):
    """Predicted time over published time, by board, kernel and block size."""
    ratios = {}
    for line in table.strip().splitlines():
        board, _, rows = line.strip().partition(": ")
        gpu = gpu_named(board)
        for threads, *published in (map(int, re.findall(r"\d+", row)) for row in rows.split()):
            for stores, (kernel, gbps) in enumerate(zip(("read", "scale"), published, strict=True)):
                features = stream(gpu, threads, stores)
                measured_us = features.dram_bytes / gbps * 1e-3
                ratios[board, kernel, threads] = predict_us(features, default_coefficients(gpu)) / measured_us
    return ratios


def test_published_streams_are_met_at_every_occupancy():
    ratios = stream_ratios(STREAMS)
    assert len(ratios) == 60
    assert {row for row, ratio in ratios.items() if abs(ratio - 1) > TOLERANCE} == STREAM_MISSES


def test_streams_of_boards_that_no_default_was_chosen_on_are_met():
    ratios = stream_ratios(HELD_OUT)
    assert len(ratios) == 32
    assert {row for row, ratio in ratios.items() if abs(ratio - 1) > TOLERANCE} == set()


# "Flash-Decoding for long-context inference", pytorch.org/blog/flash-decoding, October 2023: decode attention on an
# A100 in fp16, 16 query heads on 2 key/value heads of 128: batch, context, microseconds.
FLASH_DECODING = [
    *((256, 256, 63.4), (128, 512, 67.7), (64, 1024, 77.7), (32, 2048, 58.5), (16, 4096, 57.0)),
    *((8, 8192, 56.4), (4, 16384, 58.2), (2, 32768, 60.3), (1, 65536, 64.4), (1, 131072, 106.6)),
]
FLASH_MISSES = {(128, 512), (64, 1024)}
FP16 = Layout.parse("T D | fp16")


def flash_decoding(batch, tokens, gpu):
    """Blocks that copy 64 tokens of keys and values into shared memory while tensor cores work on others.

    Batches are heads of their own. As many splits as give every multiprocessor a block, as the kernel's heuristic has.
    """
    problem = Problem("attend", 16 * batch, 2 * batch, 128, "fp16")
    splits = max(1, round(128 / (2 * batch)))
    candidate = Candidate(FP16, FP16, "float", Launch(8, 1, 4, stages=1, splits=splits, warps=2))
    run = tuple(16 * lane for lane in range(32))
    copies = tuple(WarpAccess(name, "global", "async", 16, run, marks.TILE, 16.0) for name in ("k", "v"))
    tiles = tokens / 32
    work = Work(
        Geometry((2 * batch, splits, 1), 64, 48 << 10),
        {marks.TILE: tiles * 2 * batch},
        {marks.TILE: tiles / splits / 2},
        copies,
    )
    opcodes = {"LDGSTS": 32, "HMMA": 96, "FFMA": 80, "MUFU": 8, "LDSM": 48}
    kinds = {"async_copy": 32, "dot": 96, "float": 80, "special": 8, "shared_load": 48}
    loop = LoopCounts(marks.TILE, 1, kinds, {}, opcodes)
    counts = KernelCounts("flash", "kv", 8, "fp16", "sass", 128, 0, 0, (loop,), {})
    return gpu_features(problem, candidate, tokens, counts, gpu, work)


def test_published_decode_attention_is_met_on_an_a100():
    gpu = gpu_named("A100 SXM 40GB")
    missed = set()
    for batch, tokens, measured_us in FLASH_DECODING:
        terms = explain(flash_decoding(batch, tokens, gpu), default_coefficients(gpu))
        # Whatever the kernel is made of, keys and values have to come; queries and results are up to 7 % more.
        assert terms["floor_us"] == pytest.approx(2 * 2 * batch * tokens * 128 * 2 / 1555e3, rel=0.07)
        assert terms["floor_us"] < measured_us
        if abs(terms["total_us"] / measured_us - 1) > TOLERANCE:
            missed.add((batch, tokens))
    assert missed == FLASH_MISSES


def test_the_other_a100_would_explain_none_of_it():
    # The publication does not say which A100 it was. At the 80 GB board's bandwidth every row is measured slower than
    # predicted by more than a quarter, so that either it was the other or the kernel fell short of memory.
    gpu = gpu_named("A100 SXM 80GB")
    for batch, tokens, measured_us in FLASH_DECODING:
        predicted_us = predict_us(flash_decoding(batch, tokens, gpu), default_coefficients(gpu))
        assert predicted_us < (1 - TOLERANCE) * measured_us

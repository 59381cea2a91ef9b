"""Features of GPU candidates against closed forms: traffic, caches, pipes, occupancy and what is in flight."""

import json
import math
from dataclasses import replace
from itertools import islice

import pytest
from lowbit.costmodel.gpu import gpu_named
from lowbit.costmodel.gpu_features import GpuFeatures, gpu_features, warm
from lowbit.costmodel.gpu_pipes import PIPES, pipes_of
from lowbit.costmodel.kernel_counts import KernelCounts, LoopCounts
from lowbit.costmodel.traffic import call_bytes
from lowbit.costmodel.warp_access import sectors
from lowbit.kernels.candidate import Candidate, Launch
from lowbit.kernels.cuda import marks
from lowbit.kernels.cuda.program import Geometry, build
from lowbit.kernels.cuda.space import space
from lowbit.kernels.cuda.work import WarpAccess, Work
from lowbit.kernels.cuda.work import work as launch_work
from lowbit.kernels.errors import CompileError, LayoutError, ProblemError
from lowbit.kernels.layout import Layout
from lowbit.kernels.problem import Problem

GPU = gpu_named("RTX 3090")
PROBLEM = Problem("attend", 32, 8, 128, "w8a8")
ROWS = Layout.parse("T D | int8/bytes/signed")
LOOP = LoopCounts(
    marks.TILE,
    1,
    {"global_load": 16, "dot": 128, "logic": 10, "convert": 4, "float": 20, "address": 6, "branch": 2},
    {"LOP3.LUT": 8},
    {"LDG.E.128": 16, "IDP.4A.S8.S8": 128, "LOP3.LUT": 10, "I2FP.F32.S32": 4, "FFMA": 20, "IMAD.WIDE": 6, "BRA": 2},
)
OUTSIDE = LoopCounts(None, 0, {"other": 5, "integer": 3}, {}, {"S2R": 5, "IADD3": 3})
COUNTS = KernelCounts("k", "kv", 4, "bytes", "sass", 64, 512, 0, (OUTSIDE, LOOP), {})


def candidate(layout=ROWS, **changes):
    launch = replace(Launch(rows=4, lanes=1, loads=4, stages=0, splits=8, warps=4), **changes)
    return Candidate(layout, layout, "integer", launch)


def vectors(name, addresses, count, kind="load"):
    return WarpAccess(name, "global", kind, 16, tuple(addresses), marks.TILE, count)


def work(problem=PROBLEM, tokens=4096, splits=8, warps=4, passes=1, k=None, v=None, others=()):
    """Warps that read 32 tokens of 128 bytes in 8 vectors a lane, each access a run of 512 bytes unless told."""
    run = [16 * lane for lane in range(32)]
    tiles = math.ceil(tokens / 32)
    accesses = (vectors("k", k or run, 8.0), vectors("v", v or run, 8.0), *others)
    longest = math.ceil(tiles / (splits * warps))
    geometry = Geometry((problem.kv_heads, splits, passes), 32 * warps, 1024)
    return Work(
        geometry, {marks.TILE: float(tiles * problem.kv_heads * passes)}, {marks.TILE: float(longest)}, accesses
    )


def features(tokens=4096, gpu=GPU, problem=PROBLEM, counts=COUNTS, plan=None, **changes):
    plan = plan or candidate()
    return gpu_features(problem, plan, tokens, counts, gpu, work(problem, tokens, **changes))


def test_memory_traffic_is_operands_scales_results_and_partials():
    operands = 2 * 8 * 4096 * 128
    scales = 2 * 8 * 4096 * 4 * 2
    small = 32 * 2 * 128 * 4
    partials = 8 * 32 * (128 + 2) * 4
    found = features()
    assert found.dram_bytes == operands + scales + small + partials
    assert found.footprint_bytes == found.dram_bytes
    assert (found.merge_bytes, found.launches) == (partials, 2)
    single = features(plan=candidate(splits=1), splits=1)
    assert single.dram_bytes == operands + scales + small
    assert (single.merge_bytes, single.launches) == (0, 1)


def test_scores_need_no_merge_and_a_matrix_does():
    scores = gpu_features(
        Problem("qk", 32, 8, 128, "w8a8"), replace(candidate(), v=None), 4096, COUNTS, GPU, work(tokens=4096)
    )
    assert scores.launches == 1
    assert scores.dram_bytes == 8 * 4096 * (128 + 8) + 32 * (128 + 4096) * 4
    matrix = Problem("gemv", 1, 1, 2048, "w8a8")
    found = gpu_features(matrix, replace(candidate(), v=None), 4096, COUNTS, GPU, work(matrix, 4096))
    assert found.merge_bytes == 8 * 4096 * 4


def test_more_rows_than_a_block_serves_read_the_operands_again():
    many = Problem("attend", 32, 8, 128, "w8a8", query_rows=4)
    plan = candidate(splits=64)
    once = features(problem=many, tokens=65536, plan=plan, splits=64)
    again = features(problem=many, tokens=65536, plan=plan, splits=64, passes=4)
    operands = 2 * 8 * 65536 * (128 + 8)
    assert operands > GPU.l2_bytes
    # The grid takes more than one wave, so that later passes find memory, not the cache.
    assert again.waves > 1
    assert again.dram_bytes - once.dram_bytes == 3 * operands
    assert again.l2_bytes >= 4 * operands
    # A cache that holds them keeps them for the other passes.
    cache = replace(GPU, l2_bytes=1 << 30)
    large = features(problem=many, tokens=65536, plan=plan, splits=64, passes=4, gpu=cache)
    assert large.dram_bytes == once.dram_bytes
    assert large.l2_bytes == again.l2_bytes


def test_passes_of_one_wave_share_what_they_read():
    many = Problem("attend", 32, 8, 128, "w8a8", query_rows=4)
    found = features(problem=many, tokens=65536, passes=4, splits=1, plan=candidate(splits=1))
    assert found.waves == 1
    assert found.dram_bytes == 2 * 8 * 65536 * (128 + 8) + 4 * 32 * 2 * 128 * 4


def test_strided_loads_ask_for_more_sectors_unless_the_cache_joins_them():
    column = [128 * lane for lane in range(32)]
    coalesced, strided = features(), features(k=column)
    assert coalesced.sectors_per_ideal == 1
    # Keys ask for 32 sectors where 16 would do, values for 16.
    assert strided.sectors_per_ideal == pytest.approx((32 + 16) / (16 + 16))
    # The tiles of all resident warps fit the L1 cache, so that the other half of a sector is not asked for again.
    assert strided.l2_bytes == coalesced.l2_bytes
    full = features(k=column, gpu=replace(GPU, l1_bytes=4096))
    assert full.l2_bytes == 8 * (4096 // 32) * 8 * (32 + 16) * 32
    assert strided.l1_cycles > coalesced.l1_cycles


def test_copies_past_the_registers_find_nothing_in_the_first_cache():
    column = tuple(128 * lane for lane in range(32))
    plan = work()
    copied = replace(plan, accesses=(vectors("k", column, 8.0, "async"), vectors("v", column, 8.0, "async")))
    found = gpu_features(PROBLEM, candidate(stages=2), 4096, COUNTS, GPU, copied)
    assert found.l2_bytes == 2 * 8 * (4096 / 32) * 8 * 32 * 32


def test_stores_are_asked_for_but_nobody_waits_for_them():
    store = WarpAccess("partials", "global", "store", 4, tuple(4 * lane for lane in range(32)), marks.EPILOGUE, 1.0)
    plan = work(others=(store,))
    plan = replace(plan, iterations={**plan.iterations, marks.EPILOGUE: 64.0})
    found = gpu_features(PROBLEM, candidate(), 4096, COUNTS, GPU, plan)
    assert found.l2_bytes - found.loaded_bytes == 64 * 128
    assert found.loaded_bytes == features().loaded_bytes


def test_instructions_are_weighted_by_loops_and_put_into_pipes():
    found = features()
    tiles, warps = 128 * 8, 8 * 8 * 4
    assert found.instructions["dot"] == 128 * tiles
    assert found.instructions["other"] == 5 * warps
    assert found.pipes == {
        "add": 3 * warps,
        "logic": (10 + 4) * tiles,
        "heavy": (128 + 6) * tiles,
        "float": 20 * tiles,
        "slow": 0,
        "load_store": 16 * tiles,
        "shuffle": 0,
        "issue": 186 * tiles + 8 * warps,
    }
    assert found.unpack_ops == 8 * tiles
    # Eight instructions of 32 lanes for 32 tokens of 128 keys and 128 values.
    assert found.unpack_ops_per_32 == 8 * 32 / (32 * 256 / 32)


def test_ptx_is_put_into_pipes_by_class():
    ptx = replace(COUNTS, language="ptx")
    found = pipes_of(ptx, {marks.TILE: 10.0}, 2)
    assert found == dict.fromkeys(PIPES, 0.0) | {
        "add": 6,
        "logic": 100,
        "heavy": 1280,
        "float": 200,
        "slow": 40,
        "load_store": 160,
        "issue": 1860 + 16,
    }


@pytest.mark.parametrize(
    ("opcode", "pipe"),
    [
        ("MUFU.EX2", "slow"),
        ("I2F.S8", "slow"),
        ("F2FP.F16.F32.PACK_AB", "logic"),
        ("HADD2.F32", "float"),
        ("IMAD.SHL.U32", "heavy"),
        ("PRMT", "logic"),
        ("SHFL.BFLY", "shuffle"),
        ("LDS.128", "load_store"),
        ("ISETP.GE.AND", "logic"),
        ("UIADD3", "issue"),
        ("BAR.SYNC", "issue"),
    ],
)
def test_opcodes_run_where_the_vendor_says(opcode, pipe):
    one = replace(COUNTS, loops=(LoopCounts(marks.TILE, 1, {}, {}, {opcode: 1}),))
    found = pipes_of(one, {marks.TILE: 1.0}, 0)
    assert {name for name, count in found.items() if count} == {pipe, "issue"}


def reading_shared(each_pass):
    """Counts with so many loads of shared memory in each tile."""
    loop = replace(LOOP, counts={**LOOP.counts, "shared_load": each_pass})
    return replace(COUNTS, loops=(OUTSIDE, loop))


@pytest.mark.parametrize(
    ("loads", "passes"),
    [
        # As many as the accesses say: three in a row of banks, three in one bank.
        (6, 3 * (1 + 32)),
        # The compiler keeps half of what is read in registers.
        (3, 3 * (1 + 32) / 2),
        # Four more that no access stands for.
        (10, 3 * (1 + 32) + 4),
    ],
)
def test_shared_wavefronts_count_conflicts_of_the_loads_that_there_are(loads, passes):
    row = tuple(4 * lane for lane in range(32))
    column = tuple(128 * lane for lane in range(32))
    shared = tuple(WarpAccess("x", "shared", "load", 4, each, marks.TILE, 3.0) for each in (row, column))
    found = features(others=shared, counts=reading_shared(loads))
    assert found.shared_wavefronts == pytest.approx(128 * 8 * passes)


def test_occupancy_waves_and_bytes_in_flight():
    found = features(plan=candidate(splits=64), splits=64)
    # 64 registers let 65536 / (64·128) = 8 blocks in; threads would let 12.
    assert (found.blocks, found.warps, found.blocks_per_sm, found.limiter) == (512, 4, 8, "registers")
    assert found.shared_bytes == 1536
    assert found.waves == 1
    assert found.balance == pytest.approx(7 * 82 / 512)
    # Seven blocks of the busiest multiprocessor, four warps each, four vectors of 512 bytes a warp.
    assert found.in_flight_bytes == 7 * 4 * 4 * 512
    staged = features(plan=candidate(splits=64, stages=2), splits=64)
    assert staged.in_flight_bytes == 7 * 4 * 2 * 2 * 32 * (128 + 8)


def test_the_longest_warp_waits_for_each_batch_of_loads():
    found = features()
    # 128 tiles over 8 splits of 4 warps are 4 each, of 16 vectors, 4 at a time; and once for what comes first.
    assert (found.chain, found.rounds) == (4, 1 + 4 * 16 / 4)
    assert found.chain_instructions == 4 * 186 + 8
    assert features(plan=candidate(stages=2)).rounds == 1 + 4 / 2


def test_a_repeated_call_finds_what_fits_the_cache():
    small, large = features(tokens=256), features(tokens=65536)
    assert warm(small, GPU).dram_bytes == 0
    assert warm(large, GPU) == large


def test_features_survive_json():
    found = features()
    assert GpuFeatures.from_dict(json.loads(json.dumps(found.as_dict()))) == found


def test_what_cannot_be_is_refused():
    with pytest.raises(LayoutError, match="no layout for operand 'v'"):
        gpu_features(PROBLEM, replace(candidate(), v=None), 4096, COUNTS, GPU, work())
    with pytest.raises(CompileError, match="cannot be launched: 98304 registers a block, but sm_86 has 65536"):
        features(counts=replace(COUNTS, registers=192), warps=16)
    with pytest.raises(ProblemError, match="tokens"):
        gpu_features(PROBLEM, candidate(), 0, COUNTS, GPU, work())


PROBLEMS = [
    Problem("attend", 24, 8, 128, "w4a8"),
    Problem("attend", 8, 8, 80, "w8a8", window=500),
    Problem("qk", 24, 8, 128, "w8a8", query_rows=2),
    Problem("sv", 32, 8, 64, "fp16"),
    Problem("gemv", 1, 1, 1024, "w4a8"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_what_real_warps_ask_for_agrees_with_what_layouts_touch(problem):
    # Two derivations that share nothing: addresses of lanes, loop by loop, and the layouts' factors.
    ratios = []
    for plan in islice((each for each in space(problem, "sm_86") if isinstance(each, Candidate)), 0, 120, 5):
        for tokens in (1000, 2048):
            real = launch_work(problem, plan, tokens, "sm_86")
            found = gpu_features(problem, plan, tokens, COUNTS, GPU, real)
            asked = sum(
                sectors(access) * 32 * access.count * real.iterations[access.mark]
                for access in real.accesses
                if access.space == "global"
            )
            distinct = call_bytes(problem, plan, tokens, 32) * real.geometry.grid[2]
            assert asked >= distinct
            assert distinct <= found.loaded_bytes <= asked
            assert found.rounds >= 1
            assert found.merge_bytes == build(problem, plan, "sm_86").workspace_bytes(tokens)
            ratios.append(asked / distinct)
    assert min(ratios) == 1.0

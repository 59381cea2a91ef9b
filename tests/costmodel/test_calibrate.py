"""Calibration: loops that are what they claim, and a short run whose fit is usable and survives JSON."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from lowbit.costmodel.bandwidth import working_sets
from lowbit.costmodel.calibrate import Calibration, calibrate
from lowbit.costmodel.device import CacheLevel, detect
from lowbit.costmodel.lep import predict_many
from lowbit.costmodel.microbench import Bench, compile_loops
from lowbit.costmodel.microloops import LOOPS, PREFETCHED_BYTES, READERS, write_loops
from lowbit.costmodel.unpack import instruction_counts, unpack_ops_per_32
from lowbit.kernels.backend import Code
from lowbit.kernels.cpu.isa import ISAS
from lowbit.kernels.cpu.pool import allowed_cpus

DOTS = {"avx512_vnni": "vpdpbusd", "avx_vnni": "vpdpbusd", "avx2": "vpmaddubsw", "neon_dot": "sdot"}


@pytest.fixture(scope="module")
def shown():
    """Each instruction set's loops as its own target compiles them."""
    codes = {}
    for isa in ISAS.values():
        _, bodies = write_loops(isa)
        ir, assembly, _ = compile_loops(isa, host=False)
        codes[isa.name] = {
            name: Code("k", f"{name}_loop", ir, assembly, body.values, 1, "") for name, body in bodies.items()
        }
    return codes


@pytest.mark.parametrize(("isa", "mnemonic"), DOTS.items())
def test_dot_loops_use_the_instruction_sets_dot(shown, isa, mnemonic):
    code = shown[isa]["dot_rows"]
    text = code.assembly.split(f"{code.symbol}:")[1].split(".Lfunc_end")[0]
    assert text.split().count(mnemonic) == 8


@pytest.mark.parametrize("isa", list(ISAS))
def test_instructions_are_those_written(shown, isa):
    counts = {name: instruction_counts(code) for name, code in shown[isa].items()}
    pairs = 2 if isa == "neon_dot" else 1  # ldp loads two vectors
    assert (counts["stream"]["load"], counts["stream"]["mask"]) == (8 / pairs, 8)
    assert counts["short"]["load"] == counts["short"]["branch"] == 1
    assert counts["store"]["store"] == 4
    assert counts["nibbles"]["shift"] == 4
    assert counts["fma"]["arithmetic"] >= 10
    if isa in DOTS:
        pair = 2 if DOTS[isa] == "vpmaddubsw" else 1
        assert [counts[name]["dot"] for name in ("dot", "dot_rows", "nibble_dot")] == [4 * pair, 8 * pair, 8 * pair]


@pytest.mark.parametrize("isa", list(DOTS))
def test_unpacking_is_counted_where_codes_are_packed(shown, isa):
    """Two words a step, each a shift and two masks, hold 64 codes per 32 bytes."""
    per_32 = 2 * 3 * 32 / (2 * 2 * ISAS[isa].vector_bytes)
    assert unpack_ops_per_32(shown[isa]["nibble_dot"]) == pytest.approx(per_32)
    assert unpack_ops_per_32(shown[isa]["dot"]) == 0
    assert unpack_ops_per_32(shown[isa]["permute_dot"]) > per_32


@pytest.fixture(scope="module")
def small():
    """This machine with only its nearest caches, so that "memory" is small and a calibration quick."""
    return replace(detect(), caches=(CacheLevel(1, 32 << 10, 1), CacheLevel(2, 256 << 10, 1)))


def test_a_loop_reads_all_its_bytes(small):
    """What the loop without any extra work accumulates is the bitwise or of every vector of its stream."""
    bench = Bench(small, 1 << 20)
    size = bench.whole_steps("short", 256)  # few vectors: the bitwise or of many is all ones
    bench.call("short", 1, 1, size, 3)()
    start = -bench._data.ctypes.data % 4096 // 4
    lanes = ISAS[small.isa].lanes
    words = bench._data[start : start + size // 4].view(np.int32).reshape(-1, lanes)
    assert bench._out[: 4 * lanes].view(np.int32).tolist() == np.bitwise_or.reduce(words, axis=0).tolist()


def test_windows_move_on_from_call_to_call(small):
    """Eight calls over four windows of different data see each of them twice, in the same order."""
    bench = Bench(small, 1 << 20)
    size = bench.whole_steps("short", 64)
    call = bench.call("short", 1, 1, size, 1, windows=4)
    seen = []
    for _ in range(8):
        call()
        seen.append(bytes(bench._out[:64]))
    assert seen[:4] == seen[4:] and len(set(seen)) == 4
    assert bench.features("short", 1, 1, size, 1, windows=4).working_set_bytes == 4 * size
    assert bench.features("short", 1, 1, size, 1, windows=4).bytes == size


def test_features_of_a_loop_by_hand(small):
    bench = Bench(small, 1 << 20)
    step = 8 * ISAS[small.isa].vector_bytes
    size = bench.whole_steps("stream", 10_000)
    assert size % step == size % small.line_bytes == 0 and 10_000 - 8 * step < size <= 10_000
    features = bench.features("stream", 2, 3, size, 5)
    assert (features.bytes, features.working_set_bytes) == (15 * size, 3 * size)
    assert features.instructions["mask"] == 15 * size // step * 8
    assert (features.tasks, features.threads, features.exponentials) == (3, 2, 0)
    softmax = bench.features("exponential", 1, 1, 1024, 1)
    assert softmax.exponentials == 1024 // 4
    assert not any(softmax.instructions.values())
    with pytest.raises(ValueError, match="exceed"):
        bench.call("stream", 1, 2, 1 << 20, 1)


@pytest.mark.parametrize("name", list(READERS))
def test_every_way_of_reading_follows_its_streams(shown, name):
    """Eight loads an iteration, spread evenly over the streams, each stream advancing by its share of the step."""
    streams, ahead_bytes = READERS[name]
    for isa in ISAS.values():
        _, bodies = write_loops(isa)
        body, vector = bodies[name], isa.vector_bytes
        assert body.offsets == dict.fromkeys(range(streams), 8 // streams * vector)
        ir = shown[isa.name][name].ir.split(f"@{name}_loop(")[1].split("\n}")[0]
        assert f"udiv i64 %bytes, {streams}" in ir and f"add i64 %i, {body.step_bytes // streams}\n" in ir
        assert [f"%at{stream} = " in ir for stream in range(1, 4)] == [stream < streams for stream in range(1, 4)]
        lines = streams * -(-8 // streams * vector // PREFETCHED_BYTES)
        assert ir.count("@llvm.prefetch") == (lines if ahead_bytes else 0)


@pytest.mark.parametrize("name", list(READERS))
def test_every_byte_of_each_stream_is_read(small, name):
    """One marked vector at a time, of a buffer of zeros, shows in the one accumulator that its place feeds."""
    bench = Bench(small, 1 << 20)
    vector = ISAS[small.isa].vector_bytes
    size = bench.whole_steps(name, 2 * 8 * vector)
    start = bench.address - bench._data.ctypes.data
    data = bench._data.view(np.uint8)[start : start + size]
    streams = READERS[name][0]
    data[:] = 0
    seen = []
    for place in range(0, size, vector):
        data[place : place + vector] = 255
        bench.call(name, 1, 1, size, 1)()
        seen.append(bool(bench._out[:vector].any()))  # the accumulator that is stored last
        data[place : place + vector] = 0
    per_stream = 8 // streams
    of_stream = [place // vector % (size // vector // streams) for place in range(0, size, vector)]
    stream = [place // (size // streams) for place in range(0, size, vector)]
    last = [s == streams - 1 and i % per_stream == per_stream - 1 for s, i in zip(stream, of_stream, strict=True)]
    assert seen == last and sum(seen) >= 2


def test_working_sets_cover_every_level(small):
    for evicts in (True, False):
        wanted = working_sets(small, evicts)
        assert [each.stands_for_bytes for each in wanted] == sorted(each.stands_for_bytes for each in wanted)
        levels = {each.level: each.stands_for_bytes for each in wanted if each.level}
        assert levels == {"L1": 16 << 10, "L2": 128 << 10, "DRAM": 1 << 20}
        assert [each.level for each in wanted if each.evicted] == ["DRAM"] * evicts


@pytest.mark.parametrize("last_mib", [1, 8, 32, 100, 480, 1536])
@pytest.mark.parametrize("evicts", [True, False])
def test_buffers_are_bounded_whatever_the_last_level(small, last_mib, evicts):
    last = CacheLevel(3, last_mib << 20, 32)
    wanted = working_sets(replace(small, caches=(*small.caches, last), memory_bytes=1 << 40), evicts)
    assert max(each.size_bytes for each in wanted) <= (128 << 20 if evicts else 512 << 20)
    assert wanted[-1].level == "DRAM" and wanted[-1].stands_for_bytes >= 2 * last.size_bytes
    assert [each.level for each in wanted if each.level] == ["L1", "L2", "L3", "DRAM"]
    stands = [each.stands_for_bytes for each in wanted]
    assert stands == sorted(set(stands)) and all(e.size_bytes == e.stands_for_bytes for e in wanted[:-1])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_short_calibration_is_usable(small, threads):
    result = calibrate(small, threads, budget_s=1.0)
    assert Calibration.from_dict(json.loads(json.dumps(result.as_dict()))) == result
    for fitted in (result.two_term, result.extended):
        assert all(math.isfinite(value) and value >= 0 for value in fitted.values.values())
        assert math.isfinite(fitted.residual.p95)
    assert result.extended.residual.median < 0.6
    assert result.extended.values["exponential_ns"] > 0
    assert result.extended.values["gamma"] <= 1
    assert {point.threads for point in result.bandwidth.points} == set(range(1, threads + 1))
    assert all(0 < point.gbps < 1e5 for point in result.bandwidth.points)
    loops = {sample.loop for sample in result.samples}
    assert loops >= set(LOOPS) - {"half"}
    assert ("nothing" in loops) == (threads > 1)
    met = 1 < threads <= len(allowed_cpus())
    assert ("meeting" in loops) == met == (result.fork_us is not None) == (result.parked_us is not None)
    if met:
        assert result.fork_us > 0 and result.parked_us > 0
    predicted = predict_many([sample.features for sample in result.samples], result.extended)
    assert [sample.extended_us for sample in result.samples] == pytest.approx(predicted.tolist())


def test_no_threads_is_refused(small):
    with pytest.raises(ValueError, match="0 threads"):
        calibrate(small, 0)


def test_a_calibration_from_before_forks_were_measured_still_opens(small):
    data = json.loads(json.dumps(calibrate(small, 1, budget_s=0.5).as_dict()))
    del data["fork_us"], data["parked_us"]
    assert Calibration.from_dict(data).fork_us is None

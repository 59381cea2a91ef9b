"""The time model of GPUs: hand-worked terms, bounds that always hold, and coefficients that come back from a fit."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.costmodel.gpu import gpu_named, gpus
from lowbit.costmodel.gpu_features import GpuFeatures
from lowbit.costmodel.gpu_lep import (
    BOUNDS,
    DEFAULTS,
    GPU_TWO_TERM,
    GpuCoefficients,
    default_coefficients,
    explain,
    fit_gpu,
    predict_many,
    predict_us,
)
from lowbit.costmodel.gpu_pipes import PIPES
from lowbit.costmodel.lep import Residual

GPU = gpu_named("RTX 3090")
NOTHING = GpuFeatures(
    dram_bytes=0.0,
    footprint_bytes=0.0,
    l2_bytes=0.0,
    loaded_bytes=0.0,
    sectors_per_ideal=1.0,
    instructions={},
    pipes=dict.fromkeys(PIPES, 0.0),
    shared_wavefronts=0.0,
    l1_cycles=0.0,
    registers=32,
    shared_bytes=0,
    blocks=82,
    warps=4,
    blocks_per_sm=8,
    limiter="threads",
    waves=1.0,
    tail=1.0,
    balance=1.0,
    in_flight_bytes=0.0,
    stages=0,
    rounds=0.0,
    chain=0.0,
    chain_instructions=0.0,
    launches=1,
    merge_bytes=0.0,
    unpack_ops=0.0,
    unpack_ops_per_32=0.0,
)


def call(**changes):
    pipes = {**NOTHING.pipes, **changes.pop("pipes", {})}
    return replace(NOTHING, pipes=pipes, **changes)


@st.composite
def calls(draw):
    def amount(most):
        return 10 ** draw(st.floats(0, most)) - 1

    dram = amount(10)
    loaded = dram * draw(st.floats(1, 8))
    return call(
        dram_bytes=dram,
        l2_bytes=loaded,
        loaded_bytes=loaded,
        pipes={name: amount(9) for name in PIPES},
        shared_wavefronts=amount(8),
        l1_cycles=amount(8),
        blocks=draw(st.integers(1, 4096)),
        waves=draw(st.floats(1, 50)),
        balance=draw(st.floats(1, 82)),
        in_flight_bytes=draw(st.floats(32, 1 << 17)),
        stages=draw(st.integers(0, 4)),
        rounds=amount(4),
        chain_instructions=amount(6),
        launches=draw(st.integers(1, 2)),
        merge_bytes=amount(7),
        unpack_ops=amount(8),
    )


@given(features=calls(), gpu=st.sampled_from(gpus()), share=st.floats(0.3, 1.0), power=st.floats(1.0, 12.0))
def test_no_prediction_is_below_bytes_over_bandwidth(features, gpu, share, power):
    values = {**DEFAULTS, "dram_share": share, "overlap_power": power}
    floor_us = features.dram_bytes / gpu.bandwidth_gbps * 1e-3
    assert predict_us(features, GpuCoefficients("gpu", values, gpu)) >= floor_us
    assert predict_us(features, default_coefficients(gpu, GPU_TWO_TERM)) >= floor_us


@given(features=calls(), more=st.floats(1, 4))
def test_more_of_anything_never_takes_less_time(features, more):
    coefficients = default_coefficients(GPU)
    before = predict_us(features, coefficients)
    changed = {
        "dram_bytes": features.dram_bytes * more,
        "l2_bytes": features.l2_bytes * more,
        "rounds": features.rounds * more,
        "chain_instructions": features.chain_instructions * more,
        "waves": features.waves * more,
        "balance": features.balance * more,
        "shared_wavefronts": features.shared_wavefronts * more,
        "merge_bytes": features.merge_bytes * more,
        "pipes": {name: count * more for name, count in features.pipes.items()},
        "in_flight_bytes": features.in_flight_bytes / more,
    }
    for name, value in changed.items():
        # More requests of which as many come from memory wait less for each, on average.
        if name == "l2_bytes":
            continue
        assert predict_us(replace(features, **{name: value}), coefficients) >= before * (1 - 1e-9)


@given(st.lists(calls(), min_size=1, max_size=20))
@settings(max_examples=25)
def test_many_are_predicted_as_one(features):
    for form in ("gpu", GPU_TWO_TERM):
        coefficients = default_coefficients(GPU, form)
        one_by_one = [predict_us(each, coefficients) for each in features]
        np.testing.assert_allclose(predict_many(features, coefficients), one_by_one, rtol=1e-12)


def test_nothing_to_predict():
    assert predict_many([], default_coefficients(GPU)).shape == (0,)


def test_a_stream_takes_its_bytes_at_the_share_of_bandwidth_within_reach():
    # 936 MB at 936 GB/s are a millisecond, at 95 % of it a twentieth more.
    stream = call(dram_bytes=936e6)
    terms = explain(stream, default_coefficients(GPU))
    assert terms["floor_us"] == pytest.approx(1000)
    assert terms["memory_us"] == pytest.approx(1000 / 0.95)
    assert terms["total_us"] == pytest.approx(0.9 + 1000 / 0.95, rel=1e-3)


def test_few_bytes_in_flight_bound_the_bandwidth_by_littles_law():
    # 82 multiprocessors that wait 320 ns for 1024 bytes each get 262 GB/s.
    starved = call(dram_bytes=262.4e6, l2_bytes=262.4e6, loaded_bytes=262.4e6, in_flight_bytes=1024.0)
    assert explain(starved, default_coefficients(GPU))["latency_us"] == pytest.approx(1000 + 0.23, rel=1e-6)
    # With one block one multiprocessor waits alone.
    alone = replace(starved, blocks=1)
    assert explain(alone, default_coefficients(GPU))["latency_us"] == pytest.approx(82000 + 0.23, rel=1e-6)
    # What the L2 cache has is there after 144 ns.
    cached = replace(starved, dram_bytes=0.0)
    assert explain(cached, default_coefficients(GPU))["latency_us"] == pytest.approx(450 + 0.23, rel=1e-6)


@pytest.mark.parametrize(
    ("pipe", "term", "lanes"),
    [
        ("issue", "issue_us", 128),
        ("add", "integer_us", 64),
        ("logic", "integer_us", 64),
        ("heavy", "dot_us", 64),
        ("float", "float_us", 128),
        ("slow", "special_us", 16),
        ("load_store", "load_store_us", 32),
        ("shuffle", "load_store_us", 32),
    ],
)
def test_each_pipe_takes_its_lanes_a_clock(pipe, term, lanes):
    busy = call(pipes={pipe: 82e6})
    # A million warp instructions on each multiprocessor.
    expected = 1e6 * 32 / lanes / 1695
    terms = explain(busy, default_coefficients(GPU))
    assert terms[term] == pytest.approx(expected)
    assert terms["compute_us"] == pytest.approx(expected / 0.85)
    # Blocks that do not divide evenly make the busiest multiprocessor take longer.
    uneven = explain(replace(busy, balance=1.5), default_coefficients(GPU))
    assert uneven["compute_us"] == pytest.approx(1.5 * expected / 0.85)


def test_dot_products_and_floats_share_the_pipe_where_it_is_narrow():
    both = call(pipes={"heavy": 108e6, "float": 108e6})
    narrow = explain(both, default_coefficients(gpu_named("A100 SXM 80GB")))
    assert narrow["float_us"] == pytest.approx(2e6 / 2 / 1410)
    wide = explain(both, default_coefficients(GPU))
    assert wide["float_us"] == pytest.approx(wide["dot_us"])


def test_bank_conflicts_take_passes_of_the_load_store_unit():
    clean = explain(call(shared_wavefronts=82e6), default_coefficients(GPU))
    conflicting = explain(call(shared_wavefronts=32 * 82e6), default_coefficients(GPU))
    assert clean["load_store_us"] == pytest.approx(1e6 / 1695)
    assert conflicting["load_store_us"] == pytest.approx(32 * clean["load_store_us"])
    # Turing's caches deliver half as much a clock.
    turing = explain(call(shared_wavefronts=40e6), default_coefficients(gpu_named("T4")))
    assert turing["load_store_us"] == pytest.approx(2e6 / 1590)


def test_copies_that_run_ahead_hide_the_chain_and_loads_that_are_waited_for_do_not():
    chain = {"rounds": 100.0, "chain_instructions": 16950.0}
    waits, works = 100 * 0.144, 16950 * 2 / 1695
    waiting = explain(call(**chain), default_coefficients(GPU))
    ahead = explain(call(**chain, stages=2), default_coefficients(GPU))
    assert waiting["latency_us"] == pytest.approx(0.23 + waits + works)
    assert ahead["latency_us"] == pytest.approx(0.23 + max(waits, works))


def test_a_merge_is_a_second_launch_that_waits_once():
    merged = explain(call(launches=2, merge_bytes=1e6), default_coefficients(GPU))
    assert merged["launch_us"] == pytest.approx(1.8)
    assert merged["merge_us"] == pytest.approx(0.23 + 0.144 + 1e6 / (GPU.l2_gbps * 0.77) * 1e-3)
    assert explain(call(), default_coefficients(GPU))["merge_us"] == 0


@given(calls())
def test_terms_add_up_to_the_prediction(features):
    terms = explain(features, default_coefficients(GPU))
    assert terms["total_us"] == pytest.approx(predict_us(features, default_coefficients(GPU)))
    parts = [terms[name] for name in ("memory_us", "l2_us", "latency_us", "compute_us")]
    assert max(parts) <= terms["overlapped_us"] * (1 + 1e-9)
    assert terms["overlapped_us"] <= sum(parts) * (1 + 1e-9) + 1e-6
    short = explain(features, default_coefficients(GPU, GPU_TWO_TERM))
    assert set(short) == {"memory_us", "unpack_us", "total_us"}
    assert short["total_us"] == pytest.approx(short["memory_us"] + short["unpack_us"])


def test_the_published_form_adds_bytes_and_unpacking():
    coefficients = default_coefficients(GPU, GPU_TWO_TERM)
    # 82 multiprocessors unpack two warp instructions a clock.
    found = predict_us(call(dram_bytes=936e3, unpack_ops=82 * 1695 * 2), coefficients)
    assert found == pytest.approx(1 + 1)


def synthetic(count, seed):
    generator = np.random.default_rng(seed)

    def amount(low, high):
        return float(10 ** generator.uniform(low, high))

    samples = []
    for _ in range(count):
        dram = amount(5, 9)
        samples.append(
            call(
                dram_bytes=dram,
                l2_bytes=dram,
                loaded_bytes=dram,
                in_flight_bytes=amount(3, 5),
                blocks=int(amount(0, 3)),
                waves=amount(0, 1),
                pipes={name: amount(3, 8) for name in PIPES},
                rounds=amount(0, 2),
                chain_instructions=amount(2, 5),
            )
        )
    return samples


def test_planted_coefficients_come_back():
    planted = {
        "launch_us": 1.6,
        "block_us": 0.4,
        "dram_share": 0.8,
        "l2_share": 0.77,
        "compute_share": 0.6,
        "dependent_cycles": 3.5,
        "overlap_power": 4.0,
    }
    samples = synthetic(200, 1)
    truth = GpuCoefficients("gpu", planted, GPU)
    start = default_coefficients(GPU)
    fitted = fit_gpu(samples, predict_many(samples, truth), start)
    unseen = synthetic(100, 2)
    error = np.abs(predict_many(unseen, fitted) / predict_many(unseen, truth) - 1)
    assert np.median(error) < 0.03
    assert np.median(np.abs(predict_many(unseen, start) / predict_many(unseen, truth) - 1)) > 0.1
    assert fitted.residual.samples == 200
    assert fitted.residual.median < 0.03
    for name, (low, high) in BOUNDS.items():
        assert low <= fitted.values[name] <= high
    # Launches and blocks are a small part of these samples, and hardly told apart.
    for name in ("dram_share", "dependent_cycles", "compute_share"):
        assert fitted.values[name] == pytest.approx(planted[name], rel=0.15)


def test_what_samples_do_not_tell_stays_at_its_default():
    streams = [call(dram_bytes=size * 1e6) for size in (1, 10, 100, 1000)]
    truth = GpuCoefficients("gpu", {**DEFAULTS, "dram_share": 0.7}, GPU)
    fitted = fit_gpu(streams, predict_many(streams, truth), default_coefficients(GPU))
    assert fitted.values["dram_share"] == pytest.approx(0.7, rel=0.03)
    assert fitted.values["dependent_cycles"] == DEFAULTS["dependent_cycles"]
    assert fitted.values["compute_share"] == DEFAULTS["compute_share"]


def test_the_published_form_is_fitted_too():
    samples = [call(dram_bytes=b * 1e6, unpack_ops=u * 1e6) for b in (1, 10, 100) for u in (0.1, 1, 10)]
    truth = GpuCoefficients(GPU_TWO_TERM, {"alpha1": 1.4, "alpha2_ns": 0.02}, GPU)
    fitted = fit_gpu(samples, predict_many(samples, truth), default_coefficients(GPU, GPU_TWO_TERM))
    assert fitted.values["alpha1"] == pytest.approx(1.4, rel=0.03)
    assert fitted.values["alpha2_ns"] == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("times", [[], [1.0, 2.0], [0.0], [-1.0]])
def test_a_fit_needs_a_time_for_each_sample(times):
    with pytest.raises(ValueError, match="cannot fit"):
        fit_gpu([call()], times, default_coefficients(GPU))


def test_coefficients_survive_json():
    fitted = replace(default_coefficients(GPU), residual=Residual(0.1, 0.2, 30))
    assert GpuCoefficients.from_dict(json.loads(json.dumps(fitted.as_dict()))) == fitted


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.name)
def test_defaults_lie_within_their_bounds(gpu):
    values = default_coefficients(gpu).values
    assert set(values) == set(BOUNDS)
    assert all(low <= values[name] <= high for name, (low, high) in BOUNDS.items())

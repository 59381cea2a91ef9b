"""The cost model: planted coefficients come back, predictions equal hand-worked values and never fall as work grows."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.costmodel.assembly import CLASSES
from lowbit.costmodel.bandwidth import Bandwidth, BandwidthPoint, fastest
from lowbit.costmodel.features import Features
from lowbit.costmodel.lep import (
    EXTENDED,
    TWO_TERM,
    Coefficients,
    Residual,
    explain,
    fit_extended,
    fit_two_term,
    nonnegative_least_squares,
    predict_many,
    predict_us,
)

KIB, MIB = 1 << 10, 1 << 20
BANDWIDTH = Bandwidth(
    tuple(
        BandwidthPoint(threads, size, gbps * threads**0.5, level)
        for threads in (1, 2)
        for size, gbps, level in ((16 * KIB, 200.0, "L1"), (256 * KIB, 100.0, "L2"), (64 * MIB, 20.0, "DRAM"))
    )
)
PLANTED = {f"{kind}_ns": 0.0 for kind in CLASSES} | {
    "load_ns": 0.05,
    "dot_ns": 0.15,
    "convert_ns": 0.2,
    "shift_ns": 0.08,
    "arithmetic_ns": 0.1,
    "exponential_ns": 0.4,
    "task_us": 0.05,
    "fork_us": 2.5,
    "gamma": 0.3,
}


def call(**changes):
    base = Features(
        bytes=0,
        working_set_bytes=16 * KIB,
        instructions=dict.fromkeys(CLASSES, 0.0),
        unpack_ops=0.0,
        unpack_ops_per_32=0.0,
        exponentials=0,
        tasks=1,
        threads=1,
    )
    return replace(base, **changes)


def synthetic(seed, count=160):
    generator = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        size = int(math.exp(generator.uniform(math.log(8 * KIB), math.log(128 * MIB))))
        work = size * 10 ** generator.uniform(-2, 0)
        mix = generator.dirichlet([0.5] * len(CLASSES)) * work
        threads = int(generator.integers(1, 3))
        samples.append(
            call(
                bytes=size,
                working_set_bytes=size,
                instructions=dict(zip(CLASSES, mix.tolist(), strict=True)),
                unpack_ops=float(generator.uniform(0, work)),
                exponentials=int(generator.integers(0, 3) * work / 10),
                tasks=int(generator.integers(1, 9)),
                threads=threads,
            )
        )
    return samples


def coefficients(form=EXTENDED, **changes):
    values = PLANTED if form == EXTENDED else {"alpha1": 0.5, "alpha2_ns": 0.7}
    return Coefficients(form, values | changes, BANDWIDTH, 2)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.467, 1.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_extended_fit_recovers_planted_coefficients(gamma, seed):
    truth = coefficients(gamma=gamma)
    samples = synthetic(seed)
    fitted = fit_extended(samples, predict_many(samples, truth), BANDWIDTH, 2)
    assert fitted.values == pytest.approx(truth.values, rel=1e-6, abs=1e-9)
    assert fitted.residual.p95 < 1e-9


def test_two_term_fit_recovers_planted_coefficients():
    truth = coefficients(TWO_TERM)
    samples = synthetic(3)
    fitted = fit_two_term(samples, predict_many(samples, truth), BANDWIDTH, 2)
    assert fitted.values == pytest.approx(truth.values, rel=1e-9)
    zero = coefficients(TWO_TERM, alpha2_ns=0.0)
    assert fit_two_term(samples, predict_many(samples, zero), BANDWIDTH, 2).values["alpha2_ns"] < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_fitted_coefficients_are_never_negative(seed):
    samples = synthetic(seed, 40)
    noise = np.random.default_rng(seed).uniform(0.3, 3.0, len(samples))
    times = predict_many(samples, coefficients()) * noise
    extended, two_term = fit_extended(samples, times, BANDWIDTH, 2), fit_two_term(samples, times, BANDWIDTH, 2)
    for value in (*extended.values.values(), *two_term.values.values()):
        assert math.isfinite(value) and value >= 0
    assert extended.values["gamma"] <= 1


def test_two_term_is_the_published_sum():
    features = call(bytes=20 * MIB, unpack_ops=1e6)
    seconds_on_the_bus = 20 * MIB / (20e9 * math.sqrt(2))
    assert predict_us(features, coefficients(TWO_TERM)) == pytest.approx(0.5 * seconds_on_the_bus * 1e6 + 0.7 * 1e3)


def test_extended_sums_its_terms_by_hand():
    """3 tasks on 2 threads: two rounds, so 1.5 run in parallel; bandwidth there is midway between 1 and 2 threads."""
    features = call(
        bytes=2 * MIB,
        working_set_bytes=64 * MIB,
        instructions={"load": 3e5, "dot": 2e5, "mask": 9e9},
        exponentials=6000,
        tasks=3,
        threads=2,
    )
    between = (1 + math.sqrt(2)) / 2
    memory = 2 * MIB * (1 / (20e3 * between) - 1 / (200e3 * between))
    compute = (3e5 * 0.05 + 2e5 * 0.15 + 6000 * 0.4) * 1e-3 / 1.5
    expected = max(memory, compute) + 0.3 * min(memory, compute) + 0.05 * 3 + 2.5
    assert predict_us(features, coefficients()) == pytest.approx(expected)
    terms = explain(features, coefficients())
    total = terms.memory_us + sum(terms.instructions_us.values()) + terms.exponentials_us + terms.tasks_us
    assert total + terms.fork_us - terms.overlap_us == pytest.approx(expected)
    assert terms.memory_us == pytest.approx(memory)
    assert terms.instructions_us["dot"] == pytest.approx(2e5 * 0.15e-3 / 1.5)


@pytest.mark.parametrize(("tasks", "threads", "forks"), [(1, 1, 0), (1, 2, 0), (2, 1, 0), (2, 2, 1), (8, 2, 1)])
def test_forks_and_claims_are_paid_only_by_calls_that_fork(tasks, threads, forks):
    idle = call(tasks=tasks, threads=threads)
    assert predict_us(idle, coefficients()) == pytest.approx((2.5 + 0.05 * tasks) * forks)


def test_more_threads_than_tasks_bring_nothing():
    work = {"dot": 1e6}
    two = predict_us(call(instructions=work, tasks=2, threads=2), coefficients())
    assert predict_us(call(instructions=work, tasks=2, threads=7), coefficients()) == pytest.approx(two)


SAMPLES = synthetic(5)


@given(
    st.sampled_from([*CLASSES, "bytes", "exponentials", "unpack_ops"]),
    st.integers(0, 10**7),
    st.sampled_from(SAMPLES),
)
@settings(deadline=None)
def test_predictions_never_fall_as_work_grows(what, more, features):
    if what in CLASSES:
        counts = features.instructions
        larger = replace(features, instructions=counts | {what: counts[what] + more})
    else:
        larger = replace(features, **{what: getattr(features, what) + more})
    for form in (EXTENDED, TWO_TERM):
        assert predict_us(larger, coefficients(form)) >= predict_us(features, coefficients(form)) * (1 - 1e-12)


def test_many_predictions_equal_single_ones():
    samples = synthetic(7, 30)
    for form in (EXTENDED, TWO_TERM):
        single = [predict_us(features, coefficients(form)) for features in samples]
        assert predict_many(samples, coefficients(form)).tolist() == pytest.approx(single, rel=1e-12)
    assert predict_many([], coefficients()).shape == (0,)


def test_json_round_trip():
    stored = replace(coefficients(), residual=Residual(0.1, 0.3, 20))
    assert Coefficients.from_dict(json.loads(json.dumps(stored.as_dict()))) == stored


def test_residual_is_of_relative_errors():
    residual = Residual.of(np.array([1.1, 1.8, 3.0]), np.array([1.0, 2.0, 3.0]))
    assert (residual.median, residual.samples) == (pytest.approx(0.1), 3)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_nonnegative_least_squares_meets_the_optimality_conditions(rows, columns, seed):
    generator = np.random.default_rng(seed)
    a = generator.normal(size=(rows, columns)) * 10.0 ** generator.integers(-6, 6, columns)
    if seed % 3 == 0:
        a[:, 0] = 0.0
    if seed % 5 == 0:
        a[:, -1] = a[:, 0]
    b = generator.normal(size=rows)
    x = nonnegative_least_squares(a, b)
    norms = np.linalg.norm(a, axis=0)
    gradient = a.T @ (b - a @ x) / np.where(norms > 0, norms, 1.0)
    assert (x >= 0).all()
    assert (gradient <= 1e-8).all()
    assert np.abs(gradient[x > 0]).max(initial=0.0) <= 1e-8


def test_nonnegative_least_squares_is_the_best_of_all_supports():
    generator = np.random.default_rng(11)
    for _ in range(20):
        a, b = generator.normal(size=(9, 5)), generator.normal(size=9)
        best = float(b @ b)
        for bits in range(1, 32):
            support = [i for i in range(5) if bits >> i & 1]
            part = np.linalg.lstsq(a[:, support], b, rcond=None)[0]
            if (part >= 0).all():
                best = min(best, float(np.sum((a[:, support] @ part - b) ** 2)))
        x = nonnegative_least_squares(a, b)
        assert float(np.sum((a @ x - b) ** 2)) == pytest.approx(best, rel=1e-10)


def test_bandwidth_interpolates_between_sizes_and_threads():
    middle = math.sqrt(16 * KIB * 256 * KIB)
    sizes = np.array([16 * KIB, middle, 64 * MIB, 1e12, 1.0])
    one = BANDWIDTH.gbps(sizes, np.ones(5))
    assert one.tolist() == pytest.approx([200, 150, 20, 20, 200])
    many = BANDWIDTH.gbps(np.full(3, 256.0 * KIB), np.array([1.5, 2.0, 16.0]))
    assert many.tolist() == pytest.approx([50 * (1 + math.sqrt(2)), 100 * math.sqrt(2), 100 * math.sqrt(2)])


def test_bandwidth_of_a_level():
    assert BANDWIDTH.at("DRAM", 1) == 20
    assert BANDWIDTH.at("L2", 16) == pytest.approx(100 * math.sqrt(2))
    with pytest.raises(KeyError):
        BANDWIDTH.at("L3", 1)


def test_fastest_keeps_each_points_better_reading():
    slower = Bandwidth(
        tuple(replace(p, gbps=p.gbps * (2.0 if i == 1 else 0.5)) for i, p in enumerate(BANDWIDTH.points))
    )
    kept = fastest(BANDWIDTH, slower)
    assert kept.points[1].gbps == 200.0
    assert [p for i, p in enumerate(kept.points) if i != 1] == [p for i, p in enumerate(BANDWIDTH.points) if i != 1]
    assert Bandwidth.from_dict(json.loads(json.dumps(kept.as_dict()))) == kept


def test_code_that_prefetches_gets_the_bandwidth_of_code_that_does() -> None:
    points = (BandwidthPoint(1, 1 << 14, 200.0, "L1", 200.0), BandwidthPoint(1, 1 << 30, 20.0, "DRAM", 10.0))
    coefficients = Coefficients(EXTENDED, dict.fromkeys(PLANTED, 0.0), Bandwidth(points), 1)
    base = call(bytes=1 << 30, working_set_bytes=1 << 30)
    slow, fast = (predict_us(replace(base, prefetched=each), coefficients) for each in (False, True))
    assert slow / fast == pytest.approx((1 / 10 - 1 / 200) / (1 / 20 - 1 / 200))
    older = Bandwidth(tuple(replace(point, unaided_gbps=0.0) for point in points))
    assert predict_us(base, replace(coefficients, bandwidth=older)) == pytest.approx(fast)

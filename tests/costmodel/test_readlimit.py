from __future__ import annotations

import pytest
from lowbit.costmodel.device import Device, detect
from lowbit.costmodel.microbench import Bench
from lowbit.costmodel.microloops import READERS
from lowbit.costmodel.readlimit import ReadLimit, read_limit_gbps


@pytest.fixture(scope="module")
def device() -> Device:
    return detect()


@pytest.fixture(scope="module")
def bench(device: Device) -> Bench:
    return Bench(device, 4 << 20)


@pytest.mark.parametrize(("nbytes", "threads"), [(5000, 1), (100_001, 2), (1 << 20, 2), ((3 << 20) + 77, 1)])
def test_calls_read_what_was_asked_in_whole_steps(device: Device, bench: Bench, nbytes: int, threads: int) -> None:
    limit = ReadLimit(nbytes, threads, device, bench)
    assert set(limit.calls) == set(READERS)
    assert nbytes - 8 * threads * 1024 < limit.nbytes <= max(nbytes, 512 * threads)
    assert limit.region == (bench.address, limit.nbytes)


def test_only_cold_samples_are_chilled(device: Device, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, order = ReadLimit(1 << 20, 1, device, bench), []
    monkeypatch.setattr(limit, "chill", lambda: order.append("chill"))
    limit.calls["stream"] = lambda: order.append("read")
    limit.sample_us("stream", "cold")
    limit.sample_us("stream", "warm")
    assert order == ["chill", "read", "read"]


def test_the_fastest_way_has_the_smallest_median(device: Device, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = ReadLimit(1 << 20, 1, device, bench)
    times = {name: iter([9.0 - rank, 9.0 - rank, 1000.0 * (rank == 0)] * 2) for rank, name in enumerate(limit.calls)}
    monkeypatch.setattr(limit, "sample_us", lambda name, protocol: next(times[name]))
    assert limit.fastest("cold", 3) == list(limit.calls)[-1]
    assert limit.median_us("cold", 3) == 9.0 - len(limit.calls) + 1


def test_the_limit_is_a_bandwidth(device: Device) -> None:
    assert 0.01 < read_limit_gbps(1 << 20, 1, device, rounds=1) < 1e5


@pytest.mark.parametrize(("nbytes", "threads"), [(0, 1), (1 << 20, 0)])
def test_counts_must_be_positive(device: Device, bench: Bench, nbytes: int, threads: int) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        ReadLimit(nbytes, threads, device, bench)

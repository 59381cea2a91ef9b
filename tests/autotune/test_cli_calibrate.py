"""`autotune calibrate` with the measuring replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from lowbit.autotune.cli import autotune
from lowbit.costmodel.bandwidth import Bandwidth, BandwidthPoint
from lowbit.costmodel.calibrate import Calibration
from lowbit.costmodel.device import Device, detect
from lowbit.costmodel.lep import Coefficients, Residual
from lowbit.db.store import Store


def fitted(device: Device, threads: int) -> Calibration:
    bandwidth = Bandwidth(
        (BandwidthPoint(threads, 1 << 14, 80.5, "L1"), BandwidthPoint(threads, 1 << 28, 19.25, "DRAM"))
    )
    two_term = Coefficients("two_term", {"alpha1": 1.25, "alpha2_ns": 0.125}, bandwidth, threads, Residual(0.2, 0.5, 7))
    extended = Coefficients("extended", {"dot_ns": 0.375}, bandwidth, threads, Residual(0.03, 0.0625, 9))
    return Calibration(device, threads, bandwidth, two_term, extended, (), 0.01, 12.5, "compiler 1")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    threads: list[int] = []

    def calibrate(device: Device, count: int) -> Calibration:
        threads.append(count)
        return fitted(device, count)

    monkeypatch.setattr("lowbit.costmodel.calibrate.calibrate", calibrate)
    return threads


def run(*args: str) -> Any:
    result = CliRunner().invoke(autotune, ["calibrate", *args])
    assert result.exit_code == 0, result.output
    return result


def test_the_fit_is_stored_for_its_device_and_threads(tmp_path: Path, asked: list[int]) -> None:
    path = tmp_path / "t.db"
    printed = json.loads(run("--threads", "3", "--db", str(path), "--json").stdout)
    assert asked == [3]
    device = detect()
    with Store.open(path, mode="read") as store:
        stored = store.calibration(device.fingerprint, 3)
        assert store.calibration(device.fingerprint, 2) is None
        assert device.fingerprint in store.devices()
    assert stored is not None
    assert Calibration.from_dict(stored) == fitted(device, 3)
    assert printed == {"db": str(path), **stored}


def test_people_see_bandwidths_coefficients_and_residuals(tmp_path: Path, asked: list[int]) -> None:
    shown = run("--db", str(tmp_path / "t.db")).stdout
    assert asked == [detect().cores]
    for words in ("L1", "80.5", "19.2", "alpha2_ns", "0.125", "dot_ns", "0.375", "0.0625"):
        assert words in shown


def test_the_default_database_lies_in_the_users_data(
    tmp_path: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platformdirs.user_data_dir", lambda *args, **kwargs: str(tmp_path / "data" / "lowbit"))
    run()
    assert (tmp_path / "data" / "lowbit" / "lowbit.db").is_file()


def test_a_foreign_file_is_refused_before_anything_is_measured(tmp_path: Path, asked: list[int]) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database")
    result = CliRunner().invoke(autotune, ["calibrate", "--db", str(path)])
    assert result.exit_code == 5
    assert asked == []
    assert path.read_text() == "not a database"

"""`autotune cache` on files that a process left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from lowbit.autotune.cli import autotune
from lowbit.kernels.cpu.code_files import CACHE_VARIABLE, LIMIT_BYTES, file_name


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    for number in range(3):
        (tmp_path / file_name(bytes([number] * 32))).write_bytes(b"x" * (100 + number))
    (tmp_path / "notes.txt").write_text("not of the cache")
    return tmp_path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(autotune, ["cache", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_info(place: Path) -> None:
    expected = {"directory": str(place), "files": 3, "bytes": 303, "limit_bytes": LIMIT_BYTES}
    assert json.loads(run("info", "--json")) == expected
    assert str(place) in run("info").replace("\n", "")


def test_clear(place: Path) -> None:
    assert json.loads(run("clear", "--json")) == {"directory": str(place), "deleted": 3}
    assert [each.name for each in place.iterdir()] == ["notes.txt"]
    assert run("clear") == "0 compiled kernels deleted\n"


def test_clear_skips_what_it_cannot_delete(place: Path) -> None:
    odd = place / file_name(b"\xff" * 32)
    odd.mkdir()
    result = CliRunner().invoke(autotune, ["cache", "clear", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["deleted"] == 3
    assert result.stderr == f"warning: not deleted: {odd}: it is a directory\n"
    assert sorted(each.name for each in place.iterdir()) == sorted([odd.name, "notes.txt"])


def test_off(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    assert json.loads(run("info", "--json"))["directory"] is None
    assert json.loads(run("clear", "--json"))["deleted"] == 0
    assert len(list(place.iterdir())) == 4
    assert "LOWBIT_CACHE is off" in run("info")

"""The distribution: every package listed, typed, versioned once, and nothing that belongs to one machine."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import lowbit
import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OUTSIDE = {"tests", "examples", "benchmarks", "docs", "build", "dist"}


def test_every_folder_with_an_init_is_a_listed_package() -> None:
    found = {"lowbit"}
    for init in ROOT.rglob("__init__.py"):
        parts = init.relative_to(ROOT).parts[:-1]
        if parts and parts[0] not in OUTSIDE and not any(part.startswith(".") for part in parts):
            found.add(".".join(("lowbit", *parts)))
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_every_module_lies_in_a_package() -> None:
    for module in ROOT.rglob("*.py"):
        parts = module.relative_to(ROOT).parts
        if parts[0] not in OUTSIDE and not any(part.startswith(".") for part in parts):
            assert (module.parent / "__init__.py").exists(), module


def test_the_version_is_said_once() -> None:
    assert PROJECT["project"]["version"] == lowbit.__version__
    assert f"## [{lowbit.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_it_is_typed() -> None:
    assert (ROOT / "py.typed").exists()
    assert PROJECT["tool"]["setuptools"]["package-data"]["lowbit"] == ["py.typed"]


def test_the_command_and_the_compiler_extension_are_entry_points() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="autotune")
    assert callable(command.load())
    extensions = importlib.metadata.entry_points(group="numba_extensions")
    (extension,) = [each for each in extensions if each.value.startswith("lowbit.")]
    assert callable(extension.load())


def tracked() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    place = re.compile(r"(?<![\w.])/(?:home|root|Users|work|workspace|mnt)/[\w.]")
    for path in tracked():
        if path.suffix in {".py", ".md", ".toml", ".txt", ".json", ""} and path != Path(__file__).resolve():
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
                assert not place.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"

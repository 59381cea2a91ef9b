"""Check a wheel from the environment it is installed in: every package is there, importable and typed, and no tests.

Usage: python -I .ci/check_wheel.py dist/lowbit-….whl
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

OF_EXTRAS = ("torch", "transformers")
"""What modules of an extra of their own import when they are imported."""

ROOT = Path(__file__).resolve().parent.parent


def main(wheel: str) -> None:
    names = [PurePosixPath(name) for name in zipfile.ZipFile(wheel).namelist()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["setuptools"]["packages"]

    for package in packages:
        folder = PurePosixPath(*package.split("."))
        sources = {path.name for path in (ROOT / folder.relative_to("lowbit")).glob("*.py")}
        packed = {name.name for name in names if name.parent == folder and name.suffix == ".py"}
        if packed != sources:
            sys.exit(f"{wheel}: {package} differs from the tree in {sorted(packed ^ sources)}")
    if PurePosixPath("lowbit/py.typed") not in names:
        sys.exit(f"{wheel}: py.typed is missing, so type checkers ignore the package")
    strangers = [str(name) for name in names if name.parts[0] != "lowbit" and not name.parts[0].endswith(".dist-info")]
    strangers += [str(name) for name in names if "tests" in name.parts or name.name.startswith(("test_", "conftest"))]
    if strangers:
        sys.exit(f"{wheel}: holds files that do not belong to the package: {', '.join(strangers)}")

    lowbit = importlib.import_module("lowbit")
    if ROOT in Path(str(lowbit.__file__)).resolve().parents and "site-packages" not in str(lowbit.__file__):
        sys.exit(f"lowbit was imported from the tree, {lowbit.__file__}, not from the wheel")
    modules = ["lowbit", *(module.name for module in pkgutil.walk_packages(lowbit.__path__, "lowbit."))]
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name not in OF_EXTRAS:
                raise
    print(f"{Path(wheel).name}: {len(packages)} packages, {len(modules)} modules import")


if __name__ == "__main__":
    main(*sys.argv[1:])

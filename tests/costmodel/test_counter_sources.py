"""Digests that make stored counts stale: they cover every module of the cost model that counting imports."""

import ast
from pathlib import Path

import pytest
from lowbit.costmodel import kernel_counts, tile

ROOM = Path(tile.__file__).parent


def imported(name: str) -> set[str]:
    """The module and all of the room's that it imports, directly or not."""
    found, todo = set(), [name]
    while todo:
        module = todo.pop()
        if module in found:
            continue
        found.add(module)
        for node in ast.walk(ast.parse((ROOM / module).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                todo.append(f"{node.module}.py")
    return found


@pytest.mark.parametrize("module", [tile, kernel_counts], ids=["tile", "kernel"])
def test_a_digest_covers_all_that_counting_imports(module):
    assert set(module.SOURCES) == imported(Path(module.__file__).name)

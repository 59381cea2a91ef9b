"""Documents that stay true: --help texts, links and Python blocks.

`python tests/test_docs.py` rewrites the --help texts in docs/cli.md.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from lowbit.autotune.cli import autotune
from lowbit.kernels import packing

ROOT = Path(__file__).resolve().parent.parent
CLI = ROOT / "docs" / "cli.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_HELP = re.compile(r"```text\n\$ (autotune[a-z ]* --help)\n(.*?)```", re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


def commands(command: click.Command = autotune, path: tuple[str, ...] = ("autotune",)) -> Iterator[tuple[str, ...]]:
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def help_text(line: str) -> str:
    """What ``line``, such as ``autotune db info --help``, prints."""
    result = CliRunner().invoke(autotune, line.split()[1:], prog_name="autotune", terminal_width=100)
    assert result.exit_code == 0, result.output
    return result.output


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_each_command_has_its_help_in_the_document() -> None:
    documented = dict(_HELP.findall(CLI.read_text(encoding="utf-8")))
    assert set(documented) == {" ".join((*path, "--help")) for path in commands()}
    for line, text in documented.items():
        # click breaks lines differently from release to release.
        assert text.split() == help_text(line).split(), f"{line} differs from docs/cli.md: run make docs"


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_links_lead_somewhere(path: Path) -> None:
    for target in _LINK.findall(_FENCED.sub("", path.read_text(encoding="utf-8"))):
        if not target.startswith(("http://", "https://", "#")):
            assert (path.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_python_blocks_parse_and_what_they_import_exists(path: Path) -> None:
    for block in _PYTHON.findall(path.read_text(encoding="utf-8")):
        if block.startswith(">>>"):
            continue
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                for name in node.names:
                    assert hasattr(module, name.name), f"{node.module} has no {name.name}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_examples_print_what_they_say(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_REGISTRY", dict(packing._REGISTRY))
    text = path.read_text(encoding="utf-8")
    examples = "\n".join(block for block in _PYTHON.findall(text) if block.startswith(">>>"))
    test = doctest.DocTestParser().get_doctest(examples, {}, path.name, str(path), 0)
    failures: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=failures.append)
    assert not failures, "".join(failures)


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_shell_blocks_call_the_command_with_options_that_exist(path: Path) -> None:
    for block in re.findall(r"```bash\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("autotune"):
                words = line.partition("#")[0].split()[1:]
                command: click.Command = autotune
                while words and isinstance(command, click.Group) and words[0] in command.commands:
                    command = command.commands[words.pop(0)]
                known = {name for parameter in command.params for name in parameter.opts}
                for word in words:
                    assert not word.startswith("--") or word in known, f"{line}: no option {word}"


def rewrite() -> None:
    """Replace each --help text in docs/cli.md by what the command prints."""
    text = CLI.read_text(encoding="utf-8")
    CLI.write_text(_HELP.sub(lambda m: f"```text\n$ {m[1]}\n{help_text(m[1])}```", text), encoding="utf-8")


if __name__ == "__main__":
    rewrite()

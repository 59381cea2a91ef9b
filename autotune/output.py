"""What commands print: one JSON object, or tables."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from .phases import Phases

_PIPED_WIDTH = 160
"""Columns of a table that goes to a file or pipe, whose width nobody knows."""


def print_json(value: object) -> None:
    """Print ``value`` as one JSON object; infinities and NaN, which JSON lacks, become null."""
    click.echo(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], lines: bool = False) -> None:
    """Print a table.

    Parameters
    ----------
    columns : sequence of str
        Headings; ``>`` in front right-aligns the column.
    rows : sequence of sequences
        Cells, printed with ``str``; None is an empty cell.
    lines : bool
        Whether to rule a line between rows.
    """
    table = Table(show_lines=lines)
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    # rich would wrap a table's own title to the table's width.
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)
    console.print(Text(title, style="bold"))
    console.print(table)


@dataclass(frozen=True)
class Result:
    """What a table of winners says about one."""

    problem: str
    tokens: str
    candidate: str
    provenance: str
    predicted_us: float | None
    median_us: float | None
    speedup: float | None
    bandwidth_share: float | None
    ties: int


def print_winners(title: str, results: Sequence[Result]) -> None:
    """Print winners: a few lines each, so that layouts stay whole on a narrow terminal."""
    rows = []
    for each in results:
        known = (
            ("measured", microseconds(each.median_us), " µs"),
            ("predicted", microseconds(each.predicted_us), " µs"),
            ("vs row-major", times(each.speedup), ""),
            ("of bandwidth", percent(each.bandwidth_share), ""),
            ("ties", str(each.ties) if each.ties else None, ""),
        )
        result = [each.provenance, *(f"{name} {value}{unit}" for name, value, unit in known if value is not None)]
        cells = (f"{each.problem}\n{each.tokens}", each.candidate.replace("; ", "\n"), "\n".join(result))
        rows.append(cells)
    print_table(title, ("problem, length", "winner", "result"), rows, lines=True)


def print_phases(found: Sequence[Phases], names: Mapping[str, str] | None = None) -> None:
    """Say of each problem that has several lengths whether its layout changes with them, and why.

    Parameters
    ----------
    names : mapping of str to str, optional
        What to call devices, by fingerprint, where there are several.
    """
    devices = len({each.device for each in found}) > 1
    for each in found:
        if sum(len(phase.tokens) for phase in each.phases) > 1:
            where = f"{each.problem} on {(names or {}).get(each.device, each.device)}" if devices else each.problem
            click.echo(f"{where}: {each.reason}")


def length_name(problem: str) -> str:
    """What the length of a problem with this key counts: ``tokens``, or ``rows`` of a matrix."""
    return "rows" if problem.startswith("gemv ") else "tokens"


def print_facts(title: str, facts: Mapping[str, object]) -> None:
    """Print nested facts as one line each: ``rows.winners  12``."""
    print_table(title, ("property", "value"), list(_lines(facts, "")))


def _lines(facts: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            yield from _lines({str(number): item for number, item in enumerate(value, 1)}, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{key}", ", ".join(map(str, value))
        elif isinstance(value, float):
            yield f"{prefix}{key}", f"{value:.4g}"
        else:
            yield f"{prefix}{key}", value


def microseconds(value: float | None) -> str | None:
    """``value`` with three significant digits or all those before the point."""
    if value is None:
        return None
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.0%}"


def times(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}×"

"""The bench's table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..output import microseconds, percent, print_facts, print_table, times

PROTOCOLS = {
    "cold": "before each call the operands are evicted from every cache, as a model's other layers do between steps",
    "warm": "the same call again and again, so that what fits the caches stays there",
}
COLUMNS = (
    "implementation",
    "storage",
    ">median µs",
    ">spread",
    ">GB/s",
    ">of limit",
    ">over lowbit",
    ">max error",
)


def print_outcome(report: Mapping[str, Any]) -> None:
    """Print what `lowbit.autotune.bench.outcome.Outcome.as_dict` says."""
    device = report["device"]
    facts = {"device": device.get("description", ""), "threads": report["threads"], "protocol": report["protocol"]}
    print_facts("Bench", {**facts, **{f"version.{name}": text for name, text in report["peers"].items()}})
    print_table(
        f"{report['protocol'].capitalize()}: {PROTOCOLS[report['protocol']]}", ("case", *COLUMNS), table_rows(report)
    )


def table_rows(report: Mapping[str, Any]) -> list[tuple[object, ...]]:
    """Cells of each row, in groups of one case that begin with the limit. Formats that a peer lacks are left out."""
    limits = {_where(point): point for point in report["limit"]["cases"]}
    ratios = {(_where(each), each["peer"]): each["ratio"] for each in report["ratios"]}
    cells: list[tuple[object, ...]] = []
    for where, rows in grouped(report["rows"]):
        heading = where
        if where in limits:
            point = limits[where]
            numbers = microseconds(point["median_us"]), percent(point["spread"]), f"{point['gbps']:.1f}"
            cells.append((heading, "the limit", "", *numbers, "", "", ""))
            heading = ""
        for row in rows:
            if row["status"] == "unsupported":
                continue
            cells.append((heading, *_cells(row, ratios.get((where, row["impl"])))))
            heading = ""
    return cells


def _cells(row: Mapping[str, Any], ratio: float | None) -> tuple[object, ...]:
    error = None if row["max_rel_error"] is None else f"{row['max_rel_error']:.2g}"
    if row["median_us"] is None:
        return row["impl"], row["storage"], row["status"], "", "", "", "", error
    return (
        row["impl"],
        row["storage"],
        microseconds(row["median_us"]),
        percent(row["spread"]),
        f"{row['gbps']:.1f}",
        percent(row["limit_share"]),
        times(ratio),
        error,
    )


def grouped(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Rows by case, in order."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(_where(row), []).append(row)
    return list(groups.items())


def _where(row: Mapping[str, Any]) -> str:
    """A case in words; the same for rows, limits and ratios."""
    if "columns" in row:
        several = f" × {row['vectors']}" if row["vectors"] > 1 else ""
        name = f"{row['name']}, " if row["name"] else ""
        return f"{name}{row['rows']} × {row['columns']}{several}, {row['kv']}"
    several = f", {row['query_rows']} rows" if row["query_rows"] > 1 else ""
    return f"{row['tokens']:,} tokens, {row['kv']}{several}"

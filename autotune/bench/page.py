"""The results in docs/performance.md, written from stored reports of `autotune bench`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...kernels.errors import LowbitError
from .chart import Panel, Series, chart
from .table import COLUMNS, PROTOCOLS, table_rows

BEGIN, END = "<!-- results: written by autotune bench report -->", "<!-- end of results -->"
LIMIT_NAME = "the limit"

Report = Mapping[str, Any]


def write_page(data: Path, page: Path) -> list[Path]:
    """Rewrite what lies between `BEGIN` and `END` in ``page``, and the charts beside the reports.

    Parameters
    ----------
    data : Path
        Directory of reports, ``*.json``, in the order of their names.
    page : Path
        A document with both marks.

    Returns
    -------
    list of Path
        What was written.

    Raises
    ------
    LowbitError
        If there are no reports, one is none, or the page has no marks.
    """
    reports = {path: _read(path) for path in sorted(data.glob("*.json"), key=lambda path: path.stem)}
    if not reports:
        raise LowbitError(
            f"{data} holds no *.json reports: run autotune bench attention --json > {data}/attention.json"
        )
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise LowbitError(f"{page} needs one line {BEGIN} and one line {END}")
    written, sections = [page], []
    for path, report in reports.items():
        charts = {name: svg for name, svg in _charts(report).items() if svg}
        for name, svg in charts.items():
            target = path.with_name(f"{path.stem}-{name}.svg")
            target.write_text(svg, encoding="utf-8")
            written.append(target)
        links = {name: f"{data.name}/{path.stem}-{name}.svg" for name in charts}
        sections.append(section(report, links))
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n" + "\n".join(sections) + f"\n{END}{after}", encoding="utf-8")
    return written


def _read(path: Path) -> Report:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if {"rows", "limit", "ratios", "peers", "device", "protocol"} <= set(report):
            return report  # type: ignore[no-any-return]
    except (ValueError, TypeError):
        pass
    raise LowbitError(f"{path} is no report of autotune bench")


def section(report: Report, charts: Mapping[str, str]) -> str:
    """One report in Markdown, with links to its charts."""
    gemv = "columns" in report["rows"][0]
    several = {row["vectors" if gemv else "query_rows"] for row in report["rows"]}
    many = f", {max(several)} {'vectors' if gemv else 'query rows'}" if max(several) > 1 else ""
    title = f"{'Matrix times vector' if gemv else 'Decode attention'}{many}, {report['protocol']}"
    lines = [f"## {title}", "", f"{report['device'].get('description', 'This device')}; {report['threads']} threads."]
    lines += [f"{report['protocol'].capitalize()}: {PROTOCOLS[report['protocol']]}.", ""]
    if not gemv:
        row = report["rows"][0]
        lines += [
            f"{row['heads']} query heads share {row['kv_heads']} key/value heads of {row['head_dim']} channels.",
            "",
        ]
    lines += [f"![{name} chart]({target})" for name, target in charts.items()]
    lines += [""] if charts else []
    lines += _markdown(("case", *COLUMNS), table_rows(report))
    lines += ["", "Versions: " + "; ".join(f"{name} {text}" for name, text in report["peers"].items()) + ".", ""]
    return "\n".join(lines)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    def line(cells: Sequence[object]) -> str:
        texts = ("" if cell is None else str(cell).replace("|", "\\|") for cell in cells)
        return f"| {' | '.join(texts)} |"

    rule = ["--:" if column.startswith(">") else "---" for column in columns]
    return [line([column.removeprefix(">") for column in columns]), f"|{'|'.join(rule)}|", *map(line, rows)]


def _charts(report: Report) -> dict[str, str]:
    if "columns" in report["rows"][0]:
        return {"roofline": roofline(report)}
    return {"context": context(report), "roofline": roofline(report)}


def context(report: Report) -> str:
    """Time over the context length, a panel for each format; empty if there is only one length."""
    rows = [row for row in report["rows"] if row["median_us"] is not None]
    if len({row["tokens"] for row in rows}) < 2:
        return ""
    panels = []
    for kv in dict.fromkeys(row["kv"] for row in rows):
        limit = [(p["tokens"], p["median_us"]) for p in report["limit"]["cases"] if p["kv"] == kv]
        lines = [Series(LIMIT_NAME, tuple(sorted(limit)), dashed=True)] if limit else []
        for impl in dict.fromkeys(row["impl"] for row in rows):
            points = sorted((row["tokens"], row["median_us"]) for row in rows if (row["impl"], row["kv"]) == (impl, kv))
            if points:
                lines.append(Series(impl, tuple(points)))
        panels.append(Panel(kv, tuple(lines)))
    return chart(
        panels, "tokens", "µs a call", lambda tokens: f"{tokens / 1024:g}K" if tokens >= 1024 else f"{tokens:g}"
    )


def roofline(report: Report) -> str:
    """Operations a second over operations a byte, under the slope of the read bandwidth."""
    bandwidth = report["limit"]["gbps"]
    series: dict[str, list[tuple[float, float]]] = {}
    for row in report["rows"]:
        if row["median_us"] is not None:
            operations = _operations(row)
            point = operations / row["bytes"], operations / row["median_us"] / 1e3
            series.setdefault(row["impl"], []).append(point)
    if bandwidth is None or not series:
        return ""
    xs = [x for points in series.values() for x, _ in points]
    ends = min(xs) / 1.3, max(xs) * 1.3
    slope = Series(LIMIT_NAME, tuple((x, x * bandwidth) for x in ends), dashed=True)
    points = [Series(impl, tuple(found), joined=False) for impl, found in series.items()]
    return chart([Panel("roofline", (slope, *points))], "operations a byte", "Gop/s", lambda x: f"{x:.2g}")


def _operations(row: Mapping[str, Any]) -> int:
    """Multiplications and additions of a row's case."""
    if "columns" in row:
        return int(2 * row["rows"] * row["columns"] * row["vectors"])
    return int(4 * row["heads"] * row["query_rows"] * row["head_dim"] * row["tokens"])

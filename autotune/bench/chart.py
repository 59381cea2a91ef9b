"""Charts with logarithmic axes as SVG text: panels side by side that share an ordinate and a legend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

PANEL_WIDTH, PANEL_HEIGHT = 250, 260
LEFT, TOP, GAP, BOTTOM, LEGEND = 64, 34, 18, 52, 150
COLOURS = ("#0b6e4f", "#c1440e", "#1f5fa8", "#8e44ad", "#7a6a00", "#444444", "#b03060")
MARGIN = 1.15
"""Factor by which an axis reaches past its outermost points."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A named line or, with ``joined`` false, points; both coordinates are positive."""

    name: str
    points: tuple[Point, ...]
    joined: bool = True
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class _Axis:
    """A logarithmic axis from ``low`` to ``high`` over ``size`` pixels that begin at ``start``."""

    low: float
    high: float
    start: float
    size: float

    def at(self, value: float) -> float:
        return self.start + self.size * math.log(value / self.low) / math.log(self.high / self.low)


def chart(panels: Sequence[Panel], abscissa: str, ordinate: str, label: Callable[[float], str]) -> str:
    """The SVG document.

    Parameters
    ----------
    panels : sequence of Panel
        At least one point in all.
    abscissa, ordinate : str
        What the axes show, with units.
    label : callable
        How a place on the abscissa is written; its ticks are the points' own.
    """
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))
    points = [point for panel in panels for series in panel.series for point in series.points]
    xs, ys = sorted({x for x, _ in points}), [y for _, y in points]
    ticks = sorted({x for panel in panels for each in panel.series if not each.dashed for x, _ in each.points})
    low, high = min(ys) / MARGIN, max(ys) * MARGIN
    width = LEFT + len(panels) * (PANEL_WIDTH + GAP) + LEGEND
    height = TOP + PANEL_HEIGHT + BOTTOM
    vertical = _Axis(low, high, TOP + PANEL_HEIGHT, -PANEL_HEIGHT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="14" y="{TOP + PANEL_HEIGHT / 2:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 14 {TOP + PANEL_HEIGHT / 2:.0f})">{escape(ordinate)}</text>',
    ]
    for index, panel in enumerate(panels):
        left = LEFT + index * (PANEL_WIDTH + GAP)
        horizontal = _Axis(xs[0] / MARGIN, xs[-1] * MARGIN, left, PANEL_WIDTH)
        parts += _frame(panel.title, left, horizontal, vertical, _spaced(ticks, horizontal), label, index == 0)
        parts += [line for series in panel.series for line in _drawn(series, names, horizontal, vertical)]
        middle = left + PANEL_WIDTH / 2
        parts.append(f'<text x="{middle:.0f}" y="{height - 12}" text-anchor="middle">{escape(abscissa)}</text>')
    parts += _legend(names, width - LEGEND + 8)
    return "\n".join([*parts, "</svg>\n"])


def _frame(
    title: str,
    left: float,
    horizontal: _Axis,
    vertical: _Axis,
    ticks: Sequence[float],
    label: Callable[[float], str],
    numbered: bool,
) -> list[str]:
    bottom = TOP + PANEL_HEIGHT
    parts = [
        f'<rect x="{left}" y="{TOP}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{left + PANEL_WIDTH / 2:.0f}" y="{TOP - 10}" text-anchor="middle" font-weight="bold">'
        f"{escape(title)}</text>",
    ]
    for exponent in range(math.ceil(math.log10(vertical.low)), math.floor(math.log10(vertical.high)) + 1):
        y = vertical.at(10.0**exponent)
        parts.append(f'<path d="M{left} {y:.1f}h{PANEL_WIDTH}" stroke="#ddd"/>')
        if numbered:
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**exponent:,g}</text>')
    for value in ticks:
        x = horizontal.at(value)
        parts.append(f'<path d="M{x:.1f} {bottom}v4" stroke="#999"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{escape(label(value))}</text>')
    return parts


def _spaced(values: Sequence[float], axis: _Axis, pixels: float = 34) -> list[float]:
    """Those of ``values`` that leave room for each other's labels, the last one among them."""
    kept: list[float] = []
    for value in reversed(values):
        if not kept or axis.at(kept[-1]) - axis.at(value) >= pixels:
            kept.append(value)
    return kept


def _drawn(series: Series, names: Sequence[str], horizontal: _Axis, vertical: _Axis) -> list[str]:
    colour = COLOURS[names.index(series.name) % len(COLOURS)]
    places = [(horizontal.at(x), vertical.at(y)) for x, y in series.points]
    parts = []
    if series.joined and len(places) > 1:
        way = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dash = ' stroke-dasharray="5 3"' if series.dashed else ""
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
    if not series.dashed:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    return parts


def _legend(names: Sequence[str], left: float) -> list[str]:
    parts = []
    for index, name in enumerate(names):
        y, colour = TOP + 12 + 18 * index, COLOURS[index % len(COLOURS)]
        parts.append(f'<path d="M{left} {y}h16" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{left + 22}" y="{y + 4}">{escape(name)}</text>')
    return parts

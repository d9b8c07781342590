"""Curves as SVG, drawn by matplotlib. Text stays text, and colours are those of the style sheet, light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure  # without pyplot, which would open windows and keep figures
from matplotlib.ticker import FuncFormatter, MaxNLocator

from covey.config.fields import printable
from covey.tracking.curve import smooth
from covey.tracking.report.html import Html

COLORS = 8  # of the style sheet
MOST_POINTS = 300  # of a line; longer ones are averaged over equal parts
_INK, _MUTED, _GRID = "#010101", "#010102", "#010103"  # placeholders of the colours
_VARIABLES = {_INK: "var(--ink)", _MUTED: "var(--muted)", _GRID: "var(--grid)"}
_SERIES = [f"#0102{place:02x}" for place in range(COLORS)]
_VARIABLES |= {color: f"var(--s{place + 1})" for place, color in enumerate(_SERIES)}
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "covey",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
}
_SVG = "{http://www.w3.org/2000/svg}"
_DROPPED = {"metadata", "title", "style"}


@dataclass(frozen=True)
class Line:
    """A metric of a run."""

    x: Sequence[float]
    y: Sequence[float]
    color: int = 0  # place among the colours of the style sheet
    points: bool = False  # few values, each with a mark; otherwise noisy ones, with their running mean
    exact: bool = False  # values without noise, such as those of a schedule, which no mean may round off


@dataclass(frozen=True)
class Interval:
    """A score with its 95 % interval."""

    x: float
    score: float
    low: float | None
    high: float | None
    color: int = 1


@dataclass(frozen=True)
class Axes:
    """The axes of a chart."""

    x_label: str = ""
    tick: Callable[[float], str] | None = None
    limits: tuple[float | None, float | None] = (None, None)
    level: float | None = None  # a dashed line


def chart(
    lines: Sequence[Line], axes: Axes, size: tuple[float, float], name: str, intervals: Sequence[Interval] = ()
) -> Html:
    """A chart of some lines.

    Args:
        size: width and height in points; the text has 9 points.
        name: description for readers who do not see the chart; unique in the page.
    """
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), dpi=72, layout="constrained")
        figure.patch.set_visible(False)
        drawn = figure.add_subplot()
        drawn.patch.set_visible(False)
        for line in lines:
            _draw(drawn, line)
        for interval in intervals:
            _draw_interval(drawn, interval)
        if axes.level is not None:
            drawn.axhline(axes.level, color=_MUTED, linewidth=1, linestyle=(0, (5, 4)), zorder=1)
        _decorate(drawn, axes)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(buffer.getvalue(), name)


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """A line of at most `MOST_POINTS` points, each the mean of an equal part of the values."""
    count = min(len(x), MOST_POINTS)
    edges = [round(place * len(x) / count) for place in range(count + 1)] if count else [0]
    parts = list(pairwise(edges))
    return [sum(x[a:b]) / (b - a) for a, b in parts], [sum(y[a:b]) / (b - a) for a, b in parts]


def _draw(drawn: matplotlib.axes.Axes, line: Line) -> None:
    color = _SERIES[line.color % COLORS]
    if line.points:
        drawn.plot(line.x, line.y, "o-", color=color, markersize=4, linewidth=1, zorder=4)
        return
    x, y = thinned(line.x, line.y)
    if line.exact:
        drawn.plot(x, y, color=color, linewidth=2, zorder=3)
        return
    drawn.plot(x, y, color=color, linewidth=0.9, alpha=0.35, zorder=2, marker="o" if len(x) == 1 else None)
    drawn.plot(x, smooth(y), color=color, linewidth=2, solid_capstyle="round", zorder=3)


def _draw_interval(drawn: matplotlib.axes.Axes, of: Interval) -> None:
    color = _SERIES[of.color % COLORS]
    if of.low is not None and of.high is not None:
        drawn.plot([of.x] * 2, [of.low, of.high], color=color, linewidth=2, zorder=5, marker="_", markersize=8)
    drawn.plot([of.x], [of.score], "o", color=color, markersize=7, zorder=6)


def _decorate(drawn: matplotlib.axes.Axes, axes: Axes) -> None:
    drawn.grid(axis="y", color=_GRID, linewidth=0.8)
    drawn.set_axisbelow(True)
    drawn.tick_params(colors=_MUTED, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        drawn.spines[side].set_visible(False)
    drawn.spines["bottom"].set_color(_GRID)
    drawn.set_xlabel(axes.x_label, color=_MUTED, fontsize=9)
    drawn.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5, steps=[1, 2, 5, 10]))
    drawn.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _x_tick(value)))
    drawn.yaxis.set_major_locator(MaxNLocator(nbins=5))
    tick = axes.tick or (lambda value: f"{value:,.4g}")
    drawn.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    drawn.set_ylim(*axes.limits)


def _x_tick(value: float) -> str:
    return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"


def _inline(svg: bytes, name: str) -> Html:
    """An SVG of matplotlib for a page: without metadata and fixed size, its ids unique, its colours variables."""
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.removeprefix(_SVG) in _DROPPED or not isinstance(child.tag, str):
                parent.remove(child)
    document = ElementTree.tostring(root, encoding="unicode")
    used = set(re.findall(r"(?:url\(#|href=\"#)([\w.-]+)", document))
    prefix = "x" + re.sub(r"\W+", "-", name)
    for node in root.iter():
        node.tag = node.tag.removeprefix(_SVG)
        identity = node.attrib.pop("id", None)
        if identity in used:
            node.set("id", f"{prefix}-{identity}")
        for key, value in list(node.attrib.items()):
            del node.attrib[key]
            key = re.sub(r"\{.*\}", "", key)
            value = value.replace("url(#", f"url(#{prefix}-")
            node.set(key, f"#{prefix}-{value[1:]}" if key == "href" else value)
    for attribute in ("width", "height", "version", "xmlns"):
        root.attrib.pop(attribute, None)
    root.set("role", "img")
    root.set("aria-label", printable(name))
    document = ElementTree.tostring(root, encoding="unicode")
    return Html(re.sub(r"#01[0-9a-f]{4}\b", lambda found: _VARIABLES.get(found[0], found[0]), document))

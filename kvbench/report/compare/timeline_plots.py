"""Plots of a history as inline SVG: one per metric, one line per cell."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from kvbench.compare.history import History, Line
from kvbench.metrics.collect import METRICS
from kvbench.render.numbers import one_line
from kvbench.render.svg import COLOURS, INK, colour, drawn, mark, marker, xy
from kvbench.report.figures.canvas import canvas, grid_lines

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes

_MOST_LINES = 12  # of one plot; more cannot be told apart


@dataclass(frozen=True)
class Plot:
    """legend: (mark, colour, name) of each line."""

    title: str
    svg: Markup
    legend: tuple[tuple[str, int, str], ...]


def plots(result: History) -> list[Plot]:
    """The plots of all lines with at least two values. Equal histories give equal bytes."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in result.lines:
        if sum(_known(point.row.value) is not None for point in line.points) > 1:
            groups.setdefault((line.metric, line.variant), []).append(line)
    found: list[Plot] = []
    for (metric, variant), lines in groups.items():
        for start in range(0, len(lines), _MOST_LINES):
            some = lines[start : start + _MOST_LINES]
            found.append(_plot(result, metric, variant, some, f"history{len(found)}"))
    return found


def _plot(result: History, metric: str, variant: str, lines: list[Line], key: str) -> Plot:
    from markupsafe import Markup

    title = one_line(" of ".join(filter(None, (metric, variant))), 120)
    with canvas(2.9) as figure:
        panel = figure.subplots()
        for i, line in enumerate(lines):
            _draw(panel, i, line, (i - (len(lines) - 1) / 2) * min(0.06, 0.6 / len(lines)))
        panel.set_xticks(range(len(result.runs)), [run.name for run in result.runs])
        panel.set_xlim(-0.5, len(result.runs) - 0.5)
        unit = METRICS[metric].unit
        panel.set_ylabel(metric if unit.bare else f"{metric} ({unit})")
        grid_lines(panel, "y")
        svg = drawn(figure, key, f"{title} over the runs; a line breaks where runs are not comparable")
    legend = tuple((mark(i), i % COLOURS, one_line(line.place, 80)) for i, line in enumerate(lines))
    return Plot(title, Markup(svg), legend)


def _draw(panel: Axes, i: int, line: Line, shift: float) -> None:
    paint = colour(i)
    for segment in line.segments:
        known = [(p.run + shift, y, p.row) for p in segment if (y := _known(p.row.value)) is not None]
        points = [(x, y) for x, y, _ in known]
        panel.plot(*xy(points), color=paint, marker=marker(i), markersize=5, linewidth=1.2)
        for x, _, row in known:
            low, high = _known(row.low), _known(row.high)
            if low is not None and high is not None:
                panel.vlines(x, low, high, color=paint, linewidth=1.4)
    rings = [(p.run + shift, y) for p in line.points if p.changed and (y := _known(p.row.value)) is not None]
    panel.plot(*xy(rings), "o", markersize=13, markerfacecolor="none", markeredgecolor=INK)


def _known(value: float | None) -> float | None:
    """The value if it is finite, else None."""
    return value if value is not None and isfinite(value) else None

"""Plots of a history as inline SVG: one a metric, one line a cell, in the way of `kvbench.report.figures.plots`."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from kvbench.compare.history import History, Line
from kvbench.metrics.collect import METRICS
from kvbench.render.numbers import one_line
from kvbench.render.svg import COLOURS, INK, RC, colour, drawn, mark, marker

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes

_MOST_LINES = 12  # of a plot: more can be told apart by nobody


@dataclass(frozen=True)
class Plot:
    """svg: the drawing; legend: (mark, colour, name) of each line; title: what is drawn."""

    title: str
    svg: Markup
    legend: tuple[tuple[str, int, str], ...]


def plots(result: History) -> list[Plot]:
    """Equal histories give equal bytes. Lines with one value only are left to the tables."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in result.lines:
        if sum(_known(point.row.value) is not None for point in line.points) > 1:
            groups.setdefault((line.metric, line.variant), []).append(line)
    found: list[Plot] = []
    for (metric, variant), lines in groups.items():
        for start in range(0, len(lines), _MOST_LINES):
            found.append(
                _plot(result, metric, variant, lines[start : start + _MOST_LINES], f"history{len(found)}")
            )
    return found


def _plot(result: History, metric: str, variant: str, lines: list[Line], key: str) -> Plot:
    import matplotlib
    from markupsafe import Markup
    from matplotlib.figure import Figure

    title = one_line(" of ".join(filter(None, (metric, variant))), 120)
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(8.2, 2.9), layout="constrained")
        panel = figure.subplots()
        for i, line in enumerate(lines):
            _draw(panel, i, line, (i - (len(lines) - 1) / 2) * min(0.06, 0.6 / len(lines)))
        panel.set_xticks(range(len(result.runs)), [run.name for run in result.runs])
        panel.set_xlim(-0.5, len(result.runs) - 0.5)
        unit = METRICS[metric].unit
        panel.set_ylabel(metric if unit.bare else f"{metric} ({unit})")
        panel.grid(axis="y")
        panel.tick_params(length=0)
        svg = drawn(figure, key, f"{title} over the runs; a line breaks where runs are unlike")
    legend = tuple((mark(i), i % COLOURS, one_line(line.place, 80)) for i, line in enumerate(lines))
    return Plot(title, Markup(svg), legend)


def _draw(panel: Axes, i: int, line: Line, aside: float) -> None:
    paint, sign = colour(i), marker(i)
    for segment in line.segments:
        known = [
            (point.run + aside, y, point.row)
            for point in segment
            if (y := _known(point.row.value)) is not None
        ]
        panel.plot(
            [x for x, _, _ in known],
            [y for _, y, _ in known],
            color=paint,
            marker=sign,
            markersize=5,
            linewidth=1.2,
        )
        for x, _, row in known:
            low, high = _known(row.low), _known(row.high)
            if low is not None and high is not None:
                panel.vlines(x, low, high, color=paint, linewidth=1.4)
    for point in line.points:
        y = _known(point.row.value)
        if point.changed and y is not None:
            panel.plot(
                [point.run + aside], [y], "o", markersize=13, markerfacecolor="none", markeredgecolor=INK
            )


def _known(value: float | None) -> float | None:
    """None for what was not measured and for what is no number."""
    return value if value is not None and isfinite(value) else None

"""The history of stored runs on a console, as JSON, Markdown and HTML: one table and plot per metric."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kvbench.compare.history import History, Line, Point
from kvbench.compare.result import BETTER, WORSE
from kvbench.metrics.collect import METRICS
from kvbench.render import svg
from kvbench.render.numbers import finite, one_line, shown_row
from kvbench.report.compare import two_runs
from kvbench.report.console import Printer
from kvbench.report.html import page
from kvbench.report.json import strict
from kvbench.report.markdown import escaped, table
from kvbench.report.sections.checks import count

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes

_MOST_LINES = 12  # of one plot; more cannot be told apart
_MARKS = {WORSE: "▼ worse", BETTER: "▲ better"}
_TONES = {WORSE: "fail", BETTER: "pass"}
_HEADS = ("Run", "Value", "n", "Change", "Note")


@dataclass(frozen=True)
class PointLine:
    """cells: run, value, n, "▼ worse", "▲ better" or "", and the change or why the line breaks."""

    cells: tuple[str, ...]
    tone: str


@dataclass(frozen=True)
class Block:
    """One line of the history. title: `itl_ratio: int8_sym batch 1 context 512`."""

    title: str
    rows: tuple[PointLine, ...]


@dataclass(frozen=True)
class Plot:
    """legend: (mark, colour, name) of each line."""

    title: str
    svg: Markup
    legend: tuple[tuple[str, int, str], ...]


def title_of(line: Line) -> str:
    return one_line(f"{' of '.join(filter(None, (line.metric, line.variant)))}: {line.place}")


def blocks(result: History) -> list[Block]:
    names = [run.name for run in result.runs]
    lines = ((line, (_point_line(names, point) for point in line.points)) for line in result.lines)
    return [Block(title_of(line), tuple(rows)) for line, rows in lines]


def _point_line(names: Sequence[str], point: Point) -> PointLine:
    number = shown_row(point.row)
    outcome = point.change.outcome if point.change else ""
    mark, note = _MARKS.get(outcome, ""), ""
    if point.change and mark:
        note = point.change.sentence
    elif point.broken:
        note = f"not comparable with the run before: {'; '.join(point.broken)}"
    elif point.row.value is None:
        note = point.row.note
    unit = f" {number.shown_unit}" if number.shown_unit else ""
    value = f"{number.text}{unit} {number.interval}".strip()
    tone = _TONES.get(outcome, "partial" if point.broken else "")
    return PointLine((names[point.run], value, number.n, mark, one_line(note)), tone)


def headline(result: History) -> str:
    """`3 runs, 24 lines; 1 worse, 0 better; 2 breaks where runs are not comparable.`"""
    outcomes = [point.change.outcome for _, point in result.changes if point.change]
    breaks = sum(bool(point.broken) for line in result.lines for point in line.points)
    lines = count(len(result.lines), "line")
    text = f"{len(result.runs)} runs, {lines}; {outcomes.count(WORSE)} worse, {outcomes.count(BETTER)} better"
    return f"{text}; {count(breaks, 'break')} where runs are not comparable." if breaks else f"{text}."


def show(result: History, paths: Sequence[Path] = (), file: TextIO | None = None) -> None:
    """Print the history to a console. paths: files that were written."""
    out = Printer(file or sys.stdout)
    two_runs.print_heading(out, result)
    for block in blocks(result):
        out.title(block.title)
        out.table(_HEADS, [(row.cells, "") for row in block.rows])
    out.lines([*paths, headline(result)])


def as_json(result: History) -> dict[str, Any]:
    """Keys: runs, faults, named, lines (metric, variant, place, segments of points), changes. Strict JSON."""
    names = [run.name for run in result.runs]
    lines = [
        {
            **{key: getattr(line, key) for key in ("metric", "variant", "place")},
            "segments": [[_point(names, point) for point in segment] for segment in line.segments],
        }
        for line in result.lines
    ]
    changes = [
        {"line": title_of(line), **two_runs.finding_json(point.change)}
        for line, point in result.changes
        if point.change
    ]
    return {**two_runs.heading_json(result), "lines": lines, "changes": changes}


def _point(names: Sequence[str], point: Point) -> dict[str, Any]:
    row = point.row
    keys = ("value", "low", "high", "n", "unit", "partial", "note")
    values: dict[str, Any] = strict({key: getattr(row, key) for key in keys})
    change = {"broken": list(point.broken), "change": point.change.outcome if point.change else None}
    return {"run": names[point.run], "cell": row.cell, **values, **change}


def as_markdown(result: History) -> str:
    text = ["## History", "", escaped(headline(result)), "", *two_runs.heading_markdown(result)]
    for block in blocks(result):
        rows = [tuple(map(escaped, row.cells)) for row in block.rows]
        text += [f"### {escaped(block.title)}", "", table(_HEADS, rows), ""]
    return "\n".join(text)


def as_html(result: History) -> str:
    changes = [f"{title_of(line)}. {point.change.sentence}" for line, point in result.changes if point.change]
    return page(
        "timeline.html.j2",
        **two_runs.heading_html(result),
        headline=headline(result),
        changes=changes,
        plots=plots(result),
        blocks=blocks(result),
    )


def plots(result: History) -> list[Plot]:
    """The plots of all lines with at least two values. Equal histories give equal bytes."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in result.lines:
        if sum(finite(point.row.value) is not None for point in line.points) > 1:
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
    with svg.canvas(2.9) as figure:
        panel = figure.subplots()
        for i, line in enumerate(lines):
            _draw(panel, i, line, (i - (len(lines) - 1) / 2) * min(0.06, 0.6 / len(lines)))
        panel.set_xticks(range(len(result.runs)), [run.name for run in result.runs])
        panel.set_xlim(-0.5, len(result.runs) - 0.5)
        unit = METRICS[metric].unit
        panel.set_ylabel(metric if unit.bare else f"{metric} ({unit})")
        svg.grid_lines(panel, "y")
        drawn = svg.drawn(figure, key, f"{title} over the runs; a line breaks where runs are not comparable")
    legend = tuple((svg.mark(i), i % svg.COLOURS, one_line(line.place, 80)) for i, line in enumerate(lines))
    return Plot(title, Markup(drawn), legend)


def _draw(panel: Axes, i: int, line: Line, shift: float) -> None:
    paint = svg.colour(i)
    for segment in line.segments:
        known = [(p.run + shift, y, p.row) for p in segment if (y := finite(p.row.value)) is not None]
        points = [(x, y) for x, y, _ in known]
        panel.plot(*svg.xy(points), color=paint, marker=svg.marker(i), markersize=5, linewidth=1.2)
        for x, _, row in known:
            low, high = finite(row.low), finite(row.high)
            if low is not None and high is not None:
                panel.vlines(x, low, high, color=paint, linewidth=1.4)
    rings = [(p.run + shift, y) for p in line.points if p.changed and (y := finite(p.row.value)) is not None]
    panel.plot(*svg.xy(rings), "o", markersize=13, markerfacecolor="none", markeredgecolor=svg.INK)

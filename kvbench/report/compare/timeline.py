"""The history of stored runs on a console, as JSON, Markdown and HTML: one table and plot per metric."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kvbench.compare.history import History, Line, Point
from kvbench.compare.result import BETTER, WORSE
from kvbench.render.numbers import one_line, shown_row
from kvbench.report.compare import heading
from kvbench.report.compare.two_runs import finding_json
from kvbench.report.json import strict
from kvbench.report.markdown import escaped, table
from kvbench.report.sections.wording import count
from kvbench.report.standalone import page

_MARKS = {WORSE: "▼ worse", BETTER: "▲ better"}
_TONES = {WORSE: "fail", BETTER: "pass"}
_HEADS = ("Run", "Value", "n", "Change", "Note")


@dataclass(frozen=True)
class PointLine:
    """One point as text. mark: "▼ worse", "▲ better" or ""; note: the change, or why the line is
    interrupted.
    """

    run: str
    value: str
    n: str
    mark: str
    note: str
    tone: str

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.run, self.value, self.n, self.mark, self.note)


@dataclass(frozen=True)
class Block:
    """One line of the history. title: `itl_ratio: int8_sym batch 1 context 512`."""

    title: str
    rows: tuple[PointLine, ...]


def title_of(line: Line) -> str:
    return one_line(f"{' of '.join(filter(None, (line.metric, line.variant)))}: {line.place}")


def blocks(result: History) -> list[Block]:
    names = [run.name for run in result.runs]
    return [
        Block(title_of(line), tuple(_point_line(names, point) for point in line.points))
        for line in result.lines
    ]


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
    return PointLine(names[point.run], value, number.n, mark, one_line(note), tone)


def headline(result: History) -> str:
    """`3 runs, 24 lines; 1 worse, 0 better; 2 breaks where runs are not comparable.`"""
    outcomes = [point.change.outcome for _, point in result.changes if point.change]
    breaks = sum(bool(point.broken) for line in result.lines for point in line.points)
    lines = count(len(result.lines), "line")
    text = f"{len(result.runs)} runs, {lines}; {outcomes.count(WORSE)} worse, {outcomes.count(BETTER)} better"
    return f"{text}; {count(breaks, 'break')} where runs are not comparable." if breaks else f"{text}."


def show(result: History, paths: Sequence[Path] = (), file: TextIO | None = None) -> None:
    """Print the history to a console. paths: files that were written."""
    from rich.text import Text

    from kvbench.report.console import console_for

    file = file or sys.stdout
    console = console_for(file)
    heading.print_heading(console, result)
    for block in blocks(result):
        console.print()
        heading.print_lines(console, [block.title], "bold")
        out = heading.console_table(_HEADS, file)
        for row in block.rows:
            out.add_row(*map(Text, row.cells))
        console.print(out)
    heading.print_lines(console, [*paths, headline(result)])


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
        {"line": title_of(line), **finding_json(point.change)}
        for line, point in result.changes
        if point.change
    ]
    return {**heading.as_json(result), "lines": lines, "changes": changes}


def _point(names: Sequence[str], point: Point) -> dict[str, Any]:
    row = point.row
    keys = ("value", "low", "high", "n", "unit", "partial", "note")
    values: dict[str, Any] = strict({key: getattr(row, key) for key in keys})
    outcome = point.change.outcome if point.change else None
    return {
        "run": names[point.run],
        "cell": row.cell,
        **values,
        "broken": list(point.broken),
        "change": outcome,
    }


def as_markdown(result: History) -> str:
    text = ["## History", "", escaped(headline(result)), "", *heading.as_markdown(result)]
    for block in blocks(result):
        rows = [tuple(map(escaped, row.cells)) for row in block.rows]
        text += [f"### {escaped(block.title)}", "", table(_HEADS, rows), ""]
    return "\n".join(text)


def as_html(result: History) -> str:
    from kvbench.report.compare.timeline_plots import plots

    changes = [f"{title_of(line)}. {point.change.sentence}" for line, point in result.changes if point.change]
    return page(
        "timeline.html.j2",
        **heading.html_values(result),
        headline=headline(result),
        changes=changes,
        plots=plots(result),
        blocks=blocks(result),
    )

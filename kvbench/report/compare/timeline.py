"""The history of stored runs on a console, as JSON, Markdown and HTML: a table a metric, a row a run, a plot a metric."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kvbench.compare.history import History, Line, Point
from kvbench.compare.result import BETTER, WORSE
from kvbench.render.numbers import one_line, shown_row
from kvbench.report.compare.two_runs import faults_of, finding_json, head_json, notes, runs_of, runs_table
from kvbench.report.json import strict
from kvbench.report.markdown import escaped, table
from kvbench.report.sections.wording import count
from kvbench.report.standalone import page

MARKED = {WORSE: "▼ worse", BETTER: "▲ better"}


@dataclass(frozen=True)
class Shown:
    """One point in words. mark: "▼ worse", "▲ better" or ""; said: the sentence of the change, or why the line begins anew."""

    run: str
    value: str
    n: str
    mark: str
    said: str
    tone: str


@dataclass(frozen=True)
class Block:
    """One line with its title: `itl_ratio: int8_sym batch 1 context 512`."""

    title: str
    rows: tuple[Shown, ...]


def title_of(line: Line) -> str:
    return one_line(f"{' of '.join(filter(None, (line.metric, line.variant)))}: {line.place}")


def blocks(result: History) -> list[Block]:
    names = [run.name for run in result.runs]
    return [
        Block(title_of(line), tuple(_shown(names, point) for point in line.points)) for line in result.lines
    ]


def _shown(names: Sequence[str], point: Point) -> Shown:
    number = shown_row(point.row)
    change = point.change
    mark = MARKED.get(change.outcome, "") if change else ""
    said = (
        change.sentence
        if change and mark
        else f"begins anew: {'; '.join(point.broken)}"
        if point.broken
        else ""
    )
    if point.row.value is None:
        said = said or point.row.note
    tone = {"▼ worse": "fail", "▲ better": "pass"}.get(mark, "partial" if point.broken else "")
    unit = f" {number.shown_unit}" if number.shown_unit else ""
    return Shown(
        names[point.run],
        f"{number.text}{unit} {number.interval}".strip(),
        number.n,
        mark,
        one_line(said),
        tone,
    )


def headline(result: History) -> str:
    """`3 runs, 24 lines; 1 change: 1 worse; 2 breaks.`"""
    outcomes = [point.change.outcome for _, point in result.changes if point.change]
    breaks = sum(bool(point.broken) for line in result.lines for point in line.points)
    said = f"{len(result.runs)} runs, {count(len(result.lines), 'line')}; {outcomes.count(WORSE)} worse, {outcomes.count(BETTER)} better"
    return f"{said}; {count(breaks, 'break')} where runs are unlike." if breaks else f"{said}."


def show(result: History, paths: Sequence[Path] = (), file: TextIO | None = None) -> None:
    """On a console."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from kvbench.report.console import console_for

    file = file or sys.stdout
    console = console_for(file)
    for name, path, matrix, made in runs_of(result.runs):
        console.print(Text(f"{name}: {path}, {matrix}, {made}"), soft_wrap=True)
    for sentence in faults_of(result.faults):
        console.print(Text(sentence, style="bold red"), soft_wrap=True)
    for sentence in result.named:
        console.print(Text(f"Named: {one_line(sentence)}."), soft_wrap=True)
    for block in blocks(result):
        console.print()
        console.print(Text(block.title, style="bold"), soft_wrap=True)
        out = Table(box=box.SIMPLE_HEAD if file.isatty() else box.ASCII2, pad_edge=False, header_style="bold")
        for head in ("Run", "Value", "n", "", "Said"):
            out.add_column(head, overflow="fold")
        for row in block.rows:
            out.add_row(*map(Text, (row.run, row.value, row.n, row.mark, row.said)))
        console.print(out)
    for written in paths:
        console.print(Text(str(written)), soft_wrap=True)
    console.print(Text(headline(result)), soft_wrap=True)


def as_json(result: History) -> dict[str, Any]:
    """Keys: runs, faults, named, lines (metric, variant, place, segments of points), changes. Strict JSON."""
    names = [run.name for run in result.runs]
    return {
        **head_json(result),
        "lines": [
            {
                "metric": line.metric,
                "variant": line.variant,
                "place": line.place,
                "segments": [[_point(names, point) for point in segment] for segment in line.segments],
            }
            for line in result.lines
        ],
        "changes": [
            {"line": title_of(line), **finding_json(point.change)}
            for line, point in result.changes
            if point.change
        ],
    }


def _point(names: Sequence[str], point: Point) -> dict[str, Any]:
    row = point.row
    keys = ("value", "low", "high", "n", "unit", "partial", "note")
    found: dict[str, Any] = strict({key: getattr(row, key) for key in keys})
    outcome = point.change.outcome if point.change else None
    return {
        "run": names[point.run],
        "cell": row.cell,
        **found,
        "broken": list(point.broken),
        "change": outcome,
    }


def as_markdown(result: History) -> str:
    said = ["## History", "", escaped(headline(result)), "", runs_table(result.runs), ""]
    said += notes(result.faults, result.named)
    for block in blocks(result):
        rows = [tuple(map(escaped, (r.run, r.value, r.n, r.mark, r.said))) for r in block.rows]
        said += [f"### {escaped(block.title)}", "", table(("Run", "Value", "n", "Change", "Said"), rows), ""]
    return "\n".join(said)


def as_html(result: History) -> str:
    from kvbench.report.compare.timeline_plots import plots

    return page(
        "timeline.html.j2",
        runs=runs_of(result.runs),
        faults=list(faults_of(result.faults)),
        named=[one_line(sentence) for sentence in result.named],
        headline=headline(result),
        changes=[
            f"{title_of(line)}. {point.change.sentence}" for line, point in result.changes if point.change
        ],
        plots=plots(result),
        blocks=blocks(result),
    )

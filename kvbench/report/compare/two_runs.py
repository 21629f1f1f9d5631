"""A comparison of stored runs on a console, as JSON, Markdown and HTML: faults first, then what is worse."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kvbench.compare.history import History
from kvbench.compare.pairing import Stored
from kvbench.compare.result import (
    BETTER,
    NOT_EVALUATED,
    NOT_JUDGED,
    SAME,
    UNDECIDED,
    WORSE,
    Comparison,
    Finding,
    spoken,
)
from kvbench.compare.two_runs import UNJUDGED
from kvbench.metrics.collect import METRICS, Row
from kvbench.metrics.declare.metric import BESIDE, EXACT, MARGINS, Effect
from kvbench.metrics.declare.units import BYTES
from kvbench.render.numbers import counted_of, one_line, shown
from kvbench.report.json import strict
from kvbench.report.markdown import escaped, table
from kvbench.report.standalone import page

ORDER = (WORSE, NOT_EVALUATED, UNDECIDED, BETTER, SAME, NOT_JUDGED)
WORDS = {NOT_EVALUATED: "not compared", NOT_JUDGED: "not judged"}
TONES = {
    WORSE: "fail",
    BETTER: "pass",
    SAME: "pass",
    UNDECIDED: "inconclusive",
    NOT_EVALUATED: "not-evaluated",
    NOT_JUDGED: "info",
}
_EXIT_TONES = {0: "pass", 1: "fail", 4: "inconclusive"}
HEADS = ("Outcome", "Measured on", "Metric", "Reference", "Other", "Change", "n", "Margin", "Why")
HOW = "How"


@dataclass(frozen=True)
class Line:
    """One finding in words, a cell of the table each; run: the run that stands beside the reference; how: how it was paired;
    equal: to the last bit."""

    run: str
    outcome: str
    place: str
    subject: str
    first: str
    second: str
    change: str
    n: str
    margin: str
    why: str
    how: str
    equal: bool

    @property
    def tone(self) -> str:
        return TONES[self.outcome]

    @property
    def word(self) -> str:
        return WORDS.get(self.outcome, self.outcome)

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.word,
            self.place,
            self.subject,
            self.first,
            self.second,
            self.change,
            self.n,
            self.margin,
            self.why,
        )


def lines(result: Comparison) -> list[Line]:
    """What was worse first; in each outcome as measured."""
    return [_line(finding) for finding in sorted(result.findings, key=lambda f: ORDER.index(f.outcome))]


def _line(finding: Finding) -> Line:
    effect = finding.effect
    why = [finding.reason, f"partial: {finding.partial}" if finding.partial else ""]
    how = [effect.method, f"by itself {spoken(effect.beside)}" if effect.beside else ""] if effect else []
    n = f"{effect.n:,} {counted_of(effect.n, effect.counted)}" if effect and effect.n is not None else ""
    unit = "" if effect is None else "%" if effect.unit == "%" else f" {effect.unit}"
    return Line(
        finding.runs[1],
        finding.outcome,
        finding.place,
        one_line(finding.subject),
        _value(finding.first),
        _value(finding.second),
        # Its two times are each run's own; the change is that of their ratios to native.
        f"{spoken(effect)}{' beside native' if effect.kind is BESIDE else ''}" if effect else "",
        n,
        ""
        if finding.margin is None or not effect
        else "exact"
        if effect.kind is EXACT
        else f"{finding.margin:g}{unit}",
        one_line("; ".join(filter(None, why))),
        one_line("; ".join(filter(None, how))),
        bool(effect and effect.identical),
    )


def _value(row: Row | None) -> str:
    return "" if row is None else shown(row.value, row.unit).brief if row.unit is not BYTES else _bytes(row)


def _bytes(row: Row) -> str:
    return shown(row.value).brief + (" B" if row.value is not None else "")


def headline(result: Comparison) -> str:
    """`2 of 40 judged values are worse, 3 undecided, 35 the same; 90 more are shown and not judged.`"""
    counts = Counter(finding.outcome for finding in result.findings)
    judged = sum(counts[o] for o in (WORSE, BETTER, SAME, UNDECIDED))
    parts = [
        f"{counts[o]} {WORDS.get(o, o) if o != SAME else 'the same'}"
        for o in (WORSE, UNDECIDED, BETTER, SAME, NOT_EVALUATED)
        if counts[o]
    ]
    said = f"{judged} values judged: {', '.join(parts) or 'none'}"
    if counts[NOT_JUDGED]:
        said += f"; {counts[NOT_JUDGED]} more are shown and not judged"
    return f"{said}."


def runs_of(runs: Sequence[Stored]) -> list[tuple[str, str, str, str]]:
    """(name, folder, matrix, when) of each run."""
    return [
        (run.name, one_line(run.path), one_line(run.run.manifest.name), one_line(run.run.manifest.created_at))
        for run in runs
    ]


def faults_of(faults: Sequence[tuple[str, str]]) -> Iterator[str]:
    for run, sentence in faults:
        yield one_line(f"{run} does not stand by itself: {sentence}")


def show(
    result: Comparison, paths: Sequence[Path] = (), file: TextIO | None = None, quiet: bool = False
) -> None:
    """On a console; quiet: faults, what is worse, files and the last line only. What is equal to the last bit, and what is not judged, is only counted."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from kvbench.report.console import console_for

    file = file or sys.stdout
    console = console_for(file)
    for name, path, matrix, made in () if quiet else runs_of(result.runs):
        role = " (reference)" if name == result.runs[0].name else ""
        console.print(Text(f"{name}{role}: {path}, {matrix}, {made}"), soft_wrap=True)
    for sentence in faults_of(result.faults):
        console.print(Text(sentence, style="bold red"), soft_wrap=True)
    for sentence in () if quiet else result.named:
        console.print(Text(f"Named: {one_line(sentence)}."), soft_wrap=True)
    several = len(result.runs) > 2
    out = Table(box=box.SIMPLE_HEAD if file.isatty() else box.ASCII2, pad_edge=False, header_style="bold")
    for head in (*(["Run"] if several else []), *HEADS):
        out.add_column(head, overflow="fold")
    shown_lines = [line for line in lines(result) if line.outcome != NOT_JUDGED and not line.equal]
    for line in shown_lines:
        style = {WORSE: "bold red", BETTER: "green", UNDECIDED: "yellow", NOT_EVALUATED: "blue"}.get(
            line.outcome, ""
        )
        out.add_row(*(Text(cell) for cell in (*([line.run] if several else []), *line.cells)), style=style)
    if out.row_count and not quiet:
        console.print(out)
    for finding in result.findings:
        if finding.outcome == WORSE:
            console.print(Text(f"{finding.runs[1]}: {finding.sentence}", style="red"), soft_wrap=True)
    if not quiet and (equal := sum(line.equal for line in lines(result))):
        console.print(Text(f"{equal} values are equal to the last bit."), soft_wrap=True)
    for written in paths:
        console.print(Text(str(written)), soft_wrap=True)
    console.print(
        Text(f"{result.word.upper()}  {headline(result)} Exit code {result.exit_code}."), soft_wrap=True
    )


def head_json(result: Comparison | History) -> dict[str, Any]:
    """What stands before any number: the runs, what is wrong with them, what differs beside the numbers."""
    names = ("name", "path", "matrix", "created_at")
    return {
        "runs": [dict(zip(names, run, strict=True)) for run in runs_of(result.runs)],
        "faults": [{"run": run, "sentence": sentence} for run, sentence in result.faults],
        "named": list(result.named),
    }


def as_json(result: Comparison) -> dict[str, Any]:
    """Keys: runs, faults, named, findings, outcomes (counts), margins, word, exit_code. Strict JSON: a NaN is its word."""
    return {
        **head_json(result),
        "findings": [finding_json(finding) for finding in result.findings],
        "outcomes": dict(Counter(finding.outcome for finding in result.findings)),
        "margins": MARGINS
        if result.margin is None
        else {k: 0.0 if k == EXACT.name else result.margin for k in MARGINS},
        "word": result.word,
        "exit_code": result.exit_code,
    }


def finding_json(finding: Finding) -> dict[str, Any]:
    effect = finding.effect
    keys = ("metric", "runner", "variant", "cell", "place", "cells", "outcome", "reason", "margin", "adjusted", "family",
            "mde", "n_needed", "partial", "sentence")  # fmt: skip
    found: dict[str, Any] = strict({key: getattr(finding, key) for key in keys})
    change = None
    if effect:
        alone = _effect_json(effect.beside) if isinstance(effect.beside, Effect) else None
        change = {**_effect_json(effect), "beside": alone}
    values = {
        name: strict(row.value) if row else None
        for name, row in zip(finding.runs, (finding.first, finding.second), strict=True)
    }
    unit = METRICS[finding.metric].unit.name if finding.metric else ""
    return {
        "reference": finding.runs[0],
        "run": finding.runs[1],
        **found,
        "unit": unit,
        "values": values,
        "change": change,
    }


def _effect_json(effect: Effect) -> dict[str, Any]:
    names = ("kind", "unit", "value", "low", "high", "n", "counted", "units", "identical", "method", "subset")
    found: dict[str, Any] = strict(
        {name: getattr(effect, name) for name in names} | {"kind": effect.kind.name}
    )
    return found


def as_markdown(result: Comparison) -> str:
    said = [
        f"## {escaped(result.word)}",
        "",
        escaped(f"{headline(result)} Exit code {result.exit_code}."),
        "",
    ]
    said += [runs_table(result.runs), "", *notes(result.faults, result.named)]
    changes = [f for f in result.findings if f.outcome in (WORSE, BETTER)]
    said += [*(f"- {f.runs[1]}: {escaped(f.sentence)}" for f in changes), ""] if changes else []
    rows = [tuple(map(escaped, (line.run, *line.cells, line.how))) for line in lines(result)]
    said += [table(("Run", *HEADS, HOW), rows)]
    return "\n".join(said) + "\n"


def runs_table(runs: Sequence[Stored]) -> str:
    return table(("Run", "Folder", "Matrix", "Made"), [tuple(map(escaped, run)) for run in runs_of(runs)])


def notes(faults: Sequence[tuple[str, str]], named: Sequence[str]) -> list[str]:
    """What is read before any number, as lines of Markdown, an empty one last."""
    said = [f"- **{escaped(sentence)}**" for sentence in faults_of(faults)]
    said += [f"- {escaped(sentence)}." for sentence in named]
    return [*said, ""] if said else []


def as_html(result: Comparison) -> str:
    return page(
        "comparison.html.j2",
        result=result,
        runs=runs_of(result.runs),
        faults=list(faults_of(result.faults)),
        named=[one_line(sentence) for sentence in result.named],
        worse=[f"{f.runs[1]}: {f.sentence}" for f in result.findings if f.outcome == WORSE],
        lines=[line for line in lines(result) if line.outcome != NOT_JUDGED],
        unjudged=[line for line in lines(result) if line.outcome == NOT_JUDGED],
        heads=(*HEADS, HOW),
        why=UNJUDGED,
        headline=headline(result),
        tone=_EXIT_TONES.get(result.exit_code, "not-evaluated"),
    )

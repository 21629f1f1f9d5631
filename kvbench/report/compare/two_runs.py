"""A comparison of stored runs on a console, as JSON, Markdown and HTML: faults first, then what is worse."""

import sys
from collections import Counter
from collections.abc import Sequence
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
from kvbench.report.console import Printer
from kvbench.report.html import page
from kvbench.report.json import strict
from kvbench.report.markdown import escaped, table

# Worst first, each with its look.
TONES = {
    WORSE: "fail",
    NOT_EVALUATED: "not-evaluated",
    UNDECIDED: "inconclusive",
    BETTER: "pass",
    SAME: "pass",
    NOT_JUDGED: "info",
}
WORDS = {NOT_EVALUATED: "not compared", NOT_JUDGED: "not judged"}
_EXIT_TONES = {0: "pass", 1: "fail", 4: "inconclusive"}
HEADS = ("Outcome", "Measured on", "Metric", "Reference", "Other", "Change", "n", "Margin", "Why")
_STYLES = {WORSE: "bold red", BETTER: "green", UNDECIDED: "yellow", NOT_EVALUATED: "blue"}

Result = Comparison | History


def runs_of(runs: Sequence[Stored]) -> list[tuple[str, str, str, str]]:
    """(name, folder, matrix, creation time) of each run."""
    manifests = [(run, run.run.manifest) for run in runs]
    return [(run.name, one_line(run.path), one_line(m.name), one_line(m.created_at)) for run, m in manifests]


def faults_of(result: Result) -> list[str]:
    """One sentence per failed built-in check of a run."""
    return [one_line(f"{run} is invalid on its own: {sentence}") for run, sentence in result.faults]


def heading_json(result: Result) -> dict[str, Any]:
    """Keys: runs, faults, named."""
    keys = ("name", "path", "matrix", "created_at")
    return {
        "runs": [dict(zip(keys, run, strict=True)) for run in runs_of(result.runs)],
        "faults": [{"run": run, "sentence": sentence} for run, sentence in result.faults],
        "named": list(result.named),
    }


def heading_markdown(result: Result) -> list[str]:
    """The table of runs, then faults and notes; the last line is empty."""
    rows = [tuple(map(escaped, run)) for run in runs_of(result.runs)]
    notes = [f"- **{escaped(sentence)}**" for sentence in faults_of(result)]
    notes += [f"- {escaped(sentence)}." for sentence in result.named]
    return [table(("Run", "Folder", "Matrix", "Made"), rows), "", *([*notes, ""] if notes else [])]


def heading_html(result: Result) -> dict[str, Any]:
    named = [one_line(sentence) for sentence in result.named]
    return {"runs": runs_of(result.runs), "faults": faults_of(result), "named": named}


def print_heading(out: Printer, result: Result, reference: str = "", quiet: bool = False) -> None:
    """Print runs, faults and notes. reference: name of the reference run; quiet: faults only."""
    for name, path, matrix, made in () if quiet else runs_of(result.runs):
        out.line(f"{name}{' (reference)' if name == reference else ''}: {path}, {matrix}, {made}")
    out.lines(faults_of(result), "bold red")
    out.lines(() if quiet else (f"Note: {one_line(sentence)}." for sentence in result.named))


@dataclass(frozen=True)
class Line:
    """One finding as text. cells: in the order of `HEADS`; how: how samples were paired; equal: bitwise."""

    run: str
    outcome: str
    cells: tuple[str, ...]
    how: str
    equal: bool

    @property
    def tone(self) -> str:
        return TONES[self.outcome]


def lines(result: Comparison) -> list[Line]:
    """The findings, worse first, then in the order of measurement."""
    return [_line(f) for f in sorted(result.findings, key=lambda f: list(TONES).index(f.outcome))]


def _line(finding: Finding) -> Line:
    effect = finding.effect
    change, n, margin, how = "", "", "", []
    if effect:
        # A time is compared by its ratio to native, although both times shown are the runs' own.
        change = f"{spoken(effect)}{' relative to native' if effect.kind is BESIDE else ''}"
        n = f"{effect.n:,} {counted_of(effect.n, effect.counted)}" if effect.n is not None else ""
        unit = "%" if effect.unit == "%" else f" {effect.unit}"
        if finding.margin is not None:
            margin = "exact" if effect.kind is EXACT else f"{finding.margin:g}{unit}"
        how = [effect.method, f"by itself {spoken(effect.beside)}" if effect.beside else ""]
    reasons = (finding.reason, finding.partial and f"partial: {finding.partial}")
    why = one_line("; ".join(filter(None, reasons)))
    outcome = WORDS.get(finding.outcome, finding.outcome)
    first, second = _value(finding.first), _value(finding.second)
    cells = (outcome, finding.place, one_line(finding.subject), first, second, change, n, margin, why)
    method = one_line("; ".join(filter(None, how)))
    return Line(finding.runs[1], finding.outcome, cells, method, bool(effect and effect.identical))


def _value(row: Row | None) -> str:
    if row is None:
        return ""
    if row.unit is not BYTES:
        return shown(row.value, row.unit).brief
    return shown(row.value).brief + (" B" if row.value is not None else "")


def headline(result: Comparison) -> str:
    """`40 values judged: 2 worse, 3 undecided, 35 the same; 90 more are shown and not judged.`"""
    counts = Counter(finding.outcome for finding in result.findings)
    judged = sum(counts[outcome] for outcome in (WORSE, BETTER, SAME, UNDECIDED))
    words = {**WORDS, SAME: "the same"}
    order = (WORSE, UNDECIDED, BETTER, SAME, NOT_EVALUATED)
    parts = [f"{counts[outcome]} {words.get(outcome, outcome)}" for outcome in order if counts[outcome]]
    text = f"{judged} values judged: {', '.join(parts) or 'none'}"
    if counts[NOT_JUDGED]:
        text += f"; {counts[NOT_JUDGED]} more are shown and not judged"
    return f"{text}."


def show(
    result: Comparison, paths: Sequence[Path] = (), file: TextIO | None = None, quiet: bool = False
) -> None:
    """Print the comparison to a console. Values that are bitwise equal or not judged are only counted.

    paths: files that were written; quiet: only faults, what is worse, paths and the verdict.
    """
    out = Printer(file or sys.stdout)
    print_heading(out, result, result.runs[0].name, quiet)
    several = len(result.runs) > 2
    found = lines(result)
    rows = [
        ((*([line.run] if several else []), *line.cells), _STYLES.get(line.outcome, ""))
        for line in found
        if line.outcome != NOT_JUDGED and not line.equal
    ]
    if rows and not quiet:
        out.table((*(["Run"] if several else []), *HEADS), rows)
    out.lines(_worse(result), "red")
    if not quiet and (equal := sum(line.equal for line in found)):
        out.line(f"{equal} values are bitwise equal.")
    out.lines([*paths, f"{result.word.upper()}  {headline(result)} Exit code {result.exit_code}."])


def _worse(result: Comparison) -> list[str]:
    return [f"{f.runs[1]}: {f.sentence}" for f in result.findings if f.outcome == WORSE]


def as_json(result: Comparison) -> dict[str, Any]:
    """Keys: runs, faults, named, findings, outcomes (counts), margins, word, exit_code. Strict JSON."""
    margins = MARGINS
    if result.margin is not None:
        margins = {kind: 0.0 if kind == EXACT.name else result.margin for kind in MARGINS}
    return {
        **heading_json(result),
        "findings": [finding_json(finding) for finding in result.findings],
        "outcomes": dict(Counter(finding.outcome for finding in result.findings)),
        "margins": margins,
        "word": result.word,
        "exit_code": result.exit_code,
    }


_FINDING_KEYS = (
    *("metric", "runner", "variant", "cell", "place", "cells", "outcome", "reason", "margin", "adjusted"),
    *("family", "mde", "n_needed", "partial", "sentence"),
)


def finding_json(finding: Finding) -> dict[str, Any]:
    """One finding: its fields, the values of both runs, and the change or None."""
    effect, change = finding.effect, None
    if effect:
        alone = _effect_json(effect.beside) if isinstance(effect.beside, Effect) else None
        change = {**_effect_json(effect), "beside": alone}
    rows = zip(finding.runs, (finding.first, finding.second), strict=True)
    fields: dict[str, Any] = strict({key: getattr(finding, key) for key in _FINDING_KEYS})
    return {
        "reference": finding.runs[0],
        "run": finding.runs[1],
        **fields,
        "unit": METRICS[finding.metric].unit.name if finding.metric else "",
        "values": {name: strict(row.value) if row else None for name, row in rows},
        "change": change,
    }


def _effect_json(effect: Effect) -> dict[str, Any]:
    keys = ("unit", "value", "low", "high", "n", "counted", "units", "identical", "method", "subset")
    found: dict[str, Any] = strict({key: getattr(effect, key) for key in keys})
    return {"kind": effect.kind.name, **found}


def as_markdown(result: Comparison) -> str:
    verdict = escaped(f"{headline(result)} Exit code {result.exit_code}.")
    text = [f"## {escaped(result.word)}", "", verdict, "", *heading_markdown(result)]
    changes = [f for f in result.findings if f.outcome in (WORSE, BETTER)]
    text += [*(f"- {f.runs[1]}: {escaped(f.sentence)}" for f in changes), ""] if changes else []
    rows = [tuple(map(escaped, (line.run, *line.cells, line.how))) for line in lines(result)]
    return "\n".join([*text, table(("Run", *HEADS, "How"), rows)]) + "\n"


def as_html(result: Comparison) -> str:
    found = lines(result)
    return page(
        "comparison.html.j2",
        result=result,
        **heading_html(result),
        worse=_worse(result),
        lines=[line for line in found if line.outcome != NOT_JUDGED],
        unjudged=[line for line in found if line.outcome == NOT_JUDGED],
        heads=(*HEADS, "How"),
        why=UNJUDGED,
        headline=headline(result),
        tone=_EXIT_TONES.get(result.exit_code, "not-evaluated"),
    )

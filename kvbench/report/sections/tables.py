"""Metric tables: rows grouped into lines (one subject and variant each) under the declared columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.metrics.collect import METRICS, TABLES, Row
from kvbench.metrics.declare.metric import Table
from kvbench.metrics.declare.units import NUMBER, SECONDS, Unit
from kvbench.records.record import OK, Record
from kvbench.render.labels import Label, Labels
from kvbench.render.numbers import NOT_MEASURED, Shown, counted_of, fact, flatten, one_line, plain, shown_row
from kvbench.report.model import JudgedRun, OutcomeLike

# The outcome that a value wears when several checks looked at it.
_SEVERITY = ("fail", "inconclusive", "not_evaluated", "pass")


_VARIANT_LIMIT, _NOTE_LIMIT = 160, 400  # characters on the page; the CSV has the whole

_OTHER = Table("other", "Other metrics", (), "Metrics that have no table of their own.")

_Checks = Mapping[tuple[str, str, str], OutcomeLike]  # by cell, metric and variant


@dataclass(frozen=True)
class Entry:
    """One value of a table. status, limit: of the gate's check on it, or "". baseline: what a difference is against."""

    shown: Shown
    status: str
    limit: str
    baseline: Label | None
    note: str


@dataclass(frozen=True)
class Line:
    """entries are aligned with the table's columns; None where the metric does not apply to this subject."""

    label: Label
    variant: str
    partial: str
    entries: tuple[Entry | None, ...]

    @property
    def baseline(self) -> Label | None:
        """What its differences are against, where all of them are against the same; it is said once then."""
        found = {entry.baseline for entry in self.entries if entry and entry.baseline}
        return found.pop() if len(found) == 1 else None

    @property
    def silent(self) -> str:
        """Why nothing at all was measured here, or "" when something was."""
        found = [entry for entry in self.entries if entry]
        if any(entry.shown.state != "missing" or entry.status == "fail" for entry in found):
            return ""
        return "; ".join(dict.fromkeys(entry.note for entry in found if entry.note)) or "no reason recorded"


@dataclass(frozen=True)
class Facts:
    """How one subject was measured: protocol, split, counts, hashes."""

    label: Label
    variant: str
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Column:
    """brief: shown on a console too."""

    metric: str
    heading: str
    unit: Unit
    brief: bool


@dataclass(frozen=True)
class MetricTable:
    """`lines` is empty when the runner was asked for and gave nothing. footnote: "" where no value is a comparison."""

    key: str
    title: str
    note: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    facts: tuple[Facts, ...]
    footnote: str = ""


def metric_tables(run: JudgedRun, labels: Labels) -> tuple[MetricTable, ...]:
    """The declared tables whose runner this run asked for or has rows of, then one of metrics that no table names."""
    runners = {task.runner for task in run.manifest.tasks}
    checks = worst_checks(run.verdict.outcomes)
    tables = []
    for section in (*TABLES, _OTHER):
        if section is _OTHER:
            rows = [row for row in run.rows if row.metric not in METRICS]
            headings = {row.metric: row.metric for row in rows}
        else:
            headings = {metric.name: metric.heading for metric in section.metrics}
            rows = [row for row in run.rows if row.metric in headings]
        if section.over and all(row.value is None for row in rows):
            continue
        if rows or section.runner in runners:
            columns = _columns(section, headings, rows)
            lines = _lines(section, columns, rows, labels, checks)
            facts = tuple(_facts(section, run, labels))
            compares = any(entry and entry.baseline for line in lines for entry in line.entries)
            footnote = section.footnote if compares else ""
            tables.append(
                MetricTable(section.key, section.title, section.note, columns, lines, facts, footnote)
            )
    return tuple(tables)


def _label(section: Table, cell: str, labels: Labels) -> Label:
    if section.over:
        return labels.across(cell, section.over)
    return labels.subject(section.runner, cell) if section.runner else labels.cell(cell)


def _columns(section: Table, headings: Mapping[str, str], rows: Sequence[Row]) -> tuple[Column, ...]:
    """A column for each metric that has a row, in the section's order."""
    units = {row.metric: row.unit for row in rows}
    return tuple(
        Column(metric, heading, units[metric], metric not in METRICS or METRICS[metric].brief)
        for metric, heading in headings.items()
        if metric in units
    )


def worst_checks(outcomes: Iterable[OutcomeLike]) -> _Checks:
    """The gravest outcome on each value."""
    worst: dict[tuple[str, str, str], OutcomeLike] = {}
    for outcome in sorted(outcomes, key=lambda o: _SEVERITY.index(o.status)):
        for cell in outcome.cells:
            worst.setdefault((cell, outcome.metric, outcome.variant), outcome)
    return worst


def _lines(section: Table, columns: Sequence[Column], rows: Sequence[Row], labels: Labels,
           checks: _Checks) -> tuple[Line, ...]:  # fmt: skip
    """Rows of cells that share a task are equal and make one line; where they are not, each cell keeps its own."""
    grouped: dict[tuple[tuple[str, ...], str], dict[str, Row]] = {}
    entries: dict[tuple[tuple[str, ...], str], dict[str, Entry]] = {}
    subjects: dict[tuple[str, ...], Label] = {}
    for row in rows:
        label = _label(section, row.cell, labels)
        line = grouped.get((label.cells, row.variant), {})
        if row.metric in line and _content(line[row.metric]) != _content(row):
            label = labels.cell(row.cell)
        subjects.setdefault(label.cells, label)
        key = (label.cells, row.variant)
        entry = _entry(row, section, labels, checks)
        before = entries.setdefault(key, {}).get(row.metric)
        if before is None or _worse(entry, before):
            entries[key][row.metric] = entry
        grouped.setdefault(key, {})[row.metric] = row
    variants = {variant: i for i, variant in enumerate(dict.fromkeys(row.variant for row in rows))}
    ordered = sorted(grouped, key=lambda key: (variants[key[1]], labels.rank(subjects[key[0]])))
    return tuple(
        Line(
            subjects[key[0]],
            one_line(key[1], _VARIANT_LIMIT),
            "; ".join(
                dict.fromkeys(
                    one_line(row.partial, _NOTE_LIMIT) for row in grouped[key].values() if row.partial
                )
            ),
            tuple(entries[key].get(column.metric) for column in columns),
        )
        for key in ordered
    )


def _entry(row: Row, section: Table, labels: Labels, checks: _Checks) -> Entry:
    outcome = checks.get((row.cell, row.metric, row.variant)) or checks.get((row.cell, row.metric, ""))
    baseline = None
    if row.baseline and row.baseline != row.cell:
        baseline = _label(section, row.baseline, labels)
    status, limit = (outcome.status, limit_text(outcome.limit)) if outcome else ("", "")
    return Entry(
        shown_row(row), status, one_line(limit, _NOTE_LIMIT), baseline, one_line(row.note, _NOTE_LIMIT)
    )


def limit_text(limit: Any) -> str:
    """A check's limit as the gate gives it: text, a number, or a pair of numbers."""
    if limit is None:
        return ""
    if isinstance(limit, int | float) and not isinstance(limit, bool):
        return NUMBER.number(limit)
    return plain(limit)


def value_text(outcome: OutcomeLike) -> str:
    """The value that a check looked at, or "" when there was none."""
    value = outcome.value
    if value is None:
        return NOT_MEASURED if outcome.metric and outcome.status == "not_evaluated" else ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{NUMBER.number(value)}{_suffix(outcome)}"
    return plain(value, 200)


def mde_text(outcome: OutcomeLike) -> str:
    """The minimum detectable effect of a check, in its metric's unit; "" where nothing is estimated."""
    if outcome.mde is None:
        return ""
    if math.isinf(outcome.mde):
        return "none possible"
    return f"{outcome.mde:.3g}{_suffix(outcome)}"


def _suffix(outcome: OutcomeLike) -> str:
    return METRICS[outcome.metric].unit.suffix if outcome.metric in METRICS else ""


def needed_text(outcome: OutcomeLike) -> str:
    """`73 questions`; "" where no number is known, or none is needed: a check that passed is decided."""
    if outcome.n_needed is None or outcome.status == "pass":
        return ""
    counted = METRICS[outcome.metric].counted if outcome.metric in METRICS else ""
    return f"{NUMBER.number(outcome.n_needed)} {counted_of(outcome.n_needed, counted)}".rstrip()


def _worse(a: Entry, b: Entry) -> bool:
    rank = {status: i for i, status in enumerate((*_SEVERITY, ""))}
    return rank[a.status] < rank[b.status]


def _content(row: Row) -> tuple[str, ...]:
    """What makes two rows of a shared task the same; as text, so that NaN equals NaN."""
    return tuple(repr(v) for v in (row.value, row.low, row.high, row.n, row.partial, row.note))


def _facts(section: Table, run: JudgedRun, labels: Labels) -> Iterable[Facts]:
    for record, task in run.done() if section.facts else ():
        if record.runner == section.runner and record.status == OK:
            yield Facts(labels.task(task), one_line(task.variant), _fact_pairs(record))


def _fact_pairs(record: Record) -> tuple[tuple[str, str], ...]:
    """What the record says of how it was measured; the record itself has it in full."""
    pairs = [("protocol version", str(record.protocol)), ("seconds", SECONDS.number(record.seconds))]
    pairs += [fact(key, value) for key, value in flatten(record.facts)]
    if record.samples.get("continuation_text"):
        # agreement: the two texts past the first divergence, for reading
        for key, name in (("native_text", "native goes on"), ("continuation_text", "candidate goes on")):
            pairs.append((name, one_line(record.samples[key], 300)))
    return tuple(pairs)

"""Metric tables: rows grouped into lines (one subject and variant each) under the declared columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED, PASS, Outcome
from kvbench.metrics.collect import METRICS, TABLES, Row
from kvbench.metrics.declare.metric import Table
from kvbench.metrics.declare.units import SECONDS, Unit
from kvbench.records.record import OK, Record
from kvbench.render.labels import Label, Labels
from kvbench.render.numbers import Shown, fact, flatten, one_line, shown_row
from kvbench.report.model import JudgedRun

_WORST_FIRST = (FAIL, INCONCLUSIVE, NOT_EVALUATED, PASS, "")  # which of several checks of a value is shown
_VARIANT_LIMIT, _NOTE_LIMIT = 160, 400  # characters on the page; the CSV has the whole

_OTHER = Table("other", "Other metrics", (), "Metrics without a table of their own.")

_Checks = Mapping[tuple[str, str, str], Outcome]  # by cell, metric and variant


@dataclass(frozen=True)
class Entry:
    """One value of a table. status, limit: of the gate's check, or ""; baseline: of a difference."""

    shown: Shown
    status: str
    limit: str
    baseline: Label | None
    note: str


@dataclass(frozen=True)
class Line:
    """entries: aligned with the table's columns; None where the metric does not apply to this subject."""

    label: Label
    variant: str
    partial: str
    entries: tuple[Entry | None, ...]

    @property
    def baseline(self) -> Label | None:
        """The baseline of its differences, if all have the same."""
        found = {entry.baseline for entry in self.entries if entry and entry.baseline}
        return found.pop() if len(found) == 1 else None

    @property
    def silent(self) -> str:
        """Why nothing was measured here, or "" when something was."""
        found = [entry for entry in self.entries if entry]
        if any(entry.shown.state != "missing" or entry.status == FAIL for entry in found):
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
    """lines: empty if the runner was requested and gave nothing. footnote: "" if no value is a comparison."""

    key: str
    title: str
    note: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    facts: tuple[Facts, ...]
    footnote: str = ""

    @property
    def brief(self) -> list[int]:
        """The columns that are shown on a console too."""
        return [i for i, column in enumerate(self.columns) if column.brief]


def metric_tables(run: JudgedRun, labels: Labels) -> tuple[MetricTable, ...]:
    """The declared tables whose runner this run has, then one of metrics without a table."""
    runners = {task.runner for task in run.manifest.tasks}
    checks = worst_checks(run.verdict.outcomes)
    tables = []
    for section in (*TABLES, _OTHER):
        headings = {metric.name: metric.heading for metric in section.metrics}
        if section is _OTHER:
            headings = {row.metric: row.metric for row in run.rows if row.metric not in METRICS}
        rows = [row for row in run.rows if row.metric in headings]
        measured = any(row.value is not None for row in rows)
        if measured if section.over else rows or section.runner in runners:
            columns = _columns(headings, rows)
            lines = _lines(section, columns, rows, labels, checks)
            facts = tuple(_facts(section, run, labels))
            compares = any(entry and entry.baseline for line in lines for entry in line.entries)
            footnote = section.footnote if compares else ""
            tables.append(
                MetricTable(section.key, section.title, section.note, columns, lines, facts, footnote)
            )
    return tuple(tables)


def worst_checks(outcomes: Iterable[Outcome]) -> _Checks:
    """The worst outcome on each value."""
    worst: dict[tuple[str, str, str], Outcome] = {}
    for outcome in sorted(outcomes, key=lambda o: _WORST_FIRST.index(o.status)):
        for cell in outcome.cells:
            worst.setdefault((cell, outcome.metric, outcome.variant), outcome)
    return worst


def _label(section: Table, cell: str, labels: Labels) -> Label:
    if section.over:
        return labels.across(cell, section.over)
    return labels.subject(section.runner, cell) if section.runner else labels.cell(cell)


def _columns(headings: Mapping[str, str], rows: Sequence[Row]) -> tuple[Column, ...]:
    """A column for each metric that has a row, in the section's order."""
    units = {row.metric: row.unit for row in rows}
    return tuple(
        Column(metric, heading, units[metric], metric not in METRICS or METRICS[metric].brief)
        for metric, heading in headings.items()
        if metric in units
    )


@dataclass
class _Draft:
    """A line in the making."""

    label: Label
    rows: dict[str, Row] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)

    def add(self, row: Row, entry: Entry) -> None:
        """Of several rows of a metric the one with the worst status is shown."""
        before = self.entries.get(row.metric)
        if before is None or _WORST_FIRST.index(entry.status) < _WORST_FIRST.index(before.status):
            self.entries[row.metric] = entry
        self.rows[row.metric] = row


def _lines(
    section: Table, columns: Sequence[Column], rows: Sequence[Row], labels: Labels, checks: _Checks
) -> tuple[Line, ...]:
    """Rows of cells that share a task are equal and make one line; a cell with different rows has its own."""
    drafts: dict[tuple[tuple[str, ...], str], _Draft] = {}
    for row in rows:
        label = _label(section, row.cell, labels)
        shared = drafts.get((label.cells, row.variant))
        if shared and row.metric in shared.rows and _content(shared.rows[row.metric]) != _content(row):
            label = labels.cell(row.cell)
        draft = drafts.setdefault((label.cells, row.variant), _Draft(label))
        draft.add(row, _entry(row, section, labels, checks))
    variants = {variant: i for i, variant in enumerate(dict.fromkeys(row.variant for row in rows))}
    ordered = sorted(drafts.items(), key=lambda item: (variants[item[0][1]], labels.rank(item[1].label)))
    return tuple(
        Line(
            draft.label,
            one_line(variant, _VARIANT_LIMIT),
            "; ".join(
                dict.fromkeys(one_line(r.partial, _NOTE_LIMIT) for r in draft.rows.values() if r.partial)
            ),
            tuple(draft.entries.get(column.metric) for column in columns),
        )
        for (_, variant), draft in ordered
    )


def _entry(row: Row, section: Table, labels: Labels, checks: _Checks) -> Entry:
    outcome = checks.get((row.cell, row.metric, row.variant)) or checks.get((row.cell, row.metric, ""))
    compared = row.baseline and row.baseline != row.cell
    baseline = _label(section, row.baseline, labels) if compared and row.baseline else None
    status, limit = (outcome.status, one_line(outcome.limit, _NOTE_LIMIT)) if outcome else ("", "")
    return Entry(shown_row(row), status, limit, baseline, one_line(row.note, _NOTE_LIMIT))


def _content(row: Row) -> tuple[str, ...]:
    """What makes two rows of a shared task equal; as text, so that NaN equals NaN."""
    return tuple(repr(v) for v in (row.value, row.low, row.high, row.n, row.partial, row.note))


def _facts(section: Table, run: JudgedRun, labels: Labels) -> Iterable[Facts]:
    for record, task in run.done() if section.facts else ():
        if record.runner == section.runner and record.status == OK:
            yield Facts(labels.task(task), one_line(task.variant), _fact_pairs(record))


def _fact_pairs(record: Record) -> tuple[tuple[str, str], ...]:
    """How the record was measured, shortened."""
    pairs = [("protocol version", str(record.protocol)), ("seconds", SECONDS.number(record.seconds))]
    pairs += [fact(key, value) for key, value in flatten(record.facts)]
    if record.samples.get("continuation_text"):  # agreement: the two texts after the first divergence
        pairs.append(("native continues", one_line(record.samples["native_text"], 300)))
        pairs.append(("candidate continues", one_line(record.samples["continuation_text"], 300)))
    return tuple(pairs)

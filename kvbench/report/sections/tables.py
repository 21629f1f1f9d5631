"""Metric tables: rows grouped into lines (one subject and variant each) under the declared columns."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED, PASS, Outcome
from kvbench.metrics.collect import METRICS, TABLES, Row
from kvbench.metrics.declare.metric import Table
from kvbench.metrics.declare.units import SECONDS, Unit
from kvbench.records.record import OK
from kvbench.render.labels import Label
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


def metric_tables(run: JudgedRun) -> tuple[MetricTable, ...]:
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
            units = {row.metric: row.unit for row in rows}
            columns = tuple(
                Column(metric, heading, units[metric], metric not in METRICS or METRICS[metric].brief)
                for metric, heading in headings.items()
                if metric in units
            )
            lines = _lines(run, section, columns, rows, checks)
            compares = any(entry and entry.baseline for line in lines for entry in line.entries)
            about = (section.key, section.title, section.note)
            footnote = section.footnote if compares else ""
            tables.append(MetricTable(*about, columns, lines, tuple(_facts(section, run)), footnote))
    return tuple(tables)


def worst_checks(outcomes: Iterable[Outcome]) -> _Checks:
    """The worst outcome on each value."""
    worst: dict[tuple[str, str, str], Outcome] = {}
    for outcome in sorted(outcomes, key=lambda o: _WORST_FIRST.index(o.status)):
        for cell in outcome.cells:
            worst.setdefault((cell, outcome.metric, outcome.variant), outcome)
    return worst


def _label(run: JudgedRun, section: Table, cell: str) -> Label:
    if section.over:
        return run.labels.across(cell, section.over)
    return run.labels.subject(section.runner, cell) if section.runner else run.labels.cell(cell)


def _lines(
    run: JudgedRun, section: Table, columns: Sequence[Column], rows: Sequence[Row], checks: _Checks
) -> tuple[Line, ...]:
    """Rows of cells that share a task are equal and make one line; a cell with different rows has its own."""
    drafts: dict[tuple[str, tuple[str, ...]], tuple[Label, dict[str, list[Row]]]] = {}
    for row in rows:
        label = _label(run, section, row.cell)
        _, shared = drafts.get((row.variant, label.cells), (label, {}))
        if row.metric in shared and _content(shared[row.metric][-1]) != _content(row):
            label = run.labels.cell(row.cell)
        _, own = drafts.setdefault((row.variant, label.cells), (label, {}))
        own.setdefault(row.metric, []).append(row)
    variants = list(dict.fromkeys(row.variant for row in rows))
    ordered = sorted(drafts.items(), key=lambda x: (variants.index(x[0][0]), run.labels.rank(x[1][0])))
    found = []
    for (variant, _), (label, own) in ordered:
        entries = {
            metric: min(
                (_entry(run, row, section, checks) for row in own[metric]),
                key=lambda entry: _WORST_FIRST.index(entry.status),
            )
            for metric in own
        }
        partial = dict.fromkeys(one_line(r[-1].partial, _NOTE_LIMIT) for r in own.values() if r[-1].partial)
        values = tuple(entries.get(column.metric) for column in columns)
        found.append(Line(label, one_line(variant, _VARIANT_LIMIT), "; ".join(partial), values))
    return tuple(found)


def _entry(run: JudgedRun, row: Row, section: Table, checks: _Checks) -> Entry:
    outcome = checks.get((row.cell, row.metric, row.variant)) or checks.get((row.cell, row.metric, ""))
    compared = row.baseline and row.baseline != row.cell
    baseline = _label(run, section, row.baseline) if compared and row.baseline else None
    status, limit = (outcome.status, one_line(outcome.limit, _NOTE_LIMIT)) if outcome else ("", "")
    return Entry(shown_row(row), status, limit, baseline, one_line(row.note, _NOTE_LIMIT))


def _content(row: Row) -> tuple[str, ...]:
    """What makes two rows of a shared task equal; as text, so that NaN equals NaN."""
    return tuple(repr(v) for v in (row.value, row.low, row.high, row.n, row.partial, row.note))


def _facts(section: Table, run: JudgedRun) -> Iterable[Facts]:
    for record, task in run.done() if section.facts else ():
        if record.runner != section.runner or record.status != OK:
            continue
        pairs = [("protocol version", str(record.protocol)), ("seconds", SECONDS.number(record.seconds))]
        pairs += [fact(key, value) for key, value in flatten(record.facts)]
        if record.samples.get("continuation_text"):  # agreement: the two texts after the first divergence
            for name, key in (("native", "native_text"), ("candidate", "continuation_text")):
                pairs.append((f"{name} continues", one_line(record.samples[key], 300)))
        yield Facts(run.labels.task(task), one_line(task.variant), tuple(pairs))

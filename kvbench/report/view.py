"""The view model: everything that a report shows, worked out once and frozen. Templates and consoles only lay it out."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.metrics import Row
from kvbench.record import ERROR, Record
from kvbench.report.findings import Finding, failures, gaps
from kvbench.report.fmt import NOT_MEASURED, flatten, one_line, plain
from kvbench.report.labels import Label, Labels
from kvbench.report.model import OutcomeLike, Run, VerdictLike
from kvbench.report.precision import ChoiceLine, PrecisionLine, Proof, precision_lines, proofs
from kvbench.report.series import ByteBar, ItlSeries, byte_bars, itl_series
from kvbench.report.tables import MetricTable, limit_text, metric_tables, value_text

# The look of a verdict by exit code; the word itself is the verdict's own.
_TONES = {0: "pass", 1: "fail", 3: "incomplete", 4: "inconclusive"}
_STATUS_WORDS = {
    "pass": "passed",
    "fail": "failed",
    "inconclusive": "inconclusive",
    "not_evaluated": "not evaluated",
}


@dataclass(frozen=True)
class CheckLine:
    """One outcome, or several that say the same. value: "" where the check is about no number."""

    where: tuple[Label, ...]
    variant: str
    status: str
    value: str
    sentence: str


@dataclass(frozen=True)
class CheckGroup:
    """One check and what came of it everywhere."""

    check: str
    limit: str
    required: bool
    why: str
    lines: tuple[CheckLine, ...]


@dataclass(frozen=True)
class Fallback:
    """A declared one: requested != resolved, with the resolver's reason."""

    where: tuple[Label, ...]
    choice: ChoiceLine


@dataclass(frozen=True)
class Notice:
    """Something that must be read before any number. tone: "warn" or "info"."""

    tone: str
    title: str
    sentence: str


@dataclass(frozen=True)
class CellLine:
    """The whole expanded cell: `values` are aligned with the view's `cell_keys`."""

    label: Label
    baseline: Label
    line: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Reproduce:
    command: str
    matrix_path: str
    matrix_sha: str
    gate: str
    source: Mapping[str, Any]


@dataclass(frozen=True)
class View:
    """tone: "pass", "fail", "incomplete" or "inconclusive"; fixed: cell keys with one value everywhere;
    cell_keys: the keys that differ.
    """

    name: str
    word: str
    tone: str
    exit_code: int
    headline: str
    created_at: str
    notices: tuple[Notice, ...]
    failures: tuple[Finding, ...]
    fallbacks: tuple[Fallback, ...]
    gaps: tuple[Finding, ...]
    checks: tuple[CheckGroup, ...]
    precision: tuple[PrecisionLine, ...]
    proofs: tuple[Proof, ...]
    tables: tuple[MetricTable, ...]
    itl: tuple[ItlSeries, ...]
    bytes: tuple[ByteBar, ...]
    cells: tuple[CellLine, ...]
    cell_keys: tuple[str, ...]
    fixed: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    definitions: tuple[tuple[str, str], ...]
    reproduce: Reproduce


def build(manifest: Mapping[str, Any], records: Sequence[Record], rows: Sequence[Row], verdict: VerdictLike,
          definitions: Mapping[str, str] | None = None) -> View:  # fmt: skip
    """definitions: metric name to what it is; those of the metrics that have a row are shown."""
    run = Run(manifest, records, rows, verdict).with_fact_rows()
    labels = Labels(manifest)
    precision = precision_lines(run, labels)
    cell_keys, fixed = _split_keys(labels)
    present = {row.metric for row in run.rows}
    return View(
        name=one_line(manifest["name"], 200),
        word=one_line(verdict.word).replace("_", " ").upper(),
        tone=_TONES.get(verdict.exit_code, "incomplete"),
        exit_code=verdict.exit_code,
        headline=_headline(run),
        created_at=_time(str(manifest["created_at"])),
        notices=tuple(_notices(run, labels)),
        failures=failures(run, labels, precision),
        fallbacks=_fallbacks(precision),
        gaps=gaps(run, labels),
        checks=_checks(verdict.outcomes, labels),
        precision=precision,
        proofs=proofs(precision, labels),
        tables=metric_tables(run, labels),
        itl=itl_series(run, labels),
        bytes=byte_bars(run, labels),
        cells=tuple(_cell(line.label, labels, cell_keys) for line in precision),
        cell_keys=cell_keys,
        fixed=fixed,
        environment=tuple((one_line(k, 80), plain(v)) for k, v in flatten(manifest["environment"])),
        definitions=tuple((k, one_line(v)) for k, v in (definitions or {}).items() if k in present),
        reproduce=_reproduce(manifest),
    )


def _time(stamp: str) -> str:
    """`2026-10-01T12:00:00+00:00` -> `2026-10-01 12:00:00 UTC`."""
    utc = stamp.endswith("+00:00")
    return one_line(f"{stamp[:-6].replace('T', ' ')} UTC" if utc else stamp, 80)


def _headline(run: Run) -> str:
    """One sentence of counts: `2 of 14 checks failed, 12 passed; 1 task ended in an error.`"""
    counts = Counter(outcome.status for outcome in run.verdict.outcomes)
    total = sum(counts.values())
    if not total:
        return "No check was evaluated."
    if counts["pass"] == total and run.verdict.exit_code == 0:
        sentence = f"All {total} checks passed" if total > 1 else "The only check passed"
    else:
        order = ("fail", "inconclusive", "not_evaluated", "pass")
        shares = [f"{counts[status]} {_STATUS_WORDS[status]}" for status in order if counts[status]]
        sentence = f"{total} check{'s' if total > 1 else ''}: {', '.join(shares)}"
    errors = sum(record.status == ERROR for record in run.records)
    tasks = len(run.manifest["tasks"])
    ended = f"; {errors} of {tasks} tasks ended in an error" if errors else ""
    return f"{sentence}{ended}."


def _notices(run: Run, labels: Labels) -> list[Notice]:
    """What changes how every number below is to be read."""
    specs = [cell["spec"] for cell in labels.cells.values()]
    found = []

    def models(key: str, value: Any) -> str:
        return ", ".join(dict.fromkeys(plain(s.get("model"), 60) for s in specs if s.get(key) == value))

    if names := models("trust_remote_code", True):
        found.append(
            Notice(
                "warn",
                "Remote code trusted",
                f"Python code that came with {names} was run (trust_remote_code: true).",
            )
        )
    if names := models("plumbing", True):
        found.append(
            Notice(
                "warn",
                "Plumbing run",
                f"{names}: results show that the parts work together, not what a model's quality is.",
            )
        )
    if names := models("model_weights", "random"):
        found.append(
            Notice(
                "warn",
                "Random weights",
                f"{names} has random weights: bytes and times are real, quality numbers mean nothing.",
            )
        )
    if names := models("prefill_reads", "fresh"):
        found.append(
            Notice(
                "warn",
                "Prompts read fresh K/V",
                f"{names}: a prompt's own chunk is not read back from the quantized store (prefill_reads: fresh).",
            )
        )
    partial = sum(record.partial is not None for record in run.records)
    if partial:
        found.append(
            Notice(
                "info",
                "Partial run",
                f"{partial} of {len(run.records)} results cover less than the whole; they are marked.",
            )
        )
    missing = len(run.manifest["tasks"]) - len(run.records)
    if missing > 0:
        found.append(
            Notice(
                "warn",
                "Unfinished run",
                f"{missing} of {len(run.manifest['tasks'])} tasks have no record yet.",
            )
        )
    return found  # fmt: skip


def _fallbacks(precision: Sequence[PrecisionLine]) -> tuple[Fallback, ...]:
    where: dict[ChoiceLine, list[Label]] = {}
    for line in precision:
        for choice in line.choices:
            if choice.fell_back:
                where.setdefault(choice, []).append(line.label)
    return tuple(Fallback(tuple(labels), choice) for choice, labels in where.items())


def _checks(outcomes: Sequence[OutcomeLike], labels: Labels) -> tuple[CheckGroup, ...]:
    """Outcomes by check, in the gate's order; within a check those that did not pass come first."""
    groups: dict[tuple[str, str, bool, str], list[OutcomeLike]] = {}
    for outcome in outcomes:
        limit = limit_text(outcome.limit)
        groups.setdefault((outcome.check, limit, outcome.required, outcome.why or ""), []).append(outcome)
    return tuple(
        CheckGroup(one_line(check, 200), limit, required, one_line(why, 1000), _check_lines(members, labels))
        for (check, limit, required, why), members in groups.items()
    )


def _check_lines(outcomes: Sequence[OutcomeLike], labels: Labels) -> tuple[CheckLine, ...]:
    where: dict[tuple[str, str, str, str], list[str]] = {}
    for outcome in sorted(outcomes, key=lambda o: o.status == "pass"):
        sentence = one_line(labels.unnamed(outcome.sentence, outcome.cells), 1000)
        key = (one_line(outcome.variant, 120), outcome.status, value_text(outcome), sentence)
        where.setdefault(key, []).extend(outcome.cells)
    return tuple(CheckLine(labels.places(cells), *key) for key, cells in where.items())


def _split_keys(labels: Labels) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Cell keys that differ between cells, and those with one value (shown once, in full)."""
    keys = list(dict.fromkeys(key for cell in labels.cells.values() for key in cell["spec"]))
    values = {key: {repr(cell["spec"].get(key)) for cell in labels.cells.values()} for key in keys}
    varied = tuple(key for key in keys if len(values[key]) > 1)
    first = next(iter(labels.cells.values()))["spec"] if labels.cells else {}
    fixed = tuple((one_line(key), spec_value(first.get(key))) for key in keys if key not in varied)
    return varied, fixed


def spec_value(value: Any) -> str:
    """One value of a cell as the matrix would write it; null is null, for nothing was to be measured."""
    if value is None:
        return "null"
    return str(value) if type(value) is int else plain(value)


def _cell(label: Label, labels: Labels, keys: Sequence[str]) -> CellLine:
    cell = labels.cells[label.cells[0]]
    line = "added" if cell["line"] is None else f"line {cell['line']}"
    values = tuple(spec_value(cell["spec"].get(key)) for key in keys)
    return CellLine(label, labels.cell(cell["baseline"]), line, values)


def _reproduce(manifest: Mapping[str, Any]) -> Reproduce:
    matrix = manifest["matrix"]
    command = shlex.join(str(word) for word in manifest["command"])
    gate = manifest.get("gate")
    return Reproduce(
        one_line(command),
        one_line(str(matrix["path"] or NOT_MEASURED)) if matrix["path"] else "not a file",
        one_line(str(matrix["sha"])),
        one_line(str(gate)) if gate else "none: only the effective-precision check",
        matrix["source"],
    )

"""The view model: everything that a report shows, computed once. Templates and consoles only lay it out."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.formats.scales import of_file
from kvbench.gate.verdict import NOT_EVALUATED
from kvbench.matrix.cells import one_model
from kvbench.records.run import Manifest
from kvbench.render.labels import Label, Labels
from kvbench.render.numbers import NOT_MEASURED, flatten, one_line, plain
from kvbench.report.figures.data import PlotData, plot_data
from kvbench.report.figures.sensitivity import LayerLine, layer_lines
from kvbench.report.figures.series import ByteBar, TimeSeries, byte_bars, itl_series
from kvbench.report.figures.sweep import Sweep, scale_sweep
from kvbench.report.model import JudgedRun, judged, model_digests, verdict_word
from kvbench.report.sections.card import Release, release
from kvbench.report.sections.checks import CheckGroup, check_groups
from kvbench.report.sections.device import DeviceLine, device_lines
from kvbench.report.sections.findings import Finding, failures, gaps
from kvbench.report.sections.heat import HeatTable, heat_tables
from kvbench.report.sections.notices import Notice, headline, notices
from kvbench.report.sections.precision import (
    ChoiceLine,
    PrecisionGroup,
    PrecisionLine,
    Proof,
    grouped,
    precision_lines,
    proofs,
)
from kvbench.report.sections.provenance import Provenance, provenances
from kvbench.report.sections.tables import MetricTable, metric_tables

# The look of a verdict by exit code. A pass without a gate is "incomplete".
_TONES = {0: "pass", 1: "fail", 3: "incomplete", 4: "inconclusive"}


@dataclass(frozen=True)
class Fallback:
    """A choice whose resolved option differs from the requested one, with the resolver's reason."""

    where: tuple[Label, ...]
    choice: ChoiceLine


@dataclass(frozen=True)
class CellLine:
    """A cell of the matrix. values: aligned with the view's `cell_keys`."""

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
    model_digests: str


@dataclass(frozen=True)
class View:
    """model: "" if the cells have several; tone: "pass", "fail", "incomplete" or "inconclusive"; resolved:
    whether every cell has a decision; scales: those of each cell's cache by layer; sweep: None if no scale
    was swept; layers: what each layer costs, a line a cell; device: its state while latency was measured, a
    line a record; cell_keys: the keys that differ between cells; fixed: the other keys with their values.
    """

    name: str
    model: str
    word: str
    tone: str
    exit_code: int
    headline: str
    created_at: str
    release: Release
    notices: tuple[Notice, ...]
    failures: tuple[Finding, ...]
    fallbacks: tuple[Fallback, ...]
    resolved: bool
    gaps: tuple[Finding, ...]
    checks: tuple[CheckGroup, ...]
    precision: tuple[PrecisionGroup, ...]
    scales: tuple[Provenance, ...]
    proofs: tuple[Proof, ...]
    tables: tuple[MetricTable, ...]
    heats: tuple[HeatTable, ...]
    itl: tuple[TimeSeries, ...]
    bytes: tuple[ByteBar, ...]
    bytes_of: str
    sweep: Sweep | None
    layers: tuple[LayerLine, ...]
    plots: PlotData
    device: tuple[DeviceLine, ...]
    cells: tuple[CellLine, ...]
    cell_keys: tuple[str, ...]
    fixed: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    definitions: tuple[tuple[str, str], ...]
    reproduce: Reproduce

    @property
    def banner(self) -> str:
        """The look of the verdict: that of a pass only if nothing blocks a release."""
        return self.release.tone if self.exit_code == 0 else self.tone

    @property
    def sweep_at(self) -> str:
        """The section of the sweep: free-running text, or else quality."""
        return "generate" if any(table.key == "generate" for table in self.tables) else "quality"


def build(run: JudgedRun, definitions: Mapping[str, str] | None = None) -> View:
    """The view of a run. definitions: metric name to definition; those of metrics with a row are shown."""
    run = run.with_fact_rows()
    verdict, labels = run.verdict, Labels(run.run)
    precision = precision_lines(run, labels)
    cell_keys, fixed = _split_keys(labels)
    bars, bars_of = byte_bars(run, labels)
    device = device_lines(run, labels)
    tables = metric_tables(run, labels)
    present = {row.metric for row in run.rows}
    return View(
        name=one_line(run.manifest.name, 200),
        model=one_line(one_model([cell.spec for cell in labels.cells.values()]) or "", 200),
        word=one_line(verdict_word(run)).replace("_", " ").upper(),
        tone=_tone(run),
        exit_code=verdict.exit_code,
        headline=headline(run),
        created_at=_time(run.manifest.created_at),
        release=release(run, labels, precision),
        notices=tuple(notices(run, labels, device)),
        failures=failures(run, labels, precision),
        fallbacks=_fallbacks(precision, labels),
        resolved=bool(precision) and all(line.choices[0].resolved != NOT_MEASURED for line in precision),
        gaps=gaps(run, labels),
        checks=check_groups(verdict.outcomes, labels),
        precision=grouped(precision, labels),
        scales=provenances(run, labels),
        proofs=proofs(precision, labels),
        tables=tables,
        heats=heat_tables(tables, labels),
        itl=itl_series(run, labels),
        bytes=bars,
        bytes_of=bars_of,
        sweep=scale_sweep(run, labels),
        layers=layer_lines(run, labels),
        plots=plot_data(run, labels),
        device=device,
        cells=tuple(_cell(line.label, labels, cell_keys) for line in precision),
        cell_keys=cell_keys,
        fixed=fixed,
        environment=tuple((one_line(k, 80), plain(v)) for k, v in flatten(run.manifest.environment)),
        definitions=tuple((k, one_line(v)) for k, v in (definitions or {}).items() if k in present),
        reproduce=_reproduce(run.manifest),
    )


def _tone(run: JudgedRun) -> str:
    code = run.verdict.exit_code
    passed = judged(run) and run.verdict.word != NOT_EVALUATED
    return _TONES.get(code, "incomplete") if code or passed else "incomplete"


def _time(stamp: str) -> str:
    """`2026-10-01T12:00:00+00:00` -> `2026-10-01 12:00:00 UTC`."""
    utc = stamp.endswith("+00:00")
    return one_line(f"{stamp[:-6].replace('T', ' ')} UTC" if utc else stamp, 80)


def _fallbacks(precision: Sequence[PrecisionLine], labels: Labels) -> tuple[Fallback, ...]:
    where: dict[ChoiceLine, list[str]] = {}
    for line in precision:
        for choice in line.choices:
            if choice.fell_back:
                where.setdefault(choice, []).extend(line.label.cells)
    return tuple(Fallback(labels.places(cells), choice) for choice, cells in where.items())


def _split_keys(labels: Labels) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Cell keys that differ between cells, and the others with their value."""
    keys = list(dict.fromkeys(key for cell in labels.cells.values() for key in cell.spec))
    values = {key: {repr(cell.spec.get(key)) for cell in labels.cells.values()} for key in keys}
    varied = tuple(key for key in keys if len(values[key]) > 1)
    first = next(iter(labels.cells.values())).spec if labels.cells else {}
    fixed = tuple((one_line(key), spec_value(first.get(key))) for key in keys if key not in varied)
    return varied, fixed


def spec_value(value: Any) -> str:
    """One value of a cell as in the matrix, so None is null; a file of scales as its name and digest."""
    if value is None:
        return "null"
    if facts := of_file(value):
        return f"{facts['file']} ({facts['sha']})"
    return str(value) if type(value) is int else plain(value)


def _cell(label: Label, labels: Labels, keys: Sequence[str]) -> CellLine:
    cell = labels.cells[label.cells[0]]
    line = "added" if cell.line is None else f"line {cell.line}"
    values = tuple(spec_value(cell.spec.get(key)) for key in keys)
    return CellLine(label, labels.cell(cell.baseline), line, values)


def _reproduce(manifest: Manifest) -> Reproduce:
    matrix, gate = manifest.matrix, manifest.gate
    return Reproduce(
        command=one_line(shlex.join(manifest.command)),
        matrix_path=one_line(str(matrix.path)) if matrix.path else "not a file",
        matrix_sha=one_line(matrix.sha),
        gate=one_line(str(gate)) if gate else "none: built-in checks only",
        source=matrix.source,
        model_digests=one_line(model_digests(manifest.tasks) or "not recorded"),
    )

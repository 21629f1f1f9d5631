"""The view model: everything that a report shows, computed once. Templates and consoles only lay it out."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.formats.scales import of_file
from kvbench.gate.verdict import NOT_EVALUATED
from kvbench.matrix.cells import one_model
from kvbench.render.labels import Label
from kvbench.render.numbers import NOT_MEASURED, flatten, one_line, plain
from kvbench.report.figures import costs, drilldown, quality
from kvbench.report.model import JudgedRun, judged, model_digests, verdict_word
from kvbench.report.sections.card import Release, release
from kvbench.report.sections.checks import CheckGroup, check_groups
from kvbench.report.sections.findings import Finding, failures, gaps
from kvbench.report.sections.heat import HeatTable, heat_tables
from kvbench.report.sections.notices import DeviceLine, Notice, device_lines, headline, notices
from kvbench.report.sections.precision import (
    ChoiceLine,
    PrecisionGroup,
    Proof,
    grouped,
    precision_lines,
    proofs,
)
from kvbench.report.sections.provenance import Provenance, provenances
from kvbench.report.sections.tables import MetricTable, metric_tables


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
    line a record; cell_keys: the keys that differ between cells; fixed: the other keys with their values;
    problems: (section, sentence) for each unreadable record. Empty or None: nothing was measured.
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
    itl: tuple[costs.TimeSeries, ...]
    bytes: tuple[costs.ByteBar, ...]
    bytes_of: str
    sweep: quality.Sweep | None
    layers: tuple[quality.LayerLine, ...]
    ttft: tuple[costs.TimeSeries, ...]
    kld: tuple[quality.KldLine, ...]
    agreement: tuple[quality.AgreementLine, ...]
    health: tuple[quality.HealthLine, ...]
    roof: costs.Roof | None
    products: tuple[costs.ProductTimes, ...]
    questions: tuple[drilldown.Questions, ...]
    chunks: tuple[drilldown.Chunks, ...]
    problems: tuple[tuple[str, str], ...]
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
    manifest, code = run.manifest, run.verdict.exit_code
    passed = judged(run) and run.verdict.word != NOT_EVALUATED
    tones = {0: "pass" if passed else "incomplete", 1: "fail", 4: "inconclusive"}
    precision, device, tables = precision_lines(run), device_lines(run), metric_tables(run)
    fell = ((x, line.label.cells) for line in precision for x in line.choices if x.fell_back)
    cell_keys, fixed = _split_keys(run)
    bars, bars_of = costs.byte_bars(run)
    stamp, utc = manifest.created_at, manifest.created_at.endswith("+00:00")
    present = {row.metric for row in run.rows}
    return View(
        name=one_line(manifest.name, 200),
        model=one_line(one_model([cell.spec for cell in manifest.cells]) or "", 200),
        word=one_line(verdict_word(run)).replace("_", " ").upper(),
        tone=tones.get(code, "incomplete"),
        exit_code=code,
        headline=headline(run),
        created_at=one_line(f"{stamp[:-6].replace('T', ' ')} UTC" if utc else stamp, 80),
        release=release(run, precision),
        notices=tuple(notices(run, device)),
        failures=failures(run, precision),
        fallbacks=tuple(Fallback(where, choice) for choice, where in run.gathered(fell)),
        resolved=bool(precision) and all(line.kv.resolved != NOT_MEASURED for line in precision),
        gaps=gaps(run),
        checks=check_groups(run),
        precision=grouped(run, precision),
        scales=provenances(run),
        proofs=proofs(run, precision),
        tables=tables,
        heats=heat_tables(run, tables),
        itl=costs.time_series(run, "itl_ms"),
        bytes=bars,
        bytes_of=bars_of,
        sweep=quality.scale_sweep(run),
        layers=quality.layer_lines(run),
        **_plots(run),
        device=device,
        cells=tuple(_cell(run, line.label, cell_keys) for line in precision),
        cell_keys=cell_keys,
        fixed=fixed,
        environment=tuple((one_line(k, 80), plain(v)) for k, v in flatten(manifest.environment)),
        definitions=tuple((k, one_line(v)) for k, v in (definitions or {}).items() if k in present),
        reproduce=Reproduce(
            command=one_line(shlex.join(manifest.command)),
            matrix_path=one_line(str(manifest.matrix.path)) if manifest.matrix.path else "not a file",
            matrix_sha=one_line(manifest.matrix.sha),
            gate=one_line(str(manifest.gate)) if manifest.gate else "none: built-in checks only",
            source=manifest.matrix.source,
            model_digests=one_line(model_digests(manifest.tasks) or "not recorded"),
        ),
    )


# Fields of the view that are read from samples: section, data, and what stands for them if one is damaged.
_PLOTS: Mapping[str, tuple[str, Callable[[JudgedRun], Any], Any]] = {
    "ttft": ("latency", lambda run: costs.time_series(run, "ttft_ms"), ()),
    "kld": ("quality", quality.kld_lines, ()),
    "agreement": ("agreement", quality.agreement_lines, ()),
    "health": ("health", quality.health_lines, ()),
    "roof": ("latency", costs.roof, None),
    "products": ("gemm", costs.product_times, ()),
    "questions": ("mcq", drilldown.question_lists, ()),
    "chunks": ("quality", drilldown.chunk_lists, ()),
}


def _plots(run: JudgedRun) -> dict[str, Any]:
    """An unreadable record costs one plot, never the page."""
    found, problems = {}, []
    for name, (section, of, missing) in _PLOTS.items():
        try:
            found[name] = of(run)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as e:
            found[name], why = missing, one_line(f"{type(e).__name__}: {e}", 200)
            problems.append((section, f"A plot is missing: samples of a record cannot be read ({why})."))
    return {**found, "problems": tuple(problems)}


def _split_keys(run: JudgedRun) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    specs = [cell.spec for cell in run.manifest.cells]
    values = {key: [spec.get(key) for spec in specs] for spec in specs for key in spec}
    varied = tuple(key for key, own in values.items() if len(set(map(repr, own))) > 1)
    fixed = tuple((one_line(k), spec_value(own[0])) for k, own in values.items() if k not in varied)
    return varied, fixed


def spec_value(value: Any) -> str:
    """One value of a cell as in the matrix, so None is null; a file of scales as its name and digest."""
    if value is None:
        return "null"
    if facts := of_file(value):
        return f"{facts['file']} ({facts['sha']})"
    return str(value) if type(value) is int else plain(value)


def _cell(run: JudgedRun, label: Label, keys: Sequence[str]) -> CellLine:
    cell = run.run.cells[label.cells[0]]
    line = "added" if cell.line is None else f"line {cell.line}"
    values = tuple(spec_value(cell.spec.get(key)) for key in keys)
    return CellLine(label, run.labels.cell(cell.baseline), line, values)

"""The run on a console: brief tables, then what went wrong, then the verdict, which therefore stays visible.

Off a terminal it is plain text without colours or wrapped tables; NO_COLOR is respected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from kvbench.render.numbers import NOT_MEASURED
from kvbench.report.sections.checks import check_name, places
from kvbench.report.sections.findings import Finding
from kvbench.report.sections.tables import MetricTable
from kvbench.report.view import View

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_STYLES = {"pass": "bold green", "fail": "bold red", "incomplete": "bold blue", "inconclusive": "bold yellow"}
_PLAIN_WIDTH = 200  # columns off a terminal, where nothing needs to fit a window
_ITEMS = 5  # places named under one finding; the page has them all
_FORMAT_COLUMNS = ("Cell", "Requested", "Resolved", "Effective")
_KV_COLUMNS = (*_FORMAT_COLUMNS, "Scales", "Storage", "Transfer", "Execution", "Evidence", "Backend")
_WEIGHT_COLUMNS = (*_FORMAT_COLUMNS, "Storage", "gemm", "Products that ran")
_MDE_TITLE = "Detectable effects (80% power, 5%; n needed: samples that would decide at the observed value)"
_Row = tuple[Sequence[str], str]  # cells and style


def show(view: View, file: TextIO, paths: Sequence[Path] = (), quiet: bool = False) -> None:
    """Print the run to `file`; the verdict and `paths` come last. quiet: only these."""
    if not quiet:
        show_tables(view, file)
    show_verdict(view, file, paths)


def show_tables(view: View, file: TextIO) -> None:
    """Print everything before the verdict; this needs no report files, so it can precede them."""
    out = Printer(file)
    if view.model:
        out.title("")
        out.line(f"Model: {view.model}")
    _precision(out, view)
    for table in view.tables:
        _metrics(out, table)
    _detectable(out, view)
    _sweep(out, view)
    _notices(out, view)
    _findings(out, "Failures", view.failures)
    _findings(out, "Not measured in full", view.gaps)
    out.title("")


def show_verdict(view: View, file: TextIO, paths: Sequence[Path]) -> None:
    """Print the verdict and the files that were written."""
    out = Printer(file)
    out.line(f"  {view.headline} Exit code {view.exit_code}.", (view.word, _STYLES[view.tone]))
    out.lines(paths)


def console_for(file: TextIO) -> Console:
    """rich's console as kvbench uses it: plain off a terminal, no markup in text, NO_COLOR respected."""
    from rich.console import Console

    terminal = file.isatty()

    class Pipe(Console):
        """A closed pipe is an error of its own; rich would exit with 1, the code of a failed check."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Pipe(
        file=file,
        width=None if terminal else _PLAIN_WIDTH,
        force_terminal=terminal,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
    )


def console_table(heads: Iterable[str], terminal: bool, numbers: int = 0, fold: int = 99) -> Table:
    """An empty table; ASCII off a terminal.

    numbers: of the last columns are right-aligned; fold: of the first columns are folded, not cut.
    """
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD if terminal else box.ASCII2, pad_edge=False, header_style="bold")
    names = list(heads)
    for i, head in enumerate(names):
        made.add_column(
            head,
            justify="right" if i >= len(names) - numbers else "left",
            overflow="fold" if i < fold else "ellipsis",
        )
    return made


class Printer:
    """Lines, titles and tables on rich's console; text is never read as markup."""

    def __init__(self, file: TextIO) -> None:
        self.console = console_for(file)

    def line(self, text: str, head: tuple[str, str] = ("", ""), style: str = "") -> None:
        """head: text and style of the line's beginning."""
        from rich.text import Text

        self.console.print(Text.assemble(head, (text, style)), soft_wrap=True)

    def lines(self, lines: Iterable[object], style: str = "") -> None:
        for line in lines:
            self.line(str(line), style=style)

    def title(self, title: str) -> None:
        """An empty line, then the title in bold; "" for the empty line alone."""
        self.console.print()
        if title:
            self.line("", (title, "bold"))

    def table(self, columns: Iterable[str], rows: Sequence[_Row], numbers: int = 0, fold: int = 99) -> None:
        from rich.text import Text

        made = console_table(columns, self.console.file.isatty(), numbers, fold)
        for cells, style in rows:
            made.add_row(*map(Text, cells), style=style)
        self.console.print(made)


def _precision(out: Printer, view: View) -> None:
    """The precision of the cache, and of the weights if some cell has or requests other than native ones."""
    kv: list[_Row] = []
    weights: list[_Row] = []
    for group in view.precision:
        x, name = group.line, places(group.where, 1)
        style = "red" if x.state == "mismatch" else "dim" if x.label.baseline else ""
        of, gemm, backend = (x.choice(aspect) for aspect in ("weights", "gemm", "backend"))
        ran = backend.resolved or "not resolved"  # with its reason if another option was rejected
        ran += f" ({backend.reason})" if backend.resolved and backend.rejected else ""
        cells = [name, x.kv.requested, x.kv.resolved or "not resolved", x.effective, x.scales]
        kv.append(([*cells, x.storage, x.transfer, x.execution, x.state, ran], style))
        cells = [name, of.requested, of.resolved or "not resolved", x.effective_weights]
        weights.append(([*cells, x.stored_weights, gemm.resolved or "not resolved", x.products], style))
    out.title("Precision of the KV cache")
    out.table(_KV_COLUMNS, kv)
    if not {cells[i] for cells, _ in weights for i in (1, 3)} <= {"native", NOT_MEASURED}:
        out.title("Precision of the weights")
        out.table(_WEIGHT_COLUMNS, weights)


def _metrics(out: Printer, table: MetricTable) -> None:
    if not table.lines:
        return
    rows: list[_Row] = []
    for line in table.lines:
        name = " ".join(filter(None, (line.label.text, line.variant, "(partial)" if line.partial else "")))
        values = []
        for entry in (line.entries[i] for i in table.brief):
            failed = f" {entry.status.upper()}" if entry and entry.status in ("fail", "inconclusive") else ""
            values.append(f"{entry.shown.brief}{failed}" if entry else "-")
        if line.silent:
            values = [NOT_MEASURED, *[""] * (len(values) - 1)]
        rows.append(([name, *values], "dim" if line.label.baseline else ""))
    out.title(table.title)
    heads = ["Measured on", *(table.columns[i].metric for i in table.brief)]
    out.table(heads, rows, len(table.brief), fold=0)
    if table.footnote:
        out.line(table.footnote, style="dim")


def _detectable(out: Printer, view: View) -> None:
    rows: list[_Row] = []
    for group in view.checks:
        lines = [line for line in group.lines if line.mde]
        for line in lines:
            name = check_name(group.check, line.variant)
            name = f"{name}: {places(line.where, 1)}" if len(lines) > 1 else name
            cells = (name, line.status, line.value, line.mde, line.n_needed or "-")
            rows.append((cells, "dim" if line.status == "pass" else ""))
    if rows:
        out.title(_MDE_TITLE)
        out.table(("Check", "Outcome", "Value", "Detectable", "n needed"), rows, numbers=4, fold=1)


def _sweep(out: Printer, view: View) -> None:
    if view.sweep:
        out.title("Static scales")
        out.line(view.sweep.sentence)
    if view.layers:
        out.title("Layers")
        for line in view.layers:
            out.line(f"{line.name}: {line.sentence}.")


def _notices(out: Printer, view: View) -> None:
    if view.notices or view.fallbacks:
        out.title("")
    for notice in view.notices:
        out.line(notice.sentence, (f"{notice.title}. ", "yellow" if notice.tone == "warn" else ""))
    for fallback in view.fallbacks:
        choice = fallback.choice
        change = f"{choice.aspect} {choice.requested} -> {choice.resolved}, {choice.reason}"
        out.line(f"{places(fallback.where, _ITEMS)}: {change}", ("Fallback. ", "yellow"))


def _findings(out: Printer, title: str, findings: Sequence[Finding]) -> None:
    if not findings:
        return
    out.title(title)
    for finding in findings:
        style = "yellow" if finding.kind in ("inconclusive", "unverified", "partial") else "red"
        out.line(finding.title, (f"  {finding.kind}: ", style if title == "Failures" else ""))
        for item in finding.items[:_ITEMS]:
            out.line(f"    {places(item.where, _ITEMS)}: {item.sentence}")
        if len(finding.items) > _ITEMS:
            out.line(f"    and {len(finding.items) - _ITEMS} more")

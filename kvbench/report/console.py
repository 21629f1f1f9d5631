"""The run on a console: brief tables, then what went wrong, then the verdict, which therefore stays visible.

Off a terminal it is plain text without colours or wrapped tables; NO_COLOR is respected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from kvbench.render.numbers import NOT_MEASURED
from kvbench.report.sections.findings import Finding
from kvbench.report.sections.precision import ChoiceLine, PrecisionLine
from kvbench.report.sections.tables import Entry, MetricTable
from kvbench.report.sections.wording import check_name, places
from kvbench.report.view import View

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"pass": "bold green", "fail": "bold red", "incomplete": "bold blue", "inconclusive": "bold yellow"}
_PLAIN_WIDTH = 200  # columns off a terminal, where nothing needs to fit a window
_ITEMS = 5  # places named under one finding; the page has them all
_FORMAT_COLUMNS = ("Cell", "Requested", "Resolved", "Effective")
_KV_COLUMNS = (*_FORMAT_COLUMNS, "Scales", "Storage", "Transfer", "Execution", "Evidence", "Backend")
_WEIGHT_COLUMNS = (*_FORMAT_COLUMNS, "Storage", "gemm", "Products that ran")
_MDE_TITLE = "Detectable effects (80% power, 5%; n needed: samples that would decide at the observed value)"
_Rows = list[tuple[Sequence[str], str]]  # cells and style of each row


def show(view: View, file: TextIO, paths: Sequence[Path] = (), quiet: bool = False) -> None:
    """Print the run to `file`; the verdict and `paths` come last. quiet: only these."""
    if not quiet:
        show_tables(view, file)
    show_verdict(view, file, paths)


def show_tables(view: View, file: TextIO) -> None:
    """Print everything before the verdict; this needs no report files, so it can precede them."""
    out = _Printer(file)
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
    out = _Printer(file)
    out.line(f"  {view.headline} Exit code {view.exit_code}.", (view.word, _STYLES[view.tone]))
    for path in paths:
        out.line(str(path))


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


class _Printer:
    """Lines, titles and tables on rich's console; text is never read as markup."""

    def __init__(self, file: TextIO) -> None:
        self.console = console_for(file)
        self.terminal = file.isatty()

    def line(self, text: str, head: tuple[str, str] = ("", ""), style: str = "") -> None:
        """head: text and style of the line's beginning."""
        from rich.text import Text

        self.console.print(Text.assemble(head, (text, style)), soft_wrap=True)

    def title(self, title: str) -> None:
        """An empty line, then the title in bold; "" for the empty line alone."""
        self.console.print()
        if title:
            self.line("", (title, "bold"))

    def table(self, columns: Iterable[str], rows: _Rows, numbers: int = 0, fold: int = 99) -> None:
        """numbers: of the last columns are right-aligned; fold: of the first columns are folded, not cut."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        heads = list(columns)
        made = Table(
            box=box.SIMPLE_HEAD if self.terminal else box.ASCII2, pad_edge=False, header_style="bold"
        )
        for i, head in enumerate(heads):
            right = i >= len(heads) - numbers
            made.add_column(
                head, justify="right" if right else "left", overflow="fold" if i < fold else "ellipsis"
            )
        for cells, style in rows:
            made.add_row(*map(Text, cells), style=style)
        self.console.print(made)


def _style(line: PrecisionLine) -> str:
    return "red" if line.state == "mismatch" else "dim" if line.label.baseline else ""


def _precision(out: _Printer, view: View) -> None:
    """The precision of the cache, and of the weights if some cell has or requests other than native ones."""
    kv: _Rows = []
    weights: _Rows = []
    for group in view.precision:
        x, name = group.line, places(group.where, 1)
        cells = [name, x.kv.requested, x.kv.resolved or "not resolved", x.effective, x.scales]
        cells += [x.storage, x.transfer, x.execution, x.state, _backend(x.backend)]
        kv.append((cells, _style(x)))
        cells = [name, x.weights.requested, x.weights.resolved or "not resolved", x.effective_weights]
        cells += [x.stored_weights, x.gemm.resolved or "not resolved", x.products]
        weights.append((cells, _style(x)))
    out.title("Precision of the KV cache")
    out.table(_KV_COLUMNS, kv)
    if not {cells[i] for cells, _ in weights for i in (1, 3)} <= {"native", NOT_MEASURED}:
        out.title("Precision of the weights")
        out.table(_WEIGHT_COLUMNS, weights)


def _backend(choice: ChoiceLine) -> str:
    """`triton`, or `torch (no_gpu)` if another option was rejected."""
    if not choice.resolved:
        return "not resolved"
    return f"{choice.resolved} ({choice.reason})" if choice.rejected else choice.resolved


def _metrics(out: _Printer, table: MetricTable) -> None:
    if not table.lines:
        return
    rows: _Rows = []
    for line in table.lines:
        name = " ".join(filter(None, (line.label.text, line.variant, "(partial)" if line.partial else "")))
        values = [_value(line.entries[i]) for i in table.brief]
        if line.silent:
            values = [NOT_MEASURED, *[""] * (len(values) - 1)]
        rows.append(([name, *values], "dim" if line.label.baseline else ""))
    out.title(table.title)
    out.table(
        ["Measured on", *(table.columns[i].metric for i in table.brief)], rows, len(table.brief), fold=0
    )
    if table.footnote:
        out.line(table.footnote, style="dim")


def _value(entry: Entry | None) -> str:
    if entry is None:
        return "-"
    failed = f" {entry.status.upper()}" if entry.status in ("fail", "inconclusive") else ""
    return f"{entry.shown.brief}{failed}"


def _detectable(out: _Printer, view: View) -> None:
    """The smallest effect that each estimate could have shown: read before a pass is believed."""
    rows: _Rows = []
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


def _sweep(out: _Printer, view: View) -> None:
    if view.sweep:
        out.title("Static scales")
        out.line(view.sweep.sentence)
    if view.layers:
        out.title("Layers")
        for line in view.layers:
            out.line(f"{line.name}: {line.sentence}.")


def _notices(out: _Printer, view: View) -> None:
    if view.notices or view.fallbacks:
        out.title("")
    for notice in view.notices:
        out.line(notice.sentence, (f"{notice.title}. ", "yellow" if notice.tone == "warn" else ""))
    for fallback in view.fallbacks:
        choice = fallback.choice
        change = f"{choice.aspect} {choice.requested} -> {choice.resolved}, {choice.reason}"
        out.line(f"{places(fallback.where, _ITEMS)}: {change}", ("Fallback. ", "yellow"))


def _findings(out: _Printer, title: str, findings: Sequence[Finding]) -> None:
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

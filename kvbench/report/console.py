"""The run on a console: brief tables, then what went wrong, then the verdict, which so stays in sight.

Off a terminal it is plain text without colours or wrapped tables; NO_COLOR is respected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from kvbench.render.labels import Label
from kvbench.render.numbers import NOT_MEASURED
from kvbench.report.sections.findings import Finding
from kvbench.report.sections.precision import ChoiceLine
from kvbench.report.sections.tables import Entry, MetricTable
from kvbench.report.view import View

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_STYLES = {"pass": "bold green", "fail": "bold red", "incomplete": "bold blue", "inconclusive": "bold yellow"}
_PLAIN_WIDTH = 200  # columns off a terminal, where nothing needs to fit a window
_ITEMS = 5  # places named under one finding; the page has them all


def show(view: View, file: TextIO, paths: Sequence[Path] = (), quiet: bool = False) -> None:
    """Print the run to `file`; `paths` are named last, with the verdict. quiet: the verdict and them only."""
    if not quiet:
        show_tables(view, file)
    show_verdict(view, file, paths)


def show_tables(view: View, file: TextIO) -> None:
    """Print everything before the verdict. Needs no report files, so it can be printed before they are written."""
    terminal = file.isatty()
    console = console_for(file)
    _model(console, view)
    _precision(console, view, terminal)
    for table in view.tables:
        if table.lines:
            _metrics(console, table, terminal)
    _resolution(console, view, terminal)
    _sweep(console, view)
    _notices(console, view)
    for title, findings in (("Failures", view.failures), ("Not measured in full", view.gaps)):
        _findings(console, title, findings)
    console.print()


def console_for(file: TextIO) -> Console:
    """rich's console as kvbench uses it: plain off a terminal, no markup in text, NO_COLOR respected."""
    from rich.console import Console

    terminal = file.isatty()

    class Pipe(Console):
        """rich would end the process with 1, the code of a failed check, when the reader has gone."""

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


def _table(terminal: bool) -> Table:
    from rich import box
    from rich.table import Table

    lines = box.SIMPLE_HEAD if terminal else box.ASCII2
    return Table(box=lines, pad_edge=False, header_style="bold")


def _title(console: Console, title: str) -> None:
    from rich.text import Text

    console.print()
    console.print(Text(title, style="bold"))


def _model(console: Console, view: View) -> None:
    """Once, as no label has it; where there are several, every label has its own."""
    from rich.text import Text

    if view.model:
        console.print()
        console.print(Text(f"Model: {view.model}"), soft_wrap=True)


def _precision(console: Console, view: View, terminal: bool) -> None:
    _title(console, "Precision of the KV cache")
    table = _table(terminal)
    for head in (
        "Cell",
        "Requested",
        "Resolved",
        "Effective",
        "Scales",
        "Storage",
        "Transfer",
        "Execution",
        "Evidence",
        "Backend",
    ):
        table.add_column(head, overflow="fold")  # cut short, int8_sym and int8_static are the same word
    for group in view.precision:
        line = group.line
        name = _places(group.where, 1)
        style = "red" if line.state == "mismatch" else "dim" if line.label.baseline else ""
        cells = (name, line.kv.requested, line.kv.resolved or "not resolved", line.effective,
                 line.scales, line.storage, line.transfer, line.execution, line.state, _backend(line.backend))  # fmt: skip
        table.add_row(*_texts(cells), style=style)
    console.print(table)
    _weights(console, view, terminal)


def _weights(console: Console, view: View, terminal: bool) -> None:
    """A table of its own where some cell has, or asks for, other weights than native ones."""
    words = {word for g in view.precision for word in (g.line.weights.requested, g.line.effective_weights)}
    if words <= {"native", NOT_MEASURED}:
        return
    _title(console, "Precision of the weights")
    table = _table(terminal)
    for head in ("Cell", "Requested", "Resolved", "Effective", "Storage", "gemm", "Products that ran"):
        table.add_column(head, overflow="fold")
    for group in view.precision:
        line = group.line
        style = "red" if line.state == "mismatch" else "dim" if line.label.baseline else ""
        cells = (_places(group.where, 1), line.weights.requested, line.weights.resolved or "not resolved",
                 line.effective_weights, line.stored_weights, line.gemm.resolved or "not resolved", line.products)  # fmt: skip
        table.add_row(*_texts(cells), style=style)
    console.print(table)


def _backend(choice: ChoiceLine) -> str:
    """`triton`, or `torch (no_gpu)` where something stood against what was asked for."""
    if not choice.resolved:
        return "not resolved"
    return f"{choice.resolved} ({choice.reason})" if choice.rejected else choice.resolved


def _metrics(console: Console, table: MetricTable, terminal: bool) -> None:
    from rich.text import Text

    shown = [i for i, column in enumerate(table.columns) if column.brief]
    _title(console, table.title)
    out = _table(terminal)
    out.add_column("Measured on")
    for i in shown:
        out.add_column(table.columns[i].metric, justify="right")
    for line in table.lines:
        name = " ".join(part for part in (line.label.text, line.variant) if part)
        marked = f"{name} (partial)" if line.partial else name
        values = [_value(line.entries[i]) for i in shown]
        if line.silent:
            values = ["not measured", *[""] * (len(values) - 1)]
        cells = [marked, *values]
        out.add_row(*_texts(cells), style="dim" if line.label.baseline else "")
    console.print(out)
    if table.footnote:
        console.print(Text(table.footnote, style="dim"), soft_wrap=True)


def _resolution(console: Console, view: View, terminal: bool) -> None:
    """What the checks that judge an estimate could have decided: read before a pass is believed."""
    found = [(group, line) for group in view.checks for line in group.lines if line.mde]
    if not found:
        return
    _title(
        console,
        "What so much data decides (80% power, 5%; n needed: samples that would decide at the value that was found)",
    )
    table = _table(terminal)
    table.add_column("Check", overflow="fold")
    for head in ("Outcome", "Value", "Detectable", "n needed"):
        table.add_column(head, justify="right")
    for group, line in found:
        name = (
            f"{group.check} ({line.variant})"
            if line.variant and line.variant not in group.check
            else group.check
        )
        if sum(bool(other.mde) for other in group.lines) > 1:
            name = f"{name}: {_places(line.where, 1)}"
        cells = (name, line.status, line.value, line.mde, line.n_needed or "-")
        table.add_row(*_texts(cells), style="dim" if line.status == "pass" else "")
    console.print(table)


def _sweep(console: Console, view: View) -> None:
    from rich.text import Text

    if view.sweep:
        _title(console, "Static scales")
        console.print(Text(view.sweep.sentence), soft_wrap=True)
    if view.layers:
        _title(console, "Layers")
        for line in view.layers:
            console.print(Text(f"{line.name}: {line.sentence}."), soft_wrap=True)


def _value(entry: Entry | None) -> str:
    if entry is None:
        return "-"
    failed = f" {entry.status.upper()}" if entry.status in ("fail", "inconclusive") else ""
    return f"{entry.shown.brief}{failed}"


def _notices(console: Console, view: View) -> None:
    from rich.text import Text

    if view.notices or view.fallbacks:
        console.print()
    for notice in view.notices:
        style = "yellow" if notice.tone == "warn" else ""
        console.print(Text.assemble((f"{notice.title}. ", style), notice.sentence), soft_wrap=True)
    for fallback in view.fallbacks:
        choice = fallback.choice
        where = _places(fallback.where, _ITEMS)
        sentence = f"{where}: {choice.aspect} {choice.requested} -> {choice.resolved}, {choice.reason}"
        console.print(Text.assemble(("Fallback. ", "yellow"), sentence), soft_wrap=True)


def _findings(console: Console, title: str, findings: Sequence[Finding]) -> None:
    from rich.text import Text

    if not findings:
        return
    _title(console, title)
    for finding in findings:
        style = "yellow" if finding.kind in ("inconclusive", "unverified", "partial") else "red"
        head = Text.assemble((f"  {finding.kind}: ", style if title == "Failures" else ""), finding.title)
        console.print(head, soft_wrap=True)
        for item in finding.items[:_ITEMS]:
            console.print(Text(f"    {_places(item.where, _ITEMS)}: {item.sentence}"), soft_wrap=True)
        if len(finding.items) > _ITEMS:
            console.print(Text(f"    and {len(finding.items) - _ITEMS} more"), soft_wrap=True)


def show_verdict(view: View, file: TextIO, paths: Sequence[Path]) -> None:
    """Print the verdict and the files that were written."""
    from rich.text import Text

    console = console_for(file)
    verdict = Text.assemble((view.word, _STYLES[view.tone]), f"  {view.headline} Exit code {view.exit_code}.")
    console.print(verdict, soft_wrap=True)
    for path in paths:
        console.print(Text(str(path)), soft_wrap=True)


def _places(labels: Sequence[Label], most: int) -> str:
    """`native (4 cells); int8_sym · batch 1 and 2 more cells`"""
    names = [x.text + (f" ({len(x.cells)} cells)" if len(x.cells) > 1 else "") for x in labels[:most]]
    rest = sum(len(label.cells) for label in labels[most:])
    more = f" and {rest} more cell{'s' if rest > 1 else ''}" if rest else ""
    return "; ".join(names) + more


def _texts(cells: Iterable[str]) -> list[Text]:
    """Texts that rich never reads as markup."""
    from rich.text import Text

    return [Text(cell) for cell in cells]

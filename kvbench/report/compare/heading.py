"""What precedes the numbers of several runs in every format: the runs, their faults, and notes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from kvbench.compare.history import History
from kvbench.compare.pairing import Stored
from kvbench.compare.result import Comparison
from kvbench.render.numbers import one_line
from kvbench.report.markdown import escaped, table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Result = Comparison | History


def runs_of(runs: Sequence[Stored]) -> list[tuple[str, str, str, str]]:
    """(name, folder, matrix, creation time) of each run."""
    return [
        (run.name, one_line(run.path), one_line(run.run.manifest.name), one_line(run.run.manifest.created_at))
        for run in runs
    ]


def faults_of(result: Result) -> list[str]:
    """One sentence per failed built-in check of a run."""
    return [one_line(f"{run} is invalid on its own: {sentence}") for run, sentence in result.faults]


def as_json(result: Result) -> dict[str, Any]:
    """Keys: runs, faults, named."""
    keys = ("name", "path", "matrix", "created_at")
    return {
        "runs": [dict(zip(keys, run, strict=True)) for run in runs_of(result.runs)],
        "faults": [{"run": run, "sentence": sentence} for run, sentence in result.faults],
        "named": list(result.named),
    }


def as_markdown(result: Result) -> list[str]:
    """Lines of Markdown: the table of runs, then faults and notes; the last line is empty."""
    rows = [tuple(map(escaped, run)) for run in runs_of(result.runs)]
    notes = [f"- **{escaped(sentence)}**" for sentence in faults_of(result)]
    notes += [f"- {escaped(sentence)}." for sentence in result.named]
    return [table(("Run", "Folder", "Matrix", "Made"), rows), "", *([*notes, ""] if notes else [])]


def html_values(result: Result) -> dict[str, Any]:
    """The values that both templates need."""
    named = [one_line(sentence) for sentence in result.named]
    return {"runs": runs_of(result.runs), "faults": faults_of(result), "named": named}


def print_heading(console: Console, result: Result, reference: str = "", quiet: bool = False) -> None:
    """Print runs, faults and notes. reference: name of the reference run; quiet: faults only."""
    for name, path, matrix, made in () if quiet else runs_of(result.runs):
        role = " (reference)" if name == reference else ""
        print_lines(console, [f"{name}{role}: {path}, {matrix}, {made}"])
    print_lines(console, faults_of(result), "bold red")
    print_lines(console, [] if quiet else [f"Note: {one_line(sentence)}." for sentence in result.named])


def print_lines(console: Console, lines: Iterable[object], style: str = "") -> None:
    """Print each as plain text on one line."""
    from rich.text import Text

    for line in lines:
        console.print(Text(str(line), style=style), soft_wrap=True)


def console_table(heads: Iterable[str], file: TextIO) -> Table:
    """An empty table for a console; ASCII if the file is not a terminal."""
    from rich import box
    from rich.table import Table

    out = Table(box=box.SIMPLE_HEAD if file.isatty() else box.ASCII2, pad_edge=False, header_style="bold")
    for head in heads:
        out.add_column(head, overflow="fold")
    return out

"""A page under its size however large the matrix: what is left out of it, in which order, and the sentence that says so.

The page alone is shortened; the CSV and JSON files beside it always hold everything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvbench.report.sections.notices import Notice
from kvbench.report.sections.tables import Line, MetricTable
from kvbench.report.view import View

LIMIT = 2_000_000  # bytes
_LINES = 40  # of a table, where even the briefest columns of all lines are too many

Step = tuple[str, Callable[[View], View]]


def shorter(view: View, step: Step) -> View:
    """The view without what the step leaves out, and with a notice that says so first of all."""
    said, leave = step
    before = [notice for notice in view.notices if notice.title == _TITLE]
    sentence = f"{before[0].sentence} {said}" if before else f"To stay under {LIMIT // 1_000_000} MB, {said}"
    others = tuple(notice for notice in view.notices if notice.title != _TITLE)
    return replace(leave(view), notices=(Notice("info", _TITLE, sentence), *others))


_TITLE = "Shortened page"


def _brief(view: View) -> View:
    """Only the columns that a console shows too, and those in which a check did not pass."""

    def table(one: MetricTable) -> MetricTable:
        kept = [
            i
            for i, column in enumerate(one.columns)
            if column.brief or any(_noticed(line, i) for line in one.lines)
        ]
        columns = tuple(one.columns[i] for i in kept)
        lines = tuple(replace(line, entries=tuple(line.entries[i] for i in kept)) for line in one.lines)
        return replace(one, columns=columns, lines=lines)

    return replace(view, tables=tuple(map(table, view.tables)))


def _noticed(line: Line, place: int) -> bool:
    entry = line.entries[place]
    return entry is not None and entry.status in ("fail", "inconclusive")


def _without_facts(view: View) -> View:
    return replace(
        view, tables=tuple(replace(table, facts=()) for table in view.tables), proofs=view.proofs[:_LINES]
    )


def _without_lists(view: View) -> View:
    return replace(view, plots=replace(view.plots, questions=(), chunks=()))


def _without_heats(view: View) -> View:
    return replace(view, heats=())


def _few_lines(view: View) -> View:
    """The lines in which a check did not pass first, then the others in their order."""

    def first(table: MetricTable) -> MetricTable:
        ranked = sorted(range(len(table.lines)), key=lambda i: not any(
            _noticed(table.lines[i], j) for j in range(len(table.columns))))  # fmt: skip
        return replace(table, lines=tuple(table.lines[i] for i in sorted(ranked[:_LINES])))

    return replace(view, tables=tuple(map(first, view.tables)), cells=view.cells[:_LINES])


# Each step says what it leaves out; they are taken in turn until the page fits.
STEPS: tuple[Step, ...] = (
    ("columns that only explain others are left out (results_long.csv has every metric).", _brief),
    ("How each value was measured is left out (the records have it).", _without_facts),
    ("Lists of questions, chunks and positions are left out (the records have them).", _without_lists),
    ("Heat tables are left out.", _without_heats),
    (f"Tables show {_LINES} lines, those first in which a check did not pass (results_long.csv has all).", _few_lines),
)  # fmt: skip

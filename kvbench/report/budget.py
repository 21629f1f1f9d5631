"""A page below its size limit however large the matrix: what is left out, in which order, and the notice
about it.

Only the page is shortened; the CSV and JSON files always have everything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvbench.report.sections.notices import info
from kvbench.report.sections.tables import Line, MetricTable
from kvbench.report.view import View

LIMIT = 2_000_000  # bytes
TITLE = "Shortened page"
_LINES = 40  # of a table, if even the brief columns of all lines are too many

Step = tuple[str, Callable[[View], View]]


def shorter(view: View, step: Step) -> View:
    """The view without what the step leaves out, and with a notice about it before all others."""
    sentence, leave_out = step
    before = next(
        (n.sentence for n in view.notices if n.title == TITLE), f"To stay under {LIMIT // 1_000_000} MB:"
    )
    others = (notice for notice in view.notices if notice.title != TITLE)
    return replace(leave_out(view), notices=(info(TITLE, f"{before} {sentence}"), *others))


def _brief(view: View) -> View:
    """Only the columns that a console shows too, and those with a check that did not pass."""

    def table(one: MetricTable) -> MetricTable:
        places = range(len(one.columns))
        kept = [i for i in places if one.columns[i].brief or any(_flagged(line, i) for line in one.lines)]
        columns = tuple(one.columns[i] for i in kept)
        lines = tuple(replace(line, entries=tuple(line.entries[i] for i in kept)) for line in one.lines)
        return replace(one, columns=columns, lines=lines)

    return replace(view, tables=tuple(map(table, view.tables)))


def _flagged(line: Line, place: int) -> bool:
    """Whether the check on this value failed or is inconclusive."""
    entry = line.entries[place]
    return entry is not None and entry.status in ("fail", "inconclusive")


def _without_facts(view: View) -> View:
    tables = tuple(replace(table, facts=()) for table in view.tables)
    return replace(view, tables=tables, proofs=view.proofs[:_LINES])


def _without_lists(view: View) -> View:
    return replace(view, plots=replace(view.plots, questions=(), chunks=()))


def _without_heats(view: View) -> View:
    return replace(view, heats=())


def _few_lines(view: View) -> View:
    """Lines with a check that did not pass come first into the selection; the order stays."""

    def first(table: MetricTable) -> MetricTable:
        places = range(len(table.columns))
        flagged = [any(_flagged(line, place) for place in places) for line in table.lines]
        ranked = sorted(range(len(table.lines)), key=lambda i: not flagged[i])
        return replace(table, lines=tuple(table.lines[i] for i in sorted(ranked[:_LINES])))

    return replace(view, tables=tuple(map(first, view.tables)), cells=view.cells[:_LINES])


# Taken in turn until the page fits.
STEPS: tuple[Step, ...] = (
    ("Only the main columns are shown (results_long.csv has every metric).", _brief),
    ("How each value was measured is left out (the records have it).", _without_facts),
    ("Lists of questions, chunks and positions are left out (the records have them).", _without_lists),
    ("Heat tables are left out.", _without_heats),
    (
        f"Tables show {_LINES} lines, failed and inconclusive checks first (results_long.csv has all).",
        _few_lines,
    ),
)

"""The two tables, long (one line a row of metrics) and wide (one line a cell), and their CSV files.

Numbers keep their full precision: reading them back gives the same float. A value that was not measured is an
empty field, a NaN is `NaN`. Text that a spreadsheet would take for a formula gets a single quote in front;
numbers never do.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvbench.render.labels import Labels
from kvbench.render.numbers import exact
from kvbench.report.model import JudgedRun
from kvbench.report.sections.precision import DECIDED, precision_lines
from kvbench.report.sections.tables import worst_checks

# What spreadsheets take for the start of a formula, including full-width forms.
_FORMULA = ("=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠")

_ROW_COLUMNS = ("metric", "variant", "value", "unit", "low", "high", "n", "baseline", "partial", "note")
_CHECK_COLUMNS = ("status", "limit", "mde", "n_needed", "look", "level")  # of the worst check on the row
_RAN_COLUMNS = (*(f"{aspect}_resolved" for aspect in DECIDED), "ran_on")
# Columns behind _RAN_COLUMNS: name, attribute of a precision line.
_STATES = {
    "effective": "effective",
    "storage": "storage",
    "transfer": "transfer",
    "execution": "execution",
    "effective_weights": "effective_weights",
    "stored_weights": "stored_weights",
    "products": "products",
    "evidence": "state",
}


def long_csv(run: JudgedRun) -> str:
    return _text(long_lines(run))


def wide_csv(run: JudgedRun) -> str:
    return _text(wide_lines(run))


def long_lines(run: JudgedRun) -> list[list[Any]]:
    """The heads, then a line a row: its cell, what that resolved to, the row, and the gate's check of it."""
    run = run.with_fact_rows()
    labels = Labels(run.run)
    keys = _keys(labels)
    ran = {line.label.cells[0]: line.ran for line in precision_lines(run, labels)}
    checks = worst_checks(run.verdict.outcomes)
    lines: list[list[Any]] = [["cell", "name", *keys, *_RAN_COLUMNS, *_ROW_COLUMNS, *_CHECK_COLUMNS]]
    for row in run.rows:
        cell = labels.cells.get(row.cell)
        spec = [cell.spec.get(key) if cell else None for key in keys]
        decided = ran.get(row.cell, [None] * len(_RAN_COLUMNS))
        values = [row.unit.name if column == "unit" else getattr(row, column) for column in _ROW_COLUMNS]
        outcome = checks.get((row.cell, row.metric, row.variant))
        judged = [getattr(outcome, column) if outcome else None for column in _CHECK_COLUMNS]
        lines.append([row.cell, cell.name if cell else "", *spec, *decided, *values, *judged])
    return lines


def wide_lines(run: JudgedRun) -> list[list[Any]]:
    """The heads, then one line a cell: its keys, its precision, then a column for each metric and variant."""
    run = run.with_fact_rows()
    labels = Labels(run.run)
    keys = _keys(labels)
    columns = list(dict.fromkeys((row.metric, row.variant) for row in run.rows))
    values = {(row.cell, row.metric, row.variant): row.value for row in run.rows}
    partial: dict[str, dict[str, None]] = {}
    for row in run.rows:
        if row.partial:
            partial.setdefault(row.cell, {})[row.partial] = None
    precision = {line.label.cells[0]: line for line in precision_lines(run, labels)}
    heads = [f"{metric} ({variant})" if variant else metric for metric, variant in columns]
    states = ["requested", "resolved", *_RAN_COLUMNS, *_STATES]
    lines: list[list[Any]] = [["cell", "name", "baseline", *keys, *states, "partial", *heads]]
    for cell, entry in labels.cells.items():
        line = precision[cell]
        own = [cell, entry.name, entry.baseline, *(entry.spec.get(key) for key in keys)]
        own += [
            line.kv.requested,
            line.kv.resolved,
            *line.ran,
            *(getattr(line, name) for name in _STATES.values()),
        ]
        own += ["; ".join(partial.get(cell, ())) or None]
        lines.append([*own, *(values.get((cell, metric, variant)) for metric, variant in columns)])
    return lines


def _keys(labels: Labels) -> list[str]:
    return list(dict.fromkeys(key for cell in labels.cells.values() for key in cell.spec))


def _text(lines: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_field(value) for value in line] for line in lines)
    return out.getvalue()


def _field(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return exact(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=as_json)
    text = text.replace("\r\n", "\n").replace("\r", "\n")  # one kind of line end, which the writer quotes
    return f"'{text}" if text.startswith(_FORMULA) else text


def as_json(value: Any) -> Any:
    """A container that json does not know as one that it does."""
    return dict(value) if isinstance(value, Mapping) else list(value)

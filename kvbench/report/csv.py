"""The two tables, long (one line a row of metrics) and wide (one line a cell), and their CSV files.

Numbers keep their full precision: what is read back is the same float. A value that was not measured is an empty
field, a NaN is `NaN`. Text that a spreadsheet would take for a formula gets a single quote in front; numbers never.
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
from kvbench.report.sections.precision import PrecisionLine, precision_lines
from kvbench.report.sections.tables import worst_checks

# What spreadsheets take for the start of a formula, their full-width forms included.
_FORMULA = ("=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠")

_ROW_COLUMNS = ("metric", "variant", "value", "unit", "low", "high", "n", "baseline", "partial", "note")
_CHECK_COLUMNS = (
    "status",
    "limit",
    "mde",
    "n_needed",
    "look",
    "level",
)  # of the gravest check on the row, empty where there is none
# Cell keys that may be `auto`: what they became stands in a column of its own beside the key.
_DECIDED = ("backend", "weights", "gemm", "decode", "compile")
_RAN_COLUMNS = (*(f"{aspect}_resolved" for aspect in _DECIDED), "ran_on")
_STATE_COLUMNS = (
    "requested",
    "resolved",
    *_RAN_COLUMNS,
    "effective",
    "storage",
    "transfer",
    "execution",
    "effective_weights",
    "stored_weights",
    "products",
    "evidence",
)


def long_csv(run: JudgedRun) -> str:
    return _text(long_lines(run))


def wide_csv(run: JudgedRun) -> str:
    return _text(wide_lines(run))


def long_lines(run: JudgedRun) -> list[list[Any]]:
    """The heads, then a line a row: cell id and name, the cell's keys, what they resolved to, where attention ran, then the row: metric, variant, ...,
    and what the gate found of it.
    """
    run = run.with_fact_rows()
    labels = Labels(run.run)
    keys = _keys(labels)
    ran = {line.label.cells[0]: _ran(line) for line in precision_lines(run, labels)}
    checks = worst_checks(run.verdict.outcomes)
    lines: list[list[Any]] = [["cell", "name", *keys, *_RAN_COLUMNS, *_ROW_COLUMNS, *_CHECK_COLUMNS]]
    for row in run.rows:
        cell = labels.cells.get(row.cell)
        spec = [cell.spec.get(key) if cell else None for key in keys]
        values = [row.metric, row.variant, row.value, row.unit.name, row.low, row.high, row.n, row.baseline,
                  row.partial, row.note]  # fmt: skip
        outcome = checks.get((row.cell, row.metric, row.variant))
        judged = (
            [getattr(outcome, column) for column in _CHECK_COLUMNS]
            if outcome
            else [None] * len(_CHECK_COLUMNS)
        )
        lines.append(
            [
                row.cell,
                cell.name if cell else "",
                *spec,
                *ran.get(row.cell, [None] * len(_RAN_COLUMNS)),
                *values,
                *judged,
            ]
        )
    return lines


def wide_lines(run: JudgedRun) -> list[list[Any]]:
    """The heads, then one line a cell: its keys, requested / resolved / effective, precisions, then `metric` or `metric (variant)`."""
    run = run.with_fact_rows()
    labels = Labels(run.run)
    keys = _keys(labels)
    columns = list(dict.fromkeys((row.metric, row.variant) for row in run.rows))
    values = {(row.cell, row.metric, row.variant): row.value for row in run.rows}
    partial: dict[str, list[str]] = {}
    for row in run.rows:
        if row.partial and row.partial not in partial.setdefault(row.cell, []):
            partial[row.cell].append(row.partial)
    states = {line.label.cells[0]: _states(line) for line in precision_lines(run, labels)}
    heads = [f"{metric} ({variant})" if variant else metric for metric, variant in columns]
    lines: list[list[Any]] = [["cell", "name", "baseline", *keys, *_STATE_COLUMNS, "partial", *heads]]
    for cell, entry in labels.cells.items():
        lines.append([
            cell, entry.name, entry.baseline,
            *(entry.spec.get(key) for key in keys),
            *states[cell],
            "; ".join(partial.get(cell, [])) or None,
            *(values.get((cell, metric, variant)) for metric, variant in columns),
        ])  # fmt: skip
    return lines


def _keys(labels: Labels) -> list[str]:
    return list(dict.fromkeys(key for cell in labels.cells.values() for key in cell.spec))


def _states(line: PrecisionLine) -> Sequence[str]:
    return (
        line.kv.requested,
        line.kv.resolved,
        *_ran(line),
        line.effective,
        line.storage,
        line.transfer,
        line.execution,
        line.effective_weights,
        line.stored_weights,
        line.products,
        line.state,
    )


def _ran(line: PrecisionLine) -> list[str]:
    """What `_DECIDED` resolved to, "" where the cell's records hold no decision, and where attention ran."""
    resolved = {choice.aspect: choice.resolved for choice in line.choices}
    return [*(resolved[aspect] for aspect in _DECIDED), line.ran_on]


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
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_listed)
    text = text.replace("\r\n", "\n").replace("\r", "\n")  # one kind of line end, which the writer quotes
    return f"'{text}" if text.startswith(_FORMULA) else text


def _listed(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value)

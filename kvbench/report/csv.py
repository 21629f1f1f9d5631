"""The two tables of a run and their CSV files: long (a line per row of metrics) and wide (a line per cell).

Numbers keep their full precision. A value that was not measured is an empty field, a NaN is `NaN`. Text that
a spreadsheet would read as a formula gets a single quote in front; numbers never do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvbench.render.frame import cell_keys, rows_frame, table
from kvbench.render.labels import Labels
from kvbench.render.numbers import exact
from kvbench.report.model import JudgedRun
from kvbench.report.sections.precision import DECIDED, PrecisionLine, precision_lines
from kvbench.report.sections.tables import worst_checks

if TYPE_CHECKING:
    from pandas import DataFrame

# What spreadsheets read as the start of a formula, their full-width forms included.
_FORMULA = ("=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠")

_EXACT = 2.0**53  # every whole number below is a float64

_CHECK_COLUMNS = ("status", "limit", "mde", "n_needed", "look", "level")  # of the worst check on the row
_RAN_COLUMNS = (*(f"{aspect}_resolved" for aspect in DECIDED), "ran_on")


def long_csv(run: JudgedRun) -> str:
    return _text(long_table(run))


def wide_csv(run: JudgedRun) -> str:
    return _text(wide_table(run))


def long_table(run: JudgedRun) -> DataFrame:
    """The tidy frame of all rows, with what the cell's keys resolved to and the gate's result."""
    run = run.with_fact_rows()
    frame = rows_frame(run.run, run.rows)
    ran = {line.label.cells[0]: _ran(line) for line in precision_lines(run, Labels(run.run))}
    unknown = dict.fromkeys(_RAN_COLUMNS)
    resolved = [ran.get(row.cell, unknown) for row in run.rows]
    checks = worst_checks(run.verdict.outcomes)
    found = [checks.get((row.cell, row.metric, row.variant)) for row in run.rows]
    ran_columns = table({name: [one[name] for one in resolved] for name in _RAN_COLUMNS})
    check_columns = table({name: [getattr(one, name, None) for one in found] for name in _CHECK_COLUMNS})
    first = frame.columns.get_loc("metric")
    return _joined(frame.iloc[:, :first], ran_columns, frame.iloc[:, first:], check_columns)


def wide_table(run: JudgedRun) -> DataFrame:
    """One line per cell: its keys, its precision, then a column for each metric and variant."""
    run = run.with_fact_rows()
    cells = run.run.cells
    columns: dict[str, list[Any]] = {
        "cell": list(cells),
        "name": [cell.name for cell in cells.values()],
        "baseline": [cell.baseline for cell in cells.values()],
    }
    for key in cell_keys(run.run):
        columns[key] = [cell.spec.get(key) for cell in cells.values()]
    states = {line.label.cells[0]: _states(line) for line in precision_lines(run, Labels(run.run))}
    for name in next(iter(states.values()), {}):
        columns[name] = [states[cell][name] for cell in cells]
    partial: dict[str, dict[str, None]] = {}
    for row in run.rows:
        if row.partial:
            partial.setdefault(row.cell, {})[row.partial] = None
    columns["partial"] = ["; ".join(partial.get(cell, ())) or None for cell in cells]
    values = {(row.cell, row.metric, row.variant): row.value for row in run.rows}
    metrics: dict[str, list[Any]] = {}
    for metric, variant in dict.fromkeys((row.metric, row.variant) for row in run.rows):
        head = f"{metric} ({variant})" if variant else metric
        metrics[head] = [values.get((cell, metric, variant)) for cell in cells]
    return _joined(table(columns), table(metrics, dict.fromkeys(metrics, "float")))


def _joined(*frames: Any) -> Any:
    import pandas

    return pandas.concat(frames, axis=1)


def _states(line: PrecisionLine) -> dict[str, str]:
    return {
        "requested": line.kv.requested,
        "resolved": line.kv.resolved,
        **_ran(line),
        "effective": line.effective,
        "storage": line.storage,
        "transfer": line.transfer,
        "execution": line.execution,
        "effective_weights": line.effective_weights,
        "stored_weights": line.stored_weights,
        "products": line.products,
        "evidence": line.state,
    }


def _ran(line: PrecisionLine) -> dict[str, str]:
    """What each of DECIDED resolved to, "" without a decision, and where attention ran."""
    return {**{f"{x}_resolved": line.choice(x).resolved for x in DECIDED}, "ran_on": line.ran_on}


def _text(frame: DataFrame) -> str:
    columns = [_values(frame.iloc[:, i]) for i in range(frame.shape[1])]
    texts = type(frame)({i: [_field(value) for value in column] for i, column in enumerate(columns)})
    return str(
        texts.to_csv(index=False, header=[_field(head) for head in frame.columns], lineterminator="\n")
    )


def _values(column: Any) -> list[Any]:
    """The values of a column as Python objects; None is null.

    Whole numbers, such as bytes, have no decimal point.
    """
    if column.dtype == object:
        return list(column)
    values = column.to_numpy(dtype=object, na_value=None)
    return [int(v) if isinstance(v, float) and v.is_integer() and abs(v) < _EXACT else v for v in values]


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

"""The two tables of a run as CSV and Parquet: long (a line per row of metrics) and wide (a line per cell).

CSV: numbers keep their full precision; a value that was not measured is an empty field, a NaN is `NaN`; text
that a spreadsheet would read as a formula gets a single quote in front, numbers never do.

Parquet: text, whole numbers (int64), truth values, and float64 for every value, end of an interval and
metric. Null is not measured, NaN is NaN. `scale`, which may be a number, a word or a list per layer, is JSON
text. The file's metadata (key `kvbench`) names the run.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvbench.records.record import SCHEMA_VERSION
from kvbench.render.frame import cell_keys, rows_frame, table
from kvbench.render.numbers import exact
from kvbench.report.model import JudgedRun, verdict_word
from kvbench.report.sections.precision import DECIDED, PrecisionLine, precision_lines
from kvbench.report.sections.tables import worst_checks

if TYPE_CHECKING:
    from pandas import DataFrame

# What spreadsheets read as the start of a formula, their full-width forms included.
_FORMULA = ("=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠")
_EXACT = 2.0**53  # every whole number below is a float64

_CHECK_COLUMNS = ("status", "limit", "mde", "n_needed", "look", "level")  # of the worst check on the row
_PRECISION_COLUMNS = (
    *("effective", "storage", "transfer", "execution"),
    *("effective_weights", "stored_weights", "products"),
)
_RAN_COLUMNS = (*(f"{aspect}_resolved" for aspect in DECIDED), "ran_on")


def long_table(run: JudgedRun) -> DataFrame:
    """The tidy frame of all rows, with what the cell's keys resolved to and the gate's result."""
    import pandas

    run = run.with_fact_rows()
    frame = rows_frame(run.run, run.rows)
    ran = {line.label.cells[0]: _ran(line) for line in precision_lines(run)}
    resolved = [ran.get(row.cell, {}) for row in run.rows]
    checks = worst_checks(run.verdict.outcomes)
    found = [checks.get((row.cell, row.metric, row.variant)) for row in run.rows]
    ran_columns = table({name: [one.get(name) for one in resolved] for name in _RAN_COLUMNS})
    check_columns = table({name: [getattr(one, name, None) for one in found] for name in _CHECK_COLUMNS})
    first = frame.columns.get_loc("metric")
    parts = (frame.iloc[:, :first], ran_columns, frame.iloc[:, first:], check_columns)
    return pandas.concat(parts, axis=1)


def wide_table(run: JudgedRun) -> DataFrame:
    """One line per cell: its keys, its precision, then a column for each metric and variant."""
    import pandas

    run = run.with_fact_rows()
    cells = run.run.cells
    columns = {key: [getattr(cell, key) for cell in cells.values()] for key in ("id", "name", "baseline")}
    columns = {"cell": columns.pop("id"), **columns}
    for key in cell_keys(run.run):
        columns[key] = [cell.spec.get(key) for cell in cells.values()]
    lines = {line.label.cells[0]: line for line in precision_lines(run)}
    for name in ("requested", "resolved"):
        columns[name] = [getattr(lines[cell].kv, name) for cell in cells]
    for name in _RAN_COLUMNS:
        columns[name] = [_ran(lines[cell])[name] for cell in cells]
    for name in _PRECISION_COLUMNS:
        columns[name] = [getattr(lines[cell], name) for cell in cells]
    columns["evidence"] = [lines[cell].state for cell in cells]
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
    return pandas.concat((table(columns), table(metrics, dict.fromkeys(metrics, "float"))), axis=1)


def _ran(line: PrecisionLine) -> dict[str, str]:
    """What each of DECIDED resolved to, "" without a decision, and where attention ran."""
    return {**{f"{x}_resolved": line.choice(x).resolved for x in DECIDED}, "ran_on": line.ran_on}


def as_csv(frame: DataFrame) -> str:
    columns = [_values(frame.iloc[:, i]) for i in range(frame.shape[1])]
    texts = type(frame)({i: [_field(value) for value in column] for i, column in enumerate(columns)})
    heads = [_field(head) for head in frame.columns]
    return str(texts.to_csv(index=False, header=heads, lineterminator="\n"))


def _values(column: Any) -> list[Any]:
    """The values of a column as Python objects; None is null. Whole numbers have no decimal point."""
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
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)
    text = text.replace("\r\n", "\n").replace("\r", "\n")  # one kind of line end, which the writer quotes
    return f"'{text}" if text.startswith(_FORMULA) else text


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value)


def as_parquet(frame: DataFrame, run: JudgedRun, name: str) -> bytes:
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import parquet

    if "scale" in frame:
        texts = [None if value is None else json.dumps(value, default=_plain) for value in frame["scale"]]
        frame = frame.assign(scale=table({"scale": texts}, {})["scale"])
    about = {
        "schema": SCHEMA_VERSION,
        "table": name,
        "name": run.manifest.name,
        "created_at": run.manifest.created_at,
        "matrix_sha256": run.manifest.matrix.sha,
        "verdict": verdict_word(run),
        "exit_code": run.verdict.exit_code,
    }
    whole = pa.Table.from_pandas(frame, preserve_index=False)
    out = io.BytesIO()
    metadata = {**whole.schema.metadata, b"kvbench": json.dumps(about).encode()}
    parquet.write_table(whole.replace_schema_metadata(metadata), out)
    return out.getvalue()

"""The rows of a run as one tidy pandas DataFrame: for notebooks, and for the CSV and Parquet files.

Columns are backed by Arrow, so a value that was not measured (null) and a value that is NaN stay apart.
pandas is imported inside the functions: a command that writes no table does not load it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.matrix.keys import CELL_OPTIONS
from kvbench.metrics.collect import Row, derive
from kvbench.records.run import Run, RunDir

if TYPE_CHECKING:
    from pandas import DataFrame

ROW_COLUMNS = ("metric", "variant", "value", "unit", "low", "high", "n", "baseline", "partial", "note")

# The kinds of columns that are not text; cell keys have the kind that their option declares.
KINDS: dict[str, str] = {
    **{key: option.kind for key, option in CELL_OPTIONS.items()},
    **dict.fromkeys(("value", "low", "high", "mde", "level"), "float"),
    **dict.fromkeys(("n", "n_needed"), "int"),
}


@dataclass(frozen=True)
class LoadedRun:
    """A stored run with its rows, as `kvbench.load` gives it."""

    run: Run
    rows: tuple[Row, ...]

    @cached_property
    def frame(self) -> DataFrame:
        """One line per cell, metric and variant: the cell's keys, value, interval (low, high), n and unit."""
        return rows_frame(self.run, self.rows)


def load(path: Path | str) -> LoadedRun:
    """The run in a folder that `kvbench run` wrote. Raises UsageError for other folders and damaged files."""
    run = RunDir(Path(path)).load()
    return LoadedRun(run, tuple(derive(run)))


def rows_frame(run: Run, rows: Sequence[Row]) -> DataFrame:
    """One line per row: cell (id), name, the cell's keys, then `ROW_COLUMNS`."""
    cells = [run.cells.get(row.cell) for row in rows]
    columns: dict[str, list[Any]] = {
        "cell": [row.cell for row in rows],
        "name": [cell.name if cell else "" for cell in cells],
    }
    for key in cell_keys(run):
        columns[key] = [cell.spec.get(key) if cell else None for cell in cells]
    for name in ROW_COLUMNS:
        columns[name] = [getattr(row, name) for row in rows]
    columns["unit"] = [row.unit.name for row in rows]
    return table(columns)


def cell_keys(run: Run) -> list[str]:
    """The keys of the run's cells, in the matrix's order."""
    return list(dict.fromkeys(key for cell in run.cells.values() for key in cell.spec))


def table(columns: Mapping[str, Iterable[Any]], kinds: Mapping[str, str] = KINDS) -> DataFrame:
    """A DataFrame with a typed column for each name; kinds: of the columns that are not text."""
    import pandas

    found = {name: _column(values, kinds.get(name, "str")) for name, values in columns.items()}
    return pandas.DataFrame(dict(enumerate(found.values()))).set_axis([utf8(name) for name in found], axis=1)


def _column(values: Iterable[Any], kind: str) -> Any:
    """Arrow-backed; a `scale`, which may be a number, a word or a list per layer, holds Python objects."""
    import pandas
    import pyarrow as pa  # type: ignore[import-untyped]

    if kind == "scale":
        return pandas.Series(list(values), dtype=object)
    types = {"float": pa.float64(), "int": pa.int64(), "bool": pa.bool_()}
    if kind not in types:
        values = [None if value is None else utf8(value) for value in values]
    return pandas.arrays.ArrowExtensionArray(pa.array(list(values), types.get(kind, pa.string())))


def utf8(value: Any) -> str:
    """The value as text, with `?` for lone surrogates (from broken file names), which UTF-8 cannot hold."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text.encode("utf-8", errors="replace").decode("utf-8")

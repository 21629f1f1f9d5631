"""The two tables as Parquet with typed columns: what was not measured is null, a NaN is NaN, numbers keep
their precision.

Types: text, int64, bool, and float64 for values, interval ends and metrics. `scale` (a number, a word or a
list by layer) is JSON text. The file's metadata (key `kvbench`) names the run.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.matrix.keys import CELL_OPTIONS
from kvbench.records.record import SCHEMA_VERSION
from kvbench.report.csv import as_json, long_lines, wide_lines
from kvbench.report.model import JudgedRun, verdict_word

# Columns that are neither text nor a metric; cell keys have the kind of their option.
_KINDS = {
    **{key: option.kind for key, option in CELL_OPTIONS.items()},
    **dict.fromkeys(("value", "low", "high", "mde", "level"), "float"),
    **dict.fromkeys(("n", "n_needed"), "int"),
}


def long_parquet(run: JudgedRun) -> bytes:
    """`results_long.parquet`: the columns of `results_long.csv`."""
    heads, *lines = long_lines(run)
    return _written(run, "long", heads, lines, {head: _KINDS.get(head, "str") for head in heads})


def wide_parquet(run: JudgedRun) -> bytes:
    """`results_wide.parquet`: the columns of `results_wide.csv`, every metric as float64."""
    heads, *lines = wide_lines(run)
    first = heads.index("partial") + 1  # metrics follow
    kinds = {head: _KINDS.get(head, "str") for head in heads[:first]}
    return _written(run, "wide", heads, lines, kinds | dict.fromkeys(heads[first:], "float"))


def _written(
    run: JudgedRun, table: str, heads: Sequence[str], lines: Sequence[Sequence[Any]], kinds: Mapping[str, str]
) -> bytes:
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import parquet

    types = {"float": pa.float64(), "int": pa.int64(), "bool": pa.bool_()}
    columns = [
        pa.array([_value(line[i], kinds[head]) for line in lines], types.get(kinds[head], pa.string()))
        for i, head in enumerate(heads)
    ]
    about = {
        "schema": SCHEMA_VERSION,
        "table": table,
        "name": run.manifest.name,
        "created_at": run.manifest.created_at,
        "matrix_sha256": run.manifest.matrix.sha,
        "verdict": verdict_word(run),
        "exit_code": run.verdict.exit_code,
    }
    schema = pa.schema(
        [(_utf8(head), column.type) for head, column in zip(heads, columns, strict=True)],
        metadata={"kvbench": json.dumps(about, ensure_ascii=True)},
    )
    out = io.BytesIO()
    parquet.write_table(pa.Table.from_arrays(columns, schema=schema), out)
    return out.getvalue()


def _value(value: Any, kind: str) -> Any:
    if value is None:
        return None
    if kind == "float":
        return float(value)
    if kind in ("int", "bool"):
        return value
    if isinstance(value, str) and kind != "scale":
        return _utf8(value)
    return json.dumps(value, ensure_ascii=True, default=as_json)


def _utf8(text: str) -> str:
    """The text with lone surrogates (from a broken file name) as `?`, as in the other files."""
    return text.encode("utf-8", errors="replace").decode("utf-8")

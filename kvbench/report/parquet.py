"""The two tables as Parquet with typed columns: null is not measured, NaN is NaN.

Columns of text, whole numbers (int64), truth values, and float64 for every value, end of an interval and
metric. `scale`, which may be a number, a word or a list per layer, is JSON text. The file's metadata (key
`kvbench`) names the run.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvbench.records.record import SCHEMA_VERSION
from kvbench.render.frame import table
from kvbench.report.csv import long_table, wide_table
from kvbench.report.model import JudgedRun, verdict_word

if TYPE_CHECKING:
    from pandas import DataFrame


def long_parquet(run: JudgedRun) -> bytes:
    """`results_long.parquet`: the columns of `results_long.csv`."""
    return _written(run, "long", long_table(run))


def wide_parquet(run: JudgedRun) -> bytes:
    """`results_wide.parquet`: the columns of `results_wide.csv`, every metric as float64."""
    return _written(run, "wide", wide_table(run))


def _written(run: JudgedRun, name: str, frame: DataFrame) -> bytes:
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


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value)

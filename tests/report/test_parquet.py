"""Parquet: the tables of the CSV files with exact types, null where nothing was measured, NaN where a number was none."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace

import pandas
import pyarrow as pa
import pytest
from pyarrow import parquet

from kvbench.matrix.keys import CELL_OPTIONS
from kvbench.report.tables import long_csv, long_parquet, wide_csv, wide_parquet
from kvbench.report.write import write_all
from tests.report.hostile import HOSTILE, hostile

KINDS = {
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "str": pa.string(),
    "scale": pa.string(),
}


def table_of(data):
    return parquet.read_table(io.BytesIO(data))


@pytest.mark.parametrize(("as_csv", "as_parquet"), [(long_csv, long_parquet), (wide_csv, wide_parquet)])
def test_the_columns_and_lines_are_those_of_the_csv(failing, as_csv, as_parquet):
    run = failing.judged
    lines = list(csv.DictReader(io.StringIO(as_csv(run), newline="")))
    table = table_of(as_parquet(run))
    assert table.column_names == list(lines[0])
    assert table.num_rows == len(lines) > 0
    for line, row in zip(lines, table.to_pylist(), strict=True):
        for head, text in line.items():
            value = row[head]
            if value is None or value == "":
                assert text == "", head
            elif isinstance(value, bool):
                assert text == str(value).lower()
            elif isinstance(value, float):
                assert math.isnan(value) if text == "NaN" else value == float(text), head
            else:
                assert text == str(value), head


def test_types(passing):
    run = passing.judged
    schema = table_of(long_parquet(run)).schema
    for key, option in CELL_OPTIONS.items():
        assert schema.field(key).type == KINDS[option.kind], key
    want = {"value": "float", "low": "float", "high": "float", "n": "int", "mde": "float", "n_needed": "int",
            "level": "float", "cell": "str", "metric": "str", "unit": "str", "note": "str", "status": "str"}  # fmt: skip
    assert {name: schema.field(name).type for name in want} == {n: KINDS[k] for n, k in want.items()}
    wide = table_of(wide_parquet(run)).schema
    assert wide.field("ppl_delta_pct (wikitext2 stream512)").type == pa.float64()
    assert wide.field("device_peak_bytes").type == pa.float64()  # not measured anywhere
    assert wide.field("batch").type == pa.int64()


def test_null_nan_and_zero_are_three_things(passing):
    values = {"itl_ms": None, "ttft_ms": math.nan, "itl_p50_ms": 0.0, "itl_p90_ms": math.inf}
    made = passing.with_rows(
        lambda r: replace(r, value=values[r.metric], n=None) if r.metric in values else r
    )
    table = table_of(long_parquet(made.judged))
    found = {row["metric"]: row for row in table.to_pylist()}
    assert found["itl_ms"]["value"] is None
    assert found["itl_ms"]["n"] is None
    assert math.isnan(found["ttft_ms"]["value"])
    assert found["itl_p50_ms"]["value"] == 0.0
    assert found["itl_p90_ms"]["value"] == math.inf
    column = table.column("value")
    assert column.null_count == sum(row["value"] is None for row in table.to_pylist()) > 0
    frame = pandas.read_parquet(io.BytesIO(long_parquet(made.judged)), dtype_backend="pyarrow")
    assert frame.loc[frame.metric == "itl_ms", "value"].isna().all()


def test_the_file_says_which_run_it_is_of(failing):
    for name, data in (("long", long_parquet(failing.judged)), ("wide", wide_parquet(failing.judged))):
        about = json.loads(table_of(data).schema.metadata[b"kvbench"])
        assert about == {
            "schema": 3, "table": name, "name": "int8", "created_at": "2026-10-01T12:00:00+00:00",
            "matrix_sha256": "9f2c1a7e0b44", "verdict": "fail", "exit_code": 1,
        }  # fmt: skip


def test_scales_are_text_and_keep_their_numbers(maker):
    scale = {"k": [0.05, 0.1], "v": 0.2}
    made = maker(fixed={"scale": scale, "kv_splits": None})
    table = table_of(wide_parquet(made.judged))
    assert [json.loads(text) for text in table.column("scale").to_pylist()] == [scale] * table.num_rows
    assert table.column("kv_splits").null_count == table.num_rows
    assert table_of(wide_parquet(maker().judged)).column("scale").null_count == 8


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_kept_whole(maker, text):
    made = hostile(maker, text)
    model = table_of(long_parquet(made.judged)).column("model").to_pylist()
    assert set(model) == {text.encode("utf-8", errors="replace").decode()}
    assert table_of(wide_parquet(made.judged)).num_rows == 2


FILES = ["report.html", "results_long.csv", "results_wide.csv", "results.json", "report.md", "report.junit.xml",
         "results_long.parquet", "results_wide.parquet"]  # fmt: skip


def test_a_table_that_cannot_be_written_leaves_the_old_one(failing, tmp_path, monkeypatch):
    write_all(tmp_path, failing.judged)
    path = tmp_path / "results_wide.parquet"
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_all(tmp_path, failing.judged)
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(FILES)


def test_no_suite_stands_beside_a_table_that_could_not_be_written(passing, tmp_path, monkeypatch):
    """JUnit is the last file: a CI system must not read a green one after exit code 3."""
    (tmp_path / "results_wide.parquet").mkdir()  # a rename onto it fails
    with pytest.raises(OSError, match="directory"):
        write_all(tmp_path, passing.judged)
    assert (tmp_path / "report.html").is_file()
    assert not (tmp_path / "report.junit.xml").exists()

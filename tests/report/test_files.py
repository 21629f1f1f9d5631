"""CSV, Parquet, JSON and the files: full precision, exact types, no formulas, nothing half-written."""

import csv
import io
import json
import math
from dataclasses import replace
from unittest.mock import Mock

import pandas
import pyarrow as pa
import pytest
from pyarrow import parquet

from kvbench.matrix.keys import CELL_OPTIONS
from kvbench.records.record import VERIFIED, Level
from kvbench.report import tables
from kvbench.report.html import render
from kvbench.report.json import result_json
from kvbench.report.view import build
from kvbench.report.write import write_all
from tests.factories.runs.made import evidence
from tests.report.hostile import HOSTILE, hostile

FACT_METRICS = {"page_table_bytes", "held_bytes", "workspace_bytes", "device_peak_bytes"}
TEXT, INT, FLOAT = pa.string(), pa.int64(), pa.float64()
KINDS = {"int": INT, "float": FLOAT, "bool": pa.bool_(), "str": TEXT, "scale": TEXT}
FILES = [
    *("report.html", "results_long.csv", "results_wide.csv", "results.json", "report.md"),
    *("results_long.parquet", "results_wide.parquet", "report.junit.xml"),
]


TABLES = {"long": tables.long_table, "wide": tables.wide_table}


def csv_of(made, kind):
    return list(csv.DictReader(io.StringIO(tables.as_csv(TABLES[kind](made.judged)), newline="")))


def long_of(made):
    return csv_of(made, "long")


def wide_of(made):
    return csv_of(made, "wide")


def parquet_bytes(made, kind="long"):
    return io.BytesIO(tables.as_parquet(TABLES[kind](made.judged), made.judged, kind))


def parquet_of(made, kind="long"):
    return parquet.read_table(parquet_bytes(made, kind))


def test_the_long_csv_reads_back_as_the_same_rows_and_the_wide_one_has_a_line_a_cell(passing):
    lines = [line for line in long_of(passing) if line["metric"] not in FACT_METRICS]
    for line, row in zip(lines, passing.rows, strict=True):
        found = (line["cell"], line["metric"], line["variant"], line["unit"])
        assert found == (row.cell, row.metric, row.variant, row.unit.name)
        assert float(line["value"]) == row.value
        assert (line["low"] and float(line["low"])) == (row.low or "")
        assert line["baseline"] == (row.baseline or "")
    line = lines[0]
    assert set(CELL_OPTIONS) <= set(line)
    cell = [line[key] for key in ("kv_format", "batch", "trust_remote_code", "scale")]
    assert cell == ["native", "1", "false", ""]
    lines = wide_of(passing)
    assert [line["cell"] for line in lines] == [cell.id for cell in passing.manifest.cells]
    last = lines[-1]
    assert float(last["kv_ratio_16bit"]) == 0.515625
    assert float(last["ppl_delta_pct (wikitext2 stream512)"]) == 0.0816
    assert lines[0]["ppl_delta_pct (wikitext2 stream512)"] == ""
    want = dict.fromkeys(("requested", "resolved", "effective"), "int8_sym") | {"evidence": "verified"}
    want |= {"storage": "int8", "transfer": "not measured", "execution": "float32"}
    assert want.items() <= last.items()


def test_the_detectable_effect_is_in_csv_json_and_page(passing):
    known = {"mde": 0.734567, "n_needed": 4321}
    made = passing.with_outcomes(change=lambda o: replace(o, **known) if o.metric == "ppl_delta_pct" else o)
    lines = long_of(made)
    judged = [x for x in lines if x["metric"] == "ppl_delta_pct" and x["status"]]
    assert {(x["status"], x["limit"], x["mde"], x["n_needed"]) for x in judged} == {
        ("pass", "within [-1, 1]", "0.734567", "4321")
    }
    assert {x["mde"] for x in lines if x["metric"] != "ppl_delta_pct"} == {""}
    (found,) = [o for o in result_json(made.judged)["outcomes"] if o["metric"] == "ppl_delta_pct"]
    assert known.items() <= found.items()
    cells = '<td class="num">0.735 %</td><td class="num">{}</td>'
    assert cells.format("") in render(build(made.judged))  # it passed, so no more samples are needed
    open_ = made.with_outcomes(change=lambda o: replace(o, status="inconclusive") if o.n_needed else o)
    assert cells.format("4,321 tokens") in render(build(open_.judged))
    none = passing.with_outcomes(change=lambda o: replace(o, mde=math.inf))
    found = result_json(none.judged)["outcomes"][0]
    assert (found["mde"], found["note"]) == (None, "mde: Infinity")


AUTO = {
    aspect: {"requested": "auto", "resolved": option, "reason": "no_gpu", "rejected": []}
    for aspect, option in (("backend", "torch"), ("decode", "eager"), ("compile", "off"))
}


def test_a11_t3_both_tables_hold_what_auto_became_on_each_cell_and_where_it_ran(maker):
    made = maker(fixed={"backend": "auto", "decode": "auto", "compile": "auto"})
    where = {"native": "interpreter", "int8_sym": "gpu"}

    def change(r):
        fmt = r.spec["kv_format"]
        proof = evidence(fmt, Level("E4", VERIFIED, "so", {"backend": where[fmt]}))
        undecided = None if r.runner != "parity" else r.decision
        return replace(r, evidence=proof, decision={**r.decision, **AUTO} if fmt == "int8_sym" else undecided)

    made = made.with_records(change)
    want = {"native": ["torch", "", ""], "int8_sym": ["torch", "eager", "off"]}
    for lines in (wide_of(made), long_of(made)):
        for line in lines:
            assert [line[key] for key in AUTO] == ["auto"] * 3
            assert [line[f"{key}_resolved"] for key in AUTO] == want[line["kv_format"]]
            assert line["ran_on"] == where[line["kv_format"]]
    heads = list(wide_of(made)[0])
    first = heads.index("resolved") + 1
    decided = ["backend", "weights", "gemm", "decode", "compile"]
    assert heads[first : first + 6] == [*(f"{aspect}_resolved" for aspect in decided), "ran_on"]


def test_partial_is_a_column_of_both_and_a_row_of_an_unknown_cell_keeps_its_columns(passing):
    made = passing.with_rows(lambda r: replace(r, partial="limited") if r.metric == "ppl" else r)
    assert {line["partial"] for line in wide_of(made)} == {"limited"}
    assert {line["metric"] for line in long_of(made) if line["partial"]} == {"ppl"}
    made = replace(passing, rows=[replace(passing.rows[0], cell="gone", note="kept")])
    line = next(line for line in long_of(made) if line["cell"] == "gone")
    assert (line["backend_resolved"], line["metric"], line["note"]) == ("", made.rows[0].metric, "kept")


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"])
def test_text_that_a_spreadsheet_would_run_is_quoted_and_numbers_are_not(maker, start):
    made = maker(fixed={"model": f"{start}cmd|' /C calc'!A0"}, batches=(1,))
    made = made.with_rows(lambda r: replace(r, value=-1.5, note=f"{start}1+1"))
    kept = start.replace("\r", "\n")
    for line in long_of(made):
        assert line["model"] == f"'{kept}cmd|' /C calc'!A0"
        assert line["metric"] in FACT_METRICS or (line["value"], line["note"]) == ("-1.5", f"'{kept}1+1")


@pytest.mark.parametrize("text", ['a"b,c\nd', "量化", "x" * 500, "<b>&</b>"])
def test_awkward_text_survives(maker, text):
    assert wide_of(maker(fixed={"model": text}))[0]["model"] == text


@pytest.mark.parametrize("kind", ["long", "wide"])
def test_parquet_has_the_columns_and_lines_of_the_csv_and_names_its_run(failing, kind):
    lines, table = csv_of(failing, kind), parquet_of(failing, kind)
    assert table.column_names == list(lines[0])
    for line, row in zip(lines, table.to_pylist(), strict=True):
        for head, text in line.items():
            value = row[head]
            if value is None or value == "":
                assert text == "", head
            elif isinstance(value, float):
                assert math.isnan(value) if text == "NaN" else value == float(text), head
            else:
                assert text == (str(value).lower() if isinstance(value, bool) else str(value)), head
    run = {"name": "int8", "created_at": "2026-10-01T12:00:00+00:00", "matrix_sha256": "9f2c1a7e0b44"}
    verdict = {"schema": 3, "table": kind, "verdict": "fail", "exit_code": 1}
    assert json.loads(table.schema.metadata[b"kvbench"]) == run | verdict


def test_parquet_has_the_types_and_scales_of_several_numbers_are_json_text(passing, maker):
    schema, wide = parquet_of(passing).schema, parquet_of(passing, "wide").schema
    for key, option in CELL_OPTIONS.items():
        assert schema.field(key).type == KINDS[option.kind], key
    kinds = {FLOAT: ("value", "low", "high", "mde", "level"), INT: ("n", "n_needed")}
    kinds[TEXT] = ("cell", "metric", "unit", "note", "status")
    assert {kind: {schema.field(name).type for name in names} for kind, names in kinds.items()} == {
        kind: {kind} for kind in kinds
    }
    # The device's peak was not measured anywhere.
    kinds = {"ppl_delta_pct (wikitext2 stream512)": FLOAT, "device_peak_bytes": FLOAT, "batch": INT}
    assert {name: wide.field(name).type for name in kinds} == kinds
    scale = {"k": [0.05, 0.1], "v": 0.2}
    made = maker(fixed={"scale": scale, "kv_splits": None})
    table = parquet_of(made, "wide")
    assert [json.loads(text) for text in table.column("scale").to_pylist()] == [scale] * table.num_rows
    assert json.loads(wide_of(made)[0]["scale"]) == scale
    assert table.column("kv_splits").null_count == table.num_rows
    assert parquet_of(maker(), "wide").column("scale").null_count == 8


def test_a24_t4_null_nan_and_zero_are_three_things(passing):
    values = {"itl_ms": None, "ttft_ms": math.nan, "itl_p50_ms": 0.0, "itl_p90_ms": math.inf}
    rows = [replace(r, value=values[r.metric], n=None) if r.metric in values else r for r in passing.rows]
    made = replace(passing, rows=rows)
    table = parquet_of(made)
    found = {row["metric"]: row for row in table.to_pylist()}
    assert (found["itl_ms"]["value"], found["itl_ms"]["n"]) == (None, None)
    assert math.isnan(found["ttft_ms"]["value"])
    assert [found[name]["value"] for name in ("itl_p50_ms", "itl_p90_ms")] == [0.0, math.inf]
    assert table.column("value").null_count == sum(row["value"] is None for row in table.to_pylist()) > 0
    frame = pandas.read_parquet(parquet_bytes(made), dtype_backend="pyarrow")
    assert frame.loc[frame.metric == "itl_ms", "value"].isna().all()
    line = wide_of(made)[0]
    assert [line[name] for name in ("device_peak_bytes", "ttft_ms", "workspace_bytes")] == ["", "NaN", "0"]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_parquet_keeps_hostile_names_whole(maker, text):
    made = hostile(maker, text)
    model = parquet_of(made).column("model").to_pylist()
    assert set(model) == {text.encode("utf-8", errors="replace").decode()}
    assert parquet_of(made, "wide").num_rows == 2


def test_json_is_strict_and_holds_run_cells_rows_outcomes_and_exit_code(passing, failing):
    lost = {"value": math.nan, "low": -math.inf, "high": math.inf, "note": "one step"}
    made = passing.with_rows(lambda row: replace(row, **lost) if row.metric == "itl_ms" else row)
    made.manifest.environment["load"] = [math.nan]
    data = json.loads(json.dumps(result_json(made.judged), allow_nan=False))
    rows = {row["metric"]: row for row in data["rows"]}
    row, peak = rows["itl_ms"], rows["device_peak_bytes"]
    assert (row["value"], row["low"]) == (None, None)
    assert row["note"] == "one step; NaN; low: -Infinity; high: Infinity"
    assert (peak["value"], peak["note"]) == (None, "")  # it was not measured
    assert data["run"]["environment"]["load"] == ["NaN"]
    data = result_json(failing.judged)
    assert (data["exit_code"], data["verdict"]) == (1, "fail")
    assert data["run"]["records"] == {"ok": 25, "error": 1}
    assert len(data["outcomes"]) == len(failing.verdict.outcomes)
    bad = data["cells"][-1]
    assert (bad["evidence"]["state"], bad["effective"]) == ("mismatch", "int8_sym + mixed")
    assert (bad["choices"]["kv_format"]["requested"], bad["effective_weights"]) == ("int8_sym", "native")
    cache = {"storage": "int8", "transfer": "not measured", "execution": "float32"}
    assert bad["precision"] == {**cache, "weights": "float32", "gemm": "native"}


def test_files_are_the_same_bytes_again_and_a_failed_write_leaves_the_old(
    passing, tmp_path, failing, monkeypatch
):
    paths = write_all(tmp_path, passing.judged)
    assert [path.name for path in paths] == FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
    first = [path.read_bytes() for path in paths]
    assert json.loads(first[3])["exit_code"] == 0
    assert first[0].startswith(b"<!doctype html>")
    assert b"\r\n" not in first[1]
    assert [path.read_bytes() for path in write_all(tmp_path, passing.judged)] == first
    write_all(tmp_path, failing.judged)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_all(tmp_path, replace(failing, rows=[]).judged)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_no_suite_stands_beside_a_table_that_could_not_be_written(maker, tmp_path):
    """JUnit is the last file: a CI system must not read a green one after exit code 3."""
    (tmp_path / "results_wide.parquet").mkdir()  # a rename onto it fails
    with pytest.raises(OSError, match="directory"):
        write_all(tmp_path, maker().judged)
    assert (tmp_path / "report.html").is_file()
    assert not (tmp_path / "report.junit.xml").exists()
    (tmp_path / "results_wide.parquet").rmdir()
    write_all(tmp_path, maker(fixed={"model": "models/\udc80.gguf"}).judged)  # a broken name stops nothing

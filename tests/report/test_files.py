"""CSV, JSON and the files: full precision, strict syntax, no formulas, nothing half-written."""

import csv
import io
import json
import math
from dataclasses import replace

import pytest

from kvbench.files import write_file
from kvbench.matrix.cells import CELL_KEYS
from kvbench.records.record import VERIFIED, Level
from kvbench.report.html import render
from kvbench.report.json import result_json
from kvbench.report.tables import long_csv, wide_csv
from kvbench.report.view import build
from kvbench.report.write import write_all
from tests.factories.runs.made import evidence

FACT_METRICS = {"page_table_bytes", "held_bytes", "workspace_bytes", "device_peak_bytes"}


def read(text):
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_the_long_csv_reads_back_as_the_same_rows(passing):
    lines = [line for line in read(long_csv(passing.judged)) if line["metric"] not in FACT_METRICS]
    assert len(lines) == len(passing.rows)
    for line, row in zip(lines, passing.rows, strict=True):
        found = (line["cell"], line["metric"], line["variant"], line["unit"])
        assert found == (row.cell, row.metric, row.variant, row.unit.name)
        assert float(line["value"]) == row.value
        assert (line["low"] and float(line["low"])) == (row.low or "")
        assert line["baseline"] == (row.baseline or "")


def test_the_detectable_effect_is_in_csv_json_and_page(passing):
    known = {"mde": 0.734567, "n_needed": 4321}
    made = passing.with_outcomes(change=lambda o: replace(o, **known) if o.metric == "ppl_delta_pct" else o)
    lines = read(long_csv(made.judged))
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


def test_an_effect_that_cannot_be_detected_is_no_number(passing):
    made = passing.with_outcomes(change=lambda o: replace(o, mde=math.inf))
    found = result_json(made.judged)["outcomes"][0]
    assert (found["mde"], found["note"]) == (None, "mde: Infinity")


def test_every_line_holds_the_whole_cell(passing):
    line = read(long_csv(passing.judged))[0]
    assert set(CELL_KEYS) <= set(line)
    assert (line["kv_format"], line["batch"], line["trust_remote_code"], line["scale"]) == (
        "native",
        "1",
        "false",
        "",
    )


def test_the_wide_csv_has_a_line_a_cell_and_a_column_a_metric_and_variant(passing):
    lines = read(wide_csv(passing.judged))
    assert [line["cell"] for line in lines] == [cell.id for cell in passing.manifest.cells]
    last = lines[-1]
    assert float(last["kv_ratio_16bit"]) == 0.515625
    assert float(last["ppl_delta_pct (wikitext2 stream512)"]) == 0.0816
    want = {"requested": "int8_sym", "resolved": "int8_sym", "effective": "int8_sym", "storage": "int8",
            "transfer": "not measured", "execution": "float32", "evidence": "verified"}  # fmt: skip
    assert want.items() <= last.items()
    assert lines[0]["ppl_delta_pct (wikitext2 stream512)"] == ""


AUTO = {
    aspect: {"requested": "auto", "resolved": option, "reason": "no_gpu", "rejected": []}
    for aspect, option in (("backend", "torch"), ("decode", "eager"), ("compile", "off"))
}


def test_both_csvs_hold_what_auto_became_on_each_cell(maker):
    made = maker(fixed={"backend": "auto", "decode": "auto", "compile": "auto"})
    made = made.with_records(
        lambda r: replace(r, decision={**r.decision, **AUTO}) if r.spec["kv_format"] == "int8_sym" else r
    )
    made = made.with_records(
        lambda r: replace(r, decision=None) if r.spec["kv_format"] == "native" and r.runner != "parity" else r
    )
    want = {"native": ("torch", "", ""), "int8_sym": ("torch", "eager", "off")}
    for lines in (read(wide_csv(made.judged)), read(long_csv(made.judged))):
        for line in lines:
            assert (line["backend"], line["decode"], line["compile"]) == ("auto",) * 3
            found = (line["backend_resolved"], line["decode_resolved"], line["compile_resolved"])
            assert found == want[line["kv_format"]]
    heads = list(read(wide_csv(made.judged))[0])
    first = heads.index("resolved") + 1
    decided = ["backend", "weights", "gemm", "decode", "compile"]
    assert heads[first : first + 6] == [*(f"{aspect}_resolved" for aspect in decided), "ran_on"]


def test_a11_t3_every_row_says_whether_a_gpu_the_interpreter_or_torch_ran(maker):
    where = {"native": "interpreter", "int8_sym": "gpu"}

    def change(r):
        fmt = r.spec["kv_format"]
        return replace(r, evidence=evidence(fmt, Level("E4", VERIFIED, "so", {"backend": where[fmt]})))

    made = maker().with_records(change)
    for lines in (read(wide_csv(made.judged)), read(long_csv(made.judged))):
        assert {(line["kv_format"], line["ran_on"]) for line in lines} == set(where.items())


def test_a_row_of_a_cell_that_the_manifest_does_not_have_keeps_its_columns(passing):
    made = replace(passing, rows=[replace(passing.rows[0], cell="gone", note="kept")])
    line = next(line for line in read(long_csv(made.judged)) if line["cell"] == "gone")
    assert (line["backend_resolved"], line["metric"], line["note"]) == ("", made.rows[0].metric, "kept")


def test_a24_t4_unmeasured_is_empty_and_nan_is_nan(passing):
    made = passing.with_rows(lambda r: replace(r, value=math.nan) if r.metric == "itl_ms" else r)
    line = read(wide_csv(made.judged))[0]
    assert (line["device_peak_bytes"], line["itl_ms"], line["workspace_bytes"]) == ("", "NaN", "0")


def test_partial_is_a_column_of_both(passing):
    made = passing.with_rows(lambda r: replace(r, partial="limited") if r.metric == "ppl" else r)
    assert {line["partial"] for line in read(wide_csv(made.judged))} == {"limited"}
    marked = {line["metric"] for line in read(long_csv(made.judged)) if line["partial"]}
    assert marked == {"ppl"}


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"])
def test_text_that_a_spreadsheet_would_run_is_quoted_and_numbers_are_not(maker, start):
    made = maker(fixed={"model": f"{start}cmd|' /C calc'!A0"})
    made = made.with_rows(lambda r: replace(r, value=-1.5, note=f"{start}1+1"))
    for line in read(long_csv(made.judged)):
        kept = start.replace("\r", "\n")
        assert line["model"] == f"'{kept}cmd|' /C calc'!A0"
        assert line["metric"] in FACT_METRICS or (line["value"], line["note"]) == ("-1.5", f"'{kept}1+1")


@pytest.mark.parametrize("text", ['a"b,c\nd', "量化", "x" * 500, "<b>&</b>"])
def test_awkward_text_survives(maker, text):
    assert read(wide_csv(maker(fixed={"model": text}).judged))[0]["model"] == text


def test_a_scale_of_several_numbers_is_json_in_its_field(maker):
    made = maker(fixed={"scale": {"k": [0.05, 0.1], "v": 0.5}})
    assert json.loads(read(wide_csv(made.judged))[0]["scale"]) == {"k": [0.05, 0.1], "v": 0.5}


def test_json_is_strict_and_nan_is_null_with_a_note(passing):
    def change(row):
        if row.metric == "itl_ms":
            return replace(row, value=math.nan, low=-math.inf, high=math.inf, note="one step")
        return row

    made = passing.with_rows(change)
    text = json.dumps(result_json(made.judged), allow_nan=False)
    row = next(row for row in json.loads(text)["rows"] if row["metric"] == "itl_ms")
    assert (row["value"], row["low"]) == (None, None)
    assert row["note"] == "one step; NaN; low: -Infinity; high: Infinity"


def test_null_without_a_note_was_not_measured(passing):
    rows = result_json(passing.judged)["rows"]
    peak = next(row for row in rows if row["metric"] == "device_peak_bytes")
    assert (peak["value"], peak["note"]) == (None, "")


def test_json_holds_run_cells_rows_outcomes_and_exit_code(failing):
    data = result_json(failing.judged)
    assert (data["exit_code"], data["verdict"]) == (1, "fail")
    assert data["run"]["records"] == {"ok": 25, "error": 1}
    assert len(data["outcomes"]) == len(failing.verdict.outcomes)
    bad = data["cells"][-1]
    assert (bad["evidence"]["state"], bad["effective"]) == ("mismatch", "int8_sym + mixed")
    assert bad["choices"]["kv_format"]["requested"] == "int8_sym"
    assert bad["precision"] == {"storage": "int8", "transfer": "not measured", "execution": "float32",
                                "weights": "float32", "gemm": "native"}  # fmt: skip
    assert bad["effective_weights"] == "native"


def test_non_finite_numbers_deep_inside_are_words(passing):
    passing.manifest.environment["load"] = [math.nan]
    assert result_json(passing.judged)["run"]["environment"]["load"] == ["NaN"]


def test_all_files_are_written_whole(passing, tmp_path):
    paths = write_all(tmp_path, passing.judged)
    names = ["report.html", "results_long.csv", "results_wide.csv", "results.json", "report.md",
             "results_long.parquet", "results_wide.parquet", "report.junit.xml"]  # fmt: skip
    assert [path.name for path in paths] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert json.loads(paths[3].read_text(encoding="utf-8"))["exit_code"] == 0
    assert paths[0].read_text(encoding="utf-8").startswith("<!doctype html>")
    assert b"\r\n" not in paths[1].read_bytes()


def test_writing_again_gives_the_same_bytes(passing, tmp_path):
    first = [path.read_bytes() for path in write_all(tmp_path, passing.judged)]
    assert [path.read_bytes() for path in write_all(tmp_path, passing.judged)] == first


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path, monkeypatch):
    path = write_file(tmp_path / "report.html", "old")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_a_broken_file_name_does_not_stop_the_report(maker, tmp_path):
    write_all(tmp_path, maker(fixed={"model": "models/\udc80.gguf"}).judged)

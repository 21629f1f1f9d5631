"""The view model: labels, tables, precision, findings."""

import subprocess
import sys
from dataclasses import replace

import pytest

from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import UNITS
from kvbench.render.labels import Labels
from kvbench.report.html import render
from kvbench.report.view import build
from tests.factories.runs.reported import outcome


def table(view, key):
    return next(t for t in view.tables if t.key == key)


def entry(view, key, metric, **where):
    """The entry of `metric` on the line whose label has all of `where` (key=value text)."""
    found = table(view, key)
    column = [c.metric for c in found.columns].index(metric)
    return next(line.entries[column] for line in found.lines if set(where.items()) <= set(line.label.parts))


def quantized(change):
    """`change` for the records of int8_sym only."""
    return lambda record: change(record) if record.spec["kv_format"] == "int8_sym" else record


def test_importing_the_report_loads_nothing_heavy():
    code = (
        "import sys, kvbench.report.view, kvbench.report.console, kvbench.report.write\n"
        "import kvbench.report.figures.plots\n"
        "heavy = 'torch transformers pandas scipy matplotlib jinja2 rich numpy yaml'.split()\n"
        "print(sorted({*heavy} & {*sys.modules}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


def test_a_passing_run_has_no_findings_and_one_without_records_or_outcomes_makes_a_report(passing):
    view = build(passing.judged)
    assert (view.word, view.tone, view.exit_code) == ("PASS", "pass", 0)
    assert (view.failures, view.fallbacks, view.gaps, view.notices) == ((), (), (), ())
    assert view.created_at == "2026-10-01 12:00:00 UTC"
    assert view.cell_keys == ("kv_format", "batch", "context")
    assert {("page_size", "16"), ("scale", "null")} <= set(view.fixed)
    view = build(replace(passing, records=[], rows=[]).with_outcomes(change=lambda o: None).judged)
    assert (view.word, view.tone, view.itl, view.bytes) == ("NOT EVALUATED", "incomplete", (), ())
    assert "No check was evaluated." in render(view)


def test_each_baseline_is_directly_above_its_candidates_and_shared_tasks_are_one_line(passing):
    view = build(passing.judged)
    lines = table(view, "quality").lines
    assert [(x.label.text, x.variant, len(x.label.cells)) for x in lines] == [
        (fmt, f"{text} stream512", 4) for text in ("wikitext2", "pydoc") for fmt in ("native", "int8_sym")
    ]
    got = entry(view, "storage", "kv_ratio", kv_format="int8_sym", batch="4", context="512")
    assert got.baseline.text == "native · batch 4 · context 512"
    assert entry(view, "storage", "kv_ratio", kv_format="native", batch="4") is None
    assert entry(view, "quality", "ppl_delta_pct", kv_format="int8_sym").baseline.text == "native"
    # A cell with another value than its shared task has a line of its own.
    odd = passing.cell(kv_format="int8_sym", batch=4, context=512).id
    made = passing.with_rows(lambda r: replace(r, value=99.0) if (r.cell, r.metric) == (odd, "ppl") else r)
    lines = table(build(made.judged), "quality").lines
    own = [x for x in lines if x.label.text == "int8_sym · batch 4 · context 512"]
    assert [x.entries[0].shown.text for x in own] == ["99", "99"]  # one a corpus
    bad = outcome("ppl at most 9", "fail", cells=[odd], metric="ppl", variant="wikitext2 stream512")
    view = build(passing.with_outcomes(bad).judged)  # a line of several cells has the worst status
    assert entry(view, "quality", "ppl", kv_format="int8_sym").status == "fail"


def test_every_row_is_shown_even_of_an_unknown_metric_or_cell(passing):
    cell = passing.cell(kv_format="int8_sym", batch=4, context=512).id
    more = [
        Row(cell, "brand_new_ms", "", 1.5, UNITS["ms"], 3),
        Row("gone", "ttft_ms", "", 1.0, UNITS["ms"], 1),
        Row(cell, "transfer_bytes", "", 33_280, UNITS["B"], 6),
    ]
    made = replace(passing, rows=[*passing.rows, *more])
    view = build(made.judged)
    assert {c.metric for t in view.tables for c in t.columns} >= {row.metric for row in made.rows}
    assert table(view, "other").lines[0].entries[0].shown.brief == "1.500 ms"
    assert any(line.label.text == "gone" for line in table(view, "latency").lines)
    assert table(view, "transfer").lines[0].entries[0].shown.brief == "33,280 B (0.0317 MiB, 0.03 MB)"
    assert not [t for t in build(passing.judged).tables if t.key == "transfer"]


def test_storage_has_its_parts_in_columns_and_no_device_peak_of_zero_on_a_cpu(passing):
    view = build(passing.judged)
    assert {c.metric for c in table(view, "weights").columns} == {"weight_bytes"}
    parts = {"kv_bytes_payload", "kv_bytes_scales", "page_table_bytes", "held_bytes", "workspace_bytes"}
    assert {c.metric for c in table(view, "storage").columns} >= parts
    got = entry(view, "storage", "device_peak_bytes", kv_format="int8_sym")
    assert (got.shown.text, got.shown.exact) == ("not measured", "")
    assert render(view).count('<td class="num missing">not measured') == 8


def test_precision_has_storage_transfer_and_execution_separately(passing):
    native, group = build(passing.judged).precision
    line = group.line
    assert (line.kv.requested, line.kv.resolved, line.effective) == ("int8_sym",) * 3
    assert (line.storage, line.transfer, line.execution) == ("int8", "not measured", "float32")
    assert native.reads == "0 of 156,000 tokens (0%)"
    assert group.reads == "156,000 of 156,000 tokens (100%)"  # 13 records, each counted once
    assert [(label.text, len(label.cells)) for label in group.where] == [("int8_sym", 4)]
    assert line.chips == (("verified", "E1, E2, E3"),)


def test_a_failing_run_marks_the_values_that_failed_and_groups_equal_cells(failing):
    view = build(failing.judged)
    got = entry(view, "quality", "ppl_delta_pct", kv_format="int8_sym")
    assert (got.status, got.limit) == ("fail", "within [-1, 1]")
    assert entry(view, "quality", "ppl", kv_format="int8_sym").status == ""
    assert [line.status for line in view.checks[0].lines][:2] == ["fail", "pass"]
    assert [(len(g.where), g.line.state) for g in view.precision] == [
        *((1, "verified"), (3, "verified"), (1, "mismatch"))  # one bad task of six
    ]


def test_effective_formats_and_missing_evidence_decide_the_state(passing):
    def wrong(record):  # though every level is verified
        own = record.key == "storage--int8_sym-1-128"
        return replace(record, evidence={**record.evidence, "effective": "native"}) if own else record

    (lost,) = build(passing.with_records(wrong).judged).failures
    assert (lost.kind, "native + int8_sym" in lost.items[0].sentence) == ("mismatch", True)
    view = build(passing.with_records(quantized(lambda r: replace(r, evidence=None))).judged)
    group = view.precision[1]
    got = (group.line.state, group.line.effective, group.line.storage, group.reads)
    assert got == ("unverified", *["not measured"] * 3)
    assert view.failures[0].kind == "unverified"


def decided(requested, rejected=()):
    """Records of int8_sym in which `requested` reached the resolver and native ran."""
    choice = {"requested": requested, "resolved": "native", "reason": "because", "rejected": list(rejected)}

    def change(r):
        evidence = {**r.evidence, "effective": "native"}
        return replace(r, decision={**r.decision, "kv_format": choice}, evidence=evidence)

    return quantized(change)


def test_a01_a_request_that_was_dropped_on_the_way_is_no_fallback(passing):
    """The matrix requests int8_sym, the resolver receives native, and everything after that is consistent."""
    view = build(passing.with_records(decided("native")).judged)
    line = view.precision[1].line
    assert (line.kv.requested, line.kv.asked, line.kv.resolved) == ("int8_sym", "native", "native")
    assert (line.state, view.fallbacks) == ("mismatch", ())
    assert view.failures[0].items[0].sentence == line.kv.dropped_text
    view = build(passing.with_records(decided("int8_sym", [["fp8_e4m3", "too"]])).judged)
    (fallback,) = view.fallbacks
    assert view.failures == ()
    assert (fallback.choice.requested, fallback.choice.resolved) == ("int8_sym", "native")
    assert (fallback.choice.reason, fallback.choice.rejected) == ("because", (("fp8_e4m3", "too"),))
    assert [(label.text, len(label.cells)) for label in fallback.where] == [("int8_sym", 4)]


@pytest.mark.parametrize("status", ["refused", "not_evaluated"])
def test_what_was_refused_or_never_ran_is_a_gap_and_no_failure(passing, status):
    error = {"reason": "not_available", "message": "WikiText-2 is not here; get it with `x`."}

    def change(record):
        bad = replace(record, status=status, error=error, samples={}, facts={})
        return bad if record.runner == "mcq" else record

    (finding,) = build(passing.with_records(change).judged).gaps
    assert (finding.kind, finding.items[0].sentence) == (status.replace("_", " "), error["message"])
    optional = {"metric": "ttft_ms", "required": False, "why": "hm"}
    view = build(passing.with_outcomes(outcome("ttft_ms at most 5", "not_evaluated", **optional)).judged)
    assert (view.exit_code, view.gaps[0].why, view.checks[-1].required) == (0, "Not required. hm", False)
    ran = [record for record in passing.records if record.spec["kv_format"] == "native"]
    view = build(replace(passing, records=ran).judged)
    names = [[name in item.sentence for name in ("storage", "parity")] for item in view.gaps[0].items]
    assert (view.failures, names) == ((), [[True, False], [False, True]])


def test_a17_t3_how_a_number_was_measured_is_kept_with_it(passing):
    errors = {"x1": 0.0065, "x30": 0.068, "x100": 0.226}
    made = passing.with_records(lambda r: replace(r, facts={**r.facts, "error_beside_outlier": errors}))
    want = {"split": "test", "stride": "512", "protocol": "stream512", "scored": "292,883", "bos": "none"}
    want |= {"error_beside_outlier.x1": "0.0065", "error_beside_outlier.x100": "0.226"}
    assert want.items() <= dict(table(build(made.judged), "quality").facts[0].pairs).items()
    texts = {"native_text": " a dog.", "continuation_text": " a\ncat."}
    made = passing.with_records(lambda r: replace(r, samples=texts) if r.key == "agreement--int8_sym" else r)
    native, candidate = table(build(made.judged), "agreement").facts
    assert "candidate continues" not in dict(native.pairs)
    assert dict(candidate.pairs)["candidate continues"] == " a\\ncat."


def test_labels_that_would_be_equal_get_their_ids(maker):
    made = maker()
    for cell in made.manifest.cells:
        cell.spec.update({"model": "x" * 300 + cell.id + "x" * 300, "batch": 1, "context": 1})
    made = made.with_cells(lambda cell: replace(cell, varied=("model",)))
    labels = Labels(made.run)
    texts = [labels.cell(cell.id).text for cell in made.manifest.cells]
    assert len(set(texts)) == len(texts)

"""The view model: labels, tables, precision, findings, notices."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest

from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import UNITS
from kvbench.render.labels import Labels
from kvbench.report.view import build


def table(view, key):
    return next(t for t in view.tables if t.key == key)


def entry(view, key, metric, **where):
    """The entry of `metric` on the line whose label has all of `where` (key=value text)."""
    found = table(view, key)
    column = [c.metric for c in found.columns].index(metric)
    return next(line.entries[column] for line in found.lines if set(where.items()) <= set(line.label.parts))


def test_importing_the_report_loads_nothing_heavy():
    code = (
        "import sys, kvbench.report.view, kvbench.report.console, kvbench.report.write, kvbench.report.figures.plots\n"
        "heavy = {'torch', 'transformers', 'pandas', 'scipy', 'matplotlib', 'jinja2', 'rich', 'numpy', 'yaml'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


def test_a_passing_run_says_so_and_has_nothing_to_find(passing):
    view = build(passing.judged)
    assert (view.word, view.tone, view.headline) == ("PASS", "pass", "All 14 checks passed.")
    assert (view.failures, view.fallbacks, view.gaps, view.notices) == ((), (), (), ())
    assert view.created_at == "2026-10-01 12:00:00 UTC"


def test_baselines_stand_directly_above_what_is_compared_with_them(passing):
    names = [line.label.text for line in table(build(passing.judged), "storage").lines]
    assert names[:4] == [
        "native · batch 1 · context 128",
        "int8_sym · batch 1 · context 128",
        "native · batch 1 · context 512",
        "int8_sym · batch 1 · context 512",
    ]


def test_cells_that_share_a_task_are_one_line_under_the_keys_it_depends_on(passing):
    lines = table(build(passing.judged), "quality").lines
    assert [(x.label.text, x.variant, len(x.label.cells)) for x in lines] == [
        ("native", "wikitext2 stream512", 4),
        ("int8_sym", "wikitext2 stream512", 4),
        ("native", "pydoc stream512", 4),
        ("int8_sym", "pydoc stream512", 4),
    ]


def test_rows_of_a_shared_task_that_differ_are_not_hidden_behind_the_first(passing):
    odd = passing.cell(kv_format="int8_sym", batch=4, context=512).id

    def change(row):
        return replace(row, value=99.0) if (row.cell, row.metric) == (odd, "ppl") else row

    lines = table(build(passing.with_rows(change).judged), "quality").lines
    own = [x for x in lines if x.label.text == "int8_sym · batch 4 · context 512"]
    assert [x.entries[0].shown.text for x in own] == ["99", "99"]  # one a corpus


def test_a_difference_names_its_baseline_and_a_baseline_has_no_difference(passing):
    view = build(passing.judged)
    got = entry(view, "storage", "kv_ratio", kv_format="int8_sym", batch="4", context="512")
    assert got.baseline.text == "native · batch 4 · context 512"
    assert entry(view, "storage", "kv_ratio", kv_format="native", batch="4") is None
    assert entry(view, "quality", "ppl_delta_pct", kv_format="int8_sym").baseline.text == "native"


def test_every_metric_of_the_rows_is_shown_even_one_that_no_table_names(passing):
    cell = passing.cell(kv_format="native").id
    made = replace(passing, rows=[*passing.rows, Row(cell, "brand_new_ms", "", 1.5, UNITS["ms"], 3)])
    view = build(made.judged)
    assert {c.metric for t in view.tables for c in t.columns} >= {row.metric for row in made.rows}
    assert table(view, "other").lines[0].entries[0].shown.brief == "1.500 ms"


def test_transfer_has_a_table_of_its_own_once_it_was_measured(passing):
    assert not [t for t in build(passing.judged).tables if t.key == "transfer"]
    cell = passing.cell(kv_format="int8_sym", batch=4, context=512).id
    moved = [
        Row(cell, "transfer_bytes", "", 33_280, UNITS["B"], 6),
        Row(cell, "swap_out_gb_s", "", 53.125, UNITS["GB/s"], 3),
    ]
    got = table(build(replace(passing, rows=[*passing.rows, *moved]).judged), "transfer")
    shown = {c.metric: e.shown.brief for c, e in zip(got.columns, got.lines[0].entries, strict=True) if e}
    assert shown == {"transfer_bytes": "33,280 B (0.0317 MiB, 0.03 MB)", "swap_out_gb_s": "53.12 GB/s"}


def test_a24_t4_no_device_peak_on_a_cpu_is_not_measured_rather_than_zero(passing):
    got = entry(build(passing.judged), "storage", "device_peak_bytes", kv_format="int8_sym")
    assert (got.shown.text, got.shown.exact) == ("not measured", "")


def test_a24_t2_weights_payload_scales_and_workspace_are_columns_of_their_own(passing):
    view = build(passing.judged)
    assert {c.metric for c in table(view, "weights").columns} == {"weight_bytes"}
    columns = {c.metric for c in table(view, "storage").columns}
    assert columns >= {
        "kv_bytes_payload",
        "kv_bytes_scales",
        "page_table_bytes",
        "held_bytes",
        "workspace_bytes",
    }


def test_precision_has_storage_transfer_and_execution_apart(passing):
    native, quantized = build(passing.judged).precision
    line = quantized.line
    assert (line.kv.requested, line.kv.resolved, line.effective) == ("int8_sym", "int8_sym", "int8_sym")
    assert (line.storage, line.transfer, line.execution) == ("int8", "not measured", "float32")
    assert native.reads == "0 of 156,000 tokens (0%)"
    assert quantized.reads == "156,000 of 156,000 tokens (100%)"  # 13 records, each counted once
    assert [(label.text, len(label.cells)) for label in quantized.where] == [("int8_sym", 4)]
    assert line.chips == (("verified", "E1, E2, E3"),)


def test_a_failing_run_says_what_was_lost_and_where(failing):
    view = build(failing.judged)
    assert (view.word, view.tone, view.exit_code) == ("FAIL", "fail", 1)
    lost, failed, error = view.failures
    assert (lost.kind, lost.title) == ("mismatch", "Precision lost")
    assert [label.text for label in lost.items[0].where] == ["int8_sym · batch 4 · context 512"]
    assert lost.items[0].sentence.startswith("E1: Layer 7 of 30 stores float32 where int8 was resolved")
    assert failed.title == "ppl_delta_pct within [-1, 1] (wikitext2 stream512)"
    assert failed.items[0].sentence.startswith("ppl_delta_pct of wikitext2 stream512 is 2.41 %")
    assert [(label.text, len(label.cells)) for label in failed.items[0].where] == [("int8_sym", 4)]
    assert (error.title, error.items[0].tail.splitlines()[-1]) == (
        "mcq cloze: MemoryError",
        "MemoryError: cannot allocate 1.2 GiB",
    )


def test_the_value_that_failed_is_marked_in_its_table(failing):
    view = build(failing.judged)
    got = entry(view, "quality", "ppl_delta_pct", kv_format="int8_sym")
    assert (got.status, got.limit) == ("fail", "within [-1, 1]")
    assert entry(view, "quality", "ppl", kv_format="int8_sym").status == ""


def test_one_bad_task_of_six_makes_the_cell_a_mismatch(failing):
    groups = build(failing.judged).precision
    assert [(g.where[0].text, len(g.where), g.line.state, g.line.effective) for g in groups] == [
        ("native", 1, "verified", "native"),
        ("int8_sym · batch 1 · context 128", 3, "verified", "int8_sym"),
        ("int8_sym · batch 4 · context 512", 1, "mismatch", "int8_sym + mixed"),
    ]


def test_effective_other_than_resolved_is_a_mismatch_though_every_level_says_verified(passing):
    def change(record):
        wrong = record.key == "storage--int8_sym-1-128"
        return replace(record, evidence={**record.evidence, "effective": "native"}) if wrong else record

    view = build(passing.with_records(change).judged)
    assert view.failures[0].items[0].sentence == "int8_sym was resolved and native + int8_sym is what ran."


def test_a_cell_without_any_evidence_is_unverified(passing):
    def change(record):
        return replace(record, evidence=None) if record.spec["kv_format"] == "int8_sym" else record

    view = build(passing.with_records(change).judged)
    group = view.precision[1]
    got = (group.line.state, group.line.effective, group.line.storage, group.reads)
    assert got == ("unverified", *["not measured"] * 3)
    assert view.failures[0].title == "Precision not proven"


def test_a01_a_request_that_was_dropped_on_the_way_is_no_fallback(passing):
    """The matrix asks for int8_sym, a hop drops it, and everything after that is consistently native."""

    def change(record):
        if record.spec["kv_format"] != "int8_sym":
            return record
        native = {"requested": "native", "resolved": "native", "reason": "asked for", "rejected": []}
        evidence = {**record.evidence, "effective": "native"}
        return replace(record, decision={**record.decision, "kv_format": native}, evidence=evidence)

    view = build(passing.with_records(change).judged)
    line = view.precision[1].line
    assert (line.kv.requested, line.kv.asked, line.kv.resolved) == ("int8_sym", "native", "native")
    assert (line.state, view.fallbacks) == ("mismatch", ())
    assert view.failures[0].items[0].sentence == (
        "The matrix asks for kv_format int8_sym, the resolver was asked for native: "
        "the request was dropped on the way."
    )


def test_a_declared_fallback_is_named_with_its_reason_and_what_was_rejected(passing):
    chosen = {
        "requested": "int8_sym",
        "resolved": "native",
        "reason": "layer 3 slides",
        "rejected": [["fp8_e4m3", "too"]],
    }

    def change(record):
        if record.spec["kv_format"] != "int8_sym":
            return record
        decision, evidence = (
            {**record.decision, "kv_format": chosen},
            {**record.evidence, "effective": "native"},
        )
        return replace(record, decision=decision, evidence=evidence)

    view = build(passing.with_records(change).judged)
    assert view.failures == ()
    (fallback,) = view.fallbacks
    assert (fallback.choice.requested, fallback.choice.resolved) == ("int8_sym", "native")
    assert (fallback.choice.reason, fallback.choice.rejected) == ("layer 3 slides", (("fp8_e4m3", "too"),))
    assert [(label.text, len(label.cells)) for label in fallback.where] == [("int8_sym", 4)]


@pytest.mark.parametrize(
    ("fixed", "title"),
    [
        ({"trust_remote_code": True}, "Remote code trusted"),
        ({"model_weights": "random"}, "Random weights"),
        ({"plumbing": True}, "Plumbing run"),
        ({"prefill_reads": "fresh"}, "Prompts read fresh K/V"),
    ],
)
def test_what_changes_the_meaning_of_every_number_is_said_first(maker, fixed, title):
    assert [n.title for n in build(maker(fixed=fixed).judged).notices] == [title]


@pytest.mark.parametrize(("of", "said"), [("abc", True), ("other", False)])
def test_scales_that_are_calibrated_on_the_text_they_are_measured_on_are_said(passing, of, said):
    scale = {"k": [0.1], "v": [0.1], "calibrated": {"file": "s.json", "data_sha256": of}}

    def on(record):
        if record.runner != "perplexity":
            return record
        facts = {**record.facts, "data_sha": "abc"}
        return replace(record, spec={**record.spec, "scale": scale}, options={"data": "pydoc"}, facts=facts)

    notices = build(passing.with_records(on).judged).notices
    found = [n.sentence for n in notices if n.title == "Scales calibrated on the text they are measured on"]
    assert [text.split(":")[0] for text in found] == (["s.json by perplexity pydoc"] if said else [])


@pytest.mark.parametrize(("after", "said"), [(3.0, False), (3.1, True)])
def test_a_busy_machine_is_said(passing, after, said):
    def loaded(record):
        if record.runner != "latency":
            return record
        return replace(
            record, facts={**record.facts, "host_load": {"before": 0.5, "after": after, "cpus": 2}}
        )

    found = [
        n.sentence
        for n in build(passing.with_records(loaded).judged).notices
        if n.title == "The machine was busy"
    ]
    assert len(found) == said
    assert all(text.startswith("A load of up to 3.1 on 2 CPUs while latency was measured") for text in found)


def test_partial_rows_are_marked_and_listed_with_their_reason(passing):
    why = "limited: first 6 chunks"
    made = passing.with_records(lambda r: replace(r, partial=why) if r.runner == "perplexity" else r)
    made = made.with_rows(lambda r: replace(r, partial=why) if r.metric.startswith("ppl") else r)
    view = build(made.judged)
    assert {line.partial for line in table(view, "quality").lines} == {why}
    assert {line.partial for line in table(view, "latency").lines} == {""}
    assert [n.title for n in view.notices] == ["Partial run"]
    assert view.gaps[-1].items[0].sentence == f"perplexity wikitext2: {why}"


def test_tasks_without_a_record_are_listed_with_their_place(passing):
    view = build(replace(passing, records=passing.records[:-2]).judged)
    assert [n.title for n in view.notices] == ["Unfinished run"]
    (item,) = view.gaps[-1].items
    assert (item.where[0].text, item.sentence) == (
        "int8_sym · batch 4 · context 512",
        "No record of storage, latency.",
    )


@pytest.mark.parametrize("status", ["refused", "not_evaluated"])
def test_what_was_refused_or_not_there_is_listed_with_its_message(passing, status):
    error = {"reason": "not_available", "message": "WikiText-2 is not here; get it with `x`."}

    def change(record):
        return (
            replace(record, status=status, error=error, samples={}, facts={})
            if record.runner == "mcq"
            else record
        )

    (finding,) = build(passing.with_records(change).judged).gaps
    assert (finding.kind, finding.items[0].sentence) == (status.replace("_", " "), error["message"])


def test_an_optional_check_that_was_not_evaluated_says_that_it_is_optional(passing, outcome):
    extra = outcome(
        "ttft_ms at most 5", "ttft_ms", None, "", "not_evaluated", None, "at most 5", "no row", False, "hm"
    )
    view = build(passing.with_verdict(extra, exit_code=0, word="pass").judged)
    assert view.gaps[0].why == "Not required. hm"
    assert [group.required for group in view.checks][-1] is False


def test_nan_is_shown_as_nan(passing):
    made = passing.with_rows(lambda r: replace(r, value=math.nan) if r.metric == "divergence_margin" else r)
    got = entry(build(made.judged), "agreement", "divergence_margin", kv_format="int8_sym")
    assert (got.shown.text, got.shown.state) == ("NaN", "nan")


def test_a05_t1_a_fact_of_several_numbers_is_shown_number_by_number(passing):
    errors = {"x1": 0.0065, "x30": 0.068, "x100": 0.226}
    made = passing.with_records(lambda r: replace(r, facts={**r.facts, "error_beside_outlier": errors}))
    facts = dict(table(build(made.judged), "quality").facts[0].pairs)
    assert [facts[f"error_beside_outlier.{name}"] for name in errors] == ["0.0065", "0.068", "0.226"]


def test_a17_t3_how_a_number_was_measured_is_kept_with_it(passing):
    facts = dict(table(build(passing.judged), "quality").facts[0].pairs)
    assert (facts["split"], facts["stride"]) == ("test", "512")
    assert (facts["protocol"], facts["scored"], facts["bos"], facts["text"]) == (
        "stream512",
        "292,883",
        "none",
        "raw",
    )


def test_the_texts_past_a_divergence_can_be_read(passing):
    def change(record):
        texts = {"native_text": " a dog.", "continuation_text": " a\ncat."}
        return replace(record, samples=texts) if record.key == "agreement--int8_sym" else record

    native, candidate = table(build(passing.with_records(change).judged), "agreement").facts
    assert "candidate goes on" not in dict(native.pairs)
    assert dict(candidate.pairs)["candidate goes on"] == " a\\ncat."


def test_the_cells_table_holds_what_differs_and_the_rest_is_said_once(passing):
    view = build(passing.judged)
    assert view.cell_keys == ("kv_format", "batch", "context")
    assert ("page_size", "16") in view.fixed
    assert ("scale", "null") in view.fixed


def test_labels_that_would_be_equal_get_their_ids(maker):
    made = maker()
    long = "x" * 300
    for cell in made.manifest.cells:
        cell.spec["model"] = long + cell.id + long
        cell.spec.update({"batch": 1, "context": 1})
    made = made.with_cells(lambda cell: replace(cell, varied=("model",)))
    labels = Labels(made.run)
    texts = [labels.cell(cell.id).text for cell in made.manifest.cells]
    assert len(set(texts)) == len(texts)


def test_a_row_of_a_cell_that_the_manifest_does_not_have_is_still_shown(passing):
    made = replace(passing, rows=[*passing.rows, Row("gone", "ttft_ms", "", 1.0, UNITS["ms"], 1)])
    assert any(line.label.text == "gone" for line in table(build(made.judged), "latency").lines)


def test_a_run_without_records_still_makes_a_report(passing):
    empty = replace(
        passing,
        records=[],
        rows=[],
        verdict=replace(passing.verdict, outcomes=(), exit_code=3, word="not_evaluated"),
    )
    view = build(empty.judged)
    assert (view.headline, view.word, view.tone) == ("No check was evaluated.", "NOT EVALUATED", "incomplete")
    assert view.itl == view.bytes == ()


def test_cells_that_never_ran_are_gaps_and_not_failures(passing):
    ran = [record for record in passing.records if record.spec["kv_format"] == "native"]
    view = build(replace(passing, records=ran).judged)
    assert view.failures == ()
    assert [(len(item.where), item.sentence) for item in view.gaps[0].items] == [
        (1, "No record of storage, latency."),
        (1, "No record of parity, agreement, perplexity wikitext2, perplexity pydoc, mcq cloze."),
    ]

"""The view model: labels, tables, precision, findings."""

import csv
import io
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import UNITS
from kvbench.render.labels import Labels
from kvbench.report.console import show
from kvbench.report.html import render
from kvbench.report.json import result_json
from kvbench.report.sections.provenance import ScaleRow, summary
from kvbench.report.tables import as_csv, wide_table
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


def test_every_row_is_shown_even_of_an_unknown_metric_or_cell_and_equal_labels_get_ids(passing, maker):
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
    made = maker()
    for cell in made.manifest.cells:
        cell.spec.update({"model": "x" * 300 + cell.id + "x" * 300, "batch": 1, "context": 1})
    made = made.with_cells(lambda cell: replace(cell, varied=("model",)))
    labels = Labels(made.run)
    texts = [labels.cell(cell.id).text for cell in made.manifest.cells]
    assert len(set(texts)) == len(texts)


def test_storage_has_its_parts_and_precision_has_storage_transfer_and_execution(passing):
    view = build(passing.judged)
    assert {c.metric for c in table(view, "weights").columns} == {"weight_bytes"}
    parts = {"kv_bytes_payload", "kv_bytes_scales", "page_table_bytes", "held_bytes", "workspace_bytes"}
    assert {c.metric for c in table(view, "storage").columns} >= parts
    got = entry(view, "storage", "device_peak_bytes", kv_format="int8_sym")
    assert (got.shown.text, got.shown.exact) == ("not measured", "")
    assert render(view).count('<td class="num missing">not measured') == 8
    native, group = build(passing.judged).precision
    line = group.line
    assert (line.kv.requested, line.kv.resolved, line.effective) == ("int8_sym",) * 3
    assert (line.storage, line.transfer, line.execution) == ("int8", "not measured", "float32")
    assert native.reads == "0 of 156,000 tokens (0%)"
    assert group.reads == "156,000 of 156,000 tokens (100%)"  # 13 records, each counted once
    assert [(label.text, len(label.cells)) for label in group.where] == [("int8_sym", 4)]
    assert line.chips == (("verified", "E1, E2, E3"),)


def test_a_failing_run_marks_what_failed_and_evidence_decides_the_state(failing, passing):
    view = build(failing.judged)
    got = entry(view, "quality", "ppl_delta_pct", kv_format="int8_sym")
    assert (got.status, got.limit) == ("fail", "within [-1, 1]")
    assert entry(view, "quality", "ppl", kv_format="int8_sym").status == ""
    assert [line.status for line in view.checks[0].lines][:2] == ["fail", "pass"]
    assert [(len(g.where), g.line.state) for g in view.precision] == [
        *((1, "verified"), (3, "verified"), (1, "mismatch"))  # one bad task of six
    ]

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


# Heat tables: which metrics get one, where each value is, and that its shade follows the number.


def heats(made):
    return {heat.metric: heat for heat in build(made.judged).heats}


def test_a_metric_over_batch_and_context_has_a_heat_table_whose_values_link_to_their_lines(maker, passing):
    heat = heats(maker(contexts=(128, 512, 2048)))["itl_ms"]
    assert (heat.across, heat.columns) == ("context", ("128", "512", "2048"))
    assert (heat.unit, heat.better) == ("ms", "lower")
    assert [dict(row.parts) for row in heat.rows] == [
        {"kv_format": fmt, "batch": batch} for batch in ("1", "4") for fmt in ("native", "int8_sym")
    ]
    assert [row.label.baseline for row in heat.rows] == [True, False, True, False]
    assert all(cell.entry.shown.interval and cell.entry.shown.n for row in heat.rows for cell in row.cells)
    found = heats(maker())
    assert "kv_bytes_total" in found
    assert "kv_ratio_16bit" not in found  # one ratio a format, the same in every cell
    assert "ppl" not in found  # not repeated over batch and context
    assert heats(maker(batches=(1,), formats=("native",))) == {}
    view = build(passing.judged)
    lines = {f"{t.key}-{i}": (t, line) for t in view.tables for i, line in enumerate(t.lines)}
    cells = [(heat, cell) for heat in view.heats for row in heat.rows for cell in row.cells]
    assert len(cells) > 20
    for heat, cell in cells:
        table, line = lines[cell.anchor]
        assert line.entries[[c.metric for c in table.columns].index(heat.metric)] is cell.entry


FAR = {"formats": ("native",), "batches": (1, 100), "contexts": (100, 10_000)}


def test_shades_follow_the_values_and_differ_on_the_two_sides_of_no_change(maker):
    for shape, metric, shades in (
        ({}, "itl_ms", ["q0", "q8"]),
        (FAR, "kv_bytes_total", ["q0", "q4", "q4", "q8"]),
    ):
        cells = [c for row in heats(maker(**shape))[metric].rows for c in row.cells]
        found = [shade for _, shade in sorted((float(c.entry.shown.exact), c.shade) for c in cells)]
        assert found == sorted(found)
        assert (found if len(shades) == len(found) else [found[0], found[-1]]) == shades
    values = {"int8_sym-1-128": 0.8, "int8_sym-1-512": 0.9, "int8_sym-4-128": 1.0, "int8_sym-4-512": 1.2}

    def change(row):
        if (row.metric, row.cell) == ("itl_ms", "native-1-128"):
            return replace(row, value=None, low=None, high=None)
        return replace(row, value=values[row.cell]) if row.metric == "itl_ratio" else row

    found = heats(maker().with_rows(change))
    assert found["itl_ratio"].around == "1"
    shades = [[c.shade for c in row.cells] for row in found["itl_ratio"].rows]
    assert shades == [["lo4", "lo2"], ["q0", "hi4"]]
    first = found["itl_ms"].rows[0].cells[0]
    assert (first.shade, first.entry.shown.text) == ("", "not measured")


def test_scales_make_the_columns_where_neither_batch_nor_context_varies(maker):
    made = maker(formats=("native", "int8_static", "fp8_e4m3_static"), batches=(1,), contexts=(128, 512))
    scales = {128: 0.05, 512: 1.0}  # the contexts become two scales of the static formats
    for cell in made.manifest.cells:
        scale = None if cell.spec["kv_format"] == "native" else scales[cell.spec["context"]]
        cell.spec.update({"scale": scale, "context": 128})
    for task in made.manifest.tasks:
        task.spec["scale"] = None
    made = made.with_manifest(cells=tuple(c for c in made.manifest.cells if c.id != "native-1-512"))
    made = made.with_cells(lambda c: replace(c, varied=("kv_format", "scale"), baseline="native-1-128"))

    def change(row):
        factor = (2 if "512" in row.cell else 1) * (1 + len(row.cell))
        return None if row.cell == "native-1-512" else replace(row, value=row.value and row.value * factor)

    heat = heats(made.with_rows(change))["itl_ms"]
    assert (heat.across, heat.columns) == ("scale", ("0.05", "1.0", "none given"))
    assert [len([c for c in row.cells if c]) for row in heat.rows] == [1, 2, 2]


# FP8 weights in every output: requested, resolved, effective, stored, and the paths of the products.


STORED = "bfloat16 and float8_e4m3fn + float32 scales"
ROUTE = "1..64 w8a16, 65.. w8a8 (N x K: 576 x 576)"
MEASURED = [
    ("gemm_error_max", 0.0312, "error", "w8a16 0.0042, w8a8 0.031"),
    ("gemm_bound_share", 0.43, "ratio", ""),
    ("gemm_paths", 2, "paths", ROUTE),
    ("weight_scale_bytes", 30_000, "B", ""),
    ("model_load_s", 2.5, "s", ""),
]
FP8 = "fp8_block128"


@pytest.fixture
def fp8(maker):
    """FP8 weights, whose prompts ran on W8A8 and whose decode steps ran on W8A16; and the sweep of rows."""
    made = maker(batches=(1,), contexts=(128,), fixed={"weights": FP8, "gemm": "auto"})
    cells = [cell.id for cell in made.manifest.cells]
    more = [Row(cell, m, "", v, UNITS[unit], note=note) for cell in cells for m, v, unit, note in MEASURED]
    return replace(made, rows=[*made.rows, *more])


def with_weights(made, effective, **decision):
    """The run with other weights in the evidence and decision of its int8_sym cell."""

    def change(r):
        evidence = {**r.evidence, "effective_weights": effective}
        changed = replace(r, decision={**r.decision, **decision}, evidence=evidence)
        return changed if "int8_sym" in r.key else r

    return made.with_records(change)


def text_of(page):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def printed(made):
    file = io.StringIO()
    show(build(made.judged), file)
    return file.getvalue()


def test_w8a8_and_w8a16_are_told_apart_in_every_output(fp8, passing):
    paths = "w8a16 + w8a8"
    line = build(fp8.judged).precision[0].line
    weights, gemm = line.choice("weights"), line.choice("gemm")
    assert (weights.requested, weights.resolved, line.effective_weights) == (FP8,) * 3
    assert (gemm.resolved, line.stored_weights, line.products) == ("by_shape", STORED, paths)
    assert line.state == "verified"
    wide = next(iter(csv.DictReader(io.StringIO(as_csv(wide_table(fp8.judged))))))
    want = dict.fromkeys(("weights", "weights_resolved", "effective_weights"), FP8)
    want |= {"gemm": "auto", "gemm_resolved": "by_shape", "stored_weights": STORED, "products": paths}
    assert want.items() <= wide.items()
    cell = result_json(fp8.judged)["cells"][0]
    assert (cell["effective_weights"], cell["choices"]["gemm"]["resolved"]) == (FP8, "by_shape")
    assert (cell["precision"]["weights"], cell["precision"]["gemm"]) == (STORED, paths)
    page, console = text_of(render(build(fp8.judged))), printed(fp8)
    assert f"{FP8} {FP8} {FP8} {STORED} {paths}" in page
    row = console[console.index("Precision of the weights") :].splitlines()[4]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:] == [FP8] * 3 + [STORED, "by_shape", paths]
    # `native` alone would be read as the weights.
    assert "|KV native · batch 1 · context 128" in console
    assert not re.search(r"^\|native ·", console, re.MULTILINE)
    assert "KV native · batch 1 · context 128" in page
    assert "|native (4 cells)" in printed(passing)
    assert "Precision of the weights" not in printed(passing)


def test_weights_that_ran_natively_are_a_mismatch_unless_the_resolver_says_why(fp8):
    made = with_weights(fp8, "native")  # though every level is verified
    view = build(made.judged)
    assert [group.line.state for group in view.precision] == ["verified", "mismatch"]
    assert [finding.kind for finding in view.failures] == ["mismatch"]
    assert '<td class="is-fail"><strong>native</strong></td>' in render(view)
    cell = result_json(made.judged)["cells"][1]
    assert (cell["effective_weights"], cell["evidence"]["state"]) == ("native", "mismatch")
    choice = {"requested": FP8, "resolved": "native", "reason": "no_kernel", "rejected": [[FP8, "no_kernel"]]}
    view = build(with_weights(fp8, "native", weights=choice).judged)
    assert {f.choice.aspect for f in view.fallbacks} == {"weights"}
    assert '<strong class="fell">native</strong><small>fallback</small>' in render(view)
    view = build(fp8.judged)
    tables = {table.key: table for table in view.tables}
    names = {key: [c.metric for c in tables[key].columns] for key in ("gemm", "weights")}
    assert names["gemm"] == ["gemm_error_max", "gemm_bound_share", "gemm_paths"]
    assert names["weights"] == ["weight_bytes", "weight_scale_bytes", "model_load_s"]
    assert tables["storage"].facts
    assert tables["weights"].facts == ()
    page = render(view)
    assert ROUTE in page
    assert "w8a16 0.0042, w8a8 0.031" in page


# Scales by layer in the report: values, sources, whether they were read; one table for equal cells.


CHECKPOINT = {"k_source": "checkpoint", "v_source": "checkpoint"}
DYNAMIC = {"k_source": "dynamic", "v_source": "dynamic"}


def scale(layer, k=0.5, v=0.25, **changes):
    return {"layer": layer, "k": k, "v": v, "k_read": True, "v_read": True, **CHECKPOINT, **changes}


def made_with(maker, entries, other=None):
    """A run whose int8 records have these scales; other: those of the latency runner."""

    def change(record):
        if "int8_sym" not in record.key or record.runner not in ("storage", "latency"):
            return record
        scales = other if other and record.runner == "latency" else entries
        facts = {"scale_kind": "checkpoint", "scale_source": "from <its> files", "scales": scales}
        return replace(record, facts=record.facts | facts)

    return maker(batches=(1,), contexts=(128, 512)).with_records(change)


def test_scales_of_equal_cells_have_one_table_and_sides_are_counted_separately(maker):
    default = {"k_source": "default", "v_source": "default"}
    view = build(made_with(maker, [scale(0, k_read=False), scale(1, 1.0, 1.0, **default)]).judged)
    (found,) = view.scales
    assert found.summary == "1 of 2 layers read: checkpoint 1, default 1"
    assert sum(len(label.cells) for label in found.where) == 2
    assert found.rows == (
        ScaleRow(0, (("0.5", "checkpoint", "no"), ("0.25", "checkpoint", "yes"))),
        ScaleRow(1, (("1", "default", "yes"), ("1", "default", "yes"))),
    )
    page = render(view)
    assert "from &lt;its&gt; files." in page
    assert '<td class="num">0.5</td><td>checkpoint</td><td class="is-fail">no</td>' in page
    assert build(maker(batches=(1,), contexts=(128,)).judged).scales == ()
    other = [scale(0, k=1.0, k_source=None, k_read=None, v_read=False)]
    ((k, v),) = (row.sides for row in build(made_with(maker, [scale(0)], other).judged).scales[0].rows)
    assert (k[0], k[1].split(" + ")[0], k[2]) == ("0.5 + 1", "checkpoint", "unproven")
    assert "unknown" in k[1]
    assert v == ("0.25", "checkpoint", "no")
    ranges = [scale(0, [0.1, 0.2], [1, 2], **DYNAMIC)], [scale(0, [0.05, 0.15], [1, 3], **DYNAMIC)]
    (found,) = build(made_with(maker, *ranges).judged).scales
    assert [side[0] for side in found.rows[0].sides] == ["0.05 to 0.2", "1 to 3"]
    sources = [("checkpoint", "checkpoint", "yes")] * 28 + [("default", "default", "yes")]
    parted = "29 of 30 layers read: K checkpoint 29, default 1; V checkpoint 28, default 2"
    for last, text in (
        (("default", "default", "yes"), "30 of 30 layers read: checkpoint 28, default 2"),
        (("checkpoint", "default", "no"), parted),
        (("default", "default", "unproven"), "29 of 30 layers read: checkpoint 28, default 2"),
    ):
        sides = enumerate([*sources, last])
        assert summary([ScaleRow(i, (("1", k, "yes"), ("1", v, read))) for i, (k, v, read) in sides]) == text

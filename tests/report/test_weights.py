"""FP8 weights in every output: requested, resolved, effective, stored, and the paths of the products."""

import csv
import io
import re
from dataclasses import replace

import pytest

from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import UNITS
from kvbench.report.console import show
from kvbench.report.html import render
from kvbench.report.json import result_json
from kvbench.report.tables import wide_csv
from kvbench.report.view import build

STORED = "bfloat16 and float8_e4m3fn + float32 scales"
ROUTE = "1..64 w8a16, 65.. w8a8 (N x K: 576 x 576)"
MEASURED = [
    ("gemm_error_max", 0.0312, "error", "w8a16 0.0042, w8a8 0.031"),
    ("gemm_bound_share", 0.43, "ratio", ""),
    ("gemm_paths", 2, "paths", ROUTE),
    ("weight_scale_bytes", 30_000, "B", ""),
    ("model_load_s", 2.5, "s", ""),
]


@pytest.fixture
def fp8(maker):
    """FP8 weights, whose prompts ran on W8A8 and whose decode steps ran on W8A16; and the sweep of rows."""
    made = maker(batches=(1,), contexts=(128,), fixed={"weights": "fp8_block128", "gemm": "auto"})
    more = [
        Row(c.id, metric, "", value, UNITS[unit], note=note)
        for c in made.manifest.cells
        for metric, value, unit, note in MEASURED
    ]
    return replace(made, rows=[*made.rows, *more])


def with_weights(made, effective, **decision):
    """The run with other weights in the evidence and decision of its int8_sym cell."""

    def change(r):
        if "int8_sym" not in r.key:
            return r
        evidence = {**r.evidence, "effective_weights": effective}
        return replace(r, decision={**r.decision, **decision}, evidence=evidence)

    return made.with_records(change)


def text_of(page):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def printed(made):
    file = io.StringIO()
    show(build(made.judged), file)
    return file.getvalue()


def test_w8a8_and_w8a16_are_told_apart_in_every_output(fp8):
    line = build(fp8.judged).precision[0].line
    assert (line.choice("weights").requested, line.choice("weights").resolved, line.effective_weights) == (
        "fp8_block128",
    ) * 3
    assert (line.choice("gemm").resolved, line.stored_weights, line.products) == (
        "by_shape",
        STORED,
        "w8a16 + w8a8",
    )
    assert line.state == "verified"
    wide = next(iter(csv.DictReader(io.StringIO(wide_csv(fp8.judged)))))
    want = {"weights": "fp8_block128", "weights_resolved": "fp8_block128",
            "effective_weights": "fp8_block128", "gemm": "auto", "gemm_resolved": "by_shape",
            "stored_weights": STORED, "products": "w8a16 + w8a8"}  # fmt: skip
    assert want.items() <= wide.items()
    cell = result_json(fp8.judged)["cells"][0]
    assert (cell["effective_weights"], cell["choices"]["gemm"]["resolved"]) == ("fp8_block128", "by_shape")
    assert (cell["precision"]["weights"], cell["precision"]["gemm"]) == (STORED, "w8a16 + w8a8")
    page = text_of(render(build(fp8.judged)))
    assert f"fp8_block128 fp8_block128 fp8_block128 {STORED} w8a16 + w8a8" in page
    console = printed(fp8)
    row = console[console.index("Precision of the weights") :].splitlines()[4]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:] == ["fp8_block128"] * 3 + [STORED, "by_shape", "w8a16 + w8a8"]


def test_with_fp8_weights_the_label_of_the_cache_is_kv_native(fp8, passing):
    """`native` alone would be read as the weights."""
    assert "|KV native · batch 1 · context 128" in printed(fp8)
    assert not re.search(r"^\|native ·", printed(fp8), re.MULTILINE)
    assert "KV native · batch 1 · context 128" in text_of(render(build(fp8.judged)))
    assert "|native (4 cells)" in printed(passing)
    assert "Precision of the weights" not in printed(passing)


def test_dequantized_weights_are_a_mismatch_though_every_level_is_verified(fp8):
    made = with_weights(fp8, "native")
    view = build(made.judged)
    assert [group.line.state for group in view.precision] == ["verified", "mismatch"]
    assert [finding.kind for finding in view.failures] == ["mismatch"]
    assert '<td class="is-fail"><strong>native</strong></td>' in render(view)
    cell = result_json(made.judged)["cells"][1]
    assert (cell["effective_weights"], cell["evidence"]["state"]) == ("native", "mismatch")


def test_a_fallback_to_native_weights_is_shown_as_one(fp8):
    rejected = [["fp8_block128", "no_kernel"]]
    native = {"requested": "fp8_block128", "resolved": "native", "reason": "no_kernel", "rejected": rejected}
    view = build(with_weights(fp8, "native", weights=native).judged)
    assert {f.choice.aspect for f in view.fallbacks} == {"weights"}
    assert '<strong class="fell">native</strong><small>fallback</small>' in render(view)


def test_products_and_weights_have_tables_of_their_own(fp8):
    view = build(fp8.judged)
    tables = {table.key: table for table in view.tables}
    assert [c.metric for c in tables["gemm"].columns] == ["gemm_error_max", "gemm_bound_share", "gemm_paths"]
    assert [c.metric for c in tables["weights"].columns] == [
        "weight_bytes",
        "weight_scale_bytes",
        "model_load_s",
    ]
    assert tables["storage"].facts
    assert tables["weights"].facts == ()
    page = render(view)
    assert ROUTE in page
    assert "w8a16 0.0042, w8a8 0.031" in page

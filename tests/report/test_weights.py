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
from kvbench.report.tables import as_csv, wide_table
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


def test_products_and_weights_have_tables_of_their_own(fp8):
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

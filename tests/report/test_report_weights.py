"""FP8 weights in every output: requested, resolved, effective, how they are stored, and by which paths they were computed."""

import csv
import io
import re
from dataclasses import replace

import pytest

from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import UNITS
from kvbench.report.console import show
from kvbench.report.csv import wide_csv
from kvbench.report.html import render
from kvbench.report.json import result_json
from kvbench.report.view import build

STORED = "bfloat16 and float8_e4m3fn + float32 scales"
ROUTE = "1..64 w8a16, 65.. w8a8 (N x K: 576 x 576)"


@pytest.fixture
def fp8(maker):
    """Cells with FP8 weights, whose prompts ran on W8A8 and whose decode steps on W8A16; and what the sweep of rows gave."""
    made = maker(batches=(1,), contexts=(128,), fixed={"weights": "fp8_block128", "gemm": "auto"})
    found = [("gemm_error_max", 0.0312, "error", "w8a16 0.0042, w8a8 0.031"), ("gemm_bound_share", 0.43, "ratio", ""),
             ("gemm_paths", 2, "paths", ROUTE), ("weight_scale_bytes", 30_000, "B", ""), ("model_load_s", 2.5, "s", "")]  # fmt: skip
    more = [
        Row(c.id, metric, "", value, UNITS[unit], note=note)
        for c in made.manifest.cells
        for metric, value, unit, note in found
    ]
    return replace(made, rows=[*made.rows, *more])


def dequantized(made):
    """The same run, where the weights of one cell turned out to be native."""

    def change(record):
        if "int8_sym" not in record.key:
            return record
        return replace(record, evidence={**record.evidence, "effective_weights": "native"})

    return made.with_records(change)


def table(view, key):
    return next(t for t in view.tables if t.key == key)


def text_of(page):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def printed(made):
    file = io.StringIO()
    show(build(made.judged), file)
    return file.getvalue()


def test_w8a8_and_w8a16_are_told_apart_in_the_precision_of_every_output(fp8):
    (line, *_) = [group.line for group in build(fp8.judged).precision]
    assert (line.weights.requested, line.weights.resolved, line.effective_weights) == ("fp8_block128",) * 3
    assert (line.gemm.resolved, line.stored_weights, line.products) == ("by_shape", STORED, "w8a16 + w8a8")
    assert line.state == "verified"

    wide = next(iter(csv.DictReader(io.StringIO(wide_csv(fp8.judged)))))
    assert (wide["weights"], wide["weights_resolved"], wide["effective_weights"]) == ("fp8_block128",) * 3
    assert (wide["gemm"], wide["gemm_resolved"]) == ("auto", "by_shape")
    assert (wide["stored_weights"], wide["products"]) == (STORED, "w8a16 + w8a8")

    cell = result_json(fp8.judged)["cells"][0]
    assert (cell["effective_weights"], cell["choices"]["gemm"]["resolved"]) == ("fp8_block128", "by_shape")
    assert cell["precision"] == {"storage": "float32", "transfer": "not measured", "execution": "float32",
                                 "weights": STORED, "gemm": "w8a16 + w8a8"}  # fmt: skip

    assert f"fp8_block128 fp8_block128 fp8_block128 {STORED} w8a16 + w8a8" in text_of(
        render(build(fp8.judged))
    )
    console = printed(fp8)
    shown = console[console.index("Precision of the weights") :].splitlines()[4]
    cells = [cell.strip() for cell in shown.strip("|").split("|")]
    assert cells[1:] == ["fp8_block128"] * 3 + [STORED, "by_shape", "w8a16 + w8a8"]


def test_a_run_of_native_weights_needs_no_second_table_on_a_console(passing):
    assert "Precision of the weights" not in printed(passing)
    assert "native native native float32 native" in text_of(render(build(passing.judged)))


def test_a_cache_beside_fp8_weights_is_called_the_cache(fp8, passing):
    """`native` alone would be read of the weights."""
    console = printed(fp8)
    cache = console[console.index("Precision of the KV cache") : console.index("Precision of the weights")]
    assert "|KV native · batch 1 · context 128" in cache
    assert not re.search(r"^\|native ·", console, re.MULTILINE)
    page = text_of(render(build(fp8.judged)))
    assert "KV native · batch 1 · context 128" in page
    assert "KV format KV precision Evidence" in page
    assert "|native (4 cells)" in printed(passing)


def test_weights_that_were_dequantized_are_a_mismatch_though_every_level_says_verified(fp8):
    view = build(dequantized(fp8).judged)
    states = {group.line.label.text: group.line.state for group in view.precision}
    assert states == {
        "KV native · batch 1 · context 128": "verified",
        "KV int8_sym · batch 1 · context 128": "mismatch",
    }
    (item,) = view.failures[0].items
    assert item.sentence == "fp8_block128 was resolved and native is what ran."
    page = render(view)
    assert '<td class="is-fail"><strong>native</strong></td>' in page
    cells = {c["spec"]["kv_format"]: c for c in result_json(dequantized(fp8).judged)["cells"]}
    assert (cells["int8_sym"]["effective_weights"], cells["int8_sym"]["evidence"]["state"]) == (
        "native",
        "mismatch",
    )


def test_a_fallback_to_native_weights_is_shown_as_one(fp8):
    native = {
        "requested": "fp8_block128",
        "resolved": "native",
        "reason": "no_kernel",
        "rejected": [["fp8_block128", "no_kernel"]],
    }
    made = fp8.with_records(
        lambda r: replace(
            r,
            decision={**r.decision, "weights": native},
            evidence={**r.evidence, "effective_weights": "native"},
        )
    )
    view = build(made.judged)
    assert {f.choice.aspect for f in view.fallbacks} == {"weights"}
    assert '<strong class="fell">native</strong><small>fallback</small>' in render(view)


def test_products_and_weights_have_tables_of_their_own_and_the_route_map_is_in_one(fp8):
    view = build(fp8.judged)
    assert [(c.metric, c.heading) for c in table(view, "gemm").columns] == [
        ("gemm_error_max", "Worst error"),
        ("gemm_bound_share", "Worst share of bound"),
        ("gemm_paths", "Paths, by rows"),
    ]
    assert [c.metric for c in table(view, "weights").columns] == [
        "weight_bytes",
        "weight_scale_bytes",
        "model_load_s",
    ]
    page = render(view)
    assert ROUTE in page
    assert "w8a16 0.0042, w8a8 0.031" in page
    assert "30,000 B (0.0286 MiB, 0.03 MB)" in page.replace('</data> <span class="unit">', " ").replace(
        "</span><small>", " "
    )


def test_how_storage_was_measured_is_said_once(passing):
    view = build(passing.judged)
    assert table(view, "storage").facts
    assert table(view, "weights").facts == ()

"""Figures of times, bytes, health and speed limits out of made-up records, and the page: exact numbers, absent where nothing was measured."""

import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from kvbench.formats.kv import WEIGHT_FORMATS, weight_bytes
from kvbench.metrics.collect import derive
from kvbench.render import svg
from kvbench.report.figures import numbers
from kvbench.report.figures.page import drilldowns, figures
from kvbench.report.html import render
from kvbench.report.view import build
from kvbench.stats.intervals import clustered_ratio
from tests.factories.runs.drawn import (
    FACTS,
    FIRST,
    NATIVE,
    READS,
    SECOND,
    SIX,
    agreement,
    figure,
    healthy,
    latency,
    measured,
    quality,
    question,
    small,
    text_of,
    texts,
)

HOSTILE = ["<script>alert(1)</script>", "a\n\x1b[31m</pre>\u202e", "量化", "$\\frac{1}{$"]


# Times


def test_ttft_has_a_median_with_an_interval_from_six_requests_on(maker):
    gaps = [[1.0, 2.0]] * 6
    view = build(measured(small(maker), latency=latency(SIX, gaps)).judged)
    point = view.plots.ttft[0].points[0]
    assert (point.value, point.low, point.high, point.n, point.repeats) == (12.5, 10.0, 15.0, 6, tuple(SIX))
    few = build(measured(small(maker), latency=latency(SIX[:5], gaps[:5])).judged).plots.ttft[0].points[0]
    assert (few.value, few.low, few.high) == (12.0, None, None)
    assert "takes" not in figure(view, "latency", 1).caption
    assert figure(view, "latency", 1).caption.startswith("Median TTFT")


def test_single_requests_are_drawn_unless_they_are_too_many(maker):
    few, many = (
        build(measured(small(maker), latency=latency([9.0] * n, [[1.0, 2.0]] * n)).judged) for n in (200, 201)
    )
    assert ["Dots" in figure(view, "latency").caption for view in (few, many)] == [True, False]
    assert figure(few, "latency").svg.count("<use") - figure(many, "latency").svg.count("<use") == 400
    assert figure(many, "latency").grids[0].rows[0][-1] == "1.500; " * 12 + "... 201 in all"


def test_itl_has_a_t_interval_over_its_requests(maker):
    gaps = [[1.0, 2.0], [2.0, 3.0], [3.0, 5.0]]
    view = build(measured(small(maker), latency=latency(SIX[:3], gaps)).judged)
    point = view.itl[0].points[0]
    want = clustered_ratio([3.0, 5.0, 8.0], [2, 2, 2], range(3)).interval
    assert (point.value, point.repeats) == (16 / 6, (1.5, 2.5, 4.0))
    assert (point.low, point.high) == want
    assert texts(figure(view, "latency").grids[0].rows[0])[-1] == "1.500; 2.500; 4.000"


def test_times_that_lie_far_apart_take_a_log_axis_and_the_caption_says_so(maker):
    view = build(measured(small(maker), latency__native=latency([1.0], [[1.0]]), latency__int8_sym=latency([9.0], [[7.0]])).judged)  # fmt: skip
    itl, ttft = figure(view, "latency"), figure(view, "latency", 1)
    assert "logarithmic" in ttft.caption
    assert "logarithmic" not in itl.caption
    own = "Native's line is of its own cell's requests, and a ratio is of the pairs that ran interleaved"
    assert [own in found.caption for found in (itl, ttft)] == [True, True]


# Bytes


def test_bytes_hold_what_stands_beside_the_cache_and_the_16_bit_line(maker):
    def change(record):
        if record.runner != "storage":
            return record
        return replace(
            record,
            facts={**record.facts, "native16_bytes": 5_000, "workspace_bytes": 7 * 2**20, "held_bytes": 11},
        )

    made = small(maker).with_records(change)
    view = build(made.judged)
    # The made-up rows say a workspace of 0 unless the facts do.
    bar = view.bytes[1]
    assert (bar.scales, bar.page_table, bar.workspace, bar.held, bar.native16) == (
        46_080,
        64,
        7 * 2**20,
        11,
        5_000,
    )
    found = figure(view, "storage")
    drawn = [e.text for e in ET.fromstring(found.svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"workspace (MiB)", "stored for the cache (MiB)", "7"} <= set(drawn)
    assert "16-bit native cache" in found.caption
    assert [name for _, _, name in found.legend] == ["payload", "scales", "page tables", "workspace"]
    assert found.grids[0].columns[1:] == (
        "payload",
        "scales",
        "page tables",
        "workspace",
        "held beside the weights",
        "16-bit native",
    )


def test_what_no_cell_measured_is_no_column_and_no_panel(maker):
    made = small(maker).with_records(
        lambda r: (
            replace(r, facts={**r.facts, "workspace_bytes": None, "held_bytes": None})
            if r.runner == "storage"
            else r
        )
    )
    found = figure(build(made.judged), "storage")
    assert found.grids[0].columns[1:] == ("payload", "scales", "page tables")
    assert "Workspace is not measured on this device." in found.caption
    assert "workspace (MiB)" not in found.svg
    assert "16-bit" not in found.caption


# Health


def test_health_is_by_layer_and_side_of_the_quantized_cells(maker):
    view = build(healthy(maker, 2).judged)
    (line,) = view.plots.health
    assert (line.name, line.tokens, line.layers) == ("int8_sym", 64, (0, 1))
    found = figure(view, "health")
    assert found.grids[0].summary == "Layers of int8_sym in numbers: 2 layers"
    assert texts(found.grids[0].rows[3])[:7] == ["1 V", "4", "0.02", "0", "0.02", "255 codes", "0.01"]
    assert found.caption.endswith("Not drawn, for it is 0 in every layer: clipped.")
    drawn = [e.text for e in ET.fromstring(found.svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"amax", "flushed to 0 (share)", "codes used", "scale, smallest to largest"} <= set(drawn)
    assert "clipped (share)" not in drawn


def test_many_layers_leave_the_worst_in_the_table_and_say_of_how_many(maker):
    grid = figure(build(healthy(maker, 300).judged), "health").grids[0]
    assert len(grid.rows) == 2 * 120
    assert grid.summary.endswith("the 120 layers with the largest error of 300")
    assert [row[0] for row in grid.rows[:3]] == ["299 K", "299 V", "298 K"]


def test_one_scale_for_all_is_still_drawn(maker):
    ET.fromstring(figure(build(healthy(maker, 2, scale_min=0.05).judged), "health").svg)


# Roofline and products


def test_a_step_reads_its_weights_and_the_cache_at_its_mean_length(maker):
    own = latency([5.0], [[1.0, 3.0]], READS, copy_gb_s=2000.0, cache_bytes=50)
    view = build(measured(small(maker), latency=own).judged)
    roof = view.plots.roof
    point = roof.points[0]
    assert (point.weights, point.cache) == (1e9, 1e6 * (128 + 3 / 2 - 1))
    assert point.rate.value == pytest.approx((1e9 + 128.5e6) / 2e-3 / 1e9)
    assert (roof.copy, roof.reason, roof.caches) == (2000.0, "", (50,))
    found = figure(view, "latency", 2)
    assert "2,000 GB/s read and written, median of 2 records from 2,000 to 2,000" in found.caption
    assert texts(found.grids[0].rows[0])[1:4] == ["1,000 MB", "128.5 MB", "2.000 ms"]


def test_without_a_copy_the_points_stand_and_the_reason_is_said(maker):
    own = latency([5.0], [[1.0, 3.0]], READS, copy_gb_s=None, copy_reason="no copy is timed on a cpu")
    view = build(measured(small(maker), latency=own).judged)
    found = figure(view, "latency", 2)
    assert view.plots.roof.copy is None
    assert "No copy bandwidth is known: no copy is timed on a cpu." in found.caption
    assert "copy bandwidth is not known: no copy is timed on a cpu" in texts(found.grids[0].rows[0])


def test_times_of_two_hosts_are_neither_joined_nor_pooled(maker):
    def on(*hosts):
        made = measured(maker(batches=(1,)), latency=latency([5.0], [[1.0, 3.0]], READS, copy_gb_s=2000.0))
        names = dict(zip(("128", "512"), hosts, strict=True))
        made = made.with_records(lambda r: replace(r, environment={"host": names.get(r.key[-3:])}))
        return build(made.judged)

    one, two = on("a", "a"), on("a", "b")
    assert [line.apart for line in one.itl + one.plots.ttft] == [""] * 4
    said = "they were measured on different hosts (a, b), whose times are never pooled."
    assert figure(two, "latency").caption.count(f"Points of int8_sym are not joined: {said}") == 1
    assert figure(one, "latency").svg != figure(two, "latency").svg
    assert (one.plots.roof.copy, two.plots.roof.copy) == (2000.0, None)
    assert (
        two.plots.roof.reason
        == "the records that timed a copy were measured on different hosts (a, b), whose times are never pooled"
    )


def test_no_roof_where_a_record_does_not_say_what_a_step_reads(maker):
    assert build(measured(small(maker), latency=latency([5.0], [[1.0]])).judged).plots.roof is None


def test_products_are_shown_where_they_were_timed(maker):
    made = small(maker, fixed={"weights": "fp8_block128"})
    made = made.with_tasks(lambda t: replace(t, runner="gemm") if t.runner == "parity" else t)
    made = made.with_records(lambda r: replace(r, runner="gemm") if r.runner == "parity" else r)
    row = {"m": 4, "path": "w8a16", "us": 2.0, "us_native": 4.0, "us_reference": 8.0}
    shapes = [{"n": 128 * i, "k": 256, "rows": [row], "timed_with": "warm"} for i in range(1, 9)]
    untimed = [{"n": 9, "k": 9, "rows": [{"m": 4, "path": "w8a16"}]}]
    view = build(replace(made, records=[replace(r, samples={"products": shapes + untimed}) if r.runner == "gemm" else r for r in made.records]).judged)  # fmt: skip
    own = [p for p in view.plots.products if p.name == "KV int8_sym"]
    assert [p.n for p in own] == [1024, 896, 768, 640, 512, 384]
    assert (own[0].rows, own[0].dropped) == (
        ((4, "w8a16", {"us": 2.0, "us_native": 4.0, "us_reference": 8.0}),),
        2,
    )
    held = weight_bytes(WEIGHT_FORMATS["fp8_block128"], 1024, 256, "bfloat16").total
    grid = numbers.products(own)
    assert texts(grid.rows[0])[1:6] == ["4", "w8a16", "2 µs", "4 µs", "8 µs"]
    assert grid.rows[0][-1].exact == repr(held / 2.0 / 1e3)


# The page


def full(maker):
    made = healthy(maker, 3).with_records(lambda r: replace(r, facts={**r.facts, "native16_bytes": 5_000}))
    stored = {"text_before": "The cat", "native_text": " sat", "continuation_text": " lay"}
    kinds = agreement(differ=(3,), continuation=stored)
    own = [question(0, 0, SECOND)]
    kinds |= {
        "mcq__native": ({"questions": [question(0, 0, FIRST)]}, {}),
        "mcq__int8_sym": ({"questions": own}, {}),
    }
    kinds |= {"perplexity__native": ({"chunks": NATIVE}, FACTS), "perplexity__int8_sym": quality()}
    kinds |= {"latency": latency(SIX, [[1.0, 2.0]] * 6, READS, copy_gb_s=900.0, cache_bytes=1)}
    return measured(made, **kinds)


def test_two_renders_are_equal_byte_for_byte_and_no_two_drawings_share_an_id(maker):
    page = render(build(full(maker).judged))
    assert page == render(build(full(maker).judged))
    view = build(full(maker).judged)
    ids = [e.get("id") for f in figures(view) for e in ET.fromstring(f.svg).iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    assert [f.section for f in figures(view)] == [
        "storage",
        "latency",
        "latency",
        "latency",
        "quality",
        "agreement",
        "health",
    ]
    assert list(drilldowns(view)) == ["quality", "mcq"]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_and_names_are_shown_and_never_obeyed(maker, text):
    made = full(maker)

    def change(record):
        samples = record.samples
        if record.runner == "agreement":
            samples = samples | {"native_text": text, "continuation_text": text, "text_before": text}
        elif record.runner == "mcq":
            samples = {"questions": [q | {"id": text, "subject": text} for q in samples["questions"]]}
        elif record.runner == "perplexity":
            samples = samples | {"chunks": [c | {"document": text} for c in samples["chunks"]]}
        return replace(record, samples=samples)

    view = build(made.with_records(change).judged)
    assert view.plots.problems == ()
    page = render(view)
    for wrong in ("<script>alert", "\x1b", "\u202e", "[31m</pre>"):
        assert wrong not in page
    assert page.count("</pre>") == render(build(made.judged)).count("</pre>")
    if text.isprintable():
        assert view.plots.questions[0].lines[0].id == view.plots.chunks[0].lines[0].document == text


def test_nothing_is_shown_where_nothing_was_measured(maker):
    made = small(maker)
    made = replace(
        made,
        rows=[],
        records=[
            replace(r, status="error", samples={}, facts={}, error={"message": "no"}) for r in made.records
        ],
    )
    view = build(made.judged)
    assert figures(view) == ()
    assert drilldowns(view) == {}
    assert "<svg" not in render(view)


def test_a_damaged_record_costs_its_plot_and_not_the_page(maker):
    made = full(maker).with_records(
        lambda r: replace(r, samples={"questions": [{"id": 1}]}) if r.runner == "mcq" else r
    )
    view = build(made.judged)
    assert view.plots.questions == ()
    assert view.plots.problems == (
        ("mcq", "Samples of a record cannot be read, so a plot is missing here (KeyError: 'skipped')."),
    )
    assert "so a plot is missing here (KeyError: &#39;skipped&#39;)." in render(view)


@pytest.mark.parametrize(
    ("low", "high", "want"),
    [
        (0.0009, 1.5, [0.001, 0.01, 0.1, 1.0]),
        (0.9, 12.0, [1.0, 2.0, 5.0, 10.0]),
        (216.8, 398.2, [220.0, 240.0, 260.0, 280.0, 300.0, 320.0, 340.0, 360.0, 380.0]),
        (7.1, 9.2, [7.5, 8.0, 8.5, 9.0]),
    ],
)  # fmt: skip
def test_a_log_axis_has_round_ticks_and_at_least_three(low, high, want):
    assert svg.log_ticks(low, high) == want


def test_no_two_of_36_series_look_alike():
    looks = {(svg.marker(i), svg.colour(i)) for i in range(36)}
    assert len(looks) == 36


def test_a_hundred_cells_with_every_sample_stay_under_two_megabytes(maker):
    """Five formats of 40 layers; 500 chunks, 2,048 steps that often differ, 500 questions that all change."""
    formats = ("native", "int8_sym", "int8_static", "fp8_e4m3", "fp8_e4m3_static")
    made = healthy(
        maker, 40, formats=formats, batches=(1, 8, 32, 64), contexts=(1024, 4096, 16384, 32768, 131072)
    )
    chunks = [text_of(3.0, [0.1, 0.2, 0.3], d) for d in range(500)]
    tokens = list(range(2048))
    facts = {"steps": 2048, "prompt_tokens": 4, "prompt_sha": "p", "aa_disagreements": []}
    ones = {"margins": [1.0] * 2048, "aa_margins": [1.0] * 2048}
    stored = dict.fromkeys(("text_before", "native_text", "continuation_text"), "word " * 300)

    def change(record):
        native, samples, more = (
            record.spec["kv_format"] == "native",
            record.samples,
            {"native16_bytes": 5_000},
        )
        if record.runner == "latency":
            samples, more = latency(SIX, [[1.0, 2.0]] * 6, READS, copy_gb_s=900.0, cache_bytes=1)
        elif record.runner == "perplexity":
            samples = {"chunks": chunks} | (
                {} if native else {"kld_tokens": [0.1, 0.2, 0.3] * 500, "top1_equal": 1000}
            )
            more = {"scored": 1500, "positions": [0, 2, 4]}
        elif record.runner == "agreement":
            own = [-1 if i % 3 and not native else t for i, t in enumerate(tokens)]
            samples, more = {"tokens": own} | ones | stored, facts
        elif record.runner == "mcq":
            scores = FIRST if native else SECOND
            samples, more = {"questions": [question(i, 0, scores, aa_scores=scores) for i in range(500)]}, {}
        return replace(record, samples=samples, facts={**record.facts, **more})

    made = made.with_records(change)
    view = build(replace(made.judged, rows=derive(made.run)))
    assert view.plots.problems == ()
    page = render(view)
    assert {f.section for f in figures(view)} == {"storage", "latency", "quality", "agreement", "health"}
    assert len(page.encode()) < 2_000_000


def test_times_that_are_no_numbers_cost_their_plot_and_no_verdict(passing, monkeypatch):
    """A NaN reaches the gate as a NaN; the page around it still stands."""
    lost = passing.with_rows(
        lambda row: (
            replace(row, value=math.nan) if row.metric in ("itl_ms", "ttft_ms", "decode_read_gb_s") else row
        )
    )
    page = render(build(lost.judged))
    assert "Latency" in page

    def broken(*_):
        raise ValueError("Axis limits cannot be NaN or Inf")

    monkeypatch.setattr("kvbench.report.figures.plots.times_svg", broken)
    assert "A plot is missing here: its numbers cannot be drawn (ValueError: Axis limits" in render(
        build(passing.judged)
    )

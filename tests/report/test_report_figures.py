"""Figures of times, bytes, health and speed limits from invented records: exact numbers, or no figure."""

import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from kvbench.formats.kv import WEIGHT_FORMATS, weight_bytes
from kvbench.render import svg
from kvbench.report.figures.costs import ByteBar, TimePoint, TimeSeries
from kvbench.report.figures.page import PART_NAMES, drilldowns, figures
from kvbench.report.figures.plots import bytes_svg, times_svg
from kvbench.report.html import render
from kvbench.report.view import build
from kvbench.stats.intervals import clustered_ratio
from tests.factories.runs import drawn
from tests.factories.runs.drawn import READS, SIX, figure, healthy, latency, measured, small, texts

SVG = "{http://www.w3.org/2000/svg}"
GAPS = [[1.0, 2.0]] * 6


def seen(maker, **samples):
    return build(measured(small(maker), **samples).judged)


def words(drawing):
    return {element.text for element in ET.fromstring(drawing).iter(f"{SVG}text")}


def test_times_have_intervals_over_their_requests(maker):
    point = seen(maker, latency=latency(SIX, GAPS)).ttft[0].points[0]
    assert (point.value, point.low, point.high, point.n, point.repeats) == (12.5, 10.0, 15.0, 6, tuple(SIX))
    few = seen(maker, latency=latency(SIX[:5], GAPS[:5])).ttft[0].points[0]
    assert (few.value, few.low, few.high) == (12.0, None, None)  # a median takes six requests
    view = seen(maker, latency=latency(SIX[:3], [[1.0, 2.0], [2.0, 3.0], [3.0, 5.0]]))
    point = view.itl[0].points[0]
    assert (point.value, point.repeats) == (16 / 6, (1.5, 2.5, 4.0))
    assert (point.low, point.high) == clustered_ratio([3.0, 5.0, 8.0], [2, 2, 2], range(3)).interval
    assert texts(figure(view, "latency").grids[0].rows[0])[-1] == "1.500; 2.500; 4.000"


def test_requests_are_drawn_unless_they_are_too_many_and_times_far_apart_take_a_log_axis(maker):
    few, many = (figure(seen(maker, latency=latency([9.0] * n, GAPS[:1] * n)), "latency") for n in (200, 201))
    assert few.svg.count("<use") - many.svg.count("<use") == 400
    assert many.grids[0].rows[0][-1] == "1.500; " * 12 + "... 201 in all"
    both = {"latency__native": latency([1.0], [[1.0]]), "latency__int8_sym": latency([9.0], [[7.0]])}
    view = seen(maker, **both)
    assert ["logarithmic" in figure(view, "latency", i).caption for i in (0, 1)] == [False, True]


def test_bars_have_all_parts_that_were_measured(maker):
    def stored(**facts):
        change = {"storage": facts}
        made = small(maker).with_records(lambda r: replace(r, facts=r.facts | change.get(r.runner, {})))
        return build(made.judged)

    view = stored(native16_bytes=5_000, workspace_bytes=7 * 2**20, held_bytes=11)
    bar, found = view.bytes[1], figure(view, "storage")
    assert (bar.scales, bar.page_table, bar.workspace, bar.held) == (46_080, 64, 7 * 2**20, 11)
    assert bar.native16 == 5_000
    assert {"workspace (MiB)", "stored for the cache (MiB)", "7"} <= words(found.svg)
    assert [name for _, _, name in found.legend] == ["payload", "scales", "page tables", "workspace"]
    assert found.grids[0].columns[1:] == (*PART_NAMES.values(), "16-bit native")
    none = figure(stored(workspace_bytes=None, held_bytes=None), "storage")
    assert none.grids[0].columns[1:] == ("payload", "scales", "page tables")
    assert "workspace (MiB)" not in words(none.svg)
    assert "16-bit" not in none.caption
    large = build(maker(batches=(1, 2, 4, 8), contexts=(128, 256, 512, 1024)).judged)
    largest = [f"{fmt} · batch 8 · context 1024" for fmt in ("native", "int8_sym")]
    assert ([bar.name for bar in large.bytes], large.bytes_of) == (largest, "the largest cells")


def test_health_is_by_layer_and_side_of_the_quantized_cells(maker):
    view = build(healthy(maker, 2).judged)
    (line,), found = view.health, figure(view, "health")
    assert (line.name, line.tokens, line.layers) == ("int8_sym", 64, (0, 1))
    assert texts(found.grids[0].rows[3])[:7] == ["1 V", "4", "0.02", "0", "0.02", "255 codes", "0.01"]
    shown = {"amax", "flushed to 0 (share)", "codes used", "scale, smallest to largest"}
    assert shown <= words(found.svg)
    assert "clipped (share)" not in words(found.svg)  # 0 in every layer
    assert figure(build(healthy(maker, 2, scale_min=0.05).judged), "health").svg  # one scale for all
    grid = figure(build(healthy(maker, 300).judged), "health").grids[0]
    assert (len(grid.rows), "of 300" in grid.summary) == (2 * 120, True)
    assert [row[0] for row in grid.rows[:3]] == ["299 K", "299 V", "298 K"]  # the largest errors


def test_a_step_reads_its_weights_and_the_cache_at_its_mean_length(maker):
    view = seen(maker, latency=latency([5.0], [[1.0, 3.0]], READS, copy_gb_s=2000.0, cache_bytes=50))
    roof = view.roof
    point = roof.points[0]
    assert (point.weights, point.cache) == (1e9, 1e6 * (128 + 3 / 2 - 1))
    assert point.rate.value == pytest.approx((1e9 + 128.5e6) / 2e-3 / 1e9)
    assert (roof.copy, roof.copies, roof.reason, roof.caches) == (2000.0, (2000.0, 2000.0), "", (50,))
    assert texts(figure(view, "latency", 2).grids[0].rows[0])[1:4] == ["1,000 MB", "128.5 MB", "2.000 ms"]
    assert seen(maker, latency=latency([5.0], [[1.0]])).roof is None  # without the bytes of a step
    why = "no copy is timed on a cpu"
    view = seen(maker, latency=latency([5.0], [[1.0, 3.0]], READS, copy_gb_s=None, copy_reason=why))
    found = figure(view, "latency", 2)  # its points are drawn all the same
    assert (view.roof.copy, view.roof.reason) == (None, why)
    assert why in found.caption
    assert why in texts(found.grids[0].rows[0])[-1]


def test_times_of_two_hosts_are_neither_joined_nor_pooled(maker):
    made = measured(maker(batches=(1,)), latency=latency([5.0], [[1.0, 3.0]], READS, copy_gb_s=2000.0))

    def on(second):
        hosts = {"128": "a", "512": second}
        return build(
            made.with_records(lambda r: replace(r, environment={"host": hosts.get(r.key[-3:])})).judged
        )

    one, two = on("a"), on("b")
    assert [line.apart for line in one.itl + one.ttft] == [""] * 4
    assert all("(a, b)" in line.apart for line in two.itl + two.ttft)
    assert figure(two, "latency").caption.count("(a, b)") == 2
    assert figure(one, "latency").svg != figure(two, "latency").svg
    assert (one.roof.copy, two.roof.copy) == (2000.0, None)
    assert "(a, b)" in two.roof.reason


def test_products_are_shown_where_they_were_timed(maker):
    made = small(maker, fixed={"weights": "fp8_block128"})
    times = {"us": 2.0, "us_native": 4.0, "us_reference": 8.0}
    row = {"m": 4, "path": "w8a16", **times}
    shapes = [{"n": 128 * i, "k": 256, "rows": [row], "timed_with": "warm"} for i in range(1, 9)]
    shapes.append({"n": 9, "k": 9, "rows": [{"m": 4, "path": "w8a16"}]})
    made = made.with_tasks(lambda t: replace(t, runner="gemm") if t.runner == "parity" else t)
    gemm = {"runner": "gemm", "samples": {"products": shapes}}
    view = build(made.with_records(lambda r: replace(r, **gemm) if r.runner == "parity" else r).judged)
    own = [p for p in view.products if p.name == "KV int8_sym"]
    assert [p.n for p in own] == [1024, 896, 768, 640, 512, 384]
    assert (own[0].rows, own[0].dropped) == (((4, "w8a16", times),), 2)
    rows = {row[0]: row for row in figure(view, "gemm").grids[0].rows}
    first = rows["KV int8_sym 1024 x 256"]
    assert texts(first)[1:6] == ["4", "w8a16", "2 µs", "4 µs", "8 µs"]
    size = weight_bytes(WEIGHT_FORMATS["fp8_block128"], 1024, 256, "bfloat16").total
    assert first[-1].exact == repr(size / 2.0 / 1e3)


def full(maker):
    made = healthy(maker, 3).with_records(lambda r: replace(r, facts={**r.facts, "native16_bytes": 5_000}))
    stored = {"text_before": "The cat", "native_text": " sat", "continuation_text": " lay"}
    kinds = drawn.agreement(differ=(3,), continuation=stored)
    for fmt, scores in (("native", drawn.FIRST), ("int8_sym", drawn.SECOND)):
        kinds[f"mcq__{fmt}"] = ({"questions": [drawn.question(0, 0, scores)]}, {})
    kinds["perplexity__native"] = ({"chunks": drawn.NATIVE}, drawn.FACTS)
    kinds["perplexity__int8_sym"] = drawn.quality()
    kinds["latency"] = latency(SIX, GAPS, READS, copy_gb_s=900.0, cache_bytes=1)
    return measured(made, **kinds)


def test_drawings_are_repeatable_titled_undated_and_share_no_id(maker):
    view = build(full(maker).judged)
    assert render(view) == render(build(full(maker).judged))
    roots = [ET.fromstring(f.svg) for f in figures(view)]
    ids = [e.get("id") for root in roots for e in root.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    for root in roots:
        assert (root.tag, root.get("role"), root.find(f"{SVG}title") is None) == (f"{SVG}svg", "img", False)
    for found in figures(view):  # undated, and coloured by the page
        assert not [wrong for wrong in ("metadata", "<?xml", "#0100", "#0200") if wrong in found.svg]
        assert not [name for name in ("var(--s0)", "var(--ink)") if name not in found.svg]
    sections = ["storage", *["latency"] * 3, "quality", "agreement", "health"]
    assert [f.section for f in figures(view)] == sections
    assert list(drilldowns(view)) == ["quality", "mcq"]


@pytest.mark.parametrize("text", ["<script>alert(1)</script>量化 $\\frac{1}{$", "a\n\x1b[31m</pre>\u202e"])
def test_hostile_texts_and_names_are_escaped(maker, text):
    def change(record):
        samples = record.samples
        if record.runner == "agreement":
            samples = samples | dict.fromkeys(("native_text", "continuation_text", "text_before"), text)
        elif record.runner == "mcq":
            samples = {"questions": [q | {"id": text, "subject": text} for q in samples["questions"]]}
        elif record.runner == "perplexity":
            samples = samples | {"chunks": [c | {"document": text} for c in samples["chunks"]]}
        return replace(record, samples=samples)

    view = build(full(maker).with_records(change).judged)
    assert view.problems == ()
    page = render(view)
    assert not [wrong for wrong in ("<script>alert", "\x1b", "\u202e", "[31m</pre>") if wrong in page]
    assert page.count("</pre>") == page.count("<pre")
    if text.isprintable():
        assert view.questions[0].lines[0].id == view.chunks[0].lines[0].document == text


def test_nothing_is_shown_where_nothing_was_measured(maker):
    made = small(maker)
    failed = {"status": "error", "samples": {}, "facts": {}, "error": {"message": "no"}}
    view = build(replace(made, rows=[], records=[replace(r, **failed) for r in made.records]).judged)
    assert (figures(view), drilldowns(view), "<svg" in render(view)) == ((), {}, False)


def test_what_cannot_be_read_or_drawn_costs_its_plot_and_not_the_page(maker, passing, monkeypatch):
    damaged = {"questions": [{"id": 1}]}
    made = full(maker).with_records(lambda r: replace(r, samples=damaged) if r.runner == "mcq" else r)
    view = build(made.judged)
    assert view.questions == ()
    ((section, sentence),) = view.problems
    assert (section, "KeyError: 'skipped'" in sentence) == ("mcq", True)
    assert "KeyError: &#39;skipped&#39;" in render(view)
    times = ("itl_ms", "ttft_ms", "decode_read_gb_s")
    lost = passing.with_rows(lambda row: replace(row, value=math.nan) if row.metric in times else row)
    assert "Latency" in render(build(lost.judged))

    def broken(*_):
        raise ValueError("Axis limits cannot be NaN")

    monkeypatch.setattr("kvbench.report.figures.plots.times_svg", broken)
    view = build(passing.judged)
    assert figure(view, "latency").svg == ""
    assert "ValueError: Axis limits cannot be NaN" in render(view)


def test_a_log_axis_has_round_ticks_and_at_least_three():
    assert svg.log_ticks(0.0009, 1.5) == [0.001, 0.01, 0.1, 1.0]
    assert svg.log_ticks(0.9, 12.0) == [1.0, 2.0, 5.0, 10.0]
    assert svg.log_ticks(216.8, 398.2) == [220.0 + 20 * i for i in range(9)]
    assert svg.log_ticks(7.1, 9.2) == [7.5, 8.0, 8.5, 9.0]


def test_any_name_and_any_number_of_series_can_be_drawn():
    names = ["<b>&", "$\\frac{1}{$", "_x", "量化", "a\nb\x00", "n" * 500, ""]
    assert set(names[:4]) <= words(bytes_svg([ByteBar(name, 10, 1) for name in names], "t"))
    points = tuple(TimePoint(b, 128, 40.0 + b, 39.0, 45.0, (39.5, 41.0)) for b in (1, 2, 4, 8))
    many = [TimeSeries(f"f{i}", points) for i in range(svg.COLOURS + 2)]
    assert {f"batch {b}" for b in (1, 2, 4, 8)} <= words(times_svg(many, "itl", "ITL mean (ms)", "t"))
    one = [TimeSeries("native", (TimePoint(1, 128, 40.0, None, None, ()),))]
    assert words(times_svg(one, "itl", "ITL mean (ms)", "t"))
    assert len({(svg.marker(i), svg.colour(i)) for i in range(36)}) == 36  # no two look alike

"""Figures of times, bytes, health and speed limits from invented records: exact numbers, or no figure."""

import math
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from kvbench.formats.kv import WEIGHT_FORMATS, weight_bytes
from kvbench.matrix.cells import Cell, Task
from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import UNITS
from kvbench.records.run import Run
from kvbench.render import svg
from kvbench.report.console import show
from kvbench.report.figures import drilldown
from kvbench.report.figures.costs import ByteBar, TimePoint, TimeSeries
from kvbench.report.figures.page import PART_NAMES, drilldowns, figures
from kvbench.report.figures.plots import agreement_svg, bytes_svg, scale_svg, times_svg
from kvbench.report.figures.quality import ScaleEffect, ScaleLine, Sweep, _curve, scale_sweep
from kvbench.report.html import render
from kvbench.report.model import JudgedRun
from kvbench.report.view import build
from kvbench.stats.intervals import clustered_mean, clustered_ratio
from tests.factories.runs import drawn
from tests.factories.runs.drawn import agreement, figure, healthy, latency, measured, small, texts
from tests.factories.runs.reported import make

SVG = "{http://www.w3.org/2000/svg}"
GAPS = [[1.0, 2.0]] * 6


def seen(maker, **samples):
    return build(measured(small(maker), **samples).judged)


def words(drawing):
    return {element.text for element in ET.fromstring(drawing).iter(f"{SVG}text")}


def test_times_have_intervals_over_their_requests_which_are_drawn(maker):
    point = seen(maker, latency=latency(drawn.SIX, GAPS)).ttft[0].points[0]
    assert (point.value, point.low, point.high, point.n) == (12.5, 10.0, 15.0, 6)
    assert point.repeats == tuple(drawn.SIX)
    few = seen(maker, latency=latency(drawn.SIX[:5], GAPS[:5])).ttft[0].points[0]
    assert (few.value, few.low, few.high) == (12.0, None, None)  # a median takes six requests
    view = seen(maker, latency=latency(drawn.SIX[:3], [[1.0, 2.0], [2.0, 3.0], [3.0, 5.0]]))
    point = view.itl[0].points[0]
    assert (point.value, point.repeats) == (16 / 6, (1.5, 2.5, 4.0))
    assert (point.low, point.high) == clustered_ratio([3.0, 5.0, 8.0], [2, 2, 2], range(3)).interval
    assert texts(figure(view, "latency").grids[0].rows[0])[-1] == "1.500; 2.500; 4.000"
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


def test_a_step_reads_its_weights_and_cache_and_two_hosts_are_not_pooled(maker):
    view = seen(maker, latency=latency([5.0], [[1.0, 3.0]], drawn.READS, copy_gb_s=2000.0, cache_bytes=50))
    roof = view.roof
    point = roof.points[0]
    assert (point.weights, point.cache) == (1e9, 1e6 * (128 + 3 / 2 - 1))
    assert point.rate.value == pytest.approx((1e9 + 128.5e6) / 2e-3 / 1e9)
    assert (roof.copy, roof.copies, roof.reason, roof.caches) == (2000.0, (2000.0, 2000.0), "", (50,))
    assert texts(figure(view, "latency", 2).grids[0].rows[0])[1:4] == ["1,000 MB", "128.5 MB", "2.000 ms"]
    assert seen(maker, latency=latency([5.0], [[1.0]])).roof is None  # without the bytes of a step
    why = "no copy is timed on a cpu"
    view = seen(maker, latency=latency([5.0], [[1.0, 3.0]], drawn.READS, copy_gb_s=None, copy_reason=why))
    found = figure(view, "latency", 2)  # its points are drawn all the same
    assert (view.roof.copy, view.roof.reason) == (None, why)
    assert why in found.caption
    assert why in texts(found.grids[0].rows[0])[-1]
    made = measured(maker(batches=(1,)), latency=latency([5.0], [[1.0, 3.0]], drawn.READS, copy_gb_s=2000.0))

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
    kinds["latency"] = latency(drawn.SIX, GAPS, drawn.READS, copy_gb_s=900.0, cache_bytes=1)
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


def test_what_cannot_be_shown_or_drawn_costs_its_plot_and_not_the_page(maker, passing, monkeypatch):
    made = small(maker)
    failed = {"status": "error", "samples": {}, "facts": {}, "error": {"message": "no"}}
    view = build(replace(made, rows=[], records=[replace(r, **failed) for r in made.records]).judged)
    assert (figures(view), drilldowns(view), "<svg" in render(view)) == ((), {}, False)
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


def test_axes_have_round_ticks_and_any_name_and_number_of_series_can_be_drawn():
    assert svg.log_ticks(0.0009, 1.5) == [0.001, 0.01, 0.1, 1.0]
    assert svg.log_ticks(0.9, 12.0) == [1.0, 2.0, 5.0, 10.0]
    assert svg.log_ticks(216.8, 398.2) == [220.0 + 20 * i for i in range(9)]
    assert svg.log_ticks(7.1, 9.2) == [7.5, 8.0, 8.5, 9.0]
    names = ["<b>&", "$\\frac{1}{$", "_x", "量化", "a\nb\x00", "n" * 500, ""]
    assert set(names[:4]) <= words(bytes_svg([ByteBar(name, 10, 1) for name in names], "t"))
    points = tuple(TimePoint(b, 128, 40.0 + b, 39.0, 45.0, (39.5, 41.0)) for b in (1, 2, 4, 8))
    many = [TimeSeries(f"f{i}", points) for i in range(svg.COLOURS + 2)]
    assert {f"batch {b}" for b in (1, 2, 4, 8)} <= words(times_svg(many, "itl", "ITL mean (ms)", "t"))
    one = [TimeSeries("native", (TimePoint(1, 128, 40.0, None, None, ()),))]
    assert words(times_svg(one, "itl", "ITL mean (ms)", "t"))
    assert len({(svg.marker(i), svg.colour(i)) for i in range(36)}) == 36  # no two look alike


# Figures and drill-downs of quality from invented records: exact numbers, worst first, older records too.


def test_a_percentile_of_0_is_only_in_the_table_and_chunks_are_sorted_worst_first(maker):
    own = [drawn.text_of(3.0, [0.0] * 3, d) for d in range(3)]
    zero = figure(build(drawn.perplexed(maker, own=own, tokens=[[0.0] * 3] * 3).judged), "quality")
    usual = figure(build(drawn.perplexed(maker).judged), "quality")
    assert ["percentile of 0" in found.caption for found in (zero, usual)] == [True, False]
    assert texts(zero.grids[0].rows[0])[1].startswith("0 nat")
    chunks = build(drawn.perplexed(maker).judged).chunks[0]
    assert [(c.index, c.document, c.tokens) for c in chunks.lines] == [(1, "1", 3), (0, "0", 3), (2, "2", 3)]
    assert [round(c.kld, 12) for c in chunks.lines] == [0.3, 0.2, round(0.4 / 3, 12)]
    assert [round(c.delta, 12) for c in chunks.lines] == [round(1 / 3, 12), 0, round(2 / 3, 12)]
    assert (chunks.total, chunks.documents, chunks.subject) == (3, 3, "int8_sym · wikitext2")
    first, second = chunks.positions
    assert (first.low, first.high, first.tokens, second.low, second.high, second.tokens) == (0, 1, 6, 2, 3, 3)
    assert first.kld == clustered_mean([0.1 + 0.2, 0.0, 0.4], [2, 2, 2], range(3))
    assert (first.most, second.most) == (0.4, 0.9)
    assert second.kld.value == pytest.approx(0.4)
    assert first.delta == clustered_ratio([0.0, 0.5, 1.0], [2, 2, 2], range(3))
    sampled = build(drawn.perplexed(maker, kept=[0.1, 0.9]).judged).chunks[0]
    assert [p.kld for p in sampled.positions] == [None, None]
    assert drilldown.position_grid(sampled).columns == ("Position", "NLL delta")


def test_old_records_list_their_chunks_and_those_of_other_data_are_not_compared(maker):
    bare = [{"tokens": 3, "nll": 3.0 + d, "document": d} for d in range(3)]
    both = {"native": [c | {"nll": 3.0} for c in bare], "int8_sym": bare}
    kinds = {f"perplexity__{fmt}": ({"chunks": own}, {"scored": 9}) for fmt, own in both.items()}
    view = build(measured(small(maker), **kinds).judged)
    assert [c.index for c in view.chunks[0].lines] == [2, 1, 0]
    assert view.chunks[0].positions == view.kld == ()
    chunks = [c | {"document": 7} for c in drawn.NATIVE]
    data = drawn.FACTS | {"data_sha": "z"}
    for native in (({"chunks": drawn.NATIVE}, data), ({"chunks": chunks}, drawn.FACTS)):
        made = measured(small(maker), perplexity__native=native, perplexity__int8_sym=drawn.quality())
        assert build(made.judged).chunks == ()


def lines_of(maker, **kinds):
    return build(measured(small(maker), **agreement(**kinds)).judged).agreement


def test_the_curve_is_the_share_so_far(maker):
    own, again = lines_of(maker, differ=(3, 100), flips=(50,))
    curve = dict(own.points)
    shares = [1, 1, 3 / 4, 4 / 5, 99 / 100, 99 / 101, 126 / 128]
    assert [curve[i] for i in (0, 2, 3, 4, 99, 100, 127)] == shares
    assert (own.first, own.at_first, own.steps, own.again) == (3, 0.75, 128, False)
    assert (again.again, again.first, dict(again.points)[127]) == (True, None, 127 / 128)
    assert again.sentence.startswith("1 of 128 steps differ")
    old = lines_of(maker, differ=(3,), facts={"aa_disagreements": None})
    assert [line.again for line in old] == [False]  # a baseline that was not repeated
    points = _curve(range(0, 2048, 2), 2048)
    assert len(points) < 900
    assert (points[0], points[-1], _curve([], 0)) == ((0, 0.0), (2047, 0.5), ())
    assert all(share == 1 - math.ceil((step + 1) / 2) / (step + 1) for step, share in points)


def test_divergences_are_judged_and_their_texts_shown(maker):
    margins = [1.0] * drawn.STEPS
    margins[3] = 0.005
    real, _ = lines_of(maker, differ=(3, 100))
    tie, _ = lines_of(maker, differ=(3, 100), margins=margins)
    alone, _ = lines_of(maker, differ=(3,), margins=margins)
    none, _ = lines_of(maker)
    made = agreement(differ=(3,))
    made["agreement__native"][0]["aa_margins"] = [5.0] * drawn.STEPS
    unknown = build(measured(small(maker), **made).judged).agreement[0]
    lines = (real, tie, alone, unknown, none)
    assert [line.real for line in lines] == [True, False, False, None, None]
    assert [line.margin for line in lines] == [1.0, 0.005, 0.005, 1.0, None]
    assert [line.first for line in lines] == [3, 3, 3, 3, None]
    assert [line.passage is None for line in lines] == [False] * 4 + [True]
    assert "top-2 margin is 1 logit" in real.sentence
    assert tie.sentence.endswith("the first real divergence is at step 100")
    assert alone.sentence.endswith("no real divergence follows")
    assert "step 0 moved by 4 logit" in unknown.sentence
    assert none.sentence.startswith("agrees on 128 of 128 steps (")
    opened = [agreement_svg(found, "t").count("fill-opacity: 0") for found in ([real], [tie])]
    assert opened == [0, 1]  # the marker of a near-tie is open
    stored = {"text_before": "The cat", "native_text": " sat\non", "continuation_text": " lay"}
    page = render(build(measured(small(maker), **agreement(differ=(3,), continuation=stored)).judged))
    assert [text for text in stored.values() if f'<pre tabindex="0">{text}</pre>' not in page] == []
    bare = lines_of(maker, differ=(3,))[0].passage
    assert (bare.before, bare.native, bare.candidate) == ("text not stored",) * 3
    long = lines_of(maker, differ=(3,), continuation={"native_text": "n" * 1001})[0].passage
    assert long.native == "n" * 1000 + " … (1,001 characters in all)"


def asked(maker, natives, owns, noise=0.01):
    natives = [q | {"aa_scores": [s + noise for s in q["scores"]]} for q in natives]
    kinds = {f"mcq__{fmt}": ({"questions": q}, {}) for fmt, q in (("native", natives), ("int8_sym", owns))}
    return build(measured(small(maker), **kinds).judged).questions


def test_changed_picks_come_first_and_only_the_worst_that_both_scored_are_listed(maker):
    answers = (0, 2, 1, 0, 0)
    before = [*[drawn.FIRST] * 4, drawn.CLOSE]
    after = [[-1.5, -2.0, -3.0], *[drawn.SECOND] * 3, [-1.01, -1.0, -3.0]]
    same = [drawn.question(i, 0, drawn.FIRST) for i in range(5, 9)]
    natives, owns = (
        [drawn.question(i, gold, scores[i]) for i, gold in enumerate(answers)] + same
        for scores in (before, after)
    )
    (found,) = asked(maker, natives, owns)
    assert [q.id for q in found.lines] == ["q3", "q4", "q2", "q1", "q0", "q5", "q6", "q7", "q8"]
    changes = ["right to wrong", "right to wrong", "wrong to right", "wrong to wrong", ""]
    assert [q.change for q in found.lines[:5]] == changes
    assert [q.real for q in found.lines[:5]] == [True, False, True, True, None]
    assert (found.flips, found.total, found.noise) == (4, 9, pytest.approx(0.01))
    line = found.lines[0]
    assert (line.gold, line.native, line.own) == ("A", "A", "B")
    assert (line.native_margin, line.margin, line.moved) == (1.0, 1.0, 1.0)
    assert drilldown.question_grid(found).rows[1][5] == "right to wrong (near-tie)"
    many = [drawn.question(i, 0, drawn.FIRST) for i in range(60)]
    (found,) = asked(maker, many, [drawn.question(i, 0, [-1.0 - i / 100, -2.0, -3.0]) for i in range(60)])
    assert [q.id for q in found.lines] == [f"q{i}" for i in range(59, 34, -1)]
    assert (found.flips, found.total) == (0, 60)
    (found,) = asked(maker, many[:2], [many[0], drawn.question(1, 0, [], skipped="no token")])
    assert (found.total, [q.id for q in found.lines]) == (1, ["q0"])
    # A choice without a number is first and has no pick.
    nan = [drawn.question(0, 0, drawn.SECOND), drawn.question(1, 0, [math.nan, -1.0, -1.0])]
    (found,) = asked(maker, many[:2], nan)
    changes = [("q1", "none", "no number"), ("q0", "B", "right to wrong")]
    assert [(q.id, q.own, q.change) for q in found.lines] == changes
    assert found.noise is None
    assert found.why in drilldown.question_grid(found).note


# The sweep of static scales: its sentence and its plot, which exist only if there are two scales.


SCALE = {"k": [0.1], "v": [0.2]}
FILE = {"file": "s.json", "sha": "abcdef0123", "method": "amax", "per": "layer", "tokens": 9}
CALIBRATED = {**SCALE, "calibrated": {**FILE, "data": "pydoc", "text_sha": "t", "dtype": "float32"}}
# (format, scale) -> perplexity delta in %, useful tokens of 256, share of collapsed texts
FOUND = {
    ("native", None): (None, 190, None),
    ("int8_sym", None): (-0.01, 256, 0.0),
    ("int8_static", 1.0): (3041.2, 5, 1.0),
    ("int8_static", 0.05): (12.34, 180, 0.25),
    ("int8_static", 0.1): (1.5, 256, 0.0),
    ("int8_static", "file"): (0.4, 256, 0.0),
}  # fmt: skip


METRICS = ("ppl_delta_pct", "gen_useful_tokens", "gen_collapsed")


def swept(found=FOUND):
    """A run with one cell a scale, as `kvbench run` leaves it, and the rows that the sweep reads."""
    made = make(formats=("native", "int8_sym"), batches=(1,), contexts=(128,))
    native = made.manifest.cells[0]
    cells, rows = [], []
    for i, ((fmt, scale), (ppl, useful, collapsed)) in enumerate(found.items()):
        spec = native.spec | {"kv_format": fmt, "scale": CALIBRATED if scale == "file" else scale}
        cells.append(Cell(f"c{i}", f"c{i}", spec, ("kv_format", "scale"), "c0"))
        values = zip(("%", "tokens", "share"), METRICS, (ppl, useful, collapsed), (500, 256, 4), strict=True)
        rows += [Row(f"c{i}", m, "", v, UNITS[unit], n) for unit, m, v, n in values if v is not None]
    task = Task("g", "generate", "", {}, {}, ("c0",), None)
    run = Run(replace(made.manifest, cells=tuple(cells), tasks=(task,)))
    return JudgedRun(run, rows, made.verdict)


def test_a_sweep_has_every_line_and_scale_and_takes_two_scales(capsys, passing):
    found = scale_sweep(swept())
    parts = [part.split(" (")[0] for part in found.sentence.split("; ")]
    assert parts == [
        "int8_static scale 1 collapses at token 5",
        "0.1 stays usable for all 256 tokens",
        "0.05 stays usable up to token 180",
        "int8_sym stays usable for all 256 tokens",
        "int8_static calibrated-amax-abcdef stays usable for all 256 tokens",
        "native itself stays usable up to token 190.",
    ]
    (line,) = found.lines
    assert (line.name, [scale for scale, _ in line.points]) == ("int8_static", [0.05, 0.1, 1.0])
    references = ["int8_sym", "int8_static calibrated-amax-abcdef", "native"]
    assert [line.name for line in found.references] == references
    view = build(swept())
    page = render(view)
    assert page.count("<svg") == 1
    show(view, sys.stdout)
    for text in (page, capsys.readouterr().out):
        assert "int8_static scale 1 collapses at token 5" in text
    scales = {group.line.scales for group in view.precision}
    assert scales == {"none", "dynamic", "static", "calibrated"}
    for effect, word in (
        ((None, 20, 256, 0.5), "usable up to token 20"),
        ((None, 20, 256, 0.75), "collapses at token 20"),
        ((310.0, 256, 256, 0.0), "ruins"),
        ((100.0, 256, 256, 0.0), "usable for all 256 tokens (perplexity +100%)"),
        ((310.0, 5, 256, 1.0), "collapses at token 5 (perplexity +310%)"),
        ((2.0, None, None, None), "gives perplexity +2.00%"),
    ):
        assert word in ScaleEffect(*effect).sentence
    for other in (("int8_sym", None), ("int8_static", 1.0)):
        args = swept({key: FOUND[key] for key in (("native", None), other)})
        assert scale_sweep(args) is None
        assert "Static scales" not in render(build(args))
    assert build(passing.judged).sweep is None


def test_the_plot_is_whole_and_one_of_perplexity_alone_has_one_panel():
    drawing = scale_svg(scale_sweep(swept()), "Scales < all")
    names = {"0.05", "0.1", "1", "scale", "perplexity delta (%)", "useful tokens", "10", "1,000"}
    assert names <= words(drawing)
    assert not [text for text in words(drawing) if "$" in text]
    assert not [i for i in range(4) if f"var(--s{i})" not in drawing]
    found = scale_sweep(swept({key: (ppl, None, None) for key, (ppl, _, _) in FOUND.items()}))
    assert found.sentence.startswith("int8_static scale 1 gives perplexity +3,041%; 0.1 gives")
    assert {"perplexity delta (%)", "useful tokens"} & words(scale_svg(found, "t")) == {
        "perplexity delta (%)"
    }
    opened = []  # an open mark is right-censored: the same numbers at the end of the text and before it
    for steps in (256, 300):
        points = ((0.1, ScaleEffect(None, 256, steps, 0.0)), (1.0, ScaleEffect(None, 5, steps, 1.0)))
        drawing = scale_svg(Sweep((ScaleLine("x", points),), (), ""), "t")
        opened.append(drawing.count("fill-opacity: 0"))
    assert opened == [1, 0]

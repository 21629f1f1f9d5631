"""The plots: equal bytes for equal numbers, colours of the page, safe with any name."""

import xml.etree.ElementTree as ET

import pytest

from kvbench.render.svg import COLOURS
from kvbench.report.figures.costs import ByteBar, TimePoint, TimeSeries
from kvbench.report.figures.plots import bytes_svg, times_svg
from kvbench.report.view import build

SVG = "{http://www.w3.org/2000/svg}"
BARS = [ByteBar("native", 5_898_240, 0), ByteBar("int8_sym", 1_474_560, 46_080)]


def itl_svg(lines, title="t"):
    return times_svg(lines, "itl", "ITL mean (ms)", title)


def series(*names, batches=(1, 4), contexts=(128, 512)):
    repeats = (39.5, 41.0)
    points = tuple(TimePoint(b, c, 40.0 + b, 39.0, 45.0, repeats) for b in batches for c in contexts)
    return [TimeSeries(name, points) for name in names]


@pytest.mark.parametrize(
    "draw",
    [lambda t: itl_svg(series("native", "b"), t), lambda t: bytes_svg(BARS, t)],
    ids=["times", "bytes"],
)
def test_a_drawing_is_repeatable_titled_undated_and_coloured_by_the_page(draw):
    svg = draw("ITL < all")
    assert svg == draw("ITL < all")
    root = ET.fromstring(svg)
    assert (root.tag, root.get("role"), root.find(f"{SVG}title").text) == (f"{SVG}svg", "img", "ITL < all")
    assert not [wrong for wrong in ("metadata", "<?xml", "#0100", "#0200") if wrong in svg]
    assert not [name for name in ("var(--s0)", "var(--s1)", "var(--ink)") if name not in svg]


def test_text_stays_text():
    texts = [e.text for e in ET.fromstring(bytes_svg(BARS, "t")).iter(f"{SVG}text")]
    assert {"native", "int8_sym", "5.625", "1.45"} <= set(texts)


def test_any_name_can_label_a_bar():
    names = ["<b>&", "$\\frac{1}{$", "_x", "量化", "a\nb\x00", "n" * 500, ""]
    root = ET.fromstring(bytes_svg([ByteBar(name, 10, 1) for name in names], "t"))
    texts = [e.text for e in root.iter(f"{SVG}text")]
    assert set(names[:4]) <= set(texts)


def test_more_series_than_colours_and_more_batches_than_columns():
    names = [f"f{i}" for i in range(COLOURS + 2)]
    root = ET.fromstring(itl_svg(series(*names, batches=(1, 2, 4, 8))))
    assert {f"batch {b}" for b in (1, 2, 4, 8)} <= {e.text for e in root.iter(f"{SVG}text")}


def test_one_point_without_an_interval_or_repeats():
    assert ET.fromstring(itl_svg([TimeSeries("native", (TimePoint(1, 128, 40.0, None, None, ()),))]))


def test_series_are_the_cells_that_differ_only_in_batch_and_context(passing):
    view = build(passing.judged)
    assert [(line.name, len(line.points)) for line in view.itl] == [("native", 4), ("int8_sym", 4)]
    point = view.itl[0].points[0]
    assert (point.batch, point.context, len(point.repeats)) == (1, 128, 2)
    assert point.low < point.value < point.high
    bar = view.bytes[1]
    assert (bar.name, bar.payload, bar.scales) == ("int8_sym · batch 1 · context 128", 1_474_560, 46_080)


def test_a_large_matrix_draws_the_bars_of_its_largest_cells(maker):
    view = build(maker(batches=(1, 2, 4, 8), contexts=(128, 256, 512, 1024)).judged)
    assert [bar.name for bar in view.bytes] == [
        f"{f} · batch 8 · context 1024" for f in ("native", "int8_sym")
    ]
    assert view.bytes_of == "the largest cells"

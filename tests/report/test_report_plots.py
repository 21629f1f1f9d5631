"""The plots: the same bytes for the same numbers, themed by the page, safe with any name."""

import xml.etree.ElementTree as ET

import pytest

from kvbench.render.svg import COLOURS
from kvbench.report.figures.plots import bytes_svg, times_svg
from kvbench.report.figures.series import ByteBar, TimePoint, TimeSeries
from kvbench.report.view import build


def itl_svg(lines, title):
    return times_svg(lines, "itl", "ITL mean (ms)", title)


SVG = "{http://www.w3.org/2000/svg}"


def series(*names, batches=(1, 4), contexts=(128, 512)):
    return [
        TimeSeries(
            name,
            tuple(TimePoint(b, c, 40.0 + b, 39.0, 45.0, (39.5, 41.0)) for b in batches for c in contexts),
        )
        for name in names
    ]


@pytest.fixture(scope="module")
def bars():
    return [ByteBar("native", 5_898_240, 0), ByteBar("int8_sym", 1_474_560, 46_080)]


def test_two_builds_are_equal_byte_for_byte(bars):
    assert itl_svg(series("a", "b"), "t") == itl_svg(series("a", "b"), "t")
    assert bytes_svg(bars, "t") == bytes_svg(bars, "t")


def test_the_svg_is_whole_has_a_title_and_no_date(bars):
    for svg in (itl_svg(series("native"), "ITL < all"), bytes_svg(bars, "ITL < all")):
        root = ET.fromstring(svg)
        assert root.tag == f"{SVG}svg"
        assert root.get("role") == "img"
        assert root.find(f"{SVG}title").text == "ITL < all"
        assert "metadata" not in svg
        assert "<?xml" not in svg


def test_colours_come_from_the_page_so_that_dark_and_light_share_a_drawing(bars):
    svg = bytes_svg(bars, "t")
    assert "var(--s0)" in svg
    assert "var(--s1)" in svg
    assert "var(--ink)" in svg
    assert "#0100" not in svg
    assert "#0200" not in svg


def test_text_stays_text(bars):
    texts = [e.text for e in ET.fromstring(bytes_svg(bars, "t")).iter(f"{SVG}text")]
    assert {"native", "int8_sym", "5.625", "1.45"} <= set(texts)


@pytest.mark.parametrize("name", ["<b>&", "$\\frac{1}{$", "_x", "量化", "a\nb\x00", "n" * 500, ""])
def test_any_name_can_stand_at_a_bar(name):
    ET.fromstring(bytes_svg([ByteBar(name, 10, 1)], "t"))


def test_the_two_plots_share_no_ids(bars):
    ids = [
        {e.get("id") for e in ET.fromstring(svg).iter() if e.get("id")}
        for svg in (itl_svg(series("a"), "t"), bytes_svg(bars, "t"))
    ]
    assert not ids[0] & ids[1]


def test_more_series_than_colours_and_more_batches_than_columns(bars):
    many = series(*(f"f{i}" for i in range(COLOURS + 2)), batches=(1, 2, 4, 8))
    ET.fromstring(itl_svg(many, "t"))


def test_one_point_without_an_interval_or_repeats():
    ET.fromstring(itl_svg([TimeSeries("native", (TimePoint(1, 128, 40.0, None, None, ()),))], "t"))


def test_series_are_the_cells_that_differ_only_in_batch_and_context(passing):
    view = build(passing.judged)
    assert [(line.name, len(line.points)) for line in view.itl] == [("native", 4), ("int8_sym", 4)]
    point = view.itl[0].points[0]
    assert (point.batch, point.context, len(point.repeats)) == (1, 128, 2)
    assert point.low < point.value < point.high


def test_a_large_matrix_draws_the_bars_of_its_largest_cells(maker):
    view = build(maker(batches=(1, 2, 4, 8), contexts=(128, 256, 512, 1024)).judged)
    assert [bar.name for bar in view.bytes] == [
        "native · batch 8 · context 1024",
        "int8_sym · batch 8 · context 1024",
    ]
    assert view.bytes_of == "the largest cells"


def test_bars_hold_payload_and_scales_apart(passing):
    bar = build(passing.judged).bytes[1]
    assert (bar.name, bar.payload, bar.scales) == ("int8_sym · batch 1 · context 128", 1_474_560, 46_080)

"""The sweep of static scales: one sentence from the data, a plot that is the same for the same numbers, and only where there is one."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from kvbench.matrix.cells import Cell, Task
from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import UNITS
from kvbench.records.run import Run
from kvbench.render.labels import Labels
from kvbench.report.console import show
from kvbench.report.figures.plots import scale_svg
from kvbench.report.figures.sweep import Held, ScaleLine, Sweep, scale_sweep
from kvbench.report.html import render
from kvbench.report.model import JudgedRun
from kvbench.report.view import build
from tests.factories.runs.reported import make

SVG = "{http://www.w3.org/2000/svg}"
FILE = {"k": [0.1], "v": [0.2], "calibrated": {"file": "s.json", "sha": "abcdef0123", "method": "amax"}}
CALIBRATED = {
    **FILE,
    "calibrated": {
        **FILE["calibrated"],
        "per": "layer",
        "tokens": 9,
        "data": "pydoc",
        "text_sha": "t",
        "dtype": "float32",
    },
}
# (format, scale) -> perplexity delta in %, useful tokens of 256, share of collapsed texts
FOUND = {
    ("native", None): (None, 190, None),
    ("int8_sym", None): (-0.01, 256, 0.0),
    ("int8_static", 1.0): (3041.2, 5, 1.0),
    ("int8_static", 0.05): (12.34, 180, 0.25),
    ("int8_static", 0.1): (1.5, 256, 0.0),
    ("int8_static", "file"): (0.4, 256, 0.0),
}  # fmt: skip


def swept(found=FOUND):
    """A run with one cell a scale, as `kvbench run` leaves it, and the rows that the sweep reads."""
    made = make(formats=("native", "int8_sym"), batches=(1,), contexts=(128,))
    native = made.manifest.cells[0]
    cells, rows = [], []
    for i, ((fmt, scale), (ppl, useful, collapsed)) in enumerate(found.items()):
        spec = native.spec | {"kv_format": fmt, "scale": CALIBRATED if scale == "file" else scale}
        cells.append(Cell(f"c{i}", f"c{i}", spec, ("kv_format", "scale"), "c0"))
        values = {
            "ppl_delta_pct": (ppl, "%", 500),
            "gen_useful_tokens": (useful, "tokens", 256),
            "gen_collapsed": (collapsed, "share", 4),
        }
        rows += [
            Row(f"c{i}", m, "", v, UNITS[unit], n) for m, (v, unit, n) in values.items() if v is not None
        ]
    task = Task("g", "generate", "", {}, {}, ("c0",), None)
    run = Run(replace(made.manifest, cells=tuple(cells), tasks=(task,)))
    return JudgedRun(run, rows, made.verdict)


def sweep(judged):
    return scale_sweep(judged, Labels(judged.run))


def test_the_sentence_is_made_of_the_data():
    assert sweep(swept()).sentence == (
        "int8_static scale 1 collapses at token 5 (perplexity +3,041%); 0.1 holds beyond 256 tokens (perplexity +1.50%); 0.05 holds "
        "to token 180 (perplexity +12.3%); int8_sym holds beyond 256 tokens (perplexity -0.01%); int8_static calibrated-amax-abcdef "
        "holds beyond 256 tokens (perplexity +0.40%); native itself holds to token 190."
    )


def test_a_scale_that_half_of_the_texts_survive_has_not_collapsed():
    assert Held(None, 20, 256, 0.5).sentence == "holds to token 20"
    assert Held(None, 20, 256, 0.75).sentence == "collapses at token 20"
    assert (
        Held(310.0, 256, 256, 0.0).sentence
        == "ruins the text without making it repeat itself or end (perplexity +310%)"
    )
    assert Held(100.0, 256, 256, 0.0).sentence == "holds beyond 256 tokens (perplexity +100%)"
    assert Held(310.0, 5, 256, 1.0).sentence == "collapses at token 5 (perplexity +310%)"
    assert Held(2.0, None, None, None).sentence == "gives perplexity +2.00%"


def test_lines_are_static_formats_and_the_rest_are_levels():
    found = sweep(swept())
    assert [(line.name, [scale for scale, _ in line.points]) for line in found.lines] == [
        ("int8_static", [0.05, 0.1, 1.0])
    ]
    assert [line.name for line in found.references] == [
        "int8_sym",
        "int8_static calibrated-amax-abcdef",
        "native",
    ]


@pytest.mark.parametrize(
    "left", [[("native", None), ("int8_sym", None)], [("native", None), ("int8_static", 1.0)]]
)
def test_no_sweep_where_a_run_has_fewer_than_two_scales(left, passing):
    args = swept({key: FOUND[key] for key in left})
    assert sweep(args) is None
    assert "Static scales" not in render(build(args))
    assert build(passing.judged).sweep is None


def test_a_sweep_of_perplexity_alone_has_one_panel_and_stands_at_quality():
    args = swept({key: (ppl, None, None) for key, (ppl, _, _) in FOUND.items()})
    found = sweep(args)
    assert found.sentence.startswith("int8_static scale 1 gives perplexity +3,041%; 0.1 gives")
    texts = [e.text for e in ET.fromstring(scale_svg(found, "t")).iter(f"{SVG}text")]
    assert "perplexity delta (%)" in texts
    assert "useful tokens" not in texts


def test_the_plot_is_the_same_byte_for_byte_and_whole():
    found = sweep(swept())
    svg = scale_svg(found, "Scales < all")
    assert svg == scale_svg(sweep(swept()), "Scales < all")
    root = ET.fromstring(svg)
    assert root.find(f"{SVG}title").text == "Scales < all"
    texts = [e.text for e in root.iter(f"{SVG}text")]
    assert {"0.05", "0.1", "1", "scale", "perplexity delta (%)", "useful tokens"} <= set(texts)
    assert {"10", "1,000"} <= set(texts)
    assert not [text for text in texts if "$" in text]
    assert "metadata" not in svg
    assert "#0100" not in svg
    assert {f"var(--s{i})" for i in range(4)} <= {svg[i : i + 9] for i in range(len(svg))}


def test_an_open_mark_is_right_censored():
    """The same numbers, once at the end of the text and once before it."""

    def drawn(steps):
        points = ((0.1, Held(None, 256, steps, 0.0)), (1.0, Held(None, 5, steps, 1.0)))
        return scale_svg(Sweep((ScaleLine("x", points),), (), ""), "t")

    assert [drawn(steps).count("fill-opacity: 0") for steps in (256, 300)] == [1, 0]


def test_page_and_console_show_it(capsys):
    import sys

    view = build(swept())
    page = render(view)
    assert page.count("<svg") == 1
    assert "int8_static scale 1 collapses at token 5" in page
    show(view, sys.stdout)
    printed = capsys.readouterr().out
    assert (
        "Static scales\nint8_static scale 1 collapses at token 5 (perplexity +3,041%); 0.1 holds" in printed
    )
    assert {line.scales for line in (group.line for group in view.precision)} == {
        "none",
        "dynamic",
        "static",
        "calibrated",
    }

"""The sweep of static scales: its sentence and its plot, which exist only if there are two scales."""

import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from kvbench.matrix.cells import Cell, Task
from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import UNITS
from kvbench.records.run import Run
from kvbench.report.console import show
from kvbench.report.figures.plots import scale_svg
from kvbench.report.figures.quality import ScaleEffect, ScaleLine, Sweep, scale_sweep
from kvbench.report.html import render
from kvbench.report.model import JudgedRun
from kvbench.report.view import build
from tests.factories.runs.reported import make

SVG = "{http://www.w3.org/2000/svg}"
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


def test_the_sentence_has_every_line_and_scale():
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


@pytest.mark.parametrize(
    ("effect", "word"),
    [
        ((None, 20, 256, 0.5), "usable up to token 20"),
        ((None, 20, 256, 0.75), "collapses at token 20"),
        ((310.0, 256, 256, 0.0), "ruins"),
        ((100.0, 256, 256, 0.0), "usable for all 256 tokens (perplexity +100%)"),
        ((310.0, 5, 256, 1.0), "collapses at token 5 (perplexity +310%)"),
        ((2.0, None, None, None), "gives perplexity +2.00%"),
    ],
)
def test_a_scale_collapses_if_more_than_half_of_its_texts_do(effect, word):
    assert word in ScaleEffect(*effect).sentence


def test_no_sweep_where_a_run_has_fewer_than_two_scales(passing):
    for other in (("int8_sym", None), ("int8_static", 1.0)):
        args = swept({key: FOUND[key] for key in (("native", None), other)})
        assert scale_sweep(args) is None
        assert "Static scales" not in render(build(args))
    assert build(passing.judged).sweep is None


def words(drawing):
    return {element.text for element in ET.fromstring(drawing).iter(f"{SVG}text")}


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


def test_page_and_console_show_it(capsys):
    view = build(swept())
    page = render(view)
    assert page.count("<svg") == 1
    show(view, sys.stdout)
    for text in (page, capsys.readouterr().out):
        assert "int8_static scale 1 collapses at token 5" in text
    scales = {group.line.scales for group in view.precision}
    assert scales == {"none", "dynamic", "static", "calibrated"}

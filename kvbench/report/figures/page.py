"""The figures of a page: each a drawing, its caption and its numbers. Drill-downs are numbers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvbench.render.numbers import one_line
from kvbench.render.svg import COLOURS, mark
from kvbench.report.figures import numbers, plots, quality_plots
from kvbench.report.figures.agreement import Passage
from kvbench.report.figures.divergence import LEVELS
from kvbench.report.figures.numbers import Grid
from kvbench.report.figures.series import PARTS, STORED, crowded, wide
from kvbench.report.figures.speed import TIMED
from kvbench.report.view import View


@dataclass(frozen=True)
class Figure:
    """section: key of the table below it; legend: (mark, colour, name) per series; grids: its numbers;
    sentences: one per series, where there is more to explain; passages: (name, texts) to read.
    """

    section: str
    svg: str
    caption: str
    legend: tuple[tuple[str, int, str], ...]
    grids: tuple[Grid, ...]
    sentences: tuple[str, ...] = ()
    passages: tuple[tuple[str, Passage], ...] = ()


def figures(view: View) -> tuple[Figure, ...]:
    """All figures, in their order within a section. One that cannot be drawn becomes a sentence."""
    found: list[Figure] = []
    for section, of in _DRAWN:
        try:
            found += list(of(view))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
            why = one_line(f"{type(e).__name__}: {e}", 200)
            found.append(
                Figure(section, "", f"A plot is missing: its numbers cannot be drawn ({why}).", (), ())
            )
    return tuple(found)


def drilldowns(view: View) -> Mapping[str, Sequence[Grid]]:
    """The tables below the table of each section."""
    found: dict[str, list[Grid]] = {}
    for chunks in view.plots.chunks:
        if chunks.positions:
            found.setdefault("quality", []).append(numbers.positions(chunks))
        found.setdefault("quality", []).append(numbers.chunks(chunks))
    for questions in view.plots.questions:
        found.setdefault("mcq", []).append(numbers.questions(questions))
    return found


def _legend(names: Sequence[str]) -> tuple[tuple[str, int, str], ...]:
    return tuple((mark(i), i % COLOURS, name) for i, name in enumerate(names))


def _bytes(view: View) -> Iterator[Figure]:
    bars = view.bytes
    if not bars:
        return
    drawn = [part for part in (*STORED, "workspace") if any(getattr(bar, part) for bar in bars)]
    caption = (
        f"Bytes of {view.bytes_of}: stored for the cache, stacked by part, with the sum next to the bar."
    )
    if any(bar.native16 for bar in bars):
        caption += " The vertical line is a 16-bit native cache of the same shape, by the formula."
    if "workspace" in drawn:
        caption += " Workspace is the peak memory that a prefill and a decode step allocated temporarily."
    elif all(bar.workspace is None for bar in bars):
        caption += " Workspace is not measured on this device."
    svg = plots.bytes_svg(bars, f"Bytes of {view.bytes_of} for the cache, by part, and a 16-bit native cache")
    legend = tuple(("■", PARTS.index(part), numbers.PART_NAMES[part]) for part in drawn)
    yield Figure("storage", svg, caption, legend, (numbers.bytes_table(bars),))


_OWN_REQUESTS = (
    "Native's line shows the requests of its own cell; ratios are computed from interleaved pairs of "
    "requests, so they can differ."
)


def _times(view: View) -> Iterator[Figure]:
    mean = "Bars: 95% t-intervals over requests."
    median = "Bars: 95% intervals of the median, which need 6 requests."
    for name, series, key, bars in (
        ("ITL mean", view.itl, "itl", mean),
        ("TTFT median", view.plots.ttft, "ttft", median),
    ):
        if not series:
            continue
        svg = plots.times_svg(
            series, key, f"{name} (ms)", f"{name} by context and batch, one line per format"
        )
        caption = f"{name} by context and batch. {bars}"
        caption += "" if crowded(series) else " Dots: single requests."
        caption += f" {_OWN_REQUESTS}"
        caption += " The axis is logarithmic." if wide(series) else ""
        caption += "".join(f" Points of {s.name} are not joined: they {s.apart}." for s in series if s.apart)
        legend = _legend([line.name for line in series])
        yield Figure("latency", svg, caption, legend, (numbers.times(series, name),))


def _roof(view: View) -> Iterator[Figure]:
    roof = view.plots.roof
    if roof is None:
        return
    caption = (
        "The bytes that a decode step must read (weights, and the cache at its mean length) and its time."
    )
    if roof.copy is not None:
        spread = ""
        if len(roof.copies) > 1:
            low, high = min(roof.copies), max(roof.copies)
            spread = f", median of {len(roof.copies)} records from {low:,.4g} to {high:,.4g}"
        caption += (
            " The line is the shortest possible time at the copy bandwidth measured on this device, "
            f"{roof.copy:,.4g} GB/s read and written{spread}. The distance of a point above the line is time "
            "not "
            "spent on reading."
        )
        if roof.caches:
            caption += f" Reads that fit into the cache of {roof.caches[-1]:,} B can be below the line."
    if roof.reason:
        what = "The copy bandwidth of some cells is" if roof.copy else "The copy bandwidth is"
        caption += f" {what} not known: {roof.reason}."
    names = list(dict.fromkeys(point.line for point in roof.points))
    svg = plots.roof_svg(roof, "Time of a decode step over the bytes that it must read, by cell")
    yield Figure("latency", svg, caption, _legend(names), (numbers.roof(roof),))


def _products(view: View) -> Iterator[Figure]:
    products = view.plots.products
    if not products:
        return
    warm = dict.fromkeys(f" {p.n} x {p.k}: {p.warm}." for p in products if p.warm)
    caption = f"Time of one call by rows of its input, one panel per shape (N x K).{''.join(warm)}"
    if dropped := sum({product.name: product.dropped for product in products}.values()):
        caption += f" {dropped} smaller shapes are not shown."
    svg = plots.products_svg(products, "Time of the linear layers' products by number of rows, by shape")
    yield Figure("gemm", svg, caption, _legend(list(TIMED.values())), (numbers.products(products),))


def _sweep(view: View) -> Iterator[Figure]:
    if view.sweep:
        svg = quality_plots.scale_svg(view.sweep, "Perplexity delta and useful tokens by static scale")
        caption = (
            f"{view.sweep.sentence} An open marker means that the text neither repeated itself nor ended "
            "within "
            "its length. Horizontal lines are cells without a single scale."
        )
        yield Figure(view.sweep_at, svg, caption, _legend([line.name for line in view.sweep.all]), ())


def _kld(view: View) -> Iterator[Figure]:
    lines = view.plots.kld
    if not lines:
        return
    caption = (
        "KLD from native's next-token distribution to the candidate's: percentiles over the scored tokens, "
        "log axis. Bars: 95% intervals over documents; the maximum has none."
    )
    if any(row.value is not None and not row.value > 0 for line in lines for row in line.rows.values()):
        caption += " A percentile of 0 cannot be drawn on a log axis; it is in the table."
    svg = quality_plots.kld_svg(lines, "KLD percentiles by cell, log axis")
    yield Figure("quality", svg, caption, _legend(list(LEVELS.values())), (numbers.kld(lines),))


def _layers(view: View) -> Iterator[Figure]:
    lines = view.layers
    if lines:
        svg = quality_plots.layers_svg(lines, "KLD by layer: quantized alone, and saved by keeping it native")
        caption = "KLD by layer. Bars: 95% intervals over texts, cut at the edge of the panel."
        sentences = tuple(f"{line.name}: {line.sentence}." for line in lines)
        legend = _legend([line.name for line in lines])
        yield Figure("sensitivity", svg, caption, legend, tuple(map(numbers.layers, lines)), sentences)


def _agreement(view: View) -> Iterator[Figure]:
    lines = view.plots.agreement
    if not lines:
        return
    caption = (
        "The share of steps so far on which the candidate picks native's token, given native's text. A large "
        "marker is the first divergence: filled if it is real, open if it is a near-tie or not known to be "
        "real. A dashed line is native compared with itself."
    )
    svg = quality_plots.agreement_svg(lines, "Teacher-forced agreement with native by step")
    passages = tuple(
        (f"{x.name}, step {x.first:,}", x.passage) for x in lines if x.passage and x.first is not None
    )
    sentences = tuple(f"{line.name} {line.sentence}." for line in lines)
    legend = _legend([line.name for line in lines])
    yield Figure("agreement", svg, caption, legend, (numbers.agreement(lines),), sentences, passages)


def _health(view: View) -> Iterator[Figure]:
    lines = view.plots.health
    if not lines:
        return
    sides = [side for line in lines for side in line.sides.values()]
    zero = [name.partition(" (")[0] for name, of, _ in quality_plots.HEALTH_PANELS if not any(map(of, sides))]
    caption = (
        "K (solid line, filled) and V (dashed, open) by layer. In the range of scales, K is the wide bar."
    )
    if zero:
        caption += f" Not drawn, because they are 0 in every layer: {', '.join(zero)}."
    svg = quality_plots.health_svg(lines, "Numeric health of K and V by layer")
    yield Figure("health", svg, caption, _legend([line.name for line in lines]), numbers.health(lines))


_DRAWN: tuple[tuple[str, Callable[[View], Iterator[Figure]]], ...] = (
    ("storage", _bytes),
    ("latency", _times),
    ("latency", _roof),
    ("gemm", _products),
    ("quality", _sweep),
    ("quality", _kld),
    ("sensitivity", _layers),
    ("agreement", _agreement),
    ("health", _health),
)

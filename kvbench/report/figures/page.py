"""The figures of a page: each a drawing, what it says in words, and the numbers it was drawn from, by the table that it stands above.

A drill-down is a table of numbers without a drawing, and stands below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvbench.render.numbers import one_line
from kvbench.render.svg import COLOURS, mark
from kvbench.report.figures import numbers, plots
from kvbench.report.figures import quality as plots_quality
from kvbench.report.figures import speed as plots_speed
from kvbench.report.figures.agreement import Passage
from kvbench.report.figures.divergence import LEVELS
from kvbench.report.figures.numbers import Grid
from kvbench.report.figures.series import PARTS, STORED, crowded, wide
from kvbench.report.view import View


@dataclass(frozen=True)
class Figure:
    """section: key of the table that it stands above; svg: the drawing; caption: one or more sentences; legend: sign, colour and name of
    each series; grids: the numbers; sentences: one a series, where there is something to say of each; passages: (name, texts), for
    reading."""

    section: str
    svg: str
    caption: str
    legend: tuple[tuple[str, int, str], ...]
    grids: tuple[Grid, ...]
    sentences: tuple[str, ...] = ()
    passages: tuple[tuple[str, Passage], ...] = ()


def figures(view: View) -> tuple[Figure, ...]:
    """In the order in which they stand within a section. What cannot be drawn is one with words alone: it must not cost the verdict."""
    found: list[Figure] = []
    for section, of in _DRAWN:
        try:
            found += list(of(view))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
            said = one_line(f"{type(e).__name__}: {e}", 200)
            found.append(
                Figure(section, "", f"A plot is missing here: its numbers cannot be drawn ({said}).", (), ())
            )
    return tuple(found)


def drilldowns(view: View) -> Mapping[str, Sequence[Grid]]:
    """The tables below each section's own, by section."""
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
    if not view.bytes:
        return
    drawn = [part for part in (*STORED, "workspace") if any(getattr(bar, part) for bar in view.bytes)]
    caption = f"Bytes of {view.bytes_of}: what is stored for the cache, stacked by part, its sum beside it."
    if any(bar.native16 for bar in view.bytes):
        caption += " The upright line is a 16-bit native cache of the same shape, by the formula."
    if "workspace" in drawn:
        caption += " Workspace is the most that a prefill and a step took beyond it, for a moment."
    elif all(bar.workspace is None for bar in view.bytes):
        caption += " Workspace is not measured on this device."
    title = f"Bytes of {view.bytes_of} stored for the cache, stacked by part, against a 16-bit native cache"
    legend = tuple(("■", PARTS.index(part), numbers.PART_NAMES[part]) for part in drawn)
    yield Figure(
        "storage", plots.bytes_svg(view.bytes, title), caption, legend, (numbers.bytes_table(view.bytes),)
    )


OWN_REQUESTS = "Native's line is of its own cell's requests, and a ratio is of the pairs that ran interleaved, so the two need not agree."


def _times(view: View) -> Iterator[Figure]:
    for name, series, key, caption in (
        ("ITL mean (ms)", view.itl, "itl", "Mean ITL by context and batch. Bars: 95% intervals (t, over the requests)."),
        ("TTFT median (ms)", view.plots.ttft, "ttft", "Median TTFT by context and batch. Bars: 95% intervals of the median, which take 6 "
         "requests."),
    ):  # fmt: skip
        if series:
            title = f"{name.removesuffix(' (ms)')} by context and batch, one line a format"
            svg = plots.times_svg(series, key, name, title)
            legend = _legend([line.name for line in series])
            said = caption if crowded(series) else f"{caption} Dots: single requests."
            said += f" {OWN_REQUESTS}"
            said += " The axis is logarithmic." if wide(series) else ""
            for line in series:
                said += f" Points of {line.name} are not joined: they {line.apart}." if line.apart else ""
            yield Figure("latency", svg, said, legend, (numbers.times(series, name.removesuffix(" (ms)")),))


def _roof(view: View) -> Iterator[Figure]:
    roof = view.plots.roof
    if roof is None:
        return
    caption = (
        "What a decode step must read (weights, and the cache at its mean length) against the time it takes."
    )
    if roof.copy is not None:
        spread = (
            f", median of {len(roof.copies)} records from {min(roof.copies):,.4g} to {max(roof.copies):,.4g}"
            if len(roof.copies) > 1
            else ""
        )
        caption += (
            f" The line is the least time at the copy bandwidth that this device was measured at, {roof.copy:,.4g} GB/s read and written{spread}: "
            "a point on it reads as fast as the device copies, the distance above it is time that is not spent on reading."
        )
        if roof.caches:
            caption += f" Below it can be what fits the cache of {roof.caches[-1]:,} B."
    if roof.reason:
        caption += f" {'Of some cells no' if roof.copy else 'No'} copy bandwidth is known: {roof.reason}."
    names = list(dict.fromkeys(point.line for point in roof.points))
    svg = plots_speed.roof_svg(roof, "Time of a decode step over the bytes that it must read, by cell")
    yield Figure("latency", svg, caption, _legend(names), (numbers.roof(roof),))


def _products(view: View) -> Iterator[Figure]:
    products = view.plots.products
    if not products:
        return
    caption = "Time of one call by rows of its input, one panel a shape (N x K). " + " ".join(
        dict.fromkeys(f"{product.n} x {product.k}: {product.warm}." for product in products if product.warm)
    )
    if dropped := sum({product.name: product.dropped for product in products}.values()):
        caption += f" {dropped} smaller shapes are not shown."
    svg = plots_speed.products_svg(
        products, "Time of the linear layers' products by number of rows, by shape"
    )
    yield Figure(
        "gemm", svg, caption, _legend(list(plots_speed.SERIES.values())), (numbers.products(products),)
    )


def _sweep(view: View) -> Iterator[Figure]:
    if view.sweep:
        svg = plots.scale_svg(view.sweep, "Perplexity delta and useful tokens by static scale")
        caption = (
            f"{view.sweep.sentence} By static scale; an open mark neither repeated itself nor ended within its length, which is the top of that "
            "panel; a level line has no one scale."
        )
        yield Figure(view.sweep_at, svg, caption, _legend([line.name for line in view.sweep.all]), ())


def _kld(view: View) -> Iterator[Figure]:
    lines = view.plots.kld
    if not lines:
        return
    caption = "KLD from native's next-token distribution to the candidate's, percentiles over the scored tokens, log axis. Bars: 95% intervals over documents; a largest value has none."
    if any(row.value is not None and not row.value > 0 for line in lines for row in line.rows.values()):
        caption += " A percentile of 0 has no place on a log axis; it stands in the table."
    svg = plots_quality.kld_svg(lines, "KLD percentiles by cell, log axis")
    yield Figure("quality", svg, caption, _legend(list(LEVELS.values())), (numbers.kld(lines),))


def _layers(view: View) -> Iterator[Figure]:
    if view.layers:
        svg = plots.layers_svg(
            view.layers, "KLD by layer: quantized alone, and gained where it is kept native"
        )
        caption = "KLD by layer. Bars: 95% intervals over texts, cut where they leave the panel."
        said = tuple(f"{line.name}: {line.sentence}." for line in view.layers)
        legend = _legend([line.name for line in view.layers])
        yield Figure("sensitivity", svg, caption, legend, tuple(map(numbers.layers, view.layers)), said)


def _agreement(view: View) -> Iterator[Figure]:
    lines = view.plots.agreement
    if not lines:
        return
    caption = (
        "Share of the steps so far on which each candidate picks native's token along native's history. A large sign is the first divergence: filled where "
        "it is real, open where it is a near-tie or not known to be real. A dashed line is native against itself."
    )
    svg = plots_quality.agreement_svg(
        lines, "Teacher-forced agreement with native by step, with each first divergence"
    )
    passages = tuple(
        (f"{line.name}, step {line.first:,}", line.passage)
        for line in lines
        if line.passage and line.first is not None
    )
    yield Figure(
        "agreement",
        svg,
        caption,
        _legend([line.name for line in lines]),
        (numbers.agreement(lines),),
        tuple(f"{line.name} {line.sentence}." for line in lines),
        passages,
    )


def _health(view: View) -> Iterator[Figure]:
    lines = view.plots.health
    if not lines:
        return
    idle = [
        name.partition(" (")[0] for name, of, _ in plots_quality.HEALTH_PANELS
        if not any(of(side) for line in lines for side in line.sides.values())
    ]  # fmt: skip
    caption = (
        "K (full line, filled) and V (dashed, open) by layer; in the range of scales K is the broad bar."
    )
    if idle:
        caption += f" Not drawn, for it is 0 in every layer: {', '.join(idle)}."
    svg = plots_quality.health_svg(lines, "Numeric health of K and V by layer")
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

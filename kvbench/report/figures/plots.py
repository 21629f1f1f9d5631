"""The drawings, each as SVG text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, isfinite, nan
from typing import TYPE_CHECKING, Any

from kvbench.render import svg
from kvbench.render.numbers import one_line
from kvbench.report.figures import costs, quality

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3  # panels in a row
_DASHED = (0, (4, 2))


def times_svg(series: Sequence[costs.TimeSeries], key: str, name: str, title: str) -> str:
    """Milliseconds over context, one panel per batch. Bars are 95% intervals, dots single requests.

    key: prefix of the drawing's ids; name: label of the y axis, which is logarithmic if `costs.wide`.
    """
    batches, contexts = costs.shapes(series)
    with svg.canvas(2.9 * ceil(len(batches) / _COLUMNS)) as figure:
        axes = svg.panels(figure, len(batches), _COLUMNS, "y")
        for panel, batch in zip(axes, batches, strict=True):
            _times_panel(panel, series, batch, contexts)
        if costs.wide(series):
            points = [point for line in series for point in line.points]
            svg.log_axis(axes[0], "y", (x for p in points for x in (p.low, p.value, p.high, *p.repeats)))
        else:
            axes[0].set_ylim(bottom=0)
            axes[0].yaxis.set_major_formatter(lambda y, _: f"{y:,.6g}")
        figure.supylabel(name, fontsize=10)
        return svg.drawn(figure, key, title)


def _times_panel(
    panel: Axes, series: Sequence[costs.TimeSeries], batch: int, contexts: Sequence[int]
) -> None:
    step = min(0.16, 0.6 / max(1, len(series)))  # shifts the series so that no interval hides another
    for i, line in enumerate(series):
        points = sorted((p for p in line.points if p.batch == batch), key=lambda p: p.context)
        at = [contexts.index(p.context) + (i - (len(series) - 1) / 2) * step for p in points]
        placed = list(zip(at, points, strict=True))
        dots = [] if costs.crowded(series) else [(x, each) for x, p in placed for each in p.repeats]
        panel.plot(*svg.xy(dots), ".", color=svg.colour(i), alpha=0.45, markersize=4)
        spans = [(x, p.low, p.high) for x, p in placed if p.low is not None and p.high is not None]
        panel.plot(*svg.uprights(spans), color=svg.colour(i), linewidth=1.4)
        look: dict[str, Any] = {"linewidth": 0 if line.apart else 1.2, "color": svg.colour(i)}
        panel.plot(at, [p.value for p in points], marker=svg.marker(i), markersize=5, **look)
    panel.set(xlim=(-0.5, len(contexts) - 0.5), xlabel="context (tokens)")
    panel.set_title(f"batch {batch}", loc="left")
    panel.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    svg.grid_lines(panel, "y")


def bytes_svg(bars: Sequence[costs.ByteBar], title: str) -> str:
    """The bytes stored by each cell (MiB), stacked by part, with a line at its 16-bit native cache.

    Measured workspace, which may be many times a small cache, has its own panel.
    """
    groups = [costs.STORED, ("workspace",)] if any(bar.workspace for bar in bars) else [costs.STORED]
    with svg.canvas(0.7 + 0.3 * len(bars)) as figure:
        ratios = [2, 1][: len(groups)]
        axes = figure.subplots(1, len(groups), sharey=True, squeeze=False, width_ratios=ratios)[0]
        for axis, parts in zip(axes, groups, strict=True):
            _byte_panel(axis, bars, parts)
            axis.set_xlabel("stored for the cache (MiB)" if parts is costs.STORED else "workspace (MiB)")
        axes[0].set_yticks(range(len(bars)), [one_line(bar.name, 48) for bar in bars])
        axes[0].set_ylim(len(bars) - 0.4, -0.6)
        return svg.drawn(figure, "bytes", title)


def _byte_panel(axis: Axes, bars: Sequence[costs.ByteBar], parts: Sequence[str]) -> None:
    left = [0.0] * len(bars)
    for part in parts:
        sizes = [(getattr(bar, part) or 0) / 2**20 for bar in bars]
        axis.barh(range(len(bars)), sizes, height=0.62, left=left, color=svg.colour(costs.PARTS.index(part)))
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for y, bar in enumerate(bars):
        end = left[y]
        if parts is costs.STORED and bar.native16 is not None:
            end = max(end, bar.native16 / 2**20)
            axis.vlines(bar.native16 / 2**20, y - 0.42, y + 0.42, color=svg.INK, linewidth=1.6)
        if any(getattr(bar, part) is not None for part in parts):
            axis.annotate(f"{left[y]:,.4g}", (end, y), xytext=(5, 0), textcoords="offset points", va="center")
    axis.margins(x=0.08 if parts is costs.STORED else 0.2)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.6g}")
    axis.set_axisbelow(True)
    svg.grid_lines(axis, "x")
    axis.spines["left"].set_visible(False)


def roof_svg(roof: costs.Roof, title: str) -> str:
    """Milliseconds per decode step over the bytes it reads (MB = 10^6), log axes.

    The line is the shortest possible time at the measured copy bandwidth.
    """
    with svg.canvas(3.4) as figure:
        panel = figure.subplots()
        points = [((p.weights + p.cache) / 1e6, p.itl.value or nan) for p in roof.points]
        for i, name in enumerate(dict.fromkeys(point.line for point in roof.points)):
            own = [at for at, p in zip(points, roof.points, strict=True) if p.line == name]
            panel.plot(*svg.xy(own), svg.marker(i), color=svg.colour(i), markersize=6)
        reads, times = svg.xy(points)
        shortest = [read / roof.copy for read in reads] if roof.copy else []  # MB / (GB/s) = ms
        svg.log_axis(panel, "x", reads)
        svg.log_axis(panel, "y", times + shortest)
        if roof.copy:
            ends = panel.get_xlim()
            panel.plot(ends, [end / roof.copy for end in ends], color=svg.INK, linewidth=1.2)
        panel.set(xlabel="read per step (MB)", ylabel="ITL mean (ms)")
        svg.grid_lines(panel, "both")
        return svg.drawn(figure, "roof", title)


def products_svg(products: Sequence[costs.ProductTimes], title: str) -> str:
    """Microseconds per call over the rows of the input, log axes, one panel per shape (N x K)."""
    sizes = [m for product in products for m, _, _ in product.rows]
    calls = [us for product in products for _, _, times in product.rows for us in times.values()]
    several = len({product.name for product in products}) > 1
    with svg.canvas(0.3 + 2.3 * ceil(len(products) / _COLUMNS)) as figure:
        axes = svg.panels(figure, len(products), _COLUMNS, "xy")
        for panel, product in zip(axes, products, strict=True):
            for i, key in enumerate(costs.TIMED):
                found = [(m, times[key]) for m, _, times in product.rows if key in times]
                look: dict[str, Any] = {"marker": svg.marker(i), "markersize": 3.5, "linewidth": 1.0}
                panel.plot(*svg.xy(found), color=svg.colour(i), **look)
            shape = f"{product.n} x {product.k}"
            panel.set_title(f"{one_line(product.name, 30)}\n{shape}" if several else shape, loc="left")
            svg.log_axis(panel, "x", sizes)
            svg.log_axis(panel, "y", calls)
            svg.grid_lines(panel, "y", labelbottom=True)
        figure.supylabel("µs per call", fontsize=10)
        figure.supxlabel("rows (M)", fontsize=10)
        return svg.drawn(figure, "products", title)


def scale_svg(sweep: quality.Sweep, title: str) -> str:
    """Perplexity delta (%) and useful tokens over the scale, log axis. References are horizontal lines.

    An open marker is right-censored: the text neither repeated itself nor ended within its length.
    """
    found = [effect for line in sweep.lines for _, effect in line.points]
    names = {"perplexity delta (%)": "ppl", "useful tokens": "useful"}
    shown = {n: of for n, of in names.items() if any(getattr(e, of) is not None for e in found)}
    with svg.canvas(2.7 * len(shown)) as figure:
        axes = svg.panels(figure, len(shown), 1, "x")
        for panel, (name, of) in zip(axes, shown.items(), strict=True):
            for i, line in enumerate(sweep.all):
                _scale_line(panel, i, line, of)
            panel.set(xscale="log", ylabel=name)
            svg.grid_lines(panel, "y", which="both")
            if of == "ppl":
                values = [e.ppl for line in sweep.all for e in line.effects if e.ppl is not None]
                panel.set_yscale("symlog", linthresh=1.0)
                panel.set_ylim(1.5 * min(0.0, *values) - 0.5, 1.5 * max(0.0, *values) + 0.5)
                panel.yaxis.set_major_formatter(lambda y, _: f"{y:,.6g}")
            else:
                panel.set_ylim(bottom=0)
        scales = sorted({scale for line in sweep.lines for scale, _ in line.points})
        axes[-1].set_xticks(scales, [f"{scale:g}" for scale in scales])
        axes[-1].set_xticks([], minor=True)
        axes[-1].set_xlabel("scale")
        return svg.drawn(figure, "scale", title)


def _scale_line(panel: Axes, i: int, line: quality.ScaleLine, of: str) -> None:
    paint, sign = svg.colour(i), svg.marker(i)
    if line.level is not None:
        if (level := getattr(line.level, of)) is not None:
            panel.axhline(level, color=paint, linewidth=1.2, linestyle=(0, (5 - i % 3, 2)))
            at = 0.99 - 0.03 * (i % svg.COLOURS)  # shifted, so that equal levels stay visible
            panel.plot([at], [level], sign, color=paint, markersize=5, transform=panel.get_yaxis_transform())
        return
    found = [(scale, y, e) for scale, e in line.points if (y := getattr(e, of)) is not None]
    panel.plot(*svg.xy([(scale, y) for scale, y, _ in found]), color=paint, linewidth=1.2)
    for scale, y, effect in found:
        face = "none" if of == "useful" and effect.censored else paint
        panel.plot([scale], [y], sign, markersize=5, color=paint, markerfacecolor=face)


def layers_svg(lines: Sequence[quality.LayerLine], title: str) -> str:
    """KLD (nat) by layer: with only that layer quantized, and saved by keeping it native."""
    with svg.canvas(4.6) as figure:
        axes = svg.panels(figure, 2, 1, "x")
        names = {"alone": "quantized alone (nat)", "gains": "saved by native (nat)"}
        for panel, (of, name) in zip(axes, names.items(), strict=True):
            values = [0.0]
            for i, line in enumerate(lines):
                found = getattr(line, of)
                spans = [(n, *estimate.interval) for n, estimate in enumerate(found) if estimate.interval]
                panel.plot(*svg.uprights(spans), color=svg.colour(i), linewidth=0.8, alpha=0.6)
                points = svg.xy([(n, estimate.value) for n, estimate in enumerate(found)])
                panel.plot(
                    *points, svg.marker(i), color=svg.colour(i), linestyle="-", linewidth=0.8, markersize=4
                )
                values += points[1]
            panel.set_ylabel(name)
            svg.grid_lines(panel, "y")
            # The values set the range: with few texts an interval may be many times its value.
            low, high = min(values), max(values)
            panel.set_ylim(low - 0.15 * (high - low) * (low < 0), high + 0.15 * (high - low) or 1.0)
        axes[-1].set_xlabel("layer")
        axes[-1].locator_params(axis="x", integer=True)
        return svg.drawn(figure, "layers", title)


def kld_svg(lines: Sequence[quality.KldLine], title: str) -> str:
    """KLD (nat) of each cell on a log axis, one marker per percentile, with 95% intervals. Omits zeros."""
    with svg.canvas(0.8 + 0.42 * len(lines)) as figure:
        panel = figure.subplots()
        ends: list[float | None] = []
        for y, line in enumerate(lines):
            for i, metric in enumerate(quality.LEVELS):
                row = line.rows.get(metric)
                if row is None or row.value is None:
                    continue
                ends += [row.low, row.value, row.high]
                if not row.value > 0 or not isfinite(row.value):
                    continue
                if row.low is not None and row.high is not None and row.high > 0:
                    # An interval that starts at 0 is drawn to the edge.
                    panel.hlines(y, max(row.low, 1e-12), row.high, color=svg.colour(i), linewidth=1.4)
                panel.plot([row.value], [y], svg.marker(i), color=svg.colour(i), markersize=6)
        several = len({line.variant for line in lines}) > 1
        names = [one_line(f"{line.name} · {line.variant}" if several else line.name, 56) for line in lines]
        panel.set_yticks(range(len(lines)), names)
        panel.set(ylim=(len(lines) - 0.5, -0.5), xlabel="KLD (nat)", axisbelow=True)
        svg.log_axis(panel, "x", ends)
        svg.grid_lines(panel, "x", which="both")
        panel.spines["left"].set_visible(False)
        return svg.drawn(figure, "kld", title)


def agreement_svg(lines: Sequence[quality.AgreementLine], title: str) -> str:
    """The share of agreement by step. A large marker is the first divergence, open unless it is real."""
    with svg.canvas(3.2) as figure:
        panel = figure.subplots()
        for i, line in enumerate(lines):
            paint, sign, under = svg.colour(i), svg.marker(i), min(4, len(lines) - 1 - i)
            width = 1.2 + 0.5 * under  # wider where later lines may cover it
            style = _DASHED if line.again else "-"
            panel.plot(*svg.xy(line.points), color=paint, linewidth=width, linestyle=style)
            panel.plot(*svg.xy(line.points[-1:]), sign, color=paint, markersize=5)
            if line.first is not None and (share := line.at_first) is not None:
                face, size = paint if line.real else "none", 8 + 2.5 * under
                panel.plot([line.first], [share], sign, color=paint, markersize=size, markerfacecolor=face)
        lowest = min(0.99, *(share for line in lines for _, share in line.points))
        space = 0.05 * (1 - lowest)
        panel.set_ylim(lowest - space, 1 + space)
        panel.set_yticks([tick for tick in panel.get_yticks() if lowest - space <= tick <= 1 + 1e-9])
        panel.set_xlim(-0.02 * max(line.steps for line in lines), None)
        panel.set(xlabel="step", ylabel="share of agreement so far")
        panel.yaxis.set_major_formatter(lambda y, _: f"{y:.6g}")
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        svg.grid_lines(panel, "y")
        return svg.drawn(figure, "agreement", title)


Side = Mapping[str, Any]
_MOST_MARKED = 120  # layers of all lines; with more, the markers would merge into a band


def _share(key: str) -> Callable[[Side], float | None]:
    return lambda side: side[key] / side["elements"] if side["elements"] else None


# Title of a panel, its value of a side, and whether its axis is logarithmic. Panels of zeros are not drawn.
HEALTH_PANELS: tuple[tuple[str, Callable[[Side], float | None], bool], ...] = (
    ("amax", lambda side: side["amax"], True),
    ("round-trip error (share of norm)", lambda side: side["error"], True),
    ("clipped (share)", _share("clipped"), False),
    ("flushed to 0 (share)", _share("flushed"), False),
    ("codes used", lambda side: side["codes_used"], False),
)


def health_svg(lines: Sequence[quality.HealthLine], title: str) -> str:
    """One panel per quantity of K (solid, filled) and V (dashed, open) by layer; then the range of scales."""
    sides = [side for line in lines for side in line.sides.values()]
    shown = [panel for panel in HEALTH_PANELS if any(map(panel[1], sides))]
    scaled = any(side["scale_max"] for side in sides)
    count = len(shown) + scaled
    marked = sum(len(line.layers) for line in lines) <= _MOST_MARKED
    with svg.canvas(0.4 + 1.9 * ceil(count / 2)) as figure:
        axes = svg.panels(figure, count, 2, "x")
        for axis, (name, of, log) in zip(axes, shown, strict=False):
            for i, line in enumerate(lines):
                _sides(axis, i, line, of, marked)
            _health_axis(axis, name, map(of, sides) if log else ())
        if scaled:
            for i, line in enumerate(lines):
                _ranges(axes[-1], i, line, 0.3 * (i - (len(lines) - 1) / 2) / len(lines))
            ends = (side[key] for side in sides for key in ("scale_min", "scale_max"))
            _health_axis(axes[-1], "scale, smallest to largest", ends)
        return svg.drawn(figure, "health", title)


def _sides(
    axis: Axes, i: int, line: quality.HealthLine, of: Callable[[Side], float | None], marked: bool
) -> None:
    sign = svg.marker(i) if marked else "none"
    for side, style, face in (("k", "-", svg.colour(i)), ("v", _DASHED, "none")):
        own = [(n, of(line.sides[n, side])) for n in line.layers if (n, side) in line.sides]
        x, y = svg.xy([(n, value) for n, value in own if value is not None])
        looks: dict[str, Any] = {"marker": sign, "markersize": 3.5, "markerfacecolor": face}
        axis.plot(x, y, linestyle=style, color=svg.colour(i), linewidth=0.9, **looks)


def _ranges(axis: Axes, i: int, line: quality.HealthLine, shift: float) -> None:
    for side, own, width in (("k", shift - 0.2, 2.2), ("v", shift + 0.2, 1.0)):
        scaled = [(n, s) for n in line.layers if (s := line.sides.get((n, side))) and s["scale_max"]]
        spans = [(n + own, found["scale_min"], found["scale_max"]) for n, found in scaled]
        axis.plot(*svg.uprights(spans), color=svg.colour(i), linewidth=width)
        level = [(x, low) for x, low, high in spans if low == high]  # would be invisible
        axis.plot(*svg.xy(level), "_", color=svg.colour(i), markersize=4, markeredgewidth=width)


def _health_axis(axis: Axes, name: str, log: Iterable[float | None]) -> None:
    """log: the values of a logarithmic axis; empty for one that starts at 0."""
    axis.set_title(name, loc="left")
    if not svg.log_axis(axis, "y", log):
        axis.set_ylim(bottom=0)
    axis.set_xlabel("layer")
    axis.locator_params(axis="x", integer=True)
    svg.grid_lines(axis, "y", labelbottom=True)

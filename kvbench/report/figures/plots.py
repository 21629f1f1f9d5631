"""The plots of times, bytes and speed limits."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import TYPE_CHECKING

from kvbench.render.numbers import one_line
from kvbench.render.svg import INK, colour, drawn, marker, uprights, xy
from kvbench.report.figures.canvas import canvas, grid_lines, log_axis_of, panels, rows_for
from kvbench.report.figures.series import PARTS, STORED, ByteBar, TimeSeries, crowded, shapes, wide
from kvbench.report.figures.speed import TIMED, ProductTimes, Roof

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3  # panels in a row


def times_svg(series: Sequence[TimeSeries], key: str, name: str, title: str) -> str:
    """Milliseconds over context, one panel per batch. Bars are 95% intervals, dots single requests.

    key: prefix of the drawing's ids; name: label of the y axis, which is logarithmic if `wide`.
    """
    batches, contexts = shapes(series)
    with canvas(2.9 * rows_for(len(batches), _COLUMNS)) as figure:
        axes = panels(figure, len(batches), _COLUMNS, sharey=True)
        for panel, batch in zip(axes, batches, strict=True):
            _times_panel(panel, series, batch, contexts)
        if wide(series):
            points = [point for line in series for point in line.points]
            log_axis_of(axes[0], "y", (x for p in points for x in (p.low, p.value, p.high, *p.repeats)))
        else:
            axes[0].set_ylim(bottom=0)
            axes[0].yaxis.set_major_formatter(lambda y, _: f"{y:,.6g}")
        figure.supylabel(name, fontsize=10)
        return drawn(figure, key, title)


def _times_panel(panel: Axes, series: Sequence[TimeSeries], batch: int, contexts: Sequence[int]) -> None:
    step = min(0.16, 0.6 / max(1, len(series)))  # shifts the series so that no interval hides another
    for i, line in enumerate(series):
        points = sorted((p for p in line.points if p.batch == batch), key=lambda p: p.context)
        at = [contexts.index(p.context) + (i - (len(series) - 1) / 2) * step for p in points]
        placed = list(zip(at, points, strict=True))
        dots = [] if crowded(series) else [(x, each) for x, p in placed for each in p.repeats]
        panel.plot(*xy(dots), ".", color=colour(i), alpha=0.45, markersize=4)
        spans = [(x, p.low, p.high) for x, p in placed if p.low is not None and p.high is not None]
        panel.plot(*uprights(spans), color=colour(i), linewidth=1.4)
        width = 0 if line.apart else 1.2
        panel.plot(
            at, [p.value for p in points], color=colour(i), marker=marker(i), markersize=5, linewidth=width
        )
    panel.set_title(f"batch {batch}", loc="left")
    panel.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    panel.set_xlim(-0.5, len(contexts) - 0.5)
    panel.set_xlabel("context (tokens)")
    grid_lines(panel, "y")


def bytes_svg(bars: Sequence[ByteBar], title: str) -> str:
    """The bytes stored by each cell (MiB), stacked by part, with a line at its 16-bit native cache.

    Measured workspace, which may be many times a small cache, has its own panel.
    """
    groups = [STORED, ("workspace",)] if any(bar.workspace for bar in bars) else [STORED]
    with canvas(0.7 + 0.3 * len(bars)) as figure:
        ratios = [2, 1][: len(groups)]
        axes = figure.subplots(1, len(groups), sharey=True, squeeze=False, width_ratios=ratios)[0]
        for axis, parts in zip(axes, groups, strict=True):
            _byte_panel(axis, bars, parts)
            axis.set_xlabel("stored for the cache (MiB)" if parts is STORED else "workspace (MiB)")
        axes[0].set_yticks(range(len(bars)), [one_line(bar.name, 48) for bar in bars])
        axes[0].set_ylim(len(bars) - 0.4, -0.6)
        return drawn(figure, "bytes", title)


def _byte_panel(axis: Axes, bars: Sequence[ByteBar], parts: Sequence[str]) -> None:
    left = [0.0] * len(bars)
    for part in parts:
        sizes = [(getattr(bar, part) or 0) / 2**20 for bar in bars]
        axis.barh(range(len(bars)), sizes, height=0.62, left=left, color=colour(PARTS.index(part)))
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for y, bar in enumerate(bars):
        end = left[y]
        if parts is STORED and bar.native16 is not None:
            end = max(end, bar.native16 / 2**20)
            axis.vlines(bar.native16 / 2**20, y - 0.42, y + 0.42, color=INK, linewidth=1.6)
        if any(getattr(bar, part) is not None for part in parts):
            axis.annotate(f"{left[y]:,.4g}", (end, y), xytext=(5, 0), textcoords="offset points", va="center")
    axis.margins(x=0.08 if parts is STORED else 0.2)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.6g}")
    axis.set_axisbelow(True)
    grid_lines(axis, "x")
    axis.spines["left"].set_visible(False)


def roof_svg(roof: Roof, title: str) -> str:
    """Milliseconds per decode step over the bytes it reads (MB = 10^6), log axes.

    The line is the shortest possible time at the measured copy bandwidth.
    """
    with canvas(3.4) as figure:
        panel = figure.subplots()
        reads = [(point.weights + point.cache) / 1e6 for point in roof.points]
        times = [point.itl.value or nan for point in roof.points]
        for i, name in enumerate(dict.fromkeys(point.line for point in roof.points)):
            own = [
                at
                for at, p in zip(zip(reads, times, strict=True), roof.points, strict=True)
                if p.line == name
            ]
            panel.plot(*xy(own), marker(i), color=colour(i), markersize=6)
        shortest = [read / roof.copy for read in reads] if roof.copy else []  # MB / (GB/s) = ms
        log_axis_of(panel, "x", reads)
        log_axis_of(panel, "y", times + shortest)
        if roof.copy:
            ends = panel.get_xlim()
            panel.plot(ends, [end / roof.copy for end in ends], color=INK, linewidth=1.2)
        panel.set_xlabel("read per step (MB)")
        panel.set_ylabel("ITL mean (ms)")
        grid_lines(panel, "both")
        return drawn(figure, "roof", title)


def products_svg(products: Sequence[ProductTimes], title: str) -> str:
    """Microseconds per call over the rows of the input, log axes, one panel per shape (N x K)."""
    sizes = [m for product in products for m, _, _ in product.rows]
    calls = [us for product in products for _, _, times in product.rows for us in times.values()]
    several = len({product.name for product in products}) > 1
    with canvas(0.3 + 2.3 * rows_for(len(products), _COLUMNS)) as figure:
        axes = panels(figure, len(products), _COLUMNS, sharex=True, sharey=True)
        for panel, product in zip(axes, products, strict=True):
            for i, key in enumerate(TIMED):
                found = [(m, times[key]) for m, _, times in product.rows if key in times]
                panel.plot(*xy(found), color=colour(i), marker=marker(i), markersize=3.5, linewidth=1.0)
            shape = f"{product.n} x {product.k}"
            panel.set_title(f"{one_line(product.name, 30)}\n{shape}" if several else shape, loc="left")
            log_axis_of(panel, "x", sizes)
            log_axis_of(panel, "y", calls)
            grid_lines(panel, "y", labelbottom=True)
        figure.supylabel("µs per call", fontsize=10)
        figure.supxlabel("rows (M)", fontsize=10)
        return drawn(figure, "products", title)

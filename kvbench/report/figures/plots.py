"""The plots of times, bytes, static scales and layers; those of quality and of speed limits stand in files of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvbench.render.numbers import one_line
from kvbench.render.svg import COLOURS, INK, RC, colour, drawn, log_axis, marker, uprights, xy
from kvbench.report.figures.sensitivity import LayerLine
from kvbench.report.figures.series import PARTS, STORED, ByteBar, TimeSeries, crowded, shapes, wide
from kvbench.report.figures.sweep import Held, ScaleLine, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def times_svg(series: Sequence[TimeSeries], key: str, name: str, title: str) -> str:
    """Milliseconds over context, one panel a batch, one mark a series; bars are 95% intervals, dots single requests.

    key: of the drawing's ids; name: of the axis, which is logarithmic where the values are far apart (`wide`).
    """
    import matplotlib
    from matplotlib.figure import Figure

    batches, contexts = shapes(series)
    columns = min(3, len(batches))
    rows = -(-len(batches) // columns)
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(8.2, 2.9 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flat
        for panel in panels[len(batches) :]:
            panel.set_visible(False)
        for panel, batch in zip(panels, batches, strict=False):
            _times_panel(panel, series, batch, contexts)
        if wide(series):
            ends = [
                x
                for line in series
                for p in line.points
                for x in (p.low, p.value, p.high, *p.repeats)
                if x and x > 0
            ]
            log_axis(panels[0], "y", min(ends), max(ends))
        else:
            panels[0].set_ylim(bottom=0)
            panels[0].yaxis.set_major_formatter(lambda y, _: f"{y:,.6g}")
        figure.supylabel(name, fontsize=10)
        return drawn(figure, key, title)


def _times_panel(panel: Axes, series: Sequence[TimeSeries], batch: int, contexts: Sequence[int]) -> None:
    step = min(0.16, 0.6 / max(1, len(series)))  # side by side, or the intervals hide each other
    for i, line in enumerate(series):
        points = sorted((p for p in line.points if p.batch == batch), key=lambda p: p.context)
        at = [contexts.index(p.context) + (i - (len(series) - 1) / 2) * step for p in points]
        dots = (
            []
            if crowded(series)
            else [(x, each) for x, p in zip(at, points, strict=True) for each in p.repeats]
        )
        panel.plot(*xy(dots), ".", color=colour(i), alpha=0.45, markersize=4)
        spans = [
            (x, p.low, p.high)
            for x, p in zip(at, points, strict=True)
            if p.low is not None and p.high is not None
        ]
        panel.plot(*uprights(spans), color=colour(i), linewidth=1.4)
        panel.plot(
            at, [p.value for p in points], color=colour(i), marker=marker(i), markersize=5,
            linewidth=0 if line.apart else 1.2,
        )  # fmt: skip
    panel.set_title(f"batch {batch}", loc="left")
    panel.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    panel.set_xlim(-0.5, len(contexts) - 0.5)
    panel.set_xlabel("context (tokens)")
    panel.grid(axis="y")
    panel.tick_params(length=0)


def bytes_svg(bars: Sequence[ByteBar], title: str) -> str:
    """What each cell stores (MiB), stacked by part; an upright line is a 16-bit native cache of its shape. Workspace, where it was
    measured, has a panel of its own beside it: it is many times a small cache.
    """
    import matplotlib
    from matplotlib.figure import Figure

    panels = [STORED, ("workspace",)] if any(bar.workspace for bar in bars) else [STORED]
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(8.2, 0.7 + 0.3 * len(bars)), layout="constrained")
        axes = figure.subplots(
            1, len(panels), sharey=True, squeeze=False, width_ratios=[2, 1][: len(panels)]
        )[0]
        for axis, parts in zip(axes, panels, strict=True):
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
    axis.grid(axis="x")
    axis.set_axisbelow(True)
    axis.tick_params(length=0)
    axis.spines["left"].set_visible(False)


def _ppl(held: Held) -> float | None:
    return held.ppl


def _useful(held: Held) -> float | None:
    return held.useful


_SCALE_PANELS = {"perplexity delta (%)": _ppl, "useful tokens": _useful}


def scale_svg(sweep: Sweep, title: str) -> str:
    """Perplexity delta (%) and useful tokens over the scale, log axis; what has no one scale is a level line.

    An open mark is right-censored: the text neither repeated itself nor ended within its length.
    """
    import matplotlib
    from matplotlib.figure import Figure

    found = [held for line in sweep.lines for _, held in line.points]
    panels = [(name, of) for name, of in _SCALE_PANELS.items() if any(of(held) is not None for held in found)]
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(8.2, 2.7 * len(panels)), layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for panel, (name, of) in zip(axes, panels, strict=True):
            for i, line in enumerate(sweep.all):
                _scale_line(panel, i, line, of)
            panel.set_xscale("log")
            panel.set_ylabel(name)
            panel.grid(axis="y")
            panel.tick_params(length=0, which="both")
            if of is _ppl:
                levels = [v for line in sweep.all for h in line.everything if (v := of(h)) is not None]
                panel.set_yscale("symlog", linthresh=1.0)
                panel.set_ylim(1.5 * min(0.0, *levels) - 0.5, 1.5 * max(0.0, *levels) + 0.5)
                panel.yaxis.set_major_formatter(lambda y, _: f"{y:,.6g}")
            else:
                panel.set_ylim(bottom=0)
        scales = sorted({scale for line in sweep.lines for scale, _ in line.points})
        axes[-1].set_xticks(scales, [f"{scale:g}" for scale in scales])
        axes[-1].set_xticks([], minor=True)
        axes[-1].set_xlabel("scale")
        return drawn(figure, "scale", title)


def _scale_line(panel: Axes, i: int, line: ScaleLine, of: Callable[[Held], float | None]) -> None:
    if line.held is not None:
        if (level := of(line.held)) is not None:
            panel.axhline(level, color=colour(i), linewidth=1.2, linestyle=(0, (5 - i % 3, 2)))
            at = 0.99 - 0.03 * (i % COLOURS)  # side by side, where levels are one line
            panel.plot(
                [at], [level], marker(i), color=colour(i), markersize=5, transform=panel.get_yaxis_transform()
            )
        return
    found = [(scale, value, held) for scale, held in line.points if (value := of(held)) is not None]
    panel.plot([s for s, _, _ in found], [v for _, v, _ in found], color=colour(i), linewidth=1.2)
    for scale, value, held in found:
        censored = of is _useful and held.steps is not None and value >= held.steps
        face = "none" if censored else colour(i)
        panel.plot([scale], [value], marker(i), markersize=5, color=colour(i), markerfacecolor=face)


def layers_svg(lines: Sequence[LayerLine], title: str) -> str:
    """KLD (nat) with one layer quantized, and what it takes off a quantized cache to keep that layer native, by layer."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = {"quantized alone (nat)": "alone", "gained by native (nat)": "gains"}
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(8.2, 4.6), layout="constrained")
        axes = figure.subplots(len(panels), 1, sharex=True)
        for panel, (name, of) in zip(axes, panels.items(), strict=True):
            for i, line in enumerate(lines):
                found = getattr(line, of)
                spans = [(n, *estimate.interval) for n, estimate in enumerate(found) if estimate.interval]
                panel.plot(*uprights(spans), color=colour(i), linewidth=0.8, alpha=0.6)
                panel.plot(
                    range(len(found)), [estimate.value for estimate in found], marker(i), color=colour(i), linestyle="-",
                    linewidth=0.8, markersize=4,
                )  # fmt: skip
            panel.set_ylabel(name)
            panel.grid(axis="y")
            panel.tick_params(length=0)
            # An interval of few texts may be many times its value: the values have the panel, and what is longer is cut.
            values = [estimate.value for line in lines for estimate in getattr(line, of)]
            low, high = min(0.0, *values), max(0.0, *values)
            panel.set_ylim(low - 0.15 * (high - low) * (low < 0), high + 0.15 * (high - low) or 1.0)
        axes[-1].set_xlabel("layer")
        axes[-1].locator_params(axis="x", integer=True)
        return drawn(figure, "layers", title)

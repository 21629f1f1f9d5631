"""The plots of times, bytes, static scales and layers; those of quality and of speed limits stand in files of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvbench.report.fmt import one_line
from kvbench.report.layers import LayerLine
from kvbench.report.series import PARTS, ByteBar, TimeSeries, shapes
from kvbench.report.svg import COLOURS, INK, RC, colour, drawn, marker
from kvbench.report.sweep import Held, ScaleLine, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def times_svg(series: Sequence[TimeSeries], key: str, name: str, title: str) -> str:
    """Milliseconds over context, one panel a batch, one mark a series; bars are 95% intervals, dots single requests.

    key: of the drawing's ids; name: of the axis.
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
        panels[0].set_ylim(bottom=0)
        panels[0].yaxis.set_major_formatter(lambda y, _: f"{y:,.6g}")
        figure.supylabel(name, fontsize=10)
        return drawn(figure, key, title)


def _times_panel(panel: Axes, series: Sequence[TimeSeries], batch: int, contexts: Sequence[int]) -> None:
    step = min(0.16, 0.6 / max(1, len(series)))  # side by side, or the intervals hide each other
    for i, line in enumerate(series):
        points = sorted((p for p in line.points if p.batch == batch), key=lambda p: p.context)
        at = [contexts.index(p.context) + (i - (len(series) - 1) / 2) * step for p in points]
        for x, p in zip(at, points, strict=True):
            panel.plot([x] * len(p.repeats), p.repeats, ".", color=colour(i), alpha=0.45, markersize=4)
            if p.low is not None and p.high is not None:
                panel.vlines(x, p.low, p.high, color=colour(i), linewidth=1.4)
        panel.plot(
            at, [p.value for p in points], color=colour(i), marker=marker(i), markersize=5, linewidth=1.2
        )
    panel.set_title(f"batch {batch}", loc="left")
    panel.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    panel.set_xlim(-0.5, len(contexts) - 0.5)
    panel.set_xlabel("context (tokens)")
    panel.grid(axis="y")
    panel.tick_params(length=0)


def bytes_svg(bars: Sequence[ByteBar], title: str) -> str:
    """KV bytes of each cell (MiB) with what is stored beside them, stacked by part; a tick is a 16-bit native cache of its shape."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(8.2, 0.7 + 0.3 * len(bars)), layout="constrained")
        panel = figure.subplots()
        at = range(len(bars))
        left = [0.0] * len(bars)
        for i, part in enumerate(PARTS):
            sizes = [(getattr(bar, part) or 0) / 2**20 for bar in bars]
            if any(sizes):
                panel.barh(at, sizes, height=0.62, left=left, color=colour(i))
            left = [start + size for start, size in zip(left, sizes, strict=True)]
        for y, bar in zip(at, bars, strict=True):
            if bar.native16 is not None:
                panel.vlines(bar.native16 / 2**20, y - 0.42, y + 0.42, color=INK, linewidth=1.6)
            end = max(left[y], (bar.native16 or 0) / 2**20)
            panel.annotate(
                f"{left[y]:,.4g}", (end, y), xytext=(5, 0), textcoords="offset points", va="center"
            )
        panel.set_yticks(at, [one_line(bar.name, 48) for bar in bars])
        panel.set_ylim(len(bars) - 0.4, -0.6)
        panel.margins(x=0.08)
        panel.set_xlabel("KV cache (MiB)")
        panel.grid(axis="x")
        panel.set_axisbelow(True)
        panel.tick_params(length=0)
        panel.spines["left"].set_visible(False)
        return drawn(figure, "bytes", title)


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
                for layer, estimate in enumerate(found):
                    if estimate.interval:
                        panel.vlines(layer, *estimate.interval, color=colour(i), linewidth=0.8, alpha=0.6)
                panel.plot(
                    range(len(found)), [estimate.value for estimate in found], marker(i), color=colour(i), linestyle="-",
                    linewidth=0.8, markersize=4,
                )  # fmt: skip
            panel.set_ylabel(name)
            panel.grid(axis="y")
            panel.tick_params(length=0)
            if of == "alone":
                panel.set_ylim(bottom=0)
        axes[-1].set_xlabel("layer")
        axes[-1].xaxis.get_major_locator().set_params(integer=True)
        return drawn(figure, "layers", title)

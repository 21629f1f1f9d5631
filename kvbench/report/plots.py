"""Plots as inline SVG text, drawn by matplotlib and coloured by the page.

Equal numbers give equal bytes: no dates, a fixed salt for ids, no state outside the call. Lines are drawn in marker
colours that are then replaced with CSS variables, so that one drawing serves light and dark pages.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvbench.report.fmt import one_line
from kvbench.report.layers import LayerLine
from kvbench.report.series import ByteBar, ItlSeries, shapes
from kvbench.report.sweep import Held, ScaleLine, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The legend on the page repeats these marks beside its text, so that colour is never the only difference.
MARKS: tuple[tuple[str, str], ...] = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"), ("P", "✚"))
COLOURS = 6  # --s0 .. --s5 in page.css

_INK, _GRID = "#020000", "#020001"
_RC: dict[str, Any] = {
    "svg.hashsalt": "kvbench",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 10.0,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.0,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
}


def mark(i: int) -> str:
    """The sign that stands for series `i` in the page's legend."""
    return MARKS[i % len(MARKS)][1]


def itl_svg(series: Sequence[ItlSeries], title: str) -> str:
    """ITL (ms) over context, one panel a batch, one mark a series; bars are 95% intervals, dots single requests."""
    import matplotlib
    from matplotlib.figure import Figure

    batches, contexts = shapes(series)
    columns = min(3, len(batches))
    rows = -(-len(batches) // columns)
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(8.2, 2.9 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flat
        for panel in panels[len(batches) :]:
            panel.set_visible(False)
        for panel, batch in zip(panels, batches, strict=False):
            _itl_panel(panel, series, batch, contexts)
        panels[0].set_ylim(bottom=0)
        figure.supylabel("ITL mean (ms)", fontsize=10)
        return _svg(figure, "itl", title)


def _itl_panel(panel: Axes, series: Sequence[ItlSeries], batch: int, contexts: Sequence[int]) -> None:
    step = min(0.16, 0.6 / max(1, len(series)))  # side by side, or the intervals hide each other
    for i, line in enumerate(series):
        points = sorted((p for p in line.points if p.batch == batch), key=lambda p: p.context)
        at = [contexts.index(p.context) + (i - (len(series) - 1) / 2) * step for p in points]
        colour = _series_colour(i)
        for x, p in zip(at, points, strict=True):
            panel.plot([x] * len(p.repeats), p.repeats, ".", color=colour, alpha=0.45, markersize=4)
            if p.low is not None and p.high is not None:
                panel.vlines(x, p.low, p.high, color=colour, linewidth=1.4)
        marker = MARKS[i % len(MARKS)][0]
        panel.plot(at, [p.value for p in points], color=colour, marker=marker, markersize=5, linewidth=1.2)
    panel.set_title(f"batch {batch}", loc="left")
    panel.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    panel.set_xlim(-0.5, len(contexts) - 0.5)
    panel.set_xlabel("context (tokens)")
    panel.grid(axis="y")
    panel.tick_params(length=0)


def bytes_svg(bars: Sequence[ByteBar], title: str) -> str:
    """KV bytes of each cell (MiB), payload and scales stacked, baselines above what is compared with them."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(8.2, 0.7 + 0.3 * len(bars)), layout="constrained")
        panel = figure.subplots()
        at = range(len(bars))
        payload = [bar.payload / 2**20 for bar in bars]
        scales = [bar.scales / 2**20 for bar in bars]
        panel.barh(at, payload, height=0.62, color=_series_colour(0))
        panel.barh(at, scales, height=0.62, left=payload, color=_series_colour(1))
        for y, bar in zip(at, bars, strict=True):
            total = (bar.payload + bar.scales) / 2**20
            panel.annotate(
                f"{total:,.4g}", (total, y), xytext=(4, 0), textcoords="offset points", va="center"
            )
        panel.set_yticks(at, [one_line(bar.name, 48) for bar in bars])
        panel.set_ylim(len(bars) - 0.4, -0.6)
        panel.margins(x=0.08)
        panel.set_xlabel("KV cache (MiB)")
        panel.grid(axis="x")
        panel.set_axisbelow(True)
        panel.tick_params(length=0)
        panel.spines["left"].set_visible(False)
        return _svg(figure, "bytes", title)


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
    with matplotlib.rc_context(_RC):
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
        return _svg(figure, "scale", title)


def _scale_line(panel: Axes, i: int, line: ScaleLine, of: Callable[[Held], float | None]) -> None:
    colour, marker = _series_colour(i), MARKS[i % len(MARKS)][0]
    if line.held is not None:
        if (level := of(line.held)) is not None:
            panel.axhline(level, color=colour, linewidth=1.2, linestyle=(0, (5 - i % 3, 2)))
            at = 0.99 - 0.03 * (i % COLOURS)  # side by side, where levels are one line
            panel.plot(
                [at], [level], marker, color=colour, markersize=5, transform=panel.get_yaxis_transform()
            )
        return
    found = [(scale, value, held) for scale, held in line.points if (value := of(held)) is not None]
    panel.plot([s for s, _, _ in found], [v for _, v, _ in found], color=colour, linewidth=1.2)
    for scale, value, held in found:
        censored = of is _useful and held.steps is not None and value >= held.steps
        face = "none" if censored else colour
        panel.plot([scale], [value], marker, markersize=5, color=colour, markerfacecolor=face)


def layers_svg(lines: Sequence[LayerLine], title: str) -> str:
    """KLD (nat) with one layer quantized, and what it takes off a quantized cache to keep that layer native, by layer."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = {"quantized alone (nat)": "alone", "gained by native (nat)": "gains"}
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(8.2, 4.6), layout="constrained")
        axes = figure.subplots(len(panels), 1, sharex=True)
        for panel, (name, of) in zip(axes, panels.items(), strict=True):
            for i, line in enumerate(lines):
                values = getattr(line, of)
                panel.plot(
                    range(len(values)), values, MARKS[i % len(MARKS)][0], color=_series_colour(i), linestyle="-", linewidth=0.8,
                    markersize=4,
                )  # fmt: skip
            panel.set_ylabel(name)
            panel.grid(axis="y")
            panel.tick_params(length=0)
            if of == "alone":
                panel.set_ylim(bottom=0)
        axes[-1].set_xlabel("layer")
        axes[-1].xaxis.get_major_locator().set_params(integer=True)
        return _svg(figure, "layers", title)


def _series_colour(i: int) -> str:
    return f"#0100{i % COLOURS:02x}"


def _svg(figure: Figure, key: str, title: str) -> str:
    """The figure as an `<svg>` element for use inside HTML: no prolog, ids of its own, CSS variables as colours."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # Only widths are estimated from matplotlib's font; the page's font draws the text, and has more letters.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata | {"Title": title})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(
        r"\s*<(metadata|style)\b.*?</\1>", "", text, flags=re.S
    )  # a style here would reach the whole page
    text = re.sub(r'\b(id|xlink:href)="(#?)', rf'\1="\g<2>{key}-', text).replace("url(#", f"url(#{key}-")
    text = re.sub(r"#0100([0-9a-f]{2})", lambda m: f"var(--s{int(m[1], 16)})", text)
    text = text.replace(_INK, "var(--ink)").replace(_GRID, "var(--rule)")
    return text.replace("<svg", '<svg role="img"', 1)

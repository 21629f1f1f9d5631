"""The plots of quality: static scales, layers, KLD percentiles, agreement by step, health by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from kvbench.render.numbers import one_line
from kvbench.render.svg import COLOURS, colour, drawn, marker, uprights, xy
from kvbench.report.figures.agreement import AgreementLine
from kvbench.report.figures.canvas import canvas, grid_lines, log_axis_of, panels, rows_for
from kvbench.report.figures.divergence import LEVELS, KldLine
from kvbench.report.figures.health import HealthLine
from kvbench.report.figures.sensitivity import LayerLine
from kvbench.report.figures.sweep import ScaleLine, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHED = (0, (4, 2))

_SCALE_PANELS = {"perplexity delta (%)": "ppl", "useful tokens": "useful"}


def scale_svg(sweep: Sweep, title: str) -> str:
    """Perplexity delta (%) and useful tokens over the scale, log axis. References are horizontal lines.

    An open marker is right-censored: the text neither repeated itself nor ended within its length.
    """
    found = [effect for line in sweep.lines for _, effect in line.points]
    shown = {n: of for n, of in _SCALE_PANELS.items() if any(getattr(e, of) is not None for e in found)}
    with canvas(2.7 * len(shown)) as figure:
        axes = panels(figure, len(shown), 1, sharex=True)
        for panel, (name, of) in zip(axes, shown.items(), strict=True):
            for i, line in enumerate(sweep.all):
                _scale_line(panel, i, line, of)
            panel.set_xscale("log")
            panel.set_ylabel(name)
            grid_lines(panel, "y", which="both")
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
        return drawn(figure, "scale", title)


def _scale_line(panel: Axes, i: int, line: ScaleLine, of: str) -> None:
    paint, sign = colour(i), marker(i)
    if line.level is not None:
        if (level := getattr(line.level, of)) is not None:
            panel.axhline(level, color=paint, linewidth=1.2, linestyle=(0, (5 - i % 3, 2)))
            at = 0.99 - 0.03 * (i % COLOURS)  # shifted, so that equal levels stay visible
            panel.plot([at], [level], sign, color=paint, markersize=5, transform=panel.get_yaxis_transform())
        return
    found = [(scale, effect) for scale, effect in line.points if getattr(effect, of) is not None]
    panel.plot(*xy([(scale, getattr(effect, of)) for scale, effect in found]), color=paint, linewidth=1.2)
    for scale, effect in found:
        face = "none" if of == "useful" and effect.censored else paint
        panel.plot([scale], [getattr(effect, of)], sign, markersize=5, color=paint, markerfacecolor=face)


def layers_svg(lines: Sequence[LayerLine], title: str) -> str:
    """KLD (nat) by layer: with only that layer quantized, and saved by keeping it native."""
    with canvas(4.6) as figure:
        axes = panels(figure, 2, 1, sharex=True)
        names = {"alone": "quantized alone (nat)", "gains": "saved by native (nat)"}
        for panel, (of, name) in zip(axes, names.items(), strict=True):
            values = [0.0]
            for i, line in enumerate(lines):
                found = getattr(line, of)
                spans = [(n, *estimate.interval) for n, estimate in enumerate(found) if estimate.interval]
                panel.plot(*uprights(spans), color=colour(i), linewidth=0.8, alpha=0.6)
                points = [(n, estimate.value) for n, estimate in enumerate(found)]
                panel.plot(
                    *xy(points), marker(i), color=colour(i), linestyle="-", linewidth=0.8, markersize=4
                )
                values += [value for _, value in points]
            panel.set_ylabel(name)
            grid_lines(panel, "y")
            # The values set the range: with few texts an interval may be many times its value.
            low, high = min(values), max(values)
            panel.set_ylim(low - 0.15 * (high - low) * (low < 0), high + 0.15 * (high - low) or 1.0)
        axes[-1].set_xlabel("layer")
        axes[-1].locator_params(axis="x", integer=True)
        return drawn(figure, "layers", title)


def kld_svg(lines: Sequence[KldLine], title: str) -> str:
    """KLD (nat) of each cell on a log axis, one marker per percentile, with 95% intervals. Omits zeros."""
    with canvas(0.8 + 0.42 * len(lines)) as figure:
        panel = figure.subplots()
        ends: list[float | None] = []
        for y, line in enumerate(lines):
            for i, metric in enumerate(LEVELS):
                row = line.rows.get(metric)
                if row is None or row.value is None:
                    continue
                ends += [row.low, row.value, row.high]
                if not row.value > 0 or not isfinite(row.value):
                    continue
                if row.low is not None and row.high is not None and row.high > 0:
                    # An interval that starts at 0 is drawn to the edge.
                    panel.hlines(y, max(row.low, 1e-12), row.high, color=colour(i), linewidth=1.4)
                panel.plot([row.value], [y], marker(i), color=colour(i), markersize=6)
        several = len({line.variant for line in lines}) > 1
        names = [one_line(f"{line.name} · {line.variant}" if several else line.name, 56) for line in lines]
        panel.set_yticks(range(len(lines)), names)
        panel.set_ylim(len(lines) - 0.5, -0.5)
        log_axis_of(panel, "x", ends)
        panel.set_xlabel("KLD (nat)")
        panel.set_axisbelow(True)
        grid_lines(panel, "x", which="both")
        panel.spines["left"].set_visible(False)
        return drawn(figure, "kld", title)


def agreement_svg(lines: Sequence[AgreementLine], title: str) -> str:
    """The share of agreement by step. A large marker is the first divergence, open unless it is real."""
    with canvas(3.2) as figure:
        panel = figure.subplots()
        for i, line in enumerate(lines):
            paint, sign, under = colour(i), marker(i), min(4, len(lines) - 1 - i)
            width = 1.2 + 0.5 * under  # wider where later lines may cover it
            style = _DASHED if line.again else "-"
            panel.plot(*xy(line.points), color=paint, linewidth=width, linestyle=style)
            panel.plot(*xy(line.points[-1:]), sign, color=paint, markersize=5)
            if line.first is not None and (share := line.at_first) is not None:
                face, size = paint if line.real else "none", 8 + 2.5 * under
                panel.plot([line.first], [share], sign, color=paint, markersize=size, markerfacecolor=face)
        lowest = min(0.99, *(share for line in lines for _, share in line.points))
        space = 0.05 * (1 - lowest)
        panel.set_ylim(lowest - space, 1 + space)
        panel.set_yticks([tick for tick in panel.get_yticks() if lowest - space <= tick <= 1 + 1e-9])
        panel.set_xlim(-0.02 * max(line.steps for line in lines), None)
        panel.set_xlabel("step")
        panel.set_ylabel("share of agreement so far")
        panel.yaxis.set_major_formatter(lambda y, _: f"{y:.6g}")
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        grid_lines(panel, "y")
        return drawn(figure, "agreement", title)


Side = Mapping[str, Any]


def _share(key: str) -> Callable[[Side], float | None]:
    return lambda side: side[key] / side["elements"] if side["elements"] else None


_MOST_MARKED = 120  # layers of all lines; with more, the markers would merge into a band

# Title of a panel, its value of a side, and whether its axis is logarithmic. Panels of zeros are not drawn.
HEALTH_PANELS: tuple[tuple[str, Callable[[Side], float | None], bool], ...] = (
    ("amax", lambda side: side["amax"], True),
    ("round-trip error (share of norm)", lambda side: side["error"], True),
    ("clipped (share)", _share("clipped"), False),
    ("flushed to 0 (share)", _share("flushed"), False),
    ("codes used", lambda side: side["codes_used"], False),
)


def health_svg(lines: Sequence[HealthLine], title: str) -> str:
    """One panel per quantity of K (solid, filled) and V (dashed, open) by layer; the last is the scale
    range.
    """
    sides = [side for line in lines for side in line.sides.values()]
    shown = [panel for panel in HEALTH_PANELS if any(map(panel[1], sides))]
    scaled = any(side["scale_max"] for side in sides)
    count = len(shown) + scaled
    marked = sum(len(line.layers) for line in lines) <= _MOST_MARKED
    with canvas(0.4 + 1.9 * rows_for(count, 2)) as figure:
        axes = panels(figure, count, 2, sharex=True)
        for axis, (name, of, log) in zip(axes, shown, strict=False):
            for i, line in enumerate(lines):
                _sides(axis, i, line, of, marked)
            _health_axis(axis, name, map(of, sides) if log else ())
        if scaled:
            for i, line in enumerate(lines):
                _ranges(axes[-1], i, line, 0.3 * (i - (len(lines) - 1) / 2) / len(lines))
            ends = (side[key] for side in sides for key in ("scale_min", "scale_max"))
            _health_axis(axes[-1], "scale, smallest to largest", ends)
        return drawn(figure, "health", title)


def _sides(axis: Axes, i: int, line: HealthLine, of: Callable[[Side], float | None], marked: bool) -> None:
    sign = marker(i) if marked else "none"
    for side, style, face in (("k", "-", colour(i)), ("v", _DASHED, "none")):
        own = [(n, of(line.sides[n, side])) for n in line.layers if (n, side) in line.sides]
        x, y = xy([(n, value) for n, value in own if value is not None])
        looks: dict[str, Any] = {"marker": sign, "markersize": 3.5, "markerfacecolor": face}
        axis.plot(x, y, linestyle=style, color=colour(i), linewidth=0.9, **looks)


def _ranges(axis: Axes, i: int, line: HealthLine, shift: float) -> None:
    for side, own, width in (("k", shift - 0.2, 2.2), ("v", shift + 0.2, 1.0)):
        scaled = [(n, s) for n in line.layers if (s := line.sides.get((n, side))) and s["scale_max"]]
        spans = [(n + own, found["scale_min"], found["scale_max"]) for n, found in scaled]
        axis.plot(*uprights(spans), color=colour(i), linewidth=width)
        # A range of no height would be invisible.
        level = [(x, low) for x, low, high in spans if low == high]
        axis.plot(*xy(level), "_", color=colour(i), markersize=4, markeredgewidth=width)


def _health_axis(axis: Axes, name: str, log: Iterable[float | None]) -> None:
    """log: the values of a logarithmic axis; empty for one that starts at 0."""
    axis.set_title(name, loc="left")
    if not log_axis_of(axis, "y", log):
        axis.set_ylim(bottom=0)
    axis.set_xlabel("layer")
    axis.locator_params(axis="x", integer=True)
    grid_lines(axis, "y", labelbottom=True)

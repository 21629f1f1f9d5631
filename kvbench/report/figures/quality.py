"""The plots of quality: KLD percentiles, agreement over the steps, and the health of each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from kvbench.render.numbers import one_line
from kvbench.render.svg import RC, colour, drawn, log_axis, marker, uprights, xy
from kvbench.report.figures.agreement import AgreementLine
from kvbench.report.figures.divergence import LEVELS, KldLine
from kvbench.report.figures.health import HealthLine

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def kld_svg(lines: Sequence[KldLine], title: str) -> str:
    """KLD (nat) of each cell on a log axis, one sign a percentile; bars are 95% intervals. What is not above 0 is not on the axis."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(8.2, 0.8 + 0.42 * len(lines)), layout="constrained")
        panel = figure.subplots()
        for y, line in enumerate(lines):
            for i, metric in enumerate(LEVELS):
                row = line.rows.get(metric)
                if row is None or row.value is None or not row.value > 0 or not isfinite(row.value):
                    continue
                if row.low is not None and row.high is not None and row.high > 0:
                    # An interval that begins at 0 goes to the edge.
                    panel.hlines(y, max(row.low, 1e-12), row.high, color=colour(i), linewidth=1.4)
                panel.plot([row.value], [y], marker(i), color=colour(i), markersize=6)
        several = len({line.variant for line in lines}) > 1
        names = [one_line(f"{line.name} · {line.variant}" if several else line.name, 56) for line in lines]
        panel.set_yticks(range(len(lines)), names)
        panel.set_ylim(len(lines) - 0.5, -0.5)
        ends = [
            x
            for line in lines
            for row in line.rows.values()
            for x in (row.low, row.value, row.high)
            if x is not None and 0 < x < inf
        ]
        if ends:
            log_axis(panel, "x", min(ends), max(ends))
        panel.set_xlabel("KLD (nat)")
        panel.grid(axis="x")
        panel.set_axisbelow(True)
        panel.tick_params(length=0, which="both")
        panel.spines["left"].set_visible(False)
        return drawn(figure, "kld", title)


def agreement_svg(lines: Sequence[AgreementLine], title: str) -> str:
    """The share of the steps so far that agree, by step; a large sign is the first divergence, open where it is no real one."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(8.2, 3.2), layout="constrained")
        panel = figure.subplots()
        for i, line in enumerate(lines):
            under = min(4, len(lines) - 1 - i)  # broader where later lines may lie on it
            panel.plot(
                [step for step, _ in line.points], [share for _, share in line.points], color=colour(i), linewidth=1.2 + 0.5 * under,
                linestyle=(0, (4, 2)) if line.again else "-",
            )  # fmt: skip
            last = line.points[-1]
            panel.plot([last[0]], [last[1]], marker(i), color=colour(i), markersize=5)
            if line.first is not None and (share := line.at_first) is not None:
                face = colour(i) if line.real else "none"
                panel.plot(
                    [line.first],
                    [share],
                    marker(i),
                    color=colour(i),
                    markersize=8 + 2.5 * under,
                    markerfacecolor=face,
                )
        lowest = min(0.99, *(share for line in lines for _, share in line.points))
        panel.set_ylim(lowest - 0.05 * (1 - lowest), 1 + 0.05 * (1 - lowest))
        panel.set_yticks(
            [tick for tick in panel.get_yticks() if lowest - 0.05 * (1 - lowest) <= tick <= 1 + 1e-9]
        )
        panel.set_xlim(-0.02 * max(line.steps for line in lines), None)
        panel.set_xlabel("step")
        panel.set_ylabel("share that agrees so far")
        panel.yaxis.set_major_formatter(lambda y, _: f"{y:.6g}")
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        panel.grid(axis="y")
        panel.tick_params(length=0)
        return drawn(figure, "agreement", title)


Side = Mapping[str, Any]


def _share(key: str) -> Callable[[Side], float | None]:
    return lambda side: side[key] / side["elements"] if side["elements"] else None


# Layers of all lines up to which each has a sign; more of them would be a band.
_MOST_MARKED = 120

# Heading of a panel, what it shows of a side, and whether on a log axis. A panel of zeros alone is not drawn.
HEALTH_PANELS: tuple[tuple[str, Callable[[Side], float | None], bool], ...] = (
    ("amax", lambda side: side["amax"], True),
    ("round-trip error (share of norm)", lambda side: side["error"], True),
    ("clipped (share)", _share("clipped"), False),
    ("flushed to 0 (share)", _share("flushed"), False),
    ("codes used", lambda side: side["codes_used"], False),
)


def health_svg(lines: Sequence[HealthLine], title: str) -> str:
    """K (full line, filled sign) and V (dashed, open) of each layer, one panel a quantity; the last is the range of the scales."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = [
        panel
        for panel in HEALTH_PANELS
        if any(panel[1](side) for line in lines for side in line.sides.values())
    ]
    scaled = any(side["scale_max"] for line in lines for side in line.sides.values())
    count = len(panels) + scaled
    marked = sum(len(line.layers) for line in lines) <= _MOST_MARKED
    rows = -(-count // 2)
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(8.2, 0.4 + 1.9 * rows), layout="constrained")
        axes = figure.subplots(rows, min(2, count), squeeze=False, sharex=True).flat
        for axis in axes[count:]:
            axis.set_visible(False)
        for axis, (name, of, log) in zip(axes, panels, strict=False):
            for i, line in enumerate(lines):
                _sides(axis, i, line, of, marked)
            _health_axis(
                axis,
                name,
                [x for line in lines for side in line.sides.values() if (x := of(side))] if log else [],
            )
        if scaled:
            for i, line in enumerate(lines):
                _ranges(axes[len(panels)], i, line, 0.3 * (i - (len(lines) - 1) / 2) / len(lines))
            ends = [
                x
                for line in lines
                for side in line.sides.values()
                for x in (side["scale_min"], side["scale_max"])
                if x
            ]
            _health_axis(axes[len(panels)], "scale, smallest to largest", ends)
        return drawn(figure, "health", title)


def _sides(axis: Axes, i: int, line: HealthLine, of: Callable[[Side], float | None], marked: bool) -> None:
    for side, style, face in (("k", "-", colour(i)), ("v", (0, (4, 2)), "none")):
        found = [
            (n, value)
            for n in line.layers
            if (n, side) in line.sides and (value := of(line.sides[n, side])) is not None
        ]
        sign = marker(i) if marked else "none"
        axis.plot(
            [n for n, _ in found], [value for _, value in found], marker=sign, linestyle=style, color=colour(i), linewidth=0.9,
            markersize=3.5, markerfacecolor=face,
        )  # fmt: skip


def _ranges(axis: Axes, i: int, line: HealthLine, aside: float) -> None:
    for side, shift, width in (("k", aside - 0.2, 2.2), ("v", aside + 0.2, 1.0)):
        scaled = [
            (n, found) for n in line.layers if (found := line.sides.get((n, side))) and found["scale_max"]
        ]
        spans = [(n + shift, found["scale_min"], found["scale_max"]) for n, found in scaled]
        axis.plot(*uprights(spans), color=colour(i), linewidth=width)
        # One scale for all: a range of no height would not be seen.
        level = [(x, low) for x, low, high in spans if low == high]
        axis.plot(*xy(level), "_", color=colour(i), markersize=4, markeredgewidth=width)


def _health_axis(axis: Axes, name: str, log: Sequence[float]) -> None:
    """log: the numbers on a log axis, empty for one that begins at 0."""
    axis.set_title(name, loc="left")
    if finite := [x for x in log if isfinite(x)]:
        log_axis(axis, "y", min(finite), max(finite))
    else:
        axis.set_ylim(bottom=0)
    axis.set_xlabel("layer")
    axis.locator_params(axis="x", integer=True)
    axis.grid(axis="y")
    axis.tick_params(length=0, labelbottom=True)

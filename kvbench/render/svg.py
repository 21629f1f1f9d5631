"""What every plot shares: inline SVG text, drawn by matplotlib and coloured by the page.

Equal numbers give equal bytes: no dates, a fixed salt for ids, no state outside the call. Lines are drawn in
marker colours that are then replaced with CSS variables, so that one drawing serves light and dark pages.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The legend on the page repeats these marks beside its text, so that colour is never the only difference.
MARKS: tuple[tuple[str, str], ...] = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"), ("P", "✚"))
COLOURS = 6  # --s0 .. --s5 in page.css

INK, GRID = "#020000", "#020001"
RC: dict[str, Any] = {
    "svg.hashsalt": "kvbench",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 10.0,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.0,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
}


def mark(i: int) -> str:
    """The sign that stands for series `i` in the page's legend."""
    return _sign(i)[1]


def marker(i: int) -> str:
    """matplotlib's name of the same sign."""
    return _sign(i)[0]


def _sign(i: int) -> tuple[str, str]:
    """Past the last colour they begin again with the next sign, so that no two of 36 series look alike."""
    return MARKS[(i + i // COLOURS) % len(MARKS)]


def colour(i: int) -> str:
    return f"#0100{i % COLOURS:02x}"


def xy(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """x and y of points."""
    return [x for x, _ in points], [y for _, y in points]


def uprights(spans: Sequence[tuple[float, float, float]]) -> tuple[list[float], list[float]]:
    """Upright bars (x, low, high) as one line with breaks: a tenth of the text of as many lines."""
    return xy([point for x, low, high in spans for point in ((x, low), (x, high), (math.nan, math.nan))])


def log_ticks(low: float, high: float) -> list[float]:
    """At least three round numbers from low to high: powers of ten, also with 2 and 5, or even steps."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 2, 5)):
        found = [float(f"{digit}e{power}") for power in powers for digit in digits]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) >= 3:
            return found
    power = math.floor(math.log10(high - low))
    step = next(step for m in (5, 2, 1, 0.5, 0.2) if (high - low) / (step := m * 10.0**power) >= 4)
    return [float(f"{i * step:.12g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_axis(panel: Axes, which: Literal["x", "y"], values: Iterable[float | None]) -> bool:
    """Make an axis logarithmic over the positive finite values, with ticks that are read without powers.

    Returns False if there are no such values.
    """
    shown = [value for value in values if value is not None and 0 < value < math.inf]
    if shown:
        low, high = min(shown) / 1.25, max(shown) * 1.25
        panel.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
        axis = panel.xaxis if which == "x" else panel.yaxis
        axis.set_ticks(log_ticks(low, high))
        axis.set_ticks([], minor=True)
        axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    return bool(shown)


@contextmanager
def canvas(height: float) -> Iterator[Figure]:
    """An empty figure of the page's width; the page's style applies inside the block. height: inches."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(RC):
        yield Figure(figsize=(8.2, height), layout="constrained")


def panels(figure: Figure, count: int, columns: int, share: str) -> list[Axes]:
    """`count` panels, at most `columns` in a row. share: the axes that all have in common: x, y or xy."""
    rows = math.ceil(count / columns)
    grid = figure.subplots(rows, min(columns, count), squeeze=False, sharex="x" in share, sharey="y" in share)
    axes: list[Axes] = list(grid.flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    return axes[:count]


def grid_lines(panel: Axes, axis: Literal["both", "x", "y"], **ticks: Any) -> None:
    """Draw grid lines across an axis and hide the tick marks. ticks: more options of `tick_params`."""
    panel.grid(axis=axis)
    panel.tick_params(length=0, **ticks)


def drawn(figure: Figure, key: str, title: str) -> str:
    """The figure as an `<svg>` element for HTML: no prolog, ids of its own, CSS variables as colours."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # matplotlib's font only gives widths; the page's font, which has more letters, draws the text.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata | {"Title": title})
    text = buffer.getvalue()
    # A style here would reach the whole page.
    text = re.sub(r"\s*<(metadata|style)\b.*?</\1>", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r'\b(id|xlink:href)="(#?)', rf'\1="\g<2>{key}-', text).replace("url(#", f"url(#{key}-")
    text = re.sub(r"#0100([0-9a-f]{2})", lambda m: f"var(--s{int(m[1], 16)})", text)
    text = text.replace(INK, "var(--ink)").replace(GRID, "var(--rule)")
    return text.replace("<svg", '<svg role="img"', 1)

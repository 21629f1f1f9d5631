"""What all plots share: figure size and style, rows of panels, grid lines and logarithmic axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Literal

from kvbench.render.svg import RC, log_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 8.2  # inches


@contextmanager
def canvas(height: float) -> Iterator[Figure]:
    """An empty figure of the page's width; the page's style applies inside the block. height: inches."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(RC):
        yield Figure(figsize=(_WIDTH, height), layout="constrained")


def rows_for(count: int, columns: int) -> int:
    """The number of rows that `count` panels fill."""
    return ceil(count / columns)


def panels(
    figure: Figure, count: int, columns: int, sharex: bool = False, sharey: bool = False
) -> list[Axes]:
    """`count` panels, at most `columns` in a row."""
    rows = rows_for(count, columns)
    grid = figure.subplots(rows, min(columns, count), squeeze=False, sharex=sharex, sharey=sharey)
    axes: list[Axes] = list(grid.flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    return axes[:count]


def grid_lines(panel: Axes, axis: Literal["both", "x", "y"], **ticks: Any) -> None:
    """Draw grid lines across an axis and hide the tick marks. ticks: more options of `tick_params`."""
    panel.grid(axis=axis)
    panel.tick_params(length=0, **ticks)


def log_axis_of(panel: Axes, which: Literal["x", "y"], values: Iterable[float | None]) -> bool:
    """Make an axis logarithmic over the positive finite values. Returns False if there are none."""
    shown = [value for value in values if value is not None and 0 < value < inf]
    if shown:
        log_axis(panel, which, min(shown), max(shown))
    return bool(shown)

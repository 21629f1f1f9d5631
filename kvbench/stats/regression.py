"""Lines through latencies: ITL = slope * context + intercept, where two of them cross, and how their slopes compare. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.stats.intervals import CONFIDENCE, Estimate, Interval, exp

CONTEXTS = 3  # a line through two points fits whatever they are

# Less than this share of what the bytes give is more than scatter of a slope.
SLACK = 0.95


@dataclass(frozen=True)
class Line:
    """y = slope * x + intercept, by least squares.

    error, intercept_error: standard errors; points: (x, y) pairs behind it; middle: their mean x.
    """

    slope: float
    intercept: float
    error: float
    intercept_error: float
    points: int
    middle: float = 0.0

    @property
    def slope_interval(self) -> Interval:
        return _interval(self.slope, self.error, self.points - 2)

    @property
    def intercept_interval(self) -> Interval:
        return _interval(self.intercept, self.intercept_error, self.points - 2)

    def at(self, x: float) -> float:
        return self.slope * x + self.intercept


def fit(xs: Sequence[float], ys: Sequence[float]) -> Line | None:
    """The line of least squares; None where there are fewer than CONTEXTS different xs or a y is not finite."""
    if len(set(xs)) < CONTEXTS or not all(map(math.isfinite, ys)):
        return None
    n = len(xs)
    x_mean, y_mean = math.fsum(xs) / n, math.fsum(ys) / n
    spread = math.fsum((x - x_mean) ** 2 for x in xs)
    slope = math.fsum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread
    intercept = y_mean - slope * x_mean
    rest = math.fsum((y - slope * x - intercept) ** 2 for x, y in zip(xs, ys, strict=True))
    scatter = math.sqrt(rest / (n - 2))
    return Line(
        slope,
        intercept,
        scatter / math.sqrt(spread),
        scatter * math.sqrt(1 / n + x_mean**2 / spread),
        n,
        x_mean,
    )


def break_even(line: Line, baseline: Line) -> tuple[float | None, Interval | None, str]:
    """(the x from which on `line` lies below `baseline`, its interval, what to know of it).

    0 where it lies below from the start. None, with the reason, where there is no such x: the lines are parallel as far as
    their scatter shows, or `line` is the steeper one, so that any advantage ends at the crossing instead of beginning there.
    The interval is Fieller's: every x at which the lines do not differ beyond their scatter.
    """
    gain, head_start = baseline.slope - line.slope, line.intercept - baseline.intercept
    t = _t(min(line.points, baseline.points) - 2)
    noise = t * math.hypot(line.error, baseline.error)
    if abs(gain) <= max(noise, 1e-9 * max(abs(baseline.slope), abs(line.slope))):
        return (
            None,
            None,
            "the lines are parallel as far as their scatter shows: no context is known to change which is faster",
        )
    crossing = head_start / gain
    if gain < 0:
        until = f"only up to a context of {crossing:,.0f} tokens" if crossing > 0 else "at no context"
        return None, None, f"it gains {until}: its ITL grows faster with the context than native's"
    # (head_start - gain x)^2 = t^2 var(x), and var(x) = sum of intercept_error^2 - 2 error^2 middle x + error^2 x^2
    both = (line, baseline)
    a = gain**2 - t**2 * math.fsum(one.error**2 for one in both)
    b = head_start * gain - t**2 * math.fsum(one.error**2 * one.middle for one in both)
    c = head_start**2 - t**2 * math.fsum(one.intercept_error**2 for one in both)
    root = math.sqrt(max(0.0, b * b - a * c))
    interval = max(0.0, (b - root) / a), max(0.0, (b + root) / a)
    return (
        max(0.0, crossing),
        interval,
        "" if crossing > 0 else "it is faster from the first token of context on",
    )


def slope_ratio(line: Line, baseline: Line) -> Estimate | None:
    """line.slope / baseline.slope with a t-interval of its logarithm; None where a slope is not above 0.

    The degrees of freedom are those of the line with fewer points, which makes the interval no narrower than it is.
    """
    if line.slope <= 0 or baseline.slope <= 0:
        return None
    ratio = line.slope / baseline.slope
    error = math.hypot(line.error / line.slope, baseline.error / baseline.slope)
    low, high = _interval(math.log(ratio), error, min(line.points, baseline.points) - 2)
    return Estimate(ratio, (exp(low), exp(high)), min(line.points, baseline.points))


def _interval(value: float, error: float, degrees: int) -> Interval:
    half = _t(degrees) * error
    return value - half, value + half


def _t(degrees: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))

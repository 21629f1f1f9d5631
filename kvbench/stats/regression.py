"""Least-squares lines of latency over context: fit, break-even of two lines, ratio of their slopes. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.stats.intervals import Estimate, Interval, exp, t_quantile

CONTEXTS = 3  # a line through two points always fits exactly
SLACK = 0.95  # a slope ratio below this share of the byte ratio is more than scatter


@dataclass(frozen=True)
class Line:
    """y = slope * x + intercept by least squares. error, intercept_error: standard errors; points: number of
    (x, y) pairs; middle: their mean x."""

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
    """The least-squares line; None for fewer than CONTEXTS distinct xs or a y that is not finite."""
    if len(set(xs)) < CONTEXTS or not all(map(math.isfinite, ys)):
        return None
    n = len(xs)
    x_mean, y_mean = math.fsum(xs) / n, math.fsum(ys) / n
    spread = math.fsum((x - x_mean) ** 2 for x in xs)
    slope = math.fsum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread
    intercept = y_mean - slope * x_mean
    rest = math.fsum((y - slope * x - intercept) ** 2 for x, y in zip(xs, ys, strict=True))
    scatter = math.sqrt(rest / (n - 2))
    errors = scatter / math.sqrt(spread), scatter * math.sqrt(1 / n + x_mean**2 / spread)
    return Line(slope, intercept, *errors, n, x_mean)


def break_even(line: Line, baseline: Line) -> tuple[float | None, Interval | None, str]:
    """(the x from which `line` lies below `baseline`, its interval, a note); None with the reason where the
    lines are parallel within their scatter or `line` is steeper. The interval is Fieller's: every x at which
    the lines do not differ beyond their scatter."""
    gain, head_start = baseline.slope - line.slope, line.intercept - baseline.intercept
    t = t_quantile(min(line.points, baseline.points) - 2)
    noise = t * math.hypot(line.error, baseline.error)
    if abs(gain) <= max(noise, 1e-9 * max(abs(baseline.slope), abs(line.slope))):
        return None, None, "the lines are parallel within their scatter: no context changes which is faster"
    crossing = head_start / gain
    if gain < 0:
        until = f"only up to a context of {crossing:,.0f} tokens" if crossing > 0 else "at no context"
        return None, None, f"faster {until}: its ITL grows faster with the context than native's"
    # (head_start - gain x)^2 = t^2 var(x); var(x) sums intercept_error^2 - 2 error^2 middle x + error^2 x^2
    both = (line, baseline)
    a = gain**2 - t**2 * math.fsum(one.error**2 for one in both)
    b = head_start * gain - t**2 * math.fsum(one.error**2 * one.middle for one in both)
    c = head_start**2 - t**2 * math.fsum(one.intercept_error**2 for one in both)
    root = math.sqrt(max(0.0, b * b - a * c))
    interval = max(0.0, (b - root) / a), max(0.0, (b + root) / a)
    return max(0.0, crossing), interval, "" if crossing > 0 else "faster from the first token of context on"


def slope_ratio(line: Line, baseline: Line) -> Estimate | None:
    """line.slope / baseline.slope with a t-interval of its logarithm, with the degrees of freedom of the line
    with fewer points; None where a slope is not above 0."""
    if line.slope <= 0 or baseline.slope <= 0:
        return None
    ratio = line.slope / baseline.slope
    error = math.hypot(line.error / line.slope, baseline.error / baseline.slope)
    low, high = _interval(math.log(ratio), error, min(line.points, baseline.points) - 2)
    return Estimate(ratio, (exp(low), exp(high)), min(line.points, baseline.points))


def _interval(value: float, error: float, degrees: int) -> Interval:
    half = t_quantile(degrees) * error
    return value - half, value + half

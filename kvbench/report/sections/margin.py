"""How close a value is to its limit, on one scale for all metrics. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvbench.metrics.collect import METRICS, Row


@dataclass(frozen=True)
class Margin:
    """The distance of a value to its limit.

    used: the share of the distance from the best possible value to the limit that the interval already
    covers: 0 at the best value, 1 at the limit, more beyond it. bound: the end of the 95% interval next to
    the limit, or the value where there is no interval. limit: the end of the allowed interval that counts.
    best: the best possible value, None for a metric without one.
    """

    used: float
    bound: float
    limit: float
    best: float | None

    @property
    def distance(self) -> float:
        return abs(self.limit - self.bound)


# Errors as a share of the rounding bound: they are close to 1 wherever rounding is used in full.
_BOUNDS = frozenset({"health_bound_share", "parity_bound_share", "gemm_bound_share"})


def margin(row: Row, bounds: tuple[float, float] | None) -> Margin | None:
    """The margin of a row to its limit; None without a value or a limit, or with an exact limit."""
    if row.value is None or not math.isfinite(row.value) or row.metric in _BOUNDS:
        return None
    if bounds is None or bounds[0] == bounds[1]:
        return None
    low = row.value if row.low is None else row.low
    high = row.value if row.high is None else row.high
    sides = [_side(row, end, bound, bounds) for end, bound in zip(bounds, (low, high), strict=True)]
    return max((side for side in sides if side), key=lambda side: side.used, default=None)


def _side(row: Row, limit: float, bound: float, bounds: tuple[float, float]) -> Margin | None:
    if not (math.isfinite(limit) and math.isfinite(bound)):
        return None
    best = _best(row, bounds, upper=limit == bounds[1])
    if best is None:  # a rate has no largest value, so the ratio of limit and value counts
        return Margin(limit / bound, bound, limit, None) if limit > 0 and bound > 0 else None
    if best == limit:
        return None  # no value is beyond it: a share of at most 1
    return Margin((bound - best) / (limit - best), bound, limit, best)


def _best(row: Row, bounds: tuple[float, float], upper: bool) -> float | None:
    """The value of no change if the limit allows it, else the end of the unit's domain."""
    metric = METRICS.get(row.metric)
    none = metric.none if metric else None
    if none is not None and bounds[0] <= none <= bounds[1]:
        return none
    if math.isfinite(bounds[0]) and math.isfinite(bounds[1]):
        return (bounds[0] + bounds[1]) / 2
    end = row.unit.low if upper else row.unit.high
    return end if math.isfinite(end) else None

"""How near a value is to its limit, on one scale for all metrics: which check is the weakest. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvbench.metrics.collect import METRICS, Row


@dataclass(frozen=True)
class Room:
    """What is left to the limit.

    used: the share of the way from the best possible value to the limit that is gone: 0 nothing, 1 at the limit, more beyond it;
    bound: the end of the 95% interval that is nearest to the limit, or the value where there is none; limit: the end that counts;
    best: the value from which the way starts, None where the metric has no best one.
    """

    used: float
    bound: float
    limit: float
    best: float | None

    @property
    def distance(self) -> float:
        return abs(self.limit - self.bound)


# Errors as a share of what rounding allows: they come close to 1 wherever rounding is used in full, and are kept or are not.
_BOUNDS = frozenset({"health_bound_share", "parity_bound_share", "gemm_bound_share"})


def room(row: Row, bounds: tuple[float, float] | None) -> Room | None:
    """None where nothing can be near: no value, no limit, or an exact one, which is kept or is not."""
    exact = bounds is None or bounds[0] == bounds[1] or row.metric in _BOUNDS
    if row.value is None or bounds is None or exact or not math.isfinite(row.value):
        return None
    low = row.value if row.low is None else row.low
    high = row.value if row.high is None else row.high
    sides = [_side(row, end, bound, bounds) for end, bound in zip(bounds, (low, high), strict=True)]
    return max((side for side in sides if side), key=lambda side: side.used, default=None)


def _side(row: Row, limit: float, bound: float, bounds: tuple[float, float]) -> Room | None:
    if not (math.isfinite(limit) and math.isfinite(bound)):
        return None
    best = _best(row, bounds, upper=limit == bounds[1])
    if best is None:  # a rate: no largest one is known, so what counts is how many times the limit it is
        return Room(limit / bound, bound, limit, None) if limit > 0 and bound > 0 else None
    if best == limit:
        return None  # nothing lies beyond it: a share of at most 1
    return Room((bound - best) / (limit - best), bound, limit, best)


def _best(row: Row, bounds: tuple[float, float], upper: bool) -> float | None:
    """The value that is no change where the limit allows it, or else the end of what the unit can be."""
    metric = METRICS.get(row.metric)
    none = metric.none if metric else None
    if none is not None and bounds[0] <= none <= bounds[1]:
        return none
    if math.isfinite(bounds[0]) and math.isfinite(bounds[1]):
        return (bounds[0] + bounds[1]) / 2
    end = row.unit.low if upper else row.unit.high
    return end if math.isfinite(end) else None

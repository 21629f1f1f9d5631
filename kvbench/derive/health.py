"""Numeric health: the worst layer and side by name, with the mean beside it, so that one bad layer is not averaged away."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

from kvbench.derive.value import Value
from kvbench.record import Record
from kvbench.stats import largest, smallest

Side = dict[str, Any]


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    sides: Sequence[Side] = record.samples["sides"]
    yield _worst("health_amax", sides, lambda side: side["amax"])
    yield _worst("health_error_max", sides, lambda side: side["error"])
    yield _worst("health_bound_share", sides, lambda side: side["bound_share"])
    yield _worst("health_clip_share", sides, lambda side: side["clipped"] / side["elements"])
    yield _worst("health_flush_share", sides, lambda side: side["flushed"] / side["elements"])
    if all(side["codes_used"] for side in sides):
        yield _worst("health_codes_min", sides, lambda side: side["codes_used"], smallest)
        yield _worst("health_scale_spread", sides, lambda side: side["scale_max"] / side["scale_min"])


def _worst(
    metric: str, sides: Sequence[Side], of: Callable[[Side], float], pick: Callable[..., float] = largest
) -> Value:
    found = [float(of(side)) for side in sides]
    worst = pick(found)
    at = next(i for i, one in enumerate(found) if one == worst or (math.isnan(one) and math.isnan(worst)))
    note = f"worst: layer {sides[at]['layer']} {sides[at]['side'].upper()}; mean {fmean(found):.4g}"
    return Value(metric, worst, len(found), note=note)

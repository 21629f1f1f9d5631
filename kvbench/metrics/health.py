"""Numeric health, compared with the K and V that the format was given: the worst layer and side by name, with
the mean beside it, so that one bad layer is not averaged away.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import inf
from statistics import fmean
from typing import Any

from kvbench.formats.kv import KV_FORMATS
from kvbench.metrics.declare.metric import Metric, Table
from kvbench.metrics.declare.units import CODES, ERROR, MAGNITUDE, RATIO, SHARE
from kvbench.metrics.declare.value import Value
from kvbench.records.record import Record
from kvbench.stats.intervals import largest, smallest

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


def faults(record: Record, layers: int | None) -> Iterator[str]:
    """What cannot be of the record's sides, in sentences without an end: sides that are missing or given twice, a side with the numbers
    of another layer's, a quantized side that holds values and lost nothing.

    layers: how many the store had; None where nobody said, then as many as the highest number says.
    """
    sides: Sequence[Side] = record.samples["sides"]
    if not sides:
        return  # a record without a sample gives no value, which is a check of its own
    given = Counter((side["layer"], side["side"]) for side in sides)
    count = 1 + max(layer for layer, _ in given) if layers is None else layers
    due = [(layer, name) for layer in range(count) for name in ("k", "v")]
    for layer, name in sorted({*due, *given}):
        times = given[layer, name]
        if (layer, name) not in due:
            yield f"layer {layer} {name.upper()} is given, and the store had {count} layers"
        elif times != 1:
            yield f"layer {layer} {name.upper()} is {f'given {times} times' if times else 'missing'}, and each of {count} layers is due once"
    quantized = KV_FORMATS[record.facts["format"]].quantized
    seen: list[Side] = []
    for side in sides:
        said = f"layer {side['layer']} {side['side'].upper()}"
        if side["amax"] > 0:  # sides of zeros are alike, and lose nothing
            twin = next(
                (one for one in seen if one["layer"] != side["layer"] and _numbers(one) == _numbers(side)),
                None,
            )
            if twin:
                yield f"{said} has the numbers of layer {twin['layer']} {twin['side'].upper()}, to the last digit"
            if quantized and side["error"] == 0:
                yield f"{said} lost nothing (error 0) in {record.facts['format']}, though it holds values up to {side['amax']:.4g}"
        seen.append(side)


def _numbers(side: Side) -> Side:
    return {key: value for key, value in side.items() if key not in ("layer", "side")}


def _worst(
    metric: str, sides: Sequence[Side], of: Callable[[Side], float], pick: Callable[..., float] = largest
) -> Value:
    found = [float(of(side)) for side in sides]
    worst = pick(found)
    at = next(i for i, one in enumerate(found) if one == worst or (math.isnan(one) and math.isnan(worst)))
    note = f"worst: layer {sides[at]['layer']} {sides[at]['side'].upper()}; mean {fmean(found):.4g}"
    return Value(metric, worst, len(found), note=note)


# Facts that must be equal in two runs that are compared.
FACTS: tuple[str, ...] = ("text_sha",)

TABLES: tuple[Table, ...] = (
    Table("health", "Numeric health",
          note="K and V of a text as each layer produced them, compared with what its pages hold; the "
               "worst layer and side. The note has its name and the mean. Clipping means that a scale is "
               "too small, flushing and few codes that it is too large.",
          metrics=(
        Metric("health_error_max", ERROR, "lower", "Worst error",
               "distance of stored from original K or V as a share of the original's norm, worst layer and "
               "side", brief=True),
        Metric("health_bound_share", RATIO, "lower", "Worst share of bound",
               "largest error of a stored element over its rounding bound; above 1 the format's bound is "
               "broken"),
        Metric("health_clip_share", SHARE, "lower", "Most clipped",
               "share of the elements of K or V beyond the largest code, worst layer and side", brief=True),
        Metric("health_flush_share", SHARE, "lower", "Most flushed to zero",
               "share of the elements of K or V that are not zero and stored as zero, worst layer and side",
               brief=True),
        Metric("health_codes_min", CODES, "higher", "Fewest codes used",
               "distinct codes in use (INT8 has 255, E4M3 has 254 and NaN), fewest of any layer and side",
               brief=True),
        Metric("health_scale_spread", RATIO, "", "Widest scales",
               "largest over smallest scale of a layer and side, widest", plausible=(1.0, inf)),
        Metric("health_amax", MAGNITUDE, "", "Largest magnitude",
               "largest magnitude of K or V in any layer"),
    )),
)  # fmt: skip

"""Numeric health of stored K and V: the worst layer and side by name, with the mean beside it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import inf
from statistics import fmean
from typing import Any

from kvbench.formats.kv import KV_FORMATS
from kvbench.metrics.declare.metric import Metric, Table
from kvbench.metrics.declare.units import CODES, ERROR, MAGNITUDE, RATIO, SHARE
from kvbench.metrics.declare.value import Value, worst_place
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
    """What is impossible about the record's sides: missing or given twice, with the numbers of another
    layer's, or quantized without loss. layers: how many the store had; None: the highest number counts."""
    sides: Sequence[Side] = record.samples["sides"]
    if not sides:
        return  # a record without samples gives no value, which another check reports
    given = Counter((side["layer"], side["side"]) for side in sides)
    count = 1 + max(layer for layer, _ in given) if layers is None else layers
    expected = [(layer, name) for layer in range(count) for name in ("k", "v")]
    for layer, name in sorted({*expected, *given}):
        times = given[layer, name]
        if (layer, name) not in expected:
            yield f"layer {layer} {name.upper()} is given, but the store had {count} layers"
        elif times != 1:
            found = f"given {times} times" if times else "missing"
            yield f"layer {layer} {name.upper()} is {found}; each of {count} layers is expected once"
    quantized = KV_FORMATS[record.facts["format"]].quantized
    seen: list[Side] = []
    for side in sides:
        name = _name(side)
        if side["amax"] > 0:  # sides of zeros are equal, and lose nothing
            same = [one for one in seen if one["layer"] != side["layer"] and _numbers(one) == _numbers(side)]
            if same:
                yield f"{name} has the numbers of {_name(same[0])}, to the last digit"
            if quantized and side["error"] == 0:
                kept = f"{name} lost nothing (error 0) in {record.facts['format']}"
                yield f"{kept}, though it holds values up to {side['amax']:.4g}"
        seen.append(side)


def _name(side: Side) -> str:
    return f"layer {side['layer']} {side['side'].upper()}"


def _numbers(side: Side) -> Side:
    return {key: value for key, value in side.items() if key not in ("layer", "side")}


def _worst(
    metric: str, sides: Sequence[Side], of: Callable[[Side], float], pick: Callable[..., float] = largest
) -> Value:
    found = [(float(of(side)), _name(side)) for side in sides]
    worst = pick(value for value, _ in found)
    note = f"worst: {worst_place(found, worst)}; mean {fmean(value for value, _ in found):.4g}"
    return Value(metric, worst, len(found), note=note)


FACTS: tuple[str, ...] = ("text_sha",)
TABLES: tuple[Table, ...] = (
    Table("health", "Numeric health",
          note="K and V of a text as each layer produced them, compared with what its pages hold; the "
               "worst layer and side. The note has its name and the mean. Clipping means that a scale is "
               "too small, flushing and few codes that it is too large.",
          metrics=(
        Metric("health_error_max", ERROR, "lower", "Worst error",
               "distance of stored from original over the original's norm, worst layer and side", brief=True),
        Metric("health_bound_share", RATIO, "lower", "Worst share of bound",
               "largest error of a stored element over its rounding bound; above 1 the bound is broken"),
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

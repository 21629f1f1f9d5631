"""How the change of a metric between two runs is estimated from the samples of both. Pure."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvbench.metrics.declare.metric import AGREEMENT, ALONE, EXACT, Effect, Kind, Measured, Metric, Unable
from kvbench.metrics.declare.value import BLOCK, Value
from kvbench.records.record import Record
from kvbench.stats.intervals import Estimate, clustered_ratio, exp, independent_difference, paired_difference


def exact_change(
    values: Callable[[Record, Record | None], Iterator[Value]],
    metric: Metric,
    first: Measured,
    second: Measured,
) -> Effect | Unable | None:
    """Change of a counted value; None where neither run measured it."""
    a, b = (
        next((v.value for v in values(side.record, None) if v.metric == metric.name), None)
        for side in (first, second)
    )
    if a is None or b is None:
        return None if a is b else Unable(metric.name, "one of the two runs did not measure it")
    return Effect(metric.name, EXACT, metric.unit.name, b - a, method="exact", identical=a == b)


def independent_change(
    metric: Metric, first: Sequence[float], second: Sequence[float], counted: str, kind: Kind = ALONE
) -> Effect | Unable:
    """Change in % between independent samples, given as logarithms."""
    if not first or not second:
        return Unable(metric.name, f"one of the two runs has no {counted}")
    found = independent_difference(first, second)
    n = min(len(first), len(second))
    return log_change(metric, kind, found, n, counted, "independent repeats (Welch)")


def log_change(
    metric: Metric, kind: Kind, logs: Estimate, n: int, counted: str, method: str, **more: Any
) -> Effect:
    """A change of logarithms as a change in %."""
    low, high = (percent(logs.interval[0]), percent(logs.interval[1])) if logs.interval else (None, None)
    found = Effect(metric.name, kind, "%", percent(logs.value), low, high, n, counted, logs.effective, **more)
    return replace(found, method=method)


def percent(log_ratio: float) -> float:
    return 100 * (exp(log_ratio) - 1)


def share_change(
    metric: Metric, differences: Sequence[int], counts: Sequence[int], owners: Sequence[Hashable], **more: Any
) -> Effect:
    """Change of a share in points: successes in the second run less those in the first, by item or by group
    of `counts` items. The interval is Bonett and Price's on the discordant items (of groups, on the fewest
    possible), and no narrower than the one clustered by owner; none where all items have one owner."""
    n = sum(counts)
    gained, lost = sum(max(d, 0) for d in differences), sum(max(-d, 0) for d in differences)
    low, high = paired_difference(gained, lost, n)
    units = None
    ends: tuple[float | None, float | None] = (low, high)
    if len(set(owners)) < n:  # otherwise every item is an owner, and Bonett and Price's interval suffices
        found = clustered_ratio(differences, counts, owners)
        units = found.effective
        ends = (min(low, found.interval[0]), max(high, found.interval[1])) if found.interval else (None, None)
    low_pt, high_pt = (None if end is None else 100 * end for end in ends)
    item = metric.counted.removesuffix("s")
    more.setdefault("method", f"{item} by {item}, {gained} gained, {lost} lost")
    points = (100 * (gained - lost) / n, low_pt, high_pt)
    return Effect(metric.name, AGREEMENT, "pt", *points, n, metric.counted, units, **more)


def steps_change(metric: Metric, first: Sequence[bool], second: Sequence[bool], **more: Any) -> Effect:
    """Change of the share of true steps of one text, clustered by blocks of neighbouring steps."""
    differences = [int(b) - int(a) for a, b in zip(first, second, strict=True)]
    owners = [i // BLOCK for i in range(len(differences))]
    return share_change(metric, differences, [1] * len(differences), owners, **more)


def same(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], key: str) -> bool:
    return [x[key] for x in a] == [y[key] for y in b]

"""Values as a file of this package yields them, and the rule on which two records may be compared."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isnan
from typing import TypeVar

from kvbench.records.record import Record
from kvbench.stats.intervals import Estimate, Interval, clustered_share, wilson

T = TypeVar("T")

# Consecutive steps of one text that count as one sample for an interval: see tests/stats/test_coverage.py.
BLOCK = 64


@dataclass(frozen=True)
class Value:
    """A metric's value on one record. Fields as in `metrics.collect.Row`."""

    metric: str
    value: float | None
    n: int | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""
    units: float | None = None


def unmeasured(metrics: Iterable[str], note: str, n: int | None = None) -> list[Value]:
    """A value of None for each metric, with the reason."""
    return [Value(metric, None, n, note=note) for metric in metrics]


def worst_place(found: Sequence[tuple[float, T]], worst: float) -> T:
    """The place of the first value that is the worst one (NaN included)."""
    return next(place for value, place in found if value == worst or (isnan(value) and isnan(worst)))


def share(metric: str, successes: int, n: int, note: str = "") -> Value:
    """successes / n with its Wilson interval; None for n = 0."""
    if n == 0:
        return Value(metric, None, 0, note=note or "nothing was scored")
    low, high = wilson(successes, n)
    return Value(metric, successes / n, n, low, high, note)


def share_of_steps(metric: str, flags: Sequence[bool], note: str = "") -> Value:
    """The share of consecutive steps of one text that are true, its interval clustered by blocks of `BLOCK`
    steps, which share their history and fail together; none from fewer than two blocks."""
    if not flags:
        return Value(metric, None, 0, note="nothing was scored")
    blocks = [flags[i : i + BLOCK] for i in range(0, len(flags), BLOCK)]
    found = clustered_share([sum(b) for b in blocks], [len(b) for b in blocks], range(len(blocks)))
    few = f"fewer than 2 blocks of {BLOCK} steps: no interval"
    about = f"{len(blocks)} blocks of {BLOCK} steps" if found.interval else few
    low, high = found.interval or (None, None)
    return Value(metric, found.value, len(flags), low, high, joined(about, note), found.effective)


def with_interval(metric: str, value: float, n: int, interval: Interval | None, note: str = "") -> Value:
    """A value whose t-interval rests on the n samples themselves."""
    low, high = interval or (None, None)
    return Value(metric, value, n, low, high, note, n)


def clustered(metric: str, found: Estimate, n: int, note: str = "", value: float | None = None) -> Value:
    """An estimate over n samples in `found.units` documents. value: of all samples, where the estimate is of
    a subset."""
    if found.interval:
        about = f"{found.units} documents"
    else:
        about = "1 document: no interval" if found.units < 2 else "too few tokens for an interval"
    shown = found.value if value is None else value
    low, high = found.interval or (None, None)
    if low is not None and high is not None:
        low, high = min(low, shown), max(high, shown)
    return Value(metric, shown, n, low, high, joined(about, note), found.effective)


def joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def incomparable(record: Record, baseline: Record, facts: Sequence[str]) -> str:
    """Which facts or protocol version differ between two records, as a sentence, or ""."""
    differing = [
        f"{fact} is {record.facts.get(fact)!r} here and {baseline.facts.get(fact)!r} on the baseline"
        for fact in facts
        if record.facts.get(fact) != baseline.facts.get(fact)
    ]
    own, other = record.protocol, baseline.protocol
    if own != other:
        differing.append(f"protocol version is {own} here and {other} on the baseline")
    return "not comparable with the baseline: " + "; ".join(differing) if differing else ""

"""What the files of this package yield, and the rule on which two records may be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.records.record import Record
from kvbench.stats.intervals import Estimate, Interval, clustered_share, wilson


@dataclass(frozen=True)
class Value:
    """A metric's value on one record, before it is spread over the record's cells. Fields as in `metrics.Row`."""

    metric: str
    value: float | None
    n: int | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""
    units: float | None = None


def share(metric: str, successes: int, n: int, note: str = "") -> Value:
    """successes / n with its Wilson interval; None for n = 0."""
    if n == 0:
        return Value(metric, None, 0, note=note or "nothing was scored")
    low, high = wilson(successes, n)
    return Value(metric, successes / n, n, low, high, note)


BLOCK = 64  # steps of one text that count as one sample for an interval: see tests/stats/test_coverage.py


def share_of_steps(metric: str, flags: Sequence[bool], note: str = "") -> Value:
    """The share of consecutive steps of one text that are true, its interval clustered by blocks of `BLOCK` steps.

    Neighbouring steps see the same history and fail together. Fewer than two blocks have no interval.
    """
    if not flags:
        return Value(metric, None, 0, note="nothing was scored")
    blocks = [flags[i : i + BLOCK] for i in range(0, len(flags), BLOCK)]
    found = clustered_share([sum(b) for b in blocks], [len(b) for b in blocks], range(len(blocks)))
    said = (
        f"{len(blocks)} blocks of {BLOCK} steps"
        if found.interval
        else f"fewer than 2 blocks of {BLOCK} steps: no interval"
    )
    low, high = found.interval or (None, None)
    return Value(
        metric, found.value, len(flags), low, high, "; ".join(filter(None, (said, note))), found.effective
    )


def with_interval(metric: str, value: float, n: int, interval: Interval | None, note: str = "") -> Value:
    """A t-interval that rests on the n samples themselves."""
    low, high = interval or (None, None)
    return Value(metric, value, n, low, high, note, n)


def clustered(metric: str, found: Estimate, n: int, note: str = "", value: float | None = None) -> Value:
    """An estimate over n samples in `found.units` documents; value: that of all samples, where the estimate is of some of them.

    The note says how many documents there are, and why there is no interval.
    """
    if found.interval:
        said = f"{found.units} documents"
    else:
        said = "1 document: no interval" if found.units < 2 else "too few tokens for an interval"
    shown = found.value if value is None else value
    low, high = found.interval or (None, None)
    if low is not None and high is not None:
        low, high = min(low, shown), max(high, shown)
    return Value(metric, shown, n, low, high, "; ".join(filter(None, (said, note))), found.effective)


def incomparable(record: Record, baseline: Record, facts: Sequence[str]) -> str:
    """A sentence that names what differs between two records that are to be compared, or "" when nothing does.

    The runner's protocol version and each of the named facts must be equal: numbers of two protocols, of two data
    sets or of two amounts of the same data are never compared.
    """
    differing = [
        f"{fact} is {record.facts.get(fact)!r} here and {baseline.facts.get(fact)!r} on the baseline"
        for fact in facts
        if record.facts.get(fact) != baseline.facts.get(fact)
    ]
    if record.protocol != baseline.protocol:
        differing.append(
            f"protocol version is {record.protocol} here and {baseline.protocol} on the baseline"
        )
    return "not comparable with the baseline: " + "; ".join(differing) if differing else ""

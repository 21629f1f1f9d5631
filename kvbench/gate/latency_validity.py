"""Whether the state of the machine, and not the format, decides a check on a latency; the check is then
inconclusive. Pure.

Each cause is applied only where it was measured, and only in the direction in which it changes a value:

slowdown: the device was throttled, which makes times longer. A throttled candidate may be faster in truth; a
throttled baseline makes a ratio too small. Where both arms were throttled equally often, a ratio is valid.

drift: times rise or fall over the run. In a ratio, the order A B B A cancels a linear drift except for the
distance of the arms' mean positions (a third of a request's drift for 3 repeats, none for an even number).

clocks: the median clocks of the arms differ by more than 5%. Times grow at most as the clock falls, so an
outcome that holds for the measured ratio and for the ratio corrected by the clocks is valid.

outliers: stay in the value; the check is repeated without them. Tails (p90, p99, max) are about outliers.

A pass is valid where the true value could only lie farther inside the limit, a failure where it could only be
worse, where the requests at full speed fail too, or where the end of a falling drift still fails.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from kvbench.gate.decide import Limits, decide
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, PASS
from kvbench.metrics import latency
from kvbench.metrics.collect import METRICS, Row
from kvbench.metrics.declare.value import Value
from kvbench.records.record import Record
from kvbench.stats import stability as steadiness
from kvbench.stats.intervals import CONFIDENCE, exp, median
from kvbench.stats.power import Spread

TIME, RATE, RATIO = "time", "rate", "ratio"

# metric: (the quantity that it is worked out from, as in `steadiness`; what becomes of it)
JUDGED: dict[str, tuple[str, str]] = {
    "ttft_ms": ("ttft", TIME),
    "prefill_tok_s": ("ttft", RATE),
    "ttft_ratio": ("ttft", RATIO),
    **{f"itl_{name}ms": ("itl", TIME) for name in ("", "p50_", "p90_", "p99_", "max_")},
    **dict.fromkeys(("decode_tok_s", "decode_read_gb_s", "decode_bandwidth_share"), ("itl", RATE)),
    "itl_ratio": ("itl", RATIO),
    "request_ms": ("request", TIME),
}
TAILS = frozenset({"itl_p90_ms", "itl_p99_ms", "itl_max_ms"})
_NAMES = {"ttft": "TTFT", "itl": "ITL", "request": "a request's time"}
STEADY_PCT = 10.0  # a smaller change over the run of an absolute time is that of a steady machine
CLOCKS_PCT = 5.0  # clocks step by 15 MHz or so; medians of two arms that are farther apart are two devices
_AGAIN = "measure again: --set runners.latency.repeats=10"


def doubt(record: Record, row: Row, limits: Limits, status: str, confidence: float = CONFIDENCE) -> str:
    """Why the machine may have caused `status` (pass or fail) of this value, with the next step, or ""."""
    if row.metric not in JUDGED or status not in (PASS, FAIL):
        return ""
    arms = sorted(record.samples["arms"], key=lambda arm: arm["order"])
    claim = _Claim(limits, status, confidence)
    unsteady = [_drifting(arms, row, claim), _outlying(record, arms, row, claim)]
    if any(unsteady):
        others = (record.facts.get("device_state") or {}).get("other_processes")
        unsteady.append(steadiness.other_processes_text(others))
    slow = _slowed(record, arms, row, claim) or _clocked(record, arms, row, claim)
    return "; ".join(filter(None, (slow, *unsteady)))


@dataclass(frozen=True)
class _Claim:
    """The status of a value, its limits and the confidence."""

    limits: Limits
    status: str
    confidence: float

    def ruled(self, found: Row | Value | None) -> str:
        """The status of another value by the same limits and confidence, without correction."""
        if found is None or found.value is None or not math.isfinite(found.value):
            return INCONCLUSIVE
        metric, spread = METRICS[found.metric], None
        if found.low is not None and found.high is not None:
            spread = Spread(found.value, found.low, found.high, metric.unit.name, found.units)
            spread = spread.at(self.confidence)
        return decide(found.value, spread, found.n, metric.sampled, self.limits).status


def stands(status: str, value: float, limits: Limits, smaller: bool, larger: bool) -> bool:
    """Whether the status also holds for a true value that may be smaller, or larger, than the measured."""
    if status == PASS:
        return not (smaller and math.isfinite(limits.low)) and not (larger and math.isfinite(limits.high))
    return not (smaller if value > limits.high else larger)


def _slowed(record: Record, arms: Sequence[Mapping[str, Any]], row: Row, claim: _Claim) -> str:
    """The sentence on a throttled device; in a ratio, only where the arms were throttled unequally often."""
    _, kind = JUDGED[row.metric]
    slow = steadiness.slowed(arms)
    own, other = ([arm for arm in arms if arm["arm"] == name] for name in ("candidate", "baseline"))
    here, there = (sum(arm["order"] in slow for arm in some) for some in (own, other))
    if kind == RATIO:
        if here * len(other) == there * len(own):
            return ""
        smaller, larger = here > 0, there > 0
    else:
        smaller, larger = here > 0 and kind == TIME, here > 0 and kind == RATE
    if not (smaller or larger) or stands(claim.status, _value(row), claim.limits, smaller, larger):
        return ""
    if claim.status == FAIL and _without(record, arms, row.metric, claim, slow) == FAIL:
        return ""
    words = (word for each in slow.values() for word in each)
    quota = ("check its cooling and power", "raise the CPU quota")
    remedies = dict.fromkeys(quota[word == steadiness.QUOTA] for word in words)
    effect = "which a ratio does not cancel" if kind == RATIO else "which makes times longer"
    requests = steadiness.slowdown_text(arms)
    return f"the device was slowed down in {requests}, {effect}; {' and '.join(remedies)}, and {_AGAIN}"


def _clocked(record: Record, arms: Sequence[Mapping[str, Any]], row: Row, claim: _Claim) -> str:
    """The sentence on arms of a ratio that ran at different clocks."""
    clocks = _clocks(arms)
    if JUDGED[row.metric][1] != RATIO or clocks is None:
        return ""
    own, other = clocks
    lower = own < other
    # As if times went by the clock alone: the true ratio lies between that and the measured one.
    even = _scaled(row, own / other)
    if stands(claim.status, _value(row), claim.limits, lower, not lower) or _alike(row, even, claim):
        return ""
    slow = steadiness.slowed(arms)
    if claim.status == FAIL and slow:
        rest = [arm for arm in arms if arm["order"] not in slow]
        if _clocks(rest) is None and _without(record, arms, row.metric, claim, slow) == FAIL:
            return ""
    clocks_text = f"{own:g} MHz and the baseline's at {other:g} (medians of SM clocks)"
    cause = f"the candidate's requests ran at {clocks_text}, which a ratio does not cancel"
    return f"{cause}; check its clocks and power, and {_AGAIN}"


def _clocks(arms: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Median SM clocks (MHz) of the candidate's and the baseline's requests; None where alike or unknown."""
    read = [
        steadiness.device_values([arm for arm in arms if arm["arm"] == name], "sm_mhz")
        for name in ("candidate", "baseline")
    ]
    if not all(read):
        return None
    own, other = map(median, read)
    apart = min(own, other) > 0 and max(own, other) / min(own, other) > 1 + CLOCKS_PCT / 100
    return (own, other) if apart else None


def _drifting(arms: Sequence[Mapping[str, Any]], row: Row, claim: _Claim) -> str:
    """The sentence on a significant drift; in a ratio, only where the part that the order leaves decides."""
    quantity, kind = JUDGED[row.metric]
    found = steadiness.drift(arms, quantity)
    if isinstance(found, str) or not found.significant:
        return ""
    own, other = ([arm["order"] for arm in arms if arm["arm"] == name] for name in ("candidate", "baseline"))
    low, high = found.interval
    drifts = f"{_NAMES[quantity]} drifts by {found.pct:+.3g}% (95% interval {low:+.3g} to {high:+.3g})"
    if kind == RATIO:
        pairs = min(len(own), len(other))
        left = found.slope * (fmean(own[:pairs]) - fmean(other[:pairs]))
        without = claim.ruled(_scaled(row, exp(-left)))
        if without == claim.status:
            return ""
        share = f"the order of the arms leaves {100 * math.expm1(left):+.3g}% in the ratio"
        remedy = "--set runners.latency.warmup=5 --set runners.latency.repeats=10"
        cause = f"{drifts}, of which {share}, and without that it would be {without}"
        return f"{cause}; warm up longer and take an even number of repeats: {remedy}"
    if abs(found.pct) <= STEADY_PCT:
        return ""
    grows = (found.slope > 0) == (kind == TIME)  # the value itself
    last = exp((1 if kind == TIME else -1) * found.slope * (found.last - fmean(own)))
    if stands(claim.status, _value(row), claim.limits, not grows, grows) or _alike(
        row, _scaled(row, last), claim
    ):
        return ""
    unsteady = f"{drifts}, and beyond {STEADY_PCT:g}% the machine is not steady"
    return f"{unsteady}; warm up longer, or stop other programs: --set runners.latency.warmup=5"


def _alike(row: Row, moved: Row, claim: _Claim) -> bool:
    """Whether the claim holds of the moved value too, and of all between: a failure is on the same side."""
    above, still_above = (_value(x) > claim.limits.high for x in (row, moved))
    return (claim.status == PASS or above == still_above) and claim.ruled(moved) == claim.status


def _outlying(record: Record, arms: Sequence[Mapping[str, Any]], row: Row, claim: _Claim) -> str:
    """The sentence on outliers, where the status differs without them."""
    quantity, kind = JUDGED[row.metric]
    found = {} if row.metric in TAILS else steadiness.outliers(arms, quantity)
    if isinstance(found, str):
        return ""
    places = {arm["order"]: arm["arm"] for arm in arms}
    mine = {order: times for order, times in found.items() if kind == RATIO or places[order] == "candidate"}
    if not mine or (without := _without(record, arms, row.metric, claim, mine)) == claim.status:
        return ""
    listed = ", ".join(f"{order} ({places[order]}, {times:.3g}x)" for order, times in sorted(mine.items()))
    several = f"s {listed} are outliers in their arms: without them"
    which = several if len(mine) > 1 else f" {listed} is an outlier in its arm: without it"
    return f"{_NAMES[quantity]} of request{which} the check would be {without}; {_AGAIN}"


def _without(
    record: Record, arms: Sequence[Mapping[str, Any]], metric: str, claim: _Claim, dropped: Collection[int]
) -> str:
    """The status of the remaining requests; of a ratio, of the pairs in which none was dropped."""
    own, other = ([arm for arm in arms if arm["arm"] == name] for name in ("candidate", "baseline"))
    kept = [arm for arm in own if arm["order"] not in dropped]
    if JUDGED[metric][1] == RATIO:
        pairs = zip(own, other, strict=False)
        whole = [pair for pair in pairs if not {arm["order"] for arm in pair} & set(dropped)]
        kept = [arm for pair in whole for arm in pair]
    values = latency.values(replace(record, samples={**record.samples, "arms": kept}), None)
    return claim.ruled(next((v for v in values if v.metric == metric), None))


def _scaled(row: Row, factor: float) -> Row:
    low, high = (None if end is None else end * factor for end in (row.low, row.high))
    return replace(row, value=_value(row) * factor, low=low, high=high)


def _value(row: Row) -> float:
    assert row.value is not None  # a pass or a failure is one of a value
    return row.value

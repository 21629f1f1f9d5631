"""Whether the state of the machine decides a check on a latency: then it is inconclusive, whatever it was.
Pure.

A doubt needs a cause that was measured, and a direction. Each cause is asked only what it can do to a value:

    slowdown   makes times longer. A slowed-down candidate may be faster in truth, a slowed-down baseline makes a ratio smaller
               than it is; with both, unequally often, neither side is known. As often in both arms, a ratio
               stands.
    drift      rising times say that later ones are longer, falling ones that they are shorter. In a ratio A B B A cancels a
               straight drift but for the distance of the arms' mean orders (a third of a request's for 3
               repeats, none for even ones).
    clocks     of the arms, their medians, apart by more than 5%: a ratio is one of two devices, whatever the reason (a power cap too). Times
               are at most as much longer as the clock is lower, so what both the ratio and that ratio of it
               say stands.
    outliers   may lie on either side. Nobody drops them: they stay in the value, and the check is tried without them. Tails
               (p90, p99, max) are about them, and are left alone.

So a pass stands where a true value could only lie farther within the limit: a slowed-down candidate that is
fast enough passes. A failure is never softened by what cannot have made it: it stands where the true value
could only be worse, where the requests that were not slowed down fail by themselves, where the end of a
falling drift still fails (and a pass where that of a rising one still passes), where it fails without its
outliers too. Other processes on the GPU are no cause by themselves, only named beside a drift or an outlier.
What was not measured (older records, too few requests) raises no doubt.
"""

from __future__ import annotations

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
from kvbench.stats.stability import Drift

TIME, RATE, RATIO = "time", "rate", "ratio"

# metric: (the quantity that it is worked out from, as in `steadiness`; what becomes of it)
JUDGED: dict[str, tuple[str, str]] = {
    "ttft_ms": ("ttft", TIME), "prefill_tok_s": ("ttft", RATE), "ttft_ratio": ("ttft", RATIO),
    "itl_ms": ("itl", TIME), "itl_p50_ms": ("itl", TIME), "itl_p90_ms": ("itl", TIME), "itl_p99_ms": ("itl", TIME),
    "itl_max_ms": ("itl", TIME), "decode_tok_s": ("itl", RATE), "decode_read_gb_s": ("itl", RATE),
    "decode_bandwidth_share": ("itl", RATE), "itl_ratio": ("itl", RATIO),
    "request_ms": ("request", TIME),
}  # fmt: skip
TAILS = frozenset({"itl_p90_ms", "itl_p99_ms", "itl_max_ms"})
_NAMES = {"ttft": "TTFT", "itl": "ITL", "request": "a request's time"}

# Up to so much of a change over the run an absolute time counts as that of a steady machine.
STEADY_PCT = 10.0

# Clocks step by 15 MHz or so; of two arms in turns, medians that are farther apart than this are two devices.
CLOCKS_PCT = 5.0

_AGAIN = "measure again: --set runners.latency.repeats=10"


def doubt(record: Record, row: Row, limits: Limits, status: str, confidence: float = CONFIDENCE) -> str:
    """Why `status` (pass or fail) of this value may be the machine's doing, with the next step; "" where
    nothing says so.
    """
    if row.metric not in JUDGED or status not in (PASS, FAIL):
        return ""
    arms = sorted(record.samples["arms"], key=lambda arm: arm["order"])
    claim = _Claim(limits, status, confidence)
    unsteady = [_drifting(arms, row, claim), _outlying(record, arms, row, claim)]
    if any(unsteady):
        unsteady.append(
            steadiness.other_processes_text((record.facts.get("device_state") or {}).get("other_processes"))
        )
    slow = _slowed(record, arms, row, claim) or _clocked(record, arms, row, claim)
    return "; ".join(filter(None, (slow, *unsteady)))


@dataclass(frozen=True)
class _Claim:
    """What was said of a value, by which limits and at which level (of a look more than 95%)."""

    limits: Limits
    status: str
    confidence: float

    def ruled(self, found: Row | Value | None) -> str:
        """The status of another value by the same limits and level, in no family."""
        if found is None or found.value is None or not math.isfinite(found.value):
            return INCONCLUSIVE
        metric = METRICS[found.metric]
        spread = None
        if found.low is not None and found.high is not None:
            spread = Spread(found.value, found.low, found.high, metric.unit.name, found.units).at(
                self.confidence
            )
        return decide(found.value, spread, found.n, metric.sampled, self.limits).status


def stands(status: str, value: float, limits: Limits, smaller: bool, larger: bool) -> bool:
    """Whether a pass or a failure is one of the true value too, which may be smaller, or larger, than the
    measured one.
    """
    if status == PASS:
        return not (smaller and math.isfinite(limits.low)) and not (larger and math.isfinite(limits.high))
    return not (smaller if value > limits.high else larger)


def _slowed(record: Record, arms: Sequence[Mapping[str, Any]], row: Row, claim: _Claim) -> str:
    """The device was slowed down, and in a ratio not as often in both arms."""
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
    words = dict.fromkeys(word for each in slow.values() for word in each)
    remedies = dict.fromkeys(
        "raise the CPU quota" if word == steadiness.QUOTA else "see to its cooling and power"
        for word in words
    )
    effect = "which a ratio does not cancel" if kind == RATIO else "which makes times longer"
    said = steadiness.slowdown_text(arms)
    return f"the device was slowed down in {said}, {effect}; {' and '.join(remedies)}, and {_AGAIN}"


def _clocked(record: Record, arms: Sequence[Mapping[str, Any]], row: Row, claim: _Claim) -> str:
    """The arms of a ratio ran at clocks that are apart, which may be all of the outcome."""
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
    return (
        f"the candidate's requests ran at {own:g} MHz and the baseline's at {other:g} (medians of SM "
        "clocks), which a ratio does not cancel; "
        f"see to its clocks and power, and {_AGAIN}"
    )


def _clocks(arms: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """The median SM clocks of the candidate's and of the baseline's requests in MHz, where they are apart;
    None where not, or not known.
    """
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
    """The times drift beyond chance: in a ratio what the order of the arms leaves of it decides; else it is
    too much.
    """
    quantity, kind = JUDGED[row.metric]
    found = steadiness.drift(arms, quantity)
    if isinstance(found, str) or not found.significant:
        return ""
    own, other = ([arm["order"] for arm in arms if arm["arm"] == name] for name in ("candidate", "baseline"))
    low, high = found.interval
    said = (
        f"{_NAMES[quantity]} drifts by {found.pct:+.3g}% (95% interval {low:+.3g} to {high:+.3g}) from the "
        "first request to the last"
    )
    if kind == RATIO:
        pairs = min(len(own), len(other))
        left = found.slope * (fmean(own[:pairs]) - fmean(other[:pairs]))
        without = claim.ruled(_scaled(row, exp(-left)))
        if without == claim.status:
            return ""
        share = 100 * math.expm1(left)
        return (
            f"{said}, of which the order of the arms leaves {share:+.3g}% in the ratio, and without that it "
            f"would be {without}; "
            "warm up longer and take an even number of repeats: --set runners.latency.warmup=5 --set runners.latency.repeats=10"
        )
    if abs(found.pct) <= STEADY_PCT:
        return ""
    longer = found.slope > 0
    grows = longer == (kind == TIME)  # the value itself
    if stands(claim.status, _value(row), claim.limits, not grows, grows) or _alike_at_the_end(
        found, own, row, claim
    ):
        return ""
    return (
        f"{said}, and beyond {STEADY_PCT:g}% it is no steady machine's; warm up longer, or free the machine "
        "of other work: "
        "--set runners.latency.warmup=5"
    )


def _alike_at_the_end(found: Drift, own: Sequence[int], row: Row, claim: _Claim) -> bool:
    """Whether a pass or a failure is one of the last request too, by the line of the drift."""
    sign = 1 if JUDGED[row.metric][1] == TIME else -1
    last = exp(sign * found.slope * (found.last - fmean(own)))
    return _alike(row, _scaled(row, last), claim)


def _alike(row: Row, moved: Row, claim: _Claim) -> bool:
    """Whether the claim holds of the moved value too, and of all between: a failure is one on the same
    side.
    """
    same_side = claim.status == PASS or (_value(row) > claim.limits.high) == (
        _value(moved) > claim.limits.high
    )
    return same_side and claim.ruled(moved) == claim.status


def _outlying(record: Record, arms: Sequence[Mapping[str, Any]], row: Row, claim: _Claim) -> str:
    """An outlying request decides: without it, the check comes out otherwise."""
    quantity, kind = JUDGED[row.metric]
    found = {} if row.metric in TAILS else steadiness.outliers(arms, quantity)
    if isinstance(found, str):
        return ""
    places = {arm["order"]: arm["arm"] for arm in arms}
    mine = {order: times for order, times in found.items() if kind == RATIO or places[order] == "candidate"}
    if not mine or (without := _without(record, arms, row.metric, claim, mine)) == claim.status:
        return ""
    listed = ", ".join(f"{order} ({places[order]}, {times:.3g}x)" for order, times in sorted(mine.items()))
    if len(mine) > 1:
        said = f"s {listed} are outliers in their arms and decide: without them"
    else:
        said = f" {listed} is an outlier in its arm and decides: without it"
    return f"{_NAMES[quantity]} of request{said} the check would be {without}; {_AGAIN}"


def _without(
    record: Record, arms: Sequence[Mapping[str, Any]], metric: str, claim: _Claim, dropped: Collection[int]
) -> str:
    """What the check would say of the other requests; of a ratio, of the pairs in which none was dropped."""
    own, other = ([arm for arm in arms if arm["arm"] == name] for name in ("candidate", "baseline"))
    if JUDGED[metric][1] == RATIO:
        pairs = [
            pair
            for pair in zip(own, other, strict=False)
            if not {arm["order"] for arm in pair} & set(dropped)
        ]
        kept = [arm for pair in pairs for arm in pair]
    else:
        kept = [arm for arm in own if arm["order"] not in dropped]
    values = latency.values(replace(record, samples={**record.samples, "arms": kept}), None)
    return claim.ruled(next((v for v in values if v.metric == metric), None))


def _scaled(row: Row, factor: float) -> Row:
    low, high = (None if end is None else end * factor for end in (row.low, row.high))
    return replace(row, value=_value(row) * factor, low=low, high=high)


def _value(row: Row) -> float:
    assert row.value is not None  # a pass or a failure is one of a value
    return row.value

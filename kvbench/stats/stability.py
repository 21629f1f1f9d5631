"""Whether the machine held still while a record's requests were timed: drift, outliers, stalls, slowdowns. Pure.

A request is an entry of a latency record's `samples["arms"]`; its time is one of three quantities, in ms:

    ttft      its TTFT
    itl       the mean gap between its tokens
    request   from submission to the last token

Older records hold no device state: then nothing is known of slowdowns, and the rest is worked out as ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvbench.stats.intervals import CONFIDENCE, Interval, exp, median

Arm = Mapping[str, Any]

# A line through fewer requests has no degrees of freedom worth an interval.
LEAST_FOR_DRIFT = 4

# Modified z-scores of Iglewicz and Hoaglin (1993): 0.6745 is the MAD of a standard normal distribution.
Z_LIMIT, MAD_OF_NORMAL = 3.5, 0.6745
# So few requests have a small MAD by chance: what is nearer to the median than this is no outlier.
LEAST_DISTANCE = 0.05
LEAST_FOR_OUTLIERS = 5

# A step that takes so many medians of its request is a stall; of fewer steps no median says what a step takes.
STALL = 2.0
LEAST_FOR_STALLS = 5

# Throttle reasons (runners/devicestate.py has all of them) that take clocks away. A power cap is how such devices work at full
# load: it is shown, and is no slowdown.
SLOWDOWNS = ("hw slowdown", "sw thermal", "hw thermal", "hw power brake")
QUOTA, THERMAL = "cpu quota", "thermal violation"
# Counters of time that was lost count from this share of the request's time on.
LOST_SHARE = 0.01


def time_of(arm: Arm, quantity: str) -> float | None:
    """A request's time in ms; None where it has none (one token has no gap)."""
    gaps = arm["itl_ms"]
    if quantity == "itl":
        return fmean(gaps) if gaps else None
    if quantity == "ttft":
        return float(arm["ttft_ms"])
    return float(arm["total_ms"]) if "total_ms" in arm else arm["ttft_ms"] + math.fsum(gaps)


@dataclass(frozen=True)
class Drift:
    """The line log(time) = level of the arm + slope * order, by least squares; both arms share the slope.

    error: standard error of the slope; degrees: requests less arms less 1; first, last: orders of the first and the last request.
    """

    slope: float
    error: float
    degrees: int
    first: int
    last: int

    @property
    def pct(self) -> float:
        """Change from the first request to the last, in %."""
        return self._pct(self.slope)

    @property
    def interval(self) -> Interval:
        """95%, by t, in %."""
        from scipy.special import stdtrit

        half = float(stdtrit(self.degrees, (1 + CONFIDENCE) / 2)) * self.error
        return self._pct(self.slope - half), self._pct(self.slope + half)

    @property
    def significant(self) -> bool:
        low, high = self.interval
        return low > 0 or high < 0

    def _pct(self, slope: float) -> float:
        return 100 * (exp(slope * (self.last - self.first)) - 1)


def drift(arms: Sequence[Arm], quantity: str = "request") -> Drift | str:
    """The drift over these requests, of one arm or of two; or why there is none."""
    if len(arms) < LEAST_FOR_DRIFT:
        return f"a drift takes {LEAST_FOR_DRIFT} requests, {len(arms)} were measured"
    logs = _logs(arms, quantity)
    if isinstance(logs, str):
        return logs
    groups: dict[str, list[tuple[float, float]]] = {}
    for arm, y in zip(arms, logs, strict=True):
        groups.setdefault(arm["arm"], []).append((float(arm["order"]), y))
    centred = [pair for group in groups.values() for pair in _centred(group)]
    spread = math.fsum(x * x for x, _ in centred)
    degrees = len(arms) - len(groups) - 1
    if spread == 0 or degrees < 1:
        return "each arm has one request only"
    slope = math.fsum(x * y for x, y in centred) / spread
    rest = math.fsum((y - slope * x) ** 2 for x, y in centred)
    orders = [arm["order"] for arm in arms]
    return Drift(slope, math.sqrt(rest / degrees / spread), degrees, min(orders), max(orders))


def outliers(arms: Sequence[Arm], quantity: str) -> dict[int, float] | str:
    """Order of each outlying request -> its time over its arm's median; or why none is looked for.

    A modified z-score above 3.5 of the logarithm of its time, within its arm, and 5% or more from the arm's median.
    """
    found: dict[int, float] = {}
    for name in dict.fromkeys(arm["arm"] for arm in arms):
        own = [arm for arm in arms if arm["arm"] == name]
        if len(own) < LEAST_FOR_OUTLIERS:
            return f"outliers take {LEAST_FOR_OUTLIERS} requests an arm, the {name} has {len(own)}"
        logs = _logs(own, quantity)
        if isinstance(logs, str):
            return logs
        middle = median(logs)
        distances = [abs(y - middle) for y in logs]
        mad = median(distances)
        for arm, y, distance in zip(own, logs, distances, strict=True):
            far = distance >= math.log1p(LEAST_DISTANCE)
            if far and MAD_OF_NORMAL * distance > Z_LIMIT * mad:
                found[arm["order"]] = exp(y - middle)
    return found


def stalls(arm: Arm) -> int | None:
    """Steps of a request that take more than twice its median step; None of fewer than 5 steps."""
    gaps = arm["itl_ms"]
    if len(gaps) < LEAST_FOR_STALLS:
        return None
    limit = STALL * median(gaps)
    return sum(1 for gap in gaps if gap > limit)


def slowdown(arm: Arm) -> tuple[str, ...] | None:
    """What slowed the device down during a request, in words; () nothing did, None where that could not be read.

    A throttle reason of SLOWDOWNS when it began or ended; a counter of thermal violations, or of quota throttling of the process's
    control groups, that grew by 1% or more of the request's time between the two.
    """
    state = arm.get("device")
    if not state:
        return None
    ends = before, after = state["before"], state["after"]
    reasons = {word for end in ends for word in end.get("reasons") or ()}
    words = [word for word in SLOWDOWNS if word in reasons]
    took = time_of(arm, "request") or 0.0
    for key, unit_ms, word in (("thermal_ns", 1e-6, THERMAL), ("quota_us", 1e-3, QUOTA)):
        lost = grown(before, after, key)
        if lost and lost * unit_ms >= LOST_SHARE * took:
            words.append(word)
    if "reasons" in before:  # a GPU's: its own word is needed to say that nothing happened
        known = all(end["reasons"] is not None for end in ends)
    else:  # a CPU says of itself no more than this
        known = grown(before, after, "quota_us") is not None
    return tuple(words) if words or known else None


def grown(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> int | None:
    """How much a counter has grown from one state to the other; None where it was not read."""
    first, last = before.get(key), after.get(key)
    return None if first is None or last is None else int(last - first)


def slowed(arms: Iterable[Arm]) -> dict[int, tuple[str, ...]]:
    """Order of each request during which the device was slowed down -> by what."""
    return {arm["order"]: words for arm in arms if (words := slowdown(arm))}


def said(words: Iterable[Sequence[str]]) -> str:
    """`sw thermal, hw thermal`: all that slowed some requests down, each once."""
    return ", ".join(dict.fromkeys(word for each in words for word in each))


def slow_words(arms: Sequence[Arm]) -> str:
    """`2 of 12 requests under sw thermal (candidate 2, baseline 0), SM 1980 -> 1350 MHz`; "" where nothing was slowed down."""
    found = slowed(arms)
    if not found:
        return ""
    names = sorted({arm["arm"] for arm in arms}, reverse=True)
    counts = [f"{name} {sum(arm['arm'] == name for arm in arms if arm['order'] in found)}" for name in names]
    of = f" ({', '.join(counts)})" if len(names) > 1 else ""
    clocks = values_of(arms, "sm_mhz")
    slow = values_of([arm for arm in arms if arm["order"] in found], "sm_mhz")
    fall = f", SM {max(clocks)} -> {min(slow)} MHz" if slow and min(slow) < max(clocks) else ""
    return f"{len(found)} of {len(arms)} requests under {said(found.values())}{of}{fall}"


def values_of(arms: Iterable[Arm], key: str) -> list[float]:
    """A fact of the device's states before and after each request, where it was read."""
    return [
        end[key]
        for arm in arms
        if arm.get("device")
        for end in (arm["device"]["before"], arm["device"]["after"])
        if end.get(key) is not None
    ]


def _logs(arms: Sequence[Arm], quantity: str) -> list[float] | str:
    times = [time_of(arm, quantity) for arm in arms]
    if any(t is None for t in times):
        return "one output token has no gap"
    kept = [t for t in times if t is not None and 0 < t < math.inf]
    return [math.log(t) for t in kept] if len(kept) == len(times) else "a time is not a positive number"


def _centred(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    x_mean, y_mean = (math.fsum(axis) / len(points) for axis in zip(*points, strict=True))
    return [(x - x_mean, y - y_mean) for x, y in points]


def others_words(found: Mapping[str, Any] | None) -> str:
    """`2 other processes on the GPU with 1,024 B`, of the fact `other_processes`; "" where there are none, or nobody knows."""
    if not found or not found["count"]:
        return ""
    held = "" if found["bytes"] is None else f" with {found['bytes']:,} B"
    return f"{found['count']} other process{'es' if found['count'] > 1 else ''} on the GPU{held}"

"""How stable the machine was while a record's requests were timed: drift, outliers, stalls, slowdowns. Pure.

A request is an entry of a latency record's `samples["arms"]`. Its time, in ms, is one of three quantities:
`ttft`, `itl` (the mean gap between its tokens), `request` (from submission to the last token). Without device
states, slowdowns are unknown and the rest is still computed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvbench.stats.intervals import Interval, exp, median, t_quantile

Arm = Mapping[str, Any]

LEAST_FOR_DRIFT = 4  # fewer requests leave no degrees of freedom

# Modified z-scores of Iglewicz and Hoaglin (1993): 0.6745 is the MAD of a standard normal distribution.
Z_LIMIT, MAD_OF_NORMAL = 3.5, 0.6745
LEAST_DISTANCE = 0.05  # a small sample can have a tiny MAD by chance: closer is never an outlier
LEAST_FOR_OUTLIERS = 5

STALL = 2.0  # a step that takes more than this many medians of its request
LEAST_FOR_STALLS = 5

# Throttle reasons (all: machine/device_state.py) that lower clocks; a power cap is normal at full load.
SLOWDOWNS = ("hw slowdown", "sw thermal", "hw thermal", "hw power brake")
QUOTA, THERMAL = "cpu quota", "thermal violation"
LOST_SHARE = 0.01  # counters of lost time count from this share of the request's time


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
    """Least squares of log(time) = level of the arm + slope * order, with one slope for both arms. error: of
    the slope; degrees: requests - arms - 1; first, last: orders of the first and last request."""

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
        """95% t-interval of `pct`."""
        half = t_quantile(self.degrees) * self.error
        return self._pct(self.slope - half), self._pct(self.slope + half)

    @property
    def significant(self) -> bool:
        low, high = self.interval
        return low > 0 or high < 0

    def _pct(self, slope: float) -> float:
        return 100 * (exp(slope * (self.last - self.first)) - 1)


def drift(arms: Sequence[Arm], quantity: str = "request") -> Drift | str:
    """The drift over these requests of one or two arms, or the reason why there is none."""
    if len(arms) < LEAST_FOR_DRIFT:
        return f"drift needs {LEAST_FOR_DRIFT} requests, {len(arms)} were measured"
    logs = _logs(arms, quantity)
    if isinstance(logs, str):
        return logs
    groups: dict[str, list[tuple[float, float]]] = {}
    for arm, y in zip(arms, logs, strict=True):
        groups.setdefault(arm["arm"], []).append((float(arm["order"]), y))
    centred = [pair for group in groups.values() for pair in _centred(group)]
    spread, degrees = math.fsum(x * x for x, _ in centred), len(arms) - len(groups) - 1
    if spread == 0 or degrees < 1:
        return "each arm has only one request"
    slope = math.fsum(x * y for x, y in centred) / spread
    rest = math.fsum((y - slope * x) ** 2 for x, y in centred)
    orders = [arm["order"] for arm in arms]
    return Drift(slope, math.sqrt(rest / degrees / spread), degrees, min(orders), max(orders))


def outliers(arms: Sequence[Arm], quantity: str) -> dict[int, float] | str:
    """Order of each outlying request -> its time over its arm's median, or the reason why none is looked for:
    a modified z-score above 3.5 (of log times, within the arm), and 5% or more from the median."""
    found: dict[int, float] = {}
    for name in dict.fromkeys(arm["arm"] for arm in arms):
        own = [arm for arm in arms if arm["arm"] == name]
        if len(own) < LEAST_FOR_OUTLIERS:
            return f"outliers need {LEAST_FOR_OUTLIERS} requests per arm, the {name} has {len(own)}"
        logs = _logs(own, quantity)
        if isinstance(logs, str):
            return logs
        middle = median(logs)
        distances = [abs(y - middle) for y in logs]
        mad = median(distances)
        for arm, y, distance in zip(own, logs, distances, strict=True):
            if distance >= math.log1p(LEAST_DISTANCE) and MAD_OF_NORMAL * distance > Z_LIMIT * mad:
                found[arm["order"]] = exp(y - middle)
    return found


def stalls(arm: Arm) -> int | None:
    """How many steps of a request take more than twice its median step; None for fewer than 5 steps."""
    gaps = arm["itl_ms"]
    if len(gaps) < LEAST_FOR_STALLS:
        return None
    limit = STALL * median(gaps)
    return sum(1 for gap in gaps if gap > limit)


def slowdown(arm: Arm) -> tuple[str, ...] | None:
    """What slowed the device down during a request: a throttle reason of SLOWDOWNS before or after it, or a
    counter (thermal violations, CPU quota) that grew by 1% or more of its time; () for nothing, None where
    that could not be read."""
    state = arm.get("device")
    if not state:
        return None
    ends = before, after = state["before"], state["after"]
    reasons = {reason for end in ends for reason in end.get("reasons") or ()}
    found = [reason for reason in SLOWDOWNS if reason in reasons]
    took = time_of(arm, "request") or 0.0
    for key, unit_ms, name in (("thermal_ns", 1e-6, THERMAL), ("quota_us", 1e-3, QUOTA)):
        lost = grown(before, after, key)
        if lost and lost * unit_ms >= LOST_SHARE * took:
            found.append(name)
    if "reasons" in before:  # a GPU: only its own reasons can exclude a slowdown
        known = all(end["reasons"] is not None for end in ends)
    else:  # a CPU reports its quota only
        known = grown(before, after, "quota_us") is not None
    return tuple(found) if found or known else None


def grown(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> int | None:
    """How much a counter grew between two states; None where it was not read."""
    first, last = before.get(key), after.get(key)
    return None if first is None or last is None else int(last - first)


def slowed(arms: Iterable[Arm]) -> dict[int, tuple[str, ...]]:
    """Order of each slowed request -> what slowed it."""
    return {arm["order"]: causes for arm in arms if (causes := slowdown(arm))}


def slowdown_text(arms: Sequence[Arm]) -> str:
    """`2 of 12 requests under sw thermal (candidate 2, baseline 0), SM 1980 -> 1350 MHz`, or ""."""
    found = slowed(arms)
    if not found:
        return ""
    causes = ", ".join(dict.fromkeys(cause for each in found.values() for cause in each))
    names = sorted({arm["arm"] for arm in arms}, reverse=True)
    counts = [f"{name} {sum(arm['arm'] == name for arm in arms if arm['order'] in found)}" for name in names]
    by_arm = f" ({', '.join(counts)})" if len(names) > 1 else ""
    clocks = device_values(arms, "sm_mhz")
    slow = device_values([arm for arm in arms if arm["order"] in found], "sm_mhz")
    fall = f", SM {max(clocks)} -> {min(slow)} MHz" if slow and min(slow) < max(clocks) else ""
    return f"{len(found)} of {len(arms)} requests under {causes}{by_arm}{fall}"


def device_values(arms: Iterable[Arm], key: str) -> list[float]:
    """A quantity of the device's states before and after each request, where it was read."""
    states = [arm["device"][end] for arm in arms if arm.get("device") for end in ("before", "after")]
    return [state[key] for state in states if state.get(key) is not None]


def other_processes_text(found: Mapping[str, Any] | None) -> str:
    """`2 other processes on the GPU with 1,024 B`, from the fact `other_processes`, or ""."""
    if not found or not found["count"]:
        return ""
    held = "" if found["bytes"] is None else f" with {found['bytes']:,} B"
    return f"{found['count']} other process{'es' if found['count'] > 1 else ''} on the GPU{held}"


def _logs(arms: Sequence[Arm], quantity: str) -> list[float] | str:
    times = [time_of(arm, quantity) for arm in arms]
    if any(t is None for t in times):
        return "one output token has no gap"
    kept = [t for t in times if t is not None and 0 < t < math.inf]
    return [math.log(t) for t in kept] if len(kept) == len(times) else "a time is not a positive number"


def _centred(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    x_mean, y_mean = (math.fsum(axis) / len(points) for axis in zip(*points, strict=True))
    return [(x - x_mean, y - y_mean) for x, y in points]

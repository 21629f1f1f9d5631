"""The status of a value with an interval against a limit.

    pass          the whole interval is within the limit, and the sample could have shown a violation (below)
    fail          the whole interval is outside the limit, also after Holm's correction over the family
    inconclusive  otherwise

The interval has 95% confidence, or more where a sample is judged as it grows (`kvbench.stats.sequential`).

A family is the checks of a run that make one claim: the same metric, variant and limit, over cells. A pass is
never corrected: more cells make it no easier. A failure is corrected, because one of 40 sound cells is
outside its limit by chance; such a cell is inconclusive.

A limit next to no change (`Metric.none`: a difference of 0, a ratio of 1) asks for the absence of an effect,
which a sample too small to show it cannot prove. Such a pass needs, in addition, that the distance from no
change to the limit is at least the minimum detectable effect, or that the interval excludes no change on the
allowed side. A limit of exactly no change ("not slower") leaves no distance; only the interval counts there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvbench.gate.verdict import FAIL, INCONCLUSIVE, PASS
from kvbench.stats.intervals import POWER
from kvbench.stats.p_values import holm
from kvbench.stats.power import Spread
from kvbench.stats.sequential import Look


@dataclass(frozen=True)
class Limits:
    """The closed interval [low, high] that a value has to keep; none: the value that is no change."""

    low: float
    high: float
    none: float | None = None

    def keeps(self, value: float) -> bool:
        return self.low <= value <= self.high

    def nearest(self, value: float) -> float:
        """The end that decides: the nearer one; one end is infinite for a one-sided limit."""
        return min((self.low, self.high), key=lambda end: abs(value - end))


@dataclass(frozen=True)
class Ruling:
    """The status of one value. reason: a key of `verdict.REASONS`; text: in words, without a full stop; no_n:
    why no deciding number of samples is known, where an inconclusive ruling has no `n_needed`."""

    status: str
    reason: str
    text: str
    mde: float | None = None
    n_needed: int | None = None
    no_n: str = ""


def decide(
    value: float,
    spread: Spread | None,
    n: int | None,
    sampled: bool,
    limits: Limits,
    adjusted: float | None = None,
    family: int = 1,
    look: Look | None = None,
) -> Ruling:
    """sampled: whether the value should have an interval; adjusted: None for a check in no family."""
    if spread is not None:
        p_value = broken(spread, limits) if adjusted is None else adjusted
        return rule(spread, n, limits, p_value, family, look)
    if sampled:
        text = "the sample is too small for an interval"
        return Ruling(INCONCLUSIVE, "no_interval", text, no_n=NO_INTERVAL)
    return KEPT if limits.keeps(value) else BROKEN


def rule(
    spread: Spread, n: int | None, limits: Limits, adjusted: float, family: int, look: Look | None = None
) -> Ruling:
    """The ruling on an estimate. adjusted: p-value of `broken` after Holm over `family` checks."""
    ruling = _rule(spread, n, limits, adjusted, family)
    if ruling.status == PASS and look and not look.last and spread.skewed:
        text = "the interval is within it, but an estimate this skewed passes at its last look only"
        return Ruling(INCONCLUSIVE, "skewed", text, ruling.mde, no_n="the last look decides")
    return ruling


def _rule(spread: Spread, n: int | None, limits: Limits, adjusted: float, family: int) -> Ruling:
    low, high = spread.low, spread.high
    end = limits.nearest(spread.value)
    status = _plain(limits, low, high)
    if not (math.isfinite(low) and math.isfinite(high) and math.isfinite(end)):
        endless = replace(SPANS_LIMIT, no_n="the interval has no end, so no number of samples is known")
        return {PASS: KEPT, FAIL: BROKEN}.get(status, endless)
    kept = limits.keeps(spread.value)
    # The side of the limit on which the value lies; a value at the very limit would have to pass.
    above = (end == limits.low) == kept if limits.low != limits.high else spread.value > end
    mde = spread.detectable(end, above)
    # To pass between two limits both must be cleared: each with 90% power, for 80% together. To fail, Holm's
    # correction must be cleared too, at most that of the smallest p-value of the family.
    between = kept and math.isfinite(limits.low) and math.isfinite(limits.high)
    power = (1 + POWER) / 2 if between else POWER
    n_needed = spread.needed(n, end, above, power, 1 - spread.alpha / 2 / (1 if kept else family))
    no_n = "" if n_needed is not None else NO_COUNT if n is None else AT_LIMIT
    if status == INCONCLUSIVE:
        return replace(SPANS_LIMIT, mde=mde, n_needed=n_needed, no_n=no_n)
    if status == FAIL:
        if adjusted <= spread.alpha:
            return replace(BROKEN, mde=mde, n_needed=n_needed)
        chance = f"with {family} checks of this claim that may happen by chance (Holm: p = {adjusted:.2g})"
        text = f"the interval is outside it, but {chance}"
        return Ruling(INCONCLUSIVE, "may_be_chance", text, mde, n_needed, no_n)
    distance = abs(limits.none - end) if limits.none is not None and limits.keeps(limits.none) else 0.0
    if distance == 0 or mde <= distance or not low <= (limits.none or 0.0) <= high:
        return replace(KEPT, mde=mde, n_needed=n_needed)
    small = "the interval is within it, but the sample is too small to show a violation"
    text = f"{small} ({distance:.3g} from no change)"
    more = spread.samples(n, mde, distance)
    return Ruling(INCONCLUSIVE, "underpowered", text, mde, more, NO_COUNT if more is None else "")


def _plain(limits: Limits, low: float, high: float) -> str:
    """The status of [low, high]; a NaN end compares false and is thus inconclusive."""
    if limits.low <= low and high <= limits.high:
        return PASS
    return FAIL if low > limits.high or high < limits.low else INCONCLUSIVE


def broken(spread: Spread | None, limits: Limits) -> float:
    """The p-value of "the true value is within the limits", before correction; 1 for a value within them."""
    if spread is None or not all(map(math.isfinite, (spread.value, spread.low, spread.high))):
        return 1.0
    return 1.0 if limits.keeps(spread.value) else spread.p_value(limits.nearest(spread.value))


def corrected(p_values: Sequence[float], families: Sequence[object]) -> list[tuple[float, int]]:
    """(p-value after Holm, size of its family) of each, corrected among those with an equal family."""
    places: dict[object, list[int]] = {}
    for i, family in enumerate(families):
        places.setdefault(family, []).append(i)
    found: list[tuple[float, int]] = [(1.0, 1)] * len(p_values)
    for members in places.values():
        for i, p in zip(members, holm([p_values[i] for i in members]), strict=True):
            found[i] = (p, len(members))
    return found


KEPT = Ruling(PASS, "kept", "within the limit")
BROKEN = Ruling(FAIL, "broken", "outside the limit")
SPANS_LIMIT = Ruling(
    INCONCLUSIVE, "spans_limit", "the interval lies on both sides of it, so more data must decide"
)

# Why no deciding number of samples is known.
NO_COUNT = "the record does not hold the number of samples, so no deciding number is known"
AT_LIMIT = "the value is at the limit itself, so no number of samples would decide"
NO_INTERVAL = "the deciding number of samples is unknown without an interval"

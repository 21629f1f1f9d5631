"""Whether a value with an interval keeps a limit, breaks it, or leaves it open: passing is made hard, and failing too.

    pass          the whole interval keeps the limit, and so much data could have decided it (below)
    fail          the whole interval breaks the limit, and still does after Holm's correction over the family
    inconclusive  everything between

The interval is one of 95%, or of more where the sample is one of several looks (`kvbench.stats.sequential`); then 5% below is its share of that.

A family is the checks of a run that make one claim: the same metric, variant and limit, over cells. Correcting is
conservative for whoever would ship only where it makes passing harder; over many cells it makes failing harder. So nothing is
corrected towards a pass: each cell passes at the unadjusted level or not at all, and all of them have to, which no number of
cells makes easier. Only a failure is corrected, since of 40 cells that are fine one breaks its limit by chance; it becomes
inconclusive (exit code 4), which ships nothing either, and says what more data would decide.

A limit next to no change (`Metric.none`: a difference of 0, a ratio of 1) asks for an absence, which data too few to see the
change that the limit forbids cannot show. There a pass also needs that the room between no change and the limit is at
least the minimum detectable effect, or that the interval excludes no change, on the right side of the limit: an effect that
is seen needs no power to be seen. A limit of no change itself ("not slower") leaves no room, and is left to the interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.gate.verdict import FAIL, INCONCLUSIVE, PASS
from kvbench.stats.intervals import POWER, holm
from kvbench.stats.power import Spread
from kvbench.stats.sequential import Look


@dataclass(frozen=True)
class Limits:
    """The closed interval [low, high] that a value has to keep; none: the value that is no change, or None."""

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
    """What is found of one value. reason: one of those below, the sentence's second half without its full stop.

    hopeless: why no number of samples can be named that would decide, where `n_needed` is None and the status is open.
    """

    status: str
    reason: str
    mde: float | None = None
    n_needed: int | None = None
    hopeless: str = ""


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
    """A value with its interval, if it has one; sampled: whether it should have one. adjusted None: of no family but its own."""
    if spread is not None:
        p_value = broken(spread, limits) if adjusted is None else adjusted
        return rule(spread, n, limits, p_value, family, look)
    if sampled:
        return Ruling(INCONCLUSIVE, NO_INTERVAL, hopeless=NO_WIDTH)
    kept = limits.keeps(value)
    return Ruling(PASS if kept else FAIL, "kept" if kept else "broken")


def rule(
    spread: Spread, n: int | None, limits: Limits, adjusted: float, family: int, look: Look | None = None
) -> Ruling:
    """adjusted: the p-value of `broken` after Holm over `family` checks. look: at which `spread` stands, at its confidence."""
    ruling = _rule(spread, n, limits, adjusted, family)
    if ruling.status == PASS and look and not look.last and spread.skewed:
        return Ruling(INCONCLUSIVE, SKEWED, ruling.mde, hopeless=LATER)
    return ruling


def _rule(spread: Spread, n: int | None, limits: Limits, adjusted: float, family: int) -> Ruling:
    low, high = spread.low, spread.high
    end = limits.nearest(spread.value)
    if not (math.isfinite(low) and math.isfinite(high) and math.isfinite(end)):
        status = _plain(limits, low, high)
        reason = {PASS: "kept", FAIL: "broken"}.get(status, BOTH_SIDES)
        return Ruling(status, reason, hopeless=ENDLESS if status == INCONCLUSIVE else "")
    kept = limits.keeps(spread.value)
    # The side of the limit on which the value lies; a value at the very limit would have to pass.
    above = (end == limits.low) == kept if limits.low != limits.high else spread.value > end
    mde = spread.detectable(end, above)
    # To pass between two limits both have to be cleared: each with 90% power, for 80% together. To fail, Holm's correction has to
    # be cleared too, at most that of the smallest p-value of the family.
    between = kept and math.isfinite(limits.low) and math.isfinite(limits.high)
    n_needed = spread.needed(
        n, end, above, (1 + POWER) / 2 if between else POWER, 1 - spread.alpha / 2 / (1 if kept else family)
    )
    hopeless = "" if n_needed is not None else NO_COUNT if n is None else AT_LIMIT
    status = _plain(limits, low, high)
    if status == INCONCLUSIVE:
        return Ruling(status, BOTH_SIDES, mde, n_needed, hopeless)
    if status == FAIL:
        if adjusted <= spread.alpha:
            return Ruling(FAIL, "broken", mde, n_needed)
        by_chance = f"{CHANCE.format(family=family)} (Holm: p = {adjusted:.2g})"
        return Ruling(INCONCLUSIVE, by_chance, mde, n_needed, hopeless)
    room = abs(limits.none - end) if limits.none is not None and limits.keeps(limits.none) else 0.0
    if room == 0 or mde <= room or not low <= (limits.none or 0.0) <= high:
        return Ruling(PASS, "kept", mde, n_needed)
    more = spread.samples(n, mde, room)
    return Ruling(
        INCONCLUSIVE, f"{TOO_NARROW} ({room:.3g} away)", mde, more, NO_COUNT if more is None else ""
    )


def _plain(limits: Limits, low: float, high: float) -> str:
    """[low, high] against the limits; a NaN bound compares false and is thus inconclusive."""
    if limits.low <= low and high <= limits.high:
        return PASS
    return FAIL if low > limits.high or high < limits.low else INCONCLUSIVE


def broken(spread: Spread | None, limits: Limits) -> float:
    """The p-value of "the true value keeps the limits", to be corrected over a family: 1 for a value that keeps them."""
    if spread is None or not all(map(math.isfinite, (spread.value, spread.low, spread.high))):
        return 1.0
    return 1.0 if limits.keeps(spread.value) else spread.p_value(limits.nearest(spread.value))


def corrected(p_values: Sequence[float], families: Sequence[object]) -> list[tuple[float, int]]:
    """(p-value after Holm, size of its family) of each, over those with an equal family."""
    places: dict[object, list[int]] = {}
    for i, family in enumerate(families):
        places.setdefault(family, []).append(i)
    found: list[tuple[float, int]] = [(1.0, 1)] * len(p_values)
    for members in places.values():
        for i, p in zip(members, holm([p_values[i] for i in members]), strict=True):
            found[i] = (p, len(members))
    return found


BOTH_SIDES = "the interval lies on both sides of it, so more data must decide"
CHANCE = "the interval breaks it, but of {family} checks of this claim one may by chance"
TOO_NARROW = "the interval keeps it, but so few data cannot tell no change from what it forbids"
SKEWED = "the interval keeps it, but an estimate this skewed passes at its last look only"
NO_INTERVAL = "so small a sample has no interval, and a bare value decides nothing"

# Why no n is named.
ENDLESS = "the interval has no end, so no number of samples can be named"
NO_COUNT = "how many samples it is of is not recorded, so no number can be named"
AT_LIMIT = "the value lies at the limit itself, so no number of samples would decide"
LATER = "the last look decides"
NO_WIDTH = "how many would decide cannot be told without one"

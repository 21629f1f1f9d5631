"""Power of an interval: the p-value of a limit, the minimum detectable effect, and the required sample size.

All of it follows from a value, its 95% interval and its number of independent units, so stored results can be
judged too. An interval is symmetric on its unit's scale: the logarithm for ratios and percentages, the plain
value for points, Wilson's score for shares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from kvbench.stats.intervals import CONFIDENCE, POWER, t_quantile, wilson

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Spread:
    """A value with its interval at `confidence`. unit: name of a unit, which sets the scale; units: clusters
    or pairs behind a t-interval, None for a normal interval (shares, paired outcomes)."""

    value: float
    low: float
    high: float
    unit: str
    units: float | None = None
    confidence: float = CONFIDENCE

    @property
    def alpha(self) -> float:
        return 1 - self.confidence

    @property
    def skewed(self) -> bool:
        """Whether its interval covers less than its level, the more so at a higher one: a divergence, or a
        share over documents (tests/stats/test_sequential.py)."""
        return self.unit == "nat" or (self.unit == "share" and self.units is not None)

    def at(self, confidence: float) -> Spread:
        """The same value with its interval at a higher confidence, each side widened on the unit's scale.

        A share's effective n shrinks by the ratio of t to normal quantiles where it came from a t-interval.
        Wilson's interval is too narrow for a share near 0 or 1, so it is joined with Clopper and Pearson's.
        """
        wider = replace(self, confidence=confidence)
        if confidence == self.confidence or not math.isfinite(self.value):
            return self
        if self.unit != "share":
            factor, centre = (
                wider._quantile(wider._level) / self._quantile(self._level),
                self._scale(self.value),
            )
            low, high = (
                self._unscale(centre + (self._scale(end) - centre) * factor) for end in (self.low, self.high)
            )
            return replace(wider, low=min(self.low, low), high=max(self.high, high))
        n = self._effective()
        if math.isinf(n):
            return wider
        if n == 0:
            return replace(wider, low=0.0, high=1.0)
        if self.units is not None:
            t, wider_t = (t_quantile(self._degrees, spread._level) for spread in (self, wider))
            n *= (wider._z / self._z * t / wider_t) ** 2
        successes = self.value * n
        ends = wilson(successes, n, wider._z), _clopper_pearson(successes, n, wider.alpha)
        lows, highs = zip(*ends, strict=True)
        return replace(wider, low=min(self.low, *lows), high=max(self.high, *highs))

    @property
    def _level(self) -> float:
        return (1 + self.confidence) / 2

    @property
    def _z(self) -> float:
        return _NORMAL.inv_cdf(self._level)

    @property
    def _degrees(self) -> float:
        return max(1.0, (self.units or 0.0) - 1)

    def p_value(self, limit: float) -> float:
        """Two-sided p-value of a true value at `limit`; below `alpha` where the interval excludes it."""
        if self.value == limit:
            return 1.0
        if self.unit == "share":  # the error under a true value at the limit
            n = self._effective()
            error = math.sqrt(limit * (1 - limit) / n) if n else math.inf
        else:
            error = self._side(limit > self.value)
        if error == 0:
            return 0.0
        score = -abs(self._scale(self.value) - self._scale(limit)) / error
        if self.units is None or self.unit == "share":
            return 2 * _NORMAL.cdf(score)
        from scipy.special import stdtr

        return 2 * float(stdtr(self._degrees, score))

    def detectable(
        self, limit: float, above: bool, power: float = POWER, level: float | None = None
    ) -> float:
        """The smallest distance of a true value above (or below) `limit` that puts the interval on that side
        with `power`; infinite where no possible value does. level: one-sided, of the interval's end.
        """
        level = self._level if level is None else level
        if self.unit == "share":
            return self._detectable_share(limit if above else 1 - limit, power, level)
        steps = (self._quantile(level) + self._quantile(power)) * (1 if above else -1)
        # Above the limit, the interval's lower end has to clear it.
        return abs(self._unscale(self._scale(limit) + steps * self._side(not above)) - limit)

    def needed(
        self, n: int | None, limit: float, above: bool, power: float = POWER, level: float | None = None
    ) -> int | None:
        """How many samples would put the interval on the value's side of `limit`, if the value found in `n`
        samples is the true one; None where no number would. Other arguments as in `detectable`.

        For a share: the n of the score test that Wilson's interval inverts.
        """
        distance = abs(self.value - limit)
        if self.unit != "share":
            return self.samples(n, self.detectable(limit, above, power, level), distance)
        if n is None or not distance > 1e-6 or not self._effective():
            return None
        z = _NORMAL.inv_cdf(self._level if level is None else level) * math.sqrt(limit * (1 - limit))
        z_power = _NORMAL.inv_cdf(power) * math.sqrt(self.value * (1 - self.value))
        needed = ((z + z_power) / distance) ** 2 * n / self._effective()
        return math.ceil(needed - 1e-9) if math.isfinite(needed) else None

    def samples(self, n: int | None, detectable: float, distance: float) -> int | None:
        """How many samples detect `distance` where `n` detect `detectable`; None where no number would.

        The error falls with sqrt(n); of paired outcomes, with sqrt(d n + 2) / (n + 2) for a differing share d
        (Bonett and Price).
        """
        if n is None or not math.isfinite(detectable) or not distance > 1e-6 * detectable:
            return None
        if self.unit != "pt" or self.units is not None or not detectable > 0:
            return math.ceil(n * (detectable / distance) ** 2 - 1e-9)
        half, centre = (self.high - self.low) / 200, (self.high + self.low) / 200
        differing = (n + 2) * ((half / self._z) ** 2 * (n + 2) + centre**2) - 2
        d = min(1.0, max(0.0, differing / n))
        goal = (math.sqrt(d * n + 2) / (n + 2) * distance / detectable) ** 2
        return max(1, math.ceil((d + math.sqrt(d * d + 8 * goal * (1 - d))) / (2 * goal) - 2 - 1e-9))

    def _detectable_share(self, limit: float, power: float, level: float) -> float:
        """`detectable` above `limit`, by the score test that Wilson's interval inverts."""
        n = self._effective()
        if math.isinf(n) or n == 0:
            return math.inf if n == 0 else 0.0
        threshold = limit + _NORMAL.inv_cdf(level) * math.sqrt(limit * (1 - limit) / n)
        low, high, z = limit, 1.0, _NORMAL.inv_cdf(power)
        if threshold >= 1:
            return math.inf
        for _ in range(60):  # bisection: p - z * error grows with p from the threshold on
            p = (low + high) / 2
            detected = p - z * math.sqrt(p * (1 - p) / n) >= threshold
            low, high = (low, p) if detected else (p, high)
        return high - limit

    def _side(self, upper: bool) -> float:
        """The standard error on one side of the value."""
        end = self.high if upper else self.low
        return abs(self._scale(end) - self._scale(self.value)) / self._quantile(self._level)

    def _effective(self) -> float:
        """Effective n of a Wilson interval: (value - end)^2 = z^2 end (1 - end) / n at the farther end, which
        is the more precise one. An end at 0 or 1 was cut off and is not used; 0 where both were."""
        ends = [end for end in (self.low, self.high) if 0 < end < 1]
        end = max(ends, key=lambda e: abs(e - self.value), default=self.value)
        if end == self.value:
            return math.inf if self.low == self.high else 0.0
        return self._z**2 * end * (1 - end) / (self.value - end) ** 2

    def _scale(self, x: float) -> float:
        if self.unit in ("ratio", "nat") and self.low > 0:
            return math.log(x) if x > 0 else -math.inf
        if self.unit == "%":
            return math.log1p(x / 100) if x > -100 else -math.inf
        return x

    def _unscale(self, x: float) -> float:
        try:
            if self.unit in ("ratio", "nat") and self.low > 0:
                return math.exp(x)
            return 100 * math.expm1(x) if self.unit == "%" else x
        except OverflowError:
            return math.inf

    def _quantile(self, level: float) -> float:
        if self.units is None or self.unit == "share":
            return _NORMAL.inv_cdf(level)
        return t_quantile(self._degrees, level)


def _clopper_pearson(successes: float, n: float, alpha: float) -> tuple[float, float]:
    from scipy.special import betaincinv

    failures = n - successes
    low = float(betaincinv(successes, failures + 1, alpha / 2)) if successes > 0 else 0.0
    high = float(betaincinv(successes + 1, failures, 1 - alpha / 2)) if failures > 0 else 1.0
    return low, high

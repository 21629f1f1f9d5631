"""What an interval can decide: the p-value of a limit, the smallest effect that so much data decides, and the n that is needed.

All of it is worked out from a value, its 95% interval and its independent units, so that old results and other tools' can be
judged too. An interval is symmetric on some scale: a ratio or a percentage on its logarithm, points as they are, a share
by Wilson's score. Nothing here knows of gates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from kvbench.stats.intervals import CONFIDENCE, POWER, wilson

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Spread:
    """value with low <= value <= high, its interval at `confidence`, in `unit` (`metrics.UNIT_DOMAIN`).

    units: the clusters or pairs behind a t-interval, None where it is a normal one (shares, paired outcomes).
    """

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
        """A divergence, or a share over documents: near its end its interval covers less than it says, and the less the further
        out (tests/stats/test_looks.py)."""
        return self.unit == "nat" or (self.unit == "share" and self.units is not None)

    def at(self, confidence: float) -> Spread:
        """The same value with its interval at a higher confidence, each side widened on its own scale.

        A share's n is one of a normal interval; where its width came from a t-interval over units, it is worth less further out.
        Wilson's interval follows the normal tail, which a share near 0 or 1 leaves the sooner the further out it is looked at, so
        it is joined with the exact one (Clopper and Pearson).
        """
        wider = replace(self, confidence=confidence)
        if confidence == self.confidence or not math.isfinite(self.value):
            return self
        if self.unit != "share":
            factor = wider._quantile(wider._level) / self._quantile(self._level)
            ends = [self._unscale(self._from_value(end, factor)) for end in (self.low, self.high)]
            return replace(wider, low=min(self.low, ends[0]), high=max(self.high, ends[1]))
        n = self._effective()
        if math.isinf(n):
            return wider
        if n == 0:
            return replace(wider, low=0.0, high=1.0)
        if self.units is not None:
            t, wider_t = (_t(self.units, spread._level) for spread in (self, wider))
            n *= (wider._z / self._z * t / wider_t) ** 2
        both = wilson(self.value * n, n, wider._z), _exact(self.value * n, n, wider.alpha)
        return replace(
            wider, low=min(self.low, *(x[0] for x in both)), high=max(self.high, *(x[1] for x in both))
        )

    def _from_value(self, end: float, factor: float) -> float:
        centre = self._scale(self.value)
        return centre + (self._scale(end) - centre) * factor

    @property
    def _level(self) -> float:
        return (1 + self.confidence) / 2

    @property
    def _z(self) -> float:
        return _NORMAL.inv_cdf(self._level)

    def p_value(self, limit: float) -> float:
        """Two-sided, of a true value at `limit`: below `alpha` exactly where the interval leaves it out."""
        if self.value == limit:
            return 1.0
        error = self._error(limit)
        if error == 0:
            return 0.0
        distance = abs(self._scale(self.value) - self._scale(limit))
        return 2 * self._tail(distance / error)

    def detectable(
        self, limit: float, above: bool, power: float = POWER, level: float | None = None
    ) -> float:
        """The smallest distance of a true value above (or below) `limit` at which the interval of so much data lies on that
        side of it with that power; infinite where no value that there can be does. level: of the interval's one end, its own where None.
        """
        level = self._level if level is None else level
        if self.unit == "share":
            return self._detectable_share(limit if above else 1 - limit, power, level)
        sign = 1 if above else -1
        steps = self._quantile(level) + self._quantile(power)
        # Above the limit it is the lower end of an interval that has to clear it.
        error = self._side(not above)
        return abs(self._unscale(self._scale(limit) + sign * steps * error) - limit)

    def needed(
        self, n: int | None, limit: float, above: bool, power: float = POWER, level: float | None = None
    ) -> int | None:
        """How many samples would put the interval on the value's side of `limit`, if the true value is the one that was found
        in `n`; arguments as of `detectable`. None where no number would.

        Of a share it is the n of the score test that Wilson's interval inverts, whose alternative has its own variance: none
        at 0 and 1, where the first n whose interval clears the limit is exact.
        """
        distance = abs(self.value - limit)
        if self.unit != "share":
            return self.samples(n, self.detectable(limit, above, power, level), distance)
        if n is None or not distance > 1e-6 or not self._effective():
            return None
        z, z_power, p = (
            _NORMAL.inv_cdf(self._level if level is None else level),
            _NORMAL.inv_cdf(power),
            self.value,
        )
        root = (z * math.sqrt(limit * (1 - limit)) + z_power * math.sqrt(p * (1 - p))) / distance
        return math.ceil(root**2 * n / self._effective() - 1e-9)

    def samples(self, n: int | None, detectable: float, distance: float) -> int | None:
        """How many samples would decide an effect of `distance`, of which `n` detect `detectable`; None where no number would.

        The error falls with the root of n; of paired picks faster, where few of them differ: Bonett and Price's interval counts one
        more on either side, so that its error is sqrt(d n + 2) / (n + 2) where a share d differs, and of the order 1 / n at d = 0.
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
        """Above `limit`, by the score test that Wilson's interval inverts; the alternative has its own variance."""
        n = self._effective()
        if math.isinf(n) or n == 0:
            return math.inf if n == 0 else 0.0
        threshold = limit + _NORMAL.inv_cdf(level) * math.sqrt(limit * (1 - limit) / n)
        low, high, z = limit, 1.0, _NORMAL.inv_cdf(power)
        if threshold >= 1:
            return math.inf
        for _ in range(60):  # the left side grows with p where it matters: up to the threshold it is below it
            p = (low + high) / 2
            if p - z * math.sqrt(p * (1 - p) / n) >= threshold:
                high = p
            else:
                low = p
        return high - limit

    def _error(self, limit: float) -> float:
        """The standard error towards `limit`; of a share, that which it would have if the limit were true."""
        if self.unit == "share":
            n = self._effective()
            return math.sqrt(limit * (1 - limit) / n) if n else math.inf
        return self._side(limit > self.value)

    def _side(self, upper: bool) -> float:
        end = self.high if upper else self.low
        return abs(self._scale(end) - self._scale(self.value)) / self._quantile(self._level)

    def _effective(self) -> float:
        """The n of a Wilson interval: (value - end)^2 = z^2 end (1 - end) / n at either end; the farther one is told best. An end at 0 or
        1 of another kind of interval was cut off there and tells none; 0 where neither does."""
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
        return _t(self.units, level)

    def _tail(self, score: float) -> float:
        if self.units is None or self.unit == "share":
            return _NORMAL.cdf(-score)
        from scipy.special import stdtr

        return float(stdtr(max(1, self.units - 1), -score))


def _t(units: float, level: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(max(1, units - 1), level))


def _exact(successes: float, n: float, alpha: float) -> tuple[float, float]:
    from scipy.special import betaincinv

    failures = n - successes
    low = float(betaincinv(successes, failures + 1, alpha / 2)) if successes > 0 else 0.0
    high = float(betaincinv(successes + 1, failures, 1 - alpha / 2)) if failures > 0 else 1.0
    return low, high

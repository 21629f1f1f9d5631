"""Statistics that the metrics are made of. Pure; small inputs and huge ones alike; a NaN stays a NaN.

Intervals are two-sided 95% intervals as (low, high), or None where the data cannot give one. The distributions come
from `scipy.special`, imported when first needed: it starts in a fraction of the time of `scipy.stats`, against which
the tests check every function here.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
POWER = 0.8

Interval = tuple[float, float]

_Z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest sample with at least a share `q` of the gaps between samples below it (numpy's method "higher").

    It is always an observed sample, never one interpolated downwards: one stall of 300 ms among 99 gaps of 10 ms gives
    p99 = 300 ms, where linear interpolation says 12.9 ms. Raises ValueError for no values or q outside [0, 1].
    """
    if not values or not 0 <= q <= 1:
        raise ValueError(
            f"A quantile takes at least 1 value and q in [0, 1], not {len(values)} values and q={q}."
        )
    if any(math.isnan(v) for v in values):
        return math.nan
    # 1e-9: q * (n - 1) may come out a hair above a whole number.
    return sorted(values)[math.ceil(q * (len(values) - 1) - 1e-9)]


def largest(values: Iterable[float]) -> float:
    """Like max, but a NaN anywhere gives NaN (max(1.0, nan) is 1.0). Raises ValueError for no values."""
    kept = list(values)
    return math.nan if any(math.isnan(v) for v in kept) else max(kept)


def smallest(values: Iterable[float]) -> float:
    """Like min, but a NaN anywhere gives NaN. Raises ValueError for no values."""
    kept = list(values)
    return math.nan if any(math.isnan(v) for v in kept) else min(kept)


def median(values: Iterable[float]) -> float:
    """Like statistics.median, but a NaN anywhere gives NaN (sorting one leaves it anywhere)."""
    kept = list(values)
    return math.nan if any(math.isnan(v) for v in kept) else statistics.median(kept)


def exp(x: float) -> float:
    """e^x; infinity where the float range ends (a collapsed model's perplexity), instead of OverflowError."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def wilson(successes: int, n: int) -> Interval:
    """Wilson score interval of a share, no continuity correction. Raises ValueError unless 0 <= successes <= n, n > 0."""
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"A share takes 0 <= successes <= n and n > 0, not {successes} of {n}.")
    p, z2 = successes / n, _Z * _Z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # At 0 and n successes one end is exact; rounding must not push it past the share itself.
    return (0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)


def mcnemar_p(b: int, c: int) -> float:
    """Exact two-sided McNemar p-value of discordant counts b and c: binomial with n = b + c and probability 1/2."""
    from scipy.special import bdtr

    return min(1.0, 2.0 * float(bdtr(min(b, c), b + c, 0.5))) if b + c else 1.0


def paired_difference(b: int, c: int, n: int) -> Interval:
    """Interval of (b - c) / n from paired outcomes: b pairs only the first won, c only the second, of n pairs.

    Bonett and Price's adjusted Wald interval on the discordant counts (one added to each, two to n), cut to [-1, 1].
    Unlike the plain Wald interval it has a width at b = c = 0, where n pairs without a difference are no certainty.
    """
    if b < 0 or c < 0 or b + c > n or n == 0:
        raise ValueError(f"Paired outcomes take b, c >= 0, b + c <= n and n > 0, not b={b}, c={c}, n={n}.")
    first, second = (b + 1) / (n + 2), (c + 1) / (n + 2)
    half = _Z * math.sqrt((first + second - (first - second) ** 2) / (n + 2))
    return max(-1.0, first - second - half), min(1.0, first - second + half)


def detectable_difference(b: int, c: int, n: int) -> float:
    """Smallest true (b - c) / n found significant with 80% power, given this many discordant pairs (at least 1 taken)."""
    return (_Z + statistics.NormalDist().inv_cdf(POWER)) * math.sqrt(max(b + c, 1)) / n


@dataclass(frozen=True)
class Estimate:
    """A value with its interval, and the number of independent units (clusters, pairs) the interval rests on."""

    value: float
    interval: Interval | None
    units: int


def clustered_ratio(
    numerators: Sequence[float], denominators: Sequence[float], clusters: Sequence[Hashable]
) -> Estimate:
    """sum(numerators) / sum(denominators) with a cluster-robust t-interval; no interval from fewer than 2 clusters.

    The ratio is linearised: a cluster's residual is its numerator less the ratio times its denominator, the standard
    error is sqrt(m / (m - 1) * sum(residual^2)) / sum(denominators), and t has m - 1 degrees of freedom.
    A numerator that is not finite makes the value NaN. Raises ValueError when the three lengths differ or the
    denominators add up to nothing.
    """
    total = math.fsum(denominators)
    if not total > 0:
        raise ValueError(f"A ratio takes denominators that add up to more than 0, not {total}.")
    if not all(map(math.isfinite, numerators)):
        return Estimate(math.nan, None, len(set(clusters)))
    value = math.fsum(numerators) / total
    residuals: dict[Hashable, float] = defaultdict(float)
    for top, bottom, cluster in zip(numerators, denominators, clusters, strict=True):
        residuals[cluster] += top - value * bottom
    m = len(residuals)
    if m < 2:
        return Estimate(value, None, m)
    error = math.sqrt(m / (m - 1) * math.fsum(r * r for r in residuals.values())) / total
    half = _t(m - 1) * error
    return Estimate(value, (value - half, value + half), m)


def paired_ratio(candidate: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Geometric mean of candidate / baseline over pairs, with a t-interval of the log-ratios (from 2 pairs on).

    A value that is not positive and finite has no log-ratio: the result is NaN. Raises ValueError for no pairs or
    for lengths that differ.
    """
    pairs = list(zip(candidate, baseline, strict=True))
    if not pairs:
        raise ValueError("A paired ratio takes at least 1 pair.")
    if not all(0 < x < math.inf for pair in pairs for x in pair):
        return Estimate(math.nan, None, len(pairs))
    logs = clustered_ratio([math.log(a / b) for a, b in pairs], [1.0] * len(pairs), range(len(pairs)))
    interval = logs.interval and (exp(logs.interval[0]), exp(logs.interval[1]))
    return Estimate(exp(logs.value), interval, len(pairs))


def _t(degrees: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))

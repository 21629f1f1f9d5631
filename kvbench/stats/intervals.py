"""Estimates with 95% intervals. Pure functions.

An interval is two-sided, (low, high), or None where the data cannot give one. A NaN in the input gives NaN.

Tokens of one document are not independent, so estimates over tokens are clustered by document. The
t-intervals here cover more than a bootstrap over few documents (of 5, the mean of a skewed divergence 92%
against 73%: tests/stats/test_coverage.py), so a bootstrap is shown but never decides.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

CONFIDENCE = 0.95
POWER = 0.8

Interval = tuple[float, float]
Floats = Sequence[float]
Clusters = Sequence[Hashable]

_LEVEL = (1 + CONFIDENCE) / 2
_Z = statistics.NormalDist().inv_cdf(_LEVEL)
_Z_POWER = statistics.NormalDist().inv_cdf(POWER)


def t_quantile(degrees: float, level: float = _LEVEL) -> float:
    """Quantile of Student's t distribution; by default the one of a two-sided 95% interval."""
    from scipy.special import stdtrit  # starts in a fraction of the time of scipy.stats

    return float(stdtrit(degrees, level))


def quantile(values: Sequence[float], q: float) -> float:
    """An observed sample, never an interpolated one (numpy's method "higher"): one stall of 300 ms among 99
    gaps of 10 ms gives p99 = 300 ms. Raises ValueError for no values or q outside [0, 1]."""
    if not values or not 0 <= q <= 1:
        raise ValueError(f"expected at least 1 value and q in [0, 1], got {len(values)} values and q={q}")
    if any(math.isnan(v) for v in values):
        return math.nan
    # 1e-9: q * (n - 1) may be slightly above a whole number.
    return sorted(values)[math.ceil(q * (len(values) - 1) - 1e-9)]


def largest(values: Iterable[float]) -> float:
    """max, but NaN if any value is NaN. Raises ValueError for no values."""
    kept = list(values)
    return math.nan if any(math.isnan(v) for v in kept) else max(kept)


def smallest(values: Iterable[float]) -> float:
    """min, but NaN if any value is NaN. Raises ValueError for no values."""
    kept = list(values)
    return math.nan if any(math.isnan(v) for v in kept) else min(kept)


def median(values: Iterable[float]) -> float:
    """statistics.median, but NaN if any value is NaN."""
    kept = list(values)
    return math.nan if any(math.isnan(v) for v in kept) else statistics.median(kept)


def median_interval(values: Sequence[float]) -> Interval | None:
    """Distribution-free interval of the median (at least 95%); None from fewer than 6 values.

    It ends at the k-th value from either end, k the largest with P(binomial(n, 1/2) < k) <= 2.5%."""
    n, k, below = len(values), 0, 1
    while below / 2**n <= (1 - CONFIDENCE) / 2:
        k += 1
        below += math.comb(n, k)
    ordered = sorted(values)
    return (ordered[k - 1], ordered[n - k]) if k and all(map(math.isfinite, values)) else None


def exp(x: float) -> float:
    """e^x; infinity instead of OverflowError."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def wilson(successes: float, n: float, z: float = _Z) -> Interval:
    """Wilson score interval of a share, without continuity correction. z: normal quantile of the confidence;
    n may be an effective sample size. Raises ValueError unless 0 <= successes <= n and n > 0."""
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"expected 0 <= successes <= n and n > 0, got {successes} of {n}")
    p, z2 = successes / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # At 0 and n successes one end is exact; rounding must not push it past the share itself.
    return (0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)


def paired_difference(b: int, c: int, n: int) -> Interval:
    """Interval of (b - c) / n for n pairs: only the first succeeded in b of them, only the second in c.

    Bonett and Price's adjusted Wald interval, cut to [-1, 1]; it has a width at b = c = 0 too."""
    if b < 0 or c < 0 or b + c > n or n == 0:
        raise ValueError(f"expected b, c >= 0, b + c <= n and n > 0, got b={b}, c={c}, n={n}")
    first, second = (b + 1) / (n + 2), (c + 1) / (n + 2)
    half = _Z * math.sqrt((first + second - (first - second) ** 2) / (n + 2))
    return max(-1.0, first - second - half), min(1.0, first - second + half)


def detectable_difference(b: int, c: int, n: int) -> float:
    """Smallest true (b - c) / n that `paired_difference` tells from 0 with 80% power at these counts."""
    low, high = paired_difference(b, c, n)
    return (1 + _Z_POWER / _Z) * (high - low) / 2


def equivalence_margin(interval: Interval) -> float:
    """The smallest margin within which two one-sided tests (TOST, 2.5% each) find the difference equal to 0:
    both reject exactly when the 95% interval lies within [-margin, margin]."""
    return largest(abs(end) for end in interval)


@dataclass(frozen=True)
class Estimate:
    """units: clusters or pairs behind the interval; worth: how many of equal size they are worth (Kish), None
    where all count alike."""

    value: float
    interval: Interval | None
    units: int
    worth: float | None = None

    @property
    def effective(self) -> float:
        return self.units if self.worth is None else self.worth


def clustered_ratio(numerators: Floats, denominators: Floats, clusters: Clusters) -> Estimate:
    """sum(numerators) / sum(denominators) with a cluster-robust t-interval.

    The standard error is the jackknife's: leaving a cluster out moves the ratio by the cluster's residual
    over the others' denominators. t has (sum n)^2 / sum n^2 - 1 degrees of freedom (Kish), at least 1. For
    equal clusters both equal the usual ones, which cover next to nothing where one document is most of the
    text. No interval from fewer than 2 clusters or where one holds everything. A numerator that is not finite
    makes the value NaN. Raises ValueError when lengths differ or the denominators add up to 0.
    """
    total = math.fsum(denominators)
    if not total > 0:
        raise ValueError(f"expected denominators that add up to more than 0, got {total}")
    if not all(map(math.isfinite, numerators)):
        return Estimate(math.nan, None, len(set(clusters)))
    value = math.fsum(numerators) / total
    residuals: dict[Hashable, float] = defaultdict(float)
    sizes: dict[Hashable, float] = defaultdict(float)
    for top, bottom, cluster in zip(numerators, denominators, clusters, strict=True):
        residuals[cluster] += top - value * bottom
        sizes[cluster] += bottom
    m, worth = len(sizes), total**2 / math.fsum(size * size for size in sizes.values())
    if m < 2 or max(sizes.values()) >= total:
        return Estimate(value, None, m, worth)
    moves = [residual / (total - sizes[cluster]) for cluster, residual in residuals.items()]
    half = t_quantile(max(1.0, worth - 1)) * math.sqrt((m - 1) / m * math.fsum(move * move for move in moves))
    return Estimate(value, (value - half, value + half), m, worth)


def clustered_bootstrap(
    numerators: Floats, denominators: Floats, clusters: Clusters, resamples: int = 2000
) -> Interval | None:
    """Percentile bootstrap of the same ratio over clusters, with a fixed seed; None from fewer than 2. For
    information only: with few clusters it is too narrow."""
    import numpy as np

    owners = list(dict.fromkeys(clusters))
    if len(owners) < 2 or not all(map(math.isfinite, numerators)):
        return None
    place = {owner: i for i, owner in enumerate(owners)}
    sums = np.zeros((2, len(owners)))
    for top, bottom, cluster in zip(numerators, denominators, clusters, strict=True):
        sums[:, place[cluster]] += top, bottom
    picks = np.random.default_rng(0).integers(0, len(owners), (resamples, len(owners)))
    tops, bottoms = sums[0][picks].sum(axis=1), sums[1][picks].sum(axis=1)
    low, high = np.quantile(tops / bottoms, [(1 - CONFIDENCE) / 2, _LEVEL])
    return float(low), float(high)


def clustered_mean(sums: Sequence[float], counts: Sequence[float], clusters: Sequence[Hashable]) -> Estimate:
    """`clustered_ratio` of sums that are never negative, its interval on the logarithm (delta method), since
    divergences are skewed to the right. A mean of 0 (or below, by rounding) keeps the plain interval."""
    plain = clustered_ratio(sums, counts, clusters)
    if plain.interval is None or not plain.value > 0:
        return plain
    factor = exp((plain.interval[1] - plain.value) / plain.value)
    return replace(plain, interval=(plain.value / factor, plain.value * factor))


def clustered_share(successes: Floats, counts: Floats, clusters: Clusters) -> Estimate:
    """sum(successes) / sum(counts) with the Wilson interval of its effective sample size: that of independent
    samples with the t-interval's width, at most sum(counts), which it is at a share of 0 or 1."""
    plain = clustered_ratio(successes, counts, clusters)
    if plain.interval is None:
        return plain
    n, p = math.fsum(counts), plain.value
    half = (plain.interval[1] - plain.interval[0]) / 2
    effective = min(n, _Z * _Z * p * (1 - p) / half**2) if half > 0 and 0 < p < 1 else n
    return replace(plain, interval=wilson(effective if p == 1 else min(p * effective, effective), effective))


def clustered_quantile(values: Sequence[float], q: float, clusters: Sequence[Hashable]) -> Estimate:
    """`quantile`, with the quantiles at the ends of the interval of the share of samples up to it (Woodruff
    1952). No interval from fewer than 2 clusters, nor where it would end beyond the largest sample."""
    value, units = quantile(values, q), len(set(clusters))
    if math.isnan(value) or units < 2:
        return Estimate(value, None, units)
    if smallest(values) == largest(values):
        return Estimate(value, (value, value), units)
    below = clustered_share([float(v <= value) for v in values], [1.0] * len(values), clusters)
    if below.interval is None or (1 - below.interval[1]) * len(values) < 1:
        return replace(below, value=value, interval=None)
    (low, high), ordered, last = below.interval, sorted(values), len(values) - 1
    ends = ordered[math.floor(low * last)], ordered[math.ceil(high * last)]
    return replace(below, value=value, interval=ends)


def paired_ratio(candidate: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Geometric mean of candidate / baseline over pairs, with a t-interval of the log-ratios (from 2 pairs).
    NaN where a value is not positive and finite. Raises ValueError for no pairs or lengths that differ."""
    pairs = list(zip(candidate, baseline, strict=True))
    if not pairs:
        raise ValueError("expected at least 1 pair, got none")
    if not all(0 < x < math.inf for pair in pairs for x in pair):
        return Estimate(math.nan, None, len(pairs))
    logs = clustered_ratio([math.log(a / b) for a, b in pairs], [1.0] * len(pairs), range(len(pairs)))
    interval = logs.interval and (exp(logs.interval[0]), exp(logs.interval[1]))
    return Estimate(exp(logs.value), interval, len(pairs))


def independent_difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """mean(second) - mean(first) of independent samples with Welch's t-interval (from 2 on each side);
    `effective` is one more than its degrees of freedom. A value that is not finite makes the result NaN.
    Raises ValueError for a side without samples."""
    n, sides = len(first) + len(second), (first, second)
    if not first or not second:
        raise ValueError("expected at least 1 value on each side")
    if not all(math.isfinite(x) for side in sides for x in side):
        return Estimate(math.nan, None, n)
    value = statistics.fmean(second) - statistics.fmean(first)
    if min(map(len, sides)) < 2:
        return Estimate(value, None, n)
    errors = [statistics.variance(side) / len(side) for side in sides]
    squared = math.fsum(errors)
    degrees = float(n - 2)
    if squared > 0:
        degrees = 1 / math.fsum((e / squared) ** 2 / (len(x) - 1) for e, x in zip(errors, sides, strict=True))
    half = t_quantile(degrees) * math.sqrt(squared)
    return Estimate(value, (value - half, value + half), n, degrees + 1)

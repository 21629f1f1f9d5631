"""Statistics that the metrics are made of. Pure; small inputs and huge ones alike; a NaN stays a NaN.

Intervals are two-sided 95% intervals as (low, high), or None where the data cannot give one. The distributions come
from `scipy.special`, imported when first needed: it starts in a fraction of the time of `scipy.stats`, against which
the tests check every function here.

Tokens of one document are no independent samples, so what is taken over tokens is clustered by document. Of a bootstrap over
documents and the t-intervals here, the t-intervals cover better where documents are few: on skewed divergences of 5
documents a bootstrapped mean covers 73% of the time where `clustered_mean` covers 92%, a bootstrapped 99th percentile 74%
where `clustered_quantile` covers 94%; from 30 documents on the two are close (tests/stats/test_coverage.py). So what decides
is never resampled; a bootstrap of the perplexity ratio is shown beside it.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

CONFIDENCE = 0.95
POWER = 0.8

Interval = tuple[float, float]

_Z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_Z_POWER = statistics.NormalDist().inv_cdf(POWER)


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


def median_interval(values: Sequence[float]) -> Interval | None:
    """The two order statistics between which the median lies with 95% at least, whatever the distribution; None from fewer than 6 values.

    The interval's ends are the k-th smallest and largest, with the largest k for which a fair coin falls on one side fewer than k
    times of n with 2.5% at most.
    """
    n, k, below = len(values), 0, 1
    while below / 2**n <= (1 - CONFIDENCE) / 2:
        k += 1
        below += math.comb(n, k)
    ordered = sorted(values)
    return (ordered[k - 1], ordered[n - k]) if k and all(map(math.isfinite, values)) else None


def exp(x: float) -> float:
    """e^x; infinity where the float range ends (a collapsed model's perplexity), instead of OverflowError."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def wilson(successes: float, n: float, z: float = _Z) -> Interval:
    """Wilson score interval of a share, no continuity correction. Raises ValueError unless 0 <= successes <= n, n > 0.

    Neither need be whole: n may be the number of independent samples that n clustered ones are worth.
    z: the normal quantile of its confidence, 95% unless given.
    """
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"A share takes 0 <= successes <= n and n > 0, not {successes} of {n}.")
    p, z2 = successes / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
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
    """Smallest true (b - c) / n that `paired_difference` tells from none with 80% power, given so many discordant pairs."""
    low, high = paired_difference(b, c, n)
    return (1 + _Z_POWER / _Z) * (high - low) / 2


def equivalence_margin(interval: Interval) -> float:
    """The smallest margin within which two one-sided tests (TOST), each at 2.5%, find a difference of 0 and this one equal.

    Both tests reject exactly when the 95% interval lies within [-margin, margin]; non-inferiority is the one at its low end.
    """
    return largest(abs(end) for end in interval)


@dataclass(frozen=True)
class Estimate:
    """A value with its interval, and the number of independent units (clusters, pairs) the interval rests on.

    worth: how many units of one size they are worth; None where they count alike.
    """

    value: float
    interval: Interval | None
    units: int
    worth: float | None = None

    @property
    def effective(self) -> float:
        return self.units if self.worth is None else self.worth


def clustered_ratio(
    numerators: Sequence[float], denominators: Sequence[float], clusters: Sequence[Hashable]
) -> Estimate:
    """sum(numerators) / sum(denominators) with a cluster-robust t-interval; no interval from fewer than 2 clusters.

    The standard error is that of the jackknife: with one cluster left out the ratio moves by the cluster's residual (its numerator
    less the ratio times its denominator) over the others' denominators, and it is sqrt((m - 1) / m * sum(moves^2)). t has one degree
    of freedom less than clusters of one size that these are worth, (sum n)^2 / sum n^2 (Kish), and at least one. Of equal clusters
    both are the cluster-robust ones of any package; where one document is most of the text those cover next to nothing
    (tests/stats/test_coverage.py). No interval where one cluster is all there is. A numerator that is not finite makes the value NaN.
    Raises ValueError when the three lengths differ or the denominators add up to nothing.
    """
    total = math.fsum(denominators)
    if not total > 0:
        raise ValueError(f"A ratio takes denominators that add up to more than 0, not {total}.")
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
    half = _t(max(1.0, worth - 1)) * math.sqrt((m - 1) / m * math.fsum(move * move for move in moves))
    return Estimate(value, (value - half, value + half), m, worth)


def clustered_bootstrap(
    numerators: Sequence[float],
    denominators: Sequence[float],
    clusters: Sequence[Hashable],
    resamples: int = 2000,
) -> Interval | None:
    """Percentile interval of sum(numerators) / sum(denominators) over resampled clusters; None from fewer than 2 of them.

    Shown beside `clustered_ratio`, and decides nothing: of few clusters it is too narrow (tests/stats/test_coverage.py). The seed
    is fixed, so equal data have an equal interval.
    """
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
    low, high = np.quantile(tops / bottoms, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def clustered_mean(sums: Sequence[float], counts: Sequence[float], clusters: Sequence[Hashable]) -> Estimate:
    """`clustered_ratio` of sums that are never negative, its interval taken of the logarithm (delta method).

    Divergences are skewed to the right: an interval of the mean itself ends too early there, and may begin below 0. A
    mean of 0 has no logarithm, and [0, 0]: nothing diverged at all. What rounding leaves below 0 counts as it is.
    """
    whole = clustered_ratio(sums, counts, clusters)
    if whole.interval is None or not whole.value > 0:
        return whole
    factor = exp((whole.interval[1] - whole.value) / whole.value)
    return replace(whole, interval=(whole.value / factor, whole.value * factor))


def clustered_share(
    successes: Sequence[float], counts: Sequence[float], clusters: Sequence[Hashable]
) -> Estimate:
    """sum(successes) / sum(counts) with the Wilson interval of as many independent samples as give the t-interval's width.

    That number is at most sum(counts): clusters that are more alike than chance makes them count for nothing extra. With no
    success, or no failure, nothing is known of how alike they are, and it is sum(counts), as is usual in surveys.
    """
    whole = clustered_ratio(successes, counts, clusters)
    if whole.interval is None:
        return whole
    n, p = math.fsum(counts), whole.value
    half = (whole.interval[1] - whole.interval[0]) / 2
    effective = min(n, _Z * _Z * p * (1 - p) / half**2) if half > 0 and 0 < p < 1 else n
    successes_of = effective if p == 1 else min(p * effective, effective)
    return replace(whole, value=p, interval=wilson(successes_of, effective))


def clustered_quantile(values: Sequence[float], q: float, clusters: Sequence[Hashable]) -> Estimate:
    """`quantile`, with the quantiles at the ends of the interval of the share of samples up to it (Woodruff 1952).

    No interval from fewer than 2 clusters, nor where it would end beyond the largest sample: of that tail nothing is known.
    Values that are all equal have [value, value].
    """
    value, units = quantile(values, q), len(set(clusters))
    if math.isnan(value) or units < 2:
        return Estimate(value, None, units)
    if smallest(values) == largest(values):
        return Estimate(value, (value, value), units)
    below = clustered_share([float(v <= value) for v in values], [1.0] * len(values), clusters)
    if below.interval is None or (1 - below.interval[1]) * len(values) < 1:
        return replace(below, value=value, interval=None)
    low, high = below.interval
    ordered = sorted(values)
    first, last = math.floor(low * (len(values) - 1)), math.ceil(high * (len(values) - 1))
    return replace(below, value=value, interval=(ordered[first], ordered[last]))


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


def independent_difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """mean(second) - mean(first) of independent samples with Welch's t-interval; none from fewer than 2 on either side.

    `effective` is one more than the degrees of freedom (Welch and Satterthwaite). A value that is not finite makes it NaN. Raises
    ValueError for a side without samples.
    """
    n, sides = len(first) + len(second), (first, second)
    if not first or not second:
        raise ValueError("A difference of two samples takes at least 1 value on either side.")
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
    half = _t(degrees) * math.sqrt(squared)
    return Estimate(value, (value - half, value + half), n, degrees + 1)


def _t(degrees: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))

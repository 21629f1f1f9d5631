"""Statistics against scipy, numpy and hand-worked values."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from kvbench.stats import intervals as stats
from kvbench.stats.p_values import mcnemar_p

numbers = st.floats(-1e6, 1e6)


@pytest.mark.parametrize("q", [0.0, 0.5, 0.9, 0.99, 0.999, 1.0])
@pytest.mark.parametrize("n", [1, 2, 7, 10, 100, 101, 1000, 1001])
def test_quantile_is_numpys_higher(n, q):
    values = [float((i * 7919) % 1009) for i in range(n)]
    assert stats.quantile(values, q) == np.quantile(values, q, method="higher")


@settings(deadline=None)
@given(st.lists(numbers, min_size=1, max_size=50), st.integers(0, 1000).map(lambda k: k / 1000))
def test_quantile_is_a_sample_and_not_below_the_interpolated_one(values, q):
    found = stats.quantile(values, q)
    assert found in values
    assert found >= np.quantile(values, q) - 1e-6


@pytest.mark.parametrize("n", [*range(9), 25, 100, 1500])
def test_the_interval_of_a_median_is_the_binomials(n):
    """[x_k, x_(n+1-k)] leaves out the median where fewer than k values, or more than n - k, lie below it."""
    values = [float((i * 7919) % 2003) for i in range(n)]
    best = max(
        (k for k in range(1, n // 2 + 1) if 2 * scipy_stats.binom.cdf(k - 1, n, 0.5) <= 0.05), default=0
    )
    want = (sorted(values)[best - 1], sorted(values)[n - best]) if best else None
    assert (stats.median_interval(values), want is None) == (want, n < 6)


@pytest.mark.parametrize("values", [[1.0, math.nan], [math.nan, 1.0], [1.0, math.nan, 2.0]])
def test_nan_is_never_lost(values):
    assert math.isnan(stats.largest(values))
    assert math.isnan(stats.smallest(values))
    assert math.isnan(stats.median(values))
    assert math.isnan(stats.quantile(values, 0.5))


@settings(deadline=None)
@given(st.integers(1, 20000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_scipys(counts):
    k, n = counts
    expected = scipy_stats.binomtest(k, n).proportion_ci(method="wilson")
    low, high = stats.wilson(k, n)
    assert (low, high) == (pytest.approx(expected.low, abs=1e-12), pytest.approx(expected.high, abs=1e-12))
    assert low <= k / n <= high


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(0, 300))
def test_mcnemar_is_the_exact_binomial_test(b, c):
    expected = scipy_stats.binomtest(b, b + c, 0.5).pvalue if b + c else 1.0
    assert mcnemar_p(b, c) == pytest.approx(expected, rel=1e-9)
    assert mcnemar_p(b, c) == mcnemar_p(c, b)


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 200))
def test_paired_difference_is_antisymmetric_and_bounded(b, c, same):
    n = b + c + same + 1
    low, high = stats.paired_difference(b, c, n)
    assert -1 <= low <= high <= 1
    assert stats.paired_difference(c, b, n) == pytest.approx((-high, -low), abs=1e-12)


def test_detectable_difference_hand_value():
    """66 discordant pairs of 1348 after Bonett and Price's four: sqrt(66 - 16 / 1348) / 1348 times 1.959964 +
    0.841621."""
    error = math.sqrt(66 - 16 / 1348) / 1348
    assert stats.detectable_difference(30, 34, 1346) == pytest.approx(2.801585 * error, rel=1e-6)


def test_clustered_ratio_of_single_clusters_is_the_mean_with_its_t_interval():
    values = [0.1, 0.4, -0.2, 0.3, 0.25]
    found = stats.clustered_ratio(values, [1] * 5, range(5))
    low, high = scipy_stats.t.interval(0.95, 4, np.mean(values), scipy_stats.sem(values))
    assert (found.value, found.interval) == (pytest.approx(np.mean(values)), pytest.approx((low, high)))
    assert found.units == 5


@settings(deadline=None)
@given(st.lists(st.tuples(numbers, st.integers(1, 512)), min_size=2, max_size=20), st.integers(2, 5))
def test_repeating_chunks_within_their_document_invents_no_certainty(data, times):
    tops, bottoms = zip(*data, strict=True)
    once = stats.clustered_ratio(tops, bottoms, range(len(data)))
    more = stats.clustered_ratio(tops * times, bottoms * times, [*range(len(data))] * times)
    assert once.interval is not None
    assert more.value == pytest.approx(once.value, rel=1e-9, abs=1e-9)
    assert more.interval == pytest.approx(once.interval, rel=1e-6, abs=1e-6)


def test_clustered_ratio_without_a_second_cluster_has_no_interval():
    assert stats.clustered_ratio([1.0, 2.0], [2, 2], ["a", "a"]) == stats.Estimate(0.75, None, 1, 1.0)
    assert stats.clustered_ratio([1.0, 0.0], [2, 0], "ab").interval is None  # the other one has no token


def test_clustered_ratio_is_the_jackknife_with_the_degrees_of_freedom_that_unequal_clusters_are_worth():
    """The ratio anew without each cluster in turn; t with Kish's number of equal clusters less one."""
    rng = np.random.default_rng(8)
    tops, bottoms, owners = rng.normal(3, 2, 30), rng.integers(1, 500, 30), np.repeat(np.arange(6), 5)
    found = stats.clustered_ratio(tops.tolist(), bottoms.tolist(), owners.tolist())
    left_out = np.array([tops[owners != i].sum() / bottoms[owners != i].sum() for i in range(6)])
    sizes = np.array([bottoms[owners == i].sum() for i in range(6)])
    worth = sizes.sum() ** 2 / (sizes**2).sum()
    error = math.sqrt(5 / 6 * ((left_out - found.value) ** 2).sum())
    half = float(scipy_stats.t.ppf(0.975, worth - 1)) * error
    assert found.interval == pytest.approx((found.value - half, found.value + half))
    assert (found.units, found.worth) == (6, pytest.approx(worth))


def test_paired_ratio_is_the_paired_t_test_on_logarithms():
    rng = np.random.default_rng(2)
    native = rng.lognormal(2, 0.3, 9)
    own = native * rng.lognormal(0.02, 0.05, 9)
    found = stats.paired_ratio(own.tolist(), native.tolist())
    expected = scipy_stats.ttest_rel(np.log(own), np.log(native)).confidence_interval(0.95)
    assert found.interval == pytest.approx((math.exp(expected.low), math.exp(expected.high)))
    assert found.value == pytest.approx(scipy_stats.gmean(own / native))


def test_paired_difference_is_bonett_and_prices_formula():
    """Laplace-adjusted shares of both kinds of discordant pairs, over n + 2, and the variance of a
    multinomial difference."""
    rng = np.random.default_rng(3)
    for b, c, same in rng.integers(0, 60, (50, 3)).tolist():
        n = b + c + same + 1
        p12, p21 = (b + 1) / (n + 2), (c + 1) / (n + 2)
        covariance = np.array([[p12 * (1 - p12), -p12 * p21], [-p12 * p21, p21 * (1 - p21)]]) / (n + 2)
        half = float(scipy_stats.norm.ppf(0.975) * np.sqrt([1, -1] @ covariance @ [1, -1]))
        expected = (max(-1.0, p12 - p21 - half), min(1.0, p12 - p21 + half))
        assert stats.paired_difference(b, c, n) == pytest.approx(expected)


def test_a_clustered_mean_has_the_interval_of_its_logarithm():
    sums, counts, owners = [0.2, 0.5, 0.1, 0.9], [100, 200, 50, 150], ["a", "a", "b", "c"]
    plain, found = stats.clustered_ratio(sums, counts, owners), stats.clustered_mean(sums, counts, owners)
    half = (plain.interval[1] - plain.value) / plain.value  # a relative error, which is the logarithm's
    ends = (math.log(plain.value) - half, math.log(plain.value) + half)
    assert found.interval == pytest.approx((math.exp(ends[0]), math.exp(ends[1])))


def test_a_clustered_share_inverts_to_the_t_intervals_width():
    """Its Wilson interval is that of n independent samples, whose Wald interval is as wide as the clusters'
    t-interval."""
    equal, counts = [90, 70, 95, 60, 99], [100, 100, 100, 100, 100]
    plain, found = (f(equal, counts, range(5)) for f in (stats.clustered_ratio, stats.clustered_share))
    p, z = plain.value, float(scipy_stats.norm.ppf(0.975))
    worth = p * (1 - p) * (z / (plain.interval[1] - p)) ** 2
    assert 2 < worth < 500
    assert found.interval == pytest.approx(stats.wilson(p * worth, worth))


@pytest.mark.parametrize("equal", [100, 0, 50])
def test_a_share_without_a_difference_between_clusters_counts_every_sample(equal):
    found = stats.clustered_share([equal, equal], [100, 100], "ab")
    assert found.interval == stats.wilson(2 * equal, 200)


def test_a_clustered_quantile_is_woodruffs_by_brute_force():
    """The samples whose share of samples up to them stands at the ends of that share's interval; found by
    counting."""
    rng = np.random.default_rng(11)
    for q in (0.5, 0.9):
        owners = np.repeat(np.arange(8), 60)
        values = (np.exp(rng.normal(0, 0.4, 8)[owners] + rng.standard_normal(480))).tolist()
        found = stats.clustered_quantile(values, q, owners.tolist())
        per_cluster = [
            sum(v <= found.value for v, o in zip(values, owners, strict=True) if o == d) for d in range(8)
        ]
        share = stats.clustered_share(per_cluster, [60] * 8, range(8))
        low, high = share.interval
        ordered = sorted(values)
        under = max(v for i, v in enumerate(ordered) if i / 479 <= low)
        over = min(v for i, v in enumerate(ordered) if i / 479 >= high)
        assert found.interval == (under, over)
        assert under < found.value < over


def test_the_bootstrap_over_clusters_is_scipys_on_the_same_data():
    """Percentile bootstrap of a ratio of sums; both are random, so they agree within what 20,000 resamples
    leave."""
    rng = np.random.default_rng(3)
    tops, bottoms = rng.normal(2, 5, 40), rng.integers(100, 600, 40).astype(float)

    def ratio(top, bottom, axis=-1):
        return np.asarray(top.sum(axis=axis) / bottom.sum(axis=axis))

    how = {"paired": True, "n_resamples": 20_000, "method": "percentile", "rng": np.random.default_rng(1)}
    theirs = scipy_stats.bootstrap((tops, bottoms), ratio, **how).confidence_interval
    ours = stats.clustered_bootstrap(tops.tolist(), bottoms.tolist(), range(40), 20_000)
    width = theirs.high - theirs.low
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.03 * width)
    assert ours == stats.clustered_bootstrap(tops.tolist(), bottoms.tolist(), range(40), 20_000)


def test_the_bootstrap_takes_a_cluster_whole():
    """Two clusters of equal values: resamples are of 2 things, so the ends are the clusters themselves."""
    tops, owners = [1.0] * 50 + [3.0] * 50, ["a"] * 50 + ["b"] * 50
    assert stats.clustered_bootstrap(tops, [1.0] * 100, owners) == (1.0, 3.0)
    low, high = stats.clustered_bootstrap(tops, [1.0] * 100, range(100)) or (0, 0)
    assert 1.7 < low < high < 2.3
    assert stats.clustered_bootstrap(tops, [1.0] * 100, ["a"] * 100) is None
    assert stats.clustered_bootstrap([math.nan, 1.0], [1.0, 1.0], "ab") is None


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_what_is_not_finite_makes_the_value_nan(bad):
    assert math.isnan(stats.paired_ratio([1.0, bad], [1.0, 1.0]).value)
    assert math.isnan(stats.clustered_ratio([math.inf, -math.inf], [1, 1], [0, 1]).value)
    assert stats.median_interval([1.0] * 7 + [math.nan]) is None
    assert (stats.exp(1000.0), math.isnan(stats.exp(math.nan))) == (math.inf, True)


def test_one_sample_has_a_value_and_no_interval():
    assert stats.paired_ratio([3.0], [2.0]) == stats.Estimate(pytest.approx(1.5), None, 1)
    assert stats.independent_difference([1.0], [2.0, 3.0]).interval is None
    assert stats.wilson(2048, 2048) == (pytest.approx(1 / (1 + 3.841459 / 2048)), 1.0)
    low, high = stats.paired_difference(0, 0, 200)
    assert -low == high == pytest.approx(1.959964 * math.sqrt(2 / 202 / 202))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(stats.quantile, ([], 0.5)), (stats.quantile, ([1.0], 1.5)), (stats.wilson, (0, 0)),
     (stats.wilson, (3, 2)),
     (stats.wilson, (-1, 5)), (stats.paired_difference, (1, 1, 1)), (stats.clustered_ratio, ([], [], [])),
     (stats.paired_ratio, ([], [])), (stats.independent_difference, ([], [1.0]))],
)  # fmt: skip
def test_impossible_samples_are_refused(function, arguments):
    with pytest.raises(ValueError, match="expected"):
        function(*arguments)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 30), (40, 40)])
def test_welch_is_scipys(sizes):
    rng = np.random.default_rng(sizes)
    for spread in (0.01, 1.0, 20.0):
        first, second = rng.normal(1, 1, sizes[0]), rng.normal(2, spread, sizes[1])
        ours = stats.independent_difference(first.tolist(), second.tolist())
        theirs = scipy_stats.ttest_ind(second, first, equal_var=False)
        assert ours.interval == pytest.approx(tuple(theirs.confidence_interval(0.95)), rel=1e-9)
        assert ours.effective - 1 == pytest.approx(theirs.df, rel=1e-9)
    assert stats.independent_difference([1.0, 1.0], [2.0, 2.0]).interval == (1.0, 1.0)
    assert math.isnan(stats.independent_difference([1.0, math.nan], [2.0, 3.0]).value)

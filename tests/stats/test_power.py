"""What a sample decides: p-values against scipy and statsmodels, detectable effects against simulation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import ttost_paired

from kvbench.gate.decide import Limits, broken, rule
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, PASS
from kvbench.stats import intervals as stats
from kvbench.stats.p_values import holm
from kvbench.stats.power import Spread, _clopper_pearson

Z_BOTH = 1.959963984540054 + 0.8416212335729143  # of 95% and of 80% power


def wilson(k, n, units=None):
    """A share of n samples."""
    return Spread(k / n, *stats.wilson(k, n), "share", units)


@pytest.mark.parametrize("m", [1, 2, 7, 40])
def test_holm_is_statsmodels(m):
    p_values = [*(np.random.default_rng(m).random(m) ** 3).tolist(), 0.04, 0.04]
    assert holm(p_values) == pytest.approx(list(multipletests(p_values, 0.05, "holm")[1]))
    assert (holm([0.02]), holm([])) == ([0.02], [])


def test_a_t_interval_within_a_margin_is_the_two_one_sided_tests_of_statsmodels():
    """TOST at 2.5% each rejects exactly where the margin is at least `equivalence_margin`."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        native = rng.normal(3, 1, 12)
        own = native + rng.normal(0.1, 0.3, 12)
        found = stats.clustered_ratio((own - native).tolist(), [1.0] * 12, range(12))
        margin = stats.equivalence_margin(found.interval)
        for factor, rejects in ((0.99, False), (1.01, True)):
            p = ttost_paired(own, native, -margin * factor, margin * factor)[0]
            assert (p < 0.025) == rejects


def test_the_p_value_of_a_t_interval_is_the_t_tests():
    values = [0.4, -0.1, 0.7, 0.3, 0.2, 0.5]
    found = stats.clustered_ratio(values, [1.0] * 6, range(6))
    spread = Spread(found.value, *found.interval, "pt", found.units)
    for limit in (0.0, -0.5, 1.0, 0.3):
        assert spread.p_value(limit) == pytest.approx(scipy_stats.ttest_1samp(values, limit).pvalue)


def test_the_p_value_of_a_share_is_the_score_tests():
    z = (0.75 - 0.9) / math.sqrt(0.9 * 0.1 / 40)
    assert wilson(30, 40).p_value(0.9) == pytest.approx(2 * scipy_stats.norm.cdf(z))


@pytest.mark.parametrize("unit", ["pt", "%", "ratio", "nat", "share"])
@pytest.mark.parametrize("units", [None, 2, 5, 60])
def test_at_an_end_of_the_interval_the_p_value_is_5_percent(unit, units):
    low, high = stats.wilson(30, 40) if unit == "share" else (0.6, 1.1)
    spread = Spread(0.75, low, high, unit, units)
    assert (spread.p_value(low), spread.p_value(high)) == (pytest.approx(0.05), pytest.approx(0.05))
    assert spread.p_value(0.75) == 1
    assert spread.p_value(high * 1.05 if high < 0.95 else 1.2) < 0.05 or unit == "share"


@pytest.mark.parametrize("unit", ["pt", "%", "ratio", "nat"])
def test_an_interval_without_width_leaves_no_doubt(unit):
    value = float(unit == "ratio")
    spread = Spread(value, value, value, unit, 5)
    assert (spread.p_value(0.5), spread.detectable(0.5, above=False)) == (0, pytest.approx(0, abs=1e-12))


def test_the_detectable_effect_of_points_is_2_8_standard_errors():
    spread = Spread(0.1, 0.1 - 1.959964, 0.1 + 1.959964, "pt")
    assert spread.detectable(-5, above=True) == pytest.approx(1.959964 + 0.841621, rel=1e-6)
    few = Spread(0.1, 0.1 - 12.7062, 0.1 + 12.7062, "pt", 2)  # t with 1 degree of freedom
    assert few.detectable(-5, above=True) == pytest.approx(12.7062 + 1.3764, rel=1e-4)


def test_the_detectable_effect_of_a_ratio_is_on_the_logarithm():
    half = 0.01 * 1.959964
    spread = Spread(1.0, math.exp(-half), math.exp(half), "ratio")
    assert spread.detectable(1.02, above=False) == pytest.approx(1.02 * (1 - math.exp(-0.02801585)), rel=1e-5)


def decided(n, truth):
    """The share of 4,000 samples of n that are shown to be above 0.95."""
    drawn = np.random.default_rng(0).binomial(n, truth, 4000)
    return sum(stats.wilson(int(k), n)[0] > 0.95 for k in drawn) / 4000


def test_80_percent_of_samples_decide_a_detectable_share():
    effect = wilson(1940, 2000).detectable(0.95, above=True)
    assert decided(2000, 0.95 + effect) == pytest.approx(0.8, abs=0.03)


def test_no_share_is_far_enough_from_1():
    found = [wilson(24, 24).detectable(limit, above=True) for limit in (1.0, 0.95, 0.75)]
    assert found == [math.inf, math.inf, pytest.approx(0.2083, abs=1e-3)]


@pytest.mark.parametrize(
    ("sample", "needed"),
    [((1346, 1.5, 0.5), 1346 * 9), ((100, 0.1, 0.5), 4), ((None, 1.0, 1.0), None), ((100, 1.0, 0.0), None),
     ((100, 1.0, 1e-300), None), ((100, 0.0, 0.0), None), ((100, math.inf, 0.5), None)],
)  # fmt: skip
def test_needed_is_the_square_of_what_is_missing(sample, needed):
    assert Spread(1.0, 0.9, 1.1, "ratio", 5).samples(*sample) == needed


@pytest.mark.parametrize(("b", "c", "n"), [(0, 0, 24), (0, 0, 1346), (1, 0, 24), (3, 5, 100), (20, 31, 1346)])
@pytest.mark.parametrize("points", [0.5, 1.0, 5.0])
def test_the_n_of_paired_picks_is_the_first_that_detects_the_distance(b, c, n, points):
    """At the same share of differing pairs (fractions of a pair, as many gained as lost), by the interval
    itself."""
    low, high = stats.paired_difference(b, c, n)
    spread = Spread(100 * (b - c) / n, 100 * low, 100 * high, "pt")
    found = spread.samples(n, 100 * stats.detectable_difference(b, c, n), points)

    def detectable(m):
        """100 times `stats.detectable_difference` of (b + c) / n * m differing pairs, whose difference is
        none."""
        return 100 * Z_BOTH * math.sqrt(((b + c) / n * m + 2) / (m + 2) ** 2)

    if b == c:
        assert detectable(n) == pytest.approx(100 * stats.detectable_difference(b, c, n))
        assert (detectable(found) <= points, detectable(found - 1) > points) == (True, True)
    else:  # the difference that was found makes the interval a little narrower, at n and beyond
        assert detectable(round(0.97 * found)) > 0.9 * points
        assert detectable(round(1.03 * found)) <= 1.1 * points
    if not b + c:
        assert found == math.ceil(Z_BOTH * math.sqrt(2) / (points / 100) - 2)


@pytest.mark.parametrize("limit", [0.5, 0.75, 0.862, 0.95, 0.98, 0.99, 0.999])
@pytest.mark.parametrize("n", [3, 24, 64, 500])
@pytest.mark.parametrize("upside_down", [False, True])
@pytest.mark.parametrize("none", [True, False])
def test_at_1_and_0_the_n_that_is_needed_decides_and_one_less_does_not(limit, n, upside_down, none):
    """By brute force: every n whose samples are all alike is ruled on, against "at least" and (upside down)
    "at most"."""

    def ruling(n):
        k, own = (0, 1 - limit) if upside_down else (n, limit)
        ends = (-math.inf, own) if upside_down else (own, math.inf)
        limits = Limits(*ends, (0.0 if upside_down else 1.0) if none else None)
        return rule(wilson(k, n), n, limits, 1.0, 1)

    first = next(m for m in range(1, 10_000) if ruling(m).status == PASS)
    assert ruling(n).n_needed == first
    assert all(ruling(m).status == INCONCLUSIVE for m in range(1, first))
    assert all(ruling(m).status == PASS for m in range(first, first + 50))


@pytest.mark.parametrize("family", [1, 40])
def test_at_1_the_n_that_is_needed_to_fail_clears_holm_too(family):
    """All of n picks equal where at most 0.9 may be: the smallest p-value of a family counts `family`
    times."""

    def ruling(n):
        spread, limits = wilson(n, n), Limits(-math.inf, 0.9)
        return rule(spread, n, limits, min(1.0, family * broken(spread, limits)), family)

    first = next(m for m in range(1, 1000) if ruling(m).status == FAIL)
    assert ({ruling(m).n_needed for m in (5, 24, first)}, first) == ({first}, {1: 35, 40: 94}[family])


def test_the_n_of_a_share_is_found_by_80_percent_of_samples_and_by_no_fewer():
    """0.96 of 300 tokens against 0.95: nothing is detectable with 300, and yet an n decides."""
    n = wilson(288, 300).needed(300, 0.95, above=True)
    shares = [decided(round(n * factor), 0.96) for factor in (1.0, 0.5)]
    assert shares == pytest.approx([0.8, 0.51], abs=0.03)


def test_the_n_of_clustered_samples_counts_the_samples_and_not_what_they_are_worth():
    alone, alike = (wilson(96, 100).needed(n, 0.95, above=True) for n in (100, 1000))
    assert alike == pytest.approx(10 * alone, abs=10)


def test_no_n_decides_a_share_at_its_limit():
    assert wilson(95, 100).needed(100, 0.95, above=True) is None
    assert wilson(97, 100).needed(None, 0.95, above=True) is None


@settings(deadline=None)
@given(st.floats(0.01, 5), st.floats(0.1, 10), st.integers(2, 100))
def test_four_times_the_samples_detect_half_the_effect(half, limit, units):
    wide = Spread(0.0, -half, half, "pt").detectable(limit, above=False)
    narrow = Spread(0.0, -half / 2, half / 2, "pt").detectable(limit, above=False)
    assert narrow == pytest.approx(wide / 2)
    assert Spread(0.0, -half, half, "pt", units).detectable(limit, above=False) > half


@pytest.mark.parametrize("units", [None, 2, 12])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 0.7), (0.3, 1.0)])
def test_an_interval_that_was_cut_off_at_0_or_1_is_told_by_its_other_end_or_decides_nothing(low, high, units):
    """A t-interval over subjects (mcq_macro) ends there; Wilson's model would divide by nothing."""
    spread = Spread(0.5, low, high, "share", units)
    ruling = rule(spread, 4, Limits(0.2, math.inf), broken(spread, Limits(0.2, math.inf)), 1)
    wider = spread.at(0.983)
    assert 0 <= wider.low <= low <= high <= wider.high <= 1
    if (low, high) == (0.0, 1.0):
        assert (ruling.status, ruling.mde, ruling.n_needed) == (INCONCLUSIVE, math.inf, None)
        assert (wider.low, wider.high, spread.p_value(0.2), bool(ruling.no_n)) == (0.0, 1.0, 1.0, True)
    else:
        assert spread.detectable(0.2, True) > 0.1
        assert 0 < spread.p_value(0.2) < 1
    assert broken(spread, Limits(0.9, math.inf)) > 0


def test_a_limit_that_nothing_can_break_is_kept_and_not_open():
    ruling = rule(wilson(93, 100), 100, Limits(-math.inf, math.inf), 1.0, 1)
    assert (ruling.status, ruling.reason, ruling.no_n) == (PASS, "kept", "")


def test_the_exact_interval_of_a_share_ends_where_the_shares_end():
    for successes, n in ((0, 20), (3, 20), (20, 20)):
        due = scipy_stats.binomtest(successes, n).proportion_ci(0.95, "exact")
        assert _clopper_pearson(successes, n, 0.05) == pytest.approx((due.low, due.high), rel=1e-9)

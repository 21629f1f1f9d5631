"""What so much data decides: p-values against scipy and statsmodels, detectable effects against simulation,
Holm by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from kvbench.gate.decide import Limits, Ruling, broken, rule
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, PASS
from kvbench.stats import intervals as stats
from kvbench.stats.intervals import holm
from kvbench.stats.power import Spread

Z_BOTH = 1.959963984540054 + 0.8416212335729143  # of 95% and of 80% power


def test_holm_by_hand() -> None:
    """0.01 x 4, 0.02 x 3, 0.03 x 2, 0.5 x 1; the order of the input stays."""
    assert holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx([0.06, 0.04, 0.5, 0.06])
    assert holm([0.04, 0.04]) == [0.08, 0.08]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_holm_is_statsmodels() -> None:
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    draw = np.random.default_rng(0)
    for m in (1, 2, 7, 40):
        p_values = (draw.random(m) ** 3).tolist()
        assert holm(p_values) == pytest.approx(list(multitest.multipletests(p_values, 0.05, "holm")[1]))


def test_a_t_interval_within_a_margin_is_the_two_one_sided_tests_of_statsmodels() -> None:
    """TOST at 2.5% each rejects exactly where the margin is at least `equivalence_margin`."""
    weightstats = pytest.importorskip("statsmodels.stats.weightstats")
    rng = np.random.default_rng(0)
    for _ in range(20):
        native = rng.normal(3, 1, 12)
        own = native + rng.normal(0.1, 0.3, 12)
        found = stats.clustered_ratio((own - native).tolist(), [1.0] * 12, range(12))
        assert found.interval is not None
        margin = stats.equivalence_margin(found.interval)
        for factor, rejects in ((0.99, False), (1.01, True)):
            p = weightstats.ttost_paired(own, native, -margin * factor, margin * factor)[0]
            assert (p < 0.025) == rejects


def test_cluster_robust_errors_are_those_of_a_regression() -> None:
    """A weighted mean as a regression on a constant, errors clustered: CR0 times m / (m - 1), t with m - 1
    degrees; of documents of one length, where the jackknife is the same."""
    api = pytest.importorskip("statsmodels.regression.linear_model")
    rng = np.random.default_rng(4)
    owners = np.repeat(np.arange(7), 5)
    tokens = np.concatenate([rng.permutation([50, 150, 250, 350, 450]) for _ in range(7)])
    change = rng.normal(0, 0.01, 7)[owners] + rng.normal(0, 0.02, 35)
    model = api.WLS(change, np.ones(35), weights=tokens)
    fit = model.fit(cov_type="cluster", cov_kwds={"groups": owners, "use_correction": False})
    found = stats.clustered_ratio((change * tokens).tolist(), tokens.tolist(), owners.tolist())
    assert found.interval is not None
    half = float(scipy_stats.t.ppf(0.975, 6) * fit.bse[0] * math.sqrt(7 / 6))
    assert found.value == pytest.approx(float(fit.params[0]))
    assert (found.interval[1] - found.interval[0]) / 2 == pytest.approx(half)


# p-values


def test_the_p_value_of_a_t_interval_is_the_t_tests() -> None:
    values = [0.4, -0.1, 0.7, 0.3, 0.2, 0.5]
    found = stats.clustered_ratio(values, [1.0] * 6, range(6))
    assert found.interval is not None
    spread = Spread(found.value, *found.interval, "pt", found.units)
    for limit in (0.0, -0.5, 1.0, 0.3):
        assert spread.p_value(limit) == pytest.approx(scipy_stats.ttest_1samp(values, limit).pvalue)


def test_the_p_value_of_a_share_is_the_score_tests() -> None:
    low, high = stats.wilson(30, 40)
    spread = Spread(0.75, low, high, "share")
    z = (0.75 - 0.9) / math.sqrt(0.9 * 0.1 / 40)
    assert spread.p_value(0.9) == pytest.approx(2 * scipy_stats.norm.cdf(z))


@pytest.mark.parametrize("unit", ["pt", "%", "ratio", "nat", "share"])
@pytest.mark.parametrize("units", [None, 2, 5, 60])
def test_at_an_end_of_the_interval_the_p_value_is_5_percent(unit: str, units: int | None) -> None:
    low, high = stats.wilson(30, 40) if unit == "share" else (0.6, 1.1)
    spread = Spread(0.75, low, high, unit, units)
    assert spread.p_value(low) == pytest.approx(0.05)
    assert spread.p_value(high) == pytest.approx(0.05)
    assert spread.p_value(0.75) == 1
    assert spread.p_value(high * 1.05 if high < 0.95 else 1.2) < 0.05 or unit == "share"


def test_an_interval_without_width_leaves_no_doubt() -> None:
    for unit in ("pt", "%", "ratio", "nat"):
        spread = Spread(
            0.0 if unit != "ratio" else 1.0, *([0.0, 0.0] if unit != "ratio" else [1.0, 1.0]), unit, 5
        )
        assert spread.p_value(0.5) == 0
        assert spread.detectable(0.5, above=False) == pytest.approx(0, abs=1e-12)


# minimum detectable effects


def test_the_detectable_effect_of_points_is_2_8_standard_errors() -> None:
    spread = Spread(0.1, 0.1 - 1.959964, 0.1 + 1.959964, "pt")
    assert spread.detectable(-5, above=True) == pytest.approx(1.959964 + 0.841621, rel=1e-6)
    few = Spread(0.1, 0.1 - 12.7062, 0.1 + 12.7062, "pt", 2)  # t with 1 degree of freedom
    assert few.detectable(-5, above=True) == pytest.approx(12.7062 + 1.3764, rel=1e-4)


def test_the_detectable_effect_of_a_ratio_is_on_the_logarithm() -> None:
    half = 0.01 * 1.959964
    spread = Spread(1.0, math.exp(-half), math.exp(half), "ratio")
    assert spread.detectable(1.02, above=False) == pytest.approx(1.02 * (1 - math.exp(-0.02801585)), rel=1e-5)


def test_80_percent_of_samples_decide_a_detectable_share() -> None:
    """At 0.95 of 2,000 tokens; the samples are drawn at limit plus effect."""
    low, high = stats.wilson(1940, 2000)
    effect = Spread(0.97, low, high, "share").detectable(0.95, above=True)
    drawn = np.random.default_rng(0).binomial(2000, 0.95 + effect, 4000)
    assert sum(stats.wilson(int(k), 2000)[0] > 0.95 for k in drawn) / 4000 == pytest.approx(0.8, abs=0.03)


def test_80_percent_of_samples_decide_a_detectable_difference() -> None:
    """Of 14,042 questions 3% turn right and 3% wrong: the effect that such a sample says it detects is found
    by 80% of samples."""
    low, high = stats.paired_difference(421, 421, 14_042)
    effect = Spread(0.0, 100 * low, 100 * high, "pt").detectable(-1.0, above=True) / 100
    b, c = 0.03 + (effect - 0.01) / 2, 0.03 - (effect - 0.01) / 2
    drawn = np.random.default_rng(0).multinomial(14_042, [b, c, 1 - b - c], 3000)
    won = sum(stats.paired_difference(int(x), int(y), 14_042)[0] > -0.01 for x, y, _ in drawn)
    assert won / 3000 == pytest.approx(0.8, abs=0.03)


def test_no_share_is_far_enough_from_1() -> None:
    low, high = stats.wilson(24, 24)
    assert Spread(1.0, low, high, "share").detectable(1.0, above=True) == math.inf
    assert Spread(1.0, low, high, "share").detectable(0.95, above=True) == math.inf
    assert Spread(1.0, low, high, "share").detectable(0.75, above=True) == pytest.approx(0.2083, abs=1e-3)


def test_needed_is_the_square_of_what_is_missing() -> None:
    samples = Spread(1.0, 0.9, 1.1, "ratio", 5).samples
    assert samples(1346, 1.5, 0.5) == 1346 * 9
    assert samples(100, 0.1, 0.5) == 4
    assert samples(None, 1.0, 1.0) is None
    assert samples(100, 1.0, 0.0) is None
    assert samples(100, 1.0, 1e-300) is None
    assert samples(100, 0.0, 0.0) is None
    assert samples(100, math.inf, 0.5) is None


@pytest.mark.parametrize(("b", "c", "n"), [(0, 0, 24), (0, 0, 1346), (1, 0, 24), (3, 5, 100), (20, 31, 1346)])
@pytest.mark.parametrize("points", [0.5, 1.0, 5.0])
def test_the_n_of_paired_picks_is_the_first_that_detects_the_distance(
    b: int, c: int, n: int, points: float
) -> None:
    """At the same share of differing pairs (fractions of a pair, as many gained as lost), by the interval
    itself."""
    low, high = stats.paired_difference(b, c, n)
    spread = Spread(100 * (b - c) / n, 100 * low, 100 * high, "pt")
    found = spread.samples(n, 100 * stats.detectable_difference(b, c, n), points)
    assert found is not None

    def detectable(m: int) -> float:
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
def test_at_1_and_0_the_n_that_is_needed_decides_and_one_less_does_not(
    limit: float, n: int, upside_down: bool, none: bool
) -> None:
    """By brute force: every n whose samples are all alike is ruled on, against "at least" and (upside down)
    "at most"."""

    def ruling(n: int) -> Ruling:
        k, own = (0, 1 - limit) if upside_down else (n, limit)
        low, high = stats.wilson(k, n)
        ends = (-math.inf, own) if upside_down else (own, math.inf)
        limits = Limits(*ends, (0.0 if upside_down else 1.0) if none else None)
        return rule(Spread(k / n, low, high, "share"), n, limits, 1.0, 1)

    first = next(m for m in range(1, 10_000) if ruling(m).status == PASS)
    assert ruling(n).n_needed == first
    assert all(ruling(m).status == INCONCLUSIVE for m in range(1, first))
    assert all(ruling(m).status == PASS for m in range(first, first + 50))


@pytest.mark.parametrize("family", [1, 40])
def test_at_1_the_n_that_is_needed_to_fail_clears_holm_too(family: int) -> None:
    """All of n picks equal where at most 0.9 may be: the smallest p-value of a family counts `family`
    times."""

    def ruling(n: int) -> Ruling:
        low, high = stats.wilson(n, n)
        spread, limits = Spread(1.0, low, high, "share"), Limits(-math.inf, 0.9)
        return rule(spread, n, limits, min(1.0, family * broken(spread, limits)), family)

    first = next(m for m in range(1, 1000) if ruling(m).status == FAIL)
    assert {ruling(m).n_needed for m in (5, 24, first)} == {first}
    assert first == {1: 35, 40: 94}[family]


def test_the_n_of_a_share_is_found_by_80_percent_of_samples_and_by_no_fewer() -> None:
    """0.96 of 300 tokens against 0.95: nothing is detectable with 300, and yet an n decides."""
    low, high = stats.wilson(288, 300)
    n = Spread(0.96, low, high, "share").needed(300, 0.95, above=True)
    assert n is not None
    for factor, share in ((1.0, 0.8), (0.5, 0.51)):
        m = round(n * factor)
        drawn = np.random.default_rng(0).binomial(m, 0.96, 4000)
        assert sum(stats.wilson(int(k), m)[0] > 0.95 for k in drawn) / 4000 == pytest.approx(share, abs=0.03)


def test_the_n_of_clustered_samples_counts_the_samples_and_not_what_they_are_worth() -> None:
    low, high = stats.wilson(96, 100)
    alone = Spread(0.96, low, high, "share").needed(100, 0.95, above=True)
    alike = Spread(0.96, low, high, "share").needed(1000, 0.95, above=True)
    assert alone is not None
    assert alike == pytest.approx(10 * alone, abs=10)


def test_no_n_decides_a_share_at_its_limit() -> None:
    low, high = stats.wilson(95, 100)
    assert Spread(0.95, low, high, "share").needed(100, 0.95, above=True) is None
    assert Spread(0.97, low, high, "share").needed(None, 0.95, above=True) is None


@settings(deadline=None)
@given(st.floats(0.01, 5), st.floats(0.1, 10), st.integers(2, 100))
def test_four_times_the_samples_detect_half_the_effect(half: float, limit: float, units: int) -> None:
    wide = Spread(0.0, -half, half, "pt").detectable(limit, above=False)
    narrow = Spread(0.0, -half / 2, half / 2, "pt").detectable(limit, above=False)
    assert narrow == pytest.approx(wide / 2)
    assert Spread(0.0, -half, half, "pt", units).detectable(limit, above=False) > half


@pytest.mark.parametrize("units", [None, 2, 12])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 0.7), (0.3, 1.0)])
def test_an_interval_that_was_cut_off_at_0_or_1_is_told_by_its_other_end_or_decides_nothing(
    low: float, high: float, units: int | None
) -> None:
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


def test_a_limit_that_nothing_can_break_is_kept_and_not_open() -> None:
    ruling = rule(Spread(0.93, 0.9, 0.95, "share"), 100, Limits(-math.inf, math.inf), 1.0, 1)
    assert (ruling.status, ruling.reason, ruling.no_n) == (PASS, "kept", "")

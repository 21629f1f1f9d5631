"""Drift, outliers, stalls and slowdowns of made-up requests: exact values, and oracles for the line."""

import math
import random

import numpy as np
import pytest
import statsmodels.api as sm
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.stats import stability as steadiness
from kvbench.stats.stability import drift, outliers, slowdown, slowdown_text, stalls, time_of
from tests.factories.runs.made import BASE, CAND
from tests.factories.runs.timed import QUIET, abba, request, state, timed


def of(names, times):
    return [request(name, i, t) for i, (name, t) in enumerate(zip(names, times, strict=True))]


def arms_of(run):
    return run.records[1].samples["arms"]


def test_the_three_times_of_a_request():
    arm = request("candidate", 0, [1.0, 2.0, 6.0], ttft=50.0)
    assert [time_of(arm, q) for q in ("ttft", "itl", "request")] == [50.0, 3.0, 59.0]
    del arm["total_ms"]  # as of older records
    assert time_of(arm, "request") == 59.0
    assert time_of(request("candidate", 0, []), "itl") is None


def test_a_planted_drift_is_found_exactly():
    """3% a request over 6 requests: 1.03^5 - 1, whatever the levels of the arms are."""
    names = abba(3)
    times = [(10.0 if name == "baseline" else 17.0) * 1.03**i for i, name in enumerate(names)]
    found = drift(of(names, times), "itl")
    assert (found.slope, found.pct) == (pytest.approx(math.log(1.03)), pytest.approx(100 * (1.03**5 - 1)))
    assert found.interval == pytest.approx((found.pct, found.pct), abs=1e-6)
    assert (found.degrees, found.first, found.last) == (3, 0, 5)
    assert found.significant


def ols(arms, quantity):
    """statsmodels: log(time) on the order and a level for each arm."""
    names = sorted({arm["arm"] for arm in arms})
    y = [math.log(time_of(arm, quantity)) for arm in arms]
    x = [[arm["order"], *(float(arm["arm"] == name) for name in names)] for arm in arms]
    return sm.OLS(np.array(y), np.array(x)).fit()


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 12), st.booleans(), st.integers(0, 2**32 - 1))
def test_slope_and_interval_are_those_of_statsmodels(repeats, alone, seed):
    rng = random.Random(seed)
    names = ["candidate"] * (2 * repeats) if alone else abba(repeats)
    arms = of(names, [rng.uniform(5, 50) for _ in names])
    for arm in arms:
        arm["ttft_ms"] = rng.uniform(5, 50)
        arm["total_ms"] = arm["ttft_ms"] + sum(arm["itl_ms"])
    for quantity in ("ttft", "itl", "request"):
        found, oracle = drift(arms, quantity), ols(arms, quantity)
        assert found.slope == pytest.approx(oracle.params[0], rel=1e-8, abs=1e-12)
        assert found.error == pytest.approx(oracle.bse[0], rel=1e-8, abs=1e-12)
        assert found.degrees == oracle.df_resid
        span = len(names) - 1
        due = [100 * math.expm1(end * span) for end in oracle.conf_int(0.05)[0]]
        assert found.interval == pytest.approx(due, rel=1e-7)
        assert found.significant == (due[0] > 0 or due[1] < 0)


@pytest.mark.parametrize(
    ("arms", "reason"),
    [
        (of(abba(2)[:3], [1.0] * 3), "4 requests, 3 were measured"),
        *((of(abba(2), [1.0, 2.0, bad, 1.0]), "not a positive number") for bad in (0.0, math.nan, math.inf)),
        ([request("candidate", i, []) for i in range(4)], "no gap"),
        (of(list("abcd"), [1.0] * 4), "only one request"),
    ],
)
def test_where_there_is_no_drift_the_reason_is_given(arms, reason):
    assert reason in drift(arms, "itl")


def test_a21_t2_a_time_that_depends_on_its_place_in_the_run_is_seen():
    """An engine that gets slower with every request has a drift, forwards and backwards."""
    for factor in (1.1, 1 / 1.1):
        row = timed([10 * factor**i for i in (1, 2, 5)], [10 * factor**i for i in (0, 3, 4)]).row(
            "latency_drift_pct"
        )
        assert (row.value > 0, row.low * row.high > 0, row.n) == (factor > 1, True, 6)


def test_one_outlier_is_found_in_its_arm_only():
    """The candidate is 3 times as slow as the baseline: no outlier is one for that."""
    names = abba(5)
    level = {"baseline": 10.0, "candidate": 30.0}
    times = [level[name] * (1 + 0.002 * (i % 5)) for i, name in enumerate(names)]
    assert outliers(of(names, times), "itl") == {}
    times[7] *= 2.0
    (found,) = outliers(of(names, times), "itl").items()
    assert (found[0], found[1]) == (7, pytest.approx(2.0, rel=0.01))


@pytest.mark.parametrize(("z", "found"), [(3.49, set()), (3.51, {4})])
def test_the_rule_is_a_modified_z_score_above_three_and_a_half(z, found):
    """log-times -0.06, -0.01, 0, 0.05 and a far one: median 0, distances 0, 0.01, 0.05, 0.06 and more, so a
    MAD of 0.05."""
    logs = [-0.06, -0.01, 0.0, 0.05, z * 0.05 / 0.6745]
    assert set(outliers(of(["candidate"] * 5, [10 * math.exp(x) for x in logs]), "itl")) == found


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(1, 20), min_size=5, max_size=12))
def test_outliers_are_those_of_the_formula(times):
    logs = np.log(times)
    distance = np.abs(logs - np.median(logs))
    mad = np.median(distance)
    with np.errstate(divide="ignore", invalid="ignore"):
        z = 0.6745 * distance / mad
    near = (np.abs(z - 3.5) < 1e-9) | (np.abs(distance - np.log(1.05)) < 1e-12)
    due = {i for i in range(len(times)) if z[i] > 3.5 and distance[i] >= np.log(1.05)}
    got = set(outliers(of(["candidate"] * len(times), times), "itl"))
    assert got - due <= set(np.flatnonzero(near))
    assert due - got <= set(np.flatnonzero(near))


@pytest.mark.parametrize(("times", "found"), [(1.049, set()), (1.051, {2}), (0.951, {2}), (0.96, set())])
def test_what_is_near_the_median_is_no_outlier_however_alike_the_others_are(times, found):
    arms = of(["candidate"] * 5, [10.0, 10.0, 10.0 * times, 10.0, 10.0])
    assert set(outliers(arms, "itl")) == found


def test_outliers_take_five_requests_an_arm():
    row = timed([10.0, 10.0, 10.0, 90.0], [10.0] * 4).row("latency_outliers")
    assert (row.value, "has 4" in row.note) == (None, True)


def test_outliers_are_counted_once_and_named():
    run = timed([10.0] * 6, [10.0] * 6)
    arms = arms_of(run)
    arms[5] |= {"ttft_ms": 3 * arms[5]["ttft_ms"], "itl_ms": [20.0] * 6}
    arms[8]["itl_ms"] = [5.0] * 6
    row = run.row("latency_outliers")
    assert (row.value, row.n) == (2, 12)
    assert row.note == "request 5 (candidate, TTFT 3x and ITL 2x), 8 (baseline, ITL 0.5x)"


def test_outliers_of_requests_without_gaps_are_of_ttft():
    run = timed([10.0] * 5, [10.0] * 5)
    for arm in arms_of(run):
        arm |= {"itl_ms": [], "new_tokens": 1}
    arms_of(run)[0]["ttft_ms"] *= 2
    assert (run.row("latency_outliers").value, run.row("latency_drift_pct").n) == (1, 10)


@pytest.mark.parametrize(
    ("gaps", "count"), [([10.0] * 5 + [20.0], 0), ([10.0] * 5 + [20.1], 1), ([10.0, 10.0, 10.0, 300.0], None)]
)
def test_stalls_are_steps_of_more_than_twice_the_median(gaps, count):
    assert stalls(request("candidate", 0, gaps)) == count


def test_the_share_of_stalled_steps():
    run = timed([10.0, 12.0], [10.0, 10.0])
    arms = arms_of(run)
    arms[1]["itl_ms"][3] = 50.0
    arms[0]["itl_ms"][0:2] = [40.0, 50.0]
    row = run.row("itl_outlier_share")
    assert (row.value, row.n, row.note) == (1 / 12, 12, "1 here, 2 of the baseline's")
    assert run.row("itl_outlier_share", BASE).note == "0 here"
    arms[1]["itl_ms"] = [1.0] * 4
    assert run.row("itl_outlier_share").value is None


@pytest.mark.parametrize("word", steadiness.SLOWDOWNS)
@pytest.mark.parametrize("end", ["before", "after"])
def test_a_slowdown_at_either_end_is_one_of_the_request(word, end):
    found = {**state(), end: {**QUIET, "reasons": ["idle", word]}}
    assert slowdown(request("candidate", 0, 10.0, found)) == (word,)


@pytest.mark.parametrize("word", ["idle", "application clocks", "sw power cap", "sync boost", "display"])
def test_a_power_cap_is_no_slowdown(word):
    assert slowdown(request("candidate", 0, 10.0, state(word))) == ()


@pytest.mark.parametrize(
    ("counter", "lost", "words"),
    [
        ("thermal_ns", 1_099_999, ()),
        ("thermal_ns", 1_100_001, ("thermal violation",)),
        ("quota_us", 1_099, ()),
        ("quota_us", 1_101, ("cpu quota",)),
        ("power_ns", 50_000_000, ()),
    ],
)
def test_counters_count_from_a_hundredth_of_the_request_on(counter, lost, words):
    """A request of 50 + 6 * 10 = 110 ms, during which they grew."""
    before = {**QUIET, counter: 7_000}
    found = {"before": before, "after": {**before, counter: 7_000 + lost}}
    assert slowdown(request("candidate", 0, 10.0, found)) == words


@pytest.mark.parametrize(
    ("device", "known"),
    [
        (None, None),
        (state(), ()),
        ({"before": QUIET, "after": {**QUIET, "reasons": None}}, None),  # the driver went away
        ({"before": {**QUIET, "reasons": None}, "after": QUIET}, None),
        ({"before": {**QUIET, "quota_us": None}, "after": QUIET}, ()),
        ({"before": {"quota_us": 0}, "after": {"quota_us": 0}}, ()),  # a CPU
        ({"before": {"quota_us": None}, "after": {"quota_us": None}}, None),
        ({"before": {"quota_us": 0}, "after": {"quota_us": None}}, None),
        ({"before": {**QUIET, "reasons": None}, "after": {**QUIET, "reasons": None, "quota_us": 9_000}},
         ("cpu quota",)),
    ],
)  # fmt: skip
def test_what_was_not_read_is_not_no_slowdown(device, known):
    assert slowdown(request("candidate", 0, 10.0, device)) == known


def test_slowed_requests_are_counted_with_arms_and_clocks():
    devices = {1: state("sw thermal", sm=1350), 2: state("hw thermal", "idle", sm=1500)}
    row = timed([10.0] * 3, [10.0] * 3, devices=devices).row("throttled_requests")
    assert (row.value, row.n) == (2, 6)
    found = ("2 of 6", "sw thermal, hw thermal", "(candidate 2, baseline 0)", "1980 -> 1350 MHz")
    assert [words for words in found if words not in row.note] == []
    alone = [request("candidate", 0, 10.0, state()), request("candidate", 1, 10.0, state("hw slowdown"))]
    assert slowdown_text(alone) == "1 of 2 requests under hw slowdown"
    quiet = timed([10.0] * 3, [10.0] * 3).row("throttled_requests")
    assert (quiet.value, quiet.n, quiet.note) == (0, 6, "")


def test_older_records_have_times_and_no_slowdowns():
    run = timed([10.0] * 5, [10.0] * 5, quiet=False)
    for arm in arms_of(run):
        del arm["device"]
    row = run.row("throttled_requests")
    assert (row.value, row.n, run.row("latency_outliers").value) == (None, 0, 0)
    assert run.row("itl_ratio", CAND).value == 1.0


@pytest.mark.parametrize(
    ("more", "value", "note"),
    [({}, None, "1 of 4"), ({0: state("hw slowdown")}, 1, "(candidate 0, baseline 1); 1 of 4")],
)
def test_a_driver_that_went_away_leaves_no_zero(more, value, note):
    lost = {"before": QUIET, "after": {**QUIET, "reasons": None}}
    row = timed([10.0] * 2, [10.0] * 2, devices={3: lost, **more}).row("throttled_requests")
    assert (row.value, row.n, note in row.note) == (value, 3, True)

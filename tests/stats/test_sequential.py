"""Looks at a growing sample: their level against scipy, the manifest, simulated error rates."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from kvbench.gate.decide import Limits, broken, rule
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, PASS
from kvbench.matrix.cells import Task
from kvbench.records.run import CANARY, UNTIL_DECIDED, Manifest, Stopped
from kvbench.stats import intervals as stats
from kvbench.stats.power import Spread
from kvbench.stats.sequential import Look, Looks


@pytest.mark.parametrize(("k", "level"), [(1, 0.95), (2, 0.975), (3, 1 - 0.05 / 3), (5, 0.99)])
def test_the_level_is_a_kth_of_five_percent(k, level):
    assert Looks("limit", tuple(range(k))).confidence == pytest.approx(level, abs=1e-15)
    assert Look(1, 3, 1 - 0.05 / 3).level == "98.3%"


def test_a_t_interval_is_widened_as_scipy_does():
    values = np.random.default_rng(0).normal(0.3, 1, 7)
    found = stats.clustered_ratio(values.tolist(), [1.0] * 7, range(7))
    wider = Spread(found.value, *found.interval, "pt", 7).at(0.9875)
    due = scipy_stats.t.interval(0.9875, 6, loc=values.mean(), scale=scipy_stats.sem(values))
    assert (wider.low, wider.high) == pytest.approx(due, rel=1e-12)
    assert wider.p_value(2.0) == pytest.approx(scipy_stats.ttest_1samp(values, 2.0).pvalue, rel=1e-9)


@pytest.mark.parametrize(
    ("unit", "value", "of"),
    [("%", 0.0, lambda x: 100 * math.expm1(x)), ("ratio", 2.0, lambda x: 2 * math.exp(x))],
)
def test_percentages_and_ratios_are_widened_on_their_logarithm(unit, value, of):
    factor = scipy_stats.t.ppf(1 - 0.025 / 2, 4) / scipy_stats.t.ppf(0.975, 4)
    wider = Spread(value, of(-0.02), of(0.02), unit, 5).at(0.975)
    assert (wider.low, wider.high) == pytest.approx((of(-0.02 * factor), of(0.02 * factor)))


@pytest.mark.parametrize(("k", "n"), [(18, 24), (23, 24), (24, 24), (0, 24), (190, 200)])
def test_a_share_is_widened_to_what_covers_both_wilson_and_exact_intervals(k, n):
    wider = Spread(k / n, *stats.wilson(k, n), "share").at(0.975)
    test = scipy_stats.binomtest(k, n)
    both = [test.proportion_ci(0.975, method=m) for m in ("wilson", "exact")]
    assert wider.low == pytest.approx(min(ci.low for ci in both), abs=1e-9)
    assert wider.high == pytest.approx(max(ci.high for ci in both), abs=1e-9)


def test_a_share_over_few_documents_is_widened_by_t():
    """4 documents: t grows by 1.31 from 95% to 97.5%, the normal quantile by 1.14."""
    low, high = stats.wilson(90, 100)
    plain, clustered = (Spread(0.9, low, high, "share", units).at(0.975) for units in (None, 4))
    z, t = (q(1 - 0.0125) / q(0.975) for q in (scipy_stats.norm.ppf, scipy_stats.t(3).ppf))
    worth = 100 * (z / t) ** 2
    due = scipy_stats.norm.ppf(1 - 0.0125)
    assert clustered.low <= stats.wilson(0.9 * worth, worth, due)[0] + 1e-12
    assert clustered.low < plain.low - 0.01
    assert clustered.high > plain.high


@given(
    st.sampled_from(["%", "pt", "ratio", "nat", "share"]),
    st.floats(0.05, 0.95),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([None, 2, 3, 10, 500]),
    st.integers(2, 6),
)
@example("share", 0.0625, 0.0, 0.0, 2, 4)  # its lower end is so near 0 that no n is finite
def test_a_higher_confidence_never_narrows_and_decides_nothing_that_was_open(unit, value, down, up, units, k):
    if unit == "share":
        low, high = stats.wilson(value * (1 + 1000 * down), 1 + 1000 * down)
    else:
        low, high = value * (1 - down), value * (1 + up)
    spread = Spread(value, low, high, unit, units)
    wider = spread.at(1 - 0.05 / k)
    assert wider.low <= spread.low
    assert spread.high <= wider.high
    more = min(value * 1.2, 0.99)
    for limits in (Limits(-math.inf, more, 0.0), Limits(value * 0.9, more), Limits(more, math.inf)):
        one, many = (rule(x, 100, limits, broken(x, limits), 1).status for x in (spread, wider))
        assert many in (one, INCONCLUSIVE)


def test_the_detectable_effect_and_the_correction_of_a_family_are_at_the_level_of_the_look():
    z, power = scipy_stats.norm.ppf(1 - 0.0125), scipy_stats.norm.ppf(0.8)
    half = scipy_stats.norm.ppf(0.975)
    points = Spread(0.0, -half, half, "pt").at(0.975)  # a standard error of 1
    assert points.detectable(5.0, above=True) == pytest.approx(z + power, rel=1e-9)
    share = Spread(0.97, *stats.wilson(970, 1000, z), "share", None, 0.975)
    p = 0.9 + share.detectable(0.9, above=True)
    assert p - power * math.sqrt(p * (1 - p) / 1000) == pytest.approx(
        0.9 + z * math.sqrt(0.09 / 1000), abs=1e-9
    )

    far = Spread(5.0, 5 - half, 5 + half, "pt").at(0.975)
    limits = Limits(-math.inf, 1.0)
    assert [rule(far, 9, limits, adjusted, 2).status for adjusted in (0.04, 0.024)] == [INCONCLUSIVE, FAIL]


def test_what_is_not_finite_stays_as_it_is():
    assert math.isnan(Spread(math.nan, 0.1, 0.2, "share").at(0.99).value)
    open_end = Spread(1.0, 0.5, math.inf, "ratio", 3).at(0.99)
    assert open_end.low < 0.5 < open_end.high == math.inf


def manifest(value=4, sizes=(4, 32, None), **more):
    task = Task("t", "perplexity", "v", {}, {"limit_chunks": value}, ("c",), None)
    return Manifest("m", (), (task,), until_decided={"perplexity": Looks("limit_chunks", sizes)}, **more)


def test_the_look_is_told_by_the_tasks_and_the_plan():
    assert manifest(4).looks == {"perplexity": Look(1, 3, 1 - 0.05 / 3)}
    assert manifest(None).looks["perplexity"].place == "look 3 of 3"
    assert replace(manifest(), until_decided=None).looks == {}
    with pytest.raises(ValueError, match="not in tuple"):
        _ = manifest(5).looks


def test_not_run_names_what_stopped_the_run():
    assert Manifest("m", (), ()).not_run == manifest().not_run == "not run"
    by = manifest(stopped=Stopped(UNTIL_DECIDED, "kv_ratio at most 0.1", "stage 0 (exact bytes)")).not_run
    assert all(words in by for words in ("not run: ", "kv_ratio at most 0.1", "stage 0 (exact bytes)"))
    canary = manifest(stopped=Stopped(CANARY, "precision", "the canary")).not_run
    assert all(words in canary for words in ("not run: ", "--canary", "precision"))


# By simulation

Draw = Callable[[np.random.Generator, float], list[tuple[Spread, int]]]
DOCUMENTS, QUESTIONS = (4, 32, 128), (24, 200, 1000)


def estimated(e, unit, of=float):
    return Spread(*(of(x) for x in (e.value, *e.interval)), unit, e.units)


def perplexity(rng, truth):
    """Log-ratios of documents around `truth`, sd 2%, as percentages."""
    logs = rng.normal(truth, 0.02, DOCUMENTS[-1]).tolist()
    return [
        (
            estimated(
                stats.clustered_ratio(logs[:n], [1.0] * n, range(n)), "%", lambda x: 100 * math.expm1(x)
            ),
            n * 511,
        )
        for n in DOCUMENTS
    ]


def agreement(rng, truth):
    """Equal picks: a share of independent questions."""
    equal = rng.random(QUESTIONS[-1]) < truth
    counts = [(int(equal[:n].sum()), n) for n in QUESTIONS]
    return [(Spread(k / n, *stats.wilson(k, n), "share"), n) for k, n in counts]


def points(rng, truth):
    """Accuracy in points: 1% of answers change either way, and more for the worse."""
    gained, lost = 0.01, 0.01 - truth / 100
    change = rng.choice([1, -1, 0], QUESTIONS[-1], p=[gained, lost, 1 - gained - lost])
    found = []
    for n in QUESTIONS:
        b, c = int((change[:n] == 1).sum()), int((change[:n] == -1).sum())
        low, high = stats.paired_difference(b, c, n)
        found.append((Spread(100 * (b - c) / n, 100 * low, 100 * high, "pt"), n))
    return found


def top1(rng, truth):
    """Agreement of tokens, beta-distributed over documents."""
    tokens = rng.integers(300, 700, DOCUMENTS[-1])
    equal = rng.binomial(tokens, rng.beta(100 * truth, 100 * (1 - truth), DOCUMENTS[-1])).tolist()
    return [
        (
            estimated(stats.clustered_share(equal[:n], tokens[:n].tolist(), range(n)), "share"),
            int(tokens[:n].sum()),
        )
        for n in DOCUMENTS
    ]


def divergence(rng, truth):
    """Mean divergences of documents, log-normal with a mean of `truth`."""
    sums = np.exp(rng.normal(math.log(truth) - 0.18, 0.6, DOCUMENTS[-1])).tolist()
    return [(estimated(stats.clustered_mean(sums[:n], [1.0] * n, range(n)), "nat"), n) for n in DOCUMENTS]


# name: (draws, limits, the true value at the limit, a good one, a bad one)
CASES = {
    "ppl_delta_pct": (perplexity, Limits(-math.inf, 100 * math.expm1(0.01), 0.0), 0.01, -0.02, 0.05),
    "mcq_agreement": (agreement, Limits(0.9, math.inf, 1.0), 0.9, 0.99, 0.6),
    "mcq_delta_pt": (points, Limits(-5.0, math.inf, 0.0), -5.0, 0.0, -20.0),
    "top1_agreement": (top1, Limits(0.95, math.inf, 1.0), 0.95, 0.99, 0.85),
    "kld_mean": (divergence, Limits(-math.inf, 0.005, 0.0), 0.005, 0.001, 0.05),
}


def escalated(seen, limits):
    """(status, samples used) of a check that grows until it is decided, as the gate judges each look."""
    confidence = Looks("", tuple(range(len(seen)))).confidence
    for number, (spread, n) in enumerate(seen, start=1):
        at, look = spread.at(confidence), Look(number, len(seen), confidence)
        status = rule(at, n, limits, broken(at, limits), 1, look).status
        if status != INCONCLUSIVE:
            break
    return status, n


def once(spread, n, limits):
    return rule(spread, n, limits, broken(spread, limits), 1).status


def draws(name, truth, runs):
    rng = np.random.default_rng(11)
    return (CASES[name][0](rng, truth) for _ in range(runs))


@pytest.mark.parametrize("name", CASES)
def test_all_looks_together_err_no_more_than_one_look_at_the_nominal_level(name):
    _, limits, truth, _, _ = CASES[name]
    runs, together, alone, uncorrected = 2000, Counter[str](), Counter[str](), Counter[str]()
    for seen in draws(name, truth, runs):
        together[escalated(seen, limits)[0]] += 1
        alone[once(*seen[-1], limits)] += 1
        uncorrected[next((s for x in seen if (s := once(*x, limits)) != INCONCLUSIVE), INCONCLUSIVE)] += 1
    for status in (PASS, FAIL):
        assert together[status] <= max(alone[status], 0.025 * runs), (name, status, together, alone)
    # Without it they would: this is what the correction is for.
    assert uncorrected[PASS] > max(alone[PASS], 0.025 * runs) or uncorrected[FAIL] > max(
        alone[FAIL], 0.025 * runs
    )


@pytest.mark.parametrize("name", CASES)
def test_clear_candidates_are_decided_early(name):
    _, limits, _, good, bad = CASES[name]
    for truth, expected in ((good, PASS), (bad, FAIL)):
        found = [(*escalated(seen, limits), seen[-1][1]) for seen in draws(name, truth, 200)]
        used = sum(n / whole for _, n, whole in found) / len(found)
        assert sum(status == expected for status, _, _ in found) >= 0.95 * len(found)
        # A skewed estimate passes at its last look only.
        assert used == 1 if name in ("top1_agreement", "kld_mean") and expected == PASS else used < 0.5


def test_a_skewed_estimate_passes_at_its_last_look_only_and_fails_at_any():
    limits, confidence = Limits(-math.inf, 0.005, 0.0), Looks("", (1, 2)).confidence
    good, bad = (Spread(x, x / 1.1, x * 1.1, "nat", 30).at(confidence) for x in (0.001, 0.05))
    first, last = (Look(i, 2, confidence) for i in (1, 2))
    early = rule(good, 100, limits, 1.0, 1, first)
    assert (early.status, early.reason) == (INCONCLUSIVE, "skewed")
    assert rule(good, 100, limits, 1.0, 1, last).status == rule(good, 100, limits, 1.0, 1).status == PASS
    assert rule(bad, 100, limits, broken(bad, limits), 1, first).status == FAIL

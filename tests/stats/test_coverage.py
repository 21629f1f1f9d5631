"""Intervals over documents cover the true value on made-up losses; a bootstrap is compared; fixed seeds."""

import numpy as np
import pytest

from kvbench.metrics.declare.value import share_of_steps
from kvbench.stats import intervals as stats

Tokens = list[np.ndarray]


def documents(rng, m):
    """Divergences of m documents of 75 to 300 tokens: skewed (log-normal), and of another level in each
    document."""
    levels = rng.normal(-8, 0.5, m)
    return [np.exp(level + 2 * rng.standard_normal(rng.integers(75, 300))) for level in levels]


TRUE_MEAN = float(np.exp(-8 + (0.5**2 + 2**2) / 2))
TRUE_SD = float(np.sqrt(0.5**2 + 2**2))
TRUE_P99 = float(np.exp(-8 + 2.3263479 * TRUE_SD))


def bootstrapped(rng, docs, statistic):
    """Percentile bootstrap over documents, 300 resamples."""
    found = []
    for _ in range(300):
        tokens = np.concatenate([docs[i] for i in rng.integers(0, len(docs), len(docs))])
        found.append(tokens.mean() if statistic == "mean" else np.quantile(tokens, 0.99))
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


def covered(m, runs, statistic, bootstrap=False):
    """The share of intervals that hold the true value."""
    rng = np.random.default_rng(20_000 + m)
    truth = TRUE_MEAN if statistic == "mean" else TRUE_P99
    hits = total = 0
    for _ in range(runs):
        docs = documents(rng, m)
        owners = [i for i, own in enumerate(docs) for _ in own]
        values = np.concatenate(docs).tolist()
        if bootstrap:
            interval = bootstrapped(rng, docs, statistic)
        elif statistic == "mean":
            interval = stats.clustered_mean(values, [1.0] * len(values), owners).interval
        else:
            interval = stats.clustered_quantile(values, 0.99, owners).interval
        if interval is not None:
            total += 1
            hits += interval[0] <= truth <= interval[1]
    assert total > runs / 2
    return hits / total


@pytest.mark.parametrize(("m", "least"), [(5, 0.86), pytest.param(30, 0.89, marks=pytest.mark.slow)])
def test_divergences_are_covered(m, least):
    assert covered(m, 300, "mean") >= least
    assert covered(m, 300, "p99") >= least


@pytest.mark.slow
@pytest.mark.parametrize("statistic", ["mean", "p99"])
def test_a_bootstrap_covers_worse_over_few_documents_and_about_as_well_over_many(statistic):
    assert covered(5, 120, statistic, bootstrap=True) < covered(5, 120, statistic) - 0.05
    assert covered(30, 60, statistic, bootstrap=True) > 0.85


def steps(rng, share, burst):
    """2048 steps of one text, a share of which differ, in runs of `burst` steps on average (a Markov chain of
    two states)."""
    leave = 1 / burst
    enter = leave * share / (1 - share)
    differs, found = rng.random() < share, []
    for draw in rng.random(2048):
        differs = draw >= leave if differs else draw < enter
        found.append(not differs)
    return found


@pytest.mark.parametrize(
    ("share", "burst", "least", "plain_most"),
    [(0.02, 1.0, 0.94, 0.98), (0.02, 4.0, 0.88, 0.65), (0.05, 4.0, 0.9, 0.65), (0.05, 16.0, 0.84, 0.4)],
)
def test_steps_of_one_text_are_covered_by_blocks_where_plain_wilson_is_not(share, burst, least, plain_most):
    """Steps that differ on their own (burst 1) lose nothing by blocks; those that differ in runs are worth
    fewer."""
    rng = np.random.default_rng(7)
    own = plain = 0
    for _ in range(400):
        flags = steps(rng, share, burst)
        row = share_of_steps("top1_teacher_forced", flags)
        own += row.low <= 1 - share <= row.high
        low, high = stats.wilson(sum(flags), 2048)
        plain += low <= 1 - share <= high
    assert own / 400 >= least
    assert plain / 400 <= plain_most


@pytest.mark.parametrize("m", [5, 20])
def test_a_clustered_share_is_covered_where_a_plain_one_is_not(m):
    """Agreement of 0.95 on average, beta-distributed over documents."""
    rng = np.random.default_rng(m)
    own = plain = 0
    for _ in range(1000):
        tokens = rng.integers(300, 700, m)
        equal = rng.binomial(tokens, rng.beta(95, 5, m))
        found = stats.clustered_share(equal.tolist(), tokens.tolist(), range(m))
        own += found.interval[0] <= 0.95 <= found.interval[1]
        low, high = stats.wilson(int(equal.sum()), int(tokens.sum()))
        plain += low <= 0.95 <= high
    assert own / 1000 >= 0.92
    assert plain / 1000 < 0.75


@pytest.mark.parametrize(
    "sizes",
    [(500, 1), (500, 50), (2000, 20, 20, 20), (5000, *[10] * 10), (5110, *[511] * 12),
     (1533, 1022, 511, 511, 300), (511,) * 5],
)  # fmt: skip
def test_a_text_that_is_mostly_one_document_is_covered(sizes):
    """Documents that differ as much as a document's tokens do; an interval by residuals alone covers 4% of
    the third and fourth."""
    rng = np.random.default_rng(len(sizes))
    n, hits, runs = np.array(sizes, float), 0, 1000
    for _ in range(runs):
        means = rng.normal(0, 1, len(n)) + rng.normal(0, 1, len(n)) * np.sqrt(50 / n)
        found = stats.clustered_ratio((means * n).tolist(), n.tolist(), range(len(n)))
        hits += found.interval[0] <= 0 <= found.interval[1]
    assert hits / runs >= 0.93

"""Which passes and failures of a latency the state of the machine leaves open, and which not."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.gate.decide import Limits
from kvbench.gate.latency_validity import JUDGED, stands
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, PASS
from kvbench.metrics.collect import METRICS
from tests.factories.runs.made import BASE
from tests.factories.runs.timed import QUIET, abba, state, timed
from tests.factories.verdicts import check, judge, own

INF = math.inf
HOT = state("hw thermal", sm=1350)
# Six requests of an arm that scatter a little, in no direction.
SCATTER = [1.0, 1.01, 0.99, 1.005, 0.995, 1.0]


def around(level):
    return [level * factor for factor in SCATTER]


def run_of(devices=None, **facts):
    """13 ms a step against native's 10; devices: order of a request -> state."""
    return timed(around(13.0), around(10.0), devices=devices, **facts)


def slow(candidates, baselines, device=HOT):
    """The first so many requests of each arm, by order, in a state."""
    places = {arm: [i for i, name in enumerate(abba(6)) if name == arm] for arm in ("candidate", "baseline")}
    return dict.fromkeys([*places["candidate"][:candidates], *places["baseline"][:baselines]], device)


def at(candidate, baseline):
    """All requests of each arm at such a clock, before and after."""
    clocks = {"candidate": candidate, "baseline": baseline}
    return {
        i: {when: {**QUIET, "sm_mhz": clocks[name]} for when in ("before", "after")}
        for i, name in enumerate(abba(6))
    }


def judged(run, metric, low=-INF, high=INF, cell=None):
    """The outcome on one metric. What the machine leaves open has its reason, or no interval at all."""
    where = {"kv_format": "native" if cell == BASE else "int8_sym"}
    (found,) = own(judge(run, check(metric, low, high, **where)))
    assert (found.reason == "unstable_machine") <= (found.status == INCONCLUSIVE)
    return found


def opened(run, metric, low=-INF, high=INF, cell=None):
    """The sentence of an outcome that the machine leaves open."""
    found = judged(run, metric, low, high, cell)
    assert (found.status, found.reason) == (INCONCLUSIVE, "unstable_machine"), found
    return found.sentence


def ends(limits):
    low, high = limits.split("..")
    return float(low or -INF), float(high or INF)


def decided(run, cases, metric="itl_ratio"):
    """The cases "LOW..HIGH status", each with the status that the value has against these limits."""
    found = []
    for limits, _ in map(str.split, cases.split(", ")):
        status = judged(run, metric, *ends(limits)).status
        found.append(f"{limits} {'open' if status == INCONCLUSIVE else status}")
    return ", ".join(found)


@given(st.integers(-3, 3), st.sampled_from(["..0", "0..", "-1..1"]), st.booleans(), st.booleans())
def test_what_stands_is_true_of_every_value_that_the_true_one_may_be(value, limits, smaller, larger):
    limits = Limits(*ends(limits))
    below = [value - i for i in range(1, 20) if smaller]
    above = [value + i for i in range(1, 20) if larger]
    alike = all(limits.keeps(v) == limits.keeps(value) for v in (*below, *above))
    assert stands(PASS if limits.keeps(value) else FAIL, value, limits, smaller, larger) == alike


def test_every_judged_metric_is_one_of_latency():
    assert {METRICS[name].runner for name in JUDGED} == {"latency"}
    ratios = {name for name, (_, kind) in JUDGED.items() if kind == "ratio"}
    assert ratios == {name for name in JUDGED if METRICS[name].sampled}


@pytest.mark.parametrize(
    ("candidates", "baselines", "cases"),
    [
        (0, 0, "..1.1 fail, ..1.5 pass"),
        # the candidate: it may be faster in truth
        (6, 0, "..1.1 open, ..1.5 pass, 1.2.. open, 1.4.. fail, 1.2..1.5 open, 1.4..1.5 fail"),
        # the baseline: the ratio may be larger in truth
        (0, 6, "..1.1 fail, ..1.5 open, 1.2.. pass, 1.4.. open, 1.2..1.5 open, 1.4..1.5 open"),
        (6, 6, "..1.1 fail, ..1.5 pass"),
        (3, 3, "1.2..1.5 pass"),
        (6, 5, "..1.1 open, ..1.5 open"),
        (5, 6, "1.4.. open"),
        # a failure of the requests that were not slowed down is one; one pair has no interval
        (2, 0, "..1.1 fail"),
        (5, 0, "..1.1 open"),
        (2, 1, "..1.1 fail"),
        (0, 2, "1.4.. fail"),
    ],
)
def test_a_slowdown_of_one_arm_leaves_a_ratio_open(candidates, baselines, cases):
    assert decided(run_of(slow(candidates, baselines)), cases) == cases


@pytest.mark.parametrize(
    ("devices", "parts"),
    [
        (slow(6, 0), "6 of 12 requests under hw thermal (candidate 6, baseline 0), SM 1980 -> 1350 MHz"),
        (slow(6, 0, state(quota_us=50_000)), "under cpu quota (candidate 6, baseline 0)|raise the CPU quota"),
        (at(900, 1000), "at 900 MHz and the baseline's at 1000 (medians of SM clocks)|repeats=10"),
        (slow(6, 0, state("sw power cap", sm=1350)), "ran at 1665 MHz and the baseline's at 1980"),
    ],
)
def test_the_sentence_names_the_cause_the_counts_and_the_next_step(devices, parts):
    high = 1.25 if "900" in parts else 1.1
    run = run_of(devices)
    sentence = opened(run, "itl_ratio", high=high)
    assert [part for part in parts.split("|") if part not in sentence] == []
    assert ("medians of SM clocks" in sentence) == ("MHz and" in parts)
    assert judged(run, "itl_ratio", high=high).n_needed is None
    assert judge(run, check("itl_ratio", high=high)).exit_code == 4


@pytest.mark.parametrize(
    ("candidate", "baseline", "cases"),
    [
        (1000, 1000, "..1.1 fail"),
        (1000, 1050, "..1.25 fail"),
        (1050, 1000, "..1.35 pass"),
        # the candidate at the lower clock: 1.3, or down to 1.17 by the clocks alone
        (900, 1000, "..1.25 open, ..1.1 fail, ..1.5 pass, 1.2.. open, 1.1.. pass, 1.4.. fail"),
        # the baseline: 1.3, or up to 1.43
        (1100, 1000, "..1.35 open, ..1.5 pass, ..1.1 fail, 1.4.. open, 1.5.. fail, 1.2.. pass"),
        (2000, 1000, "1.4..1.6 open"),
        (500, 1000, "1.0..1.2 open"),
        (None, 1000, "..1.1 fail"),
        (900, None, "..1.25 fail"),
    ],
)
def test_clocks_that_differ_between_the_arms_leave_a_ratio_open(candidate, baseline, cases):
    run = run_of(at(candidate, baseline))
    assert decided(run, cases) == cases
    assert judged(run, "itl_ms", high=12.0).status == FAIL  # an absolute time is left alone


def test_a_failure_of_the_requests_at_full_speed_and_like_clocks_is_one():
    """Four slowed-down requests of six move the median; the two pairs without them fail by themselves."""
    cold_clock = HOT | {"before": {**QUIET, "sm_mhz": 1350}}
    assert judged(run_of(slow(4, 0, cold_clock)), "itl_ratio", high=1.1).status == FAIL
    opened(run_of({**at(1700, 1980), 1: HOT}), "itl_ratio", high=1.2)
    assert judged(run_of(slow(2, 0)), "itl_ms", high=12.0).status == FAIL
    times = [20.0, 20.0, *around(11.0)[2:]]
    opened(timed(times, around(10.0), devices=slow(2, 0)), "itl_ms", high=12.0)
    # nor does a power cap that leaves the clocks alike leave anything open
    assert judged(run_of(slow(6, 0, state("sw power cap", sm=1900))), "itl_ratio", high=1.1).status == FAIL


@pytest.mark.parametrize(
    ("metric", "passes", "fails", "two_sided"),
    [
        *((f"itl_{name}ms", "..14", "..12", "1..14") for name in ("", "p50_", "p90_", "p99_", "max_")),
        ("ttft_ms", "..51", "..49", "1..51"),
        ("request_ms", "..140", "..120", "1..140"),
        ("decode_tok_s", "70..", "80..", "70..1e6"),
        ("prefill_tok_s", "2500..", "2600..", "2500..1e6"),
    ],
)
def test_a_slowed_down_device_may_be_all_of_a_failure_and_none_of_a_pass(metric, passes, fails, two_sided):
    """two_sided: the true value may lie beyond the other end."""
    quiet = f"{passes} pass, {fails} fail, {two_sided} pass"
    for run in (run_of(), run_of(slow(0, 6))):
        assert decided(run, quiet, metric) == quiet
    hot = f"{passes} pass, {fails} open, {two_sided} open"
    assert decided(run_of(slow(6, 0)), hot, metric) == hot


def test_what_a_run_does_not_hold_and_other_runners_are_left_alone():
    run = timed(around(13.0), around(10.0), quiet=False)
    for arm in run.records[1].samples["arms"]:
        del arm["device"]
    assert "device_state" not in run.records[1].facts
    assert decided(run, "..1.1 fail, ..1.5 pass") == "..1.1 fail, ..1.5 pass"
    assert judged(run, "itl_ms", high=12.0).status == FAIL
    run = run_of(slow(6, 0))
    assert judged(run, "throttled_requests", high=0.0).status == FAIL
    assert judged(run, "latency_outliers", high=0.0).status == PASS


def drifting(candidate, baseline, names, step):
    """Every request takes `step` times as long as the one before it, whichever arm it is of."""
    times = {"candidate": [], "baseline": []}
    for i, name in enumerate(names):
        times[name].append((candidate if name == "candidate" else baseline) * step**i)
    return timed(times["candidate"], times["baseline"], names=names)


AFTER_EACH_OTHER = ["baseline"] * 6 + ["candidate"] * 6


@pytest.mark.parametrize(
    ("candidate", "step", "plain", "status"),
    [
        # measured one arm after the other: 6 requests of drift are in the ratio
        (10.0, 1.02, "pass", INCONCLUSIVE),  # 1.126, in truth 1
        (12.0, 0.96, "fail", INCONCLUSIVE),  # 0.939, in truth 1.2
        (12.0, 1.02, "", FAIL),  # 1.351, in truth 1.2
        (9.0, 0.96, "", PASS),  # 0.704, in truth 0.9
    ],
)
def test_a_drift_that_the_order_leaves_in_the_ratio_decides_nothing(candidate, step, plain, status):
    run = drifting(candidate, 10.0, AFTER_EACH_OTHER, step)
    assert judged(run, "itl_ratio", high=1.05).status == status
    if plain:
        sentence = opened(run, "itl_ratio", high=1.05)
        assert f"leaves {100 * (step**6 - 1):+.3g}% in the ratio" in sentence
        assert f"without that it would be {plain}" in sentence
        assert f"ITL drifts by {100 * (step**11 - 1):+.3g}%" in sentence


@pytest.mark.parametrize("step", [1.05, 0.95])
def test_even_repeats_in_a_b_b_a_cancel_a_straight_drift(step):
    """Nothing is left of it in the ratio, so both verdicts stand however large it is."""
    run = drifting(13.0, 10.0, abba(6), step)
    assert run.row("itl_ratio").value == pytest.approx(1.3)
    assert abs(run.row("latency_drift_pct").value or 0) > 20
    assert [judged(run, "itl_ratio", high=high).status for high in (2.0, 1.1)] == [PASS, FAIL]


def test_odd_repeats_leave_a_share_of_it():
    """5 repeats: a fifth of a request's drift."""
    run = drifting(9.0, 10.0, abba(5), 0.98)
    row = run.row("itl_ratio")
    left = 0.98 ** (1 / 5)
    assert row.value == pytest.approx(0.9 * left)
    sentence = opened(run, "itl_ratio", high=(row.high + row.high / left) / 2)
    assert f"leaves {100 * (left - 1):+.3g}% in the ratio" in sentence
    assert "without that it would be inconclusive" in sentence
    assert judged(run, "itl_ratio", high=row.high / left * 1.0001).status == PASS


@pytest.mark.parametrize(
    ("step", "metric", "cases"),
    [
        # rising: 10 to 16 ms, 12.7 in the mean of the candidate's; a pass must hold for the last request too
        (1.044, "itl_ms", "..20 pass, ..15 open, 5..20 pass, 11..15 open, ..11 fail, 11.. pass, 14.. open"),
        (1.044, "decode_tok_s", "40.. pass, 70.. open, 100.. fail"),
        (1.044, "itl_p99_ms", "..25 pass, ..18 open"),
        # falling: 10 to 6 ms, 7.9 in the mean; [7, 7.5] is crossed from one side to the other
        (0.956, "itl_ms", "..9 pass, ..7 open, ..5 fail, 5.. pass, 7.. open, 7..7.5 open"),
        (0.956, "decode_tok_s", "110.. pass, 150.. open, 180.. fail"),
        # up to 10% over the run is steady
        (1.0085, "itl_ms", "..11 pass, ..10.7 pass, ..10.1 fail"),
        (1.0095, "itl_ms", "..11.05 open"),
        # twice as long in the end, and still a hundredth of the limit
        (1.072, "itl_ms", "..2500 pass, ..20 open"),
    ],
)
def test_an_absolute_time_takes_a_steady_machine(step, metric, cases):
    run = drifting(10.0, 10.0, abba(6), step)
    assert decided(run, cases, metric) == cases
    drift = f"ITL drifts by {100 * (step**11 - 1):+.3g}%"
    for limits, status in map(str.split, cases.split(", ")):
        assert status != "open" or drift in opened(run, metric, *ends(limits))


def test_a21_t2_a_drift_is_of_one_quantity_and_one_arm_and_above_chance():
    """Steps get slower, the first token does not."""
    run = drifting(10.0, 10.0, abba(6), 1.044)
    assert judged(run, "ttft_ms", high=60.0).status == PASS
    assert "a request's time drifts by" in opened(run, "request_ms", high=140.0)
    run = timed(around(10.0), [10 * 1.05**i for i in range(6)])
    assert judged(run, "itl_ms", high=12.5, cell=BASE).cell == BASE
    assert "ITL drifts by +27.6%" in opened(run, "itl_ms", high=12.5, cell=BASE)
    twice = timed(around(10.0), [10 * 1.05**i for i in range(3)] * 2)
    assert judged(twice, "itl_ms", high=20.0).status == PASS
    run = timed([9.0, 14.0, 10.0, 12.0], [11.0, 10.0, 13.0, 9.0], names=["baseline"] * 4 + ["candidate"] * 4)
    row = run.row("latency_drift_pct")
    assert row.low < 0 < row.high
    assert judged(run, "itl_ms", high=12.0).status == PASS


def with_outlier(order, factor, level=10.0):
    run = timed(around(level), around(10.0))
    arm = run.records[1].samples["arms"][order]
    arm["itl_ms"] = [gap * factor for gap in arm["itl_ms"]]
    arm["total_ms"] = arm["ttft_ms"] + sum(arm["itl_ms"])
    return run


def test_an_outlier_that_decides_leaves_a_time_open_and_stays_in_it():
    run = with_outlier(5, 3.0)
    assert run.row("itl_ms").value == pytest.approx(sum(around(10.0)) / 6 + 20.1 / 6, rel=0.01)
    sentence = opened(run, "itl_ms", high=11.0)
    assert "ITL of request 5 (candidate, 2.96x) is an outlier" in sentence
    assert "without it the check would be pass" in sentence
    # An outlier of the baseline is none of a time of the candidate.
    run.records[1].samples["arms"][0]["itl_ms"] = [90.0] * 6
    assert "ITL of request 5 (candidate, 2.96x) is an outlier" in opened(run, "itl_ms", high=11.0)
    # One request of almost nothing is why the mean keeps the limit.
    run = with_outlier(5, 0.1)
    assert run.row("itl_ms").value == pytest.approx(8.5, rel=0.01)
    assert "without it the check would be fail" in opened(run, "itl_ms", high=9.0)
    # few requests have no outliers
    run = timed([10.0, 10.0, 10.0, 90.0], [10.0, 10.1, 10.0, 9.9])
    assert judged(run, "itl_ms", high=20.0).status == FAIL


@pytest.mark.parametrize(
    ("order", "level", "metric", "high", "status"),
    [
        (5, 10.0, "itl_ms", 9.0, FAIL),  # with it and without
        (5, 10.0, "itl_ms", 20.0, PASS),
        # a limit on the tail is about outliers
        *((5, 10.0, metric, 11.0, FAIL) for metric in ("itl_p90_ms", "itl_p99_ms", "itl_max_ms")),
        # the median and the first token do not depend on it
        (5, 10.0, "itl_p50_ms", 11.0, PASS),
        (5, 10.0, "ttft_ms", 49.0, FAIL),
        (0, 13.0, "itl_ms", 12.0, FAIL),  # the baseline's
    ],
)
def test_an_outlier_that_does_not_decide(order, level, metric, high, status):
    assert judged(with_outlier(order, 3.0, level), metric, high=high).status == status


def test_a_ratio_is_tried_without_the_pairs_of_its_outliers():
    """A stall hit both requests of a pair."""
    run = timed([9.0 * f for f in (1.02, 0.985, 1.01, 0.98, 1.005, 1.0)], [10.0] * 6)
    for arm in run.records[1].samples["arms"][10:]:
        arm["itl_ms"] = [gap * 4 for gap in arm["itl_ms"]]
    row = run.row("itl_ratio")
    sentence = opened(run, "itl_ratio", high=row.high + 1e-4)
    assert "10 (candidate, 3.97x), 11 (baseline, 4x) are outliers" in sentence
    assert "without them the check would be inconclusive" in sentence
    assert [judged(run, "itl_ratio", high=high).status for high in (1.5, 0.5)] == [PASS, FAIL]


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"count": 1, "bytes": 2_000_000}, "; 1 other process on the GPU with 2,000,000 B."),
        ({"count": 3, "bytes": None}, "; 3 other processes on the GPU."),
        ({"count": 0, "bytes": 0}, "--set runners.latency.warmup=5."),
        (None, "--set runners.latency.warmup=5."),
    ],
)
def test_other_processes_are_named_next_to_a_drift_and_are_no_cause_alone(others, words):
    facts = {"device_state": {"other_processes": others, "unread": {}}}
    quiet = run_of(**facts)
    assert judged(quiet, "itl_ratio", high=1.1).status == FAIL
    assert judged(quiet, "itl_ms", high=14.0).status == PASS
    assert "on the GPU" not in opened(run_of(slow(6, 0), **facts), "itl_ratio", high=1.1)
    drift = drifting(10.0, 10.0, abba(6), 1.044)
    drift.records[1].facts.update(facts)
    assert opened(drift, "itl_ms", high=15.0).endswith(words)


def test_several_causes_are_all_named():
    run = drifting(10.0, 10.0, abba(6), 1.05)
    for arm in run.records[1].samples["arms"]:
        arm["device"] = HOT if arm["arm"] == "candidate" else state()
    sentence = opened(run, "itl_ms", 5.0, 15.0)
    assert "slowed down in 6 of 12 requests" in sentence
    assert "ITL drifts by" in sentence

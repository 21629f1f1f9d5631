"""The state of the machine and the gate: which passes and failures of a latency are left open, and which are not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.gate.decide import Limits
from kvbench.gate.evaluate import evaluate
from kvbench.gate.latency_validity import JUDGED, stands
from kvbench.gate.policy import Check, Gate
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, PASS, Outcome
from kvbench.metrics.collect import METRICS
from tests.factories.runs.made import BASE, MadeRun
from tests.factories.runs.timed import QUIET, abba, state, timed

INF = math.inf
HOT = state("hw thermal", sm=1350)
# Six requests of an arm that scatter a little, in no direction.
SCATTER = [1.0, 1.01, 0.99, 1.005, 0.995, 1.0]


def around(level: float) -> list[float]:
    return [level * factor for factor in SCATTER]


def slow(candidates: int, baselines: int, device: Any = HOT, names: Sequence[str] = ()) -> dict[int, Any]:
    """The first so many requests of each arm, by order, in a state."""
    names = names or abba(6)
    places = {arm: [i for i, name in enumerate(names) if name == arm] for arm in ("candidate", "baseline")}
    return dict.fromkeys([*places["candidate"][:candidates], *places["baseline"][:baselines]], device)


def judged(
    run: MadeRun, metric: str, low: float = -INF, high: float = INF, cell: str | None = None
) -> Outcome:
    """What the gate says of one metric of the candidate."""
    check = Check(metric, {"kv_format": "native" if cell == BASE else "int8_sym"}, low, high, "the limit")
    verdict = evaluate(Gate("made", (check,)), run.run, run.rows())
    (found,) = [o for o in verdict.outcomes if o.check == check.name]
    return found


# the direction


@given(
    st.integers(-3, 3), st.sampled_from([(-INF, 0.0), (0.0, INF), (-1.0, 1.0)]), st.booleans(), st.booleans()
)
def test_what_stands_is_true_of_every_value_that_the_true_one_may_be(
    value: int, ends: tuple[float, float], smaller: bool, larger: bool
) -> None:
    limits = Limits(*ends)
    status = PASS if limits.keeps(value) else FAIL
    may_be = [
        value,
        *(value - i for i in range(1, 20) if smaller),
        *(value + i for i in range(1, 20) if larger),
    ]
    alike = all(limits.keeps(v) == limits.keeps(value) for v in may_be)
    assert stands(status, value, limits, smaller, larger) == alike


def test_every_judged_metric_is_one_of_latency() -> None:
    assert {METRICS[name].runner for name in JUDGED} == {"latency"}
    ratios = {name for name, (_, kind) in JUDGED.items() if kind == "ratio"}
    assert ratios == {name for name in JUDGED if METRICS[name].sampled}


# slowdowns, in a ratio: 1.3 against limits below and above it


@pytest.mark.parametrize(
    ("candidates", "baselines", "low", "high", "status"),
    [
        # nothing slowed down
        (0, 0, -INF, 1.1, FAIL),
        (0, 0, -INF, 1.5, PASS),
        # the candidate: it may be faster in truth
        (6, 0, -INF, 1.1, INCONCLUSIVE),
        (6, 0, -INF, 1.5, PASS),
        (6, 0, 1.2, INF, INCONCLUSIVE),
        (6, 0, 1.4, INF, FAIL),
        (6, 0, 1.2, 1.5, INCONCLUSIVE),
        (6, 0, 1.4, 1.5, FAIL),
        # the baseline: the ratio may be larger in truth
        (0, 6, -INF, 1.1, FAIL),
        (0, 6, -INF, 1.5, INCONCLUSIVE),
        (0, 6, 1.2, INF, PASS),
        (0, 6, 1.4, INF, INCONCLUSIVE),
        (0, 6, 1.2, 1.5, INCONCLUSIVE),
        (0, 6, 1.4, 1.5, INCONCLUSIVE),
        # both as often: a ratio is one of two slow devices
        (6, 6, -INF, 1.1, FAIL),
        (6, 6, -INF, 1.5, PASS),
        (3, 3, 1.2, 1.5, PASS),
        # both, but one of them more often
        (6, 5, -INF, 1.1, INCONCLUSIVE),
        (6, 5, -INF, 1.5, INCONCLUSIVE),
        (5, 6, 1.4, INF, INCONCLUSIVE),
        # a failure of the requests that were not slowed down is one
        (2, 0, -INF, 1.1, FAIL),
        (5, 0, -INF, 1.1, INCONCLUSIVE),  # one pair has no interval
        (2, 1, -INF, 1.1, FAIL),
        (0, 2, 1.4, INF, FAIL),
    ],
)
def test_a_slowdown_of_one_arm_leaves_a_ratio_open(
    candidates: int, baselines: int, low: float, high: float, status: str
) -> None:
    run = timed(around(13.0), around(10.0), devices=slow(candidates, baselines))
    assert judged(run, "itl_ratio", low, high).status == status


def test_the_sentence_names_the_cause_the_counts_and_the_next_step() -> None:
    found = judged(timed(around(13.0), around(10.0), devices=slow(6, 0)), "itl_ratio", high=1.1)
    assert found.sentence == (
        "itl_ratio on kv_format=int8_sym is 1.3 (95% interval 1.3 to 1.3, n=6); the limit is the limit: broken, but the device was "
        "slowed down in 6 of 12 requests under hw thermal (candidate 6, baseline 0), SM 1980 -> 1350 MHz, which a ratio does not "
        "cancel; see to its cooling and power, and measure again: --set runners.latency.repeats=10."
    )
    assert found.n_needed is None


def test_a_power_cap_that_leaves_the_clocks_alike_leaves_nothing_open() -> None:
    run = timed(around(13.0), around(10.0), devices=slow(6, 0, state("sw power cap", sm=1900)))
    assert judged(run, "itl_ratio", high=1.1).status == FAIL


# clocks of the arms, in a ratio: 1.3, and what it is by the clocks alone


def at(candidate: int | None, baseline: int | None, names: Sequence[str] = ()) -> dict[int, Any]:
    """All requests of each arm at such a clock, before and after."""
    clocks = {"candidate": candidate, "baseline": baseline}
    return {
        i: {"before": {**QUIET, "sm_mhz": clocks[name]}, "after": {**QUIET, "sm_mhz": clocks[name]}}
        for i, name in enumerate(names or abba(6))
    }


@pytest.mark.parametrize(
    ("own", "other", "low", "high", "status"),
    [
        # alike
        (1000, 1000, -INF, 1.1, FAIL),
        (1000, 1050, -INF, 1.25, FAIL),
        (1050, 1000, -INF, 1.35, PASS),
        # the candidate at the lower clock: 1.3, or down to 1.17 by the clocks alone
        (900, 1000, -INF, 1.25, INCONCLUSIVE),
        (900, 1000, -INF, 1.1, FAIL),
        (900, 1000, -INF, 1.5, PASS),
        (900, 1000, 1.2, INF, INCONCLUSIVE),
        (900, 1000, 1.1, INF, PASS),
        (900, 1000, 1.4, INF, FAIL),
        # the baseline: 1.3, or up to 1.43
        (1100, 1000, -INF, 1.35, INCONCLUSIVE),
        (1100, 1000, -INF, 1.5, PASS),
        (1100, 1000, -INF, 1.1, FAIL),
        (1100, 1000, 1.4, INF, INCONCLUSIVE),
        (1100, 1000, 1.5, INF, FAIL),
        (1100, 1000, 1.2, INF, PASS),
        # beyond both ends, and between them on the way
        (2000, 1000, 1.4, 1.6, INCONCLUSIVE),
        (500, 1000, 1.0, 1.2, INCONCLUSIVE),
        # not read
        (None, 1000, -INF, 1.1, FAIL),
        (900, None, -INF, 1.25, FAIL),
    ],
)  # fmt: skip
def test_clocks_that_differ_between_the_arms_leave_a_ratio_open(
    own: int | None, other: int | None, low: float, high: float, status: str
) -> None:
    run = timed(around(13.0), around(10.0), devices=at(own, other))
    assert judged(run, "itl_ratio", low, high).status == status


def test_both_clocks_are_named_and_an_absolute_time_is_left_alone() -> None:
    run = timed(around(13.0), around(10.0), devices=at(900, 1000))
    assert judged(run, "itl_ratio", high=1.25).sentence.endswith(
        "broken, but the candidate's requests ran at 900 MHz and the baseline's at 1000 (medians of SM clocks), which a ratio does not "
        "cancel; see to its clocks and power, and measure again: --set runners.latency.repeats=10."
    )
    assert judged(run, "itl_ms", high=12.0).status == FAIL
    capped = timed(around(13.0), around(10.0), devices=slow(6, 0, state("sw power cap", sm=1350)))
    assert "ran at 1665 MHz and the baseline's at 1980" in judged(capped, "itl_ratio", high=1.1).sentence


def test_a_slowdown_that_is_named_has_its_clocks_beside_it() -> None:
    run = timed(around(13.0), around(10.0), devices=slow(6, 0))
    assert "medians of SM clocks" not in judged(run, "itl_ratio", high=1.1).sentence


def test_a_failure_of_the_requests_at_full_speed_and_like_clocks_is_one() -> None:
    """Four slowed-down requests of six move the median; the two pairs without them fail by themselves."""
    run = timed(
        around(13.0),
        around(10.0),
        devices=slow(4, 0, state("hw thermal", sm=1350) | {"before": {**QUIET, "sm_mhz": 1350}}),
    )
    assert judged(run, "itl_ratio", high=1.1).status == FAIL
    apart = {**at(1700, 1980), 1: HOT}
    assert (
        judged(timed(around(13.0), around(10.0), devices=apart), "itl_ratio", high=1.2).status == INCONCLUSIVE
    )


def test_a_quota_has_a_remedy_of_its_own() -> None:
    run = timed(around(13.0), around(10.0), devices=slow(6, 0, state(quota_us=50_000)))
    found = judged(run, "ttft_ratio", high=0.9)
    assert found.status == INCONCLUSIVE
    assert "under cpu quota (candidate 6, baseline 0), which" in found.sentence
    assert "; raise the CPU quota, and measure again" in found.sentence


def test_an_exit_code_of_a_check_that_was_left_open_is_4() -> None:
    run = timed(around(13.0), around(10.0), devices=slow(6, 0))
    check = Check("itl_ratio", {}, -INF, 1.1, "at most 1.1")
    assert evaluate(Gate("made", (check,)), run.run, run.rows()).exit_code == 4


# slowdowns, in absolute times: 13 ms a step, 50 ms to the first token, 128 ms in all


@pytest.mark.parametrize(
    ("metric", "passes", "fails"),
    [
        *((name, {"high": 14.0}, {"high": 12.0}) for name in ("itl_ms", "itl_p50_ms", "itl_p90_ms", "itl_p99_ms", "itl_max_ms")),
        ("ttft_ms", {"high": 51.0}, {"high": 49.0}),
        ("request_ms", {"high": 140.0}, {"high": 120.0}),
        ("decode_tok_s", {"low": 70.0}, {"low": 80.0}),
        ("prefill_tok_s", {"low": 2500.0}, {"low": 2600.0}),
    ],
)  # fmt: skip
def test_a_slowed_down_device_may_be_all_of_a_failure_and_none_of_a_pass(
    metric: str, passes: dict[str, float], fails: dict[str, float]
) -> None:
    quiet = timed(around(13.0), around(10.0))
    hot = timed(around(13.0), around(10.0), devices=slow(6, 0))
    beside = timed(around(13.0), around(10.0), devices=slow(0, 6))
    assert [judged(quiet, metric, **limit).status for limit in (passes, fails)] == [PASS, FAIL]
    assert [judged(beside, metric, **limit).status for limit in (passes, fails)] == [PASS, FAIL]
    assert [judged(hot, metric, **limit).status for limit in (passes, fails)] == [PASS, INCONCLUSIVE]
    assert "which makes times longer" in judged(hot, metric, **fails).sentence
    # an end on the other side: the true value may lie beyond it
    other = {"low": 1.0} if "high" in passes else {"high": 1e6}
    assert judged(quiet, metric, **passes, **other).status == PASS
    assert judged(hot, metric, **passes, **other).status == INCONCLUSIVE


def test_a_failure_of_the_requests_that_ran_at_full_speed_is_one() -> None:
    run = timed(around(13.0), around(10.0), devices=slow(2, 0))
    assert judged(run, "itl_ms", high=12.0).status == FAIL
    own = [20.0, 20.0, *around(11.0)[2:]]
    assert judged(timed(own, around(10.0), devices=slow(2, 0)), "itl_ms", high=12.0).status == INCONCLUSIVE


def test_what_a_run_does_not_say_raises_no_doubt() -> None:
    """Records of before: judged as they were."""
    run = timed(around(13.0), around(10.0), quiet=False)
    for arm in run.records[1].samples["arms"]:
        del arm["device"]
    assert "device_state" not in run.records[1].facts
    assert judged(run, "itl_ratio", high=1.1).status == FAIL
    assert judged(run, "itl_ratio", high=1.5).status == PASS
    assert judged(run, "itl_ms", high=12.0).status == FAIL


# drift, in a ratio


def drifting(own: float, other: float, names: Sequence[str], step: float) -> MadeRun:
    """Every request takes `step` times as long as the one before it, whichever arm it is of."""
    times: dict[str, list[float]] = {"candidate": [], "baseline": []}
    for i, name in enumerate(names):
        times[name].append((own if name == "candidate" else other) * step**i)
    return timed(times["candidate"], times["baseline"], names=names)


AFTER_EACH_OTHER = ["baseline"] * 6 + ["candidate"] * 6


@pytest.mark.parametrize(
    ("own", "step", "high", "plain", "status"),
    [
        # measured one arm after the other: 6 requests of drift are in the ratio
        (10.0, 1.02, 1.05, "pass", INCONCLUSIVE),  # 1.126, in truth 1
        (12.0, 0.96, 1.05, "fail", INCONCLUSIVE),  # 0.939, in truth 1.2
        (12.0, 1.02, 1.05, "", FAIL),  # 1.351, in truth 1.2
        (9.0, 0.96, 1.05, "", PASS),  # 0.704, in truth 0.9
    ],
)
def test_a_drift_that_the_order_leaves_in_the_ratio_decides_nothing(
    own: float, step: float, high: float, plain: str, status: str
) -> None:
    run = drifting(own, 10.0, AFTER_EACH_OTHER, step)
    found = judged(run, "itl_ratio", high=high)
    assert found.status == status
    if plain:
        left = 100 * (step**6 - 1)
        assert f"of which the order of the arms leaves {left:+.3g}% in the ratio" in found.sentence
        assert f"without that it would be {plain}; warm up longer" in found.sentence
        assert f"ITL drifts by {100 * (step**11 - 1):+.3g}%" in found.sentence


@pytest.mark.parametrize("step", [1.05, 0.95])
def test_even_repeats_in_a_b_b_a_cancel_a_straight_drift(step: float) -> None:
    """Nothing is left of it in the ratio, so both verdicts stand however large it is."""
    run = drifting(13.0, 10.0, abba(6), step)
    row = run.row("itl_ratio")
    assert row.value == pytest.approx(1.3)
    assert abs(run.row("latency_drift_pct").value or 0) > 20
    assert judged(run, "itl_ratio", high=2.0).status == PASS
    assert judged(run, "itl_ratio", high=1.1).status == FAIL


def test_odd_repeats_leave_a_share_of_it() -> None:
    """5 repeats: a fifth of a request's drift. Falling times flatter 0.9 to 0.8964, up to whose limit only that brings it."""
    run = drifting(9.0, 10.0, abba(5), 0.98)
    row = run.row("itl_ratio")
    left = 0.98 ** (1 / 5)
    assert row.value == pytest.approx(0.9 * left)
    assert row.high is not None
    between = (row.high + row.high / left) / 2
    found = judged(run, "itl_ratio", high=between)
    assert found.status == INCONCLUSIVE
    assert (
        f"leaves {100 * (left - 1):+.3g}% in the ratio, and without that it would be inconclusive"
        in found.sentence
    )
    assert judged(run, "itl_ratio", high=row.high / left * 1.0001).status == PASS


def test_a_drift_that_chance_explains_is_none() -> None:
    own, other = [9.0, 14.0, 10.0, 12.0], [11.0, 10.0, 13.0, 9.0]
    run = timed(own, other, names=["baseline"] * 4 + ["candidate"] * 4)
    row = run.row("latency_drift_pct")
    assert row.low is not None
    assert row.high is not None
    assert row.low < 0 < row.high
    assert judged(run, "itl_ms", high=12.0).status == PASS


# drift, in absolute times


@pytest.mark.parametrize(
    ("step", "metric", "limit", "status"),
    [
        # rising: 10 to 16 ms, 12.7 in the mean of the candidate's
        (1.044, "itl_ms", {"high": 20.0}, PASS),  # so is the last request
        (1.044, "itl_ms", {"high": 15.0}, INCONCLUSIVE),
        (1.044, "itl_ms", {"low": 5.0, "high": 20.0}, PASS),
        (1.044, "itl_ms", {"low": 11.0, "high": 15.0}, INCONCLUSIVE),
        (1.044, "itl_ms", {"high": 11.0}, FAIL),
        (1.044, "itl_ms", {"low": 11.0}, PASS),
        (1.044, "itl_ms", {"low": 14.0}, INCONCLUSIVE),
        (1.044, "decode_tok_s", {"low": 40.0}, PASS),
        (1.044, "decode_tok_s", {"low": 70.0}, INCONCLUSIVE),
        (1.044, "decode_tok_s", {"low": 100.0}, FAIL),
        (1.044, "itl_p99_ms", {"high": 25.0}, PASS),
        (1.044, "itl_p99_ms", {"high": 18.0}, INCONCLUSIVE),
        # falling: 10 to 6 ms, 7.9 in the mean
        (0.956, "itl_ms", {"high": 9.0}, PASS),
        (0.956, "itl_ms", {"high": 7.0}, INCONCLUSIVE),  # the last requests keep it
        (0.956, "itl_ms", {"high": 5.0}, FAIL),  # not even they do
        (0.956, "itl_ms", {"low": 5.0}, PASS),
        (0.956, "itl_ms", {"low": 7.0}, INCONCLUSIVE),
        (0.956, "itl_ms", {"low": 7.0, "high": 7.5}, INCONCLUSIVE),  # from one side to the other
        (0.956, "decode_tok_s", {"low": 110.0}, PASS),
        (0.956, "decode_tok_s", {"low": 150.0}, INCONCLUSIVE),
        (0.956, "decode_tok_s", {"low": 180.0}, FAIL),
        # up to 10% over the run is steady
        (1.0085, "itl_ms", {"high": 11.0}, PASS),
        (1.0085, "itl_ms", {"high": 10.1}, FAIL),
        (1.0095, "itl_ms", {"high": 11.05}, INCONCLUSIVE),
    ],
)
def test_an_absolute_time_takes_a_steady_machine(
    step: float, metric: str, limit: dict[str, float], status: str
) -> None:
    found = judged(drifting(10.0, 10.0, abba(6), step), metric, **limit)
    assert found.status == status
    if status == INCONCLUSIVE:
        assert f"ITL drifts by {100 * (step**11 - 1):+.3g}%" in found.sentence
        assert "beyond 10% it is no steady machine's; warm up longer" in found.sentence


def test_a_pass_far_from_its_limit_stands_whatever_the_drift() -> None:
    """Twice as long in the end, and still a hundredth of the limit."""
    run = drifting(4.0, 4.0, abba(6), 1.072)
    assert (run.row("latency_drift_pct").value or 0) > 10
    assert judged(run, "itl_ms", high=1000.0).status == PASS
    assert judged(run, "itl_ms", high=8.0).status == INCONCLUSIVE


def test_ttft_has_a_drift_of_its_own() -> None:
    """Steps get slower, the first token does not."""
    run = drifting(10.0, 10.0, abba(6), 1.044)
    assert judged(run, "ttft_ms", high=60.0).status == PASS
    assert "a request's time drifts by" in judged(run, "request_ms", high=140.0).sentence


def test_a21_t2_a_baseline_by_itself_is_judged_by_its_own_drift() -> None:
    run = timed(around(10.0), [10 * 1.05**i for i in range(6)])
    found = judged(run, "itl_ms", high=12.5, cell=BASE)
    assert (found.status, found.cell) == (INCONCLUSIVE, BASE)
    assert "ITL drifts by +27.6%" in found.sentence
    assert (
        judged(timed(around(10.0), [10 * 1.05**i for i in range(3)][:3] * 2), "itl_ms", high=20.0).status
        == PASS
    )


# outliers


def with_outlier(order: int, factor: float, level: float = 10.0) -> MadeRun:
    run = timed(around(level), around(10.0))
    arm = run.records[1].samples["arms"][order]
    arm["itl_ms"] = [gap * factor for gap in arm["itl_ms"]]
    arm["total_ms"] = arm["ttft_ms"] + sum(arm["itl_ms"])
    return run


def test_an_outlier_that_decides_leaves_a_time_open_and_stays_in_it() -> None:
    run = with_outlier(5, 3.0)
    assert run.row("itl_ms").value == pytest.approx(sum(around(10.0)) / 6 + 20.1 / 6, rel=0.01)
    found = judged(run, "itl_ms", high=11.0)
    assert found.status == INCONCLUSIVE
    assert "broken, but ITL of request 5 (candidate, 2.96x) is an" in found.sentence
    assert (
        "is an outlier in its arm and decides: without it the check would be pass; measure again"
        in found.sentence
    )
    assert judged(run, "itl_ms", high=9.0).status == FAIL  # with it and without
    assert judged(run, "itl_ms", high=20.0).status == PASS


def test_an_outlier_may_lie_on_the_other_side() -> None:
    """One request of almost nothing is why the mean keeps the limit."""
    run = with_outlier(5, 0.1)
    found = judged(run, "itl_ms", high=9.0)
    assert (found.status, run.row("itl_ms").value) == (INCONCLUSIVE, pytest.approx(8.5, rel=0.01))
    assert "without it the check would be fail" in found.sentence


@pytest.mark.parametrize("metric", ["itl_p90_ms", "itl_p99_ms", "itl_max_ms"])
def test_a_limit_on_the_tail_is_about_outliers(metric: str) -> None:
    assert judged(with_outlier(5, 3.0), metric, high=11.0).status == FAIL


def test_the_median_and_the_first_token_do_not_hang_on_it() -> None:
    run = with_outlier(5, 3.0)
    assert judged(run, "itl_p50_ms", high=11.0).status == PASS
    assert judged(run, "ttft_ms", high=49.0).status == FAIL


def test_an_outlier_of_the_baseline_is_none_of_a_time_of_the_candidate() -> None:
    run = with_outlier(0, 3.0, level=13.0)
    assert judged(run, "itl_ms", high=12.0).status == FAIL


def test_a_time_is_tried_without_its_own_outliers_alone() -> None:
    run = with_outlier(5, 3.0)
    run.records[1].samples["arms"][0]["itl_ms"] = [90.0] * 6  # the baseline's
    said = judged(run, "itl_ms", high=11.0).sentence
    assert "ITL of request 5 (candidate, 2.96x) is an outlier" in said


def test_a_ratio_is_tried_without_the_pairs_of_its_outliers() -> None:
    """A stall hit both requests of a pair: the ratio is the same, and that pair is why the interval keeps the limit."""
    own = [9.0 * f for f in (1.02, 0.985, 1.01, 0.98, 1.005, 1.0)]
    run = timed(own, [10.0] * 6)
    for arm in run.records[1].samples["arms"][10:]:
        arm["itl_ms"] = [gap * 4 for gap in arm["itl_ms"]]
    row = run.row("itl_ratio")
    assert row.high is not None
    limit = row.high + 1e-4
    found = judged(run, "itl_ratio", high=limit)
    assert (
        "kept, but ITL of requests 10 (candidate, 3.97x), 11 (baseline, 4x) are outliers in their arms and decide: without them the "
        "check would be inconclusive"
    ) in found.sentence
    assert found.status == INCONCLUSIVE
    assert judged(run, "itl_ratio", high=1.5).status == PASS
    assert judged(run, "itl_ratio", high=0.5).status == FAIL


def test_few_requests_have_no_outliers() -> None:
    run = timed([10.0, 10.0, 10.0, 90.0], [10.0, 10.1, 10.0, 9.9])
    assert judged(run, "itl_ms", high=20.0).status == FAIL


# other processes


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"count": 1, "bytes": 2_000_000}, "; 1 other process on the GPU with 2,000,000 B."),
        ({"count": 3, "bytes": None}, "; 3 other processes on the GPU."),
        ({"count": 0, "bytes": 0}, ""),
        (None, ""),
    ],
)
def test_other_processes_are_named_beside_a_drift_and_are_no_cause_alone(others: Any, words: str) -> None:
    facts = {"device_state": {"other_processes": others, "unread": {}}}
    quiet = timed(around(13.0), around(10.0), **facts)
    assert judged(quiet, "itl_ratio", high=1.1).status == FAIL
    assert judged(quiet, "itl_ms", high=14.0).status == PASS
    hot = timed(around(13.0), around(10.0), devices=slow(6, 0), **facts)
    assert "on the GPU" not in judged(hot, "itl_ratio", high=1.1).sentence
    drift = drifting(10.0, 10.0, abba(6), 1.044)
    drift.records[1].facts.update(facts)  # type: ignore[attr-defined]
    found = judged(drift, "itl_ms", high=15.0)
    assert found.status == INCONCLUSIVE
    assert found.sentence.endswith(words or "--set runners.latency.warmup=5.")


def test_several_causes_are_all_named() -> None:
    run = drifting(10.0, 10.0, abba(6), 1.05)
    for arm in run.records[1].samples["arms"]:
        arm["device"] = HOT if arm["arm"] == "candidate" else state()
    found = judged(run, "itl_ms", 5.0, 15.0)
    assert "slowed down in 6 of 12 requests" in found.sentence
    assert "ITL drifts by" in found.sentence


def test_other_runners_are_left_alone() -> None:
    run = timed(around(13.0), around(10.0), devices=slow(6, 0))
    assert judged(run, "throttled_requests", high=0.0).status == FAIL
    assert judged(run, "latency_outliers", high=0.0).status == PASS

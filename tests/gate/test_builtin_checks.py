"""Built-in checks of made-up runs: identities, bandwidth, lines over the context."""

from dataclasses import replace

import pytest

from kvbench.gate.builtin_checks import IDENTITIES
from kvbench.gate.verdict import FAIL, INCONCLUSIVE
from kvbench.report.model import JudgedRun
from kvbench.report.sections.notices import notices
from tests.factories.runs.contexts import FP8_KV, NATIVE_KV, Contexts, timed_at
from tests.factories.runs.made import BASE, CAND
from tests.factories.runs.timed import timed
from tests.factories.verdicts import bare, check, judge, of, with_values


def judged(run, rows=None):
    """The failures and the open outcomes of the built-in checks."""
    return [o for o in bare(run, rows).outcomes if o.status in (FAIL, INCONCLUSIVE)]


def test_a_sound_run_breaks_nothing_and_where_nothing_was_measured_nothing_is_called_possible():
    run = timed_at()
    assert judged(run) == []
    assert [o.reason for o in bare(run).outcomes if o.check == "plausible"] == ["plausible"]
    unmeasured = [replace(row, value=None) for row in run.rows()]
    assert [o.sentence for o in bare(run, unmeasured).outcomes if o.check == "plausible"] == []


def faster(factor, pairs):
    """A candidate whose times are the baseline's, times `factor`."""
    run = timed([10.0 * factor] * pairs, [10.0] * pairs)
    for arm in run.records[1].samples["arms"]:
        if arm["arm"] == "candidate":
            arm["ttft_ms"] *= factor
            arm["total_ms"] = arm["ttft_ms"] + sum(arm["itl_ms"])
    return run


@pytest.mark.parametrize("pairs", [1, 2])
def test_a23_t3_latency_97_percent_below_the_baseline_is_implausible(pairs):
    """One pair of requests is enough; the sentence says how to measure more."""
    limit = check("itl_ratio", high=1.2)
    faults = of(judge(faster(0.03, pairs), limit), FAIL)
    assert {(o.metric, o.reason) for o in faults} == {
        (metric, "implausible") for metric in ("ttft_ratio", "itl_ratio")
    }
    assert all("--set runners.latency.repeats=10" in o.sentence for o in faults)
    assert judge(faster(0.5, 2), limit).exit_code == 0


@pytest.mark.parametrize(
    ("metric", "value", "words"),
    [
        ("decode_tok_s", 100.0, "batch / ITL is 200 tok/s"),
        ("prefill_tok_s", 2560.0, "batch x context / TTFT is 5120 tok/s"),
        ("kv_bytes_total", 44_000.0, "46,200 B"),
    ],
)
def test_a20_t5_a_planted_error_is_named_with_both_numbers(metric, value, words):
    run = timed_at()
    (fault,) = judged(run, with_values(run, metric, CAND, value=value))
    assert (fault.check, fault.metric, fault.cell, fault.status) == ("plausible", metric, CAND, FAIL)
    assert (fault.reason, fault.value, words in fault.sentence) == ("identity", value, True)


def test_weight_bytes_are_their_parts():
    run = timed_at()
    parts = {"weight_payload_bytes": 60, "weight_scale_bytes": 5, "weight_native_bytes": 40}
    run.records[3] = replace(run.records[3], facts={**run.records[3].facts, **parts})
    (fault,) = judged(run)
    assert (fault.metric, fault.reason, fault.value) == ("weight_bytes", "identity", 100)
    assert "105 B" in fault.sentence


def test_neither_rounding_nor_what_was_not_measured_breaks_an_identity():
    run = timed_at(own=7.123456789)
    rows = run.rows()
    near = [
        replace(r, value=r.value * (1 + 1e-12)) if r.metric in IDENTITIES and r.value else r for r in rows
    ]
    absent = [replace(r, value=None) if r.metric in ("itl_ms", "ttft_ms") else r for r in rows]
    assert [judged(run, near), judged(run, absent)] == [[], []]


def planted(run, at, **changes):
    """With one request of the candidate's latency record changed."""
    record = run.records[1]
    arms = [{**a, **changes} if i == at else a for i, a in enumerate(record.samples["arms"])]
    run.records[1] = replace(record, samples={**record.samples, "arms": arms})
    return run


def test_a20_t1_a_request_that_is_not_its_ttft_and_steps_is_named():
    run = timed_at()
    assert (run.row("request_ms").value, run.row("request_difference_ms").value) == (80.0, 0)
    (fault,) = judged(planted(run, 3, total_ms=90.0))
    assert (fault.metric, fault.value) == ("request_difference_ms", 10.0)
    assert "request 3 took 90 ms" in fault.sentence
    # older records have no totals
    run = timed_at()
    for arm in run.records[1].samples["arms"]:
        del arm["total_ms"]
    row = run.row("request_difference_ms")
    assert (row.value, row.note, judged(run)) == (None, "the record holds no time of a whole request", [])


@pytest.mark.parametrize(
    ("changes", "metric", "reason"),
    [
        ({"total_ms": float("nan")}, "request_ms", "implausible"),
        ({"prefill_tokens": 128}, "prefill_tok_s", "identity"),  # a prompt of other tokens than the cell's
    ],
)
def test_one_request_with_an_impossible_number_is_found(changes, metric, reason):
    (fault, *_) = judged(planted(timed_at(), 0, **changes))
    assert (fault.metric, fault.reason) == (metric, reason)


def test_bytes_of_a_step_over_its_time_are_implausible_beyond_the_memory():
    """10^9 B of weights and 2 sequences of 128 + 1 stored tokens in 10 ms."""
    run = timed_at()
    bytes_ = 10**9 + FP8_KV * 2 * 129
    assert run.row("decode_read_gb_s").value == pytest.approx(bytes_ / 0.010 / 1e9)
    assert run.row("decode_bandwidth_share").value == pytest.approx((bytes_ - 50e6) / 0.010 / 1e9 / 4000)
    # 1.02 GB, of which 50 MB may be cached, in 0.2 ms: 1.21 of what a copy reaches; in 0.21 ms 1.15
    (fault,) = [o for o in judged(timed_at(own=0.2, native=0.25)) if o.cell == CAND]
    assert (fault.check, fault.metric) == ("plausible", "decode_bandwidth_share")
    assert fault.value == pytest.approx(1.212, abs=1e-3)
    parts = ("1,019,616,256 B", "50,000,000 B", "0.2 ms", "4000 GB/s")
    assert all(part in fault.sentence for part in parts)
    assert judged(timed_at(own=0.21, native=0.25)) == []


@pytest.mark.parametrize(
    ("facts", "note"),
    [
        ({"copy_gb_s": None, "copy_reason": "no copy is timed on a cpu"}, "no copy is timed on a cpu"),
        ({"copy_gb_s": None}, "it is not in the record"),
        ({"cache_bytes": 2 * 10**9}, "fit the cache of 2,000,000,000 B"),
        ({"arms": {}}, "the record does not say what a step reads"),
    ],
)
def test_without_a_bandwidth_to_compare_with_the_row_says_so(facts, note):
    run = timed_at(own=1e-2, native=1e-2, **facts)
    for metric in ("decode_bandwidth_share", *(["decode_read_gb_s"] if "arms" in facts else [])):
        row = run.row(metric)
        assert (row.value, note in row.note) == (None, True)


def test_a_line_over_three_contexts():
    run = Contexts(own=(8.0, 0.42))
    expected = {
        "itl_slope_us_per_token": 0.42,
        "itl_intercept_ms": 8.0,
        "itl_slope_ratio": 0.525,
        "itl_break_even_tokens": 2000 / 0.38,
        "itl_slope_to_bytes": 0.525 / (FP8_KV / NATIVE_KV),
    }
    assert {metric: run.row(metric).value for metric in expected} == pytest.approx(expected)
    assert run.row("itl_slope_us_per_token", f"{BASE}4096").value == pytest.approx(0.8)
    assert run.row("itl_slope_us_per_token").n == 6  # 2 requests a context
    ratios = [row for row in run.rows() if row.metric == "itl_slope_ratio"]
    assert {row.cell for row in ratios} == {f"{CAND}{x}" for x in (1024, 4096, 16384)}
    assert (len({row.value for row in ratios}), run.row("itl_slope_ratio").baseline) == (1, f"{BASE}1024")
    row = Contexts(scatter=0.5).row("itl_slope_us_per_token")
    assert row.low < row.value < row.high


@pytest.mark.parametrize(
    ("own", "value", "note"),
    [
        ((8.0, 0.8), None, "parallel"),
        ((5.0, 0.42), 0.0, "from the first token"),
        ((8.0, 0.9), None, "at no context"),
        ((20.0, 0.42), 14.0 / 0.38e-3, "outside the contexts measured, 1,024 to 16,384"),
    ],
)
def test_where_a_format_pays(own, value, note):
    row = Contexts(own=own).row("itl_break_even_tokens")
    assert row.value == (value if value is None else pytest.approx(value))
    assert note in row.note


def test_two_contexts_two_machines_a_failure_and_a_falling_line_make_no_ratio():
    run = Contexts(contexts=(1024, 4096))
    for metric in ("itl_slope_us_per_token", "itl_slope_ratio", "itl_break_even_tokens"):
        assert (run.row(metric).value, "3 contexts, 2" in run.row(metric).note) == (None, True)
    assert judged(run) == []
    # contexts of two machines
    run = Contexts()
    run.records[-3] = replace(run.records[-3], environment={"cpu": "another"})
    assert run.records[-3].key == "latency--cand-16384"
    assert run.row("itl_slope_ratio").note == "its contexts were measured under different cpu"
    assert run.row("itl_slope_us_per_token", f"{BASE}1024").value is not None
    # a context that failed is left out
    run = Contexts(contexts=(512, 1024, 4096, 16384))
    at = next(i for i, r in enumerate(run.records) if r.key == "latency--cand-512")
    run.records[at] = replace(run.records[at], status="error", error={"type": "E", "message": "m"})
    assert run.row("itl_slope_ratio").n == 6
    assert run.row("itl_slope_ratio", f"{CAND}512").value is None
    row = Contexts(own=(20.0, -0.1)).row("itl_slope_ratio")
    assert (row.value, row.note) == (None, "a line does not rise with the context")
    run = Contexts()
    run.records = [replace(r, samples={}) if r.key == "latency--cand-4096" else r for r in run.records]
    assert "cannot be read" in run.row("itl_slope_ratio").note


@pytest.mark.parametrize("settings", [{}, {"backend": "torch"}])
def test_a_gain_that_the_bytes_explain_is_not_confounded(settings):
    assert judged(Contexts(own=(6.0, 0.8 * FP8_KV / NATIVE_KV), **settings)) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backend": "torch", "splits": []}, "backend torch against gpu, splits none against 4"),
        ({}, "no recorded setting differs besides the format"),
    ],
)
def test_a_gain_beyond_the_bytes_is_confounded_and_names_the_settings_that_differ(settings, words):
    run = Contexts(own=(6.84, 0.309), **settings)
    (found,) = judged(run)
    assert (found.status, found.reason, found.metric) == (INCONCLUSIVE, "confounded", "itl_slope_to_bytes")
    assert found.cells == tuple(f"{CAND}{x}" for x in (1024, 4096, 16384))
    assert found.value == pytest.approx(0.309 / 0.8 / (FP8_KV / NATIVE_KV))
    assert words in found.sentence
    assert bare(run).exit_code == 4
    shown = notices(JudgedRun(run.run, run.rows(), bare(run)))
    assert [notice.title for notice in shown] == ["No gate was applied"]


def test_an_interval_that_reaches_what_the_bytes_allow_and_unknown_bytes_are_not_confounded():
    run = Contexts(own=(6.84, 0.38), scatter=2.0)
    row = run.row("itl_slope_to_bytes")
    assert (row.value < 0.95, row.high > 1, judged(run)) == (True, True, [])
    run = Contexts(own=(6.84, 0.309))
    run.records = [
        replace(r, facts={**r.facts, "arms": {}}) if r.runner == "latency" else r for r in run.records
    ]
    assert "the record does not say what a step reads" in run.row("itl_slope_to_bytes").note
    assert judged(run) == []

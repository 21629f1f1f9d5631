"""Latency from hand-written records: times, rates, and ratios over interleaved pairs."""

import math

import pytest
from scipy import stats as scipy_stats

from tests.factories.runs.made import BASE, MadeRun


def arm(name, order, ttft, gaps, tokens=None, batch=1):
    new = len(gaps) + 1 if tokens is None else tokens
    sizes = {"prefill_tokens": 128 * batch, "batch": batch, "new_tokens": new}
    return {"arm": name, "order": order, "ttft_ms": ttft, "itl_ms": gaps, **sizes}


def latency(*arms, warmup=None):
    cold = [{"arm": "candidate", "ttft_ms": 2000.0, "itl_ms": [1.0]}] if warmup is None else warmup
    return {"arms": list(arms), "warmup": cold}, {"clock": "perf_counter", "synchronised": True}


ABBA = [
    arm("candidate", 0, 10.0, [4.0, 6.0], batch=8),
    arm("baseline", 1, 20.0, [10.0, 10.0], batch=8),
    arm("baseline", 2, 20.0, [20.0, 20.0], batch=8),
    arm("candidate", 3, 12.0, [10.0, 10.0], batch=8),
]
AA = latency(arm("candidate", 0, 20.0, [10.0, 10.0]), arm("candidate", 1, 22.0, [10.0, 14.0]))


def run_of(*arms, **more):
    return MadeRun().measure("latency", latency(*arms, **more), AA)


def test_latency_columns():
    run = run_of(*ABBA)
    expected = {
        "ttft_ms": 11.0, "itl_ms": 7.5, "itl_p50_ms": 8.0, "itl_p90_ms": 10.0,
        "itl_p99_ms": 10.0, "itl_max_ms": 10.0,
        "ttft_cold_ms": 2000.0, "decode_tok_s": 8 / 7.5e-3, "prefill_tok_s": 8 * 128 / 11e-3,
    }  # fmt: skip
    assert {name: run.row(name).value for name in expected} == pytest.approx(expected)
    assert (run.row("itl_ms").n, run.row("ttft_ms", BASE).value) == (4, 21.0)
    assert not [row for row in run.rows() if row.cell == BASE and row.metric.endswith("_ratio")]


def test_ratios_pair_repeats_with_the_interleaved_baseline():
    run = run_of(*(ABBA[i] for i in (3, 1, 0, 2)))  # the order field counts, not the list's
    row, ttft = run.row("itl_ratio"), run.row("ttft_ratio")
    assert row.value == pytest.approx(0.5)  # 5 / 10 and 10 / 20
    assert ((row.low, row.high), row.n, row.baseline) == (pytest.approx((0.5, 0.5)), 2, BASE)
    assert ttft.value == pytest.approx(math.sqrt(0.5 * 0.6))
    half = float(scipy_stats.t.ppf(0.975, 1)) * math.log(0.6 / 0.5) / 2
    assert (ttft.low, ttft.high) == pytest.approx((ttft.value * math.exp(-half), ttft.value * math.exp(half)))
    single = run_of(*ABBA[:2]).row("itl_ratio")
    assert (single.value, single.low, single.high, single.n) == (pytest.approx(0.5), None, None, 1)
    assert run_of(ABBA[0]).row("itl_ratio").value is None


def test_a20_t3_one_output_token_keeps_its_row():
    run = run_of(arm("candidate", 0, 10.0, []), arm("baseline", 1, 20.0, []))
    assert (run.row("ttft_ms").value, run.row("ttft_ratio").value) == (10.0, 0.5)
    for name in ("itl_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms", "decode_tok_s", "itl_ratio"):
        assert (run.row(name).value, run.row(name).note) == (None, "one output token has no gap")


def test_a20_ttft_among_the_gaps_is_refused():
    row = run_of(arm("candidate", 0, 10.0, [10.0, 4.0, 6.0], tokens=3)).row("itl_ms")
    assert (row.value, row.note) == (None, "3 output tokens have 2 gaps, but 3 were recorded")


def test_no_warm_up_is_none():
    row = run_of(*ABBA, warmup=[]).row("ttft_cold_ms")
    assert row.value is None
    assert "warm-up" in row.note

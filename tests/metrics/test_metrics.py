"""Metrics derived from hand-written records: exact values, pairing, and what is not there."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from kvbench.formats.kv import KV_FORMATS, KVShape, kv_bytes
from kvbench.matrix.runners import RUNNERS
from kvbench.metrics.collect import DERIVE, METRICS, derive, implausible
from kvbench.metrics.declare.units import NAT
from kvbench.records.run import Run
from tests.factories.made_run import BASE, CAND, MadeRun, chunks, layers, storage_facts, text_facts

NAMES = """kv_bytes_total kv_bytes_payload kv_bytes_scales kv_bytes_per_token kv_bytes_difference kv_ratio kv_ratio_16bit
weight_bytes page_table_bytes held_bytes workspace_bytes device_peak_bytes
transfer_bytes transfer_bytes_difference transfer_ratio_16bit swap_out_gb_s swap_in_gb_s parity_max_abs parity_cosine_min parity_bound_share
steps_argmax_agreement steps_max_abs ttft_ms itl_ms itl_p50_ms itl_p90_ms itl_p99_ms itl_max_ms decode_tok_s prefill_tok_s
ttft_cold_ms ttft_ratio itl_ratio top1_teacher_forced first_divergence divergence_margin aa_disagreement native_distinct_4grams
ppl ppl_delta_pct ppl_at_0_63 ppl_at_64_127 ppl_at_128_255 ppl_at_256_511
ppl_delta_pct_at_0_63 ppl_delta_pct_at_64_127 ppl_delta_pct_at_128_255 ppl_delta_pct_at_256_511
gen_distinct_4grams gen_loop_tokens gen_loop_onset gen_eos gen_degenerated gen_onset gen_useful_tokens gen_first_divergence
gen_native_degenerated gen_native_onset gen_collapsed
kld_mean kld_p50 kld_p90 kld_p99 kld_p999 kld_max top1_agreement delta_p_mean mcq_accuracy mcq_accuracy_norm
mcq_accuracy_norm_char mcq_macro mcq_delta_pt mcq_mde_pt mcq_agreement mcq_mcnemar_p mcq_scored truncated_share
weight_payload_bytes weight_scale_bytes weight_native_bytes weight_bytes_difference weight_ratio weight_ratio_16bit model_load_s
gemm_error_max gemm_bound_share gemm_boundary_diff gemm_boundary_argmax gemm_paths gemm_native_time_ratio
gemm_reference_time_ratio request_ms request_difference_ms decode_read_gb_s decode_bandwidth_share
itl_slope_us_per_token itl_intercept_ms itl_break_even_tokens itl_slope_ratio itl_slope_to_bytes
latency_drift_pct latency_outliers itl_outlier_share throttled_requests
health_amax health_error_max health_bound_share health_clip_share health_flush_share health_codes_min health_scale_spread
real_divergence length_ratio aa_margin_noise ppl_aa_pct mcq_recovery mcq_right_to_wrong mcq_wrong_to_right mcq_wrong_to_wrong
sens_kld_all sens_kld_k sens_kld_v sens_kld_first sens_kld_others sens_kld_suggested sens_layer_alone sens_layer_gain
prefix_disagreement mcq_real_flips mcq_aa_disagreement mcq_aa_score_noise mcq_prefix_disagreement""".split()  # noqa: SIM905


def test_the_names_are_fixed() -> None:
    assert sorted(METRICS) == sorted(NAMES)


@pytest.mark.parametrize("metric", METRICS.values(), ids=list(METRICS))
def test_a_metric_is_whole(metric: Any) -> None:
    assert metric.runner in RUNNERS
    assert metric.better in ("lower", "higher", "")
    assert metric.definition
    low, high = metric.range
    assert low <= high
    assert implausible(metric, math.nan)
    assert implausible(metric, math.inf)


def test_every_runner_has_a_derivation() -> None:
    assert set(DERIVE) == set(RUNNERS) == {m.runner for m in METRICS.values()}


# storage


def tinyllama(kv_format: str, tokens: int, native: str = "bfloat16") -> tuple[dict[str, Any], dict[str, Any]]:
    """Storage record of 22 layers, 4 KV heads of 64."""
    shape = KVShape(4, 64, 64)
    one = kv_bytes(KV_FORMATS[kv_format], shape, tokens, native)
    native16 = 22 * kv_bytes(KV_FORMATS["native"], shape, tokens, "float16").total
    return layers(22, one.payload, one.scales), storage_facts(tokens, native16)


def test_a24_t1_bytes_are_exact() -> None:
    run = MadeRun().measure("storage", tinyllama("int8_sym", 4096), tinyllama("native", 4096))
    assert run.row("kv_bytes_total", BASE).value == 92_274_688
    assert run.row("kv_bytes_payload").value == 46_137_344
    assert run.row("kv_bytes_scales").value == 1_441_792
    assert run.row("kv_bytes_total").value == 46_137_344 + 1_441_792
    assert run.row("kv_bytes_difference").value == 0
    short = MadeRun().measure("storage", tinyllama("int8_sym", 160), tinyllama("native", 160))
    assert short.row("kv_bytes_total", BASE).value == 3_604_480


def test_a24_t3_ratio_counts_the_scales() -> None:
    run = MadeRun().measure("storage", tinyllama("int8_sym", 4096), tinyllama("native", 4096))
    assert run.row("kv_ratio").value == 0.515625
    assert run.row("kv_ratio_16bit").value == 0.515625
    assert run.row("kv_ratio_16bit", BASE).value == 1.0
    assert run.row("kv_ratio").baseline == BASE
    fp32 = MadeRun().measure(
        "storage", tinyllama("int8_sym", 16, "float32"), tinyllama("native", 16, "float32")
    )
    assert fp32.row("kv_ratio").value == 0.2578125
    assert fp32.row("kv_ratio_16bit").value == 0.515625


def test_the_sources_page_of_16_tokens_8_heads_128() -> None:
    shape = KVShape(8, 128, 128)
    one = kv_bytes(KV_FORMATS["int8_sym"], shape, 16, "float16")
    native = (layers(1, 65_536, 0), storage_facts(16, 65_536))
    run = MadeRun().measure(
        "storage", (layers(1, one.payload, one.scales), storage_facts(16, 65_536)), native
    )
    assert run.row("kv_bytes_total").value == 33_280
    assert run.row("kv_ratio_16bit").value == 0.5078125


def test_fp8_bytes_a_token_of_qwen3_8b() -> None:
    one = kv_bytes(KV_FORMATS["fp8_e4m3"], KVShape(8, 128, 128), 64, "bfloat16")
    native = (layers(36, 64 * 4096, 0), storage_facts(64, 36 * 64 * 4096))
    run = MadeRun("fp8_e4m3").measure("storage", (layers(36, one.payload, one.scales), native[1]), native)
    assert run.row("kv_bytes_per_token").value == 76_032
    assert run.row("kv_bytes_per_token", BASE).value == 147_456


def test_a01_t3_differences_of_layers_do_not_cancel() -> None:
    samples, facts = tinyllama("int8_sym", 4096)
    samples["layers"][7]["payload"] += 100
    samples["layers"][9]["payload"] -= 100
    row = MadeRun().measure("storage", (samples, facts), tinyllama("native", 4096)).row("kv_bytes_difference")
    assert row.value == 200
    assert "2 of 22 layers" in row.note
    assert "layer 7: payload +100 B, scales +0 B" in row.note


def test_a24_t4_what_a_cpu_does_not_measure_is_none_not_zero() -> None:
    row = (
        MadeRun()
        .measure("storage", tinyllama("int8_sym", 16), tinyllama("native", 16))
        .row("device_peak_bytes")
    )
    assert row.value is None
    assert row.note == "not measured on this device"


def test_stores_of_another_size_are_not_compared() -> None:
    run = MadeRun().measure("storage", tinyllama("int8_sym", 4096), tinyllama("native", 4080))
    assert run.row("kv_ratio").value is None
    assert (
        run.row("kv_ratio").note
        == "not comparable with the baseline: tokens is 4096 here and 4080 on the baseline"
    )


# parity


def parity(*errors: float, bound: float = 1e-3, cosine: float = 1.0, steps: list[int] | None = None) -> Any:
    cases = [
        {"name": f"case {i}", "max_abs": e, "cosine": cosine, "bound": bound, "length": 1, "head_dim": 64}
        for i, e in enumerate(errors)
    ]
    equal = [1] * 2048 if steps is None else steps
    return {"cases": cases, "steps": {"argmax_equal": equal, "max_abs": [1e-4, 2e-4], "cosine_min": 1.0}}, {
        "steps": len(equal)
    }


def test_a05_t4_two_bad_cases_of_28_are_not_lost_in_a_mean() -> None:
    errors = [1e-5] * 28
    errors[3], errors[20] = 2e-3, 5e-3
    run = MadeRun().measure("parity", parity(*errors), parity(0.0))
    assert run.row("parity_bound_share").value == pytest.approx(5.0)
    assert run.row("parity_bound_share").note == "worst case: case 20"
    assert run.row("parity_max_abs").value == 5e-3
    assert run.row("parity_max_abs").n == 28


def test_parity_of_an_exact_store() -> None:
    run = MadeRun().measure("parity", parity(0.0, bound=0.0), parity(1e-9, bound=0.0))
    assert run.row("parity_bound_share").value == 0.0
    assert run.row("parity_bound_share", BASE).value == math.inf


def test_parity_nan_is_kept() -> None:
    run = MadeRun().measure("parity", parity(1.0, math.nan, 2.0, cosine=math.nan), parity(0.0))
    assert all(
        math.isnan(run.row(m).value) for m in ("parity_bound_share", "parity_max_abs", "parity_cosine_min")
    )
    assert run.row("parity_bound_share").note == "worst case: case 1"


def test_a_stored_element_beyond_the_formats_bound_counts() -> None:
    samples, facts = parity(1e-5, 2e-5)
    broken = {
        **facts,
        "element_error": {"share_of_bound": 1.5, "max_abs": 0.1, "case": "gqa float32 L16 plain"},
    }
    row = MadeRun().measure("parity", (samples, broken), parity(0.0)).row("parity_bound_share")
    assert (row.value, row.note) == (1.5, "worst case: element error, gqa float32 L16 plain")


def test_steps_agreement_has_a_wilson_interval() -> None:
    row = (
        MadeRun()
        .measure("parity", parity(0.0, steps=[1] * 2038 + [0] * 10), parity(0.0))
        .row("steps_argmax_agreement")
    )
    assert row.value == 2038 / 2048
    expected = scipy_stats.binomtest(2038, 2048).proportion_ci(method="wilson")
    assert (row.low, row.high) == pytest.approx((expected.low, expected.high))


# latency


def arm(
    name: str, order: int, ttft: float, gaps: list[float], tokens: int | None = None, batch: int = 1
) -> dict[str, Any]:
    new = len(gaps) + 1 if tokens is None else tokens
    return {
        "arm": name,
        "order": order,
        "ttft_ms": ttft,
        "itl_ms": gaps,
        "prefill_tokens": 128 * batch,
        "batch": batch,
        "new_tokens": new,
    }


def latency(*arms: dict[str, Any], warmup: list[dict[str, Any]] | None = None) -> Any:
    cold = [{"arm": "candidate", "ttft_ms": 2000.0, "itl_ms": [1.0]}] if warmup is None else warmup
    return {"arms": list(arms), "warmup": cold}, {"clock": "perf_counter", "synchronised": True}


ABBA = [
    arm("candidate", 0, 10.0, [4.0, 6.0], batch=8),
    arm("baseline", 1, 20.0, [10.0, 10.0], batch=8),
    arm("baseline", 2, 20.0, [20.0, 20.0], batch=8),
    arm("candidate", 3, 12.0, [10.0, 10.0], batch=8),
]
AA = latency(arm("candidate", 0, 20.0, [10.0, 10.0]), arm("candidate", 1, 22.0, [10.0, 14.0]))


def test_latency_columns() -> None:
    run = MadeRun().measure("latency", latency(*ABBA), AA)
    assert run.row("ttft_ms").value == 11.0
    assert run.row("itl_ms").value == 7.5
    assert run.row("itl_ms").n == 4
    assert run.row("itl_p50_ms").value == 8.0
    assert run.row("itl_p99_ms").value == run.row("itl_max_ms").value == 10.0
    assert run.row("ttft_cold_ms").value == 2000.0
    assert run.row("ttft_ms", BASE).value == 21.0
    assert not [row for row in run.rows() if row.cell == BASE and row.metric.endswith("_ratio")]


def test_a20_t5_batch_rate_is_batch_over_gap() -> None:
    run = MadeRun().measure("latency", latency(*ABBA), AA)
    assert run.row("decode_tok_s").value == pytest.approx(8 / 7.5e-3)
    assert run.row("prefill_tok_s").value == pytest.approx(8 * 128 / 11e-3)


def test_ratios_pair_repeats_with_the_interleaved_baseline() -> None:
    run = MadeRun().measure(
        "latency", latency(*(ABBA[i] for i in (3, 1, 0, 2))), AA
    )  # the order field counts, not the list's
    row = run.row("itl_ratio")
    assert row.value == pytest.approx(0.5)  # 5 / 10 and 10 / 20
    assert (row.low, row.high) == pytest.approx((0.5, 0.5))
    assert (row.n, row.baseline) == (2, BASE)
    ttft = run.row("ttft_ratio")
    assert ttft.value == pytest.approx(math.sqrt(0.5 * 0.6))
    half = float(scipy_stats.t.ppf(0.975, 1)) * math.log(0.6 / 0.5) / 2
    assert (ttft.low, ttft.high) == pytest.approx((ttft.value * math.exp(-half), ttft.value * math.exp(half)))


def test_one_pair_gives_a_ratio_without_an_interval() -> None:
    row = MadeRun().measure("latency", latency(*ABBA[:2]), AA).row("itl_ratio")
    assert (row.value, row.low, row.high, row.n) == (pytest.approx(0.5), None, None, 1)


def test_a20_t3_one_output_token_keeps_its_row() -> None:
    run = MadeRun().measure(
        "latency", latency(arm("candidate", 0, 10.0, []), arm("baseline", 1, 20.0, [])), AA
    )
    assert run.row("ttft_ms").value == 10.0
    assert run.row("ttft_ratio").value == 0.5
    for metric in ("itl_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms", "decode_tok_s", "itl_ratio"):
        assert run.row(metric).value is None
        assert run.row(metric).note == "one output token has no gap"


def test_a20_ttft_among_the_gaps_is_refused() -> None:
    row = (
        MadeRun()
        .measure("latency", latency(arm("candidate", 0, 10.0, [10.0, 4.0, 6.0], tokens=3)), AA)
        .row("itl_ms")
    )
    assert row.value is None
    assert row.note == "3 output tokens have 2 gaps, but 3 were recorded"


def test_no_warm_up_is_none() -> None:
    row = MadeRun().measure("latency", latency(*ABBA, warmup=[]), AA).row("ttft_cold_ms")
    assert (row.value, row.note) == (None, "no warm-up request was made")


def test_no_baseline_arm_is_not_measured() -> None:
    row = MadeRun().measure("latency", latency(ABBA[0]), AA).row("itl_ratio")
    assert (row.value, row.note) == (None, "not measured")


# agreement


def tokens(sequence: list[int], aa: list[int] | None = None, **facts: Any) -> Any:
    shared = {"steps": len(sequence), "prompt_tokens": 64, "prompt_sha": "p"}
    extra = {} if aa is None else {"aa_disagreements": aa}
    return {"tokens": sequence, "margins": [0.5 + i for i in range(len(sequence))]}, {
        **shared,
        **extra,
        **facts,
    }


def test_agreement_shares_and_first_divergence() -> None:
    native = [7] * 2048
    own = list(native)
    own[100] = own[2000] = 8
    run = MadeRun().measure("agreement", tokens(own), tokens(native, aa=[5]))
    row = run.row("top1_teacher_forced")
    assert row.value == 2046 / 2048
    assert row.low < row.value < row.high
    assert run.row("first_divergence").value == 100
    assert run.row("first_divergence").note == ""
    assert run.row("divergence_margin").value == 100.5
    assert run.row("aa_disagreement").value == run.row("aa_disagreement", BASE).value == 1 / 2048


def test_no_divergence_is_censored() -> None:
    run = MadeRun().measure("agreement", tokens([7] * 32), tokens([7] * 32, aa=[]))
    assert run.row("top1_teacher_forced").value == 1.0
    row = run.row("first_divergence")
    assert (row.value, row.note) == (32, "censored: no divergence within 32 steps")
    assert run.row("divergence_margin").value is None
    assert run.row("aa_disagreement").value == 0.0


def test_steps_of_one_text_are_clustered_by_blocks_of_64() -> None:
    """Five differing steps side by side in one of 32 blocks: the residuals of the other 31 are what 5 / 32 makes them."""
    own = [7] * 100 + [8] * 5 + [7] * 1943
    run = MadeRun().measure("agreement", tokens(own), tokens([7] * 2048, aa=[]))
    row = run.row("top1_teacher_forced")
    error = math.sqrt(32 / 31 * ((5 - 5 / 32) ** 2 + 31 * (5 / 32) ** 2)) / 2048
    p, half = 2043 / 2048, float(scipy_stats.t.ppf(0.975, 31)) * error
    worth = 1.959963985**2 * p * (1 - p) / half**2
    assert worth == pytest.approx(2048 / 5, rel=0.1)  # five steps that differ together are worth one
    centre, spread = (
        p + 1.9207294 / worth,
        1.959963985 * math.sqrt(p * (1 - p) / worth + 0.9603647 / worth**2),
    )
    assert (row.low, row.high) == pytest.approx(
        ((centre - spread) / (1 + 3.8414588 / worth), (centre + spread) / (1 + 3.8414588 / worth)), rel=1e-6
    )
    assert (row.value, row.n, row.units, row.note) == (p, 2048, 32, "32 blocks of 64 steps")


def test_steps_without_a_difference_have_the_interval_of_as_many_samples() -> None:
    run = MadeRun().measure("agreement", tokens([7] * 2048), tokens([7] * 2048, aa=[]))
    assert run.row("top1_teacher_forced").low == pytest.approx(2048 / (2048 + 3.8414588))
    assert run.row("aa_disagreement").high == pytest.approx(3.8414588 / (2048 + 3.8414588))
    few = MadeRun().measure("agreement", tokens([7] * 64), tokens([7] * 64, aa=[])).row("top1_teacher_forced")
    assert (few.value, few.low, few.note) == (1.0, None, "fewer than 2 blocks of 64 steps: no interval")


def test_the_line_end_before_the_prompt_is_a_share_of_the_baselines_own_steps() -> None:
    samples, facts = tokens([7] * 256, aa=[])
    native = (samples | {"prefix_tokens": [8] * 3 + [7] * 253}, facts)
    run = MadeRun().measure("agreement", tokens([7] * 256), native)
    for cell in (BASE, CAND):
        row = run.row("prefix_disagreement", cell)
        assert (row.value, row.n, row.baseline) == (3 / 256, 256, None)
        assert row.low < 3 / 256 < row.high
    none = (samples | {"prefix_tokens": []}, facts | {"prefix": "none: the model has 9 positions"})
    row = MadeRun().measure("agreement", tokens([7] * 256), none).row("prefix_disagreement")
    assert (row.value, row.note) == (None, "none: the model has 9 positions")
    old = MadeRun().measure("agreement", tokens([7] * 256), (samples, facts)).row("prefix_disagreement")
    assert (old.value, old.note) == (None, "the record has no such pass")


def test_a_divergence_within_the_noise_floor_says_so() -> None:
    run = MadeRun().measure("agreement", tokens([7, 8, 7]), tokens([7, 7, 7], aa=[1]))
    assert run.row("first_divergence").value == 1
    assert "near-tie" in run.row("first_divergence").note


def test_the_margin_noise_tells_a_near_tie_from_a_real_divergence() -> None:
    """Margins moved by 0.3 at most between the baseline's two runs: step 1 (margin 0.2) is a near-tie, step 3 (3.5) is none."""
    native = tokens([7] * 5, aa=[])
    native[0]["margins"] = [0.5, 0.2, 2.5, 3.5, 4.5]
    native[0]["aa_margins"] = [0.5, 0.2, 2.2, 3.4, 4.5]
    run = MadeRun(dtype="bfloat16").measure("agreement", tokens([7, 8, 7, 8, 7]), native)
    assert run.row("aa_margin_noise").value == run.row("aa_margin_noise", BASE).value == pytest.approx(0.3)
    first, real = run.row("first_divergence"), run.row("real_divergence")
    assert (first.value, real.value) == (1, 3)
    assert (
        first.note
        == "the native margin there is within the A/A noise (0.3 logit): a near-tie, no real divergence"
    )
    assert real.note == "1 of 2 differing steps are near-ties"
    ties = MadeRun(dtype="bfloat16").measure("agreement", tokens([7, 8, 7, 7, 7]), native)
    assert ties.row("real_divergence").value == 5
    assert ties.row("real_divergence").note == (
        "censored: no divergence within 5 steps; 1 of 1 differing steps are near-ties"
    )


def test_a_margin_of_the_noise_itself_is_a_near_tie_and_any_above_is_none() -> None:
    """Noise of exactly 0.25; margins 0.25 and the next number above it. Step 3 the baseline itself flips, at whatever margin."""
    native = tokens([7] * 4, aa=[3])
    native[0]["margins"] = [0.25, math.nextafter(0.25, 1), 2.0, 0.125]
    native[0]["aa_margins"] = [0.25, math.nextafter(0.25, 1), 1.75, 0.125]
    assert (
        MadeRun(dtype="bfloat16").measure("agreement", tokens([7] * 4), native).row("aa_margin_noise").value
        == 0.25
    )
    for own, real in (
        ([8, 7, 7, 7], 4),
        ([7, 8, 7, 7], 1),
        ([8, 8, 7, 7], 1),
        ([7, 7, 7, 8], 4),
        ([8, 7, 8, 8], 2),
    ):
        assert (
            MadeRun(dtype="bfloat16").measure("agreement", tokens(own), native).row("real_divergence").value
            == real
        ), own


def test_a_margin_that_flipped_went_through_zero() -> None:
    native = tokens([7] * 3, aa=[1])
    native[0]["margins"], native[0]["aa_margins"] = [1.0, 0.04, 1.0], [1.0, 0.03, 1.0]
    run = MadeRun(dtype="bfloat16").measure("agreement", tokens([7] * 3), native)
    assert run.row("aa_margin_noise").value == pytest.approx(0.07)


@pytest.mark.parametrize(
    ("dtype", "moved", "noise"),
    [("float32", 0.05, 0.05), ("float32", 0.0625, None), ("float16", 0.125, 0.125), ("float16", 0.25, None),
     ("bfloat16", 0.5, 0.5), ("bfloat16", 0.5625, None)],
)  # fmt: skip
def test_a_margin_that_no_rounding_moves_is_no_noise(dtype: str, moved: float, noise: float | None) -> None:
    """As a floor, one wild margin would make near-ties of all that the candidate changed."""
    native = tokens([7] * 4, aa=[])
    native[0]["margins"], native[0]["aa_margins"] = [0.0, 0.25, 2.0, 0.03], [0.0, 0.25, 2.0, 0.03]
    native[0]["aa_margins"][0] = moved
    run = MadeRun(dtype=dtype).measure("agreement", tokens([7, 7, 8, 7]), native)
    floor, real = run.row("aa_margin_noise"), run.row("real_divergence")
    assert floor.value == noise
    if noise is None:
        bound = {"float32": "0.05", "float16": "0.2", "bfloat16": "0.5"}[dtype]
        assert floor.note == real.note == (
            f"the native margin of step 0 moved by {moved:.3g} logit between two runs, in {dtype} rounding explains {bound}: no noise, "
            "so no divergence is called real or a near-tie"
        )  # fmt: skip
        assert real.value is None
    else:
        assert (floor.note, real.value) == ("", 2)
    assert run.row("first_divergence").value == 2


def test_a_margin_that_is_no_number_stays_none() -> None:
    native = tokens([7] * 2, aa=[])
    native[0]["aa_margins"] = [math.nan, 9.0]
    assert math.isnan(MadeRun().measure("agreement", tokens([7] * 2), native).row("aa_margin_noise").value)


def test_an_old_record_without_a_second_margin_has_no_margin_noise() -> None:
    run = MadeRun().measure("agreement", tokens([7, 8, 7]), tokens([7, 7, 7], aa=[]))
    assert run.row("aa_margin_noise").value is None
    assert run.row("real_divergence").value == 1


@pytest.mark.parametrize(
    ("own", "ratio", "note"),
    [
        ([7, 7, 7, 2, 7], 1.0, "4 tokens to 4"),
        ([7, 2, 7, 7, 7], 0.5, "2 tokens to 4"),
        ([7, 7, 7, 7, 7], 1.25, "5 tokens to 4"),
    ],
)
def test_length_up_to_the_token_that_ends_a_text(own: list[int], ratio: float, note: str) -> None:
    row = (
        MadeRun()
        .measure("agreement", tokens(own), tokens([7, 7, 7, 2, 2], aa=[], end_ids=[2]))
        .row("length_ratio")
    )
    assert (row.value, row.note) == (ratio, note)


def test_length_of_texts_that_go_on_or_have_no_end() -> None:
    run = MadeRun().measure("agreement", tokens([7] * 4), tokens([7] * 4, aa=[], end_ids=[2]))
    assert (run.row("length_ratio").value, run.row("length_ratio").note) == (
        1.0,
        "neither text ends within 4 steps",
    )
    run = MadeRun().measure("agreement", tokens([7] * 4), tokens([7] * 4, aa=[]))
    assert (run.row("length_ratio").value, run.row("length_ratio").note) == (
        None,
        "no token is known that ends a text",
    )


def test_other_prompts_are_not_compared() -> None:
    run = MadeRun().measure("agreement", tokens([7] * 9), tokens([7] * 9, prompt_sha="q", aa=[]))
    assert run.row("top1_teacher_forced").value is None
    assert "prompt_sha is 'p' here and 'q' on the baseline" in run.row("first_divergence").note


# perplexity


def text_run(
    candidate: dict[str, Any], native: dict[str, Any], facts: dict[str, Any] | None = None
) -> MadeRun:
    scored = [sum(c["tokens"] for c in side["chunks"]) for side in (candidate, native)]
    own = facts or text_facts(scored[0])
    return MadeRun().measure(
        "perplexity", (candidate, own), (native, text_facts(scored[1])), variant="wikitext2 stream512"
    )


@pytest.mark.parametrize("vocabulary", [2, 1000, 151_936])
@pytest.mark.parametrize("sizes", [(1,), (511, 80), (3, 3, 3, 3)])
def test_a17_t1_uniform_logits_give_the_vocabulary_size(vocabulary: int, sizes: tuple[int, ...]) -> None:
    samples = chunks(*((n * math.log(vocabulary), n) for n in sizes))
    assert text_run(samples, samples).row("ppl").value == pytest.approx(vocabulary, rel=1e-12)


def test_a17_t2_tokens_weigh_alike_whatever_their_chunk() -> None:
    row = text_run(chunks((1022.0, 511), (320.0, 80)), chunks((1.0, 1))).row("ppl")
    assert row.value == pytest.approx(9.6864, abs=5e-5)  # 20.0855 and 30.9936 are the means of means
    assert row.n == 591
    assert row.variant == "wikitext2 stream512"


def test_ppl_delta_is_the_paired_log_ratio() -> None:
    native = chunks((200.0, 100), (330.0, 100), (260.0, 50))
    own = chunks((202.0, 100), (331.0, 100), (260.5, 50))
    run = text_run(own, native)
    row = run.row("ppl_delta_pct")
    assert row.value == pytest.approx((math.exp(3.5 / 250) - 1) * 100)
    assert row.value == pytest.approx((run.row("ppl").value / run.row("ppl", BASE).value - 1) * 100)
    left_out = [1.5 / 150, 2.5 / 150, 3.0 / 200]  # the ratio without each document in turn
    error = math.sqrt(2 / 3 * sum((ratio - 3.5 / 250) ** 2 for ratio in left_out))
    worth = 250**2 / (100**2 + 100**2 + 50**2)
    half = float(scipy_stats.t.ppf(0.975, worth - 1)) * error
    ends = [(math.exp(3.5 / 250 + sign * half) - 1) * 100 for sign in (-1, 1)]
    assert [row.low, row.high] == pytest.approx(ends)
    assert row.note == "3 documents; a bootstrap over documents gives [+1.005, +2.02]%"


def test_ppl_delta_counts_documents_not_chunks() -> None:
    native = chunks(*[(100.0, 50)] * 8, documents=[0, 0, 0, 0, 1, 1, 1, 1])
    own = chunks(*[(100.0 + d, 50) for d in (1, 1, 1, 1, 2, 2, 2, 2)], documents=[0, 0, 0, 0, 1, 1, 1, 1])
    row = text_run(own, native).row("ppl_delta_pct")
    assert row.note == "2 documents; a bootstrap over documents gives [+2.02, +4.081]%"
    half = float(scipy_stats.t.ppf(0.975, 1)) * math.sqrt(2 * 2 * 2.0**2) / 400
    assert row.low == pytest.approx((math.exp(12 / 400 - half) - 1) * 100)


def test_ppl_delta_of_one_document_has_no_interval() -> None:
    row = text_run(chunks((101.0, 50)), chunks((100.0, 50))).row("ppl_delta_pct")
    assert (row.low, row.high, row.note) == (None, None, "1 document: no interval")


def test_ppl_delta_names_the_noise_floor() -> None:
    native = chunks((100.0, 50), (100.0, 50))
    again = chunks((100.001, 50), (100.0, 50))["chunks"]
    row = text_run({**chunks((101.0, 50), (100.0, 50)), "native_chunks": again}, native).row("ppl_delta_pct")
    assert row.note == (
        "2 documents; the baseline run again differs by +0.0010%; a bootstrap over documents gives [+0, +2.02]%"
    )


def test_bit_identical_text_has_a_delta_of_exactly_zero() -> None:
    row = text_run(chunks((101.0, 50), (7.0, 3)), chunks((101.0, 50), (7.0, 3))).row("ppl_delta_pct")
    assert (row.value, row.low, row.high) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"protocol": "rows512"}, "protocol is 'rows512' here and 'stream512' on the baseline"),
        ({"split": "validation"}, "split"),
        ({"bos": "each chunk"}, "bos"),
        ({"text": "detokenised"}, "text"),
        ({"data_sha": "other"}, "data_sha"),
    ],
)
def test_a17_t6_two_protocols_are_never_compared(change: dict[str, Any], words: str) -> None:
    samples = chunks((100.0, 50), (90.0, 50))
    row = text_run(samples, samples, text_facts(100, **change)).row("ppl_delta_pct")
    assert row.value is None
    assert row.note.startswith("not comparable with the baseline: ")
    assert words in row.note


def test_a17_t6_another_protocol_version_is_not_compared() -> None:
    run = text_run(chunks((1.0, 1), (1.0, 1)), chunks((1.0, 1), (1.0, 1))).change(BASE, protocol=0)
    assert run.row("ppl_delta_pct").note == (
        "not comparable with the baseline: protocol version is 1 here and 0 on the baseline"
    )


def test_a17_t6_equal_counts_in_other_chunks_are_not_compared() -> None:
    row = text_run(chunks((9.0, 60), (9.0, 40)), chunks((9.0, 50), (9.0, 50))).row("ppl_delta_pct")
    assert (row.value, row.note) == (
        None,
        "not comparable with the baseline: the chunks do not score the same tokens",
    )


def test_a_scored_count_that_the_chunks_contradict_is_no_perplexity() -> None:
    row = text_run(chunks((9.0, 60)), chunks((9.0, 60)), text_facts(61)).row("ppl")
    assert (row.value, row.note) == (None, "the record says 61 scored tokens, its chunks hold 60")


def test_a17_t5_nothing_scored_is_none_not_nan() -> None:
    assert text_run(chunks((0.0, 0)), chunks((0.0, 0))).row("ppl").value is None


def test_a_collapsed_model_has_an_infinite_perplexity_not_a_crash() -> None:
    run = text_run(chunks((5000.0, 5), (1.0, 5)), chunks((9.0, 5), (9.0, 5)))
    assert run.row("ppl").value == pytest.approx(math.exp(500.1))
    assert text_run(chunks((math.nan, 5)), chunks((9.0, 5))).rows()
    assert math.isnan(text_run(chunks((math.nan, 5)), chunks((9.0, 5))).row("ppl_delta_pct").value)


def test_kld_columns() -> None:
    kld = [i / 1000 for i in range(1001)]
    random.Random(0).shuffle(kld)
    extra = {"kld_tokens": kld, "top1_equal": 900, "delta_p": [0.01] * 500 + [-0.03] * 501}
    run = text_run({**chunks((2000.0, 1001)), **extra}, chunks((2000.0, 1001)))
    found = {m: run.row(f"kld_{m}").value for m in ("mean", "p50", "p90", "p99", "p999", "max")}
    assert found == {
        "mean": pytest.approx(0.5),
        "p50": 0.5,
        "p90": 0.9,
        "p99": 0.99,
        "p999": 0.999,
        "max": 1.0,
    }
    row = run.row("top1_agreement")
    assert (row.value, row.low, row.note) == (900 / 1001, None, "1 document: no interval")
    assert run.row("delta_p_mean").value == pytest.approx(100 * (0.01 * 500 - 0.03 * 501) / 1001)
    assert run.row("kld_mean").baseline == BASE


def test_kld_of_more_tokens_than_a_record_keeps_comes_from_its_sums() -> None:
    whole = {"mean": 0.2, "n": 1001, "p50": 0.1, "p90": 0.3, "p99": 0.4, "p999": 0.5, "max": 0.6}
    extra = {
        "kld": whole,
        "kld_tokens": [9.0, 9.0],
        "top1_equal": 1000,
        "delta_p": [9.0, 9.0],
        "delta_p_mean": -0.01,
    }
    run = text_run({**chunks((2000.0, 1001)), **extra}, chunks((2000.0, 1001)))
    found = {m: run.row(f"kld_{m}").value for m in ("mean", "p50", "p90", "p99", "p999", "max")}
    assert found == {key: value for key, value in whole.items() if key != "n"}
    assert run.row("kld_mean").n == run.row("top1_agreement").n == run.row("delta_p_mean").n == 1001
    assert run.row("delta_p_mean").value == -1.0
    exact = {"kld": {**whole, "n": 2}, "kld_tokens": [1.0, 3.0]}
    assert text_run({**chunks((4.0, 2)), **exact}, chunks((4.0, 2))).row("kld_mean").value == 2.0


def test_divergences_have_intervals_over_documents() -> None:
    """Two documents of 500 tokens; all are kept, so nothing else is needed. Holding the tokens twice adds no certainty."""
    draw = random.Random(1)
    kld = [draw.lognormvariate(-8 + d, 1) for d in range(2) for _ in range(500)]
    text = chunks((1000.0, 500), (1000.0, 500))
    sums = [{"top1_equal": 480, "delta_p": 1.0, "kld": sum(kld[:500]), "kept": 500},
            {"top1_equal": 450, "delta_p": -2.0, "kld": sum(kld[500:]), "kept": 500}]  # fmt: skip
    own = {"chunks": [a | b for a, b in zip(text["chunks"], sums, strict=True)]}
    extra = {"kld_tokens": kld, "top1_equal": 930, "delta_p": [-0.001] * 1000}
    run = text_run({**own, **extra}, text)
    for metric in ("kld_mean", "top1_agreement", "delta_p_mean"):
        row = run.row(metric)
        assert row.low < row.value < row.high, metric
        assert (row.units, row.note) == (2, "2 documents")
    assert run.row("delta_p_mean").value == pytest.approx(-0.1)
    low, high = scipy_stats.binomtest(930, 1000).proportion_ci(method="wilson")
    assert run.row("top1_agreement").low < low < high < run.row("top1_agreement").high


def test_the_noise_floor_of_perplexity_is_a_metric_beside_the_delta() -> None:
    native = chunks((100.0, 50), (100.0, 50))
    own = {**chunks((101.0, 50), (100.0, 50)), "native_chunks": chunks((100.001, 50), (100.0, 50))["chunks"]}
    row = text_run(own, native).row("ppl_aa_pct")
    assert row.value == pytest.approx(0.001, rel=1e-4)
    assert row.low < 0 < row.high


def test_kld_not_asked_for_is_not_measured() -> None:
    row = text_run(chunks((9.0, 5)), chunks((9.0, 5))).row("kld_mean")
    assert (row.value, row.note) == (None, "not measured")


# multiple choice


def question(key: int, answer: int, *scores: float, **more: Any) -> dict[str, Any]:
    base = {"id": key, "subject": "s", "answer": answer, "scores": list(scores), "tokens": [1] * len(scores)}
    pick = max(range(len(scores)), key=scores.__getitem__) if scores else None
    return {**base, "chars": [1] * len(scores), "pick": pick, "truncated": False, "skipped": None, **more}


def asked(*questions: dict[str, Any], **facts: Any) -> Any:
    shared = {"task": "mmlu", "shots": 5, "choice_ids": {"A": [1]}, "total": len(questions), "data_sha": "d"}
    return {"questions": list(questions)}, {**shared, "prompt_policy": "p", "bos": "none", **facts}


def mcq_run(own: Any, native: Any, dtype: str = "float32") -> MadeRun:
    return MadeRun(dtype=dtype).measure("mcq", own, native, variant="mmlu 5-shot", shots=5)


def test_a18_t3_summed_per_token_and_per_character() -> None:
    """A: -1.0 over 2 tokens, B: -2.0 over 8: summed picks A, per token B."""
    q = question(0, 0, -1.0, -2.0, tokens=[2, 8], chars=[1, 1])
    run = mcq_run(asked(q), asked(q))
    assert run.row("mcq_accuracy").value == 1.0
    assert run.row("mcq_accuracy_norm").value == 0.0
    assert run.row("mcq_accuracy_norm_char").value == 1.0
    assert run.row("mcq_accuracy_norm").note == "per token"
    assert run.row("mcq_accuracy_norm_char").note == "per character"
    assert run.row("mcq_accuracy").variant == "mmlu 5-shot"


def test_a18_t5_skipped_questions_are_counted_and_the_denominator_says_so() -> None:
    skipped = question(2, 0, skipped="empty choice")
    qs = [question(0, 0, -1.0, -2.0), question(1, 0, -3.0, -2.0, truncated=True), skipped]
    run = mcq_run(asked(*qs), asked(*qs))
    row = run.row("mcq_accuracy")
    assert (row.value, row.n) == (0.5, 2)
    assert row.note == "2 of 3 scored, 1 skipped, 0 tied"
    assert (run.row("mcq_scored").value, run.row("mcq_scored").n) == (2, 3)
    assert run.row("truncated_share").value == 1 / 3


def test_macro_average_and_ties() -> None:
    qs = [question(i, 0, -1.0, -2.0, subject="big") for i in range(3)]
    qs += [question(3, 1, -1.0, -2.0, subject="small"), question(4, 1, -1.0, -1.0, subject="tied")]
    run = mcq_run(asked(*qs), asked(*qs))
    assert run.row("mcq_accuracy").value == 3 / 5
    assert run.row("mcq_macro").value == pytest.approx(1 / 3)
    assert "1 tied" in run.row("mcq_accuracy").note


def test_a_choice_without_a_number_makes_the_shares_nan() -> None:
    qs = [question(0, 0, -1.0, -2.0), question(1, 0, math.nan, -2.0)]
    run = mcq_run(asked(*qs), asked(question(0, 0, -1.0, -2.0), question(1, 0, -1.0, -2.0)))
    for metric in (
        "mcq_accuracy",
        "mcq_accuracy_norm",
        "mcq_macro",
        "mcq_delta_pt",
        "mcq_mde_pt",
        "mcq_agreement",
        "mcq_mcnemar_p",
    ):
        assert math.isnan(run.row(metric).value), metric


def test_paired_difference_and_mcnemar() -> None:
    """Of 20 paired questions, 1 gained and 4 lost; question 20 was skipped on one side and does not count."""
    right, wrong = (-1.0, -2.0), (-2.0, -1.0)
    outcomes = [(right, wrong)] + [(wrong, right)] * 4 + [(right, right)] * 10 + [(wrong, wrong)] * 5
    own = [question(i, 0, *a) for i, (a, _) in enumerate(outcomes)] + [question(20, 0, *right)]
    native = [question(i, 0, *b) for i, (_, b) in enumerate(outcomes)] + [
        question(20, 0, skipped="empty choice")
    ]
    run = mcq_run(asked(*own), asked(*native))
    row = run.row("mcq_delta_pt")
    assert (row.value, row.n, row.baseline) == (-15.0, 20, BASE)
    half = 1.959964 * math.sqrt((7 / 22 - (3 / 22) ** 2) / 22)
    assert (row.low, row.high) == pytest.approx((100 * (-3 / 22 - half), 100 * (-3 / 22 + half)), rel=1e-6)
    assert row.note == (
        "1 gained, 4 lost of 20 paired; not worse by more than 37 pt, equivalent within 37 pt (one-sided tests at 2.5%)"
    )
    mde = run.row("mcq_mde_pt")
    # The half width of that interval times (1.959964 + 0.841621) / 1.959964.
    assert (mde.value, mde.n, mde.baseline) == (
        pytest.approx(100 * half * (1 + 0.8416212336 / 1.9599639845), rel=1e-6),
        20,
        BASE,
    )
    assert mde.note == "5 of 20 pairs discordant; at 80% power"
    assert run.row("mcq_mcnemar_p").value == pytest.approx(2 * 6 / 32)
    assert run.row("mcq_agreement").value == 15 / 20
    assert run.row("mcq_right_to_wrong").value == 4 / 20
    assert run.row("mcq_wrong_to_right").value == 1 / 20
    assert run.row("mcq_wrong_to_wrong").value == 0
    recovery = run.row("mcq_recovery")
    # The baseline answers 14 of 20, the candidate 11.
    assert (recovery.value, recovery.note) == (pytest.approx(11 / 14), "of 0.7")
    assert (recovery.low, recovery.high) == pytest.approx((1 + row.low / 70, 1 + row.high / 70))


def test_a_choice_that_changes_between_two_wrong_ones_is_a_flip_of_its_own() -> None:
    native = [question(i, 0, -3.0, -1.0, -2.0) for i in range(4)]
    own = [question(i, 0, -3.0, -1.0, -2.0) for i in range(3)] + [question(3, 0, -3.0, -2.0, -1.0)]
    run = mcq_run(asked(*own), asked(*native))
    flips = [run.row(f"mcq_{m}").value for m in ("right_to_wrong", "wrong_to_right", "wrong_to_wrong")]
    assert flips == [0, 0, 0.25]
    assert run.row("mcq_delta_pt").value == 0
    assert (run.row("mcq_recovery").value, run.row("mcq_recovery").note) == (
        None,
        "the baseline answers no question",
    )


def twice(
    key: int, answer: int, scores: list[float], aa: list[float], prefix: list[float] | None = None
) -> dict[str, Any]:
    """A question of the baseline that was scored again."""
    return question(
        key, answer, *scores, aa_scores=aa, **({} if prefix is None else {"prefix_scores": prefix})
    )


def test_the_noise_floor_of_multiple_choice() -> None:
    """Nine questions, eight of them scored again, six of these not behind the line end; one pick of eight flips, one of two."""
    native = [
        twice(0, 0, [-1.0, -2.0], [-1.0, -2.25], [-1.0, -2.0]),
        twice(1, 0, [-1.0, -1.125], [-1.125, -1.0], [-2.0, -1.0]),
        twice(2, 0, [-1.0, -3.0], [-1.0, -3.0]),
        *(twice(i, 0, [-1.0, -3.0], [-1.0, -3.0]) for i in range(3, 8)),
        question(8, 0, -1.0, -3.0),
    ]
    run = mcq_run(asked(*(question(i, 0, -1.0, -2.0) for i in range(9))), asked(*native), "bfloat16")
    for cell in (BASE, CAND):
        aa, prefix, noise = (
            run.row(f"mcq_{m}", cell) for m in ("aa_disagreement", "prefix_disagreement", "aa_score_noise")
        )
        assert (aa.value, aa.n, prefix.value, prefix.n) == (1 / 8, 8, 1 / 2, 2)
        low, high = scipy_stats.binomtest(1, 8).proportion_ci(method="wilson")
        assert (aa.low, aa.high) == pytest.approx((low, high))
        assert (noise.value, noise.n, noise.unit) == (0.25, 8, NAT)


def test_a_changed_pick_is_real_only_beyond_twice_the_noise() -> None:
    """Scores moved by 0.25 at most, so two choices that are 0.5 apart may change places; the next number above may not."""
    native = [
        twice(0, 0, [-1.0, -5.0, -2.0], [-1.0, -5.25, -2.0]),
        question(1, 0, -1.0, -1.5, -9.0),
        question(2, 0, -1.0, math.nextafter(-1.5, -2), -9.0),
        question(3, 0, -1.0, -1.25, -9.0),
        *(twice(i, 0, [-1.0, -5.0, -9.0], [-1.0, -5.0, -9.0]) for i in range(4, 11)),
    ]

    def flipped(*flips: int) -> Any:
        own = [question(i, 0, -1.0, -0.5 if i in flips else -2.0, -9.0) for i in range(11)]
        return mcq_run(asked(*own), asked(*native), "bfloat16").row("mcq_real_flips")

    assert [flipped(i).value for i in range(4)] == [1 / 11, 0, 1 / 11, 0]
    assert (flipped(1, 2, 3).value, flipped(1, 2, 3).note) == (1 / 11, "2 of 3 changed picks are near-ties")
    assert (flipped().value, flipped().note, flipped().n) == (0, "", 11)


@pytest.mark.parametrize(
    ("dtype", "tokens", "moved", "noise"),
    [("float32", 1, 0.03125, 0.03125), ("float32", 1, 0.0625, None), ("float32", 2, 0.0625, 0.0625), ("float16", 1, 0.25, None),
     ("bfloat16", 1, 0.5, 0.5), ("bfloat16", 8, 4.0, 4.0), ("bfloat16", 8, 4.125, None)],
)  # fmt: skip
def test_a_score_that_no_rounding_moves_is_no_noise(
    dtype: str, tokens: int, moved: float, noise: float | None
) -> None:
    """As a floor, one wild score would make near-ties of all flips; longer choices may move by as much more."""
    native = [twice(i, 0, [-1.0, -9.0], [-1.0, -9.0]) for i in range(8)]
    native[5] |= {"aa_scores": [-1.0, -9.0 - moved], "tokens": [1, tokens]}
    own = [question(i, 0, -1.0, 0.0 if i == 3 else -9.0) for i in range(8)]
    run = mcq_run(asked(*own), asked(*native), dtype)
    floor, real = run.row("mcq_aa_score_noise"), run.row("mcq_real_flips")
    assert (floor.value, floor.n) == (noise, 8)
    if noise is None:
        assert real.value is None
        assert floor.note == real.note
        assert floor.note.startswith(
            f"a choice of question 5 moved by {moved:.3g} nat between the baseline's two runs"
        )
    else:
        assert (floor.note, real.value) == ("", 0.0 if 2 * noise >= 8 else 1 / 8)
    assert run.row("mcq_agreement").value == 7 / 8


@pytest.mark.parametrize(("again", "noise"), [(1, None), (7, None), (8, 0.0)])
def test_a_noise_floor_takes_eight_questions(again: int, noise: float | None) -> None:
    native = [
        twice(i, 0, [-1.0, -2.0], [-1.0, -2.0]) if i < again else question(i, 0, -1.0, -2.0) for i in range(9)
    ]
    run = mcq_run(asked(*(question(i, 0, -1.0, -2.0) for i in range(9))), asked(*native))
    assert (run.row("mcq_aa_score_noise").value, run.row("mcq_real_flips").value) == (noise, noise)
    many = f"{again} question{'s were' if again > 1 else ' was'}"
    due = "" if noise is not None else f"{many} scored a second time, a noise floor takes 8 (option aa_limit)"
    assert run.row("mcq_aa_score_noise").note == due


def test_without_a_second_run_no_flip_is_called_real_or_noise() -> None:
    q = question(0, 0, -1.0, -2.0)
    run = mcq_run(asked(q), asked(q))
    for metric in ("mcq_real_flips", "mcq_aa_disagreement", "mcq_aa_score_noise", "mcq_prefix_disagreement"):
        assert (run.row(metric).value, run.row(metric).note) == (
            None, "the baseline was not scored a second time (option aa_limit)",
        )  # fmt: skip
    again = twice(0, 0, [-1.0, -2.0], [math.nan, -2.0])
    broken = mcq_run(asked(q), asked(again))
    assert math.isnan(broken.row("mcq_aa_disagreement").value)
    assert math.isnan(broken.row("mcq_aa_score_noise").value)
    unfit = mcq_run(asked(q), asked(twice(0, 0, [-1.0, -2.0], [-1.0, -2.0]), prefix="none: no line end"))
    assert unfit.row("mcq_prefix_disagreement").note == "none: no line end"


def test_other_questions_are_not_compared() -> None:
    q = question(0, 0, -1.0, -2.0)
    assert "shots is 5 here and 0" in mcq_run(asked(q), asked(q, shots=0)).row("mcq_delta_pt").note
    assert "another answer" in mcq_run(asked(q), asked({**q, "answer": 1})).row("mcq_delta_pt").note
    run = mcq_run(asked(q), asked({**q, "id": 9}))
    assert (run.row("mcq_delta_pt").value, run.row("mcq_delta_pt").note) == (
        None,
        "no question was scored on both sides",
    )


# derive


def test_a_task_is_spread_over_its_cells() -> None:
    run = text_run(chunks((9.0, 5)), chunks((8.0, 5)))
    run.add_cell(1, "cand2", "batch=4")
    run.share(1, "cand2")
    first, second = run.row("ppl"), run.row("ppl", "cand2")
    assert (first.value, first.n) == (second.value, second.n)
    assert run.row("ppl_delta_pct", "cand2").baseline == BASE


def test_baseline_cells_have_no_rows_of_differences() -> None:
    run = text_run(chunks((9.0, 5)), chunks((8.0, 5)))
    own = {row.metric for row in run.rows() if row.cell == BASE}
    assert own == {"ppl", "ppl_at_0_63", "ppl_at_64_127", "ppl_at_128_255", "ppl_at_256_511"}


@pytest.mark.parametrize(
    ("status", "error", "note"),
    [
        ("error", {"type": "OutOfMemoryError", "message": "no room", "tail": []}, "error: no room"),
        (
            "refused",
            {"reason": "mla_not_validated", "message": "MLA is not validated."},
            "refused: MLA is not validated.",
        ),
        (
            "not_evaluated",
            {"reason": "not_available", "message": "run make data"},
            "not evaluated: run make data",
        ),
    ],
)
def test_a23_a_task_without_a_result_shows_as_rows_without_a_value(
    status: str, error: dict[str, Any], note: str
) -> None:
    run = text_run(chunks((9.0, 5)), chunks((8.0, 5))).change(
        CAND, status=status, error=error, samples={}, facts={}
    )
    rows = [row for row in run.rows() if row.cell == CAND]
    assert [row.metric for row in rows] == [m.name for m in METRICS.values() if m.runner == "perplexity"]
    assert {(row.value, row.note, row.variant) for row in rows} == {(None, note, "wikitext2 stream512")}


def test_a23_a_missing_baseline_is_named() -> None:
    run = text_run(chunks((9.0, 5)), chunks((8.0, 5))).change(
        BASE, status="error", error={"message": "no room"}
    )
    assert run.row("ppl").value is not None
    row = run.row("ppl_delta_pct")
    assert (row.value, row.note) == (None, "the baseline has no result (error: no room)")


def test_a_task_that_did_not_run_has_rows_that_say_so() -> None:
    run = text_run(chunks((9.0, 5)), chunks((8.0, 5)))
    run.records.pop()
    assert (run.row("ppl").value, run.row("ppl").note) == (None, "not run")


def test_a_record_that_lacks_a_sample_names_it() -> None:
    run = text_run(chunks((9.0, 5)), chunks((8.0, 5))).change(CAND, samples={})
    assert run.row("ppl").note == "the record lacks 'chunks'; run the matrix again to measure it anew"


def test_partial_comes_from_the_record_and_for_differences_from_the_baseline_too() -> None:
    run = text_run(chunks((9.0, 5)), chunks((8.0, 5))).change(BASE, partial="6 chunks")
    assert run.row("ppl").partial is None
    assert run.row("ppl_delta_pct").partial == "6 chunks"
    assert run.change(CAND, partial="3 chunks").row("ppl").partial == "3 chunks"


def test_derive_is_pure() -> None:
    run = text_run(chunks((9.0, 5)), chunks((8.0, 5))).measure("latency", latency(*ABBA), AA)
    before = json.dumps([run.manifest.to_dict(), [r.samples for r in run.records]])
    assert derive(run.run) == derive(Run(run.manifest, tuple(reversed(run.records))))
    assert json.dumps([run.manifest.to_dict(), [r.samples for r in run.records]]) == before


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.integers(1, 600)), min_size=1, max_size=20), st.integers(1, 4)
)
def test_perplexity_does_not_depend_on_how_tokens_are_chunked(
    data: list[tuple[float, int]], times: int
) -> None:
    """Chunks of one mean NLL each, cut into `times` equal pieces."""
    whole = chunks(*((mean * n * times, n * times) for mean, n in data))
    cut = chunks(*((mean * n, n) for mean, n in data for _ in range(times)))
    one, two = text_run(whole, whole).row("ppl"), text_run(cut, cut).row("ppl")
    assert one.n == two.n
    assert one.value == pytest.approx(two.value, rel=1e-9)


def test_a_looping_native_text_is_measured_and_said() -> None:
    from kvbench.metrics.agreement import distinct_ngrams

    assert distinct_ngrams([1, 2, 3, 4, 5], 4) == 1.0
    assert distinct_ngrams([7] * 100, 4) == 1 / 97
    assert distinct_ngrams([1, 2, 3], 4) is None

"""Bytes and parity from hand-written records: exact values, worst cases, what is not comparable."""

import math

import pytest
from scipy import stats as scipy_stats

from kvbench.formats.kv import KV_FORMATS, KVShape, kv_bytes
from tests.factories.runs.made import BASE, MadeRun, layers, storage_facts


def store(kv_format, tokens, native="bfloat16", n=22, heads=4, dim=64):
    """Storage record of n layers (TinyLlama: 22 with 4 KV heads of 64)."""
    shape = KVShape(heads, dim, dim)
    one = kv_bytes(KV_FORMATS[kv_format], shape, tokens, native)
    native16 = n * kv_bytes(KV_FORMATS["native"], shape, tokens, "float16").total
    return layers(n, one.payload, one.scales), storage_facts(tokens, native16)


def stored(kv_format, tokens, **shape):
    sides = store(kv_format, tokens, **shape), store("native", tokens, **shape)
    return MadeRun(kv_format).measure("storage", *sides)


def test_a24_t1_bytes_are_exact():
    run = stored("int8_sym", 4096)
    names = ("kv_bytes_payload", "kv_bytes_scales", "kv_bytes_total", "kv_bytes_difference")
    assert [run.row(name).value for name in names] == [46_137_344, 1_441_792, 47_579_136, 0]
    assert run.row("kv_bytes_total", BASE).value == 92_274_688
    assert stored("int8_sym", 160).row("kv_bytes_total", BASE).value == 3_604_480
    page = stored("int8_sym", 16, n=1, heads=8, dim=128)  # 16 tokens, 8 heads of 128: a page of the sources
    assert (page.row("kv_bytes_total").value, page.row("kv_ratio_16bit").value) == (33_280, 0.5078125)
    qwen = stored("fp8_e4m3", 64, n=36, heads=8, dim=128)  # Qwen3-8B
    assert [qwen.row("kv_bytes_per_token", *cell).value for cell in ((), (BASE,))] == [76_032, 147_456]


def test_a24_t3_ratios_count_the_scales():
    run = stored("int8_sym", 4096)
    assert run.row("kv_ratio").value == run.row("kv_ratio_16bit").value == 0.515625
    assert (run.row("kv_ratio_16bit", BASE).value, run.row("kv_ratio").baseline) == (1.0, BASE)
    fp32 = stored("int8_sym", 16, native="float32")
    assert (fp32.row("kv_ratio").value, fp32.row("kv_ratio_16bit").value) == (0.2578125, 0.515625)


def test_a01_t3_differences_of_layers_do_not_cancel():
    run = stored("int8_sym", 4096)
    record = run.records[1].samples["layers"]
    record[7]["payload"] += 100
    record[9]["payload"] -= 100
    row = run.row("kv_bytes_difference")
    assert row.value == 200
    assert "2 of 22 layers" in row.note
    assert row.note.endswith("layer 7: payload +100 B, scales +0 B")


def test_a24_t4_what_a_cpu_does_not_measure_is_none_not_zero():
    row = stored("int8_sym", 16).row("device_peak_bytes")
    assert row.value is None
    assert row.note


def test_stores_of_another_size_are_not_compared():
    run = MadeRun().measure("storage", store("int8_sym", 4096), store("native", 4080))
    assert run.row("kv_ratio").value is None
    assert "tokens is 4096 here and 4080" in run.row("kv_ratio").note


def parity(*errors, bound=1e-3, cosine=1.0, steps=None):
    shared = {"cosine": cosine, "bound": bound}
    cases = [{"name": f"case {i}", "max_abs": e, **shared} for i, e in enumerate(errors)]
    equal = [1] * 2048 if steps is None else steps
    samples = {"cases": cases, "steps": {"argmax_equal": equal, "max_abs": [1e-4, 2e-4], "cosine_min": 1.0}}
    return samples, {"steps": len(equal)}


def test_a05_t4_two_bad_cases_of_28_are_not_lost_in_a_mean():
    errors = [1e-5] * 28
    errors[3], errors[20] = 2e-3, 5e-3
    run = MadeRun().measure("parity", parity(*errors), parity(0.0))
    row = run.row("parity_bound_share")
    assert (row.value, row.note) == (pytest.approx(5.0), "worst case: case 20")
    assert (run.row("parity_max_abs").value, run.row("parity_max_abs").n) == (5e-3, 28)


def test_parity_of_an_exact_store():
    run = MadeRun().measure("parity", parity(0.0, bound=0.0), parity(1e-9, bound=0.0))
    assert [run.row("parity_bound_share", *cell).value for cell in ((), (BASE,))] == [0.0, math.inf]


def test_parity_nan_is_kept():
    run = MadeRun().measure("parity", parity(1.0, math.nan, 2.0, cosine=math.nan), parity(0.0))
    for name in ("parity_bound_share", "parity_max_abs", "parity_cosine_min"):
        assert math.isnan(run.row(name).value)
    assert run.row("parity_bound_share").note.endswith("case 1")


def test_a_stored_element_beyond_the_formats_bound_counts():
    samples, facts = parity(1e-5, 2e-5)
    element = {"share_of_bound": 1.5, "max_abs": 0.1, "case": "gqa float32 L16 plain"}
    run = MadeRun().measure("parity", (samples, facts | {"element_error": element}), parity(0.0))
    row = run.row("parity_bound_share")
    assert (row.value, "gqa float32 L16 plain" in row.note) == (1.5, True)


def test_steps_agreement_has_a_wilson_interval():
    sides = parity(0.0, steps=[1] * 2038 + [0] * 10), parity(0.0)
    row = MadeRun().measure("parity", *sides).row("steps_argmax_agreement")
    assert row.value == 2038 / 2048
    expected = scipy_stats.binomtest(2038, 2048).proportion_ci(method="wilson")
    assert (row.low, row.high) == pytest.approx((expected.low, expected.high))

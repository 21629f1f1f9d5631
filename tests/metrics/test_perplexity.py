"""Perplexity and divergence from hand-written records: exact values, pairing by chunk, intervals by
document."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from tests.factories.runs.made import BASE, MadeRun, chunks, text_facts


def text_run(own, native=None, facts=None):
    native = native or own
    scored = [sum(c["tokens"] for c in side["chunks"]) for side in (own, native)]
    sides = (own, facts or text_facts(scored[0])), (native, text_facts(scored[1]))
    return MadeRun().measure("perplexity", *sides, variant="wikitext2 stream512")


@pytest.mark.parametrize("vocabulary", [2, 151_936])
@pytest.mark.parametrize("sizes", [(1,), (511, 80), (3, 3, 3, 3)])
def test_a17_t1_uniform_logits_give_the_vocabulary_size(vocabulary, sizes):
    samples = chunks(*((n * math.log(vocabulary), n) for n in sizes))
    assert text_run(samples).row("ppl").value == pytest.approx(vocabulary, rel=1e-12)


def test_a17_t2_tokens_weigh_alike_whatever_their_chunk():
    row = text_run(chunks((1022.0, 511), (320.0, 80)), chunks((1.0, 1))).row("ppl")
    assert row.value == pytest.approx(9.6864, abs=5e-5)  # 20.0855 and 30.9936 are the means of means
    assert (row.n, row.variant) == (591, "wikitext2 stream512")


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.integers(1, 600)), min_size=1, max_size=20), st.integers(1, 4)
)
def test_perplexity_does_not_depend_on_how_tokens_are_chunked(data, times):
    whole = chunks(*((mean * n * times, n * times) for mean, n in data))
    cut = chunks(*((mean * n, n) for mean, n in data for _ in range(times)))
    one, two = text_run(whole).row("ppl"), text_run(cut).row("ppl")
    assert (one.n, one.value) == (two.n, pytest.approx(two.value, rel=1e-9))


def test_ppl_delta_is_the_paired_log_ratio():
    native = chunks((200.0, 100), (330.0, 100), (260.0, 50))
    run = text_run(chunks((202.0, 100), (331.0, 100), (260.5, 50)), native)
    row = run.row("ppl_delta_pct")
    assert row.value == pytest.approx((math.exp(3.5 / 250) - 1) * 100)
    assert row.value == pytest.approx((run.row("ppl").value / run.row("ppl", BASE).value - 1) * 100)
    left_out = [1.5 / 150, 2.5 / 150, 3.0 / 200]  # the ratio without each document in turn
    error = math.sqrt(2 / 3 * sum((ratio - 3.5 / 250) ** 2 for ratio in left_out))
    half = float(scipy_stats.t.ppf(0.975, 250**2 / (100**2 + 100**2 + 50**2) - 1)) * error
    assert [row.low, row.high] == pytest.approx(
        [(math.exp(3.5 / 250 + sign * half) - 1) * 100 for sign in (-1, 1)]
    )
    assert row.note == "3 documents; a bootstrap over documents gives [+1.005, +2.02]%"


def test_ppl_delta_counts_documents_not_chunks():
    owners = [0, 0, 0, 0, 1, 1, 1, 1]
    native = chunks(*[(100.0, 50)] * 8, documents=owners)
    row = text_run(chunks(*[(101.0 + d, 50) for d in owners], documents=owners), native).row("ppl_delta_pct")
    half = float(scipy_stats.t.ppf(0.975, 1)) * math.sqrt(2 * 2 * 2.0**2) / 400
    assert row.low == pytest.approx((math.exp(12 / 400 - half) - 1) * 100)
    assert row.note.startswith("2 documents")
    single = text_run(chunks((101.0, 50)), chunks((100.0, 50))).row("ppl_delta_pct")
    assert (single.low, single.high) == (None, None)


def test_the_noise_floor_of_perplexity_is_a_metric_and_in_the_note():
    native = chunks((100.0, 50), (100.0, 50))
    again = chunks((100.001, 50), (100.0, 50))["chunks"]
    run = text_run({**chunks((101.0, 50), (100.0, 50)), "native_chunks": again}, native)
    assert "+0.0010%" in run.row("ppl_delta_pct").note
    row = run.row("ppl_aa_pct")
    assert row.value == pytest.approx(0.001, rel=1e-4)
    assert row.low < 0 < row.high


def test_bit_identical_text_has_a_delta_of_exactly_zero():
    row = text_run(chunks((101.0, 50), (7.0, 3))).row("ppl_delta_pct")
    assert (row.value, row.low, row.high) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "change",
    [{"protocol": "rows512"}, {"split": "validation"}, {"bos": "each chunk"}, {"text": "detokenised"},
     {"data_sha": "x"}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a17_t6_two_protocols_are_never_compared(change):
    samples = chunks((100.0, 50), (90.0, 50))
    row = text_run(samples, samples, text_facts(100, **change)).row("ppl_delta_pct")
    ((fact, value),) = change.items()
    assert row.value is None
    assert f"{fact} is {value!r} here" in row.note


def test_a17_t6_other_versions_and_other_chunks_are_not_compared():
    samples = chunks((1.0, 1), (1.0, 1))
    row = text_run(samples).change(BASE, protocol=0).row("ppl_delta_pct")
    assert (row.value, "protocol version is 1 here and 0" in row.note) == (None, True)
    row = text_run(chunks((9.0, 60), (9.0, 40)), chunks((9.0, 50), (9.0, 50))).row("ppl_delta_pct")
    assert (row.value, "same tokens" in row.note) == (None, True)


def test_a_count_that_the_chunks_contradict_and_nothing_scored_are_no_perplexity():
    row = text_run(chunks((9.0, 60)), facts=text_facts(61)).row("ppl")
    assert (row.value, row.note) == (None, "the record says 61 scored tokens, its chunks hold 60")
    empty = text_run(chunks((0.0, 0))).row("ppl")
    assert (empty.value, empty.note) == (None, "no token was scored")


def test_a_collapsed_model_has_an_infinite_perplexity_not_a_crash():
    assert text_run(chunks((5000.0, 5), (1.0, 5))).row("ppl").value == pytest.approx(math.exp(500.1))
    assert text_run(chunks((1e6, 5))).row("ppl").value == math.inf
    assert math.isnan(text_run(chunks((math.nan, 5)), chunks((9.0, 5))).row("ppl_delta_pct").value)


QUANTITIES = ("mean", "p50", "p90", "p99", "p999", "max")


def test_kld_columns():
    kld = [i / 1000 for i in range(1001)]
    random.Random(0).shuffle(kld)
    extra = {"kld_tokens": kld, "top1_equal": 900, "delta_p": [0.01] * 500 + [-0.03] * 501}
    run = text_run({**chunks((2000.0, 1001)), **extra}, chunks((2000.0, 1001)))
    found = [run.row(f"kld_{name}").value for name in QUANTITIES]
    assert found == [pytest.approx(0.5), 0.5, 0.9, 0.99, 0.999, 1.0]
    row = run.row("top1_agreement")
    assert (row.value, row.low, row.note) == (900 / 1001, None, "1 document: no interval")
    assert run.row("delta_p_mean").value == pytest.approx(100 * (0.01 * 500 - 0.03 * 501) / 1001)
    assert run.row("kld_mean").baseline == BASE
    assert text_run(chunks((9.0, 5))).row("kld_mean").value is None


def test_kld_of_more_tokens_than_a_record_keeps_comes_from_its_sums():
    whole = {"mean": 0.2, "n": 1001, "p50": 0.1, "p90": 0.3, "p99": 0.4, "p999": 0.5, "max": 0.6}
    kept = {"kld_tokens": [9.0, 9.0], "top1_equal": 1000, "delta_p": [9.0, 9.0], "delta_p_mean": -0.01}
    run = text_run({**chunks((2000.0, 1001)), "kld": whole, **kept}, chunks((2000.0, 1001)))
    assert [run.row(f"kld_{name}").value for name in QUANTITIES] == [whole[name] for name in QUANTITIES]
    assert {run.row(name).n for name in ("kld_mean", "top1_agreement", "delta_p_mean")} == {1001}
    assert run.row("delta_p_mean").value == -1.0
    exact = {"kld": {**whole, "n": 2}, "kld_tokens": [1.0, 3.0]}
    assert text_run({**chunks((4.0, 2)), **exact}, chunks((4.0, 2))).row("kld_mean").value == 2.0


def test_divergences_have_intervals_over_documents():
    """Two documents of 500 tokens, all kept."""
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

"""Changes between two stored runs: exact values, scipy as the oracle of the intervals, what is paired."""

import math
from dataclasses import replace

import pytest
from scipy import stats as oracle

from kvbench.compare.pairing import pairs_of
from kvbench.compare.two_runs import changes
from kvbench.metrics.declare.metric import Effect, Unable
from kvbench.metrics.perplexity import _places
from kvbench.stats.intervals import clustered_ratio, paired_difference
from tests.factories.runs.compared import agreement, latency, perplexity, questions, stored
from tests.factories.runs.made import CAND


def found(first, second, metric, cell=CAND):
    """The effect of a metric on a cell, the second run compared with the first."""
    pairs = [p for p in pairs_of(stored(first), stored(second, "B")) if p.first.cell == cell and p.second]
    (one,) = [own[metric] for own in (changes(p.first, p.second) for p in pairs) if metric in own]
    return one


def test_times_are_compared_by_their_ratio_to_the_native_arm_beside_them_or_by_themselves():
    first, second = latency(1.05), latency(1.10, machine=1.5)
    effect = found(first, second, "itl_ms")
    logs = []
    for run in (first, second):
        arms = run.records[1].samples["arms"]
        own, native = ([a["itl_ms"][0] for a in arms if a["arm"] == x] for x in ("candidate", "baseline"))
        logs.append([math.log(a / b) for a, b in zip(own, native, strict=True)])
    theirs = oracle.ttest_ind(logs[1], logs[0], equal_var=False).confidence_interval(0.95)
    assert (effect.low, effect.high) == pytest.approx([100 * math.expm1(x) for x in theirs], rel=1e-9)
    assert effect.low < 100 * (1.10 / 1.05 - 1) < effect.high
    assert (effect.kind.name, effect.n, effect.counted) == ("time beside native", 20, "pairs")
    assert isinstance(effect.beside, Effect)
    assert effect.beside.value == pytest.approx(100 * (1.5 * 1.10 / 1.05 - 1), abs=2)
    effect = found(latency(machine=1.0), latency(machine=1.2), "itl_ms", "base")
    assert (effect.kind.name, effect.counted, effect.beside) == ("time", "requests", None)
    assert "Welch" in effect.method
    assert effect.value == pytest.approx(20, abs=1.5)


def test_perplexity_is_paired_chunk_by_chunk_over_documents():
    first, second = perplexity([210, 220, 205, 230]), perplexity([211, 222, 205.5, 230])
    effect = found(first, second, "ppl")
    logs = clustered_ratio([1, 2, 0.5, 0], [100] * 4, range(4))
    assert effect.value == pytest.approx(100 * math.expm1(3.5 / 400))
    assert (effect.low, effect.high) == pytest.approx([100 * math.expm1(x) for x in logs.interval])
    assert (effect.n, effect.counted, effect.units) == (400, "tokens", 4)
    # With documents of one size the jackknife is the t-interval of the mean, as scipy has it.
    mean = oracle.ttest_1samp([0.01, 0.02, 0.005, 0.0], 0).confidence_interval(0.95)
    assert logs.interval == pytest.approx(tuple(mean))


def test_divergence_is_a_ratio_of_sums_that_turns_over_with_the_runs_and_nothing_has_none():
    a, b = perplexity([210] * 4, [1.0, 2.0, 1.5, 0.5]), perplexity([210] * 4, [1.3, 2.2, 1.6, 0.9])
    there, back = found(a, b, "kld_mean"), found(b, a, "kld_mean")
    assert there.value == pytest.approx(20.0)
    ends = [math.log1p(x / 100) for x in (there.low, there.high, back.low, back.high)]
    assert ends[:2] == pytest.approx([-ends[3], -ends[2]])
    assert there.units == back.units
    none, some = perplexity([210] * 3, [1e-300, 0.0, 0.0]), perplexity([210] * 3)
    none.records[1].samples["chunks"][0]["kld"] = 0.0
    assert isinstance(found(none, some, "kld_mean"), Unable)
    assert found(none, none, "kld_mean").identical


def test_equal_tokens_are_counted_by_document():
    first, second = (perplexity([210] * 4, top1=equal) for equal in ([95, 96, 97, 98], [94, 96, 99, 98]))
    effect = found(first, second, "top1_agreement")
    assert effect.value == pytest.approx(100 * 1 / 400)
    paired = paired_difference(2, 1, 400)
    clustered = clustered_ratio([-1, 0, 2, 0], [100] * 4, range(4)).interval
    ends = min(paired[0], clustered[0]), max(paired[1], clustered[1])
    assert (effect.low, effect.high) == pytest.approx([100 * x for x in ends])


def test_questions_are_paired_by_name_and_only_the_same_questions_and_readable_times_are_pairs():
    own, other = [0, 0, 0, 1, 1, 0], [0, 0, 1, 0, 0, 0]
    first, second = questions(own, [0] * 6), questions(other, [0] * 6)
    second.records[1].samples["questions"].reverse()
    effect = found(first, second, "mcq_accuracy")
    assert effect.value == pytest.approx(100 * 1 / 6)
    assert (effect.low, effect.high) == pytest.approx([100 * x for x in paired_difference(2, 1, 6)])
    assert "2 gained, 1 lost, exact McNemar p = 1" in effect.method
    assert found(first, second, "mcq_agreement").value == pytest.approx(100 * 1 / 6)
    few, six, gaps = questions([0] * 4, [0] * 4, total=6), questions([0] * 6, [0] * 6), latency()
    effect = found(six, few, "mcq_accuracy")
    assert (effect.n, effect.subset) == (4, "4 questions that both scored, of 6")
    few.records[1].samples["questions"][1]["answer"] = 2
    assert "another answer" in found(six, few, "mcq_accuracy").why
    gaps.records[1].samples["arms"][3]["itl_ms"].append(1.0)
    assert "gaps" in found(latency(), gaps, "itl_ms").why


def test_steps_are_pairs_until_the_native_texts_part():
    native = [i % 7 for i in range(256)]
    moved = [*native[:200], *(9 for _ in range(56))]
    own = [t if i % 50 else 8 for i, t in enumerate(native)]
    effect = found(agreement(own, native), agreement(moved, moved), "top1_teacher_forced")
    assert (effect.n, effect.subset) == (200, "200 of 256 steps, before the native texts differ")
    assert effect.value == pytest.approx(100 * 4 / 200)
    whole = found(agreement(own, native), agreement(native, native), "top1_teacher_forced")
    assert (whole.n, whole.subset) == (256, "")


def test_a_larger_sample_is_compared_on_the_chunks_of_the_smaller():
    few, many = perplexity([210.0, 220.0], chunks_total=4), perplexity([211.0, 999.0, 222.0, 999.0])
    for place, chunk in zip((0, 2), few.records[1].samples["chunks"], strict=True):
        chunk["document"] = place
    effect = found(few, many, "ppl")
    assert effect.subset == "2 chunks that both scored, of 4"
    assert effect.value == pytest.approx(100 * math.expm1(3 / 200))
    record = perplexity([210.0, 220.0], chunks_total=5).records[1]
    assert list(_places(record)) == [0, 2]  # a record without places: evenly spread
    assert _places(replace(record, facts={**record.facts, "chunk_places": [1, 4]})) == [1, 4]

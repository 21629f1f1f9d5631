"""`kvbench compare`: outcomes and exit codes, what is refused, what is named, and the runs turned over."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as oracle

from kvbench.compare.history import history
from kvbench.compare.pairing import pairs_of
from kvbench.compare.result import BETTER, NOT_EVALUATED, NOT_JUDGED, SAME, UNDECIDED, WORSE, spoken
from kvbench.compare.two_runs import changes, compare, judge
from kvbench.errors import UsageError
from kvbench.metrics.declare.metric import MARGINS, Effect, Unable
from kvbench.metrics.perplexity import _places
from kvbench.records.record import ERROR, LEVELS, MISMATCH, VERIFIED, Level
from kvbench.records.record import NOT_EVALUATED as NOT_AVAILABLE
from kvbench.stats.intervals import clustered_ratio, paired_difference
from tests.factories.runs.compared import (
    DIGESTS,
    agreement,
    candidate,
    latency,
    perplexity,
    questions,
    stored,
)
from tests.factories.runs.made import CAND, MadeRun, evidence, layers, storage_facts
from tests.factories.runs.timed import state, timed

GPU = {"device": "cuda"}


def gpu(uuid):
    return GPU | {"gpus": [{"name": "G", "uuid": uuid}]}


TURNED = {WORSE: BETTER, BETTER: WORSE}


def two(first, second, **options):
    return compare([stored(first), stored(second, "B")], **options)


def text():
    return perplexity([210.0] * 4)


def one(result, metric, cell=CAND):
    (found,) = [f for f in result.findings if f.metric == metric and f.cell == cell]
    return found


def test_a_planted_slowdown_is_worse_and_equal_runs_are_the_same_or_undecided():
    before = latency(1.05, repeats=40)
    result = two(before, latency(1.05 * 1.05, machine=1.4, repeats=40, seed=1))
    found = one(result, "itl_ms")
    assert (found.outcome, result.exit_code, found.adjusted < 0.05) == (WORSE, 1, True)
    words = ("int8_sym: ", f"itl_ms is {spoken(found.effect)}", "40 pairs", "% slower [", ": worse.")
    assert [x for x in words if x not in found.sentence] == []
    assert one(two(before, latency(1.05, machine=1.4, repeats=40, seed=1)), "itl_ms").outcome == SAME
    few = (latency(1.05, repeats=3, noise=0.05, seed=seed) for seed in (0, 1))
    found = one(two(*few), "itl_ms")
    assert found.outcome == UNDECIDED
    assert f"n needed: about {found.n_needed:,} pairs in each run" in found.reason
    for i in range(150):  # of pairs of runs without a change none is called worse
        first, second = (latency(repeats=8, seed=seed) for seed in (2 * i, 2 * i + 1))
        assert one(two(first, second, only=["itl_ms"]), "itl_ms").outcome != WORSE


def turned_over(a, b):
    for found, turned in zip(two(a, b).findings, two(b, a).findings, strict=True):
        assert turned.outcome == TURNED.get(found.outcome, found.outcome), (found.sentence, turned.sentence)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.85, 1.2), st.integers(2, 12), st.floats(0.001, 0.08), st.integers(0, 99))
def test_turning_the_runs_over_turns_the_outcome(ratio, repeats, noise, seed):
    how = {"repeats": repeats, "noise": noise}
    turned_over(latency(1.0, seed=seed, **how), latency(ratio, seed=seed + 1, **how))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(0.1, 3), st.integers(-9, 4)), min_size=1, max_size=8))
def test_turning_texts_over_turns_the_outcome(changes):
    nll, kld, top1 = zip(*((200.0 + d, k, 95 + t) for d, k, t in changes), strict=True)
    turned_over(perplexity([200.0] * len(changes)), perplexity(nll, kld, top1))


@pytest.mark.parametrize(
    "run",
    [latency(), latency(repeats=2, noise=0.3), perplexity([210.0] * 5), questions([0] * 9, [1] * 9),
     agreement([1] * 130, [1] * 130)],
    ids=["latency", "noisy", "perplexity", "mcq", "agreement"],
)  # fmt: skip
def test_a_run_beside_itself_is_never_worse_or_better(run):
    result = two(run, run)
    assert not {f.outcome for f in result.findings} & {WORSE, BETTER, NOT_EVALUATED}
    assert result.exit_code in (0, 4)
    assert any("same records, measured once" in sentence for sentence in result.named)


def test_exact_numbers_are_the_same_however_few_and_a_worse_divergence_is_worse():
    first, second, moved = (questions([0] * 9, [0] * 9, shift=shift) for shift in (0.0, 0.0, 1e-9))
    assert one(two(first, second), "mcq_accuracy").outcome == SAME
    found = one(two(first, moved), "mcq_accuracy")
    assert (found.outcome, found.n_needed is None) == (UNDECIDED, False)
    b = perplexity([213, 214, 215, 216, 217.1], [2.0 + 0.02 * i for i in range(5)])
    result = two(perplexity([210, 211, 212, 213, 214]), b)
    outcomes = {name: one(result, name).outcome for name in ("ppl", "kld_mean", "ppl_delta_pct")}
    assert outcomes == {"ppl": WORSE, "kld_mean": WORSE, "ppl_delta_pct": NOT_JUDGED}
    assert one(result, "top1_agreement").outcome != WORSE
    assert one(result, "ppl", "base").outcome == SAME


def bytes_of(payload):
    facts = storage_facts(16, 400)
    return MadeRun().measure("storage", (layers(2, payload, 8), facts), (layers(2, 400, 0), facts))


def test_the_margin_decides_but_not_over_bytes_or_chance():
    a, b = perplexity([210.0] * 5), perplexity([210.2, 210.21, 210.19, 210.2, 210.2])
    found = one(two(a, b), "ppl")
    assert (found.outcome, found.margin) == (SAME, MARGINS["perplexity"])
    assert MARGINS["perplexity"] == 0.5
    assert [one(two(*pair, margin=0.1), "ppl").outcome for pair in ((a, b), (b, a))] == [WORSE, BETTER]
    found = one(two(bytes_of(100), bytes_of(101), margin=50.0), "kv_bytes_total")
    assert (found.outcome, found.sentence) == (WORSE, "int8_sym: kv_bytes_total is 2 B more: worse (exact).")
    assert one(two(bytes_of(101), bytes_of(100)), "kv_bytes_total").outcome == BETTER
    # The same change, by itself and as the only one of 12 comparisons: Holm takes the failure back.
    a, b = latency(1.0, repeats=8, noise=0.02), latency(1.06, repeats=8, noise=0.02, seed=3)
    reference = stored(a)
    alone = compare([reference, stored(b, "B")], only=["itl_ms"])
    found = one(alone, "itl_ms")
    assert (found.outcome, found.adjusted > 0.004) == (WORSE, True)
    others = [stored(latency(1.0, repeats=8, noise=0.02, seed=10 + i), f"C{i}") for i in range(12)]
    many = compare([reference, stored(b, "B"), *others], only=["itl_ms"])
    again = next(f for f in many.findings if f.runs == ("A", "B") and f.cell == CAND)
    assert (again.family, again.outcome, "by chance" in again.reason) == (2 * 13, UNDECIDED, True)
    assert again.adjusted > found.adjusted


# What is refused, one difference at a time.


def _replaced(of, fields):
    return replace(of, **{k: v(getattr(of, k)) if callable(v) else v for k, v in fields.items()})


def changed(run, **fields):
    """The run, as B, with fields of every task changed; a function gets the old value."""
    tasks = tuple(_replaced(task, fields) for task in run.run.tasks)
    return replace(run, name="B", run=replace(run.run, manifest=replace(run.run.manifest, tasks=tasks)))


def with_records(run, **fields):
    records = tuple(_replaced(record, fields) for record in run.run.records)
    return replace(run, name="B", run=replace(run.run, records=records))


def with_key(key, value):
    """B, with another value of one key in all its cells."""
    run = stored(text(), "B")
    for cell in run.run.manifest.cells:
        cell.spec[key] = value
    return run


def other_model(kind, run):
    return changed(run, digests={**DIGESTS, kind: "sha256:n"})


UNLIKE = {
    "protocol version is 1 in A and 2 in B": lambda r: with_records(r, protocol=2),
    "option kld is true in A and false in B": lambda r: changed(r, options=lambda o: {**o, "kld": False}),
    "the data is ": lambda r: changed(r, digests={**DIGESTS, "data": ["sha256:e"]}),
    "data_sha is d in A and e in B":  # of an old run
        lambda r: with_records(changed(r, digests={}), facts=lambda f: {**f, "data_sha": "e"}),
    "the model is sha256:m in A and sha256:n in B": lambda r: other_model("model", r),
    "the native model is sha256:m in A and sha256:n in B": lambda r: other_model("native", r),
    "cell kv_format=int8_sym: page_size is 16 in A and 32 in B": lambda r: with_key("page_size", 32),
}  # fmt: skip


@pytest.mark.parametrize("sentence", UNLIKE)
def test_unlike_runs_are_refused(sentence):
    first = stored(text())
    with pytest.raises(UsageError, match="may not be compared") as refused:
        compare([first, UNLIKE[sentence](first)])
    assert sentence in str(refused.value)


def test_all_differences_are_named_at_once_and_the_same_model_under_another_name_is_none():
    first = stored(text())
    with pytest.raises(UsageError) as refused:
        compare([first, with_records(other_model("model", first), protocol=2)])
    lines = [line for line in str(refused.value).splitlines() if line.startswith("  ")]
    assert len(lines) == len(set(lines)) == refused.value.exit_code == 2
    with pytest.raises(UsageError, match="no task in common"):
        two(text(), questions([0] * 4, [0] * 4))
    first, second = stored(text()), with_key("model", "elsewhere/m")
    assert compare([first, second]).exit_code == 0
    with pytest.raises(UsageError, match="model is m in A and elsewhere/m in B, and not both have a digest"):
        compare([first, changed(second, digests={})])
    result = compare([stored(text(), env=GPU), with_key("device", "cuda")], only=["ppl"])
    assert {f.outcome for f in result.findings} == {SAME}


def test_old_runs_and_runs_that_differ_in_what_forbids_nothing_are_compared_and_it_is_said():
    """Nor have they keys and options that came later."""
    first = stored(text())

    def known(values):
        return {k: v for k, v in values.items() if k not in ("native_model", "kv_splits", "kld")}

    new = {"spec": known, "options": known}
    old = replace(with_records(changed(first, digests={}, **new), **new), name="A")
    cells = tuple(replace(cell, spec=known(cell.spec)) for cell in old.run.manifest.cells)
    old = replace(old, run=replace(old.run, manifest=replace(old.run.manifest, cells=cells)))
    result = compare([old, replace(first, name="B")])
    assert result.exit_code == 0
    assert "A hold no digest of the model; both name m, which is taken for the same one" in result.named
    packages = {"torch": "2.11.0", "transformers": "5.24.0", "triton": None}
    env = {"identity": {"kvbench": "x"}, "boot_id": "2", "packages": packages}
    second = with_records(stored(text(), "B", env), started_at="later")
    result = compare([stored(text(), env={"boot_id": "1"}), second])
    assert result.named == (
        "kvbench's source is m in A and x in B",
        "torch is 2.13.0 in A and 2.11.0 in B",
        "the boot is 1 in A and 2 in B",
    )
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("own", "other", "apart"),
    [
        ({"host": "one"}, {"host": "two"}, "the host is one in A and two in B"),
        ({"host": "one"}, {}, ""),
        ({}, {"cpu": "Other"}, "cpu is CPU in A and Other in B"),
        ({}, {"threads": 2}, "threads is 1 in A and 2 in B"),
        ({}, {"gpus": [{"name": "GPU"}]}, "the GPU is none in A and GPU in B"),
        (gpu("1"), gpu("2"), "the GPU's id is 1 in A and 2 in B"),
        (gpu(None), gpu("2"), ""),
        ({"host": "one", "boot_id": "1"}, {"host": "one", "boot_id": "2"}, ""),
    ],
)
def test_times_of_two_machines_are_never_compared(own, other, apart):
    both = latency(repeats=40)
    both.measure("storage", *((layers(8, n, m), storage_facts(16, 400)) for n, m in ((10, 2), (40, 0))))
    runs = [stored(both, "A", own), stored(both, "B", other)]
    result = compare(runs)
    found = one(result, "itl_ms")
    assert one(result, "kv_bytes_total").outcome == SAME
    assert (found.outcome, result.exit_code) == ((NOT_EVALUATED, 3) if apart else (SAME, 0))
    assert apart in found.reason
    assert apart in "; ".join(result.named)
    assert compare(runs, only=["kv_bytes_total"]).exit_code == 0


# What is missing, and what does not stand by itself.


def test_a_record_or_task_that_one_run_lacks_is_not_evaluated():
    run = text()
    failed = candidate(text(), status=ERROR, error={"type": "OOM", "message": "no memory"})
    for first, second in ((run, failed), (failed, run)):
        result = two(first, second)
        (found,) = [f for f in result.findings if f.outcome == NOT_EVALUATED]
        assert "has no result (error: no memory)" in found.sentence
        assert result.exit_code == 3
    absent = candidate(text(), status=NOT_AVAILABLE, error={"reason": "x", "message": "no data"})
    assert two(absent, absent).exit_code == 0
    assert two(run, absent).exit_code == 3
    both = text().measure("mcq", *([({"questions": []}, {})] * 2), "cloze 0-shot")
    less = text()
    result = two(both, less)
    assert result.exit_code == 3
    said = "int8_sym: mcq cloze 0-shot was not compared: B has no such task."
    assert said in [f.sentence for f in result.findings]
    more = two(less, both)
    assert "only B has mcq cloze 0-shot on int8_sym, so it is compared with nothing" in more.named
    assert two(both, less, only=["ppl"]).exit_code == 0


def test_wrong_precision_in_one_run_is_named_first_and_fails():
    wrong = Level("E1", MISMATCH, "layer 3 is float32")
    shown = evidence("native", wrong, *(Level(name, VERIFIED, "as due") for name in LEVELS[1:]))
    faulty = candidate(text(), evidence=shown)
    result = two(text(), faulty)
    assert result.exit_code == 1
    (run, sentence), *_ = result.faults
    assert (run, "layer 3 is float32" in sentence) == ("B", True)
    assert WORSE not in {f.outcome for f in result.findings}
    assert two(text(), faulty, chosen=[{"base"}, {"base"}]).exit_code == 0


def test_values_that_are_no_number_or_cannot_be_read_are_no_pass_and_partial_runs_are_marked():
    broken = perplexity([210.0, float("nan"), 211.0, 212.0])
    for first, second in ((text(), broken), (broken, text())):
        result = two(first, second)
        assert (one(result, "ppl").outcome, result.exit_code) == (NOT_EVALUATED, 1)
        assert any("plausible" in sentence for _, sentence in result.faults)
    damaged = text()
    damaged.records[1].samples["chunks"] = [{"tokens": "many"}]
    result = judge(pairs_of(stored(text()), stored(damaged, "B")))
    assert any(f.outcome == NOT_EVALUATED and "cannot be read" in f.reason for f in result)
    run = candidate(text(), partial="4 of 9 chunks")
    assert one(two(run, run), "ppl").sentence.endswith(", partial: 4 of 9 chunks.")


# The machine.


def test_a_time_under_load_or_on_a_slowed_down_device_is_undecided():
    quiet, busy = latency(), latency(machine=1.3)
    for record in busy.records:
        record.facts["host_load"] = {"before": 1.0, "after": 7.5, "cpus": 2}
    found = one(two(quiet, busy), "itl_ms", "base")
    said = "it would be worse, but B was measured under a load of 7.5 on 2 CPUs"
    assert (found.outcome, said in found.reason) == (UNDECIDED, True)
    assert one(two(quiet, latency(machine=1.3)), "itl_ms", "base").outcome == WORSE
    assert one(two(quiet, busy), "itl_ms").outcome == SAME, "beside native the load cancels"
    fast, slow = [10.5, 10.51, 10.49, 10.5, 10.5, 10.5], [12.5, 12.51, 12.49, 12.5, 12.5, 12.5]
    hot = {i: state("hw thermal", sm=1300) for i in (1, 2, 5, 6, 9, 10)}
    still, cool = (timed(times, [10.0] * 6, prompt_sha="p") for times in (fast, slow))
    slowed = timed(slow, [10.0] * 6, devices=hot, prompt_sha="p")
    assert one(two(still, cool), "itl_ms").outcome == WORSE
    found = one(two(still, slowed), "itl_ms")
    assert (found.outcome, "in B the device was slowed down" in found.reason) == (UNDECIDED, True)
    assert one(two(slowed, still), "itl_ms").outcome == UNDECIDED


# Changes between two stored runs: exact values, scipy as the oracle of the intervals, what is paired.


def effect_of(first, second, metric, cell=CAND):
    """The effect of a metric on a cell, the second run compared with the first."""
    pairs = [p for p in pairs_of(stored(first), stored(second, "B")) if p.first.cell == cell and p.second]
    (one,) = [own[metric] for own in (changes(p.first, p.second) for p in pairs) if metric in own]
    return one


def test_times_are_compared_by_their_ratio_to_the_native_arm_beside_them_or_by_themselves():
    first, second = latency(1.05), latency(1.10, machine=1.5)
    effect = effect_of(first, second, "itl_ms")
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
    effect = effect_of(latency(machine=1.0), latency(machine=1.2), "itl_ms", "base")
    assert (effect.kind.name, effect.counted, effect.beside) == ("time", "requests", None)
    assert "Welch" in effect.method
    assert effect.value == pytest.approx(20, abs=1.5)


def test_perplexity_and_equal_tokens_are_paired_chunk_by_chunk_over_documents():
    first, second = perplexity([210, 220, 205, 230]), perplexity([211, 222, 205.5, 230])
    effect = effect_of(first, second, "ppl")
    logs = clustered_ratio([1, 2, 0.5, 0], [100] * 4, range(4))
    assert effect.value == pytest.approx(100 * math.expm1(3.5 / 400))
    assert (effect.low, effect.high) == pytest.approx([100 * math.expm1(x) for x in logs.interval])
    assert (effect.n, effect.counted, effect.units) == (400, "tokens", 4)
    # With documents of one size the jackknife is the t-interval of the mean, as scipy has it.
    mean = oracle.ttest_1samp([0.01, 0.02, 0.005, 0.0], 0).confidence_interval(0.95)
    assert logs.interval == pytest.approx(tuple(mean))
    first, second = (perplexity([210] * 4, top1=equal) for equal in ([95, 96, 97, 98], [94, 96, 99, 98]))
    effect = effect_of(first, second, "top1_agreement")
    assert effect.value == pytest.approx(100 * 1 / 400)
    paired = paired_difference(2, 1, 400)
    clustered = clustered_ratio([-1, 0, 2, 0], [100] * 4, range(4)).interval
    ends = min(paired[0], clustered[0]), max(paired[1], clustered[1])
    assert (effect.low, effect.high) == pytest.approx([100 * x for x in ends])


def test_divergence_is_a_ratio_of_sums_that_turns_over_with_the_runs_and_nothing_has_none():
    a, b = perplexity([210] * 4, [1.0, 2.0, 1.5, 0.5]), perplexity([210] * 4, [1.3, 2.2, 1.6, 0.9])
    there, back = effect_of(a, b, "kld_mean"), effect_of(b, a, "kld_mean")
    assert there.value == pytest.approx(20.0)
    ends = [math.log1p(x / 100) for x in (there.low, there.high, back.low, back.high)]
    assert ends[:2] == pytest.approx([-ends[3], -ends[2]])
    assert there.units == back.units
    none, some = perplexity([210] * 3, [1e-300, 0.0, 0.0]), perplexity([210] * 3)
    none.records[1].samples["chunks"][0]["kld"] = 0.0
    assert isinstance(effect_of(none, some, "kld_mean"), Unable)
    assert effect_of(none, none, "kld_mean").identical


def test_questions_are_paired_by_name_and_only_the_same_questions_and_readable_times_are_pairs():
    own, other = [0, 0, 0, 1, 1, 0], [0, 0, 1, 0, 0, 0]
    first, second = questions(own, [0] * 6), questions(other, [0] * 6)
    second.records[1].samples["questions"].reverse()
    effect = effect_of(first, second, "mcq_accuracy")
    assert effect.value == pytest.approx(100 * 1 / 6)
    assert (effect.low, effect.high) == pytest.approx([100 * x for x in paired_difference(2, 1, 6)])
    assert "2 gained, 1 lost, exact McNemar p = 1" in effect.method
    assert effect_of(first, second, "mcq_agreement").value == pytest.approx(100 * 1 / 6)
    few, six, gaps = questions([0] * 4, [0] * 4, total=6), questions([0] * 6, [0] * 6), latency()
    effect = effect_of(six, few, "mcq_accuracy")
    assert (effect.n, effect.subset) == (4, "4 questions that both scored, of 6")
    few.records[1].samples["questions"][1]["answer"] = 2
    assert "another answer" in effect_of(six, few, "mcq_accuracy").why
    gaps.records[1].samples["arms"][3]["itl_ms"].append(1.0)
    assert "gaps" in effect_of(latency(), gaps, "itl_ms").why


def test_steps_and_chunks_are_pairs_where_both_have_them():
    native = [i % 7 for i in range(256)]
    moved = [*native[:200], *(9 for _ in range(56))]
    own = [t if i % 50 else 8 for i, t in enumerate(native)]
    effect = effect_of(agreement(own, native), agreement(moved, moved), "top1_teacher_forced")
    assert (effect.n, effect.subset) == (200, "200 of 256 steps, before the native texts differ")
    assert effect.value == pytest.approx(100 * 4 / 200)
    whole = effect_of(agreement(own, native), agreement(native, native), "top1_teacher_forced")
    assert (whole.n, whole.subset) == (256, "")
    few, many = perplexity([210.0, 220.0], chunks_total=4), perplexity([211.0, 999.0, 222.0, 999.0])
    for place, chunk in zip((0, 2), few.records[1].samples["chunks"], strict=True):
        chunk["document"] = place
    effect = effect_of(few, many, "ppl")
    assert effect.subset == "2 chunks that both scored, of 4"
    assert effect.value == pytest.approx(100 * math.expm1(3 / 200))
    record = perplexity([210.0, 220.0], chunks_total=5).records[1]
    assert list(_places(record)) == [0, 2]  # a record without places: evenly spread
    assert _places(replace(record, facts={**record.facts, "chunk_places": [1, 4]})) == [1, 4]


# `kvbench history`: lines over runs, where they break, what is marked as a change.


def runs_of(*runs, envs=()):
    given = enumerate(zip(runs, envs or ({},) * len(runs), strict=True), start=1)
    return [stored(run, f"run {i}", env) for i, (run, env) in given]


def line(result, metric, place="int8_sym"):
    (found,) = [x for x in result.lines if x.metric == metric and x.place == place]
    return found


def test_the_slower_run_is_marked_and_one_without_the_work_is_passed_over():
    ratios = (1.05, 1.05, 1.12, 1.12, 1.12)
    result = history(runs_of(*(latency(x, repeats=30, seed=i) for i, x in enumerate(ratios))))
    points = line(result, "itl_ratio").points
    assert [(x.metric, point.run) for x, point in result.changes] == [("itl_ratio", 2)]
    assert [point.run for point in points if point.changed] == [2]
    assert (points[2].change.outcome, points[2].change.runs) == (WORSE, ("run 2", "run 3"))
    assert [point.change.family for point in points[1:]] == [8] * 4  # all neighbours, and four of native
    # The time by itself has no mark of its own: its change is beside native.
    assert all(point.change is None for point in line(result, "itl_ms").points)
    assert all(point.row.low is not None for point in points)
    runs = runs_of(perplexity([210.0] * 4), latency(), perplexity([210.0] * 4))
    for run in runs:
        for cell in run.run.manifest.cells:
            cell.spec.update({"batch": 1, "context": 128})
    found = line(history(runs), "ppl")
    assert [point.run for point in found.points] == [0, 2]
    assert found.points[1].change.runs == ("run 1", "run 3")


def test_a_change_is_what_compare_calls_it_and_only_chosen_cells_have_lines():
    runs = runs_of(perplexity([210.0, 211, 212, 213]), perplexity([214.0, 215, 216, 217.2]))
    change = line(history(runs), "ppl").points[1].change
    assert [change] == [f for f in compare(runs).findings if f.metric == "ppl" and f.cell == "cand"]
    runs = runs_of(latency(), latency(seed=1))
    result = history(runs, [{"cand"}, {"cand"}], ["ttft_ratio"])
    assert [(x.metric, x.place) for x in result.lines] == [("ttft_ratio", "int8_sym")]
    assert line(result, "ttft_ratio").points[1].change is not None


def test_unlike_neighbours_and_machines_break_the_line():
    first, second, third = runs_of(*(perplexity([210.0] * 4) for _ in range(3)))
    other = {**DIGESTS, "model": "sha256:other"}
    tasks = tuple(replace(task, digests=other) for task in third.run.tasks)
    third = replace(third, run=replace(third.run, manifest=replace(third.run.manifest, tasks=tasks)))
    found = line(history([first, second, third]), "ppl")
    assert [len(segment) for segment in found.segments] == [2, 1]
    assert found.points[2].change is None
    assert found.points[2].broken == ("the model is sha256:m in run 2 and sha256:other in run 3",)
    for cell in second.run.manifest.cells:
        cell.spec["page_size"] = 32
    found = line(history([first, second]), "ppl")
    assert [len(segment) for segment in found.segments] == [1, 1]
    assert "page_size is 16 in run 1 and 32 in run 2" in found.points[1].broken[0]

    def run():
        both = latency()
        text = perplexity([210.0] * 4)
        both.tasks += [replace(task, spec=both.tasks[i].spec) for i, task in enumerate(text.tasks)]
        both.records += [replace(r, spec=both.records[i].spec) for i, r in enumerate(text.records)]
        return both

    result = history(runs_of(run(), run(), envs=({}, {"cpu": "Other"})))
    assert len(line(result, "itl_ratio").segments) == 2
    assert "times of two machines" in line(result, "itl_ratio").points[1].broken[0]
    assert len(line(result, "ppl").segments) == 1
    assert line(result, "ppl").points[1].change is not None

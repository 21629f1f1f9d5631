"""The release card: answers from the verdict and the rows, which never claim more than was shown."""

import math
from dataclasses import replace

import pytest

from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import UNITS
from kvbench.records.run import MergedFrom
from kvbench.records.shards import Shard, Share
from kvbench.report.sections.answers import WORTH
from kvbench.report.sections.candidate import REASONS, margin
from kvbench.report.view import build
from tests.factories.runs.reported import outcome
from tests.report.test_sentences import quality

INF = math.inf


def release(made):
    return build(made.judged).release


def answers(made, card=0):
    return dict(zip(("running", "safe", "worth", "change"), release(made).cards[card].answers, strict=True))


def reasons(made, card=0):
    return {question: answer.reason for question, answer in answers(made, card).items()}


def test_the_used_share_of_the_margin():
    for metric, unit, value, low, high, bounds, used, bound, limit in (
        # From no change to the end closer to its limit.
        ("ppl_delta_pct", "%", 0.2, -0.1, 0.5, (-1, 1), 0.5, 0.5, 1),
        ("ppl_delta_pct", "%", -0.2, -0.8, 0.1, (-1, 1), 0.8, -0.8, -1),
        ("kld_mean", "nat", 0.001, 0.0005, 0.002, (-INF, 0.005), 0.4, 0.002, 0.005),
        ("top1_agreement", "share", 0.98, 0.97, 0.99, (0.95, INF), 0.6, 0.97, 0.95),
        # The best is all 256 codes; no change fails, so the best is 0; no best rate: limit / value.
        ("health_codes_min", "codes", 178, None, None, (100, INF), 0.5, 178, 100),
        ("itl_ratio", "ratio", 0.5, 0.45, 0.57, (-INF, 0.95), 0.6, 0.57, 0.95),
        ("decode_tok_s", "tok/s", 200.0, None, None, (100, INF), 0.5, 200.0, 100),
    ):
        found = margin(Row("c", metric, "", value, UNITS[unit], 10, low, high), bounds)
        assert (found.used, found.bound, found.limit) == (pytest.approx(used), bound, limit)
        assert found.distance == pytest.approx(abs(limit - bound))
    for metric, unit, value, bounds in (
        ("kv_ratio", "ratio", 0.5, (0.5, 0.5)),
        ("kv_ratio", "ratio", 0.5, None),
        ("kld_mean", "nat", None, (-INF, 0.005)),
        ("kld_mean", "nat", math.nan, (-INF, 0.005)),
        ("top1_agreement", "share", 1.0, (-INF, 1.0)),  # no value is beyond
        ("health_bound_share", "ratio", 0.9999, (-INF, 1.0)),  # near 1 wherever rounding is used in full
    ):
        assert margin(Row("c", metric, "", value, UNITS[unit], 10), bounds) is None


def test_a_whole_run_is_ready_and_the_worst_candidate_is_first(passing, maker):
    found = release(passing)
    assert (found.word, found.tone, found.blockers) == ("Ready", "pass", ())
    a = answers(passing)
    assert [x.reason for x in a.values()] == ["verified", "passed", "smaller_but_slower", "weakest_check"]
    assert [x.tone for x in a.values()] == ["pass", "pass", "partial", "info"]
    (weak,) = a["safe"].figures
    assert (weak.variant, weak.shown.n) == ("wikitext2 stream512", "n = 292,883")
    assert {reason for row in WORTH.values() for reason in row.values()} <= set(REASONS)
    native, quantized = (passing.cell(kv_format=name).id for name in ("native", "int8_sym"))
    bad = outcome("precision", "fail", "native: layer 3 K is stored as int8.", cells=[native])
    assert reasons(passing.with_outcomes(bad))["worth"] == "baseline_failed"
    slow = outcome("itl_ratio at most 1", "fail", cells=[quantized], metric="itl_ratio", bounds=(-INF, 1.0))
    found = reasons(passing.with_outcomes(slow))
    assert (found["worth"], found["safe"]) == ("check_failed", "passed")
    made = maker(formats=("native", "int8_static", "int8_sym"))  # no check of the static one
    found = [(card.name, len(card.cells)) for card in release(made).cards]
    assert found == [("int8_static", 4), ("int8_sym", 4)]
    assert [reasons(made, i)["safe"] for i in range(2)] == ["no_limit", "passed"]


def partial(made):
    made = made.with_records(lambda r: replace(r, partial="5 of 9") if r.runner == "perplexity" else r)
    return made.with_rows(lambda r: replace(r, partial="5 of 9") if r.metric.startswith("ppl") else r)


def test_what_blocks_a_release_and_safety_claims_no_more_than_was_judged(passing, maker):
    every = frozenset(task.key for task in passing.manifest.tasks)
    unchecked = passing.with_outcomes(change=lambda o: o if o.metric in ("", "kv_ratio_16bit") else None)
    optional = replace(passing.verdict.outcomes[-1], status="not_evaluated", required=False)
    blocked = {
        "no gate was applied": passing.with_outcomes(change=lambda o: None if o.metric else o),
        "the weights are random": maker(fixed={"model_weights": "random"}),
        "this is a plumbing test": maker(fixed={"plumbing": True}),
        "prompts read fresh K/V, not the stored ones": maker(fixed={"prefill_reads": "fresh"}),
        "4 of 26 results are partial": partial(passing),
        "2 of 26 tasks have no record": replace(passing, records=passing.records[:-2]),
        "this is one shard of a matrix": passing.with_manifest(shard=Share(Shard(1, 1), every)),
        "merged shards differ": passing.with_manifest(merged=MergedFrom((), ("x differs",))),
        "1 of 15 checks were not evaluated": passing.with_outcomes(optional),
        "int8_sym: Is it safe? not judged": unchecked,  # nothing failed, but safety was not judged
        "every cell is a baseline, so there is no candidate": maker(formats=("native",)),
    }
    for blocker, made in blocked.items():
        found = release(made)
        assert (found.word, found.tone, build(made.judged).banner) == ("No release yet", "partial", "partial")
        assert blocker in found.blockers
    unjudged = passing.with_outcomes(change=lambda o: None if o.metric else o)
    claims = {
        "passed_on_part": partial(passing),
        "no_limit": unjudged,
        "tensors_only": quality(passing, metric="parity_max_abs", variant=""),
        "nothing_measured": replace(unjudged, rows=[]),
        "random_weights": maker(fixed={"model_weights": "random", "plumbing": True}),
        "plumbing": maker(fixed={"plumbing": True}),
    }
    assert {reason: reasons(made)["safe"] for reason, made in claims.items()} == {x: x for x in claims}

    def silent(record):  # a gate with `evidence: E2` lets this pass
        levels = [{**x, "state": "unverified"} if x["name"] == "E3" else x for x in record.evidence["levels"]]
        return replace(record, evidence={**record.evidence, "levels": levels})

    a = reasons(passing.with_records(lambda r: replace(r, evidence=None)))
    assert (a["running"], a["safe"], a["worth"]) == ("no_evidence", *["not_what_was_requested"] * 2)
    a = answers(passing.with_records(silent))
    assert (a["running"].reason, a["safe"].reason) == ("verified_in_part", "passed")
    assert a["running"].figures[0].shown.text == "E2"
    failing = passing.with_outcomes(change=lambda o: o if o.metric else replace(o, status="fail"))
    assert reasons(failing)["running"] == "precision_check_failed"


SLOW, FAST, OPEN, NO_INTERVAL = (1.2, 1.1, 1.3), (0.8, 0.7, 0.9), (0.95, 0.9, 1.1), (0.8, None, None)


def timed(made, *ratios, kv_ratio=0.5):
    """The run with these ITL ratios (value, low, high) of its cells, None if not measured; without TTFT."""
    given = iter(ratios)

    def change(row):
        if row.metric == "itl_ratio" and row.baseline and row.baseline != row.cell:
            ratio = next(given)
            return ratio and replace(row, value=ratio[0], low=ratio[1], high=ratio[2])
        if row.metric == "kv_ratio":
            return kv_ratio and replace(row, value=kv_ratio)
        return None if row.metric == "ttft_ratio" else row

    return made.with_rows(change)


# Of bytes and of whole intervals.
EXPECTED = [
    ((FAST,) * 4, 0.5, "smaller_and_faster"), ((SLOW,) * 4, 0.5, "smaller_but_slower"),
    ((OPEN,) * 4, 0.5, "smaller"), ((NO_INTERVAL,) * 4, 0.5, "smaller"),
    ((None,) * 4, 0.5, "smaller_speed_unknown"), ((FAST,) * 4, 1.1, "faster_only"),
    ((SLOW,) * 4, 1.1, "neither"), ((OPEN,) * 4, 1.0, "undecided"),
    ((None,) * 4, None, "nothing_measured"), ((FAST,) * 4, None, "faster_only"),
    ((SLOW,) * 4, None, "undecided"), ((SLOW, SLOW, OPEN, OPEN), 0.5, "smaller_but_slower"),
    ((SLOW, FAST, OPEN, OPEN), 0.5, "mixed"), ((FAST, FAST, FAST, OPEN), 0.5, "mixed"),
    ((FAST, FAST, FAST, None), 0.5, "mixed"), ((OPEN, OPEN, OPEN, NO_INTERVAL), 0.5, "smaller"),
]  # fmt: skip


def test_what_it_is_worth_and_in_how_many_cells(passing):
    for ratios, kv_ratio, reason in EXPECTED:
        assert reasons(timed(passing, *ratios, kv_ratio=kv_ratio))["worth"] == reason
    sentence = answers(timed(passing, SLOW, FAST, NO_INTERVAL, None))["worth"].sentence
    assert "slower in 1, faster in 1, too few samples in 1, not measured in 1 of 4 cells" in sentence

    def itl(*ratios):
        found = answers(timed(passing, *ratios))["worth"].figures
        return next(f for f in found if f.name == "itl_ratio")

    three = itl((1.1, 1.0, 1.2), (1.2, 1.1, 1.3), (1.3, 1.2, 1.4), None)
    assert (three.shown.text, three.note) == ("1.300", "the worst of 3 of 4 cells: 1.100 to 1.300")
    one = itl((1.1, 1.0, 1.2), None, None, None)
    assert (one.note, one.where is None) == ("measured in 1 of 4 cells", False)
    nan = itl((1.1, 1.0, 1.2), (math.nan, None, None), (1.3, 1.2, 1.4), (1.2, 1.1, 1.3))
    assert (nan.shown.text, nan.note) == ("NaN", "the worst of all 4 cells")
    assert replace(three, shown=replace(three.shown, n="n = 1")).counted == "pair of requests"

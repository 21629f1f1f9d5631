"""The release card: answers that follow from the verdict and the rows, and that never say more than was shown."""

import math
from dataclasses import replace

import pytest

from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import UNITS
from kvbench.records.run import MergedFrom
from kvbench.records.shards import Shard, Share
from kvbench.report.sections.room import room
from kvbench.report.view import build

INF = math.inf


def release(made):
    return build(made.judged).release


def answers(made, card=0):
    return dict(zip(("running", "safe", "worth", "change"), release(made).cards[card].answers, strict=True))


def edited(made, which, **fields):
    outcomes = tuple(replace(o, **fields) if o.check.startswith(which) else o for o in made.verdict.outcomes)
    return replace(made, verdict=replace(made.verdict, outcomes=outcomes))


def judged(made, code, word):
    return replace(made, verdict=replace(made.verdict, exit_code=code, word=word))


def partial(made):
    return made.with_records(
        lambda r: replace(r, partial="5 of 9 chunks") if r.runner == "perplexity" else r
    ).with_rows(lambda r: replace(r, partial="5 of 9 chunks") if r.metric.startswith(("ppl", "kld")) else r)


@pytest.mark.parametrize(
    ("metric", "unit", "value", "low", "high", "bounds", "used", "bound", "limit"),
    [
        ("ppl_delta_pct", "%", 0.2, -0.1, 0.5, (-1, 1), 0.5, 0.5, 1),  # from no change to the nearer end
        ("ppl_delta_pct", "%", -0.2, -0.8, 0.1, (-1, 1), 0.8, -0.8, -1),
        ("kld_mean", "nat", 0.001, 0.0005, 0.002, (-INF, 0.005), 0.4, 0.002, 0.005),
        ("top1_agreement", "share", 0.98, 0.97, 0.99, (0.95, INF), 0.6, 0.97, 0.95),
        (
            "health_codes_min",
            "codes",
            178,
            None,
            None,
            (100, INF),
            0.5,
            178,
            100,
        ),  # the best is all 256 codes
        (
            "itl_ratio",
            "ratio",
            0.5,
            0.45,
            0.57,
            (-INF, 0.95),
            0.6,
            0.57,
            0.95,
        ),  # no change breaks it: the way starts at 0
        (
            "decode_tok_s",
            "tok/s",
            200.0,
            None,
            None,
            (100, INF),
            0.5,
            200.0,
            100,
        ),  # no best rate: as many times the limit
    ],
)
def test_the_room_that_is_used_up(metric, unit, value, low, high, bounds, used, bound, limit):
    found = room(Row("c", metric, "", value, UNITS[unit], 10, low, high), bounds)
    assert (found.used, found.bound, found.limit) == (pytest.approx(used), bound, limit)
    assert found.distance == pytest.approx(abs(limit - bound))


@pytest.mark.parametrize(
    ("metric", "unit", "value", "bounds"),
    [
        ("kv_ratio", "ratio", 0.5, (0.5, 0.5)),  # exact
        ("kv_ratio", "ratio", 0.5, None),
        ("kld_mean", "nat", None, (-INF, 0.005)),
        ("kld_mean", "nat", math.nan, (-INF, 0.005)),
        ("top1_agreement", "share", 1.0, (-INF, 1.0)),  # nothing lies beyond
        ("health_bound_share", "ratio", 0.9999, (-INF, 1.0)),  # rounding in full is no weakness
    ],
)
def test_an_exact_limit_is_kept_or_not_and_never_near(metric, unit, value, bounds):
    assert room(Row("c", metric, "", value, UNITS[unit], 10), bounds) is None


def test_a_whole_run_that_passed_its_gate_is_ready(passing):
    found = release(passing)
    assert (found.word, found.tone, found.held) == ("Ready", "pass", ())
    assert found.sentence == "Every check of gates/int8.yaml passed, on the whole of the data."
    a = answers(passing)
    assert [(x.word, x.tone) for x in a.values()] == [
        ("yes", "pass"),
        ("yes", "pass"),
        ("bytes for time", "partial"),
        ("the weakest check", "info"),
    ]
    assert a["running"].sentence == "int8_sym was requested, resolved and is what ran in all 4 cells."
    seen, reads = a["running"].figures
    assert (seen.shown.text, seen.shown.n) == ("E3", "in 4 of 4 cells")
    assert reads.shown.text == "156,000 of 156,000 tokens"
    (weak,) = a["safe"].figures
    assert (weak.name, weak.variant, weak.shown.interval, weak.shown.n) == (
        "ppl_delta_pct",
        "wikitext2 stream512",
        "[-0.012, +0.175]",
        "n = 292,883",
    )
    assert weak.note == "limit within [-1, 1]; 17.5% of the room to it is used"
    assert a["worth"].sentence == (
        "KV cache: 74.22% fewer bytes than the baseline (51.56% of 16 bits). Decoding: slower in 4 of 4 cells. The first token: open in 4 of 4 cells."
    )
    assert [f.name for f in a["worth"].figures] == ["kv_ratio", "kv_ratio_16bit", "itl_ratio", "ttft_ratio"]
    assert (
        a["change"].sentence
        == "ppl_delta_pct within [-1, 1] is nearest to its limit: its interval's end at 0.1755 is 0.825 from 1."
    )


def test_lost_precision_is_no_and_what_was_measured_of_it_shows_nothing(failing):
    a = answers(failing)
    assert (a["running"].word, a["running"].tone) == ("no", "fail")
    assert "Layer 7 of 30 stores float32 where int8 was resolved" in a["running"].sentence
    assert (a["safe"].word, a["worth"].word) == ("no", "not shown")
    assert a["worth"].sentence.startswith(
        "What ran is not shown to be what was asked for, so these numbers are of something else."
    )
    assert a["change"].word == "a fix"
    assert a["change"].points[1] == "ppl_delta_pct is +2.410 % [+2.020, +2.810]; it has to be within [-1, 1]."
    assert release(failing).word == "Not ready"


def test_a_declared_fallback_is_no_even_where_a_gate_allows_it(passing):
    def fell(record):
        choice = {"requested": "int8_sym", "resolved": "native", "reason": "head_dim 72", "rejected": []}
        if "int8_sym" not in record.key:
            return record
        return replace(
            record,
            decision={**record.decision, "kv_format": choice},
            evidence={**record.evidence, "effective": "native"},
        )

    a = answers(passing.with_records(fell))
    assert (a["running"].word, a["running"].tone) == ("no", "fail")
    assert a["running"].sentence == "kv_format int8_sym was asked for, native ran: head_dim 72"


def test_no_evidence_is_not_measured_and_never_yes(passing):
    a = answers(passing.with_records(lambda r: replace(r, evidence=None)))
    assert (a["running"].word, a["running"].tone) == ("not measured", "incomplete")
    assert (a["safe"].word, a["worth"].word) == ("not shown", "not shown")


def test_evidence_that_ends_below_is_said_to_end_there(passing):
    def silent(record):  # a gate with `evidence: E2` lets this pass
        levels = [{**x, "state": "unverified"} if x["name"] == "E3" else x for x in record.evidence["levels"]]
        return replace(record, evidence={**record.evidence, "levels": levels})

    a = answers(passing.with_records(silent))
    assert (a["running"].word, a["running"].tone) == ("up to E2", "partial")
    assert a["running"].figures[0].shown.text == "E2"
    assert a["running"].sentence.endswith("Above E2 the evidence shows nothing, which the gate allows.")
    assert a["safe"].word == "yes"


def test_a_run_without_a_gate_is_no_release_and_safety_is_not_judged(passing):
    bare = replace(
        passing,
        verdict=replace(passing.verdict, outcomes=tuple(o for o in passing.verdict.outcomes if not o.metric)),
    )
    found = release(bare)
    assert (found.word, found.tone, found.held) == ("No release yet", "partial", ("no gate was judged",))
    a = answers(bare)
    assert (a["safe"].word, a["safe"].sentence) == (
        "not judged",
        "Quality was measured, but no check holds it to a limit.",
    )
    assert a["change"].word == "a gate"
    assert build(bare.judged).banner == "partial"


def test_random_weights_say_nothing_of_safety(maker):
    made = maker(fixed={"model_weights": "random", "plumbing": True})
    found = release(made)
    assert (found.word, found.held) == ("No release yet", ("the weights are random", "it is a plumbing run"))
    a = answers(made)
    assert (a["safe"].word, a["safe"].tone, a["safe"].figures) == ("not measured", "incomplete", ())


def test_a_part_of_the_data_is_safe_on_a_part(passing):
    found = release(partial(passing))
    assert (found.word, found.tone) == ("No release yet", "partial")
    assert found.held == ("4 of 26 results are partial",)
    assert answers(partial(passing))["safe"].word == "yes, on a part"


def test_an_unfinished_run_is_held_back(passing):
    made = replace(passing, records=passing.records[:-2])
    assert "2 of 26 tasks have no record" in release(made).held


def test_checks_of_tensors_alone_do_not_make_it_safe(passing):
    made = edited(
        passing,
        "ppl_delta_pct",
        check="parity_max_abs at most 1",
        metric="parity_max_abs",
        variant="",
        bounds=(-INF, 1.0),
    )
    a = answers(made)
    assert (a["safe"].word, a["safe"].tone) == ("in part", "partial")
    assert (
        a["safe"].sentence
        == "1 check on quality passed, all of tensors: no text that the model reads or writes was judged."
    )


def test_what_is_open_says_how_much_data_would_decide(passing):
    made = judged(
        edited(passing, "ppl_delta_pct", status="inconclusive", n_needed=500_000, mde=0.4), 4, "inconclusive"
    )
    a = answers(made)
    assert (a["safe"].word, a["safe"].tone) == ("open", "inconclusive")
    assert (a["change"].word, a["change"].points) == (
        "more data",
        ("ppl_delta_pct within [-1, 1]: 500,000 tokens would decide, if the value stays what it is.",),
    )
    assert release(made).word == "Undecided"
    none = answers(edited(made, "ppl_delta_pct", n_needed=None))["change"].points[0]
    assert (
        none
        == "ppl_delta_pct within [-1, 1]: so much data decides a true value 0.4 % from the limit; at the value that was found no number does."
    )


def test_a_required_result_that_is_missing_is_asked_for(passing):
    made = judged(
        edited(
            passing,
            "ppl_delta_pct",
            status="not_evaluated",
            value=None,
            sentence="ppl_delta_pct was not measured: no data.",
        ),
        3,
        "not_evaluated",
    )
    a = answers(made)
    assert (a["safe"].word, a["change"].word) == ("not shown", "the missing results")
    assert a["change"].points == ("ppl_delta_pct was not measured: no data.",)


@pytest.mark.parametrize(
    ("ratio", "bytes_", "word", "tone"),
    [
        ((0.8, 0.7, 0.9), 0.5, "yes", "pass"),
        ((1.2, 1.1, 1.3), 0.5, "bytes for time", "partial"),
        ((1.0, 0.9, 1.1), 0.5, "in bytes", "partial"),
        ((0.8, None, None), 0.5, "in bytes", "partial"),  # no interval decides nothing
        (None, 0.5, "in bytes", "partial"),
        ((0.8, 0.7, 0.9), 1.1, "in time", "partial"),
        ((1.2, 1.1, 1.3), 1.1, "no", "fail"),
        ((1.0, 0.9, 1.1), 1.0, "not shown", "inconclusive"),
        (None, None, "not measured", "incomplete"),
    ],
)  # fmt: skip
def test_what_it_is_worth_by_bytes_and_by_whole_intervals(passing, ratio, bytes_, word, tone):
    def change(row):
        if row.metric == "itl_ratio":
            return ratio and replace(row, value=ratio[0], low=ratio[1], high=ratio[2])
        if row.metric == "kv_ratio":
            return bytes_ and replace(row, value=bytes_)
        return None if row.metric == "ttft_ratio" else row

    a = answers(passing.with_rows(change))["worth"]
    assert (a.word, a.tone) == (word, tone)


SLOW, FAST, OPEN = (1.2, 1.1, 1.3), (0.8, 0.7, 0.9), (1.0, 0.9, 1.1)


def timed(passing, *ratios):
    """A run whose four cells have these ITL ratios, (value, low, high), None where not measured; no TTFT."""
    given = iter(ratios)

    def change(row):
        if row.metric == "itl_ratio" and row.baseline and row.baseline != row.cell:
            ratio = next(given)
            return ratio and replace(row, value=ratio[0], low=ratio[1], high=ratio[2])
        return None if row.metric == "ttft_ratio" else row

    return passing.with_rows(change)


@pytest.mark.parametrize(
    ("ratios", "word", "said"),
    [
        ((SLOW, SLOW, OPEN, OPEN), "bytes for time", "slower in 2, open in 2 of 4 cells"),
        ((SLOW, FAST, OPEN, OPEN), "in part", "slower in 1, faster in 1, open in 2 of 4 cells"),
        ((FAST, FAST, FAST, OPEN), "in part", "faster in 3, open in 1 of 4 cells"),
        ((FAST, FAST, FAST, None), "in part", "faster in 3, not measured in 1 of 4 cells"),
        ((OPEN, OPEN, OPEN, (0.8, None, None)), "in bytes", "open in 3, too few samples in 1 of 4 cells"),
    ],
)
def test_cells_that_differ_are_mixed_only_where_some_are_faster_and_some_slower(passing, ratios, word, said):
    a = answers(timed(passing, *ratios))["worth"]
    assert a.word == word
    assert f"Decoding: {said}." in a.sentence


def test_the_worst_of_the_cells_counts_those_of_the_candidate_and_has_no_range_beside_a_nan(passing):
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


def test_beside_a_baseline_that_failed_nothing_is_worth_it(passing, outcome):
    native = passing.cell(kv_format="native").id
    bad = outcome("precision", "", native, "", "fail", None, "", "native: layer 3 K is stored as int8.")
    a = answers(passing.with_verdict(bad, exit_code=1, word="fail"))["worth"]
    assert (a.word, a.tone) == ("not shown", "inconclusive")
    assert a.sentence == "What it is compared with failed: native: layer 3 K is stored as int8."


def test_a_failed_limit_on_time_is_not_worth_it(passing, outcome):
    cell = passing.cell(kv_format="int8_sym").id
    slow = outcome(
        "itl_ratio at most 1",
        "itl_ratio",
        cell,
        "",
        "fail",
        1.07,
        "at most 1",
        "itl_ratio is 1.07; broken.",
        bounds=(-INF, 1.0),
    )
    a = answers(passing.with_verdict(slow, exit_code=1, word="fail"))
    assert (a["worth"].word, a["safe"].word) == ("no", "yes")
    assert (
        a["worth"].sentence
        == "itl_ratio is 1.0700 [1.0412, 1.0993] on int8_sym · batch 1 · context 128; the limit is at most 1: broken."
    )


def test_each_candidate_has_a_card_of_its_own_and_the_gravest_is_first(maker):
    made = maker(formats=("native", "int8_static", "int8_sym"))
    assert [card.name for card in release(made).cards] == [
        "int8_static",
        "int8_sym",
    ]  # nobody judged the static one
    assert answers(made, 0)["safe"].word == "not judged"
    assert answers(made, 1)["safe"].word == "yes"
    assert all(len(card.cells) == 4 for card in release(made).cards)


def test_a_run_of_baselines_alone_has_no_candidate(maker):
    found = release(maker(formats=("native",)))
    assert found.cards == ()
    assert "every cell is a baseline, so there is no candidate" in found.held
    assert found.tone != "pass"


def test_answers_that_are_no_yes_hold_back_what_passed_every_check(passing):
    """A gate of bytes alone: nothing failed, and safety was not judged."""
    bytes_alone = tuple(o for o in passing.verdict.outcomes if not o.metric or o.metric == "kv_ratio_16bit")
    assert release(passing).word == "Ready"
    found = release(replace(passing, verdict=replace(passing.verdict, outcomes=bytes_alone)))
    assert found.word == "No release yet"
    assert any("Is it safe?" in said for said in found.held)


def test_shares_and_shards_that_differ_are_no_release(passing):
    every = [task.key for task in passing.manifest.tasks]
    share = {"shard": Share(Shard(1, 1), frozenset(every))}
    differ = {"merged": MergedFrom((), ("x differs",))}
    for manifest, said in ((share, "it is a share of a matrix"), (differ, "shards that were merged differ")):
        found = release(passing.with_manifest(**manifest))
        assert (found.word, found.tone) == ("No release yet", "partial")
        assert said in found.held


def test_checks_that_were_not_evaluated_are_not_every_check(passing):
    optional = replace(passing.verdict.outcomes[-1], status="not_evaluated", required=False)
    found = release(
        replace(passing, verdict=replace(passing.verdict, outcomes=(*passing.verdict.outcomes, optional)))
    )
    assert found.word == "No release yet"
    assert f"1 of {len(passing.verdict.outcomes) + 1} checks were not evaluated" in found.held

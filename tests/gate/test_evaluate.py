"""Verdicts on made-up runs: tasks without a result, impossible values, the gate's own checks, exit codes."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.gate.decide import Limits, broken, rule
from kvbench.gate.evaluate import Outcome, evaluate
from kvbench.gate.policy import Gate
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED, PASS, exit_code_of
from kvbench.records.run import Manifest, Run
from kvbench.stats.power import Spread
from tests.factories import verdicts
from tests.factories.runs.made import BASE, CAND, chunks, text_facts
from tests.factories.verdicts import RATIO, bare, check, judge, of, questions, scored, stored, with_values

PPL = check("ppl_delta_pct", -1, 1)
OPTIONAL = check("ppl_delta_pct", -1, 1, required=False)


def test_a_sound_run_passes_and_a_cell_of_which_nothing_ran_is_not_proven():
    verdict = judge(stored(), RATIO)
    assert (verdict.exit_code, verdict.word) == (0, PASS)
    assert [o.check for o in verdict.outcomes] == ["precision", "precision", "plausible", RATIO.name]
    assert [o.reason for o in verdict.outcomes] == ["verified", "verified", "plausible", "kept"]
    found = verdict.outcomes[-1]
    assert (found.cell, found.value, found.metric) == (CAND, 0.515625, "kv_ratio_16bit")
    verdict = bare(stored().change(CAND, status="error", error={"type": "E", "message": "m"}))
    assert verdict.exit_code == 3
    assert [o.reason for o in of(verdict, NOT_EVALUATED)] == ["no_evidence", "error"]


def test_what_is_not_available_or_partial_counts_only_where_a_required_check_needs_it():
    error = {"reason": "not_available", "message": "Get it with `make data`."}
    run = scored().change("", "perplexity", status="not_evaluated", error=error)
    assert (judge(run, RATIO).exit_code, judge(run, RATIO, OPTIONAL).exit_code) == (0, 0)
    verdict = judge(run, RATIO, PPL)
    assert (verdict.exit_code, verdict.outcomes[-1].reason) == (3, "not_measured")
    assert error["message"] in verdict.outcomes[-1].sentence
    run = scored().change(CAND, "perplexity", partial="first 6 chunks")
    verdict = judge(run, RATIO, PPL)
    assert (verdict.exit_code, verdict.outcomes[-1].reason) == (3, "partial")
    assert judge(run, RATIO, OPTIONAL).exit_code == 0
    assert judge(run, RATIO, PPL, allow_partial=True).exit_code == 0
    # an optional check counts only with a value
    verdict = judge(stored(), RATIO, check("ppl_delta_pct", -1, 1, required=False, variant=verdicts.TEXT))
    assert verdict.exit_code == 0
    assert (verdict.outcomes[-1].status, verdict.outcomes[-1].required) == (NOT_EVALUATED, False)
    assert judge(scored(2.0), RATIO, OPTIONAL).exit_code == 1


@pytest.mark.parametrize(
    ("mean_nll", "shown"), [(0.0, "1"), (-1e9, "0"), (math.nan, "nan"), (math.inf, "inf")]
)
def test_a23_t3_impossible_perplexities_fail_without_any_check(mean_nll, shown):
    """Native at 3.0 a token, the candidate at `mean_nll`."""
    sides = [(chunks((x * 10, 10), (x * 10, 10)), text_facts(20)) for x in (mean_nll, 3.0)]
    verdict = bare(stored().measure("perplexity", sides[0], sides[1], variant=verdicts.TEXT))
    assert verdict.exit_code == 1
    fault = next(o for o in of(verdict, FAIL) if o.metric == "ppl")
    assert (fault.check, fault.reason) == ("plausible", "implausible")
    assert f" is {shown}, " in fault.sentence


def test_a01_t2_92_274_688_bytes_under_int8_fail_whatever_the_evidence_says():
    """The evidence claims int8_sym; the bytes of the live tensors are native's."""
    native = {"payload": 4_194_304, "scales": 0, "dtype": "bfloat16"}
    run = stored(
        ({"layers": [layer | native for layer in verdicts.INT8_LAYERS[0]["layers"]]}, verdicts.INT8_LAYERS[1])
    )
    assert run.row("kv_bytes_total").value == 92_274_688
    for verdict in (bare(run), judge(run, RATIO)):
        assert verdict.exit_code == 1
        assert "kv_bytes_difference" in {o.metric for o in of(verdict, FAIL)}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("partial", [None, "6 chunks"])
def test_a23_t1_nan_fails_a_check_of_any_shape(value, partial):
    run = scored()
    rows = with_values(run, "ppl_delta_pct", value=value, partial=partial)
    for limit in (check("ppl_delta_pct", high=0.01), check("ppl_delta_pct", low=-5), PPL):
        verdict = judge(run, limit, rows=rows)
        assert (verdict.exit_code, verdict.outcomes[-1].reason) == (1, "not_finite")


@pytest.mark.parametrize(
    ("low", "high", "reason", "code"),
    [
        (-0.3, 0.6, "kept", 0),
        (0.1, 1.0, "kept", 0),
        (-0.5, 0.95, "underpowered", 4),  # within, but so wide that a violation could hardly have shown
        (-1.0, 1.0, "underpowered", 4),
        (-0.5, 1.1, "spans_limit", 4),
        (-2.0, 2.0, "spans_limit", 4),
        (0.9, 1.5, "spans_limit", 4),
        (1.1, 1.5, "broken", 1),
        (-9.0, -1.1, "broken", 1),
        (math.nan, math.nan, "spans_limit", 4),
        (None, None, "no_interval", 4),
    ],
)
def test_the_whole_interval_decides(low, high, reason, code):
    value = 0.5 if low is None or high is None or math.isnan(low) else (low + high) / 2
    run = scored()
    rows = with_values(run, "ppl_delta_pct", value=value, low=low, high=high, units=None)
    verdict = judge(run, PPL, rows=rows)
    assert (verdict.outcomes[-1].reason, verdict.exit_code) == (reason, code)


@settings(deadline=None)
@given(st.floats(-5, 5), st.floats(0, 5), st.floats(0, 5), st.floats(-5, 5), st.floats(0, 5))
def test_a_pass_leaves_nothing_of_the_interval_outside(value, down, up, low, width):
    limits, spread = Limits(low, low + width), Spread(value, value - down, value + up, "pt")
    status = rule(spread, 100, limits, broken(spread, limits), 1).status
    inside = low <= value - down and value + up <= low + width
    outside = value + up < low or value - down > low + width
    # Of an interval that ends a rounding error from its limit, the p-value may say otherwise.
    edge = min(abs(value + up - low), abs(value - down - low - width)) < 1e-9
    assert edge or status == (PASS if inside else FAIL if outside else INCONCLUSIVE)


@pytest.mark.parametrize("required", [True, False])
def test_required_false_forgives_neither_a_broken_check_nor_an_open_one(required):
    run = scored(spread=0.002)
    row = run.row("ppl_delta_pct")
    outside = check("ppl_delta_pct", row.high + 1, row.high + 2, required)
    open_ = check("ppl_delta_pct", (row.low + row.high) / 2, row.high + 1, required)
    assert [judge(run, RATIO, own).exit_code for own in (outside, open_)] == [1, 4]


def test_a_sample_too_small_for_half_a_point_is_inconclusive_with_what_it_could_have_found():
    """24 questions, none with another outcome: no fault is seen, and none under 15 points would be."""
    sides = [questions([[best, -2.0]] * 20 + [[-2.0, best]] * 4, [0], "cloze") for best in (-1.0, -1.1)]
    run = stored().measure("mcq", sides[0], sides[1], variant="cloze 0-shot")
    verdict = judge(run, check("mcq_delta_pt", -0.5, 0.5, kv_format="int8_sym"))
    (found,) = of(verdict, INCONCLUSIVE)
    assert (verdict.exit_code, found.reason) == (4, "spans_limit")
    assert found.mde == pytest.approx(100 * (1.959964 + 0.841621) * math.sqrt(2) / 26, rel=1e-6)
    assert found.n_needed == math.ceil((1.9599640 + 1.2815516) * math.sqrt(2) / 0.005 - 2) == 915
    for part in ("15.2 pt", "n=915 questions"):
        assert part in found.sentence


def test_a05_t3_t4_the_text_metric_and_one_bad_layer_outrank_the_tensors_mean():
    """Small reconstruction error, perplexity times 100."""
    case = {"name": "gqa", "max_abs": 1e-4, "cosine": 1.0, "bound": 1e-2}
    parity = ({"cases": [case], "steps": {"argmax_equal": [1] * 2048, "max_abs": [1e-4]}}, {"steps": 2048})
    run = scored(100.0).measure("parity", parity, parity)
    tensors = (check("parity_bound_share", high=1), check("steps_argmax_agreement", low=0.99))
    verdict = judge(run, *tensors, PPL)
    assert [o.status for o in verdict.outcomes if o.metric.startswith(("parity", "steps"))] == [PASS] * 4
    assert (verdict.outcomes[-1].status, verdict.exit_code) == (FAIL, 1)
    assert verdict.outcomes[-1].value == pytest.approx(9900)
    # one bad layer of 28 fails the worst-case check
    cases = [case | {"name": f"layer {i}", "max_abs": 5.0 if i == 3 else 1e-4} for i in range(28)]
    parity = ({"cases": cases, "steps": {}}, {})
    limit = check("parity_bound_share", high=1, kv_format="int8_sym")
    verdict = judge(stored().measure("parity", parity, parity), limit)
    assert (verdict.exit_code, verdict.outcomes[-1].value) == (1, 500)


@pytest.mark.parametrize(
    ("run", "limit", "reason"),
    [
        (stored, check("ppl_delta_pct", -1, 1, variant=verdicts.TEXT), "no_task"),
        (scored, check("ppl_delta_pct", -1, 1, variant="wikitext2 rows512"), "no_task"),
        (stored, check("kv_ratio", 0, 1, kv_format="fp8_e4m3"), "no_cell"),
        (stored, check("kv_ratio", 0, 1, kv_splits=None, batch=8), "no_cell"),
        (stored, check("kv_ratio", 0, 1, batch=True), "no_cell"),  # true is not 1
        (scored, check("ppl_delta_pct", -1, 1, kv_format="native"), "only_baselines"),
    ],
)
def test_a23_t2_a_check_that_nothing_answers_fails(run, limit, reason):
    verdict = judge(run(), RATIO, limit)
    assert (verdict.exit_code, verdict.outcomes[-1].status, verdict.outcomes[-1].reason) == (1, FAIL, reason)
    assert str(limit.where.get("variant", "")) in verdict.outcomes[-1].sentence


def test_a23_t6_a_gate_of_which_nothing_was_evaluated_is_no_pass():
    for verdict in (judge(stored()), judge(stored(), check("mcq_delta_pt", -1, 1, required=False))):
        assert verdict.exit_code == 3
        assert (verdict.outcomes[-1].check, verdict.outcomes[-1].reason) == ("gate", "nothing_evaluated")
    empty = Run(Manifest("empty", (), ()))
    assert [evaluate(gate, empty, []).exit_code for gate in (None, Gate("g", ()))] == [3, 3]


def test_cells_that_share_a_task_share_one_outcome():
    run = scored()
    run.add_cell(1, "cand2", "batch=4")
    run.share(1, "cand2")
    run.share(3, "cand2")
    verdict = judge(run, PPL)
    (found,) = [o for o in verdict.outcomes if o.metric == "ppl_delta_pct"]
    assert (found.cell, found.cells) == (CAND, (CAND, "cand2"))
    assert "on kv_format=int8_sym (and 1 more cell) is" in found.sentence
    assert [o.cell for o in verdict.outcomes if o.check == "precision"] == [BASE, CAND, "cand2"]


@pytest.mark.parametrize(
    ("statuses", "code", "shard"),
    [
        ([], 3, 0),
        ([PASS], 0, 0),
        ([PASS, FAIL, NOT_EVALUATED, INCONCLUSIVE], 1, 1),
        ([PASS, NOT_EVALUATED, INCONCLUSIVE], 3, 3),
        ([PASS, "optional", INCONCLUSIVE], 4, 0),
        ([PASS, "optional"], 0, 0),
        ([PASS, INCONCLUSIVE], 4, 0),
        (["optional"], 3, 0),
    ],
)
def test_exit_codes(statuses, code, shard):
    outcomes = [
        Outcome("c", NOT_EVALUATED if x == "optional" else x, "", "s", required=x != "optional")
        for x in statuses
    ]
    assert exit_code_of(outcomes) == code
    assert (
        exit_code_of(replace(o, required=o.required and o.status != INCONCLUSIVE) for o in outcomes) == code
    )
    assert exit_code_of(outcomes, whole=False) == shard

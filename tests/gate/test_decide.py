"""Verdicts that know when the data cannot decide: planted effects, A/A runs, many cells, narrow gates,
degenerate scorers.
"""

import math
import random
from pathlib import Path

import pytest

from kvbench.gate.decide import Limits, broken, corrected, rule
from kvbench.gate.evaluate import load
from kvbench.gate.policy import Check
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, PASS
from kvbench.metrics.collect import METRICS
from kvbench.stats.power import Spread
from tests.factories.runs.made import BASE, CAND, MadeRun, chunks, text_facts
from tests.factories.runs.texts import many, text
from tests.factories.verdicts import bare, check, judge, last, of, own, questions, scores

GATES = Path(__file__).parents[2] / "gates"


def answers(gained, lost, same, wrong=0):
    """Multiple choice of so many questions; `same` are right on both sides, `wrong` on neither."""
    sides = [(1, 0)] * gained + [(0, 1)] * lost + [(1, 1)] * same + [(0, 0)] * wrong

    def asked(side):
        picks = [i % 4 if right[side] else (i % 4 + 1) % 4 for i, right in enumerate(sides)]
        rest = [-2.0 - (i + side / 9) / len(sides) for i in range(len(sides))]
        rows = [[-1.0 if c == pick else low for c in range(4)] for pick, low in zip(picks, rest, strict=True)]
        return questions(rows, range(4))

    return MadeRun().measure("mcq", asked(0), asked(1), variant="mmlu 0-shot")


def test_the_n_that_is_said_to_be_needed_decides():
    limit = check("ppl_delta_pct", -0.08, 0.08)
    few = last(text(0.0, 40, 5, spread=0.002), limit)
    assert few.status == INCONCLUSIVE
    documents = math.ceil(few.n_needed / (4 * 511))
    assert 80 < documents < 160
    decided = [last(text(few.value / 100, documents, seed, spread=0.002), limit).status for seed in range(20)]
    assert decided.count(PASS) >= 14  # of 20 at 80%, fewer than 14 happen 1 time in 11


def test_a_gate_narrower_than_its_data_is_inconclusive_though_the_interval_keeps_it():
    """No question of 1,346 turned: the interval is within +-0.21 pt, and 0.29 pt would be seen with 80%
    power.
    """
    run = answers(0, 0, 1000, 346)
    narrow, wide = (last(run, check("mcq_delta_pt", -margin, margin)) for margin in (0.25, 0.35))
    assert (narrow.status, narrow.reason) == (INCONCLUSIVE, "underpowered")
    # Of 1,583 questions that do not turn it passes, of 1,582 it does not: without a discordant pair the error
    # goes with 1 / n.
    assert narrow.n_needed == 1583
    for n, status in ((1583, PASS), (1582, INCONCLUSIVE)):
        assert last(answers(0, 0, 1000, n - 1000), check("mcq_delta_pt", -0.25, 0.25)).status == status
    assert (wide.status, wide.mde) == (PASS, pytest.approx(0.294, abs=1e-3))


def test_an_effect_that_is_seen_needs_no_power_to_be_seen():
    """A gain of 2.5 points excludes no change, so it keeps a limit right below no change that 60 discordant
    pairs cannot resolve.
    """
    run = answers(45, 11, 1000, 304)
    assert last(run, check("mcq_delta_pt", -0.1)).status == PASS
    assert last(answers(28, 28, 1000, 304), check("mcq_delta_pt", -0.1)).status == INCONCLUSIVE


def test_a_looser_limit_never_loses_a_pass():
    """Over limits on either side of no change, for gains, no change and losses."""
    for value in (-0.3, 0.0, 0.2, 0.7):
        spread = Spread(value, value - 0.4, value + 0.4, "pt")
        before = FAIL
        for step in range(-20, 21):
            limits = Limits(-math.inf, step / 10, 0.0)
            status = rule(spread, 100, limits, broken(spread, limits), 1).status
            order = (FAIL, INCONCLUSIVE, PASS)
            assert order.index(status) >= order.index(before), (value, step)
            before = status


def test_a_metric_that_should_have_an_interval_and_has_none_is_not_judged_by_its_bare_value():
    run = text(0.0, 1, 0)
    for limit in (
        check("ppl_delta_pct", -50, 50),
        check("top1_agreement", low=0.1),
        check("kld_mean", high=9.0),
    ):
        outcome = last(run, limit)
        assert (outcome.status, outcome.reason, outcome.mde) == (INCONCLUSIVE, "no_interval", None)
        assert "1 document" in outcome.sentence


def test_the_tail_of_a_short_text_has_no_interval():
    """100 kept tokens of 5 documents say nothing of what one token in a thousand does."""
    run = text(0.0, 5, 0)
    assert (run.row("kld_p999").low, run.row("kld_p999").note) == (None, "too few tokens for an interval")
    assert last(run, check("kld_p999", high=1.0)).status == INCONCLUSIVE
    assert run.row("kld_p50").low is not None
    assert last(run, check("kld_max", high=1.0)).status == PASS


def test_an_exact_value_is_judged_by_itself():
    names = ("kv_bytes_difference", "ppl_delta_pct", "kld_p99", "top1_agreement", "mcq_delta_pt", "itl_ratio")
    assert [METRICS[name].sampled for name in names] == [False] + 5 * [True]


def cells(*p_values):
    return corrected(p_values, ["claim"] * len(p_values))


def test_holm_over_a_family_by_hand():
    """Of four, the smallest counts four times: 0.011 stays below 5%, 0.02 times three does not."""
    assert cells(0.011, 1.0, 0.02, 1.0) == [(0.044, 4), (1.0, 4), (pytest.approx(0.06), 4), (1.0, 4)]
    assert corrected([0.02, 0.03, 0.04], ["a", "b", "a"]) == [(0.04, 2), (0.03, 1), (0.04, 2)]


def test_a_cell_that_breaks_its_limit_by_chance_is_inconclusive_and_the_sentence_says_so():
    limits = Limits(-math.inf, 1.0, 0.0)
    spread = Spread(1.3, 1.05, 1.55, "pt")  # 2.35 standard errors above: p = 0.0187
    p = broken(spread, limits)
    assert (p, rule(spread, 9, limits, *cells(p)[0]).status) == (pytest.approx(0.0187, abs=1e-4), FAIL)
    one_of_six = rule(spread, 9, limits, *cells(p, *[1.0] * 5)[0])
    assert (one_of_six.status, one_of_six.reason) == (INCONCLUSIVE, "may_be_chance")
    assert "6 checks" in one_of_six.text
    assert "p = 0.11" in one_of_six.text


def test_over_many_cells_a_fail_is_corrected_and_a_pass_is_not():
    limit = check("ppl_delta_pct", -0.25, 0.25)
    assert [o.status for o in own(judge(many([0.0045]), limit))] == [FAIL]
    together = judge(many([0.0045, *[0.0] * 39]), limit)
    first, *others = own(together)
    assert (len(others), first.status, first.reason) == (39, INCONCLUSIVE, "may_be_chance")
    assert "with 40 checks of this claim" in first.sentence
    assert {o.status for o in others} <= {PASS, INCONCLUSIVE}
    assert (others[0].status, together.exit_code) == (PASS, 4)


def test_checks_with_the_same_metric_and_limit_are_one_family_wherever_they_are_written():
    run = many([0.0045, *[0.0] * 39])
    split = [
        check("ppl_delta_pct", -0.25, 0.25, batch=1),
        check("ppl_delta_pct", -0.25, 0.25, kv_format="int8_sym"),
    ]
    assert "with 80 checks" in own(judge(run, *split))[0].sentence
    other = check("ppl_delta_pct", -0.2, 0.2)
    assert "with 40 checks" in judge(run, split[0], other).outcomes[-80].sentence


@pytest.mark.parametrize("name", ["int8", "fp8_release", "fp8_quality"])
def test_two_runs_of_the_baseline_never_fail_a_gate_on_text(name):
    """60 pairs of runs that differ by rounding alone, few documents and many, judged by the gate's own
    limits.
    """
    gate = load(GATES / f"{name}.yaml")
    limits = [c for c in gate.checks if METRICS[c.metric].runner == "perplexity"]
    assert limits
    free = [Check(c.metric, {}, c.low, c.high, c.limit) for c in limits]
    for seed in range(60):
        run = text(0.0, (2, 5, 40)[seed % 3], seed, noise=3e-4, spread=1e-4)
        assert not of(judge(run, *free), FAIL), seed


@pytest.mark.parametrize("name", ["mlperf_99", "mlperf_999", "recovery_95", "fp8_release"])
def test_two_runs_of_the_baseline_never_fail_a_gate_on_questions(name):
    """Near-ties turn either way: up to 2% of the questions."""
    gate = load(GATES / f"{name}.yaml")
    limits = [c for c in gate.checks if c.metric in ("mcq_recovery", "mcq_delta_pt")]
    free = [Check(c.metric, {}, c.low, c.high, c.limit) for c in limits]
    for seed in range(60):
        draw = random.Random(seed)
        n = (24, 200, 1346)[seed % 3]
        turned = draw.randrange(n // 50 + 1)
        gained = sum(draw.random() < 0.5 for _ in range(turned))
        run = answers(gained, turned - gained, n * 7 // 10 - turned, n * 3 // 10)
        assert not of(judge(run, *free), FAIL), seed


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[math.nan] * 4] * 9, "the scores of all 9 questions are NaN"),
        ([[-1.5 - i] * 4 for i in range(9)], "all choices have the same score in each of 9 questions"),
        ([[-1.0, -2.0, -3.0, -4.0]] * 9, "all 9 questions have the same scores"),
        (
            [[-2.0, -3.0, -1.0 - i / 999, -4.0] for i in range(100)],
            "all 100 questions are answered with choice 2",
        ),
    ],
)
def test_a_degenerate_scorer_fails_without_any_check(rows, words):
    verdict = bare(scores(*rows))
    assert verdict.exit_code == 1
    faults = [o for o in verdict.outcomes if o.check == "degenerate"]
    assert [o.cell for o in faults] == [BASE, CAND]
    assert words in faults[0].sentence
    assert {o.reason for o in faults} == {"one_choice" if "choice 2" in words else "no_signal"}


def test_few_questions_with_one_letter_are_inconclusive_unless_the_baseline_tells_them_apart():
    stuck = [[-2.0, -3.0, -1.0 - i / 99, -4.0] for i in range(9)]
    fine = [*stuck[:8], [-1.0, -3.0, -2.0, -4.0]]

    def found(run):
        return [(o.status, o.cell) for o in bare(run).outcomes if o.check == "degenerate"]

    run = scores(*stuck)
    assert found(run) == [(INCONCLUSIVE, BASE), (INCONCLUSIVE, CAND)]
    run.records[0] = scores(*fine).records[0]
    assert found(run) == [(FAIL, CAND)]
    for other in (scores(*fine), scores(*fine[:5]), scores(*fine[:8], answers=[2, 2])):
        assert found(other) == []


def test_text_whose_every_token_is_as_likely_measures_nothing():
    lengths = (511, 511, 80, 511, 7, 511, 300, 511)
    flat = chunks(*((n * math.log(1000), n) for n in lengths)), text_facts(sum(lengths))
    verdict = bare(MadeRun().measure("perplexity", flat, flat, variant="wikitext2 rows512"))
    assert {(o.status, o.reason) for o in verdict.outcomes if o.check == "degenerate"} == {
        (FAIL, "no_signal")
    }


def test_a_ruling_of_an_endless_interval_is_open():
    ruling = rule(Spread(1.0, 0.5, math.inf, "ratio"), 3, Limits(-math.inf, 2.0), 1.0, 1)
    assert (ruling.status, ruling.reason, ruling.n_needed) == (INCONCLUSIVE, "spans_limit", None)
    assert "the interval has no end" in ruling.no_n

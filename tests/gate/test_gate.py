"""Verdicts on made-up runs: precision first, then what failed, what cannot be, and the policy's checks."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.gate.decide import Limits, broken, rule
from kvbench.gate.evaluate import Outcome, Verdict, evaluate, load
from kvbench.gate.policy import Check, Gate
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED, PASS, exit_code_of
from kvbench.matrix.resolve import Choice
from kvbench.metrics.collect import Row
from kvbench.records.record import LEVELS, MISMATCH, NOT_APPLICABLE, RUNGS, UNVERIFIED, VERIFIED, Level
from kvbench.records.run import Manifest, Run
from kvbench.stats.power import Spread
from tests.factories.runs.made import (
    BASE,
    CAND,
    MadeRun,
    chunks,
    decision,
    evidence,
    layers,
    storage_facts,
    text_facts,
)

NATIVE_LAYERS = (layers(22, 4_194_304, 0), storage_facts(4096, 92_274_688))
INT8_LAYERS = (layers(22, 2_097_152, 65_536), storage_facts(4096, 92_274_688))


def stored(candidate: Any = INT8_LAYERS, **spec: Any) -> MadeRun:
    """A sound run that measured storage: ratio 0.515625."""
    return MadeRun(context=4096, **spec).measure("storage", candidate, NATIVE_LAYERS)


def scored(factor: float = 1.001, spread: float = 0.0) -> MadeRun:
    """`stored` with perplexity: the candidate's is `factor` times the baseline's, `spread` apart between documents."""
    run = stored()
    native = chunks(*((300.0 + i, 100) for i in range(8)))
    shifts = [100 * (math.log(factor) + (spread if i % 2 else -spread)) for i in range(8)]
    own = chunks(*((300.0 + i + shift, 100) for i, shift in enumerate(shifts)))
    return run.measure(
        "perplexity", (own, text_facts(800)), (native, text_facts(800)), variant="wikitext2 stream512"
    )


def check(
    metric: str, low: float = -math.inf, high: float = math.inf, required: bool = True, **where: Any
) -> Check:
    return Check(metric, where, low, high, f"within [{low:g}, {high:g}]", required)


RATIO = check("kv_ratio_16bit", 0.515625, 0.515625, kv_format="int8_sym")


def judge(run: MadeRun, *checks: Check, **options: Any) -> Verdict:
    return evaluate(Gate("made", checks, **options), run.run, run.rows())


def bare(run: MadeRun) -> Verdict:
    return evaluate(None, run.run, run.rows())


def of(verdict: Verdict, status: str) -> list[Outcome]:
    return [outcome for outcome in verdict.outcomes if outcome.status == status]


def test_a_sound_run_passes() -> None:
    verdict = judge(stored(), RATIO)
    assert (verdict.exit_code, verdict.word) == (0, PASS)
    assert [o.check for o in verdict.outcomes] == ["precision", "precision", "plausible", RATIO.name]
    assert verdict.outcomes[1].sentence == (
        "kv_format=int8_sym: int8_sym is requested, resolved and effective, verified by E1, E2, E3, E3-layers, E3-pages, E3-prefill, "
        "E3-reads, E4, E5, E1-weights, E2-weights, E3-weights, E4-weights, E5-weights in storage."
    )
    last = verdict.outcomes[-1]
    assert (last.cell, last.value, last.metric) == (CAND, 0.515625, "kv_ratio_16bit")
    assert last.sentence == (
        "kv_ratio_16bit on kv_format=int8_sym is 0.515625 (n=22); the limit is within [0.515625, 0.515625]: kept."
    )


# precision


def test_a01_t1_a_dropped_format_fails_whatever_the_numbers_and_the_gate() -> None:
    level = Level("E1", MISMATCH, "layer 0 stores float32 where int8 is due")
    run = stored().change(CAND, evidence=evidence("native", level))
    for verdict in (
        bare(run),
        judge(run),
        judge(run, RATIO),
        judge(run, RATIO, allow_partial=True, allow_fallback=True),
    ):
        assert verdict.exit_code == 1
        (fault,) = of(verdict, FAIL)
        assert (fault.check, fault.cell, fault.required) == ("precision", CAND, True)
        assert fault.sentence == (
            "kv_format=int8_sym: mismatch: int8_sym was resolved, the evidence shows native. "
            "E1: layer 0 stores float32 where int8 is due (seen in storage)"
        )
        assert verdict.outcomes.index(fault) < 2


def test_quantized_weights_of_which_the_evidence_says_nothing_fail() -> None:
    run = stored()
    choice = {
        "requested": "fp8_block128",
        "resolved": "fp8_block128",
        "reason": "requested",
        "rejected": [],
        "sentence": "",
    }
    run.cells[1].spec["weights"] = "fp8_block128"
    run.tasks[1].spec["weights"] = "fp8_block128"
    silent = [Level(x, NOT_APPLICABLE if x.endswith("-weights") else VERIFIED, "said so") for x in LEVELS]
    whole = decision("int8_sym") | {"weights": choice}
    spec = {**run.tasks[1].spec}
    run.change(
        CAND, spec=spec, decision=whole, evidence=evidence("int8_sym", *silent, weights="fp8_block128")
    )
    (fault,) = of(bare(run), FAIL)
    assert (
        "unverified: E1-weights, E2-weights, E3-weights, E4-weights, E5-weights say nothing" in fault.sentence
    )


def test_a_baseline_that_is_not_native_fails() -> None:
    run = stored()
    run.cells[1] = replace(run.cells[1], baseline=CAND)
    faults = of(bare(run), FAIL)
    assert any(
        "the baseline that it is compared with is not native: kv_format int8_sym." in f.sentence
        for f in faults
    )


def test_a01_t3_the_sentence_names_the_layer() -> None:
    levels = (Level("E1", MISMATCH, "layer 7 of 22 is native"), Level("E3", VERIFIED, "pages are read"))
    run = stored().change(CAND, evidence=evidence("mixed", *levels))
    assert "E1: layer 7 of 22 is native" in of(bare(run), FAIL)[0].sentence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"evidence": None}, "the record carries no evidence"),
        ({"decision": None}, "the record holds no decision"),
        (
            {"evidence": evidence("native")},
            "the evidence shows native. The engine was made for native: the decision did not reach the engine.",
        ),
        (
            {"evidence": evidence("int8_sym", Level("E3", UNVERIFIED, "no token was read"))},
            "E3: no token was read",
        ),
        (
            {"evidence": evidence("int8_sym", Level("E1", NOT_APPLICABLE, "-"))},
            "unverified: int8_sym was resolved",
        ),
        (
            {"decision": decision("native"), "evidence": evidence("native")},
            "the matrix asks for kv_format int8_sym",
        ),
    ],
)
def test_what_is_not_proven_fails(change: dict[str, Any], words: str) -> None:
    verdict = judge(stored().change(CAND, **change), RATIO, allow_fallback=True)
    assert verdict.exit_code == 1
    (fault,) = of(verdict, FAIL)
    assert fault.check == "precision"
    assert words in fault.sentence


@pytest.mark.parametrize("level", [x for x in LEVELS if not x.endswith("-weights")])
def test_a_level_that_says_it_does_not_apply_shows_nothing(level: str) -> None:
    """But a labelled mode that reads no prompt back, and a runner that makes no reads."""
    run = stored().change(CAND, evidence=silent_above("E5", **{level.replace("-", "_"): NOT_APPLICABLE}))
    may = level in ("E3-prefill", "E3-reads")
    assert judge(run, RATIO).exit_code == (0 if may else 1)
    if not may:
        assert f"unverified: {level} say that they do not apply" in of(judge(run, RATIO), FAIL)[0].sentence
        assert judge(run, RATIO, evidence="E1").exit_code == int(level == "E1")


def test_a_scale_that_is_not_its_sources_fails_though_every_level_is_verified() -> None:
    said = "unknown: not what was asked for"
    own = next(r for r in stored().records if r.key.endswith(CAND))
    run = stored().change(CAND, facts={**own.facts, "scale_kind": "unknown", "scale_source": said})
    (fault,) = of(judge(run, RATIO), FAIL)
    assert fault.sentence == f"kv_format=int8_sym: mismatch: {said} (seen in storage)"


def test_a_text_that_was_compared_with_itself_was_not_compared() -> None:
    own = next(r for r in scored().records if r.key.endswith(CAND) and r.runner == "perplexity")
    itself = {**own.samples, "native_chunks": own.samples["chunks"]}
    nothing = {**own.samples, "kld_tokens": [0.0] * 800}
    for samples, words in (
        (itself, "it was compared with itself"),
        (nothing, "all 800 divergences from native are 0"),
    ):
        verdict = judge(scored().change(CAND, "perplexity", samples=samples), RATIO)
        assert verdict.exit_code == 1
        assert any(o.check == "precision" and words in o.sentence for o in of(verdict, FAIL))
    assert (
        judge(
            scored().change(CAND, "perplexity", samples={**own.samples, "kld_tokens": [0.0, 1e-9] * 400}),
            RATIO,
        ).exit_code
        == 0
    )


@pytest.mark.parametrize(
    ("cell", "requested", "resolved", "reason", "fallback", "said"),
    [
        (
            BASE,
            "native",
            "int8_sym",
            "head_dim",
            "allow",
            "nothing falls back from native, so what should be native is quantized",
        ),
        (
            CAND,
            "int8_sym",
            "native",
            "requested",
            "allow",
            "with the reason of a request that was kept: it was dropped on the way",
        ),
        (
            CAND,
            "int8_sym",
            "native",
            "head_dim",
            "refuse",
            "(head_dim), and the matrix allows no fallback: it was not declared",
        ),
    ],
)
def test_no_gate_allows_a_fallback_that_was_not_declared(
    cell: str, requested: str, resolved: str, reason: str, fallback: str, said: str
) -> None:
    decided = decision(requested, resolved, reason)
    run = stored(fallback=fallback).change(cell, decision=decided, evidence=evidence(resolved))
    verdict = judge(run, RATIO, allow_fallback=True)
    assert verdict.exit_code == 1
    assert said in of(verdict, FAIL)[0].sentence


def silent_above(rung: str, **levels: str) -> dict[str, Any]:
    """Evidence of int8_sym that is verified up to a rung and unverified above; levels: other states, E3_reads for E3-reads."""
    named = {name.replace("_", "-"): state for name, state in levels.items()}
    return evidence(
        "int8_sym",
        *(
            Level(x, named.get(x, VERIFIED if x.split("-")[0] <= rung else UNVERIFIED), "it says so")
            for x in LEVELS
        ),
    )


@pytest.mark.parametrize("rung", RUNGS)
def test_a_gate_names_the_rung_that_must_be_verified(rung: str) -> None:
    """What stands above it may show nothing, and is named; without a word on it every rung is due."""
    run = stored().change(CAND, evidence=silent_above(rung))
    verdict = judge(run, RATIO, evidence=rung)
    assert verdict.exit_code == 0
    above = [x for x in LEVELS if x.split("-")[0] > rung]
    said = (
        f"; unverified, which the gate allows above {rung}: {', '.join(above)}." if above else "in storage."
    )
    assert verdict.outcomes[1].sentence.endswith(said)
    for stricter in (x for x in RUNGS if x > rung):
        assert judge(run, RATIO, evidence=stricter).exit_code == 1
    assert (judge(run, RATIO).exit_code, bare(run).exit_code) == ((0, 0) if rung == "E5" else (1, 1))


@pytest.mark.parametrize("level", LEVELS)
def test_a_contradiction_fails_on_any_rung_and_a_silent_level_on_the_rungs_that_are_due(level: str) -> None:
    named = level.replace("-", "_")
    contradicted = stored().change(CAND, evidence=silent_above("E1", **{named: MISMATCH}))
    (fault,) = of(judge(contradicted, RATIO, evidence="E1"), FAIL)
    assert (
        f"mismatch: int8_sym was resolved, the evidence shows int8_sym. {level}: it says so" in fault.sentence
    )
    silent = stored().change(CAND, evidence=silent_above("E5", **{named: UNVERIFIED}))
    for rung in RUNGS:
        assert judge(silent, RATIO, evidence=rung).exit_code == int(level.split("-")[0] <= rung)
    lacking = silent_above("E5")
    lacking["levels"] = [x for x in lacking["levels"] if x["name"] != level]
    run = stored().change(CAND, evidence=lacking)
    for rung in RUNGS:
        assert judge(run, RATIO, evidence=rung).exit_code == int(level.split("-")[0] <= rung)


@pytest.mark.parametrize(
    ("state", "silent", "rung", "code"),
    [
        (UNVERIFIED, ["E4", "E5"], "E3", 0),
        (UNVERIFIED, ["E4", "E5"], "E4", 1),
        (UNVERIFIED, ["E5", "E3-layers"], "E3", 1),
        (UNVERIFIED, [], "E1", 1),  # it does not say on which rung
        (MISMATCH, ["E5"], "E1", 1),
    ],
)
def test_the_native_arm_stands_on_the_rungs_that_are_unverified_in_it(
    state: str, silent: list[str], rung: str, code: int
) -> None:
    levels = [Level(x, VERIFIED, "-") for x in LEVELS]
    arm = Level("native-arm", state, "The native arm is not native: E4 is silent", {"unverified": silent})
    run = stored().change(CAND, evidence=evidence("int8_sym", *levels, arm))
    assert judge(run, RATIO, evidence=rung).exit_code == code


def test_the_baseline_must_be_native_itself() -> None:
    run = stored().change(BASE, evidence=evidence("int8_sym", Level("E1", MISMATCH, "layer 0 is int8")))
    (fault,) = of(bare(run), FAIL)
    assert (fault.cell, "layer 0 is int8" in fault.sentence) == (BASE, True)


def test_one_bad_record_among_good_ones_fails_the_cell() -> None:
    run = scored().change(
        CAND, "perplexity", evidence=evidence("int8_sym", Level("E3", MISMATCH, "pages are not read"))
    )
    (fault,) = of(judge(run, RATIO), FAIL)
    assert fault.sentence.endswith("E3: pages are not read (seen in perplexity)")


def test_weights_and_backend_are_part_of_the_precision() -> None:
    run = stored()
    run.cells[1].spec["weights"] = "fp8_block128"
    assert (
        "the matrix asks for weights fp8_block128, but the resolver was asked for native"
        in of(bare(run), FAIL)[0].sentence
    )


def test_dequantized_weights_are_not_effective_whatever_the_request_says() -> None:
    run = stored()
    run.cells[1].spec["weights"] = "fp8_block128"
    asked = decision("int8_sym")
    asked["weights"] = {**asked["weights"], "requested": "fp8_block128", "resolved": "fp8_block128"}
    run.change(CAND, decision=asked)
    (fault,) = of(bare(run), FAIL)
    assert "fp8_block128 was resolved, the evidence shows native" in fault.sentence
    run.change(CAND, evidence=evidence("int8_sym", weights="fp8_block128"))
    verdict = bare(run)
    assert verdict.exit_code == 0
    assert (
        "int8_sym with fp8_block128 weights is requested, resolved and effective"
        in verdict.outcomes[1].sentence
    )


def test_a_sample_too_small_for_half_a_point_is_inconclusive_and_says_what_it_could_have_found() -> None:
    """24 questions, none with another outcome: no fault is seen, and none under 15 points would be."""

    def asked(best: float) -> tuple[dict[str, Any], dict[str, Any]]:
        scores = [[best, -2.0]] * 20 + [[-2.0, best]] * 4
        questions = [
            {"id": i, "subject": "s", "answer": 0, "scores": pair, "tokens": [1, 1], "chars": [4, 4],
             "skipped": None, "truncated": False} for i, pair in enumerate(scores)]  # fmt: skip
        facts = {"task": "cloze", "shots": 0, "choice_ids": [], "prompt_policy": "raw", "bos": "none"}
        return {"questions": questions}, {**facts, "total": 24, "data_sha": "d"}

    run = stored().measure("mcq", asked(-1.0), asked(-1.1), variant="cloze 0-shot")
    verdict = judge(run, check("mcq_delta_pt", -0.5, 0.5, kv_format="int8_sym"))
    assert verdict.exit_code == 4
    (outcome,) = of(verdict, INCONCLUSIVE)
    assert outcome.sentence.endswith(
        "so more data must decide (0 gained, 0 lost of 24 paired; not worse by more than 11 pt, equivalent within 11 pt (one-sided "
        "tests at 2.5%); minimum detectable effect: 15.2 pt from the limit; at this value n=915 questions would decide)."
    )
    assert outcome.mde == pytest.approx(100 * (1.959964 + 0.841621) * math.sqrt(2) / 26, rel=1e-6)
    assert outcome.n_needed == math.ceil((1.9599640 + 1.2815516) * math.sqrt(2) / 0.005 - 2)


def identical(**spec: Any) -> MadeRun:
    """`scored` with a candidate whose losses are the native ones, bit for bit."""
    run = MadeRun(**spec).measure("storage", INT8_LAYERS, NATIVE_LAYERS)
    samples = (chunks((300.0, 100), (310.0, 100)), text_facts(200))
    return run.measure("perplexity", samples, samples, variant="wikitext2 stream512")


def test_a01_text_that_equals_native_bit_for_bit_was_not_quantized() -> None:
    verdict = judge(identical(), check("ppl_delta_pct", -1, 1))
    assert verdict.exit_code == 1
    (fault,) = of(verdict, FAIL)
    assert fault.sentence == (
        "kv_format=int8_sym: E5: all 2 numbers equal the native ones bit for bit, which int8_sym cannot give: "
        "nothing read a quantized cache. (seen in perplexity)"
    )


@pytest.mark.parametrize(
    "spec", [{"prefill_reads": "fresh"}, {"model_weights": "random"}, {"kv_format": "native"}]
)
def test_text_that_may_equal_native_is_no_fault(spec: dict[str, Any]) -> None:
    assert not of(bare(identical(**spec)), FAIL)


FALLBACK = {"decision": decision("int8_sym", "native", "mla_not_validated"), "evidence": evidence("native")}


def test_a_declared_fallback_fails_unless_the_gate_allows_it() -> None:
    run = stored(NATIVE_LAYERS, fallback="allow").change(CAND, **FALLBACK)
    for verdict in (bare(run), judge(run), judge(run, allow_partial=True)):
        (fault,) = of(verdict, FAIL)
        assert "kv_format int8_sym fell back to native: mla_not_validated" in fault.sentence
    verdict = judge(run, check("kv_ratio", 1, 1), allow_fallback=True)
    assert verdict.exit_code == 0
    assert (
        "a declared fallback, which the gate allows: kv_format int8_sym fell back to native: mla_not_validated"
        in (verdict.outcomes[1].sentence)
    )


def made_on(requested: str, resolved: str, reason: str) -> MadeRun:
    """`stored` on a backend."""
    backend = asdict(Choice(requested, resolved, reason))
    run = stored(backend=requested, fallback="allow")
    for cell, kv_format in ((BASE, "native"), (CAND, "int8_sym")):
        run.change(cell, decision={**decision(kv_format), "backend": backend})
    return run


@pytest.mark.parametrize("resolved", ["torch", "triton"])
def test_what_auto_becomes_is_no_fallback(resolved: str) -> None:
    verdict = judge(made_on("auto", resolved, "no_gpu"), RATIO)
    assert (verdict.exit_code, verdict.word) == (0, PASS)


def test_a_backend_that_fell_back_fails_unless_the_gate_allows_it() -> None:
    run = made_on("triton", "torch", "head_dim")
    verdict = judge(run, RATIO)
    assert verdict.exit_code == 1
    assert {(o.cell, o.check) for o in of(verdict, FAIL)} == {(BASE, "precision"), (CAND, "precision")}
    assert (
        "backend triton fell back to torch: head_dim. Set allow_fallback: true"
        in of(verdict, FAIL)[0].sentence
    )
    allowed = judge(run, RATIO, allow_fallback=True)
    assert allowed.exit_code == 0
    assert "a declared fallback, which the gate allows: backend triton" in allowed.outcomes[0].sentence


def test_a_backend_that_the_resolver_was_not_asked_for_fails() -> None:
    run = made_on("triton", "triton", "requested")
    backend = asdict(Choice("torch", "torch", "requested"))
    run.change(CAND, decision={**decision("int8_sym"), "backend": backend})
    (fault,) = of(judge(run, RATIO, allow_fallback=True), FAIL)
    assert "asks for backend triton, but the resolver was asked for torch" in fault.sentence


def test_an_allowed_fallback_must_still_be_what_ran() -> None:
    run = stored(fallback="allow").change(CAND, decision=FALLBACK["decision"], evidence=evidence("int8_sym"))
    assert (
        "native was resolved, the evidence shows int8_sym"
        in of(judge(run, allow_fallback=True), FAIL)[0].sentence
    )


@pytest.mark.parametrize("required", [True, False])
@settings(deadline=None)
@given(data=st.data())
def test_no_policy_saves_an_unproven_run(required: bool, data: st.DataObject) -> None:
    """Whatever the options and however many checks pass, the precision fault decides."""
    run = stored().change(CAND, evidence=evidence("native", Level("E1", MISMATCH, "layer 0 is native")))
    own = data.draw(
        st.lists(st.sampled_from([RATIO, check("kv_bytes_difference", 0, 0, required)]), max_size=3)
    )
    options = {name: data.draw(st.booleans()) for name in ("allow_partial", "allow_fallback")}
    verdict = judge(run, *own, **options)
    assert verdict.exit_code == 1
    assert verdict.outcomes[1].check == "precision"
    assert verdict.outcomes[1].status == FAIL


# tasks without a result


def test_a_crashed_task_is_exit_3_with_its_message() -> None:
    run = scored().change(
        CAND, "perplexity", status="error", error={"type": "OutOfMemoryError", "message": "no room"}
    )
    verdict = judge(run, RATIO)
    assert verdict.exit_code == 3
    (outcome,) = of(verdict, NOT_EVALUATED)
    assert (outcome.check, outcome.cell, outcome.required) == ("cell error", CAND, True)
    assert (
        outcome.sentence
        == "perplexity wikitext2 stream512 on kv_format=int8_sym: error: no room (OutOfMemoryError)"
    )


def test_a_refused_task_is_exit_3_with_its_reason() -> None:
    error = {"reason": "invalid_context", "message": "4096 tokens do not fit 2048."}
    verdict = judge(scored().change(CAND, "perplexity", status="refused", error=error), RATIO)
    assert verdict.exit_code == 3
    assert "refused: 4096 tokens do not fit 2048. (invalid_context)" in of(verdict, NOT_EVALUATED)[0].sentence


def test_what_is_not_available_counts_only_where_a_required_check_needs_it() -> None:
    error = {"reason": "not_available", "message": "Get it with `make data`."}
    run = scored().change("", "perplexity", status="not_evaluated", error=error)
    assert judge(run, RATIO).exit_code == 0
    assert judge(run, RATIO, check("ppl_delta_pct", -1, 1, required=False)).exit_code == 0
    verdict = judge(run, RATIO, check("ppl_delta_pct", -1, 1))
    assert verdict.exit_code == 3
    assert verdict.outcomes[-1].sentence == (
        "ppl_delta_pct of wikitext2 stream512 on kv_format=int8_sym was not measured: "
        "not evaluated: Get it with `make data`."
    )


@pytest.mark.parametrize("required", [True, False])
def test_required_false_forgives_neither_a_broken_check_nor_an_open_one(required: bool) -> None:
    run = scored(spread=0.002)
    (row,) = [r for r in run.rows() if r.metric == "ppl_delta_pct" and r.cell == CAND]
    assert row.low is not None
    assert row.high is not None
    broken = check("ppl_delta_pct", row.high + 1, row.high + 2, required)
    open_ = check("ppl_delta_pct", (row.low + row.high) / 2, row.high + 1, required)
    assert [judge(run, RATIO, own).exit_code for own in (broken, open_)] == [1, 4]


def test_a_task_that_did_not_run_is_exit_3() -> None:
    run = scored()
    run.records.pop()
    verdict = judge(run, RATIO)
    assert verdict.exit_code == 3
    assert of(verdict, NOT_EVALUATED)[0].check == "not run"


def test_a_cell_of_which_nothing_ran_is_not_proven() -> None:
    run = stored().change(CAND, status="error", error={"type": "E", "message": "m"})
    verdict = bare(run)
    assert verdict.exit_code == 3
    assert [o.check for o in of(verdict, NOT_EVALUATED)] == ["precision", "cell error"]


def test_a_failure_outranks_an_error() -> None:
    run = scored().change(CAND, "perplexity", status="error", error={"type": "E", "message": "m"})
    assert judge(run, check("kv_ratio_16bit", 0.1, 0.2, kv_format="int8_sym")).exit_code == 1


# values that cannot be


def nll(value: float) -> MadeRun:
    """Native at 3.0 a token, the candidate at `value`."""
    own, native = chunks((value * 10, 10), (value * 10, 10)), chunks((30.0, 10), (30.0, 10))
    return stored().measure(
        "perplexity", (own, text_facts(20)), (native, text_facts(20)), variant="wikitext2 stream512"
    )


@pytest.mark.parametrize(
    ("mean_nll", "shown"), [(0.0, "1"), (-1e9, "0"), (math.nan, "nan"), (math.inf, "inf")]
)
def test_a23_t3_impossible_perplexities_fail_without_any_check(mean_nll: float, shown: str) -> None:
    verdict = bare(nll(mean_nll))
    assert verdict.exit_code == 1
    fault = next(o for o in of(verdict, FAIL) if o.metric == "ppl")
    assert fault.check == "plausible"
    assert f" is {shown}, which cannot be" in fault.sentence


def timed(ratio: float, pairs: int = 2) -> MadeRun:
    def arm(name: str, order: int, scale: float, kv_format: str = "native") -> dict[str, Any]:
        gaps = [10.0 * scale] * 3
        return {
            "arm": name,
            "order": order,
            "ttft_ms": 50.0 * scale,
            "itl_ms": gaps,
            "prefill_tokens": 4096,
            "batch": 1,
            "new_tokens": 4,
            "ran": {"kv_format": kv_format, "weights": "native", "computed_tokens": 4096 + 15},
        }

    own = [
        arm("candidate", 0, ratio, "int8_sym"),
        arm("baseline", 1, 1.0),
        arm("baseline", 2, 1.0),
        arm("candidate", 3, ratio, "int8_sym"),
    ][: 2 * pairs]
    native = [arm("candidate", 0, 1.0), arm("candidate", 1, 1.0)]
    warm = [{"arm": "candidate", "ttft_ms": 99.0, "itl_ms": []}]
    return stored().measure(
        "latency", ({"arms": own, "warmup": warm}, {}), ({"arms": native, "warmup": warm}, {})
    )


def test_a23_t3_latency_97_percent_below_the_baseline_is_implausible() -> None:
    verdict = judge(timed(0.03), check("itl_ratio", high=1.2))
    assert verdict.exit_code == 1
    assert {o.metric for o in of(verdict, FAIL)} == {"ttft_ratio", "itl_ratio"}
    assert judge(timed(0.5), check("itl_ratio", high=1.2)).exit_code == 0


def test_one_pair_of_requests_is_enough_for_an_impossible_time_and_the_sentence_says_how_to_measure_more() -> (
    None
):
    verdict = bare(timed(0.03, pairs=1))
    assert verdict.exit_code == 1
    faults = of(verdict, FAIL)
    assert {o.metric for o in faults} == {"ttft_ratio", "itl_ratio"}
    assert all("--set runners.latency.repeats=10" in o.sentence for o in faults)


def test_a01_t2_bytes_off_the_formula_fail_without_any_check() -> None:
    run = MadeRun().measure(
        "storage", (layers(22, 2_097_152, 65_536, extra=2_097_152), INT8_LAYERS[1]), NATIVE_LAYERS
    )
    verdict = bare(run)
    (fault,) = of(verdict, FAIL)
    assert fault.sentence == (
        "kv_bytes_difference on kv_format=int8_sym is 2,097,152 B, which cannot be: a possible value lies within [0, 0] "
        "(1 of 22 layers differ from the formula, the first is layer 7: payload +2,097,152 B, scales +0 B)."
    )


def test_a01_t2_92_274_688_bytes_under_int8_fail_whatever_the_evidence_says() -> None:
    """The evidence claims int8_sym; the bytes of the live tensors are native's."""
    native = [
        {**layer, "payload": 4_194_304, "scales": 0, "dtype": "bfloat16"}
        for layer in INT8_LAYERS[0]["layers"]
    ]
    run = stored(({"layers": native}, INT8_LAYERS[1]))
    assert run.row("kv_bytes_total").value == 92_274_688
    for verdict in (bare(run), judge(run, RATIO)):
        assert verdict.exit_code == 1
        assert "kv_bytes_difference" in {o.metric for o in of(verdict, FAIL)}


# the policy's checks


def with_row(run: MadeRun, metric: str, **changes: Any) -> Verdict:
    """The verdict of `ppl_delta_pct within [-1, 1]` when its row is changed."""
    rows = [Row(**{**vars(row), **changes}) if row.metric == metric else row for row in run.rows()]
    return evaluate(Gate("made", (check(metric, -1, 1),)), run.run, rows)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("partial", [None, "6 chunks"])
def test_a23_t1_nan_fails_a_check_of_any_shape(value: float, partial: str | None) -> None:
    run = scored()
    rows = [
        Row(**{**vars(row), "value": value, "partial": partial}) if row.metric == "ppl_delta_pct" else row
        for row in run.rows()
    ]
    for own in (
        check("ppl_delta_pct", high=0.01),
        check("ppl_delta_pct", low=-5),
        check("ppl_delta_pct", -1, 1),
    ):
        verdict = evaluate(Gate("made", (own,)), run.run, rows)
        assert verdict.exit_code == 1
        assert verdict.outcomes[-1].status == FAIL


@pytest.mark.parametrize(
    ("low", "high", "status", "code"),
    [
        (-0.3, 0.6, PASS, 0),
        (0.1, 1.0, PASS, 0),
        (-0.5, 0.95, INCONCLUSIVE, 4),  # inside, but so wide that no change could hardly have shown itself
        (-1.0, 1.0, INCONCLUSIVE, 4),
        (-0.5, 1.1, INCONCLUSIVE, 4),
        (-2.0, 2.0, INCONCLUSIVE, 4),
        (0.9, 1.5, INCONCLUSIVE, 4),
        (1.1, 1.5, FAIL, 1),
        (-9.0, -1.1, FAIL, 1),
        (math.nan, math.nan, INCONCLUSIVE, 4),
        (None, None, INCONCLUSIVE, 4),
    ],
)
def test_the_whole_interval_decides(low: float | None, high: float | None, status: str, code: int) -> None:
    value = 0.5 if low is None or high is None or math.isnan(low) else (low + high) / 2
    verdict = with_row(scored(), "ppl_delta_pct", value=value, low=low, high=high, units=None)
    assert (verdict.outcomes[-1].status, verdict.exit_code) == (status, code)


@settings(deadline=None)
@given(st.floats(-5, 5), st.floats(0, 5), st.floats(0, 5), st.floats(-5, 5), st.floats(0, 5))
def test_a_pass_leaves_nothing_of_the_interval_outside(
    value: float, down: float, up: float, low: float, width: float
) -> None:
    limits, spread = Limits(low, low + width), Spread(value, value - down, value + up, "pt")
    status = rule(spread, 100, limits, broken(spread, limits), 1).status
    inside = low <= value - down and value + up <= low + width
    outside = value + up < low or value - down > low + width
    # Of an interval that ends a rounding error from its limit, the p-value may say otherwise.
    edge = min(abs(value + up - low), abs(value - down - low - width)) < 1e-9
    assert edge or status == (PASS if inside else FAIL if outside else INCONCLUSIVE)


def test_one_sided_limits() -> None:
    run = scored(1.02)
    assert judge(run, check("ppl_delta_pct", high=1.0)).outcomes[-1].status == FAIL
    assert judge(run, check("ppl_delta_pct", low=1.0)).outcomes[-1].status == PASS
    noisy = scored(1.02, spread=0.05)
    assert judge(noisy, check("ppl_delta_pct", high=1.0)).exit_code == 4
    assert judge(noisy, check("ppl_delta_pct", high=1.0)).word == INCONCLUSIVE


def test_sentences_name_value_unit_interval_limit_and_n() -> None:
    sentence = judge(scored(1.02, spread=0.001), check("ppl_delta_pct", -1, 1)).outcomes[-1].sentence
    assert sentence.startswith(
        "ppl_delta_pct of wikitext2 stream512 on kv_format=int8_sym is 2 % (95% interval 1.9"
    )
    assert sentence.endswith(", n=800); the limit is within [-1, 1]: broken.")


def test_a05_t3_the_text_metric_outranks_the_tensor_metric() -> None:
    """Small reconstruction error, perplexity times 100: the parity checks pass and the verdict is a failure."""
    case = {"name": "gqa", "max_abs": 1e-4, "cosine": 1.0, "bound": 1e-2, "length": 16, "head_dim": 128}
    parity = ({"cases": [case], "steps": {"argmax_equal": [1] * 2048, "max_abs": [1e-4]}}, {"steps": 2048})
    run = scored(100.0).measure("parity", parity, parity)
    own = [
        check("parity_bound_share", high=1),
        check("steps_argmax_agreement", low=0.99),
        check("ppl_delta_pct", -1, 1),
    ]
    verdict = judge(run, *own)
    assert [o.status for o in verdict.outcomes if o.metric.startswith(("parity", "steps"))] == [PASS] * 4
    assert verdict.outcomes[-1].status == FAIL
    assert verdict.outcomes[-1].value == pytest.approx(9900)
    assert verdict.exit_code == 1


def test_a05_t4_one_bad_layer_fails_the_worst_case_check() -> None:
    cases = [
        {"name": f"layer {i}", "max_abs": 5.0 if i == 3 else 1e-4, "cosine": 1.0, "bound": 1e-2}
        for i in range(28)
    ]
    parity = ({"cases": cases, "steps": {}}, {})
    verdict = judge(
        stored().measure("parity", parity, parity), check("parity_bound_share", high=1, kv_format="int8_sym")
    )
    assert verdict.exit_code == 1
    assert verdict.outcomes[-1].value == 500


def test_a23_t2_a_metric_that_no_runner_measured_fails() -> None:
    verdict = judge(stored(), RATIO, check("ppl_delta_pct", -1, 1, variant="wikitext2 stream512"))
    assert verdict.exit_code == 1
    assert verdict.outcomes[-1].sentence == (
        "ppl_delta_pct of wikitext2 stream512 on kv_format=int8_sym was not measured: the run has no perplexity task for it."
    )


def test_a23_t2_a_cell_that_is_not_in_the_results_fails() -> None:
    verdict = judge(stored(), RATIO, check("kv_ratio", 0, 1, kv_format="fp8_e4m3"))
    assert verdict.exit_code == 1
    assert (
        verdict.outcomes[-1].sentence
        == "kv_ratio was not measured: no cell of this run has kv_format=fp8_e4m3."
    )


def test_a_cell_that_is_not_in_the_results_is_named_as_a_matrix_writes_it() -> None:
    verdict = judge(stored(), RATIO, check("kv_ratio", 0, 1, kv_splits=None, batch=8))
    assert (
        verdict.outcomes[-1].sentence
        == "kv_ratio was not measured: no cell of this run has kv_splits=null, batch=8."
    )


def test_a_variant_that_is_not_in_the_results_fails() -> None:
    verdict = judge(scored(), check("ppl_delta_pct", -1, 1, variant="wikitext2 rows512"))
    assert verdict.exit_code == 1
    assert "of wikitext2 rows512" in verdict.outcomes[-1].sentence


def test_a_difference_asked_of_baselines_alone_fails() -> None:
    verdict = judge(scored(), check("ppl_delta_pct", -1, 1, kv_format="native"))
    assert verdict.exit_code == 1
    assert "only baselines were picked" in verdict.outcomes[-1].sentence


def test_an_optional_check_without_a_value_is_shown_and_changes_nothing() -> None:
    own = check("ppl_delta_pct", -1, 1, required=False, variant="wikitext2 stream512")
    verdict = judge(stored(), RATIO, own)
    assert verdict.exit_code == 0
    assert (verdict.outcomes[-1].status, verdict.outcomes[-1].required) == (NOT_EVALUATED, False)


def test_an_optional_check_with_a_value_counts() -> None:
    assert judge(scored(2.0), RATIO, check("ppl_delta_pct", -1, 1, required=False)).exit_code == 1


def test_true_is_not_one() -> None:
    verdict = judge(stored(), check("kv_ratio", 0, 1, batch=True))
    assert verdict.exit_code == 1


def test_a17_t6_values_that_may_not_be_compared_are_not_judged() -> None:
    run = scored()
    run.records[3].facts["protocol"] = "rows512"
    verdict = judge(run, RATIO, check("ppl_delta_pct", -1, 1))
    assert verdict.exit_code == 3
    assert "not comparable with the baseline: protocol is" in verdict.outcomes[-1].sentence


def test_a_partial_result_satisfies_no_gate_that_does_not_allow_it() -> None:
    run = scored().change(CAND, "perplexity", partial="first 6 chunks")
    own = check("ppl_delta_pct", -1, 1)
    verdict = judge(run, RATIO, own)
    assert verdict.exit_code == 3
    assert "partial (first 6 chunks)" in verdict.outcomes[-1].sentence
    assert judge(run, RATIO, check("ppl_delta_pct", -1, 1, required=False)).exit_code == 0
    assert judge(run, RATIO, own, allow_partial=True).exit_code == 0


def test_a23_t6_a_gate_of_which_nothing_was_evaluated_is_no_pass() -> None:
    optional = check("mcq_delta_pt", -1, 1, required=False)
    for verdict in (judge(stored()), judge(stored(), optional)):
        assert verdict.exit_code == 3
        assert verdict.outcomes[-1].check == "gate"
        assert "which is no pass" in verdict.outcomes[-1].sentence


def test_a23_t6_a_run_without_cells_is_no_pass() -> None:
    empty = Run(Manifest("empty", (), ()))
    assert evaluate(None, empty, []).exit_code == 3
    assert evaluate(Gate("g", ()), empty, []).exit_code == 3


def test_cells_that_share_a_task_share_one_outcome() -> None:
    run = scored()
    run.add_cell(1, "cand2", "batch=4")
    run.share(1, "cand2")
    run.share(3, "cand2")
    verdict = judge(run, check("ppl_delta_pct", -1, 1))
    (outcome,) = [o for o in verdict.outcomes if o.metric == "ppl_delta_pct"]
    assert (outcome.cell, outcome.cells) == (CAND, (CAND, "cand2"))
    assert "on kv_format=int8_sym (and 1 more cell) is" in outcome.sentence
    assert [o.cell for o in verdict.outcomes if o.check == "precision"] == [BASE, CAND, "cand2"]


def outcome(status: str, required: bool = True) -> Outcome:
    return Outcome("c", "", None, "", status, None, "", "s", required)


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([], 3),
        ([outcome(PASS)], 0),
        ([outcome(PASS), outcome(FAIL), outcome(NOT_EVALUATED), outcome(INCONCLUSIVE)], 1),
        ([outcome(PASS), outcome(NOT_EVALUATED), outcome(INCONCLUSIVE)], 3),
        ([outcome(PASS), outcome(NOT_EVALUATED, required=False), outcome(INCONCLUSIVE)], 4),
        ([outcome(PASS), outcome(NOT_EVALUATED, required=False)], 0),
        ([outcome(PASS), outcome(INCONCLUSIVE, required=False)], 4),
        ([outcome(NOT_EVALUATED, required=False)], 3),
    ],
)
def test_exit_codes(outcomes: list[Outcome], code: int) -> None:
    assert exit_code_of(outcomes) == code


def test_a_policy_file_judges_a_run(tmp_path: Path) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text(
        "checks:\n  - {metric: kv_ratio_16bit, where: {kv_format: int8_sym}, equals: 0.515625, why: 66 / 128}\n"
    )
    run = stored()
    verdict = evaluate(load(path), run.run, run.rows())
    assert verdict.exit_code == 0
    assert verdict.outcomes[-1].why == "66 / 128"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"spec": {"batch": 64}}, "batch 64, the task asks for 1"),
        ({"spec": {"scale": 1.0}}, "scale 1.0, the task asks for null"),
        ({"options": {"steps": 3}}, "steps 3, the task asks for null"),
        ({"runner": "parity"}, "the record is one of parity, the task is storage"),
    ],
)
def test_a_record_of_another_task_fails(changed: dict[str, Any], words: str) -> None:
    run = stored()
    own = run.records[1]
    fields = {k: {**getattr(own, k), **v} if isinstance(v, dict) else v for k, v in changed.items()}
    run.records[1] = replace(own, **fields)
    verdict = judge(run, RATIO)
    assert verdict.exit_code == 1
    assert any(o.check == "precision" and words in o.sentence for o in verdict.outcomes)


@pytest.mark.parametrize("lost", LEVELS)
def test_evidence_that_lacks_a_level_is_unverified(lost: str) -> None:
    levels = [Level(name, VERIFIED, "-") for name in LEVELS if name != lost]
    verdict = judge(stored().change(CAND, evidence=evidence("int8_sym", *levels)), RATIO)
    assert verdict.exit_code == 1
    assert any(f"lacks {lost}" in o.sentence for o in verdict.outcomes)


def test_a_state_that_nobody_knows_is_not_verified() -> None:
    levels = [Level(name, "fine", "-") for name in LEVELS]
    assert judge(stored().change(CAND, evidence=evidence("int8_sym", *levels)), RATIO).exit_code == 1


def test_a_task_that_ended_well_without_any_value_is_no_pass() -> None:
    verdict = bare(stored().change(CAND, samples={}))
    assert verdict.exit_code == 3
    assert any(o.check == "no result" and "storage on" in o.sentence for o in verdict.outcomes)


@pytest.mark.parametrize(
    ("ran", "said"),
    [
        ({"kv_format": "native"}, "times of arm candidate are of a request with kv_format native, and it is due with int8_sym"),
        ({"weights": "fp8_block128"}, "with weights fp8_block128, and it is due with native"),
        ({"computed_tokens": 40}, "with computed_tokens 40, and it is due with 4111"),
    ],
)  # fmt: skip
def test_times_of_another_arm_or_request_fail(ran: dict[str, Any], said: str) -> None:
    made = timed(1.0)
    record = next(r for r in made.records if r.key.endswith(CAND) and r.runner == "latency")
    arms = [{**arm, "ran": {**arm["ran"], **ran}} for arm in record.samples["arms"]]
    verdict = bare(made.change(CAND, "latency", samples={**record.samples, "arms": arms}))
    assert verdict.exit_code == 1
    assert said in of(verdict, FAIL)[0].sentence


def test_times_that_do_not_say_what_ran_fail() -> None:
    made = timed(1.0)
    record = next(r for r in made.records if r.key.endswith(CAND) and r.runner == "latency")
    arms = [{key: value for key, value in arm.items() if key != "ran"} for arm in record.samples["arms"]]
    verdict = bare(made.change(CAND, "latency", samples={**record.samples, "arms": arms}))
    assert "kv_format unknown" in of(verdict, FAIL)[0].sentence

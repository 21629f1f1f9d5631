"""requested = resolved = effective: what the first check of a verdict fails, and what a gate may allow."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.gate.verdict import FAIL, PASS
from kvbench.matrix.resolve_backend import Choice
from kvbench.records.record import LEVELS, MISMATCH, NOT_APPLICABLE, RUNGS, UNVERIFIED, VERIFIED, Level
from tests.factories.runs.made import BASE, CAND, decision, evidence
from tests.factories.runs.timed import timed
from tests.factories.verdicts import NATIVE_LAYERS, RATIO, bare, check, identical, judge, of, scored, stored

DROPPED = evidence("native", Level("E1", MISMATCH, "layer 0 stores float32, expected int8"))
FALLBACK = {"decision": decision("int8_sym", "native", "mla_not_validated"), "evidence": evidence("native")}


def fault_of(verdict):
    """The one failure, which is of the precision."""
    (fault,) = of(verdict, FAIL)
    assert (fault.check, verdict.exit_code) == ("precision", 1)
    return fault


def levels_up_to(rung, **levels):
    """Evidence of int8_sym that is verified up to a rung and unverified above."""
    named = {name.replace("_", "-"): state for name, state in levels.items()}
    states = {x: named.get(x, VERIFIED if x.split("-")[0] <= rung else UNVERIFIED) for x in LEVELS}
    return evidence("int8_sym", *(Level(x, state, "it says so") for x, state in states.items()))


def quantized_weights(requested="fp8_block128"):
    """`stored` whose candidate asks for quantized weights; requested: what the resolver was asked for."""
    run = stored()
    run.cells[1].spec["weights"] = "fp8_block128"
    weights = asdict(Choice(requested, requested, "as asked"))
    return run.change(CAND, decision={**decision("int8_sym"), "weights": weights})


@pytest.mark.parametrize("required", [True, False])
@settings(deadline=None)
@given(data=st.data())
def test_a01_t1_no_policy_saves_a_dropped_format(required, data):
    """Whatever the options and however many checks pass, the precision fault decides."""
    run = stored().change(CAND, evidence=DROPPED)
    assert fault_of(bare(run)).reason == "mismatch"
    checks = st.sampled_from([RATIO, check("kv_bytes_difference", 0, 0, required)])
    options = {name: data.draw(st.booleans()) for name in ("allow_partial", "allow_fallback")}
    verdict = judge(run, *data.draw(st.lists(checks, max_size=3)), **options)
    fault = fault_of(verdict)
    assert (fault.reason, fault.cell, fault.required) == ("mismatch", CAND, True)
    assert "E1: layer 0 stores float32, expected int8 (seen in storage)" in fault.sentence
    assert verdict.outcomes.index(fault) < 2


def weights_without_evidence():
    run = quantized_weights()
    run.tasks[1].spec["weights"] = "fp8_block128"
    silent = [Level(x, NOT_APPLICABLE if x.endswith("-weights") else VERIFIED, "-") for x in LEVELS]
    shown = evidence("int8_sym", *silent, weights="fp8_block128")
    return run.change(CAND, spec={**run.tasks[1].spec}, evidence=shown)


def with_scales_of_another_source():
    facts = next(r for r in stored().records if r.key.endswith(CAND)).facts
    more = {"scale_kind": "unknown", "scale_source": "unknown: another file"}
    return stored().change(CAND, facts={**facts, **more})


def other_backend():
    made = {**decision("int8_sym"), "backend": asdict(Choice("torch", "torch", "requested"))}
    return on_backend("triton", "triton", "requested").change(CAND, decision=made)


def candidate(**fields):
    return lambda: stored().change(CAND, **fields)


def resolved(cell, requested, resolved, reason, fallback="allow"):
    fields = {"decision": decision(requested, resolved, reason), "evidence": evidence(resolved)}
    return lambda: stored(fallback=fallback).change(cell, **fields)


@pytest.mark.parametrize(
    ("run", "reason", "words"),
    [
        (candidate(evidence=evidence("native")), "mismatch", "did not reach the engine"),
        (candidate(evidence=levels_up_to("E5", E3=UNVERIFIED)), "unverified", "E3: it says so"),
        (candidate(evidence=evidence("int8_sym", Level("E1", NOT_APPLICABLE, "-"))), "unverified", ""),
        (candidate(evidence=levels_up_to("E5", E5="fine")), "unverified", ""),
        (candidate(evidence=evidence("mixed", Level("E1", MISMATCH, "layer 7"))), "mismatch", "E1: layer 7"),
        (candidate(decision=decision("native")), "request_dropped", "asks for kv_format int8_sym"),
        (lambda: quantized_weights("native"), "request_dropped", "asks for weights fp8_block128"),
        (other_backend, "request_dropped", "asks for backend triton, but the resolver was asked for torch"),
        (quantized_weights, "mismatch", "fp8_block128 was resolved, the evidence shows native"),
        (weights_without_evidence, "unverified", f"{', '.join(f'E{i}-weights' for i in range(1, 6))} say"),
        (with_scales_of_another_source, "mismatch", "unknown: another file"),
        (resolved(BASE, "native", "int8_sym", "head_dim"), "undeclared_fallback", "falls back from native"),
        (resolved(CAND, "int8_sym", "native", "requested"), "undeclared_fallback", "it was dropped"),
        (resolved(CAND, "int8_sym", "native", "head_dim", "refuse"), "undeclared_fallback", "allows no"),
        (
            lambda: resolved(CAND, "int8_sym", "native", "head_dim")().change(
                CAND, evidence=evidence("int8_sym")
            ),
            "mismatch",
            "native was resolved, the evidence shows int8_sym",
        ),
    ],
)
def test_what_is_not_proven_fails_though_fallbacks_are_allowed(run, reason, words):
    verdict = judge(run(), RATIO, allow_fallback=True)
    faults = [o for o in of(verdict, FAIL) if o.check == "precision"]
    assert (verdict.exit_code, [o.reason for o in faults]) == (1, [reason])
    assert words in faults[0].sentence


def test_quantized_weights_that_are_effective_pass():
    run = quantized_weights().change(CAND, evidence=evidence("int8_sym", weights="fp8_block128"))
    verdict = bare(run)
    assert (verdict.exit_code, verdict.outcomes[1].reason) == (0, "verified")
    assert "int8_sym with fp8_block128 weights" in verdict.outcomes[1].sentence


@pytest.mark.parametrize("level", [x for x in LEVELS if not x.endswith("-weights")])
def test_a_level_that_says_it_does_not_apply_shows_nothing(level):
    """But a labelled mode that reads no prompt back, and a runner that makes no reads."""
    shown = levels_up_to("E5", **{level.replace("-", "_"): NOT_APPLICABLE})
    run = stored().change(CAND, evidence=shown)
    if level in ("E3-prefill", "E3-reads"):
        assert judge(run, RATIO).exit_code == 0
    else:
        fault = fault_of(judge(run, RATIO))
        assert (fault.reason, level in fault.sentence) == ("unverified", True)
        assert judge(run, RATIO, evidence="E1").exit_code == int(level == "E1")


@pytest.mark.parametrize("rung", RUNGS)
def test_a_gate_names_the_rung_that_must_be_verified(rung):
    """What stands above it may show nothing, and is named; by default every rung is required."""
    run = stored().change(CAND, evidence=levels_up_to(rung))
    verdict = judge(run, RATIO, evidence=rung)
    assert verdict.exit_code == 0
    above = ", ".join(x for x in LEVELS if x.split("-")[0] > rung)
    assert above in verdict.outcomes[1].sentence
    assert ("unverified" in verdict.outcomes[1].sentence) == bool(above)
    for stricter in (x for x in RUNGS if x > rung):
        assert judge(run, RATIO, evidence=stricter).exit_code == 1
    assert (judge(run, RATIO).exit_code, bare(run).exit_code) == ((0, 0) if rung == "E5" else (1, 1))


@pytest.mark.parametrize("level", LEVELS)
def test_a_contradiction_fails_on_any_rung_and_a_silent_level_on_the_required_ones(level):
    named = level.replace("-", "_")
    contradicted = stored().change(CAND, evidence=levels_up_to("E1", **{named: MISMATCH}))
    fault = fault_of(judge(contradicted, RATIO, evidence="E1"))
    assert (fault.reason, f"{level}: it says so" in fault.sentence) == ("mismatch", True)
    lacking = levels_up_to("E5")
    lacking["levels"] = [x for x in lacking["levels"] if x["name"] != level]
    for shown in (levels_up_to("E5", **{named: UNVERIFIED}), lacking):
        run = stored().change(CAND, evidence=shown)
        for rung in RUNGS:
            assert judge(run, RATIO, evidence=rung).exit_code == int(level.split("-")[0] <= rung)
    fault = fault_of(judge(stored().change(CAND, evidence=lacking), RATIO))
    assert (fault.reason, f"lacks {level}" in fault.sentence) == ("unverified", True)


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
def test_the_native_arm_stands_on_the_rungs_that_are_unverified_in_it(state, silent, rung, code):
    levels = [Level(x, VERIFIED, "-") for x in LEVELS]
    arm = Level("native-arm", state, "The native arm is not native: E4 is silent", {"unverified": silent})
    run = stored().change(CAND, evidence=evidence("int8_sym", *levels, arm))
    assert judge(run, RATIO, evidence=rung).exit_code == code


def test_a_text_that_was_compared_with_itself_was_not_compared():
    own = next(r for r in scored().records if r.key.endswith(CAND) and r.runner == "perplexity")
    for samples, reasons in (
        ({"native_chunks": own.samples["chunks"]}, ["equal_to_native"]),
        ({"kld_tokens": [0.0] * 800}, ["equal_to_native"]),
        ({"kld_tokens": [0.0, 1e-9] * 400}, []),
    ):
        run = scored().change(CAND, "perplexity", samples={**own.samples, **samples})
        verdict = judge(run, RATIO)
        assert (verdict.exit_code, [o.reason for o in of(verdict, FAIL)]) == (len(reasons), reasons)


@pytest.mark.parametrize(
    "spec", [{"prefill_reads": "fresh"}, {"model_weights": "random"}, {"kv_format": "native"}]
)
def test_text_that_may_equal_native_is_no_fault(spec):
    assert not of(bare(identical(**spec)), FAIL)


def on_backend(requested, resolved, reason):
    """`stored` on a backend."""
    backend = asdict(Choice(requested, resolved, reason))
    run = stored(backend=requested, fallback="allow")
    for cell, kv_format in ((BASE, "native"), (CAND, "int8_sym")):
        run.change(cell, decision={**decision(kv_format), "backend": backend})
    return run


@pytest.mark.parametrize(
    ("run", "limit", "cells", "words"),
    [
        (
            lambda: stored(NATIVE_LAYERS, fallback="allow").change(CAND, **FALLBACK),
            check("kv_ratio", 1, 1),
            [CAND],
            "kv_format int8_sym fell back to native: mla_not_validated",
        ),
        (
            lambda: on_backend("triton", "torch", "head_dim"),
            RATIO,
            [BASE, CAND],
            "backend triton fell back to torch: head_dim",
        ),
    ],
)
def test_a_declared_fallback_fails_unless_the_gate_allows_it(run, limit, cells, words):
    for verdict in (bare(run()), judge(run()), judge(run(), limit, allow_partial=True)):
        faults = of(verdict, FAIL)
        assert verdict.exit_code == 1
        assert [(o.cell, o.reason) for o in faults if o.check == "precision"] == [
            (c, "fallback") for c in cells
        ]
        assert words in faults[0].sentence
    verdict = judge(run(), limit, allow_fallback=True)
    passed = next(o for o in verdict.outcomes if o.cell == cells[0])
    assert (verdict.exit_code, passed.reason, words in passed.sentence) == (0, "verified", True)


@pytest.mark.parametrize("resolved", ["torch", "triton"])
def test_what_auto_becomes_is_no_fallback(resolved):
    verdict = judge(on_backend("auto", resolved, "no_gpu"), RATIO)
    assert (verdict.exit_code, verdict.word) == (0, PASS)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"spec": {"batch": 64}}, "batch 64, the task asks for 1"),
        ({"spec": {"scale": 1.0}}, "scale 1.0, the task asks for null"),
        ({"options": {"steps": 3}}, "steps 3, the task asks for null"),
        ({"runner": "parity"}, "from runner parity, the task from storage"),
    ],
)
def test_a_record_of_another_task_fails(changed, words):
    run = stored()
    record = run.records[1]
    fields = {k: {**getattr(record, k), **v} if isinstance(v, dict) else v for k, v in changed.items()}
    run.records[1] = replace(record, **fields)
    verdict = judge(run, RATIO)
    assert verdict.exit_code == 1
    assert [o.reason for o in verdict.outcomes if words in o.sentence] == ["another_record"]


@pytest.mark.parametrize(
    ("ran", "words"),
    [
        ({"kv_format": "native"}, "arm candidate ran with kv_format native, expected int8_sym"),
        ({"weights": "fp8_block128"}, "with weights fp8_block128, expected native"),
        ({"computed_tokens": 40}, "with computed_tokens 40, expected 134"),
        (None, "kv_format unknown"),
    ],
)
def test_times_of_another_arm_or_request_fail(ran, words):
    run = timed([10.0] * 4, [10.0] * 4)
    for arm in run.records[1].samples["arms"]:
        if arm["arm"] == "candidate":
            arm["ran"] = {**arm["ran"], **ran} if ran else {}
    fault = fault_of(bare(run))
    assert (fault.reason, words in fault.sentence) == ("another_arm", True)

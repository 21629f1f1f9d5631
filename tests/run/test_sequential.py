"""Stages, looks, what grows and what stops a run, without running anything."""

import math
from dataclasses import replace

import pytest

from kvbench.errors import UsageError
from kvbench.files import write_json
from kvbench.gate.evaluate import evaluate
from kvbench.gate.policy import Check, Gate
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED, PASS, Outcome, Verdict, exit_code_of
from kvbench.matrix.cells import Task
from kvbench.matrix.load import load
from kvbench.matrix.runners import RUNNERS, STAGES
from kvbench.metrics.collect import derive
from kvbench.metrics.declare.units import NAT
from kvbench.records.record import Record
from kvbench.records.run import UNTIL_DECIDED, Manifest, Run, RunDir, Stopped
from kvbench.run import sequential
from kvbench.run.sequential import Step, at_looks, deciding, growing, next_step, outline, planned, tasks_at
from kvbench.stats.sequential import Looks
from tests.factories.runs.made import CAND, layers, storage_facts
from tests.factories.runs.texts import many

MATRIX = """\
name: m
model: tiny-llama
axes: {kv_format: [native, int8_sym], context: [32, 64]}
runners:
  latency: {repeats: 10}
  mcq: {limit: 100}
  perplexity: {data: [pydoc, wikitext2]}
  parity: {}
  storage: {}
"""


@pytest.fixture
def matrix(tmp_path):
    (tmp_path / "m.yaml").write_text(MATRIX)
    return load(tmp_path / "m.yaml")


@pytest.fixture
def plan(matrix):
    return planned(matrix, gate(check("ppl_delta_pct"), check("mcq_delta_pt"), check("itl_ratio")))


def check(metric, low=-math.inf, high=1e9):
    return Check(metric, {"kv_format": "int8_sym"}, low, high, "within limits")


def gate(*checks, allow_partial=True):
    return Gate("g", checks, allow_partial)


def outcome(status, metric="", variant="", cells=("c",), **more):
    return Outcome("x", status, "", "", cells, metric, variant, **more)


def options_of(runner, **own):
    return {name: o.default for name, o in RUNNERS[runner].options.items()} | own


def test_the_stage_and_the_looks_of_a_runner():
    stages = (
        {"storage", "transfer"},
        {"parity", "health", "gemm"},
        {"sensitivity", "agreement", "generate", "perplexity", "mcq"},
        {"latency"},
    )
    assert {r.name: r.stage for r in RUNNERS.values()} == {x: i for i, own in enumerate(stages) for x in own}
    assert len(STAGES) == len(stages)
    options = options_of("latency", repeats=20)
    strict = gate(check("itl_ratio"), allow_partial=False)
    assert sequential._looks("latency", options, strict) == Looks("repeats", (3, 10, 20))
    assert sequential._looks("latency", options, gate(check("itl_ratio"), check("itl_ms"))) == sequential.ONCE
    for metric, limit, allow_partial, sizes in (
        ("ppl_delta_pct", None, True, (4, 32, None)),
        ("ppl_delta_pct", 64, True, (4, 32, 64)),
        ("ppl_delta_pct", 63, True, (4, 63)),  # 32 is more than half of it
        ("ppl_delta_pct", 7, True, (None,)),
        ("ppl_delta_pct", None, False, (None,)),  # a limited result decides nothing there
        ("kld_max", None, True, (None,)),  # a bare value has no level
        ("itl_ms", None, True, (None,)),  # no check of this runner
    ):
        options = options_of("perplexity", limit_chunks=limit)
        looks = sequential._looks("perplexity", options, gate(check(metric), allow_partial=allow_partial))
        assert looks.sizes == sizes


def test_the_plan_of_a_matrix_stages_first_then_what_is_open(plan):
    assert plan == {
        "latency": Looks("repeats", (3, 10)),
        "mcq": Looks("limit", (24, 100)),
        "perplexity": Looks("limit_chunks", (4, 32, None)),
        "parity": sequential.ONCE,
        "storage": sequential.ONCE,
    }
    assert outline(plan) == [
        "  stage 0 (exact bytes): storage",
        "  stage 1 (tensors): parity",
        "  stage 2 (text): mcq (limit 24, 100, judged at 97.5%), "
        "perplexity (limit_chunks 4, 32, all, judged at 98.3%)",
        "  stage 3 (times): latency (repeats 3, 10, judged at 97.5%)",
    ]
    at, steps = dict.fromkeys(plan, 0), []
    while step := next_step(plan, at, ("perplexity", "latency", "parity")):
        steps.append(step)
        at |= dict.fromkeys(step.runners, step.look)
    first = [(0, 1, "storage"), (1, 1, "parity"), (2, 1, "mcq perplexity"), (3, 1, "latency")]
    later = [(2, 2, "perplexity"), (3, 2, "latency"), (2, 3, "perplexity")]
    assert steps == [Step(stage, look, tuple(names.split())) for stage, look, names in first + later]
    assert (steps[0].place, steps[-1].place) == ("stage 0 (exact bytes)", "stage 2 (text), look 3")
    assert next_step(plan, dict.fromkeys(plan, 1), ()) is None


@pytest.mark.parametrize("status", [PASS, FAIL, INCONCLUSIVE, NOT_EVALUATED])
def test_only_a_required_failure_stops_a_run_and_it_is_final(status):
    outcomes = (outcome(INCONCLUSIVE), outcome(status), outcome(PASS), outcome(FAIL, required=False))
    found = deciding(Verdict(outcomes, exit_code_of(outcomes)))
    assert (found is not None) == (status == FAIL)
    for later in (PASS, FAIL, INCONCLUSIVE, NOT_EVALUATED) if found else ():
        assert exit_code_of([*outcomes, outcome(later)]) == 1
    assert deciding(Verdict((outcome(FAIL, required=False),), 1)) is None


def task(runner, variant="", cell="c"):
    return Task(f"{runner}-{variant}-{cell}", runner, variant, {}, {}, (cell,), None)


def record(of, status="ok"):
    return Record(of.key, of.runner, 1, status, {}, {}, None, None, {}, {}, {}, None, None, "", 0.0)


TASKS = (task("perplexity", "pydoc"), task("mcq", "cloze"), task("latency"), task("storage"))


def grown(*outcomes, records=None):
    found = [record(t) for t in TASKS] if records is None else records
    run = Run(Manifest("made", (), TASKS), tuple(found))
    return growing(run, Verdict(outcomes, exit_code_of(outcomes)))


@pytest.mark.parametrize("required", [True, False])
def test_an_open_check_lets_its_own_runner_grow(required):
    for status in (INCONCLUSIVE, NOT_EVALUATED):
        assert grown(outcome(status, "ppl_delta_pct", "pydoc", required=required)) == {"perplexity"}
        assert grown(outcome(status, "itl_ratio", required=required)) == {"latency"}
    assert grown(outcome(PASS, "ppl_delta_pct", "pydoc"), outcome(FAIL, "itl_ratio", required=False)) == set()
    assert grown(outcome(INCONCLUSIVE, "ppl_delta_pct", "wikitext2")) == set()
    assert grown(outcome(INCONCLUSIVE, "itl_ratio", cells=("other",))) == set()


def test_open_checks_and_guards_grow_and_errors_and_unproven_precision_nothing():
    assert grown(outcome(INCONCLUSIVE, "", "cloze")) == {"mcq"}
    assert grown(outcome(INCONCLUSIVE, "itl_slope_to_bytes")) == {"latency"}
    assert grown(outcome(NOT_EVALUATED, "", "")) == set()
    open_ = (outcome(INCONCLUSIVE, "mcq_delta_pt", "cloze"), outcome(INCONCLUSIVE, "itl_ratio"))
    assert grown(*open_) == {"mcq", "latency"}
    assert grown(*open_, records=[record(t, "error") for t in TASKS]) == grown(*open_, records=[]) == set()


def test_tasks_at_several_looks_are_those_of_the_matrix_with_that_option_set(matrix, plan, tmp_path):
    sized = at_looks(plan, lambda sizes: load(tmp_path / "m.yaml", sizes=sizes))
    assert len(sized) == 3
    mixed = tasks_at(sized, {"latency": 2, "mcq": 1, "perplexity": 3, "parity": 0, "storage": 1})
    by_hand = load(tmp_path / "m.yaml", ["runners.mcq.limit=24"])
    assert mixed == by_hand.tasks, "a look has other keys than the same options in the matrix"
    assert tasks_at(sized, dict.fromkeys(plan, 3)) == matrix.tasks


def early(run, sizes=(6, 32, None), **manifest):
    """The run with its perplexity at the first look of `sizes`."""
    looks = {"perplexity": Looks("limit_chunks", tuple(sizes))}
    return limited(run, sizes[0]).run_with(until_decided=looks, **manifest)


def limited(run, size):
    run.tasks = [replace(t, options={**t.options, "limit_chunks": size}) for t in run.tasks]
    return run


def outcomes(run, *checks):
    verdict = evaluate(gate(*checks), run, derive(run))
    return [o for o in verdict.outcomes if o.metric == checks[0].metric and o.check != "plausible"]


def row_of(run):
    return next(r for r in run.rows() if r.metric == "ppl_delta_pct")


def test_at_a_look_an_open_limit_waits_and_the_sentence_says_so():
    run = many([0.0])
    limits = check("ppl_delta_pct", low=-50, high=50)
    (plain,), (looked,) = outcomes(run.run, limits), outcomes(early(run), limits)
    assert (plain.look, plain.level, looked.look) == ("", None, "look 1 of 3")
    assert looked.level == pytest.approx(1 - 0.05 / 3)
    assert looked.status == plain.status == PASS
    shared, more = looked.sentence.split(" (look 1 of 3, judged at 98.3%: ")
    assert f"{shared}." == plain.sentence
    low, high = (float(x) for x in more.removesuffix(").").split(" to "))
    row = row_of(run)
    assert low < row.low < row.high < high
    run = many([0.01])
    row = row_of(run)
    assert row.low > 0
    between = Check("ppl_delta_pct", {}, row.low * 0.999, row.high * 1.001, "")
    (plain,), (looked,) = outcomes(run.run, between), outcomes(early(run), between)
    assert (plain.status, looked.status) == (PASS, INCONCLUSIVE)
    run = many([0.0])
    rows = [replace(row_of(run), metric="kld_mean", unit=NAT, value=0.001, low=0.0009, high=0.0011, units=30)]
    for sizes, due in (((6, None), INCONCLUSIVE), ((3, 6), PASS)):
        looked = early(run, sizes)
        tasks = tuple(limited(run, 6).tasks)
        looked = replace(looked, manifest=replace(looked.manifest, tasks=tasks))
        verdict = evaluate(gate(check("kld_mean", high=0.005)), looked, rows)
        (found,) = [o for o in verdict.outcomes if o.metric == "kld_mean"]
        assert found.status == due, found.sentence


def test_what_is_planned_and_not_measured_counts_in_the_family_and_is_no_pass():
    """One of 40 cells breaks its limit, as by chance. With 3 measured Holm lets it fail; 40 are planned."""
    run = many([0.0045, *[0.0] * 39])
    limits = Check("ppl_delta_pct", {}, -0.25, 0.25, "")
    three = tuple(r for r in run.records if r.key in ({t.key for t in run.tasks[:6]}))
    interrupted = outcomes(replace(run.run, records=three), limits)
    assert interrupted[0].status == FAIL, "an ordinary run that was interrupted is judged as it was"
    looked = early(run, (6, None))
    part, whole = outcomes(replace(looked, records=three), limits), outcomes(looked, limits)
    assert part[0].status == whole[0].status == INCONCLUSIVE
    assert "with 40 checks of this claim" in part[0].sentence
    assert [o.status for o in part[3:]] == [NOT_EVALUATED] * 37
    run = many([0.0])
    layer = (layers(2, 100, 0), storage_facts(16, 200))
    run.measure("storage", layer, layer)
    stopped = Stopped(UNTIL_DECIDED, "kv_ratio at most 0.1", "stage 0 (exact bytes)")
    left = tuple(r for r in run.records if r.runner == "storage")
    part = replace(early(run, (6, None), stopped=stopped), records=left)
    verdict = evaluate(gate(check("ppl_delta_pct", low=-50, high=50)), part, derive(part))
    said = "not run: the verdict was decided by kv_ratio at most 0.1 after stage 0 (exact bytes)"
    missing = [o for o in verdict.outcomes if o.check == "not run"]
    assert len(missing) == 2
    assert all(said in o.sentence and o.status == NOT_EVALUATED and o.required for o in missing)
    (own,) = [o for o in verdict.outcomes if o.metric == "ppl_delta_pct"]
    assert (own.status, own.cells) == (NOT_EVALUATED, (CAND,))
    assert said in own.sentence
    assert verdict.exit_code != 0


def test_a_manifest_whose_looks_do_not_fit_its_tasks_is_refused(tmp_path):
    for part, value in (
        ("until_decided", {"looks": {"perplexity": {"option": "limit_chunks"}}}),
        ("until_decided", {"looks": {"perplexity": {"option": "limit_chunks", "sizes": [7]}}}),
        ("stopped", {"by": "until_decided", "check": "x"}),
        ("stopped", {"by": "chance", "check": "x", "after": "y"}),
    ):
        good = early(many([0.0]), stopped=Stopped(UNTIL_DECIDED, "x", "y")).manifest
        run_dir = RunDir(tmp_path)
        run_dir.write_manifest(good)
        assert run_dir.manifest() == good
        write_json(tmp_path / "run.json", {**good.to_dict(), part: value})
        with pytest.raises(UsageError, match=f"{part} does not fit its tasks"):
            run_dir.manifest()

"""What verdicts promise: a planted effect is found with enough data and left open with little, and two runs
of the same never fail.

The runs of the same are real ones (runners and engines on a tiny model) and made-up ones (many seeds, 40
cells).
"""

import math
from functools import partial
from itertools import accumulate, cycle

import numpy as np
import pytest

from kvbench.gate.decide import Limits, broken, corrected, rule
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, PASS
from kvbench.matrix.runners import RUNNERS
from kvbench.metrics.collect import METRICS
from kvbench.runners import agreement, latency, mcq, perplexity, sensitivity
from kvbench.runners.timing import measure
from kvbench.stats import intervals as stats
from kvbench.stats.power import Spread
from tests.factories import verdicts
from tests.factories.runs.made import CAND, MadeRun, chunks, text_facts
from tests.factories.verdicts import check, own, steps


def judge(run, *checks):
    return verdicts.judge(run, *checks, allow_partial=True)


def losses(documents, effect, seed):
    """Per-token losses of documents of 4 chunks of 511."""
    draw = np.random.default_rng(seed)
    level = draw.normal(3.0, 0.3, documents)
    shift = draw.normal(effect, 0.001, documents)
    native = draw.exponential(level[:, None, None], (documents, 4, 511))
    candidate = native + shift[:, None, None] + draw.normal(0, 0.04, native.shape)
    owners = [d for d in range(documents) for _ in range(4)]
    sides = [
        chunks(*((float(x), 511) for x in side.sum(-1).ravel()), documents=owners)
        for side in (candidate, native)
    ]
    facts = text_facts(documents * 4 * 511)
    return MadeRun().measure("perplexity", (sides[0], facts), (sides[1], facts), variant="pydoc stream512")


@pytest.mark.parametrize("seed", range(3))
def test_a_tenth_of_a_percent_in_the_losses_of_tokens_is_found_with_enough_and_open_with_little(seed):
    limits = (check("ppl_delta_pct", -0.05, 0.05), check("ppl_delta_pct", high=0.0))
    much = own(judge(losses(150, math.log(1.001), seed), *limits))
    assert ([o.status for o in much], much[0].value) == ([FAIL, FAIL], pytest.approx(0.1, abs=0.03))
    assert much[0].mde < 0.05
    little = judge(losses(5, math.log(1.001), seed), *limits)
    assert ([o.status for o in own(little)], little.exit_code) == ([INCONCLUSIVE, INCONCLUSIVE], 4)
    assert own(little)[0].mde > 0.05
    assert "minimum detectable effect" in own(little)[0].sentence
    assert [o.status for o in own(judge(losses(150, 0.0, seed), limits[0]))] == [PASS]


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.99, math.inf, "at this value n=381 steps would decide)."),
        (0.99, 1.0, "at this value n=381 steps would decide)."),  # a share ends at 1, so that end is no limit
        (1.0, 1.0, "the value is at the limit itself, so no number of samples would decide)."),
        (0.9, 1.1, ""),
    ],
)
def test_an_open_check_of_equal_steps_names_its_n_or_why_there_is_none(low, high, words):
    (outcome,) = own(judge(steps([7] * 128, [7] * 128), check("top1_teacher_forced", low, high)))
    assert outcome.status == (INCONCLUSIVE if words else PASS)
    assert outcome.sentence.endswith(words)
    assert outcome.status == PASS or outcome.n_needed or "no number of samples" in outcome.sentence


# two real runs of the native baseline

# No change, and what the last digits of float32 make of it: of sums over a text, and of a divergence, which
# is never below 0.
ROUNDING = {"%": 0.01, "nat": 1e-4, "pt": 0.01}
TIMES = (1 / 2, 2.0)
# ms between two readings of the clock; a busy machine would make real times differ by more than TIMES.
RECORDED = (2.0, 1.9, 2.1, 2.05, 1.8, 2.2, 1.95)
RUNS = {
    # module, options of both runs, and what is otherwise in the second
    "agreement": (agreement.run, {"steps": 160, "prompt_tokens": 24}, {"draft": 4}),
    "perplexity": (perplexity.run, {"data": "pydoc", "limit_chunks": 6}, {"prefill_chunk": 200}),
    "mcq": (mcq.run, {"tasks": "cloze", "limit": 12}, {"prefill_chunk": 48}),
    "latency": (latency.run, {"new_tokens": 4, "repeats": 4, "batch": 2, "context": 32}, {}),
    "sensitivity": (sensitivity.run, {"documents": 3, "tokens": 40}, {"prefill_chunk": 16}),
}


def no_change(runner):
    """A check of each of a runner's comparisons with native that has no change."""
    found = []
    for metric in METRICS.values():
        if metric.runner == runner and metric.none is not None:
            room = ROUNDING.get(metric.unit, 0.0) if metric.runner != "mcq" else 0.0
            low, high = TIMES if runner == "latency" else (metric.none - room, metric.none + room)
            found.append(check(metric.name, low, high))
    return found


def second_run(make, record, runner, kv_format):
    """The tiny model's baseline measured, and measured again as if it were a candidate."""
    run, options, changes = RUNS[runner]
    ctx = make(runner, **options)
    native = run(ctx)
    other = run(make(runner, baseline=record(ctx, native), kv_format=kv_format, **{**options, **changes}))
    shape = {key: options[key] for key in ("batch", "context") if key in options}
    sides = (other.samples, other.facts), (native.samples, native.facts)
    declared = {key: value for key, value in options.items() if key in RUNNERS[runner].options}
    return MadeRun(kv_format, **shape).measure(runner, *sides, **declared)


@pytest.mark.parametrize("runner", RUNS)
def test_two_real_runs_of_the_native_baseline_never_fail(runner_context, as_baseline, runner, monkeypatch):
    """Requests of latency really run, with the times of a recorded clock."""
    clock = accumulate(ms / 1e3 for ms in cycle(RECORDED))
    monkeypatch.setattr(latency, "measure", partial(measure, clock=lambda: next(clock)))
    made = second_run(runner_context, as_baseline, runner, "native")
    checks = no_change(runner)
    found = own(judge(made, *checks))
    assert len({o.metric for o in found}) == len(checks) >= (1 if runner == "sensitivity" else 2)
    if runner == "latency":
        assert {o.status for o in found} == {PASS}
    assert not [o.sentence for o in judge(made, *checks).outcomes if o.status == FAIL]
    assert [o for o in found if o.status in (PASS, INCONCLUSIVE)]


@pytest.mark.parametrize("runner", ["agreement", "perplexity"])
def test_the_same_gate_fails_a_run_that_differs(runner_context, as_baseline, runner):
    made = second_run(runner_context, as_baseline, runner, "int8_sym")
    assert [o for o in own(judge(made, *no_change(runner))) if o.status == FAIL and o.cells == (CAND,)]


def test_over_40_cells_of_the_same_a_fail_is_no_more_frequent_than_5_percent_of_runs():
    """Limits of no change at all, on either side of which the truth lies by chance: the worst case."""
    draw = np.random.default_rng(0)
    runs, cells, documents = 1000, 40, 6
    failed = uncorrected = 0
    limits = Limits(0.0, 0.0, 0.0)
    for _ in range(runs):
        spreads = []
        for sums in draw.normal(0, 0.01, (cells, documents)).tolist():
            found = stats.clustered_ratio(sums, [1.0] * documents, range(documents))
            spreads.append(Spread(found.value, *found.interval, "pt", found.units))
        p_values = [broken(spread, limits) for spread in spreads]
        odds = corrected(p_values, ["claim"] * cells)
        statuses = [rule(s, documents, limits, *odd).status for s, odd in zip(spreads, odds, strict=True)]
        failed += FAIL in statuses
        uncorrected += min(p_values) < 0.05
    assert failed / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    assert failed / runs >= 0.02  # nor is it a gate that cannot fail
    assert uncorrected / runs > 0.8

"""The sentences of outcomes: one for each reason with its status and exit code, in sentences.txt. To rewrite
it after a change of words, run `python -m tests.gate.test_sentences` and review the difference.
"""

import math
from dataclasses import replace
from pathlib import Path

from kvbench.errors import NO_DEVICE
from kvbench.gate.evaluate import evaluate
from kvbench.gate.policy import Gate
from kvbench.gate.verdict import REASONS
from kvbench.metrics.collect import METRICS, Row
from kvbench.records.record import MISMATCH, UNVERIFIED, Level
from kvbench.records.run import MergedFrom
from kvbench.records.shards import Shard, Share
from kvbench.stats.sequential import Looks
from tests.factories.runs.made import CAND, MadeRun, decision, evidence, layers
from tests.factories.runs.timed import state, timed
from tests.factories.verdicts import (
    INT8_LAYERS,
    NATIVE_LAYERS,
    RATIO,
    bare,
    check,
    identical,
    judge,
    scored,
    scores,
    steps,
    stored,
    with_values,
)

SNAPSHOT = Path(__file__).parent / "sentences.txt"
PPL = check("ppl_delta_pct", -1, 1)
NO_DATA = {"reason": "not_available", "message": "Get it with `make data`."}


def ppl(*checks, **changes):
    run = scored()
    return judge(run, *(checks or (PPL,)), rows=with_values(run, "ppl_delta_pct", **changes))


def failed(status, **error):
    return judge(scored().change(CAND, "perplexity", status=status, error=error), PPL)


def changed(**fields):
    return bare(stored().change(CAND, **fields))


def with_manifest(run, *checks, **manifest):
    return evaluate(Gate("made", checks), run.run_with(**manifest), run.rows())


def native_baseline():
    run = stored()
    run.cells[1] = replace(run.cells[1], baseline=CAND)
    return bare(run)


def request_dropped():
    run = stored()
    run.cells[1].spec["weights"] = "fp8_block128"
    return bare(run)


def another_arm():
    run = timed([10.0] * 4, [10.0] * 4)
    run.records[1].samples["arms"][1]["ran"]["kv_format"] = "native"
    return bare(run)


def not_run():
    run = scored()
    run.records.pop()
    return judge(run, RATIO)


def impossible_sides():
    sides = [{"layer": 0, "side": "k", "amax": 2.0, "error": 0.1}]
    samples = ({"sides": sides}, {"format": "int8_sym"}), ({"sides": []}, {"format": "native"})
    run = MadeRun().measure("health", *samples)
    return bare(run, [])


def confounded():
    run = stored()
    unit = METRICS["itl_slope_to_bytes"].unit
    made = Row(CAND, "itl_slope_to_bytes", "", 0.75, unit, 6, 0.7, 0.8, note="backend differs")
    return bare(run, [*run.rows(), made])


def shard():
    run = stored()
    return with_manifest(run, shard=Share(Shard(1, 2), frozenset({run.tasks[0].key})))


SCENES = {
    "kept": lambda: judge(stored(), RATIO),
    "broken": lambda: judge(scored(1.02, spread=0.001), PPL),
    "spans_limit": lambda: judge(steps([7] * 128, [7] * 128), check("top1_teacher_forced", 0.99)),
    "may_be_chance": lambda: ppl(
        PPL, check("ppl_delta_pct", -1, 1, batch=1), value=1.3, low=1.01, high=1.59, units=None
    ),
    "underpowered": lambda: ppl(value=0.225, low=-0.5, high=0.95, units=None),
    "skewed": lambda: with_manifest(
        steps([7] * 2048, [7] * 2048, steps=2048), check("top1_teacher_forced", 0.5),
        until_decided={"agreement": Looks("steps", (2048, 4096))},
    ),
    "no_interval": lambda: judge(steps([7] * 60, [7] * 60), check("top1_teacher_forced", 0.5)),
    "unstable_machine": lambda: judge(
        timed([13.0] * 4, [10.0] * 4, devices=dict.fromkeys((1, 2, 5, 6), state("hw thermal", sm=1350))),
        check("itl_ratio", high=1.1),
    ),
    "not_finite": lambda: ppl(value=math.nan),
    "not_measured": lambda: failed("not_evaluated", **NO_DATA),
    "partial": lambda: ppl(partial="first 6 chunks"),
    "no_cell": lambda: judge(stored(), check("kv_ratio", 0, 1, kv_splits=None, batch=8)),
    "only_baselines": lambda: judge(scored(), check("ppl_delta_pct", -1, 1, kv_format="native")),
    "no_task": lambda: judge(stored(), check("ppl_delta_pct", -1, 1, variant="wikitext2 stream512")),
    "nothing_evaluated": lambda: judge(stored()),
    "verified": lambda: bare(stored()),
    "native_baseline": native_baseline,
    "another_record": lambda: changed(spec={**stored().cells[1].spec, "batch": 64}),
    "another_arm": another_arm,
    "equal_to_native": lambda: bare(identical()),
    "no_decision": lambda: changed(decision=None),
    "no_evidence": lambda: changed(evidence=None),
    "request_dropped": request_dropped,
    "undeclared_fallback": lambda: changed(
        decision=decision("int8_sym", "native", "head_dim"), evidence=evidence("native")
    ),
    "fallback": lambda: bare(
        stored(fallback="allow").change(
            CAND, decision=decision("int8_sym", "native", "head_dim"), evidence=evidence("native")
        )
    ),
    "mismatch": lambda: changed(evidence=evidence("native", Level("E1", MISMATCH, "layer 0 stores float32"))),
    "unverified": lambda: changed(evidence=evidence("int8_sym", Level("E3", UNVERIFIED, "not read"))),
    "no_device": lambda: failed("refused", reason=NO_DEVICE, message="There is no CUDA device."),
    "differing_copies": lambda: with_manifest(
        stored(), merged=MergedFrom((), ("storage on kv_format=int8_sym differs between A and B.",))
    ),
    "error": lambda: failed("error", type="OutOfMemoryError", message="no room"),
    "refused": lambda: failed("refused", reason="invalid_context", message="4096 tokens do not fit 2048."),
    "not_available": lambda: failed("not_evaluated", **NO_DATA),
    "not_run": not_run,
    "no_result": lambda: changed(samples={}),
    "implausible": lambda: bare(
        MadeRun().measure(
            "storage", (layers(22, 2_097_152, 65_536, extra=2_097_152), INT8_LAYERS[1]), NATIVE_LAYERS
        )
    ),
    "identity": lambda: bare(stored(), with_values(stored(), "kv_bytes_total", CAND, value=44_000.0)),
    "impossible_sides": impossible_sides,
    "plausible": lambda: bare(stored()),
    "confounded": confounded,
    "no_signal": lambda: bare(scores(*[[-1.0, -2.0, -3.0, -4.0]] * 9)),
    "one_choice": lambda: bare(scores(*[[-2.0, -3.0, -1.0 - i / 999, -4.0] for i in range(100)])),
    "shard": shard,
}  # fmt: skip


def line(reason):
    """The first outcome with that reason, with the exit code of its verdict."""
    verdict = SCENES[reason]()
    found = next(o for o in verdict.outcomes if o.reason == reason)
    return f"{reason} ({found.status}, exit {verdict.exit_code}): {found.sentence}\n"


def sentences():
    return "".join(map(line, REASONS))


def test_each_reason_has_an_outcome_and_its_sentence_is_the_one_of_the_snapshot():
    assert set(SCENES) == set(REASONS)
    assert sentences().splitlines() == SNAPSHOT.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    SNAPSHOT.write_text(sentences(), encoding="utf-8")

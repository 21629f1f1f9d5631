"""Verdicts on made-up runs, and the runs that the tests of several parts of the gate judge."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

from kvbench.gate.evaluate import evaluate
from kvbench.gate.policy import Check, Gate
from kvbench.gate.verdict import REASONS, Outcome, Verdict
from kvbench.metrics.collect import Row
from kvbench.records.run import Run
from tests.factories.runs.made import MadeRun, chunks, layers, storage_facts, text_facts

NATIVE_LAYERS = (layers(22, 4_194_304, 0), storage_facts(4096, 92_274_688))
INT8_LAYERS = (layers(22, 2_097_152, 65_536), storage_facts(4096, 92_274_688))
TEXT = "wikitext2 stream512"


class Judged(Protocol):
    """A made-up run."""

    @property
    def run(self) -> Run: ...
    def rows(self) -> list[Row]: ...


def check(
    metric: str, low: float = -math.inf, high: float = math.inf, required: bool = True, **where: Any
) -> Check:
    return Check(metric, where, low, high, f"within [{low:g}, {high:g}]", required)


RATIO = check("kv_ratio_16bit", 0.515625, 0.515625, kv_format="int8_sym")


def judge(run: Judged, *checks: Check, rows: Sequence[Row] | None = None, **options: Any) -> Verdict:
    """The verdict of a gate of these checks. Every outcome has a known reason and a sentence."""
    return _known(evaluate(Gate("made", checks, **options), run.run, run.rows() if rows is None else rows))


def bare(run: Judged, rows: Sequence[Row] | None = None) -> Verdict:
    """The verdict without a gate."""
    return _known(evaluate(None, run.run, run.rows() if rows is None else rows))


def _known(verdict: Verdict) -> Verdict:
    for outcome in verdict.outcomes:
        assert outcome.reason in REASONS, outcome
        assert outcome.sentence.strip(), outcome
    return verdict


def of(verdict: Verdict, status: str) -> list[Outcome]:
    return [outcome for outcome in verdict.outcomes if outcome.status == status]


def own(verdict: Verdict) -> list[Outcome]:
    """The outcomes of the gate's checks."""
    return [outcome for outcome in verdict.outcomes if outcome.bounds is not None]


def last(run: Judged, *checks: Check, **options: Any) -> Outcome:
    return judge(run, *checks, **options).outcomes[-1]


def stored(candidate: Any = INT8_LAYERS, **spec: Any) -> MadeRun:
    """A sound run that measured storage: ratio 0.515625."""
    return MadeRun(context=4096, **spec).measure("storage", candidate, NATIVE_LAYERS)


def scored(factor: float = 1.001, spread: float = 0.0) -> MadeRun:
    """`stored` with perplexity: the candidate's is `factor` times the baseline's.

    spread: the difference of the logarithm between neighbouring documents, halved.
    """
    native = chunks(*((300.0 + i, 100) for i in range(8)))
    shifts = [100 * (math.log(factor) + (spread if i % 2 else -spread)) for i in range(8)]
    candidate = chunks(*((300.0 + i + shift, 100) for i, shift in enumerate(shifts)))
    sides = (candidate, text_facts(800)), (native, text_facts(800))
    return stored().measure("perplexity", *sides, variant=TEXT)


def identical(**spec: Any) -> MadeRun:
    """A candidate with the losses of native, bit for bit."""
    same = (chunks((300.0, 100), (310.0, 100)), text_facts(200))
    return (
        MadeRun(**spec)
        .measure("storage", INT8_LAYERS, NATIVE_LAYERS)
        .measure("perplexity", same, same, variant=TEXT)
    )


def questions(
    rows: Sequence[Sequence[float]], answers: Sequence[int], task: str = "mmlu"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Samples and facts of multiple choice; rows: the scores of each question's choices."""
    asked = [
        {"id": i, "subject": f"s{i % 5}", "answer": answers[i % len(answers)], "scores": list(scores),
         "tokens": [1] * len(scores), "chars": [1] * len(scores), "skipped": None, "truncated": False}
        for i, scores in enumerate(rows)
    ]  # fmt: skip
    facts = {"task": task, "shots": 0, "choice_ids": {}, "prompt_policy": "p", "bos": "none"}
    return {"questions": asked}, {**facts, "total": len(asked), "data_sha": "d"}


def scores(*rows: Sequence[float], answers: Sequence[int] = (0, 1)) -> MadeRun:
    """Both cells answer with these scores."""
    side = questions(rows, answers)
    return MadeRun().measure("mcq", side, side, variant="mmlu 0-shot")


def steps(native: Sequence[int], candidate: Sequence[int], **options: Any) -> MadeRun:
    """Greedy tokens of both cells."""
    facts = {"steps": len(native), "prompt_tokens": 64, "prompt_sha": "p"}
    return MadeRun().measure(
        "agreement",
        ({"tokens": list(candidate), "margins": []}, facts),
        ({"tokens": list(native), "margins": [1.0] * len(native)}, {**facts, "aa_disagreements": []}),
        **options,
    )


def with_values(run: MadeRun, metric: str, cell: str | None = None, **changes: Any) -> list[Row]:
    """The run's rows; those of the metric (of one cell) have other fields."""
    return [
        Row(**{**vars(row), **changes}) if row.metric == metric and cell in (None, row.cell) else row
        for row in run.rows()
    ]

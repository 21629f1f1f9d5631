"""Checks that always run, after precision and before a gate's own: missing results, impossible values, scores
without signal."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isclose, isfinite, isnan
from typing import Any

from kvbench.errors import NO_DEVICE
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED, PASS, Outcome
from kvbench.matrix.cells import Task
from kvbench.metrics import health
from kvbench.metrics.collect import METRICS, Row, implausible, problem
from kvbench.metrics.declare.units import BYTES, RATIO
from kvbench.metrics.mcq import best_choices
from kvbench.records.record import ERROR, OK, REFUSED, Record
from kvbench.records.record import NOT_EVALUATED as TASK_NOT_EVALUATED
from kvbench.records.run import Run
from kvbench.stats.regression import SLACK
from kvbench.text import and_more

Values = Mapping[str, float]
# from so many equal results on, chance is no explanation: 8 equal picks of 4 choices happen once in 16,384
MANY = 8
# SmolLM2-135M answers 23 of 24 questions of MMLU with A: for 100 questions, all A happens 1 time in 70
PLENTY = 100
# Checks of cells whose device is missing: one on all of them, and one per task.
DEVICE, SKIPPED = "device", "skipped"
_DEVICE_SKIPPED = "They are skipped and not judged; in CI, or with --require-device, that fails."
_DEVICE_FAILS = "In CI, or with --require-device, that fails; --no-require-device skips them."
_BUSY = " If other programs used the machine, measure more: --set runners.latency.repeats=10."


def _of_task(run: Run, task: Task, check: str, status: str, reason: str, words: str, **more: Any) -> Outcome:
    """words: what follows the task's name in the sentence."""
    sentence = f"{task.title} on {some(task.cells, run.names)}{words}"
    return Outcome(check, status, reason, sentence, task.cells, variant=task.variant, **more)


def _impossible(
    run: Run, row: Row, cells: tuple[str, ...], value: float, reason: str, limit: str, why: str
) -> Outcome:
    what = f"{label(row)} on {some(cells, run.names)} is {row.unit.text(value)}"
    sentence = f"{what}, which is impossible: {why}"
    return Outcome("plausible", FAIL, reason, sentence, cells, row.metric, row.variant, value, limit)


def merged_differences(run: Run) -> Iterator[Outcome]:
    """An inconclusive outcome for each task of a merged run with different results in its sources."""
    for difference in run.manifest.merged.differences if run.manifest.merged else ():
        remedy = "It is unknown which is right: measure it again (--rerun all) and merge again."
        limit = "copies of a task agree"
        yield Outcome("merge", INCONCLUSIVE, "differing_copies", f"{difference} {remedy}", limit=limit)


def missing_device(run: Run, required: bool) -> Iterator[Outcome]:
    """One outcome where cells ask for a device that the machine lacks; a failure where it is `required`."""
    lacking = [(record, task) for record, task in run.done() if _no_device(record)]
    cells = tuple(dict.fromkeys(cell for _, task in lacking for cell in task.cells))
    if cells:
        error = (lacking[0][0].error or {})["message"]
        status, then = (FAIL, _DEVICE_FAILS) if required else (NOT_EVALUATED, _DEVICE_SKIPPED)
        sentence = f"{len(cells)} of {len(run.cells)} cells could not run: {error} {then}"
        yield Outcome(DEVICE, status, "no_device", sentence, cells, limit="the device is available")


def _no_device(record: Record | None) -> bool:
    return record is not None and record.status == REFUSED and (record.error or {}).get("reason") == NO_DEVICE


_TASK_CHECKS = {
    ERROR: ("cell error", "error"),
    REFUSED: ("refused", "refused"),
    TASK_NOT_EVALUATED: ("not available", "not_available"),
    "not run": ("not run", "not_run"),
}


def failed_tasks(run: Run) -> Iterator[Outcome]:
    """One outcome per task without a result. A task whose data is not available counts only where a required
    check needs it; a task of another shard does not count."""
    share = run.manifest.shard
    for task in run.tasks:
        record = run.record(task.key)
        if record is not None and record.status == OK:
            continue
        status = record.status if record else "not run"
        error = (record.error or {}) if record else {}
        detail = {ERROR: error.get("type"), REFUSED: error.get("reason")}.get(status)
        words = f": {problem(record, run.manifest.not_run)}" + (f" ({detail})" if detail else "")
        check, reason = (SKIPPED, "no_device") if _no_device(record) else _TASK_CHECKS[status]
        required = status != TASK_NOT_EVALUATED and (share is None or task.key in share.tasks)
        yield _of_task(run, task, check, NOT_EVALUATED, reason, words, required=required)


def empty_results(run: Run, rows: Sequence[Row]) -> Iterator[Outcome]:
    """One outcome per task that ended well and yet gave no value of any metric."""
    notes: dict[tuple[str, str, str], str] = {}
    valued = set()
    for row in rows:
        at = (row.cell, METRICS[row.metric].runner, row.variant)
        notes.setdefault(at, row.note)
        if row.value is not None:
            valued.add(at)
    for record, task in run.done():
        at = (task.cells[0], task.runner, task.variant)
        if record.status == OK and at not in valued:
            why = notes.get(at, "").rstrip(".") or "its record holds no sample"
            words = f" gives no value of any metric: {why}."
            yield _of_task(run, task, "no result", NOT_EVALUATED, "no_result", words)


def implausible_values(run: Run, rows: Sequence[Row]) -> Iterator[Outcome]:
    """A failure for each impossible value (NaN, infinity, a perplexity of exactly 1), for values that
    contradict each other, and for impossible health records; one pass when there is none. Then gains that the
    bytes do not explain, inconclusive."""
    measured = [(row, cells) for row, cells in by_task(run, rows) if row.value is not None]
    broken = [*_out_of_range(run, measured), *broken_identities(run, rows), *impossible_sides(run)]
    yield from broken
    if measured and not broken:
        sentence = f"all {len(measured)} measured values are finite and possible."
        yield Outcome("plausible", PASS, "plausible", sentence)
    yield from confounded(run, rows)


def _out_of_range(run: Run, measured: Iterable[tuple[Row, tuple[str, ...]]]) -> Iterator[Outcome]:
    for row, cells in measured:
        metric = METRICS[row.metric]
        if row.value is not None and implausible(metric, row.value):
            low, high = metric.range
            limit, note = f"within [{low:g}, {high:g}]", f" ({row.note})" if row.note else ""
            more = _BUSY if metric.runner == "latency" and metric.unit is RATIO else ""
            why = f"a possible value lies {limit}{note}.{more}"
            yield _impossible(run, row, cells, row.value, "implausible", limit, why)


# metric: (what it must equal, from the other values of its cell and the cell's keys; in words).
IDENTITIES: dict[str, tuple[Callable[[Values, Mapping[str, Any]], float], str]] = {
    "decode_tok_s": (lambda v, spec: spec["batch"] * 1e3 / v["itl_ms"], "batch / ITL"),
    "prefill_tok_s": (
        lambda v, spec: spec["batch"] * spec["context"] * 1e3 / v["ttft_ms"],
        "batch x context / TTFT",
    ),
    "kv_bytes_total": (lambda v, _: v["kv_bytes_payload"] + v["kv_bytes_scales"], "payload plus scales"),
    "weight_bytes": (
        lambda v, _: v["weight_payload_bytes"] + v["weight_scale_bytes"] + v["weight_native_bytes"],
        "codes plus scales plus native rest",
    ),
}


def broken_identities(run: Run, rows: Sequence[Row]) -> Iterator[Outcome]:
    """A failure for each value that differs, beyond rounding, from what the other values of its cell give."""
    values: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row.value is not None and isfinite(row.value):
            values.setdefault((row.cell, row.variant), {})[row.metric] = row.value
    for row, cells in by_task(run, [row for row in rows if row.metric in IDENTITIES]):
        compute, words = IDENTITIES[row.metric]
        of_cell = values.get((row.cell, row.variant), {})
        try:
            value, expected = of_cell[row.metric], compute(of_cell, run.cell(row.cell).spec)
        except (KeyError, ZeroDivisionError):
            continue  # a part was not measured, or is 0 and implausible itself
        if not isclose(value, expected, rel_tol=1e-9):
            why = f"{words} is {row.unit.text(expected)}{' in total' if row.unit is BYTES else ''}."
            yield _impossible(run, row, cells, value, "identity", f"equal to {words}", why)


def impossible_sides(run: Run) -> Iterator[Outcome]:
    """A failure for each health task whose layers and sides its store did not hold."""
    for record, task in run.done():
        if record.status != OK or task.runner != "health":
            continue
        levels = (record.evidence or {}).get("levels", ())
        stored = next((level["facts"] for level in levels if level["name"] == "E1"), None) or {}
        faults = list(health.faults(record, stored.get("layers")))
        if faults:
            words = f" lists impossible layers or sides: {faults[0]}{and_more(faults)}."
            limit = "K and V of each layer once"
            yield _of_task(run, task, "plausible", FAIL, "impossible_sides", words, limit=limit)


def confounded(run: Run, rows: Sequence[Row]) -> Iterator[Outcome]:
    """One inconclusive outcome per line of ITL over the context that gains more than its bytes allow."""
    lines: dict[tuple[float, float | None, float | None, str], list[Row]] = {}
    for row in rows:
        if row.metric != "itl_slope_to_bytes" or row.value is None:
            continue
        if row.value < SLACK and (row.high is None or row.high < 1):
            lines.setdefault((row.value, row.low, row.high, row.note), []).append(row)
    for (value, low, high, note), found in lines.items():
        row, cells = found[0], tuple(row.cell for row in found)
        interval = "" if low is None or high is None else f" (95% interval {low:.6g} to {high:.6g})"
        sentence = (
            f"{row.metric} on {some(cells, run.names)} is {value:.6g}{interval}: a token of context costs "
            "less time than its bytes allow, so something besides the format changed. "
            f"{note[:1].upper()}{note[1:]}."
        )
        of = (row.metric, row.variant, value, f"at least {SLACK}")
        yield Outcome("confounded", INCONCLUSIVE, "confounded", sentence, cells, *of)


def degenerate_scores(run: Run) -> Iterator[Outcome]:
    """An outcome for each task whose scores measure nothing, which an accuracy does not show.

    A failure where no score is a number and, from `MANY` results on, where every question is a tie, all
    questions have the same scores, or all chunks of a text have the same loss. Where every pick is the same
    choice although the answers differ, a failure if the baseline's picks differ or there are `PLENTY`
    questions; else inconclusive, because a weak model may prefer one letter.
    """
    finders = {"mcq": _same_scores, "perplexity": _same_loss}
    for record, task in run.done():
        if record.status != OK or task.runner not in finders:
            continue
        status, reason, fault = FAIL, "no_signal", finders[task.runner](record.samples)
        picks = _picks(record.samples) if not fault else []
        answers = {q["answer"] for q in _scored(record.samples)}
        if len(picks) >= MANY and len(set(picks)) == 1 and len(answers) > 1:
            native = run.record(task.baseline)
            natives = _picks(native.samples) if native and native.status == OK else []
            certain = len(picks) >= PLENTY or len(set(natives)) > 1
            status, reason = FAIL if certain else INCONCLUSIVE, "one_choice"
            fault = f"all {len(picks)} questions are answered with choice {picks[0]}"
            fault += "" if certain else "; a weak model may do that on so few, so ask more"
        if fault:
            yield _of_task(run, task, "degenerate", status, reason, f" measures nothing: {fault}.")


def _scored(samples: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [q for q in samples.get("questions", ()) if q["skipped"] is None and q["scores"]]


def _picks(samples: Mapping[str, Any]) -> list[int]:
    best = (best_choices(q["scores"], [1] * len(q["scores"])) for q in _scored(samples))
    return [choices[0] for choices in best if choices]


def _same_scores(samples: Mapping[str, Any]) -> str:
    scores = [tuple(q["scores"]) for q in _scored(samples)]
    if scores and all(isnan(x) for own in scores for x in own):
        return f"the scores of all {len(scores)} questions are NaN"
    if len(scores) < MANY:
        return ""
    if all(len(set(own)) == 1 for own in scores):
        return f"all choices have the same score in each of {len(scores)} questions"
    return f"all {len(scores)} questions have the same scores" if len(set(scores)) == 1 else ""


def _same_loss(samples: Mapping[str, Any]) -> str:
    means = [chunk["nll"] / chunk["tokens"] for chunk in samples.get("chunks", ()) if chunk["tokens"]]
    alike = len(means) >= MANY and max(means) - min(means) <= 1e-9 * abs(means[0])
    return f"all {len(means)} chunks have the same loss per token" if alike else ""


def by_task(run: Run, rows: Iterable[Row]) -> list[tuple[Row, tuple[str, ...]]]:
    """Rows that are one value spread over the cells of a shared task, as (first row, ids of the cells)."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        task = run.task_at(row.cell, METRICS[row.metric].runner, row.variant)
        groups.setdefault((task.key if task else row.cell, row.metric, row.variant), []).append(row)
    return [(group[0], tuple(row.cell for row in group)) for group in groups.values()]


def some(cells: Sequence[str], names: Mapping[str, str]) -> str:
    """`kv_format=int8_sym,batch=1 (and 3 more cells)`."""
    first, more = names.get(cells[0], cells[0]), len(cells) - 1
    return f"{first} (and {more} more cell{'s' if more > 1 else ''})" if more else first


def label(row: Row) -> str:
    return f"{row.metric} of {row.variant}" if row.variant else row.metric

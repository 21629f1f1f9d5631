"""Checks that always run, after precision and before a policy's own: missing results, impossible values, scores that say nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isclose, isfinite, isnan
from typing import Any

from kvbench.errors import NO_DEVICE
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED, PASS, Outcome
from kvbench.metrics import health
from kvbench.metrics.collect import METRICS, Row, implausible, problem
from kvbench.metrics.declare.units import BYTES, RATIO
from kvbench.records.record import ERROR, OK, REFUSED, Record
from kvbench.records.record import NOT_EVALUATED as NOT_AVAILABLE
from kvbench.records.run import Run
from kvbench.stats.regression import SLACK
from kvbench.text import and_more

Values = Mapping[str, float]
MANY = 8  # from so many equal results on, chance is no explanation: 8 picks of 4 choices are alike once in 16,384
PLENTY = 100  # SmolLM2-135M answers 23 of 24 questions of MMLU with A: of 100 all would be so 1 time in 70
# Checks of cells whose device is not here: one on all of them, and one a task.
DEVICE, SKIPPED = "device", "skipped"
_DEVICE_SKIPPED = "They are skipped and nothing is said of them; in CI, or with --require-device, that fails."
_DEVICE_FAILS = "In CI, or with --require-device, that fails; --no-require-device skips them."
_BUSY = " Where other work had the machine, measure more: --set runners.latency.repeats=10."


def merged_differences(run: Run) -> Iterator[Outcome]:
    """An inconclusive outcome for each task of a merged run that several measured, with another result each."""
    for said in run.manifest.merged.differences if run.manifest.merged else ():
        sentence = f"{said} Which is right is not known: measure it again (--rerun all) and merge again."
        yield Outcome("merge", "", None, "", INCONCLUSIVE, None, "copies of a task agree", sentence)


def missing_device(run: Run, required: bool) -> Iterator[Outcome]:
    """One outcome where cells ask for a device that the machine did not have: not evaluated, or a failure where it is `required`."""
    lacking = [(record, task) for record, task in run.done() if _no_device(record)]
    cells = tuple(dict.fromkeys(cell for _, task in lacking for cell in task.cells))
    if cells:
        count = f"{len(cells)} of {len(run.cells)} cells"
        then = _DEVICE_FAILS if required else _DEVICE_SKIPPED
        sentence = f"{count} could not run: {(lacking[0][0].error or {})['message']} {then}"
        status = FAIL if required else NOT_EVALUATED
        yield Outcome(DEVICE, "", cells[0], "", status, None, "the device is there", sentence, cells=cells)


def _no_device(record: Record | None) -> bool:
    return record is not None and record.status == REFUSED and (record.error or {}).get("reason") == NO_DEVICE


def failed_tasks(run: Run) -> Iterator[Outcome]:
    """One outcome a task that gave no result. What is not available counts only where a required check needs it, and what another
    shard measures not here."""
    share = run.manifest.shard
    for task in run.tasks:
        record = run.record(task.key)
        if record is not None and record.status == OK:
            continue
        status = record.status if record else "not run"
        error = (record.error or {}) if record else {}
        detail = {ERROR: error.get("type"), REFUSED: error.get("reason")}.get(status)
        subject = task.title
        message = problem(record, run.manifest.not_run) + (f" ({detail})" if detail else "")
        yield Outcome(
            check=SKIPPED if _no_device(record) else _TASK_CHECKS.get(status, status),
            metric="",
            cell=task.cells[0],
            variant=task.variant,
            status=NOT_EVALUATED,
            value=None,
            limit="",
            sentence=f"{subject} on {some(task.cells, run.names)}: {message}",
            required=status != NOT_AVAILABLE and (share is None or task.key in share.tasks),
            cells=task.cells,
        )


def empty_results(run: Run, rows: Sequence[Row]) -> Iterator[Outcome]:
    """One outcome a task that ended well and yet gives no value of any metric."""
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
            subject = task.title
            reason = notes.get(at, "").rstrip(".") or "its record holds no sample"
            yield Outcome(
                check="no result",
                metric="",
                cell=task.cells[0],
                variant=task.variant,
                status=NOT_EVALUATED,
                value=None,
                limit="",
                sentence=f"{subject} on {some(task.cells, run.names)} gives no value of any metric: {reason}.",
                cells=task.cells,
            )


def implausible_values(run: Run, rows: Sequence[Row]) -> Iterator[Outcome]:
    """A failure for each value that cannot be (NaN, infinity, a perplexity of exactly 1), for each pair that cannot be
    together, and for each health record whose sides cannot be; one pass when there is none. Then what the bytes do not
    explain, which is inconclusive."""
    measured = [(row, cells) for row, cells in by_task(run, rows) if row.value is not None]
    found = 0
    for row, cells in measured:
        metric = METRICS[row.metric]
        assert row.value is not None
        if implausible(metric, row.value):
            found += 1
            low, high = metric.range
            limit = f"within [{low:g}, {high:g}]"
            note = f" ({row.note})" if row.note else ""
            more = _BUSY if metric.runner == "latency" and metric.unit is RATIO else ""
            sentence = f"{label(row)} on {some(cells, run.names)} is {row.unit.text(row.value)}, which cannot be: a possible value lies {limit}{note}.{more}"
            yield Outcome(
                "plausible", row.metric, cells[0], row.variant, FAIL, row.value, limit, sentence, cells=cells
            )
    for broken in (*broken_identities(run, rows), *impossible_sides(run)):
        found += 1
        yield broken
    if measured and not found:
        sentence = f"all {len(measured)} measured values are finite and possible."
        yield Outcome("plausible", "", None, "", PASS, None, "", sentence)
    yield from confounded(run, rows)


# metric: (what it must equal, from the other values of its cell and the cell's keys; in words). None: not measured.
IDENTITIES: dict[str, tuple[Callable[[Values, Mapping[str, Any]], float], str]] = {
    "decode_tok_s": (lambda v, spec: spec["batch"] * 1e3 / v["itl_ms"], "batch / ITL"),
    "prefill_tok_s": (
        lambda v, spec: spec["batch"] * spec["context"] * 1e3 / v["ttft_ms"],
        "batch x context / TTFT",
    ),
    "kv_bytes_total": (lambda v, spec: v["kv_bytes_payload"] + v["kv_bytes_scales"], "payload and scales"),
    "weight_bytes": (
        lambda v, spec: v["weight_payload_bytes"] + v["weight_scale_bytes"] + v["weight_native_bytes"],
        "codes, scales and native remainder",
    ),
}


def broken_identities(run: Run, rows: Sequence[Row]) -> Iterator[Outcome]:
    """A failure for each value that is not what the others of its cell make it, rounding aside."""
    values: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row.value is not None and isfinite(row.value):
            values.setdefault((row.cell, row.variant), {})[row.metric] = row.value
    for row, cells in by_task(run, [row for row in rows if row.metric in IDENTITIES]):
        due_of, words = IDENTITIES[row.metric]
        try:
            due = due_of(values[row.cell, row.variant], run.cell(row.cell).spec)
        except (KeyError, ZeroDivisionError):
            continue  # a part was not measured, or is 0 and implausible itself
        if row.value is not None and isfinite(row.value) and not isclose(row.value, due, rel_tol=1e-9):
            sentence = (
                f"{label(row)} on {some(cells, run.names)} is {row.unit.text(row.value)}, which cannot be: {words} "
                f"{'make' if row.unit is BYTES else 'is'} {row.unit.text(due)}."
            )
            yield Outcome(
                "plausible", row.metric, cells[0], row.variant, FAIL, row.value, f"equal to {words}", sentence,
                cells=cells,
            )  # fmt: skip


def impossible_sides(run: Run) -> Iterator[Outcome]:
    """A failure for each health task whose layers and sides cannot be what its store held (`derive.health.faults`)."""
    for record, task in run.done():
        if record.status != OK or task.runner != "health":
            continue
        levels = (record.evidence or {}).get("levels", ())
        stored = next((level["facts"] for level in levels if level["name"] == "E1"), None) or {}
        faults = list(health.faults(record, stored.get("layers")))
        if faults:
            where = task.cells
            sentence = f"health on {some(where, run.names)} is of sides that cannot be: {faults[0]}{and_more(faults)}."
            yield Outcome(
                "plausible", "", where[0], task.variant, FAIL, None, "K and V of each layer once", sentence, cells=where
            )  # fmt: skip


def confounded(run: Run, rows: Sequence[Row]) -> Iterator[Outcome]:
    """One inconclusive outcome a line of ITL over the context that gains more than its bytes allow, on all of its cells."""
    lines: dict[tuple[float, float | None, float | None, str], list[str]] = {}
    for row in rows:
        if row.metric != "itl_slope_to_bytes" or row.value is None:
            continue
        if row.value < SLACK and (row.high is None or row.high < 1):
            lines.setdefault((row.value, row.low, row.high, row.note), []).append(row.cell)
    for (value, low, high, note), cells in lines.items():
        spread = "" if low is None or high is None else f" (95% interval {low:.6g} to {high:.6g})"
        sentence = (
            f"itl_slope_to_bytes on {some(cells, run.names)} is {value:.6g}{spread}: a token of context costs less than its bytes allow, so the format is not "
            f"all that was measured. {note[:1].upper()}{note[1:]}."
        )
        yield Outcome(
            "confounded", "itl_slope_to_bytes", cells[0], "", INCONCLUSIVE, value, f"at least {SLACK}", sentence,
            cells=tuple(cells),
        )  # fmt: skip


def degenerate_scores(run: Run) -> Iterator[Outcome]:
    """An outcome for each task whose scores measure nothing, whatever they come to: a reader of accuracy would not see it.

    A failure where no score is a number, and from `MANY` on where every question is a tie, every question has the same
    scores, or every chunk of a text the same loss. Where every pick is the same choice though the answers are not, a failure too if
    the baseline's picks differ or there are `PLENTY` questions; a weak model may have a favourite letter, so fewer are
    inconclusive.
    """
    for record, task in run.done():
        find = _DEGENERATE.get(task.runner)
        if record.status != OK or find is None:
            continue
        status, fault = FAIL, find(record.samples)
        picks = _picks(record.samples) if task.runner == "mcq" and not fault else []
        if len(picks) >= MANY and len(set(picks)) == 1 and len(_answers(record.samples)) > 1:
            native = run.record(task.baseline)
            natives = _picks(native.samples) if native and native.status == OK else []
            stuck = len(picks) >= PLENTY or len(set(natives)) > 1
            status = FAIL if stuck else INCONCLUSIVE
            fault = f"all {len(picks)} questions are answered with choice {picks[0]}, whatever they ask"
            fault += "" if stuck else ", which so few may be by a weak model; ask more"
        if fault:
            subject = task.title
            where = task.cells
            sentence = f"{subject} on {some(where, run.names)} measures nothing: {fault}."
            yield Outcome("degenerate", "", where[0], task.variant, status, None, "", sentence, cells=where)


def _scored(samples: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [q for q in samples.get("questions", ()) if q["skipped"] is None and q["scores"]]


def _picks(samples: Mapping[str, Any]) -> list[int]:
    return [max(range(len(q["scores"])), key=q["scores"].__getitem__) for q in _scored(samples)]


def _answers(samples: Mapping[str, Any]) -> set[int]:
    return {q["answer"] for q in _scored(samples)}


def _same_scores(samples: Mapping[str, Any]) -> str:
    scores = [tuple(q["scores"]) for q in _scored(samples)]
    if scores and all(isnan(x) for own in scores for x in own):
        return f"no score of its {len(scores)} questions is a number"
    if len(scores) < MANY:
        return ""
    if all(len(set(own)) == 1 for own in scores):
        return f"in each of its {len(scores)} questions every choice has the same score"
    return f"each of its {len(scores)} questions has the same scores" if len(set(scores)) == 1 else ""


def _same_loss(samples: Mapping[str, Any]) -> str:
    means = [chunk["nll"] / chunk["tokens"] for chunk in samples.get("chunks", ()) if chunk["tokens"]]
    alike = len(means) >= MANY and max(means) - min(means) <= 1e-9 * abs(means[0])
    return f"all {len(means)} chunks have the same loss a token, whatever they say" if alike else ""


def by_task(run: Run, rows: Iterable[Row]) -> list[tuple[Row, tuple[str, ...]]]:
    """Rows that are one value spread over the cells of a shared task, as (first row, ids of the cells given)."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        task = run.task_at(row.cell, METRICS[row.metric].runner, row.variant)
        groups.setdefault((task.key if task else row.cell, row.metric, row.variant), []).append(row)
    return [(group[0], tuple(row.cell for row in group)) for group in groups.values()]


def some(cells: Sequence[str], names: Mapping[str, str]) -> str:
    """`kv_format=int8_sym,batch=1 (and 3 more cells)`."""
    more = len(cells) - 1
    return names.get(cells[0], cells[0]) + (
        f" (and {more} more cell{'s' if more > 1 else ''})" if more else ""
    )


def label(row: Row) -> str:
    return f"{row.metric} of {row.variant}" if row.variant else row.metric


_DEGENERATE = {"mcq": _same_scores, "perplexity": _same_loss}

_TASK_CHECKS = {ERROR: "cell error", REFUSED: "refused", NOT_AVAILABLE: "not available"}

"""Judging a run: the unremovable checks first, then the policy's, each with an outcome in one sentence.

A value with a 95% interval passes only when the whole interval keeps the limit, fails only when the whole interval
breaks it, and is inconclusive between; a value without one is judged by itself. A NaN fails, a missing value never
passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvbench.guards import by_task, empty_results, failed_tasks, implausible_values, label, say, some
from kvbench.metrics import METRICS, Row
from kvbench.policy import Check, Gate, load
from kvbench.precision import precision
from kvbench.record import Record
from kvbench.values import text
from kvbench.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED, PASS, Outcome, Verdict, exit_code_of

__all__ = ["Check", "Gate", "Outcome", "Verdict", "evaluate", "load"]


def evaluate(
    gate: Gate | None, manifest: Mapping[str, Any], records: Iterable[Record], rows: Sequence[Row]
) -> Verdict:
    """`rows` as `metrics.derive(manifest, records)` gives them. Without a gate only the unremovable checks run."""
    records = list(records)
    outcomes = [
        *precision(manifest, records, gate.allow_fallback if gate else False),
        *failed_tasks(manifest, records),
        *empty_results(manifest, records, rows),
        *implausible_values(manifest, rows),
    ]
    if gate:
        own = [outcome for check in gate.checks for outcome in _check(check, gate, manifest, rows)]
        if all(outcome.status == NOT_EVALUATED for outcome in own):
            sentence = f"none of the {len(gate.checks)} checks of the gate {gate.name} was evaluated, which is no pass."
            own.append(Outcome("gate", "", None, "", NOT_EVALUATED, None, "", sentence))
        outcomes += own
    return Verdict(tuple(outcomes), exit_code_of(outcomes))


def _check(check: Check, gate: Gate, manifest: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[Outcome]:
    """One outcome a value, where cells that share a task share a value; and one for what is missing altogether."""
    metric = METRICS[check.metric]
    names = {cell["id"]: cell["name"] for cell in manifest["cells"]}
    cells = [cell for cell in manifest["cells"] if _matches(check.where, cell["spec"])]
    if not cells:
        chosen = ", ".join(f"{key}={text(value)}" for key, value in check.where.items() if key != "variant")
        yield _missing(
            check, (), f"{check.metric} was not measured: no cell of this run has {chosen or 'anything'}."
        )
        return
    due = [cell["id"] for cell in cells if not (metric.paired and cell["baseline"] == cell["id"])]
    if not due:
        yield _missing(
            check,
            (),
            f"{check.metric} compares with the baseline, and only baselines were picked: not measured.",
        )
        return
    variant = check.where.get("variant")
    mine = [r for r in rows if r.metric == check.metric and r.cell in due and variant in (None, r.variant)]
    absent = tuple(cell for cell in due if cell not in {row.cell for row in mine})
    if absent:
        of = f" of {variant}" if variant else ""
        sentence = f"{check.metric}{of} on {some(absent, names)} was not measured: the run has no {metric.runner} task for it."
        yield _missing(check, absent, sentence)
    for row, shared in by_task(manifest, mine):
        yield _judge(check, gate, row, shared, f"{label(row)} on {some(shared, names)}")


def _matches(where: Mapping[str, Any], spec: Mapping[str, Any]) -> bool:
    """Equal values, and `true` is not 1."""
    return all(
        spec.get(key) == value and isinstance(spec.get(key), bool) == isinstance(value, bool)
        for key, value in where.items()
        if key != "variant"
    )


def _missing(check: Check, cells: tuple[str, ...], sentence: str) -> Outcome:
    """Nothing there to judge is a failure of a required check, never a pass."""
    status = FAIL if check.required else NOT_EVALUATED
    return _outcome(check, status, sentence, None, cells, str(check.where.get("variant", "")))


def _judge(check: Check, gate: Gate, row: Row, cells: tuple[str, ...], subject: str) -> Outcome:
    value = row.value
    if value is None:
        status, sentence = (
            NOT_EVALUATED,
            f"{subject} was not measured: {row.note.rstrip('.') or 'no reason was recorded'}.",
        )
    elif not math.isfinite(value):
        note = f" ({row.note})" if row.note else ""
        status, sentence = FAIL, f"{subject} is {value}{note}, which keeps no limit ({check.limit})."
    elif row.partial and not gate.allow_partial:
        found = f"{subject} is {say(value, row.unit)}, but partial ({row.partial})"
        status, sentence = (
            NOT_EVALUATED,
            f"{found}; a partial result counts only with allow_partial: true in the gate.",
        )
    else:
        low, high = value if row.low is None else row.low, value if row.high is None else row.high
        status = _status(check, low, high)
        reason = _REASONS[status].format(limit=check.limit)
        power = f" ({row.note})" if status == INCONCLUSIVE and row.note else ""
        sentence = f"{subject} is {say(value, row.unit)}{_spread(row)}; {reason}{power}."
    return _outcome(check, status, sentence, value, cells, row.variant)


def _status(check: Check, low: float, high: float) -> str:
    """[low, high] against the check's own interval; a NaN bound compares false and is thus inconclusive."""
    if check.low <= low and high <= check.high:
        return PASS
    return FAIL if low > check.high or high < check.low else INCONCLUSIVE


_REASONS = {
    PASS: "the limit is {limit}: kept",
    FAIL: "the limit is {limit}: broken",
    INCONCLUSIVE: "the limit is {limit}: the interval lies on both sides of it, so more data must decide",
}


def _spread(row: Row) -> str:
    parts = []
    if row.low is not None and row.high is not None:
        parts.append(f"95% interval {row.low:.6g} to {row.high:.6g}")
    if row.n is not None:
        parts.append(f"n={row.n:,}")
    return f" ({', '.join(parts)})" if parts else ""


def _outcome(
    check: Check, status: str, sentence: str, value: float | None, cells: tuple[str, ...], variant: str
) -> Outcome:
    return Outcome(
        check=check.name,
        metric=check.metric,
        cell=cells[0] if cells else None,
        variant=variant,
        status=status,
        value=value,
        limit=check.limit,
        sentence=sentence,
        required=check.required,
        why=check.why,
        cells=cells,
    )

"""Metrics: named with their unit, derived from records on reading, paired with their baselines.

Adding a metric: one entry in `METRICS` (`kvbench/metrics/table.py`) and the lines in `kvbench/derive/<runner>.py` that yield its value.
Adding a runner: its entries here, its file there, and one line in `DERIVE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf, isfinite

from kvbench.matrix.cells import Task
from kvbench.metrics import (
    agreement,
    contexts,
    gemm,
    generate,
    health,
    latency,
    mcq,
    parity,
    perplexity,
    sensitivity,
    storage,
    transfer,
)
from kvbench.metrics.table import METRICS, UNIT_DOMAIN, Metric
from kvbench.metrics.value import Value
from kvbench.records.record import OK, Record
from kvbench.records.run import Run

__all__ = ["DERIVE", "METRICS", "UNIT_DOMAIN", "Metric", "Row", "derive", "implausible", "problem"]


@dataclass(frozen=True)
class Row:
    """One value of one metric on one cell.

    value None: not measured (`note` says why); NaN stays NaN. low, high: 95% interval or None; n: samples behind it; units:
    the documents, subjects or pairs that a t-interval rests on, None where the interval is a normal one.
    variant: corpus or question set with its protocol words, or "". baseline: id of the cell it is compared with, for
    metrics that are differences, else None. partial: see Record.
    """

    cell: str
    metric: str
    variant: str
    value: float | None
    unit: str
    n: int | None = None
    low: float | None = None
    high: float | None = None
    baseline: str | None = None
    partial: str | None = None
    note: str = ""
    units: float | None = None


# A runner's values from one record and its baseline's (None: this is the baseline, or it has no result).
DERIVE: dict[str, Callable[[Record, Record | None], Iterator[Value]]] = {
    "storage": storage.values,
    "transfer": transfer.values,
    "parity": parity.values,
    "health": health.values,
    "sensitivity": sensitivity.values,
    "gemm": gemm.values,
    "latency": latency.values,
    "agreement": agreement.values,
    "generate": generate.values,
    "perplexity": perplexity.values,
    "mcq": mcq.values,
}


def derive(run: Run) -> list[Row]:
    """Rows of every metric of every task of the manifest, on each of the task's cells, in manifest order.

    Pure. Every metric that a task should give has a row: where there is no value (the task failed, was refused or did
    not run, the baseline has no result, or the two are not comparable) the value is None and the note says why.
    """
    lines = contexts.values(run)  # of several records together
    rows: list[Row] = []
    for task in run.tasks:
        record, baseline = run.record(task.key), run.record(task.baseline)
        values = _values(task, record, baseline, lines.get(task.key, ()), run.manifest.not_run)
        partial = record.partial if record else None
        for value in values:
            metric = METRICS[value.metric]
            limited = partial or (baseline.partial if metric.paired and baseline else None)
            rows += [
                Row(
                    cell=cell,
                    metric=value.metric,
                    variant=task.variant,
                    value=value.value,
                    unit=metric.unit,
                    n=value.n,
                    low=value.low,
                    high=value.high,
                    baseline=run.cell(cell).baseline if metric.paired else None,
                    partial=limited,
                    note=value.note,
                    units=value.units,
                )
                for cell in task.cells
            ]
    return rows


def implausible(metric: Metric, value: float) -> bool:
    """True for NaN, infinity and anything outside the metric's plausible interval."""
    low, high = metric.plausible or (-inf, inf)
    return not (isfinite(value) and low <= value <= high)


def problem(record: Record | None, missing: str = "not run") -> str:
    """Why there is nothing to derive from this record, as the beginning of a note; "" when there is. missing: of no record."""
    if record is None:
        return missing
    if record.status == OK:
        return ""
    message = (record.error or {}).get("message", "no message was recorded")
    return f"{record.status.replace('_', ' ')}: {message}"


def _values(
    task: Task, record: Record | None, baseline: Record | None, shared: Iterable[Value], unrun: str
) -> list[Value]:
    """One value for each metric of the task's runner, in the order of METRICS; None where there is none.

    shared: values that the record has together with others. unrun: what is said where there is no record.
    """
    is_baseline = task.baseline is None
    missing = problem(record, unrun)
    pairing = "" if is_baseline else problem(baseline, unrun)
    found: dict[str, Value] = {}
    if record and not missing:
        try:
            found = {v.metric: v for v in DERIVE[task.runner](record, None if pairing else baseline)}
            found |= {v.metric: v for v in shared}
        except KeyError as e:
            missing = f"the record lacks {e}; run the matrix again to measure it anew"
        except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as e:
            missing = f"the record's samples cannot be read ({type(e).__name__}: {e}); run the matrix again"
    values = []
    for metric in METRICS.values():
        if metric.runner != task.runner or (is_baseline and metric.paired):
            continue
        reason = missing or (
            f"the baseline has no result ({pairing})" if metric.paired and pairing else "not measured"
        )
        values.append(found.get(metric.name) or Value(metric.name, None, note=reason))
    return values

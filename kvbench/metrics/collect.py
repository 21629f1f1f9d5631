"""The metrics that the files of this package declare, and their values for the records of a run."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from math import isfinite
from typing import Protocol, cast

from kvbench.matrix.cells import Task
from kvbench.matrix.runners import RUNNERS
from kvbench.metrics import contexts
from kvbench.metrics.declare.metric import Metric, Table
from kvbench.metrics.declare.units import Unit
from kvbench.metrics.declare.value import Value
from kvbench.records.record import OK, Record
from kvbench.records.run import Run


@dataclass(frozen=True)
class Row:
    """A value of a metric on a cell; None if it was not measured (see `note`). low, high: 95% interval. n:
    samples; units: documents, subjects or pairs behind a t-interval, None for a normal interval. variant:
    data set and protocol. baseline: id of the cell that a difference is taken from. partial: as in Record."""

    cell: str
    metric: str
    variant: str
    value: float | None
    unit: Unit
    n: int | None = None
    low: float | None = None
    high: float | None = None
    baseline: str | None = None
    partial: str | None = None
    note: str = ""
    units: float | None = None


class Reader(Protocol):
    """A file of this package."""

    TABLES: tuple[Table, ...]
    FACTS: tuple[str, ...]

    def values(self, record: Record, baseline: Record | None, /) -> Iterator[Value]:
        """Values from one record and its baseline's (None: this is the baseline, or it has no result)."""


READERS: dict[str, Reader] = {
    name: cast(Reader, import_module(f"kvbench.metrics.{name}")) for name in RUNNERS
}
DERIVE: dict[str, Callable[[Record, Record | None], Iterator[Value]]] = {
    name: reader.values for name, reader in READERS.items()
}

# Runners whose tables come first in a report; the others follow in the order of RUNNERS.
_FIRST = ("storage", "gemm", "transfer", "latency", "perplexity", "agreement", "generate", "mcq")


def _tables(runner: str) -> Iterator[Table]:
    for table in READERS[runner].TABLES:
        metrics = tuple(replace(m, runner=runner, counted=table.counted) for m in table.metrics)
        yield replace(table, runner=runner, metrics=metrics)


TABLES: tuple[Table, ...] = tuple(
    table for runner in dict.fromkeys((*_FIRST, *RUNNERS)) for table in _tables(runner)
)
METRICS: dict[str, Metric] = {
    metric.name: metric for runner in RUNNERS for table in _tables(runner) for metric in table.metrics
}


def derive(run: Run) -> list[Row]:
    """Rows of every metric of every task, on each of the task's cells, in manifest order. Every metric of a
    task's runner has a row: where there is no value it is None and the note says why."""
    lines = contexts.values(run)  # of several records together
    rows: list[Row] = []
    for task in run.tasks:
        record, baseline = run.record(task.key), run.record(task.baseline)
        values = _values(task, record, baseline, lines.get(task.key, ()), run.manifest.not_run)
        partial = record.partial if record else None
        for value in values:
            metric = METRICS[value.metric]
            row = Row(
                "", value.metric, task.variant, value.value, metric.unit, value.n, value.low, value.high,
                partial=partial or (baseline.partial if metric.paired and baseline else None),
                note=value.note, units=value.units,
            )  # fmt: skip
            rows += [
                replace(row, cell=cell, baseline=run.cell(cell).baseline if metric.paired else None)
                for cell in task.cells
            ]
    return rows


def implausible(metric: Metric, value: float) -> bool:
    """True for NaN, infinity and anything outside the metric's plausible interval."""
    low, high = metric.range
    return not (isfinite(value) and low <= value <= high)


def problem(record: Record | None, missing: str = "not run") -> str:
    """Why this record has no values, or "". missing: the reason where there is no record."""
    if record is None:
        return missing
    if record.status == OK:
        return ""
    message = (record.error or {}).get("message", "no message was recorded")
    return f"{record.status.replace('_', ' ')}: {message}"


def _values(
    task: Task, record: Record | None, baseline: Record | None, together: Iterable[Value], unrun: str
) -> list[Value]:
    """One value for each metric of the task's runner. together: values that the record has together with
    others; unrun: the reason where there is no record."""
    is_baseline = task.baseline is None
    missing = problem(record, unrun)
    pairing = "" if is_baseline else problem(baseline, unrun)
    found: dict[str, Value] = {}
    if record and not missing:
        try:
            found = {v.metric: v for v in DERIVE[task.runner](record, None if pairing else baseline)}
            found |= {v.metric: v for v in together}
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

"""What a report is made of: the shapes that the report needs of a verdict, and the four inputs as one object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvbench.gate.verdict import NOT_JUDGED, PASS
from kvbench.matrix.cells import Task
from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import BYTES
from kvbench.records.record import Record
from kvbench.records.run import Manifest, Run


class OutcomeLike(Protocol):
    """One check on one value. status: "pass", "fail", "inconclusive" or "not_evaluated"; metric: "" where it is not
    about one; cells: ids of all cells that share the value, cell: the first of them or None; bounds: the limit as numbers.
    """

    @property
    def check(self) -> str: ...
    @property
    def metric(self) -> str: ...
    @property
    def cell(self) -> str | None: ...
    @property
    def cells(self) -> Sequence[str]: ...
    @property
    def variant(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def value(self) -> Any: ...
    @property
    def limit(self) -> Any: ...
    @property
    def sentence(self) -> str: ...
    @property
    def required(self) -> bool: ...
    @property
    def why(self) -> str: ...
    @property
    def mde(self) -> float | None: ...
    @property
    def n_needed(self) -> int | None: ...
    @property
    def look(self) -> str: ...
    @property
    def level(self) -> float | None: ...
    @property
    def bounds(self) -> tuple[float, float] | None: ...


class VerdictLike(Protocol):
    @property
    def outcomes(self) -> Sequence[OutcomeLike]: ...
    @property
    def exit_code(self) -> int: ...
    @property
    def word(self) -> str: ...


# Byte counts that the storage runner keeps as facts beside its samples: fact, metric. Null stays "not measured", so
# a run on a CPU has no device peak rather than a peak of 0.
_FACT_METRICS = (
    ("page_table_bytes", "page_table_bytes"),
    ("held_bytes", "held_bytes"),
    ("workspace_bytes", "workspace_bytes"),
    ("device_peak_bytes", "device_peak_bytes"),
)


@dataclass(frozen=True)
class JudgedRun:
    """A run with its rows, as `kvbench.metrics.collect.derive` gives them, and its verdict."""

    run: Run
    rows: Sequence[Row]
    verdict: VerdictLike

    @property
    def manifest(self) -> Manifest:
        return self.run.manifest

    @property
    def records(self) -> tuple[Record, ...]:
        return self.run.records

    def done(self) -> list[tuple[Record, Task]]:
        """The records with their tasks, in task order."""
        return self.run.done()

    def with_fact_rows(self) -> JudgedRun:
        """The same run with the storage facts as rows of their own, so that every output shows them alike."""
        have = {(row.cell, row.metric) for row in self.rows}
        extra = [
            Row(cell, metric, "", record.facts[fact], BYTES, partial=record.partial)
            for record, task in self.done()
            if record.runner == "storage" and record.status == "ok"
            for fact, metric in _FACT_METRICS
            if fact in record.facts
            for cell in task.cells
            if (cell, metric) not in have
        ]
        return replace(self, rows=[*self.rows, *extra])


def judged(run: JudgedRun) -> bool:
    """Whether any number was held to a limit: the checks that always run are no gate."""
    return any(o.metric and o.check not in ("plausible", "confounded") for o in run.verdict.outcomes)


def verdict_word(run: JudgedRun) -> str:
    """The verdict's word; `not_judged` where it would be a pass and no gate said what passes."""
    return NOT_JUDGED if run.verdict.word == PASS and not judged(run) else run.verdict.word


def model_digests(tasks: Iterable[Task]) -> str:
    """Of the contents of every model that the run's tasks are of, native ones too; "" where an old run keeps none."""
    found = [task.digests for task in tasks]
    return ", ".join(dict.fromkeys(str(d[key]) for d in found for key in ("model", "native") if d.get(key)))


# What each status does to the exit code, gravest first: 1, then 4, then 3.
_ORDER = ("fail", "inconclusive", "not_evaluated")


def counts(outcome: OutcomeLike) -> bool:
    """Whether an outcome keeps the exit code from being 0 (`kvbench.gate.verdict.exit_code_of`)."""
    return outcome.status in ("fail", "inconclusive") or (
        outcome.status == "not_evaluated" and outcome.required
    )


def worst(outcomes: Iterable[OutcomeLike]) -> list[OutcomeLike]:
    """Failures, then what is inconclusive, then what was not evaluated and had to be; the gate's order within each."""
    return sorted(filter(counts, outcomes), key=lambda outcome: _ORDER.index(outcome.status))

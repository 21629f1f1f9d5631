"""What a report is made of: a run with its rows and its verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED, NOT_JUDGED, PASS, Outcome, Verdict
from kvbench.matrix.cells import Task
from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import BYTES
from kvbench.records.record import Record
from kvbench.records.run import Manifest, Run

# Byte counts that the storage runner keeps as facts. Null stays "not measured": a run on a CPU has no device
# peak, not a peak of 0.
_FACT_METRICS = ("page_table_bytes", "held_bytes", "workspace_bytes", "device_peak_bytes")


@dataclass(frozen=True)
class JudgedRun:
    """A run with its rows, as `kvbench.metrics.collect.derive` gives them, and its verdict."""

    run: Run
    rows: Sequence[Row]
    verdict: Verdict

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
        """The same run with the storage facts as additional rows, so that every output shows them alike."""
        have = {(row.cell, row.metric) for row in self.rows}
        extra = [
            Row(cell, metric, "", record.facts[metric], BYTES, partial=record.partial)
            for record, task in self.done()
            if record.runner == "storage" and record.status == "ok"
            for metric in _FACT_METRICS
            if metric in record.facts
            for cell in task.cells
            if (cell, metric) not in have
        ]
        return replace(self, rows=[*self.rows, *extra])


def judged(run: JudgedRun) -> bool:
    """Whether some number was compared with a gate's limit; the built-in checks are not a gate."""
    return any(o.metric and o.check not in ("plausible", "confounded") for o in run.verdict.outcomes)


def verdict_word(run: JudgedRun) -> str:
    """The verdict's word; `not_judged` instead of a pass where there was no gate."""
    return NOT_JUDGED if run.verdict.word == PASS and not judged(run) else run.verdict.word


def model_digests(tasks: Iterable[Task]) -> str:
    """Digests of all models of the tasks, native ones included; "" where the run recorded none."""
    found = [task.digests for task in tasks]
    return ", ".join(dict.fromkeys(str(d[key]) for d in found for key in ("model", "native") if d.get(key)))


_WORST_FIRST = (FAIL, INCONCLUSIVE, NOT_EVALUATED)


def worst(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The outcomes that keep the exit code from 0: failed, inconclusive, then required but not evaluated.

    Within each status they are in the gate's order.
    """
    bad = [
        o for o in outcomes if o.status in (FAIL, INCONCLUSIVE) or (o.status == NOT_EVALUATED and o.required)
    ]
    return sorted(bad, key=lambda outcome: _WORST_FIRST.index(outcome.status))

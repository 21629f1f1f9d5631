"""What a report is made of: a run with its rows and its verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED, NOT_JUDGED, PASS, Outcome, Verdict
from kvbench.matrix.cells import Task
from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import BYTES
from kvbench.records.record import OK, Record
from kvbench.records.run import Manifest, Run
from kvbench.render.labels import Label, Labels

# Byte counts that the storage runner keeps as facts. Null stays "not measured": a run on a CPU has no device
# peak, not a peak of 0.
_FACT_METRICS = ("page_table_bytes", "held_bytes", "workspace_bytes", "device_peak_bytes")
_WORST_FIRST = (FAIL, NOT_EVALUATED, INCONCLUSIVE)  # as `exit_code_of` ranks them
K = TypeVar("K")


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

    @cached_property
    def labels(self) -> Labels:
        return Labels(self.run)

    def done(self) -> list[tuple[Record, Task]]:
        """The records with their tasks, in task order."""
        return self.run.done()

    def completed(self, runner: str) -> Iterator[tuple[Record, Task, tuple[str, ...]]]:
        """Each record of a runner with status OK, its task, and the ids of its cells (at least one)."""
        for record, task in self.done():
            cells = tuple(cell for cell in task.cells if cell in self.run.cells)
            if record.runner == runner and record.status == OK and cells:
                yield record, task, cells

    def gathered(self, found: Iterable[tuple[K, Iterable[str]]]) -> list[tuple[K, tuple[Label, ...]]]:
        """Each key once, in order of appearance, with the places of all its cells."""
        cells: dict[K, list[str]] = {}
        for key, own in found:
            cells.setdefault(key, []).extend(own)
        return [(key, self.labels.places(own)) for key, own in cells.items()]

    def with_fact_rows(self) -> JudgedRun:
        """The same run with the storage facts as additional rows, so that every output shows them alike."""
        have = {(row.cell, row.metric) for row in self.rows}
        extra = [
            Row(cell, metric, "", record.facts[metric], BYTES, partial=record.partial)
            for record, task in self.done()
            if record.runner == "storage" and record.status == OK
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


def worst(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """What keeps the exit code from 0: failed, required but not evaluated, then inconclusive."""
    bad = [o for o in outcomes if o.status in _WORST_FIRST and (o.status != NOT_EVALUATED or o.required)]
    return sorted(bad, key=lambda outcome: _WORST_FIRST.index(outcome.status))

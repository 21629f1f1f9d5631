"""The records that figures read."""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.matrix.cells import Task
from kvbench.records.record import OK, Record
from kvbench.render.labels import Labels
from kvbench.report.model import JudgedRun


def completed(run: JudgedRun, labels: Labels, runner: str) -> Iterator[tuple[Record, Task, tuple[str, ...]]]:
    """Yield each record of a runner that has status OK, its task, and the ids of its cells (at least one)."""
    for record, task in run.done():
        cells = tuple(cell for cell in task.cells if cell in labels.cells)
        if record.runner == runner and record.status == OK and cells:
            yield record, task, cells

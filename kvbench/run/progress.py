"""Progress on stderr: a live bar with the current cell and the time left on a terminal, one line a task elsewhere."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from kvbench.machine.ci import in_ci
from kvbench.matrix.cells import Task
from kvbench.records.record import OK, Record
from kvbench.run.time_left import TimeLeft, said

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvbench.run.execute import Plan


def _what(task: Task) -> str:
    return f"{task.runner} {task.variant}".strip()


class Lines:
    """One line a task, when it has ended: for logs and CI."""

    def start(self, plan: Plan) -> None:
        self._total = len(plan.todo) + len(plan.reused)
        self._left = TimeLeft(plan.todo)
        if plan.reused:
            self._say(f"{len(plan.reused)} of {self._total} tasks are already measured and are reused")

    def task(self, index: int, task: Task, name: str) -> None:
        self._label = f"[{index}/{self._total}] {_what(task)}: {name or 'the only cell'}"

    def inside(self, done: int, total: int, note: str) -> None:
        """Nothing: a log wants one line a task."""

    def finished(self, record: Record) -> None:
        self._left.finished(record.key, record.seconds, record.status == OK)
        left = self._left.rest().words
        ending = record.status if record.error is None else f"{record.status}: {record.error['message']}"
        self._say(f"{self._label}: {ending} in {record.seconds:.1f} s{', ' if left else ''}{left}")

    def close(self) -> None:
        """Nothing to tidy."""

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Bar:
    """A live bar a run, with one a task below it. Finished tasks that did not end well stay visible as lines."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar: Progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False), console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self._all: Any = None
        self._one: Any = None
        self._label = ""

    def start(self, plan: Plan) -> None:
        self._left = TimeLeft(plan.todo)
        self._bar.start()
        total = len(plan.todo) + len(plan.reused)
        self._all = self._bar.add_task("matrix", total=total, completed=len(plan.reused), left="")

    def task(self, index: int, task: Task, name: str) -> None:
        self._task, self._began = task, time.monotonic()
        self._label = f"{_what(task)}: {name or 'the only cell'}"
        self._one = self._bar.add_task(self._label, total=None, left="")
        self._bar.update(self._all, left=self._left.rest().words)

    def inside(self, done: int, total: int, note: str) -> None:
        """The time left of the task by its own rate so far, and that of the matrix with it."""
        elapsed, share = time.monotonic() - self._began, min(done / total, 1.0) if total else 0.0
        own = f"about {said(elapsed * (1 - share) / share)} left" if 0 < share < 1 else ""
        self._bar.update(
            self._one, completed=done, total=total, description=f"{self._label} {note}".strip(), left=own
        )
        self._bar.update(self._all, left=self._left.rest(self._task, elapsed, share).words)

    def finished(self, record: Record) -> None:
        self._left.finished(record.key, record.seconds, record.status == OK)
        self._bar.remove_task(self._one)
        self._bar.update(self._all, advance=1, left=self._left.rest().words)
        if record.error is not None:
            self._bar.console.print(
                f"{self._label}: {record.status}: {record.error['message']}", markup=False
            )

    def close(self) -> None:
        self._bar.stop()


class Silent(Lines):
    """Nothing, for --quiet; how each task ended stands in the report."""

    def _say(self, text: str) -> None:
        """Nothing."""


def watcher(plain: bool = False, quiet: bool = False) -> Lines | Bar:
    """plain: no bar, whatever the terminal can do. A terminal that cannot move its cursor, and a CI log, get lines too."""
    if quiet:
        return Silent()
    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not in_ci(os.environ)
    return Bar() if live and not plain else Lines()

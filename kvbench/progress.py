"""Progress on stderr: a live bar with the current cell and the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from kvbench.cells import Task
from kvbench.ci import in_ci
from kvbench.record import Record

if TYPE_CHECKING:
    from rich.progress import Progress


def _what(task: Task) -> str:
    return f"{task.runner} {task.variant}".strip()


class Lines:
    """One line a task: for logs and CI."""

    def __init__(self) -> None:
        self._total, self._label, self._began = 0, "", time.monotonic()
        self._times: list[float] = []
        self._left = 0

    def start(self, total: int, reused: int) -> None:
        self._total, self._left = total, total - reused
        if reused:
            self._say(f"{reused} of {total} tasks are already measured and are reused")

    def task(self, index: int, task: Task, name: str) -> None:
        self._label = f"[{index}/{self._total}] {_what(task)}: {name or 'the only cell'}"

    def inside(self, done: int, total: int, note: str) -> None:
        """Nothing: a log wants one line a task."""

    def finished(self, record: Record) -> None:
        self._times.append(record.seconds)
        remaining = self._left - len(self._times)
        left = f", about {remaining * sum(self._times) / len(self._times):.0f} s left" if remaining else ""
        ending = record.status if record.error is None else f"{record.status}: {record.error['message']}"
        self._say(f"{self._label}: {ending} in {record.seconds:.1f} s{left}")

    def close(self) -> None:
        """Nothing to tidy."""

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Bar:
    """A live bar a run, with one a task below it. Finished tasks that did not end well stay visible as lines."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bar: Progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self._all: Any = None
        self._one: Any = None
        self._label = ""

    def start(self, total: int, reused: int) -> None:
        self._bar.start()
        self._all = self._bar.add_task("matrix", total=total, completed=reused)

    def task(self, index: int, task: Task, name: str) -> None:
        self._label = f"{_what(task)}: {name or 'the only cell'}"
        self._one = self._bar.add_task(self._label, total=None)

    def inside(self, done: int, total: int, note: str) -> None:
        self._bar.update(self._one, completed=done, total=total, description=f"{self._label} {note}".strip())

    def finished(self, record: Record) -> None:
        self._bar.remove_task(self._one)
        self._bar.advance(self._all)
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

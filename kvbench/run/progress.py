"""Progress on stderr: a live bar with the cell and the time left on a terminal, one line per task elsewhere.

The time left is estimated from tasks of the same kind (`_kinds`). Tasks of different runners differ a
thousandfold, so no mean over runners is used. Times are not scaled by batch or context: on a GPU the first
task of a kind is mostly loading and compiling.
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvbench.machine.ci import in_ci
from kvbench.matrix.cells import Task
from kvbench.records.record import OK, Record
from kvbench.run.execute import Plan

Kind = tuple[object, ...]


@dataclass(frozen=True)
class Rest:
    """seconds: of the tasks whose kind was timed, None for none; untimed: how many other tasks are left."""

    seconds: float | None
    untimed: int

    def __str__(self) -> str:
        """`about 4 min left, and 3 tasks not timed yet`, or "" where nothing is left."""
        tasks = f"{self.untimed} task{'s' if self.untimed != 1 else ''} not timed yet"
        if self.seconds is None:
            return tasks if self.untimed else ""
        more = f", and {tasks}" if self.untimed else ""
        return f"about {duration(self.seconds)} left{more}"


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


class TimeLeft:
    """todo: the tasks that will run, in order. Times are in seconds."""

    def __init__(self, todo: Sequence[Task]) -> None:
        self._todo = list(todo)
        self._times: dict[Kind, list[float]] = defaultdict(list)

    def finished(self, key: str, seconds: float, ok: bool) -> None:
        """A task ended, in any order. ok: whether it measured; times of refusals and errors are not used."""
        task = next(task for task in self._todo if task.key == key)
        self._todo.remove(task)
        if ok:
            for kind in _kinds(task):
                self._times[kind].append(seconds)

    def of(self, task: Task) -> float | None:
        """The expected seconds of a task, None where no task of its kind was timed."""
        times = next((self._times[kind] for kind in _kinds(task) if kind in self._times), None)
        return None if times is None else fmean(times)

    def rest(self, running: Task | None = None, elapsed: float = 0.0, share: float = 0.0) -> Rest:
        """The rest of all tasks. running: the current one, of which `share` (0 to 1) took `elapsed`: its own
        rate is preferred to the times of other tasks."""
        guesses = []
        for task in self._todo:
            guess = self.of(task)
            if task is running and share > 0:
                guess = elapsed * (1 - share) / share
            elif task is running and guess is not None:
                guess = max(guess - elapsed, 0.0)
            guesses.append(guess)
        known = [guess for guess in guesses if guess is not None]
        return Rest(sum(known) if known else None, len(guesses) - len(known))


def _kinds(task: Task) -> tuple[Kind, ...]:
    """Same runner, variant, side (baseline or not) and shape; then any shape; either side; any variant."""
    side = task.baseline is None
    shape = task.spec.get("batch"), task.spec.get("context")
    of = task.runner, task.variant
    return (*of, side, *shape), (*of, side), of, (task.runner,)


class Lines:
    """One line per task, when it has ended: for logs and CI."""

    def start(self, plan: Plan) -> None:
        self._total = len(plan.todo) + len(plan.reused)
        self._left = TimeLeft(plan.todo)
        if plan.reused:
            self._print(f"{len(plan.reused)} of {self._total} tasks are already measured and are reused")

    def task(self, index: int, task: Task, name: str) -> None:
        self._label = f"[{index}/{self._total}] {task.title}: {name or 'the only cell'}"

    def inside(self, done: int, total: int, note: str) -> None: ...

    def finished(self, record: Record) -> None:
        self._left.finished(record.key, record.seconds, record.status == OK)
        left = str(self._left.rest())
        self._print(f"{self._label}: {_ending(record)} in {record.seconds:.1f} s{', ' if left else ''}{left}")

    def close(self) -> None: ...

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Bar:
    """A live bar per run, with one per task below it. Tasks that did not measure stay visible as lines."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        left = TextColumn("{task.fields[left]}", markup=False)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left)
        label = TextColumn("{task.description}", markup=False)
        self._bar = Progress(label, *columns, console=Console(stderr=True), transient=True)
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
        self._label = f"{task.title}: {name or 'the only cell'}"
        self._one = self._bar.add_task(self._label, total=None, left="")
        self._bar.update(self._all, left=str(self._left.rest()))

    def inside(self, done: int, total: int, note: str) -> None:
        """Show the time left of the task, by its own rate so far, and that of the matrix."""
        elapsed, share = time.monotonic() - self._began, min(done / total, 1.0) if total else 0.0
        own = f"about {duration(elapsed * (1 - share) / share)} left" if 0 < share < 1 else ""
        label = f"{self._label} {note}".strip()
        self._bar.update(self._one, completed=done, total=total, description=label, left=own)
        self._bar.update(self._all, left=str(self._left.rest(self._task, elapsed, share)))

    def finished(self, record: Record) -> None:
        self._left.finished(record.key, record.seconds, record.status == OK)
        self._bar.remove_task(self._one)
        self._bar.update(self._all, advance=1, left=str(self._left.rest()))
        if record.error is not None:
            self._bar.console.print(f"{self._label}: {_ending(record)}", markup=False)

    def close(self) -> None:
        self._bar.stop()


class Silent(Lines):
    """Nothing, for --quiet; the report shows how each task ended."""

    def _print(self, text: str) -> None: ...


def _ending(record: Record) -> str:
    return record.status if record.error is None else f"{record.status}: {record.error['message']}"


def watcher(plain: bool = False, quiet: bool = False) -> Lines | Bar:
    """A bar on a terminal that can move its cursor; lines elsewhere, in CI, and with `plain`."""
    if quiet:
        return Silent()
    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not in_ci(os.environ)
    return Bar() if live and not plain else Lines()

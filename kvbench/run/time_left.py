"""How long the tasks that are left will take, by what tasks like them took.

Tasks of different runners differ a thousandfold, so their common mean says nothing. A task is like another if it has the same
runner, variant, side (baseline or not) and shape; where none such is timed yet, the same of any shape, then of either side, then of any
variant. What is like none of those is counted and not guessed. Nothing is scaled by batch or context: on a GPU the first task of a
kind is mostly loading and compiling, and 41 s of batch 1 made 2 h of what then took 6 min.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from kvbench.matrix.cells import Task

Kind = tuple[object, ...]


@dataclass(frozen=True)
class Rest:
    """seconds: of the tasks that are like one that was timed, None where none is; untimed: how many are like none."""

    seconds: float | None
    untimed: int

    @property
    def words(self) -> str:
        """`about 4 min left, and 3 tasks not timed yet`: nothing like them has been; "" where nothing is left."""
        tasks = f"{self.untimed} task{'s' if self.untimed != 1 else ''} not timed yet"
        if self.seconds is None:
            return tasks if self.untimed else ""
        more = f", and {tasks}" if self.untimed else ""
        return f"about {said(self.seconds)} left{more}"


def said(seconds: float) -> str:
    """`45 s`, `12 min`, `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


class TimeLeft:
    """todo: the tasks that will run, in their order. Seconds throughout."""

    def __init__(self, todo: Sequence[Task]) -> None:
        self._todo = list(todo)
        self._times: dict[Kind, list[float]] = defaultdict(list)

    def finished(self, key: str, seconds: float, ok: bool) -> None:
        """key: of the task, which need not be the one that began last. ok: whether it measured; a refusal or an error in its first
        second says nothing of tasks like it."""
        task = next(task for task in self._todo if task.key == key)
        self._todo.remove(task)
        if ok:
            for kind in _kinds(task):
                self._times[kind].append(seconds)

    def of(self, task: Task) -> float | None:
        """What the task will take, None where no task like it was timed."""
        times = next((self._times[kind] for kind in _kinds(task) if kind in self._times), None)
        return None if times is None else fmean(times)

    def rest(self, running: Task | None = None, elapsed: float = 0.0, share: float = 0.0) -> Rest:
        """Of all that is left. running: the task in hand, of which `share` (0 to 1) was done in `elapsed`; that rate of its own
        counts more than other tasks'."""
        guesses = [self._inside(t, elapsed, share) if t is running else self.of(t) for t in self._todo]
        known = [guess for guess in guesses if guess is not None]
        return Rest(sum(known) if known else None, len(guesses) - len(known))

    def _inside(self, task: Task, elapsed: float, share: float) -> float | None:
        if share > 0:
            return elapsed * (1 - share) / share
        like = self.of(task)
        return None if like is None else max(like - elapsed, 0.0)


def _kinds(task: Task) -> tuple[Kind, ...]:
    """What the task may be like, the most alike first."""
    side = task.baseline is None
    shape = task.spec.get("batch"), task.spec.get("context")
    of = task.runner, task.variant
    return (*of, side, *shape), (*of, side), of, (task.runner,)

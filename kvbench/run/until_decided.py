"""`kvbench run --until-decided`: steps measured and judged one after the other, until the verdict is decided (`kvbench.run.escalate`).

Each step's tasks have keys and records of their own, so an interrupted run goes on where it was and comes to the same end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.gate import evaluate as gates
from kvbench.gate.policy import Gate
from kvbench.matrix.load import Matrix
from kvbench.metrics.collect import derive
from kvbench.records.run import UNTIL_DECIDED, Run, RunDir, Stopped
from kvbench.run.escalate import deciding, growing, next_step, planned, words
from kvbench.run.execute import Executor, Rerun, Watcher, manifest_of, measuring
from kvbench.stats.sequential import Looks

Resized = Callable[[Mapping[str, Mapping[str, Any]]], Matrix]


def run_until_decided(
    matrix: Matrix,
    gate: Gate | None,
    resized: Resized,
    run_dir: RunDir,
    environment: Mapping[str, Any],
    command: Sequence[str],
    new_watcher: Callable[[], Watcher],
    data_dir: Path | None = None,
    rerun: Rerun = "missing",
    executor: Executor | None = None,
) -> None:
    """resized(sizes): the matrix with other values of some runners' options; new_watcher(): shows the progress of one step.

    Raises UsageError without a gate, before anything is written.
    """
    plan = planned(matrix, gate)
    looks = {runner: own for runner, own in plan.items() if own.several}
    at = dict.fromkeys(plan, 0)
    sized = at_looks(plan, resized)
    open_: set[str] = set()
    with measuring(run_dir, environment, data_dir, rerun, executor) as measure:
        while step := next_step(plan, at, open_):
            at |= dict.fromkeys(step.runners, step.look)
            _say(
                f"{step.place}: {', '.join(words(runner, plan[runner], step.look) for runner in step.runners)}"
            )
            here = replace(matrix, tasks=tasks_at(sized, at))
            due = tuple(task for task in here.tasks if task.runner in step.runners)
            manifest = replace(manifest_of(here, environment, command), until_decided=looks)
            measure(replace(here, tasks=due), manifest, new_watcher())

            # Records that are to be measured anew decide nothing before they are.
            records = (r for r in run_dir.load().records if rerun != "all" or at[r.runner])
            run = Run(manifest, tuple(records))
            verdict = gates.evaluate(gate, run, derive(run))
            failed, left = deciding(verdict), len(run.missing())
            if failed:
                if left:
                    stopped = Stopped(UNTIL_DECIDED, failed.check, step.place)
                    run_dir.write_manifest(replace(manifest, stopped=stopped))
                _say(f"decided by {failed.check} after {step.place}; tasks that are not run: {left}")
                return
            open_ = growing(run, verdict)
    _say("nothing is left that could change the verdict")


def at_looks(plan: Mapping[str, Looks], resized: Resized) -> list[Matrix]:
    """The matrix with every runner at its n-th look, or at its last where it has fewer."""
    several = {runner: looks for runner, looks in plan.items() if looks.several}
    most = max((len(looks.sizes) for looks in several.values()), default=1)
    return [
        resized({r: {x.option: x.sizes[min(n, len(x.sizes) - 1)]} for r, x in several.items()})
        for n in range(most)
    ]


def tasks_at(sized: Sequence[Matrix], at: Mapping[str, int]) -> tuple[Any, ...]:
    """Each runner's tasks at the look where it stands, in the order of the matrix, which no option changes."""
    columns = zip(*(matrix.tasks for matrix in sized), strict=True)
    return tuple(column[max(1, at[column[0].runner]) - 1] for column in columns)


def _say(text: str) -> None:
    print(f"kvbench: {text}", file=sys.stderr, flush=True)

"""`kvbench run --until-decided`: cheap runners and small samples first, until the verdict is decided.

1. The runners run stage by stage (`STAGES`, by cost), each sample at its first look (`Option.looks`). Then
   the samples that leave a check open grow, the smallest look first.
2. After each step the gate judges what is there, each look at its share of the level
   (`kvbench.stats.sequential`).
3. A failure of a required or built-in check stops the run, because nothing later can undo it. A pass needs
   every task: samples may stay small, but no task is left out.

A sample starts small only where the gate accepts limited samples and checks it by metrics with an interval: a
single value has no level to divide among several looks. Each step has records of its own, so an interrupted
run continues where it stopped.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbench.errors import UsageError
from kvbench.gate import evaluate as gates
from kvbench.gate.policy import Gate
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED, Outcome, Verdict
from kvbench.matrix.cells import Task
from kvbench.matrix.load import Matrix
from kvbench.matrix.runners import RUNNERS, STAGES
from kvbench.metrics.collect import METRICS, derive
from kvbench.records.record import OK
from kvbench.records.run import UNTIL_DECIDED, Run, Stopped
from kvbench.run.execute import Setup, announce, manifest_of, measuring
from kvbench.stats.sequential import Looks

ONCE = Looks("", (None,))  # a runner that measures all that the matrix asks for at once

Resized = Callable[[Mapping[str, Mapping[str, Any]]], Matrix]


@dataclass(frozen=True)
class Step:
    """The runners of one stage at one look (1 is the first), measured together, then judged."""

    stage: int
    look: int
    runners: tuple[str, ...]

    @property
    def place(self) -> str:
        again = f", look {self.look}" if self.look > 1 else ""
        return f"stage {self.stage} ({STAGES[self.stage]}){again}"


def run_until_decided(matrix: Matrix, gate: Gate | None, resized: Resized, setup: Setup) -> None:
    """resized(sizes): the matrix with other values of some runners' options.

    Raises UsageError without a gate, before anything is written.
    """
    plan = planned(matrix, gate)
    looks = {runner: own for runner, own in plan.items() if own.several}
    at = dict.fromkeys(plan, 0)
    sized = at_looks(plan, resized)
    open_: set[str] = set()
    with measuring(setup) as measure:
        while step := next_step(plan, at, open_):
            at |= dict.fromkeys(step.runners, step.look)
            announce(f"{step.place}: {', '.join(describe(r, plan[r], step.look) for r in step.runners)}")
            here = replace(matrix, tasks=tasks_at(sized, at))
            manifest = replace(manifest_of(here, setup.environment, setup.command), until_decided=looks)
            tasks = tuple(task for task in here.tasks if task.runner in step.runners)
            measure(replace(here, tasks=tasks), manifest)
            # Records that are still to be measured again decide nothing yet.
            records = (r for r in setup.run_dir.load().records if setup.rerun != "all" or at[r.runner])
            run = Run(manifest, tuple(records))
            verdict = gates.evaluate(gate, run, derive(run))
            if failed := deciding(verdict):
                if left := len(run.missing()):
                    stopped = Stopped(UNTIL_DECIDED, failed.check, step.place)
                    setup.run_dir.write_manifest(replace(manifest, stopped=stopped))
                announce(f"decided by {failed.check} after {step.place}; tasks not run: {left}")
                return
            open_ = growing(run, verdict)
    announce("nothing is left that could change the verdict")


def at_looks(plan: Mapping[str, Looks], resized: Resized) -> list[Matrix]:
    """The matrix with every runner at its n-th look, or at its last where it has fewer."""
    several = {runner: looks for runner, looks in plan.items() if looks.several}
    most = max((len(looks.sizes) for looks in several.values()), default=1)
    return [
        resized({r: {x.option: x.sizes[min(n, len(x.sizes) - 1)]} for r, x in several.items()})
        for n in range(most)
    ]


def tasks_at(sized: Sequence[Matrix], at: Mapping[str, int]) -> tuple[Task, ...]:
    """Each runner's tasks at its present look, in the order of the matrix, which no option changes."""
    columns = zip(*(matrix.tasks for matrix in sized), strict=True)
    return tuple(column[max(1, at[column[0].runner]) - 1] for column in columns)


def planned(matrix: Matrix, gate: Gate | None) -> dict[str, Looks]:
    """The looks of each runner, none above half of the matrix's own value. UsageError without a gate."""
    if gate is None:
        raise UsageError("--until-decided needs a gate, and none is named; give one: --gate FILE.")
    options = {task.runner: task.options for task in matrix.tasks}
    return {runner: _looks(runner, own, gate) for runner, own in options.items()}


def _looks(runner: str, own: Mapping[str, Any], gate: Gate) -> Looks:
    checked = [METRICS[c.metric] for c in gate.checks if METRICS[c.metric].runner == runner]
    if checked and all(metric.sampled for metric in checked):
        for name, option in RUNNERS[runner].options.items():
            if option.looks and (gate.allow_partial or not option.optional):
                small = [n for n in option.looks if own[name] is None or 2 * n <= own[name]]
                return Looks(name, (*small, own[name])) if small else ONCE
    return ONCE


def next_step(plan: Mapping[str, Looks], at: Mapping[str, int], growing: Iterable[str]) -> Step | None:
    """The next step, None where nothing is left.

    at: the last look of each runner, 0 for none; growing: runners that a check leaves open.
    """
    more = [runner for runner in plan if runner in set(growing) and at[runner] < len(plan[runner].sizes)]
    candidates = [runner for runner in plan if at[runner] == 0] or more
    if not candidates:
        return None
    look, stage = min((at[runner], RUNNERS[runner].stage) for runner in candidates)
    chosen = [r for r in candidates if (at[r], RUNNERS[r].stage) == (look, stage)]
    return Step(stage, look + 1, tuple(chosen))


def deciding(verdict: Verdict) -> Outcome | None:
    """The failure that later results cannot undo, or None. A check with `required: false` stops no run."""
    return next((o for o in verdict.outcomes if o.status == FAIL and o.required), None)


def growing(run: Run, verdict: Verdict) -> set[str]:
    """The runners that a larger sample may help: some check of a measured task is open, required or not."""

    def is_open(o: Outcome, task: Task) -> bool:
        """Built-in checks name a variant and cells, but no metric."""
        if not (o.status == INCONCLUSIVE or (o.status == NOT_EVALUATED and o.metric)):
            return False
        own = not o.metric or METRICS[o.metric].runner == task.runner
        return own and o.variant == task.variant and not set(o.cells).isdisjoint(task.cells)

    measured = [task for record, task in run.done() if record.status == OK]
    return {task.runner for task in measured if any(is_open(o, task) for o in verdict.outcomes)}


def outline(plan: Mapping[str, Looks]) -> list[str]:
    """The stages and looks in words, a line per stage that has runners."""
    lines = []
    for stage, name in enumerate(STAGES):
        runners = [describe(r, plan[r]) for r in plan if RUNNERS[r].stage == stage]
        if runners:
            lines.append(f"  stage {stage} ({name}): {', '.join(runners)}")
    return lines


def describe(runner: str, looks: Looks, look: int | None = None) -> str:
    """`mcq (limit 24, look 1 of 3)`, or all looks with their level; the bare name where there is one look."""
    if not looks.several:
        return runner
    sizes = ["all" if size is None else str(size) for size in looks.sizes]
    if look is None:
        return f"{runner} ({looks.option} {', '.join(sizes)}, judged at {100 * looks.confidence:.3g}%)"
    return f"{runner} ({looks.option} {sizes[look - 1]}, look {look} of {len(sizes)})"

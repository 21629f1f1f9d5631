"""Cheap checks first, small samples first, stop once the verdict is decided: `kvbench run --until-decided`.

1. The runners run stage by stage (`STAGES`, by cost), each sample at its first look (`Option.looks`); then the samples that
   leave a check open grow, the smallest look first.
2. After each step the ordinary gate judges what is there, each look at its share of the level (`kvbench.stats.sequential`).
3. A required check, the precision check or a guard that fails stops the run: the verdict is a failure, and what is left could
   only add to it. Nothing else stops it. A pass needs every task, since precision and guards judge each one: only
   samples are spared there, never tasks. So a check that would fail is never skipped because others passed.

A sample starts small only where the gate checks it, by metrics with an interval alone: a bare value (a largest divergence, a
mean time) has no level that could pay for several looks. A limited sample satisfies no check of a gate without
`allow_partial`, for a failure as for a pass, so under such a gate it is taken whole at once.

Pure: which step comes next, and whether one does, from the plan and the verdict so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.errors import UsageError
from kvbench.gate.policy import Gate
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, NOT_EVALUATED, Outcome, Verdict
from kvbench.matrix.cells import Task
from kvbench.matrix.load import Matrix
from kvbench.matrix.runners import RUNNERS, STAGES
from kvbench.metrics.collect import METRICS
from kvbench.records.record import OK
from kvbench.records.run import Run
from kvbench.stats.sequential import Looks

ONCE = Looks("", (None,))  # a runner that measures all that it is asked for, at once


@dataclass(frozen=True)
class Step:
    """The runners of one stage at one look (1 is the first), measured together and judged before the next step."""

    stage: int
    look: int
    runners: tuple[str, ...]

    @property
    def place(self) -> str:
        again = f", look {self.look}" if self.look > 1 else ""
        return f"stage {self.stage} ({STAGES[self.stage]}){again}"


def planned(matrix: Matrix, gate: Gate | None) -> dict[str, Looks]:
    """How each runner of the matrix is looked at. A look that is more than half of the matrix's own value is left out.

    Raises UsageError without a gate.
    """
    if gate is None:
        raise UsageError(
            "--until-decided stops once a gate's verdict is decided, and no gate is named; give one: --gate FILE."
        )
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
    """at: the look that each runner has had, 0 for none; growing: runners that a check leaves open, which grow
    while they have looks left. None: nothing is left."""
    new = [runner for runner in plan if at[runner] == 0]
    more = [runner for runner in plan if runner in set(growing) and at[runner] < len(plan[runner].sizes)]
    due = new or more
    if not due:
        return None
    look, stage = min((at[runner], RUNNERS[runner].stage) for runner in due)
    chosen = [r for r in due if (at[r], RUNNERS[r].stage) == (look, stage)]
    return Step(stage, look + 1, tuple(chosen))


def deciding(verdict: Verdict) -> Outcome | None:
    """The outcome that makes the verdict a failure whatever comes, or None. A check with `required: false` stops no run."""
    return next((o for o in verdict.outcomes if o.status == FAIL and o.required), None)


def growing(run: Run, verdict: Verdict) -> set[str]:
    """Runners that a larger sample may help: a check or guard on a task that was measured is open, required or not."""
    open_ = [
        o for o in verdict.outcomes if o.status == INCONCLUSIVE or (o.status == NOT_EVALUATED and o.metric)
    ]
    measured = [task for record, task in run.done() if record.status == OK]
    return {task.runner for task in measured if any(_is_of(outcome, task) for outcome in open_)}


def _is_of(outcome: Outcome, task: Task) -> bool:
    """A guard names no metric; its variant tells the task, as that of every runner whose scores it looks at."""
    if outcome.metric and METRICS[outcome.metric].runner != task.runner:
        return False
    return outcome.variant == task.variant and not set(outcome.cells).isdisjoint(task.cells)


def outline(plan: Mapping[str, Looks]) -> list[str]:
    """The stages and looks in words, a line a stage that has runners."""
    lines = []
    for stage, name in enumerate(STAGES):
        runners = [runner for runner in plan if RUNNERS[runner].stage == stage]
        if runners:
            lines.append(f"  stage {stage} ({name}): {', '.join(_outlined(r, plan[r]) for r in runners)}")
    return lines


def _outlined(runner: str, looks: Looks) -> str:
    if len(looks.sizes) == 1:
        return runner
    sizes = ", ".join("all" if size is None else str(size) for size in looks.sizes)
    return f"{runner} ({looks.option} {sizes}, judged at {100 * looks.confidence:.3g}%)"


def words(runner: str, looks: Looks, look: int) -> str:
    """`mcq (limit 24, look 1 of 3)`, or the bare name of a runner that has no looks."""
    if len(looks.sizes) == 1:
        return runner
    size = looks.sizes[look - 1]
    return f"{runner} ({looks.option} {'all' if size is None else size}, look {look} of {len(looks.sizes)})"

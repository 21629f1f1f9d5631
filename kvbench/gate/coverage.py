"""What a gate asks that a matrix does not measure, or not in full: seen in `kvbench plan`, before hours of measuring. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvbench.gate.policy import Check, Gate
from kvbench.matrix.cells import Cell, Task
from kvbench.matrix.runners import RUNNERS
from kvbench.matrix.values import text
from kvbench.metrics.collect import METRICS
from kvbench.records.record import LEVELS, RUNGS, rung


def gate_lines(gate: Gate | None, cells: tuple[Cell, ...], tasks: tuple[Task, ...]) -> list[str]:
    """The evidence that every task has to give, and each check that no task of the matrix answers, in sentences."""
    due = gate.evidence if gate else RUNGS[-1]
    levels = ", ".join(level for level in LEVELS if rung(level) <= due)
    whose = f"gate {gate.name}, evidence {due}" if gate else "no gate"
    lines = [f"evidence that every task has to give ({whose}): {levels}"]
    return [*lines, *(sentence for _, sentence in in_vain(gate, cells, tasks))]


def in_vain(
    gate: Gate | None, cells: tuple[Cell, ...], tasks: tuple[Task, ...]
) -> Iterator[tuple[Check, str]]:
    """Each check that no task answers, with a sentence on why and what comes of it."""
    for check in gate.checks if gate else ():
        for reason, effect in _unanswered(check, cells, tasks, gate.allow_partial if gate else False):
            what = effect if check.required else "it will not be evaluated"
            yield check, f"check {check.name} (line {check.line}): {reason}; {what}."


def _unanswered(
    check: Check, cells: tuple[Cell, ...], tasks: tuple[Task, ...], partial: bool
) -> Iterator[tuple[str, str]]:
    """(reason, what comes of it for a required check). partial: whether the gate takes partial results."""
    metric, fails = METRICS[check.metric], "the gate will fail"
    picked = [cell for cell in cells if check.picks(cell.spec)]
    due = {cell.id for cell in picked if not (metric.paired and cell.is_baseline)}
    own = [task for task in tasks if task.runner == metric.runner and due.intersection(task.cells)]
    variants = list(dict.fromkeys(task.variant for task in tasks if task.runner == metric.runner))
    if not picked:
        chosen = ", ".join(f"{key}={text(value)}" for key, value in check.where.items() if key != "variant")
        yield f"no cell of the matrix has {chosen}", fails
    elif not due:
        yield "it compares with the baseline, and picks only baselines", fails
    elif not own:
        yield f"{check.metric} comes from the runner {metric.runner}, which the matrix does not name", fails
    elif "variant" in check.where and check.where["variant"] not in {task.variant for task in own}:
        measured = f"the runner {metric.runner} measures {', '.join(variants)}"
        yield f"{measured}, not {text(check.where['variant'])}", fails
    elif not partial and (limited := _limited(own)):
        reason = (
            f"{limited} makes it partial where there is more, and the gate does not say allow_partial: true"
        )
        yield reason, "it will not be evaluated, which is exit code 3"


def _limited(tasks: Sequence[Task]) -> str:
    """`limit_chunks: 4` of the first task that measures a part of what there is, or ""."""
    for task in tasks:
        for name, option in RUNNERS[task.runner].options.items():
            if option.looks and option.optional and task.options[name] is not None:
                return f"{name}: {task.options[name]}"
    return ""

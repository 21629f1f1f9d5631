"""What a gate asks that a matrix cannot answer: seen in `kvbench plan`, before hours of measuring. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.cells import Cell, Task
from kvbench.metrics import METRICS
from kvbench.policy import Check, Gate
from kvbench.record import LEVELS, RUNGS, rung
from kvbench.values import text


def gate_lines(gate: Gate | None, cells: tuple[Cell, ...], tasks: tuple[Task, ...]) -> list[str]:
    """The evidence that every task has to give, and each check that no task of the matrix answers, in sentences."""
    due = gate.evidence if gate else RUNGS[-1]
    levels = ", ".join(level for level in LEVELS if rung(level) <= due)
    whose = f"gate {gate.name}, evidence {due}" if gate else "no gate"
    lines = [f"evidence that every task has to give ({whose}): {levels}"]
    for check in gate.checks if gate else ():
        for reason in _unanswered(check, cells, tasks):
            effect = "the gate will fail" if check.required else "it will not be evaluated"
            lines.append(f"check {check.name} (line {check.line}): {reason}; {effect}.")
    return lines


def _unanswered(check: Check, cells: tuple[Cell, ...], tasks: tuple[Task, ...]) -> Iterator[str]:
    metric = METRICS[check.metric]
    picked = [cell for cell in cells if check.picks(cell.spec)]
    due = {cell.id for cell in picked if not (metric.paired and cell.is_baseline)}
    own = [task for task in tasks if task.runner == metric.runner and due.intersection(task.cells)]
    variants = list(dict.fromkeys(task.variant for task in tasks if task.runner == metric.runner))
    if not picked:
        chosen = ", ".join(f"{key}={text(value)}" for key, value in check.where.items() if key != "variant")
        yield f"no cell of the matrix has {chosen}"
    elif not due:
        yield "it compares with the baseline, and picks only baselines"
    elif not own:
        yield f"{check.metric} comes from the runner {metric.runner}, which the matrix does not name"
    elif "variant" in check.where and check.where["variant"] not in {task.variant for task in own}:
        yield f"the runner {metric.runner} measures {', '.join(variants)}, not {text(check.where['variant'])}"

"""Gate checks that a matrix cannot answer: found by `kvbench plan`, before hours of measuring. No torch."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from kvbench.gate.policy import Check, Gate
from kvbench.matrix.cells import Cell, Task, text
from kvbench.matrix.runners import RUNNERS
from kvbench.matrix.tasks import data_names
from kvbench.metrics.collect import METRICS
from kvbench.records.record import LEVELS, RUNGS, rung


@dataclass(frozen=True)
class Uncovered:
    """A check that no task answers, or not in full. reason: a stable word; sentence: with its consequence."""

    check: Check
    reason: str
    sentence: str


def gate_lines(gate: Gate | None, cells: Sequence[Cell], tasks: Sequence[Task]) -> list[str]:
    """The evidence that every task has to give, and each check that the matrix cannot answer."""
    highest = gate.evidence if gate else RUNGS[-1]
    levels = ", ".join(level for level in LEVELS if rung(level) <= highest)
    whose = f"gate {gate.name}, evidence {highest}" if gate else "no gate"
    return [f"required evidence ({whose}): {levels}", *(u.sentence for u in uncovered(gate, cells, tasks))]


def uncovered(
    gate: Gate | None, cells: Sequence[Cell], tasks: Sequence[Task], absent: Collection[str] = ()
) -> Iterator[Uncovered]:
    """The checks that the tasks cannot answer. absent: names of the evaluation data that is missing."""
    for check in gate.checks if gate else ():
        reason, why = _reason(check, cells, tasks, gate.allow_partial if gate else False, absent)
        if reason:
            effect = "it will not be evaluated"
            if check.required:
                open_ = reason in ("partial", "no_data")
                effect = f"{effect}, which is exit code 3" if open_ else "the gate will fail"
            yield Uncovered(check, reason, f"check {check.name} (line {check.line}): {why}; {effect}.")


def _reason(
    check: Check, cells: Sequence[Cell], tasks: Sequence[Task], partial: bool, absent: Collection[str]
) -> tuple[str, str]:
    """(reason, the same in words), ("", "") for a check that can be answered."""
    metric, variant = METRICS[check.metric], check.where.get("variant")
    picked = [cell for cell in cells if check.picks(cell.spec)]
    judged = {cell.id for cell in picked if not (metric.paired and cell.is_baseline)}
    of_runner = [task for task in tasks if task.runner == metric.runner]
    own = [task for task in of_runner if judged.intersection(task.cells)]
    answering = [task for task in own if variant in (None, task.variant)]
    if not picked:
        chosen = ", ".join(f"{key}={text(value)}" for key, value in check.where.items() if key != "variant")
        return "no_cell", f"no cell of the matrix has {chosen}"
    if not judged:
        return "only_baselines", "it compares cells with their baseline, but selects only baselines"
    if not own:
        return (
            "no_runner",
            f"{check.metric} comes from the runner {metric.runner}, which is not in the matrix",
        )
    if not answering:
        variants = ", ".join(dict.fromkeys(task.variant for task in of_runner))
        return "no_variant", f"the runner {metric.runner} measures {variants}, not {text(variant)}"
    lacking = [{name for name, _ in data_names(task)}.intersection(absent) for task in answering]
    if all(lacking):
        return "no_data", f"its data is missing ({', '.join(sorted(set().union(*lacking)))})"
    for task in own if not partial else ():
        for name, option in RUNNERS[task.runner].options.items():
            if option.looks and option.optional and (value := task.options[name]) is not None:
                limited = f"{name}: {value} makes the result partial"
                return "partial", f"{limited}, and the gate does not have allow_partial: true"
    return "", ""

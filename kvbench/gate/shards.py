"""How one shard of a matrix is judged alone: nothing is required of what other shards measure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvbench.gate.verdict import FAIL, NOT_EVALUATED, Outcome
from kvbench.matrix.cells import Task
from kvbench.records.shards import Share


def judged(
    outcomes: Iterable[Outcome], tasks: Sequence[Task], share: Share, runner_of: Callable[[str], str]
) -> list[Outcome]:
    """The outcomes of a shard, where tasks of other shards are not required; the first outcome says that it
    is no whole run.

    runner_of(metric): the runner that measures it.
    """
    mine = [task for task in tasks if task.key in share.tasks]
    measured = {(task.runner, task.variant, cell) for task in mine for cell in task.cells}
    shown = {cell for _, _, cell in measured}

    def elsewhere(o: Outcome) -> bool:
        if o.status != NOT_EVALUATED or not o.required:
            return False
        cells = o.cells or ((o.cell,) if o.cell else ())
        if o.metric:
            return all((runner_of(o.metric), o.variant, cell) not in measured for cell in cells)
        return o.check in ("precision", "gate") and all(cell not in shown for cell in cells)

    sentence = (
        f"{share.shard}: {len(share.tasks)} of {len(tasks)} tasks are measured here; the run is judged after "
        "`kvbench merge` of all shards."
    )
    whole = Outcome("shard", "", None, "", NOT_EVALUATED, None, "", sentence, required=False, reason="shard")
    return [whole, *(replace(o, required=False) if elsewhere(o) else o for o in outcomes)]


def exit_code_of(outcomes: Iterable[Outcome]) -> int:
    """1 for a failure, which no other shard can undo; 3 where a task of this shard gave no result; else 0."""
    kept = list(outcomes)
    if any(o.status == FAIL for o in kept):
        return 1
    return 3 if any(o.status == NOT_EVALUATED and o.required for o in kept) else 0

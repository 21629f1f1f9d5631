"""`kvbench run --canary`: the cheapest tasks of each engine configuration run first; the rest if they pass.

An engine configuration is a cell without batch and context, represented by its smallest cell. Its cheapest
tasks are those of exact bytes or, where the matrix measures none, the first of the cheapest stage. Their
records hold the evidence that the precision check judges, and the rest of the run reuses them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvbench.files import content_hash
from kvbench.gate import evaluate as gates
from kvbench.gate.policy import Gate
from kvbench.gate.verdict import FAIL, NOT_EVALUATED, Outcome
from kvbench.matrix.cells import Cell, Task
from kvbench.matrix.load import Matrix
from kvbench.matrix.runners import RUNNERS
from kvbench.metrics.collect import derive
from kvbench.records.record import Record
from kvbench.records.run import CANARY, Manifest, Run, Stopped
from kvbench.run.execute import Setup, announce, manifest_of, measuring

PLACE = "the canary"


@dataclass(frozen=True)
class Canary:
    """cells: the smallest of each engine configuration; tasks: measured on them, in the matrix's order."""

    cells: tuple[Cell, ...]
    tasks: tuple[Task, ...]

    @property
    def title(self) -> str:
        runners = ", ".join(dict.fromkeys(task.runner for task in self.tasks))
        many = "s" if len(self.cells) > 1 else ""
        return f"{runners} on {len(self.cells)} cell{many}, one of each engine configuration"


def canary(matrix: Matrix) -> Canary:
    """The cells and tasks to measure before the rest of the matrix."""
    smallest: dict[str, Cell] = {}
    for cell in sorted(matrix.cells, key=lambda c: (c.spec["batch"] * c.spec["context"], c.spec["batch"])):
        engine = content_hash(
            {key: value for key, value in cell.spec.items() if key not in ("batch", "context")}
        )
        smallest.setdefault(engine, cell)
    cells = tuple(cell for cell in matrix.cells if cell in smallest.values())
    chosen: dict[str, Task] = {}
    for cell in cells:
        own = [task for task in matrix.tasks if cell.id in task.cells]
        stage = min(RUNNERS[task.runner].stage for task in own)
        cheapest = [task for task in own if RUNNERS[task.runner].stage == stage]
        chosen |= {task.key: task for task in (cheapest if stage == 0 else cheapest[:1])}
    # A quality task is compared with its baseline's record, so that is measured too.
    baselines = {task.baseline for task in chosen.values() if RUNNERS[task.runner].quality}
    tasks = tuple(task for task in matrix.tasks if task.key in chosen or task.key in baselines)
    return Canary(cells, tasks)


def judged_alone(manifest: Manifest, records: Sequence[Record], of: Canary) -> Run:
    """The run of the canary's tasks and cells alone, with the baselines that its cells are compared with."""
    ids = {cell.id for cell in of.cells} | {cell for task in of.tasks for cell in task.cells}
    with_baselines = ids | {cell.baseline for cell in manifest.cells if cell.id in ids}
    cells = tuple(cell for cell in manifest.cells if cell.id in with_baselines)
    return Run(replace(manifest, cells=cells, tasks=of.tasks), tuple(records))


def stopping(outcomes: Iterable[Outcome], of: Canary) -> Outcome | None:
    """The outcome that stops the run: the first failure, else the first canary task without a result."""
    own = {cell.id for cell in of.cells}
    bad = [
        o
        for o in outcomes
        if o.status == FAIL or (o.status == NOT_EVALUATED and o.required and not own.isdisjoint(o.cells))
    ]
    return min(bad, key=lambda o: o.status != FAIL, default=None)


def run_canary_first(matrix: Matrix, gate: Gate | None, setup: Setup) -> None:
    """Measure the canary, then the rest unless an outcome stops it; the manifest names that outcome."""
    of, run_dir = canary(matrix), setup.run_dir
    manifest = manifest_of(matrix, setup.environment, setup.command)
    with measuring(setup) as measure:
        announce(f"canary: {of.title}")
        measure(replace(matrix, tasks=of.tasks), manifest)
        alone = judged_alone(manifest, [r for t in of.tasks if (r := run_dir.read(t.key))], of)
        # The gate's settings for evidence and fallbacks apply; its checks are for the whole run.
        policy = replace(gate, checks=()) if gate else None
        stop = stopping(gates.evaluate(policy, alone, derive(alone)).outcomes, of)
        rest = tuple(task for task in matrix.tasks if task not in of.tasks)
        if stop is None:
            announce("the canary passed; the rest of the matrix follows")
            measure(replace(matrix, tasks=rest), manifest)
            return
        left = sum(not run_dir.record_path(task.key).exists() for task in rest)
        if left:
            run_dir.write_manifest(replace(manifest, stopped=Stopped(CANARY, stop.check, PLACE)))
        # A record that fails a check still counts as measured, so it must be asked for again.
        again = f" Fix the cause and run again with --rerun {'all' if stop.status == FAIL else 'failed'}."
        announce(f"stopped by {PLACE}; tasks not run: {left}. {stop.sentence}{again}")

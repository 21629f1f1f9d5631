"""Runs a matrix: writes the manifest, then measures the tasks in order with a record after each.

A task whose record exists is not measured again. torch is imported only when a task must be measured.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

from kvbench.errors import UsageError
from kvbench.matrix.cells import Task
from kvbench.matrix.load import Matrix
from kvbench.records.record import ERROR, OK, REFUSED, Record
from kvbench.records.run import Manifest, MatrixFile, MergedFrom, RunDir
from kvbench.records.shards import Share

Rerun = Literal["missing", "failed", "all"]


class Watcher(Protocol):
    """Shows the progress of a run."""

    def start(self, plan: Plan) -> None: ...
    def task(self, index: int, task: Task, name: str) -> None: ...
    def inside(self, done: int, total: int, note: str) -> None: ...
    def finished(self, record: Record) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Plan:
    """The tasks of a matrix that will run, and those whose records are reused."""

    todo: tuple[Task, ...]
    reused: tuple[Task, ...]


def plan_tasks(matrix: Matrix, run_dir: RunDir, rerun: Rerun) -> Plan:
    """rerun: missing: tasks without a record, and those not evaluated (the data may be here now); failed: and
    those that ended in an error or a refusal; all: every task."""
    kept = {"missing": {OK, ERROR, REFUSED}, "failed": {OK}, "all": set[str]()}[rerun]
    reused = {t.key for t in matrix.tasks if (record := run_dir.read(t.key)) and record.status in kept}
    todo = tuple(task for task in matrix.tasks if task.key not in reused)
    return Plan(todo, tuple(task for task in matrix.tasks if task.key in reused))


# Measures `plan.todo`: writes each task's record to the folder and calls `watcher.task` and `.finished`. An
# interrupt is raised after all its processes have ended.
Executor = Callable[[Matrix, Plan, RunDir, Watcher], None]


@dataclass(frozen=True)
class Setup:
    """Where and how a run is measured.

    watcher(): shows the progress of one part of it; executor: measures instead of this process.
    """

    run_dir: RunDir
    environment: Mapping[str, Any]
    watcher: Callable[[], Watcher]
    data_dir: Path | None = None
    rerun: Rerun = "missing"
    executor: Executor | None = None
    command: Sequence[str] = field(default_factory=lambda: ["kvbench", *sys.argv[1:]])


def manifest_of(matrix: Matrix, environment: Mapping[str, Any], command: Sequence[str]) -> Manifest:
    return Manifest(
        name=matrix.name,
        cells=tuple(matrix.cells),
        tasks=tuple(matrix.tasks),
        matrix=MatrixFile(str(matrix.path) if matrix.path else None, matrix.sha, matrix.source),
        command=tuple(command),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=dict(environment),
        gate=str(matrix.gate) if matrix.gate else None,
    )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the run directory's lock, which ends with the process. UsageError while another run holds it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / ".lock").open("a+")
    except OSError as e:
        raise UsageError(
            f"{path} cannot be the run directory ({e.strerror}); give a writable folder with --out."
        ) from None
    with lock as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            f.seek(0)
            raise UsageError(
                f"Another kvbench run (process {f.read().strip() or 'unknown'}) is writing to {path}; "
                "wait for it, or give another directory with --out."
            ) from None
        f.seek(0)
        f.truncate()
        f.write(str(os.getpid()))
        f.flush()
        yield


def run(matrix: Matrix, setup: Setup, share: Share | None = None) -> Plan:
    """Measure the missing tasks, of `share` alone where one is given. An interrupt loses the current task."""
    manifest = replace(manifest_of(matrix, setup.environment, setup.command), shard=share)
    if share is not None:
        matrix = replace(matrix, tasks=tuple(task for task in matrix.tasks if task.key in share.tasks))
    with measuring(setup) as measure:
        return measure(matrix, manifest)


@contextmanager
def measuring(setup: Setup) -> Iterator[Callable[[Matrix, Manifest], Plan]]:
    """A function `measure(matrix, manifest)` that writes the manifest and measures the missing tasks.

    Several calls share the loaded model and its probes, and no other run writes between them.
    """
    run_dir = setup.run_dir
    sessions: list[Any] = []

    def measure(matrix: Matrix, manifest: Manifest) -> Plan:
        plan = plan_tasks(matrix, run_dir, setup.rerun)
        run_dir.write_manifest(replace(manifest, merged=_merged(run_dir, setup.rerun)))
        watcher = setup.watcher()
        watcher.start(plan)
        try:
            if plan.todo and setup.executor is not None:
                setup.executor(matrix, plan, run_dir, watcher)
            elif plan.todo:
                from kvbench.run.task.prepare import Session

                sessions[:] = sessions or [Session(setup.data_dir, setup.environment)]
                _measure_all(matrix, plan, run_dir, sessions[0], watcher)
        finally:
            watcher.close()
        return plan

    with locked(run_dir.path):
        # Temp files of a killed run; an earlier JUnit verdict, which a CI system would take for this one's.
        run_dir.junit_path.unlink(missing_ok=True)
        for folder in (run_dir.path, run_dir.path / "records"):
            for leftover in folder.glob(".*.tmp"):
                leftover.unlink()
        yield measure


def _merged(run_dir: RunDir, rerun: Rerun) -> MergedFrom | None:
    """The shards that the folder's records come from, according to its manifest, where any are kept."""
    if rerun == "all" or not run_dir.manifest_path.exists():
        return None
    try:
        return run_dir.manifest().merged
    except UsageError:  # a damaged one is about to be written anew, as its message says
        return None


def _measure_all(matrix: Matrix, plan: Plan, run_dir: RunDir, session: Any, watcher: Watcher) -> None:
    from kvbench.run.task.measure import execute

    for index, task in enumerate(plan.todo, start=1):
        watcher.task(index + len(plan.reused), task, cell_label(matrix, task))
        baseline = run_dir.read(task.baseline) if task.baseline else None
        record = execute(task, session, baseline, watcher.inside)
        run_dir.write(record)
        watcher.finished(record)


def cell_label(matrix: Matrix, task: Task) -> str:
    """The name of a task's first cell, with the number of others that share the task."""
    name = next(cell.name for cell in matrix.cells if cell.id == task.cells[0])
    return name + (f" (+{len(task.cells) - 1} cells)" if len(task.cells) > 1 else "")


def announce(text: str) -> None:
    """Print one line about the whole run to stderr."""
    print(f"kvbench: {text}", file=sys.stderr, flush=True)

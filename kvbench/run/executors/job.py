"""One cell's work as an independent job, passed as JSON to a fresh process.

A job has the tasks to measure whose first cell it is. Tasks that are compared with a baseline need its
record, so jobs run in two waves, baselines first.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvbench.data.fingerprint import fingerprint as data_fingerprint
from kvbench.matrix.cells import Task
from kvbench.matrix.expand import baseline_spec
from kvbench.matrix.load import Matrix
from kvbench.matrix.runners import RUNNERS
from kvbench.matrix.tasks import identity_of, remembered
from kvbench.models.source import fingerprint as model_fingerprint
from kvbench.records.record import ERROR, Record
from kvbench.records.run import RunDir
from kvbench.records.shards import units

# Environment variables that change a measurement; a worker gets the driver's values.
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TRITON_INTERPRET", "KVBENCH_ALLOW_HUB", "HF_HUB_OFFLINE")


@dataclass(frozen=True)
class Job:
    """One cell's work; the JSON has these fields."""

    cell: str
    device: str
    tasks: tuple[Task, ...]
    identities: Mapping[str, Any]  # by key, as in the key
    baselines: Mapping[str, Any]  # by key: a record, or null
    data_dir: str | None
    cwd: str
    variables: Mapping[str, str | None]

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


def from_json(text: str) -> Job:
    data = json.loads(text)
    tasks = tuple(Task(**{**task, "cells": tuple(task["cells"])}) for task in data["tasks"])
    return Job(**{**data, "tasks": tasks})


@dataclass(frozen=True)
class Unit:
    """Jobs that one machine runs in turn: a cell, or the cells of one line of ITL over the context."""

    jobs: tuple[Job, ...]


def waves(
    matrix: Matrix, todo: Sequence[Task], data_dir: Path | None, host: Mapping[str, str]
) -> list[list[Unit]]:
    """The work in two waves, baselines first; `with_baselines` completes the second. host: as in the keys."""
    identity = Identities(host, data_dir)
    variables = {name: os.environ.get(name) for name in VARIABLES}
    folder = str(data_dir) if data_dir is not None else None
    of_cell: dict[str, list[Task]] = {}
    for task in todo:
        of_cell.setdefault(task.cells[0], []).append(task)
    found: list[list[Unit]] = [[], []]
    for group in units(matrix.cells, matrix.tasks):
        jobs = []
        for cell in group:
            if tasks := of_cell.get(cell.id):
                own = {task.key: identity(task) for task in tasks}
                name, device = cell.name or "the only cell", cell.spec["device"]
                jobs.append(Job(name, device, tuple(tasks), own, {}, folder, str(Path.cwd()), variables))
        if jobs:
            found[0 if group[0].is_baseline else 1].append(Unit(tuple(jobs)))
    return [wave for wave in found if wave]


class Identities:
    """Identities(host, data_dir)(task): the identity in the task's key, of the files on this machine."""

    def __init__(self, host: Mapping[str, str], data_dir: Path | None) -> None:
        self._host = host
        self._model, self._data = remembered(
            model_fingerprint, lambda name, split: data_fingerprint(name, data_dir, split)
        )

    def __call__(self, task: Task) -> dict[str, Any]:
        runner = RUNNERS[task.runner]
        native = baseline_spec(task.spec)
        return identity_of(runner, task.spec, native, task.options, self._host, self._model, self._data)


def with_baselines(unit: Unit, run_dir: RunDir) -> Unit:
    """The unit with the present records of its tasks' baselines."""

    def complete(job: Job) -> Job:
        keys = dict.fromkeys(task.baseline for task in job.tasks if task.baseline)
        records = {key: run_dir.read(key) for key in keys}
        return replace(job, baselines={k: asdict(r) if r else None for k, r in records.items()})

    return Unit(tuple(complete(job) for job in unit.jobs))


def split_timed(unit: Unit) -> tuple[Unit | None, Unit | None]:
    """(work that may run next to other work, work that is timed and may not); None for an empty part."""

    def part(timed: bool) -> Unit | None:
        kept = ([t for t in job.tasks if RUNNERS[t.runner].timed is timed] for job in unit.jobs)
        jobs = [replace(job, tasks=tuple(tasks)) for job, tasks in zip(unit.jobs, kept, strict=True) if tasks]
        return Unit(tuple(jobs)) if jobs else None

    return part(False), part(True)


def failed(
    task: Task, kind: str, message: str, environment: Mapping[str, Any], tail: Iterable[str] = ()
) -> Record:
    """The record of a task that gave no result; kind and message as of an exception."""
    return Record(
        key=task.key,
        runner=task.runner,
        protocol=RUNNERS[task.runner].protocol,
        status=ERROR,
        spec=dict(task.spec),
        options=dict(task.options),
        decision=None,
        evidence=None,
        samples={},
        facts={},
        environment=dict(environment),
        partial=None,
        error={"type": kind, "message": message, "tail": list(tail)},
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=0.0,
    )

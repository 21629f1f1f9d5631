"""All that a run directory holds, as one typed value: `Run`, its `Manifest` and its records.

    run.json              the manifest: matrix, cells, tasks, environment, command line
    records/<key>.json    one record per task

Both are written with a temp file, fsync and rename, so a killed run leaves whole files or none.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from kvbench.errors import UsageError
from kvbench.files import read_json, write_json
from kvbench.matrix.cells import Cell, Task
from kvbench.records.record import SCHEMA_VERSION, Record, record_from_dict, schema_fault
from kvbench.records.shards import Shard, Share
from kvbench.stats.sequential import Look, Looks

# The options that can stop a run.
CANARY: Literal["canary"] = "canary"
UNTIL_DECIDED: Literal["until_decided"] = "until_decided"


@dataclass(frozen=True)
class MatrixFile:
    """The matrix of a run. sha: sha256 of the file, hex; source: its data, with what --set changed."""

    path: str | None = None
    sha: str = ""
    source: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stopped:
    """Why a run left tasks out.

    by: the option that stopped it; check: the check that did not pass; after: the step before.
    """

    by: Literal["canary", "until_decided"]
    check: str
    after: str

    @property
    def sentence(self) -> str:
        if self.by == CANARY:
            return f"not run: --canary stopped the run, because the check {self.check} did not pass"
        return f"not run: the verdict was decided by {self.check} after {self.after}"


@dataclass(frozen=True)
class MergedFrom:
    """The runs that `kvbench merge` put together; differences: sentences on tasks that several measured."""

    of: tuple[Mapping[str, Any], ...]
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What was run. Field names are those of `run.json`.

    gate: path of the gate that the matrix names. until_decided: the looks planned for each runner, None
    without --until-decided. shard: None for a whole matrix. merged: None unless `kvbench merge` wrote the
    run. stopped: None unless the run left tasks out.
    """

    name: str
    cells: tuple[Cell, ...]
    tasks: tuple[Task, ...]
    matrix: MatrixFile = field(default_factory=MatrixFile)
    command: tuple[str, ...] = ()
    created_at: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    gate: str | None = None
    until_decided: Mapping[str, Looks] | None = None
    shard: Share | None = None
    merged: MergedFrom | None = None
    stopped: Stopped | None = None
    schema: int = SCHEMA_VERSION

    @property
    def not_run(self) -> str:
        """Why a task has no record."""
        if self.stopped:
            return self.stopped.sentence
        return f"not run in {self.shard.shard}" if self.shard else "not run"

    @cached_property
    def looks(self) -> dict[str, Look]:
        """The look of each runner's tasks; runners without several looks are left out.

        Raises ValueError or KeyError where the tasks are not of a planned look.
        """
        found: dict[str, Look] = {}
        for task in self.tasks:
            if plan := (self.until_decided or {}).get(task.runner):
                look = plan.look_of(task.options[plan.option])
                if found.setdefault(task.runner, look) != look:
                    raise ValueError(f"the tasks of {task.runner} are of different looks")
        return found

    def to_dict(self) -> dict[str, Any]:
        """The manifest as `run.json` has it; parts that do not apply are left out."""
        found: dict[str, Any] = {
            "schema": self.schema,
            "name": self.name,
            "matrix": {"path": self.matrix.path, "sha": self.matrix.sha, "source": self.matrix.source},
            "command": list(self.command),
            "created_at": self.created_at,
            "environment": dict(self.environment),
            "cells": [asdict(cell) for cell in self.cells],
            "tasks": [asdict(task) for task in self.tasks],
            "gate": self.gate,
        }
        if self.until_decided is not None:
            found["until_decided"] = {"looks": {r: x.to_dict() for r, x in self.until_decided.items()}}
        if self.shard:
            found["shard"] = self.shard.to_dict(self.tasks)
        if self.merged:
            found["merged"] = {"of": list(self.merged.of), "differences": list(self.merged.differences)}
        if self.stopped:
            found["stopped"] = asdict(self.stopped)
        return found


def manifest_from_dict(data: Any, path: Path | str = "run.json") -> Manifest:
    """A manifest from the data of `run.json`. Raises UsageError for another schema, or damaged parts."""
    try:
        return _manifest(data)
    except _Damaged as e:
        raise UsageError(f"{path} {e}; run the matrix again to write it anew.") from None


class _Damaged(Exception):
    pass


def _manifest(data: Any) -> Manifest:
    if fault := schema_fault(data) if isinstance(data, dict) else "is no manifest":
        raise _Damaged(fault)
    kinds = {"name": str, "matrix": dict, "environment": dict, "command": list, "cells": list, "tasks": list}
    for key, kind in kinds.items():
        if not isinstance(data.get(key), kind):
            raise _Damaged(f"is damaged: {key} is missing or of the wrong kind")
    if not isinstance(data.get("gate", 0), str | None):
        raise _Damaged("is damaged: gate is missing or of the wrong kind")
    try:
        cells, tasks = tuple(map(_cell, data["cells"])), tuple(map(_task, data["tasks"]))
        ids = {cell.id for cell in cells}
        fit = {cell.baseline for cell in cells} <= ids
        fit = fit and all(task.cells and ids.issuperset(task.cells) for task in tasks)
    except (KeyError, TypeError):
        fit = False
    if not fit:
        raise _Damaged("is damaged: its cells and tasks do not fit together")
    matrix = data["matrix"]
    manifest = Manifest(
        name=data["name"],
        cells=cells,
        tasks=tasks,
        matrix=MatrixFile(matrix.get("path"), matrix.get("sha") or "", matrix.get("source") or {}),
        command=tuple(map(str, data["command"])),
        created_at=str(data.get("created_at", "")),
        environment=data["environment"],
        gate=data["gate"],
        shard=_read("shard", data, lambda found: _share(found, tasks)),
        until_decided=_read("until_decided", data, _plans),
        merged=_read("merged", data, lambda x: MergedFrom(tuple(x["of"]), tuple(x["differences"]))),
        stopped=_read("stopped", data, _stopped),
    )
    _read("until_decided", data, lambda _: manifest.looks)
    return manifest


def _read(part: str, data: Mapping[str, Any], read: Any) -> Any:
    """An optional part of the manifest; None where it is missing or null."""
    try:
        return None if data.get(part) is None else read(data[part])
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise _Damaged(f"is damaged: {part} does not fit its tasks ({e})") from None


def _cell(data: Mapping[str, Any]) -> Cell:
    if not (isinstance(data["spec"], dict) and isinstance(data["name"], str)):
        raise TypeError
    varied = tuple(data.get("varied", ()))
    return Cell(data["id"], data["name"], data["spec"], varied, data["baseline"], data.get("line"))


def _task(data: Mapping[str, Any]) -> Task:
    texts = all(isinstance(data[key], str) for key in ("key", "runner", "variant"))
    objects = all(isinstance(data[key], dict) for key in ("spec", "options"))
    if not (texts and objects and isinstance(data["baseline"], str | None) and "/" not in data["key"]):
        raise TypeError
    own = {key: data[key] for key in ("key", "runner", "variant", "spec", "options", "baseline")}
    return Task(**own, cells=tuple(data["cells"]), digests=data.get("digests") or {})


def _share(data: Mapping[str, Any], tasks: Iterable[Task]) -> Share:
    share = Share(Shard(data["number"], data["of"]), frozenset(data["tasks"]))
    known = share.tasks and share.tasks <= {task.key for task in tasks}
    if not (known and 1 <= share.shard.number <= share.shard.of):
        raise ValueError("the share's tasks are not the matrix's")
    return share


def _plans(data: Mapping[str, Any]) -> dict[str, Looks]:
    return {runner: Looks(plan["option"], tuple(plan["sizes"])) for runner, plan in data["looks"].items()}


def _stopped(data: Mapping[str, Any]) -> Stopped:
    if data["by"] not in (CANARY, UNTIL_DECIDED):
        raise ValueError(f"by is {data['by']!r}")
    return Stopped(data["by"], str(data["check"]), str(data["after"]))


@dataclass(frozen=True)
class Run:
    """A manifest with the records of its tasks, in task order; tasks that have not run have none."""

    manifest: Manifest
    records: tuple[Record, ...] = field(default=(), repr=False)

    @cached_property
    def cells(self) -> dict[str, Cell]:
        """The cells by id, in the matrix's order."""
        return {cell.id: cell for cell in self.manifest.cells}

    @cached_property
    def names(self) -> dict[str, str]:
        """The cells' names by id."""
        return {cell.id: cell.name for cell in self.manifest.cells}

    @property
    def tasks(self) -> tuple[Task, ...]:
        return self.manifest.tasks

    @cached_property
    def _records(self) -> dict[str, Record]:
        return {record.key: record for record in self.records}

    @cached_property
    def _tasks_of(self) -> dict[str, tuple[Task, ...]]:
        return {cell: tuple(t for t in self.tasks if cell in t.cells) for cell in self.cells}

    @cached_property
    def _task_at(self) -> dict[tuple[str, str, str], Task]:
        return {(cell, task.runner, task.variant): task for task in self.tasks for cell in task.cells}

    def cell(self, cell: str) -> Cell:
        return self.cells[cell]

    def record(self, key: str | None) -> Record | None:
        """The record of a task's key; None for a task that has none, and for no key."""
        return self._records.get(key) if key is not None else None

    def tasks_of(self, cell: str) -> tuple[Task, ...]:
        """The tasks that measure a cell, in task order. Raises KeyError for an unknown id."""
        return self._tasks_of[cell]

    def task_at(self, cell: str, runner: str, variant: str) -> Task | None:
        return self._task_at.get((cell, runner, variant))

    def done(self) -> list[tuple[Record, Task]]:
        """The records with their tasks, in task order; those of other tasks are left out."""
        return [(self._records[task.key], task) for task in self.tasks if task.key in self._records]

    def missing(self) -> list[Task]:
        """The tasks without a record."""
        return [task for task in self.tasks if task.key not in self._records]


@dataclass(frozen=True)
class RunDir:
    """The files of one run."""

    path: Path

    @property
    def manifest_path(self) -> Path:
        return self.path / "run.json"

    def record_path(self, key: str) -> Path:
        return self.path / "records" / f"{key}.json"

    @property
    def junit_path(self) -> Path:
        return self.path / "report.junit.xml"

    def write(self, record: Record) -> None:
        write_json(self.record_path(record.key), asdict(record))

    def write_manifest(self, manifest: Manifest) -> None:
        write_json(self.manifest_path, manifest.to_dict())

    def read(self, key: str) -> Record | None:
        """The record of a task, if there is one. Raises UsageError for a damaged one, or another task's."""
        path = self.record_path(key)
        if not path.exists():
            return None
        record = record_from_dict(read_json(path), path)
        if record.key != key:
            advice = "delete that file and run the matrix again"
            raise UsageError(f"{path} holds the record of task {record.key}; {advice}.")
        return record

    def manifest(self) -> Manifest:
        """Raises UsageError for no run directory, another version, or parts that do not fit together."""
        if not self.path.is_dir():
            advice = "give the folder that `kvbench run` printed"
            raise UsageError(f"{self.path} is not a run directory; {advice}.")
        return manifest_from_dict(read_json(self.manifest_path), self.manifest_path)

    def load(self) -> Run:
        """The whole run. Raises UsageError as `manifest` and `read` do."""
        manifest = self.manifest()
        found = (self.read(task.key) for task in manifest.tasks)
        return Run(manifest, tuple(record for record in found if record is not None))
